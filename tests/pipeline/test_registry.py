"""The registry of schedules: what each makes, where it wants the stages, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.cli.main import main
from lightning_megatron.cli.plan_layout import with_layout
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.mesh import Sizes
from lightning_megatron.pipeline.bubble import timeline_of
from lightning_megatron.pipeline.lower import rank_of_stage
from lightning_megatron.pipeline.plans import training_plan
from lightning_megatron.pipeline.registry import (
    SCHEDULES,
    ScheduleName,
    bubble_formula,
    order_of,
    overlapped_forwards,
    placement_of,
    schedule_faults,
    spec_of,
)
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.schedules.dualpipe_v import dualpipe_v
from lightning_megatron.pipeline.schedules.gpipe import gpipe
from lightning_megatron.pipeline.schedules.interleaved import interleaved_one_f_one_b
from lightning_megatron.pipeline.schedules.one_f_one_b import one_f_one_b
from lightning_megatron.pipeline.schedules.zero_bubble import zb_h1, zb_v
from lightning_megatron.pipeline.simulate import Costs, play
from lightning_megatron.planner.pipeline_load import saved_by_chunk, step_seconds
from lightning_megatron.planner.presets import PRESETS
from lightning_megatron.planner.run import Run, faults_of
from lightning_megatron.trainer.config import PipelineConfig

NAMES: tuple[Any, ...] = get_args(ScheduleName)


def schedule(name: Any, pp: int = 4, chunks: int = 1, microbatches: int = 6, group_size: int = 0) -> Schedule:
    return Schedule(name=name, pp=pp, chunks=chunks, microbatches=microbatches, group_size=group_size)


def test_each_name_makes_its_order() -> None:
    sizes = {"pp": 4, "microbatches": 6}
    assert order_of(schedule("gpipe", chunks=3)) == gpipe(chunks=3, **sizes)
    assert order_of(schedule("1f1b")) == one_f_one_b(**sizes)
    assert order_of(schedule("interleaved", chunks=2)) == interleaved_one_f_one_b(chunks=2, group_size=4, **sizes)
    in_fives = interleaved_one_f_one_b(chunks=2, group_size=5, **sizes)
    assert order_of(schedule("interleaved", chunks=2, group_size=5)) == in_fives
    assert in_fives != interleaved_one_f_one_b(chunks=2, group_size=4, **sizes)
    assert order_of(schedule("zb_h1")) == zb_h1(**sizes)
    assert order_of(schedule("zb_v", chunks=2)) == zb_v(**sizes)
    assert order_of(schedule("dualpipe_v", pp=3, chunks=2)) == dualpipe_v(pp=3, microbatches=6)[0]


def test_a_schedule_is_a_key() -> None:
    assert len({schedule("1f1b"), schedule("1f1b"), schedule("zb_h1")}) == 2


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    pp=st.integers(0, 5),
    chunks=st.integers(0, 3),
    microbatches=st.integers(0, 12),
    group_size=st.integers(-1, 8),
)
def test_what_has_no_faults_runs_where_the_mesh_puts_its_stages_and_the_rest_is_refused(
    name: ScheduleName, pp: int, chunks: int, microbatches: int, group_size: int
) -> None:
    chosen = schedule(name, pp, chunks, microbatches, group_size)
    if faults := schedule_faults(chosen):
        with pytest.raises(ValueError) as caught:
            order_of(chosen)
        assert str(caught.value) == "; ".join(faults)
        return
    order = order_of(chosen)
    play(order)
    sizes = Sizes(world=pp, pp=pp, vp=chunks, placement=placement_of(name))
    assert rank_of_stage(order) == tuple(map(sizes.pp_rank_of, range(pp * chunks)))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_sizes_without_faults_and_any_microbatches_fit_them(name: ScheduleName) -> None:
    chunks = SCHEDULES[name].min_chunks
    assert not any(schedule_faults(schedule(name, chunks=chunks, microbatches=m)) for m in range(1, 20))


@pytest.mark.parametrize(
    ("chosen", "faults"),
    [
        (
            schedule("1f1b", chunks=2),
            ["chunks (2) must be 1 for schedule 1f1b; use 1, or schedule gpipe, interleaved, zb_v or dualpipe_v"],
        ),
        (
            schedule("zb_h1", chunks=3),
            ["chunks (3) must be 1 for schedule zb_h1; use 1, or schedule gpipe or interleaved"],
        ),
        (
            schedule("zb_v", chunks=1),
            ["chunks (1) must be 2 for schedule zb_v; use 2, or schedule gpipe, 1f1b or zb_h1"],
        ),
        (
            schedule("interleaved"),
            ["chunks (1) must be at least 2 for schedule interleaved; use 2 or more, or schedule gpipe, 1f1b or zb_h1"],
        ),
        (
            schedule("interleaved", pp=1, chunks=2),
            [
                "pp (1) must be at least 2 for schedule interleaved; use 2 or more, or schedule gpipe, zb_v or "
                "dualpipe_v"
            ],
        ),
        (
            schedule("interleaved", chunks=2, group_size=3),
            ["group_size (3) must be at least pp (4); use 0, which means 4, or 4 or more"],
        ),
        (
            schedule("gpipe", group_size=4),
            ["group_size (4) belongs to schedule interleaved; use 0 with schedule gpipe"],
        ),
        (
            schedule("2f2b", pp=0),
            ["schedule ('2f2b') must be one of gpipe, 1f1b, interleaved, zb_h1, zb_v, dualpipe_v"],
        ),
    ],
)
def test_a_fault_says_the_thing_the_rule_and_the_way_out(chosen: Schedule, faults: list[str]) -> None:
    assert schedule_faults(chosen) == faults


def test_all_faults_are_reported_at_once() -> None:
    chosen = schedule("zb_v", chunks=3, microbatches=0, group_size=2)
    assert schedule_faults(chosen) == [
        "microbatches (0) must be at least 1",
        "chunks (3) must be 2 for schedule zb_v; use 2, or schedule gpipe or interleaved",
        "group_size (2) belongs to schedule interleaved; use 0 with schedule zb_v",
    ]
    assert schedule_faults(replace(chosen, chunks=2, microbatches=1, group_size=0)) == []


def test_faults_of_different_sizes_are_reported_together() -> None:
    errors = schedule_faults(Schedule(name="zb_v", pp=0, chunks=3, microbatches=0, group_size=2))
    assert [fault.split(" must")[0].split(" belongs")[0] for fault in errors] == [
        "pp (0)",
        "microbatches (0)",
        "chunks (3)",
        "group_size (2)",
    ]


def test_an_unregistered_name_is_refused_everywhere_with_the_known_names(capsys: pytest.CaptureFixture[str]) -> None:
    known = "gpipe, 1f1b, interleaved, zb_h1, zb_v, dualpipe_v"
    unknown = schedule("hanayo", chunks=2, microbatches=8)
    preset = PRESETS["llama3_8b"]
    sizes = Sizes(world=4, pp=4, vp=2)
    run = Run(model=preset.model, lengths=preset.lengths, sizes=sizes, global_batch_size=8, schedule_name="hanayo")
    lookups: dict[str, Callable[[], object]] = {
        "registry": lambda: spec_of("hanayo"),
        "placement": lambda: placement_of("hanayo"),
        "order": lambda: order_of(unknown),
        "pairs": lambda: overlapped_forwards(unknown),
        "formula": lambda: bubble_formula(unknown, Costs()),
        "timeline": lambda: timeline_of(unknown, Costs()),
        "program": lambda: training_plan(unknown),
        "saved for backward": lambda: saved_by_chunk(unknown, 0),
        "time": lambda: step_seconds(unknown, [1.0] * 4, [2.0] * 4),
        "configuration": lambda: PipelineConfig(schedule="hanayo"),
    }
    for what, look_up in lookups.items():
        with pytest.raises(ValueError, match=rf"'hanayo'.* must be one of (auto, )?{known}") as caught:
            look_up()
        assert "hanayo" in str(caught.value), what
    assert any(f"schedule ('hanayo') must be one of {known}" in fault for fault in faults_of(run))
    with pytest.raises(UsageError, match=rf"schedule \('hanayo'\) must be one of {known}"):
        with_layout(run, "tp=1,schedule=hanayo")
    assert main(["schedule", "--pp", "4", "--microbatches", "8", "--schedule", "hanayo"]) == 2
    assert f"'hanayo') must be one of {known}" in capsys.readouterr().err
