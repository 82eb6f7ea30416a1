"""The timeline of a step has everything that every rank did, in an order that can have been, and changes nothing."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lightning_megatron import ConfigurationError, MoEConfig, PipelineConfig, RouterConfig
from lightning_megatron.metrics.step_timeline import BACKWARD, CLIP, DATA, FORWARD, GATHER, OPTIMIZER, REDUCE
from lightning_megatron.pipeline.lower import P2PBatch
from lightning_megatron.pipeline.plans import training_plan
from lightning_megatron.pipeline.schedule import Action
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.trainer.callbacks import MemoryMonitor, StepTimeline, ThroughputMonitor
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.trainer.callbacks.small_gpt import CONFIG, LAYOUTS, train
from tests.trainer.layouts import QUIET, Layout

pytest.importorskip("matplotlib")

pytestmark = pytest.mark.filterwarnings(QUIET)
AFTER = [REDUCE, CLIP, OPTIMIZER, GATHER]
Event = dict[str, Any]


def watched(layout: Layout, folder: str, options: dict[str, Any]) -> list[float]:
    """Losses of a run with all three callbacks."""
    callbacks = [
        ThroughputMonitor(every_n_batches=2, device_peak_flops=1e12),
        MemoryMonitor(),
        StepTimeline(step=2, folder=folder),
    ]
    return train(layout, callbacks, Path(folder) / "logs", **options)[0]


def bare(layout: Layout, options: dict[str, Any]) -> list[float]:
    return train(layout, [], **options)[0]


def traced(folder: Path) -> tuple[dict[int, list[Event]], dict[int, str], float]:
    """Of each process of the trace its events, in order, and its name; by how many microseconds clocks may be wrong."""
    trace = json.loads((folder / "step_2.json").read_text())
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    events = {pid: [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == pid] for pid in names}
    return events, names, trace["otherData"]["clock_error_seconds"] * 1e6


Watched = Callable[[str], tuple[Path, list[list[float]]]]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """Runs a layout once under all callbacks: the folder that it wrote to, and the losses of each rank."""
    seen: dict[str, tuple[Path, list[list[float]]]] = {}

    def run(name: str) -> tuple[Path, list[list[float]]]:
        if name not in seen:
            folder, layout = tmp_path_factory.mktemp(name), LAYOUTS[name]
            seen[name] = folder, run_on_ranks(layout.world, watched, layout, str(folder), {}, init=False, timeout=120)
        return seen[name]

    return run


def schedule_of(layout: Layout) -> Schedule:
    pipeline = PipelineConfig(schedule=layout.schedule)
    return pipeline.schedule_of(pp=layout.pp, vp=layout.vp, microbatches=layout.microbatches)


@pytest.mark.matrix
@pytest.mark.parametrize("name", every_nth(LAYOUTS, 2))
def test_losses_are_to_the_bit_those_of_a_run_that_nobody_watches(name: str, run_of: Watched) -> None:
    layout = LAYOUTS[name]
    folder, found = run_of(name)
    assert found == run_on_ranks(layout.world, bare, layout, {}, init=False)
    assert len(found[0]) == 4 and found[0][0] != found[0][1]
    # Both files are there and whole.
    events, _, _ = traced(run_of(name)[0])
    assert len(events) >= layout.world
    texts = [element.text or "" for element in ElementTree.parse(folder / "step_2.svg").iter()]
    rows = [text for text in texts if text.startswith(("rank ", "pipeline rank "))]
    schedules = 2 * layout.pp if layout.pp > 1 else layout.world + (layout.microbatches > 1)
    assert len(rows) == schedules


@pytest.mark.parametrize("name", ["one", "tp2", "dp2", "pp2", "interleaved", "zb_h1"])
def test_a_step_under_a_schedule_has_each_action_of_the_plan_once(name: str, run_of: Watched) -> None:
    layout = LAYOUTS[name]
    events, names, error = traced(run_of(name)[0])
    program = training_plan(schedule_of(layout))
    for rank in range(layout.world):
        # The last stage is on the first rank.
        [pp_rank] = {program.ranks[int(stage)] for stage in names[rank].split("stages ")[1].split()}
        plan = program.plan[pp_rank]
        wanted = Counter(str(step) for step in plan if isinstance(step, Action))
        for step in plan:
            if isinstance(step, P2PBatch):
                wanted += Counter(map(str, (*step.awaited, *step.released)))
        assert Counter(e["name"] for e in events[rank]) == wanted + Counter([DATA, "sends", *AFTER])
        own = {e["name"]: e for e in events[rank]}
        # The wait for data comes first, and what follows the schedule in its order; nothing overlaps.
        in_time = sorted(events[rank], key=lambda e: e["ts"])
        assert in_time[0]["name"] == DATA and [e["name"] for e in in_time[-4:]] == AFTER
        for one, two in pairwise(in_time):
            assert one["ts"] + one["dur"] <= two["ts"] + 1e-3
        assert all(e["dur"] > 0 for e in own.values())
    # One prediction, with the same computes, from the same moment on.
    assert (
        names[layout.world] == "predicted from measured costs: pipeline rank 0"
        and len(names) == layout.world + layout.pp
    )
    measured = [e for rank in range(layout.world) for e in events[rank] if e["cat"] in ("forward", "backward")]
    shown = [e for pid in range(layout.world, len(names)) for e in events[pid]]
    assert {e["name"] for e in shown} == {e["name"] for e in measured}
    assert min(e["ts"] for e in shown) == pytest.approx(min(e["ts"] for e in measured), abs=1e-3)
    assert error < 1e5


@pytest.mark.parametrize("name", ["pp2", "interleaved", "zb_h1"])
def test_no_rank_has_a_message_before_another_one_has_made_it(name: str, run_of: Watched) -> None:
    """As it must be where clocks are aligned."""
    layout = LAYOUTS[name]
    events, _, error = traced(run_of(name)[0])
    ends = {e["name"]: e["ts"] + e["dur"] for rank in range(2) for e in events[rank]}
    num_checked = 0
    for received, end in ends.items():
        for mark, makers, step in (("RF", "F", -1), ("RB", "BI", 1)):
            stage, found, microbatch = received.partition(mark)
            if found:
                [made] = [ends[own] for k in makers if (own := f"{int(stage) + step}{k}{microbatch}") in ends]
                assert end >= made - error
                num_checked += 1
    assert num_checked == 2 * (layout.pp * layout.vp - 1) * layout.microbatches


def under_ddp(folder: str) -> list[float]:
    return train(Layout(world=2), [StepTimeline(step=2, folder=folder)], strategy="ddp")[0]


@pytest.mark.parametrize("name", ["plain", "direct", "ddp"])
def test_without_a_schedule_it_is_forward_backward_and_optimizer(name: str, run_of: Watched, tmp_path: Path) -> None:
    if name == "ddp":
        run_on_ranks(2, under_ddp, str(tmp_path), init=False, timeout=120)
    events, names, _ = traced(tmp_path if name == "ddp" else run_of(name)[0])
    assert len(names) == (1 if name == "plain" else 2)
    wanted = [DATA, FORWARD, BACKWARD, OPTIMIZER]
    if name == "direct":
        # What sums gradients is a part of the backward.
        wanted = [DATA, FORWARD, BACKWARD, REDUCE, CLIP, OPTIMIZER, GATHER]
    for own in events.values():
        in_time = sorted(own, key=lambda e: e["ts"])
        assert [e["name"] for e in in_time] == wanted
        starts = {e["name"]: e["ts"] for e in in_time}
        ends = {e["name"]: e["ts"] + e["dur"] for e in in_time}
        assert ends[DATA] <= starts[FORWARD] < ends[FORWARD] <= starts[BACKWARD] < ends[BACKWARD] <= starts[OPTIMIZER]


def test_a_step_of_several_batches_has_a_schedule_for_each(tmp_path: Path) -> None:
    layout, options = LAYOUTS["pp2"], {"accumulate_grad_batches": 2}
    run_on_ranks(2, watched, layout, str(tmp_path), options, init=False, timeout=120)
    events, names, _ = traced(tmp_path)
    assert len(names) == 4
    for own in events.values():
        forwards = Counter(e["args"]["batch"] for e in own if e["cat"] == "forward")
        assert forwards == {0: layout.microbatches, 1: layout.microbatches}
    for rank in range(2):
        assert Counter(e["name"] for e in events[rank] if e["name"] in (DATA, OPTIMIZER)) == {DATA: 2, OPTIMIZER: 1}


def joint(folder: str) -> list[float]:
    moe = MoEConfig(router=RouterConfig(num_experts=4, top_k=2), ffn_hidden_size=16)
    layout = Layout(world=2, pp=2, microbatches=4, joint=True)
    return train(layout, [StepTimeline(step=2, folder=folder)], config=replace(CONFIG, moe=moe))[0]


def test_overlapped_forwards_and_backwards_are_drawn_and_not_predicted(tmp_path: Path) -> None:
    run_on_ranks(2, joint, str(tmp_path), init=False, timeout=120)
    events, names, _ = traced(tmp_path)
    assert len(names) == 2
    assert all(Counter(e["cat"] for e in own)["forward"] == 4 for own in events.values())


def test_a_run_that_ends_before_the_step_says_that_nothing_was_written(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="training ended after 4 steps, before step=9"):
        train(LAYOUTS["plain"], [StepTimeline(step=9, folder=str(tmp_path))])
    assert not list(tmp_path.iterdir())


def test_a_step_that_there_is_not_is_reported() -> None:
    with pytest.raises(ValueError, match=r"step \(0\) of StepTimeline must be at least 1"):
        StepTimeline(step=0)


def test_a_folder_that_is_a_file_is_reported_before_the_run(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    with pytest.raises(ConfigurationError, match=r"taken\) of StepTimeline is a file"):
        train(LAYOUTS["one"], [StepTimeline(step=1, folder=str(taken))])


def test_a_missing_matplotlib_is_reported_before_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # What the import system takes for "there is none".
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for layout in ("one", "plain"):
        with pytest.raises(ConfigurationError, match=r"StepTimeline draws .* 'lightning_megatron\[plot\]'"):
            train(LAYOUTS[layout], [StepTimeline(step=1, folder=str(tmp_path))])
    assert not list(tmp_path.iterdir())


def test_the_same_callback_records_every_fit(tmp_path: Path) -> None:
    timeline = StepTimeline(step=2, folder=str(tmp_path))
    train(LAYOUTS["plain"], [timeline])
    first = (tmp_path / "step_2.json").read_text()
    train(LAYOUTS["plain"], [timeline])
    assert (tmp_path / "step_2.json").read_text() != first
