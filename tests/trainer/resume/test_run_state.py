"""A run that stopped and goes on is, batch by batch and bit by bit, the run that never stopped."""

import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron.trainer.resume import rng_state, run_state
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import WHOLE, every_nth
from tests.trainer.layouts import QUIET, Layout, make_trainer
from tests.trainer.modules import Data, Small
from tests.trainer.resumed_runs import LOADERS, difference, run

pytestmark = [
    pytest.mark.filterwarnings(QUIET),
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning"),
    pytest.mark.filterwarnings("ignore:this checkpoint is saved after .* within the .* of an optimizer step"),
]
ONE = Layout()
POINTS = ("batch 2", "batch 6", "validation 3", "epoch 0", "batch 8")
READ_ONCE = ("noisy", "stream", "stream of workers", "stateful stream", "own state")
ELSEWHERE = ("own states", "noisy workers", "own generator, no workers")
HERE = [name for name in LOADERS if name not in ELSEWHERE]
OPTIONS: dict[str, Any] = {"validates": True, "val_check_interval": 2}


def differences(layout: Layout, data: str, folder: Path, points: tuple[str, ...], options: dict[str, Any]) -> list[str]:
    """For each checkpoint of a run, how the run resumed from it differs."""
    options = options | {"asks_for_steps": "stream" not in data}
    full = run(layout, data, folder, frozenset(points), **options)
    saved = [point for point in points if (folder / f"{point}.ckpt").exists()]
    resumed = {point: run(layout, data, resumed_from=folder / f"{point}.ckpt", seed=77, **options) for point in saved}
    return [f"{point}: {found}" for point in saved if (found := difference(resumed[point], full))] + [
        f"{point} was not saved" for point in points if point not in saved
    ]


def one_of(points: tuple[str, ...], turn: int) -> tuple[str, ...]:
    """One of the points, another at each turn, so that all come over the turns; all of them under --whole."""
    return points if WHOLE in os.environ else (points[turn % len(points)],)


@pytest.mark.matrix
@pytest.mark.parametrize("data", HERE)
def test_a_resumed_run_equals_the_run_that_was_not_interrupted(data: str, tmp_path: Path) -> None:
    """With workers, cosine schedules, several loaders; within an epoch, at its end, at and before a validation."""
    # A batch that was taken before the save comes again: what draws as it is read, or was read for good, is another.
    points = one_of(POINTS if data in READ_ONCE else (*POINTS, "taken 6"), HERE.index(data))
    [found] = run_on_ranks(1, differences, ONE, data, tmp_path, points, OPTIONS, init=False)
    assert found == []


@pytest.mark.parametrize(
    ("data", "options", "points"),
    [
        (
            "shuffled",
            {"accumulate_grad_batches": 2},
            ("batch 1", "batch 3", "epoch 0", "batch 8", "taken 4"),
        ),
        ("shuffled", {"max_steps": 12, "max_epochs": -1, "validates": True}, ("epoch 0", "taken 7", "taken 8")),
        ("workers", {"limit_train_batches": 5, "validates": True}, ("batch 2", "batch 4", "validation 4", "batch 5")),
        ("shuffled", {"limit_train_batches": 5, "max_steps": 12, "max_epochs": -1}, ("batch 4", "epoch 0", "batch 6")),
        ("stream", {"max_steps": 11, "max_epochs": -1, "validates": True}, ("batch 6", "validation 6", "epoch 0")),
        ("several", {"check_val_every_n_epoch": None, "val_check_interval": 4, "validates": True}, ("batch 3",)),
        ("shuffled", {"num_sanity_val_steps": 2, "validates": True}, ("batch 2", "epoch 0")),
    ],
)
def test_it_does_under_the_trainers_options(
    data: str, options: dict[str, Any], points: tuple[str, ...], tmp_path: Path
) -> None:
    [found] = run_on_ranks(1, differences, ONE, data, tmp_path, tuple(every_nth(points, 2)), options, init=False)
    assert found == []


MANY = {
    "dp2 pp2": (Layout(world=4, pp=2, microbatches=2), "noisy"),
    "pp2": (Layout(world=2, pp=2, microbatches=2), "shuffled"),
    "dp2 several": (Layout(world=2), "several"),
    "dp2 stream": (Layout(world=2), "stream"),
    "dp2 states": (Layout(world=2), "own states"),
    "dp2 workers": (Layout(world=2), "workers"),
    "microbatches": (Layout(microbatches=2), "noisy"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", every_nth(MANY, 2))
def test_it_does_on_many_ranks(name: str, tmp_path: Path) -> None:
    layout, data = MANY[name]
    options = OPTIONS | ({"draws": False} if data == "noisy" else {})
    points = one_of(POINTS, HERE.index(data) if data in HERE else 0)
    for found in run_on_ranks(layout.world, differences, layout, data, tmp_path, points, options, init=False):
        assert found == []


def saved_again(data: str, point: str, folder: Path) -> dict[str, str]:
    """How runs differ that go on from what a resumed run saved, most of it before its first batch was trained on."""
    options: dict[str, Any] = {"validates": True, "num_sanity_val_steps": 1, "asks_for_steps": "stream" not in data}
    options |= {"val_check_interval": 2}
    full = run(ONE, data, folder, frozenset({point}), **options)
    again, points = folder / "again", frozenset({"sanity", "start", "validation 5", "begin 1"})
    run(ONE, data, again, points, resumed_from=folder / f"{point}.ckpt", seed=77, **options)
    return {
        path.stem: difference(run(ONE, data, resumed_from=path, seed=78, **options), full)
        for path in sorted(again.iterdir())
    }


@pytest.mark.parametrize(
    ("data", "point", "again"),
    every_nth(
        [
            ("shuffled", "start", "sanity, start, validation 5, begin 1"),
            ("workers", "begin 0", "start, validation 5, begin 1"),
            ("shuffled", "batch 3", "start, validation 5, begin 1"),
            ("own generator", "epoch 0", "sanity, start, begin 1"),
            ("own generator, no workers", "begin 0", "start, validation 5, begin 1"),
            ("even", "batch 5", "start, validation 5, begin 1"),
            ("noisy", "batch 6", "sanity, start, begin 1"),
            ("several", "batch 3", "start, validation 5, begin 1"),
            ("stream", "epoch 0", "sanity, start, begin 1"),
            ("stateful stream", "batch 2", "start, validation 5, begin 1"),
        ],
        2,
    ),
)
def test_what_a_resumed_run_saves_is_as_exact(data: str, point: str, again: str, tmp_path: Path) -> None:
    """`batch 3` and `batch 5`: a validation is made up. Lightning checks none where it goes on within an epoch."""
    [found] = run_on_ranks(1, saved_again, data, point, tmp_path, init=False)
    assert (found.keys(), set(found.values())) == (set(again.split(", ")), {""}), found


def loaded_after(point: str, folder: Path) -> tuple[list[int], list[int]]:
    """The rows that a resumed run loads, and those that it trains on."""
    run(ONE, "shuffled", folder, frozenset({point}))
    resumed = run(ONE, "shuffled", resumed_from=folder / f"{point}.ckpt")
    return resumed.loaded, [row for rows, _ in resumed.batches.values() for row in rows]


def test_what_was_trained_on_is_not_loaded_again(tmp_path: Path) -> None:
    [(loaded, trained)] = run_on_ranks(1, loaded_after, "batch 2", tmp_path, init=False)
    assert loaded == trained and len(loaded) == 26 - 12 + 26


def without(what: str, folder: Path) -> str:
    """How a run differs that was resumed with a part of this left out."""
    full = run(ONE, "shuffled", folder, frozenset({"batch 2"}))
    if what == "everything":
        run_state.ResumeState.from_checkpoint = staticmethod(lambda *_: None)  # type: ignore[method-assign]
    elif what == "generators":
        rng_state.set_states = lambda saved: None
    elif what == "position":
        run_state.ResumeState.restore_position = lambda self, reader: None  # type: ignore[method-assign]
    # Of this process alone, which ends with the test.
    return difference(run(ONE, "shuffled", resumed_from=folder / "batch 2.ckpt", seed=77), full)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before:UserWarning")
@pytest.mark.parametrize("what", ["everything", "generators", "position", "nothing"])
def test_every_part_of_it_is_needed(what: str, tmp_path: Path) -> None:
    [found] = run_on_ranks(1, without, what, tmp_path, init=False)
    assert bool(found) == (what != "nothing")


def draws_of_workers(folder: Path) -> tuple[str, str]:
    """How runs differ whose workers draw, resumed within an epoch and at its end."""
    full = run(ONE, "noisy workers", folder, frozenset({"batch 2", "epoch 0"}))
    within, at_end = (
        run(ONE, "noisy workers", resumed_from=folder / f"{point}.ckpt") for point in ("batch 2", "epoch 0")
    )
    return difference(within, full), difference(at_end, full)


def test_workers_redraw_within_an_epoch_and_alike_from_the_next_one_on(tmp_path: Path) -> None:
    [(within, at_end)] = run_on_ranks(1, draws_of_workers, tmp_path, init=False)
    assert within.startswith("batch 3: loss") and at_end == ""


def mixed_up(folder: Path) -> list[str]:
    """The warning of a checkpoint within an optimizer step."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        run(ONE, "in order", folder, frozenset({"batch 2"}), accumulate_grad_batches=2)
    return [str(warning.message) for warning in shown if "the gradients so far are not in it" in str(warning.message)]


def test_a_checkpoint_within_an_optimizer_step_is_warned_of(tmp_path: Path) -> None:
    [shown] = run_on_ranks(1, mixed_up, tmp_path, init=False)
    assert len(shown) == 1 and "after 3 batches" in shown[0]


class Seen(L.Callback):
    """Notes the batches of training by the sum of their rows."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.sums.append(float(batch[0].sum()))


def seen_by(folder: Path, max_steps: int, ckpt_path: str | None) -> list[float]:
    seen, saves = Seen(), ModelCheckpoint(folder, filename="{step}")
    trainer = make_trainer(Layout(), max_steps=max_steps, enable_checkpointing=True, callbacks=[seen, saves])
    trainer.fit(Small(), Data(), ckpt_path=ckpt_path)
    return seen.sums


def cut_short(folder: Path) -> tuple[list[float], list[float]]:
    first = seen_by(folder / "first", 2, None)
    rest = seen_by(folder / "rest", 6, str(folder / "first" / "step=2.ckpt"))
    return first + rest, seen_by(folder / "whole", 6, None)


@pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning")
def test_what_was_saved_at_the_end_of_a_run_that_max_steps_cut_short_goes_on_within_its_epoch(tmp_path: Path) -> None:
    [(found, wanted)] = run_on_ranks(1, cut_short, tmp_path, init=False)
    assert len(set(wanted)) == 4 and found == wanted
