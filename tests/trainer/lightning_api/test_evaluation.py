"""Everything of a Trainer besides one fit: validate, test, predict, several fits, other strategies in the process."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_megatron import MegatronStrategy
from lightning_megatron.mesh import ambient_mesh
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.trainer import modules
from tests.trainer.fits import parts_apart, weights
from tests.trainer.layouts import PLAIN, QUIET, Layout, make_trainer
from tests.trainer.modules import Data

TOLERANCE = 1e-11
LAYOUTS = {
    "pp2": Layout(world=2, pp=2, microbatches=2),
    "pp2 dp2": Layout(world=4, pp=2, microbatches=2),
    "tp2": Layout(world=2, tp=2),
}


class Greedy(modules.Measured):
    """Predicts by a loop of calls, each on what the one before gave; returns what shows that it saw true values."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = batch[0]
        for _ in range(3):
            chosen = self.logits(inputs).argmax(-1)
            # A branch on a value: only right where every stage has the real output.
            inputs = inputs + 1.0 if chosen.sum() > len(inputs) else inputs - 0.5
        return inputs

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = torch.nn.functional.cross_entropy(self.logits(batch[0]), batch[1])
        self.log("test_loss", loss, batch_size=len(batch[0]))
        return loss


def session(layout: Layout) -> dict[str, Any]:
    """What a user does in a notebook: one module through several loops and Trainers."""
    module = Greedy()
    found: dict[str, Any] = {}
    trainer = make_trainer(layout, max_epochs=1)
    found["before"] = trainer.validate(module, Data(), verbose=False)
    trainer.fit(module, Data())
    found["fitted"] = weights(module)
    found["validated"] = trainer.validate(module, Data(), verbose=False)
    found["tested"] = trainer.test(module, Data(), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, Data())
    found["fitted on"] = weights(module)
    again = make_trainer(layout, max_epochs=1, accumulate_grad_batches=2)
    again.fit(module, Data())
    found["another trainer"] = weights(module)
    again.fit_loop.max_epochs = 2
    again.fit(module, Data())
    found["fitted twice"] = weights(module)
    predicted = again.predict(module, Data())
    assert predicted is not None
    found["predicted"] = predicted
    return found


@pytest.mark.parametrize("name", every_nth(LAYOUTS, 2))
def test_loops_one_after_the_other_give_what_they_give_on_one_device(name: str) -> None:
    layout = LAYOUTS[name]
    [wanted] = run_on_ranks(1, session, PLAIN, init=False)
    ranks = run_on_ranks(layout.world, session, layout, init=False, timeout=90)
    assert wanted["before"] != wanted["validated"] and len(wanted["predicted"]) == 4
    for rank, found in enumerate(ranks):
        for key in ("before", "validated", "tested"):
            [ours], [theirs] = found[key], wanted[key]
            assert ours == pytest.approx(theirs, abs=TOLERANCE), (rank, key)
        for key in ("fitted", "fitted on", "another trainer", "fitted twice"):
            assert parts_apart(found[key], wanted[key]) < TOLERANCE
        if layout.dp == 1:
            torch.testing.assert_close(found["predicted"], wanted["predicted"], rtol=0, atol=TOLERANCE)
    if layout.dp == 2:
        # Each dp rank predicts its own rows; its stages agree.
        by_dp_rank = [ranks[rank]["predicted"] for rank in (0, 1)]
        for stage, found in enumerate(ranks[2:]):
            torch.testing.assert_close(found["predicted"], by_dp_rank[stage], rtol=0, atol=0)
        joined = [torch.cat(pair) for pair in zip(*by_dp_rank, strict=True)]
        torch.testing.assert_close(joined, wanted["predicted"], rtol=0, atol=TOLERANCE)


def other_strategies_after_ours() -> dict[str, Any]:
    found: dict[str, Any] = {}
    layout = Layout(world=2, pp=2, microbatches=2)
    make_trainer(layout).fit(modules.Measured(), Data())
    assert ambient_mesh().sizes.world == 1, "the mesh stayed ambient after the run"

    by_name = make_trainer(layout, strategy="megatron", use_distributed_sampler=True, limit_val_batches=0)
    assert isinstance(by_name.strategy, MegatronStrategy)
    module = modules.Measured()
    by_name.fit(module, Seen(module))
    found["megatron"] = [sorted(epoch) for epoch in module.rows_seen]

    ddp = make_trainer(layout, strategy=DDPStrategy(), use_distributed_sampler=True, limit_val_batches=0)
    module = modules.Measured()
    ddp.fit(module, Seen(module))
    found["ddp"] = [sorted(epoch) for epoch in module.rows_seen]
    found["ddp weights"] = weights(module)
    return found


class Seen(L.LightningDataModule):
    """Hands out row numbers with the samples, and lets the module write them down."""

    def __init__(self, module: L.LightningModule) -> None:
        super().__init__()
        rows: list[list[int]] = []
        module.rows_seen = rows  # type: ignore[assignment]
        module.on_train_epoch_start = lambda: rows.append([])  # type: ignore[method-assign]
        module.on_train_batch_start = lambda batch, i: rows[-1].extend(batch[2].int().tolist())  # type: ignore[method-assign]

    def train_dataloader(self) -> Any:
        inputs, classes, _ = modules.samples(24).tensors
        numbered = torch.utils.data.TensorDataset(inputs, classes, torch.arange(24.0, dtype=torch.float64))
        return torch.utils.data.DataLoader(numbered, batch_size=4)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


@pytest.mark.filterwarnings(QUIET)
def test_another_strategy_in_the_process_finds_nothing_of_ours_left() -> None:
    first, second = run_on_ranks(2, other_strategies_after_ours, init=False)
    # Every sample comes once an epoch: with Lightning's sampler in another order each epoch, with ours in the loader's.
    for name in ("megatron", "ddp"):
        for ours, theirs in zip(first[name], second[name], strict=True):
            assert sorted(ours + theirs) == list(range(24)) and ours != theirs
    assert first["ddp"][0] != first["ddp"][1]
    assert first["megatron"] == [[*range(4), *range(8, 12), *range(16, 20)]] * 2
    assert parts_apart(first["ddp weights"], second["ddp weights"]) == 0


def loader_of_one_replica() -> list[list[int]]:
    module = modules.Small()
    trainer = make_trainer(Layout(world=2, pp=2, microbatches=2), use_distributed_sampler=True, limit_val_batches=0)
    trainer.fit(module, Seen(module))
    return module.rows_seen  # type: ignore[return-value]


def test_the_loader_of_a_single_dp_rank_is_left_as_the_user_made_it() -> None:
    first, second = run_on_ranks(2, loader_of_one_replica, init=False)
    assert first == second == [list(range(24))] * 2
