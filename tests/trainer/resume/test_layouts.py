"""A run that goes on under another layout sees the samples that were left, each once, and computes the same numbers."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_megatron import MegatronStrategy
from lightning_megatron.models import GPTModel
from lightning_megatron.trainer.config import ConfigurationError
from tests.harness import ranks
from tests.harness.ranks import RankFailed, run_on_ranks
from tests.harness.sample import every_nth
from tests.lightning_modules.corpus import config, data, write_corpus
from tests.trainer.fits import Parts, parts_apart, weights
from tests.trainer.layouts import QUIET, Layout, make_trainer
from tests.trainer.resumed_runs import Record, run, runs

pytestmark = [
    pytest.mark.filterwarnings(QUIET),
    pytest.mark.filterwarnings("ignore:this checkpoint is saved after .* within the .* of an optimizer step"),
]
ONE, DP2, DP4 = Layout(), Layout(world=2), Layout(world=4)
PP2 = Layout(world=2, pp=2, microbatches=2)
LAYOUTS = {"one": ONE, "dp2": DP2, "dp4": DP4, "pp2": PP2, "dp2 pp2": Layout(world=4, pp=2, microbatches=2)}
# Sums of float64 in another order, some steps on.
TOLERANCE = 1e-9
QUIETLY: dict[str, Any] = {"draws": False}


def by_dp_rank(records: list[Record], layout: Layout) -> list[Record]:
    """One record of each data-parallel rank: later stages read the same."""
    return records[: layout.dp]


def apart(resumed: list[Record], to: Layout, full: list[Record], origin: Layout, per: int = 1) -> str:
    """How the global batches of a resumed run differ from those of the whole run, `per` of which are one of its own."""
    ours, theirs = by_dp_rank(resumed, to), by_dp_rank(full, origin)
    for number, (_, loss) in ours[0].batches.items():
        wanted = range(number * per, (number + 1) * per)
        rows = sorted(row for record in ours for row in record.batches[number][0])
        expected = sorted(row for record in theirs for n in wanted for row in record.batches[n][0])
        if rows != expected:
            return f"batch {number}: samples {rows} and not {expected}"
        mean = sum(theirs[0].batches[n][1] for n in wanted)
        if per == 1 and abs(loss - mean) > TOLERANCE:
            return f"batch {number}: loss {loss} and not {mean}"
    if not ours[0].batches or ours[0].steps != theirs[0].steps:
        return f"{ours[0].steps} steps and not {theirs[0].steps}"
    shared = resumed[0].weights.keys() & full[0].weights.keys()
    furthest = max(float((resumed[0].weights[n][1] - full[0].weights[n][1]).abs().max()) for n in shared)
    return "" if furthest < TOLERANCE else f"weights by {furthest}"


def saved_and_resumed(
    origin: Layout, to: Layout, data: str, point: str, folder: Path
) -> tuple[list[Record], list[Record]]:
    """The records of a run, and of the run that went on from a checkpoint of it on another layout."""
    full = runs(origin, data, folder=folder, points=frozenset({point}), **QUIETLY)
    return full, runs(to, data, resumed_from=folder / f"{point}.ckpt", seed=77, **QUIETLY)


@pytest.mark.matrix
@pytest.mark.parametrize("point", ["batch 2", "epoch 0"])
@pytest.mark.parametrize(
    ("origin", "to", "data"),
    [
        ("dp2", "one", "even"),
        ("one", "dp4", "even"),
        ("dp2", "dp4", "even"),
        ("one", "dp2", "even, in order"),
        ("dp2", "dp2 pp2", "even"),
        ("pp2", "one", "even"),
    ],
)
def test_no_sample_comes_twice_or_never(origin: str, to: str, data: str, point: str, tmp_path: Path) -> None:
    full, resumed = saved_and_resumed(LAYOUTS[origin], LAYOUTS[to], data, point, tmp_path)
    assert apart(resumed, LAYOUTS[to], full, LAYOUTS[origin]) == ""


@pytest.mark.parametrize("data", ["even", "batch sampler"])
def test_another_number_of_batches_makes_up_the_same_step(data: str, tmp_path: Path) -> None:
    """Two batches of 4 a step, then one of 8: Lightning counts on in batches of 8. So with two of a batch sampler's."""
    points = frozenset({"batch 1"})
    full = runs(ONE, data, folder=tmp_path, points=points, accumulate_grad_batches=2, **QUIETLY)
    resumed = runs(DP2, data, resumed_from=tmp_path / "batch 1.ckpt", batch=8, seed=77, **QUIETLY)
    assert min(resumed[0].batches) == 1 and max(resumed[0].batches) == 5
    assert apart(resumed, DP2, full, ONE, per=2) == ""


@pytest.mark.parametrize("again", ["one", "dp2"])
def test_a_resumed_run_with_another_batch_size_saves_before_it_trains(again: str, tmp_path: Path) -> None:
    """Two batches of 4 a step, then one of 8, which saves at once; from there with either size."""
    points = frozenset({"batch 1"})
    full = runs(ONE, "even", folder=tmp_path, points=points, accumulate_grad_batches=2, **QUIETLY)
    start = {"folder": tmp_path, "points": frozenset({"start", "taken 1"})}
    runs(DP2, "even", resumed_from=tmp_path / "batch 1.ckpt", batch=8, seed=77, **start, **QUIETLY)
    if again == "dp2":
        resumed = runs(DP2, "even", resumed_from=tmp_path / "start.ckpt", batch=8, seed=78, **QUIETLY)
        assert apart(resumed, DP2, full, ONE, per=2) == ""
        later = runs(DP2, "even", resumed_from=tmp_path / "taken 1.ckpt", batch=8, seed=78, **QUIETLY)
        assert [one.batches for one in later] == [one.batches for one in resumed]
    else:
        resumed = runs(ONE, "even", resumed_from=tmp_path / "start.ckpt", accumulate_grad_batches=2, seed=78, **QUIETLY)
        assert apart(resumed, ONE, full, ONE) == "" and min(resumed[0].batches) == 2
        later = runs(ONE, "even", resumed_from=tmp_path / "taken 1.ckpt", accumulate_grad_batches=2, seed=78, **QUIETLY)
        assert apart(later, ONE, full, ONE) == "" and min(later[0].batches) == 2
        assert later[0].logged == resumed[0].logged == full[0].logged


def test_a_run_that_went_on_elsewhere_is_resumed_where_it_is_now(tmp_path: Path) -> None:
    """Saved on one dp rank, on two, once more on two, and on one: in one order all along."""
    full = runs(ONE, "even", folder=tmp_path, points=frozenset({"batch 0"}), **QUIETLY)
    came_from, folder = tmp_path / "batch 0.ckpt", tmp_path / "on"
    for layout, point in ((DP2, "batch 1"), (DP2, "batch 7"), (DP2, "batch 8"), (ONE, "batch 9")):
        resumed = runs(
            layout, "even", folder=folder, points=frozenset({point}), resumed_from=came_from, seed=77, **QUIETLY
        )
        assert apart(resumed, layout, full, ONE) == "", point
        came_from = folder / f"{point}.ckpt"


def refusal(layout: Layout, data: str, path: Path, batch: int) -> str:
    try:
        run(layout, data, resumed_from=path, batch=batch, asks_for_steps=False, **QUIETLY)
    except ConfigurationError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("data", "to", "batch", "shown"),
    [
        ("own states", "one", 4, "a state of its own on each data-parallel rank"),
        (
            "stream",
            "one",
            4,
            "give the loader (or its dataset) a state_dict that is the same on all data-parallel ranks",
        ),
        ("even", "dp2", 16, "where no batch of 16 samples"),
        ("workers", "one", 4, "not refused"),
        ("in order", "dp2", 4, "not refused"),
        ("several", "one", 4, "batch sizes of the training loaders changed"),
        ("even", "several", 4, "and this run has 2"),
    ],
)
def test_what_cannot_be_found_again_is_refused(data: str, to: str, batch: int, shown: str, tmp_path: Path) -> None:
    runs(DP2, data, folder=tmp_path, points=frozenset({"batch 2"}), asks_for_steps=False, **QUIETLY)
    layout, then = (DP2, "several") if to == "several" else (LAYOUTS[to], data)
    for said in run_on_ranks(layout.world, refusal, layout, then, tmp_path / "batch 2.ckpt", batch, init=False):
        assert shown in said


class Language(L.LightningModule):
    """A GPT with dropout, and a schedule that asks for the number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.model: GPTModel | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPTModel(config(hidden_dropout=0.1, attention_dropout=0.1, init_std=0.2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(**batch)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError("nothing is held out")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Losses(L.Callback):
    """Writes the loss of every batch to a file, saves after the fourth, and dies after the sixth if asked to."""

    def __init__(self, path: Path, checkpoint: Path, is_killed: bool) -> None:
        self.path, self.checkpoint, self.is_killed = path, checkpoint, is_killed

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        number = trainer.fit_loop.total_batch_idx
        with self.path.open("a") as file:
            file.write(f"{number} {float(outputs['loss']).hex()}\n")
        if number == 3 and not self.checkpoint.exists():
            trainer.save_checkpoint(self.checkpoint)
        if number == 5 and self.is_killed:
            assert isinstance(trainer.strategy, MegatronStrategy)
            # Two steps may be over before the fourth one's files are written.
            trainer.strategy.wait_for_checkpoint()
            os.kill(os.getpid(), signal.SIGKILL)


def language_run(layout: Layout, folder: Path, name: str, is_killed: bool, is_resumed: bool, seed: int) -> Parts:
    """Eight steps over text; the losses of rank r are in `name r`."""
    torch.manual_seed(seed)
    checkpoint = folder / "fourth.ckpt"
    module = Language()
    trainer = make_trainer(layout, limit_val_batches=0, max_steps=8, max_epochs=-1)
    trainer.callbacks.append(Losses(folder / f"{name} {trainer.global_rank}", checkpoint, is_killed))  # type: ignore[attr-defined]
    trainer.fit(module, data(folder, validation_fraction=0.0), ckpt_path=checkpoint if is_resumed else None)
    return weights(module)


def losses(path: Path) -> dict[int, float]:
    lines = [line.split() for line in path.read_text().splitlines()]
    return {int(number): float.fromhex(value) for number, value in lines}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Parts]]:
    """A run of dp 2 that was killed after six steps, and the weights of the run that was not."""
    folder = tmp_path_factory.mktemp("killed")
    write_corpus(folder)
    full = run_on_ranks(2, language_run, DP2, folder, "whole", False, False, 1, init=False)
    (folder / "fourth.ckpt").rename(folder / "of the whole run")
    with pytest.MonkeyPatch.context() as patch:
        # Each comes to its end by itself.
        patch.setattr(ranks, "GRACE_SECONDS", 60.0)
        with pytest.raises(RankFailed, match="SIGKILL"):
            run_on_ranks(2, language_run, DP2, folder, "killed", True, False, 1, init=False)
    assert losses(folder / "killed 0").keys() == set(range(6))
    return folder, full


def test_a_run_that_was_killed_goes_on_bit_by_bit(killed: tuple[Path, list[Parts]]) -> None:
    folder, full = killed
    resumed = run_on_ranks(2, language_run, DP2, folder, "resumed", False, True, 77, init=False)
    for rank in range(2):
        wanted = {number: loss for number, loss in losses(folder / f"whole {rank}").items() if number > 3}
        assert losses(folder / f"resumed {rank}") == wanted
        assert parts_apart(resumed[rank], full[rank]) == 0


@pytest.mark.parametrize(
    "layout", every_nth([ONE, DP4, Layout(microbatches=4), PP2, Layout(world=2, tp=2, sp=True)], 2)
)
def test_it_goes_on_alike_on_every_layout(layout: Layout, killed: tuple[Path, list[Parts]]) -> None:
    folder, full = killed
    name = f"on {layout.world} {layout.tp} {layout.pp} {layout.microbatches}"
    for parts in run_on_ranks(layout.world, language_run, layout, folder, name, False, True, 77, init=False):
        assert parts_apart(parts, full[0]) < TOLERANCE
    then = losses(folder / f"{name} 0")
    assert then.keys() == {4, 5, 6, 7}
    assert then == pytest.approx({n: loss for n, loss in losses(folder / "whole 0").items() if n > 3}, abs=TOLERANCE)
