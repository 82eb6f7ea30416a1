"""Rows that depend on each other are told of once at the start, whatever makes them so; the look leaves no trace."""

import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.nn import functional

from tests.harness.ranks import run_on_ranks
from tests.trainer.fits import Case, Trace, difference
from tests.trainer.layouts import PLAIN, Layout, make_trainer
from tests.trainer.modules import Data, Small

M2, DP2 = Layout(microbatches=2), Layout(world=2)
PP2, DP2PP2 = Layout(world=2, pp=2, microbatches=2), Layout(world=4, pp=2, microbatches=2)
COLLECTIVE = Layout(world=2, pp=2, microbatches=2, collective=True)
WHOLE = Layout(world=2, pp=2)


class Negatives(Small):
    """Each row is to be told from all others of the batch, by a loss of torch's that knows what it counts."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = self.logits(batch[0])
        return functional.cross_entropy(found @ found.T, torch.arange(len(found)))


class Confirmed(Negatives):
    """Says that each part may stand for itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "loss_reduction": "mean"}


class Gathered(Negatives):
    """Tells each row from those of all data-parallel ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = self.logits(batch[0])
        rows = self.all_gather(found, sync_grads=True).reshape(-1, found.shape[1])
        own = torch.arange(len(found)) + len(found) * self.global_rank
        return functional.cross_entropy(found @ rows.T, own)


class RootOfMean(Small):
    """A root of a mean, which no mean of roots is; a mean of it would be told to be one over rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        error = functional.mse_loss(self.logits(batch[0])[:, 0], batch[2])
        return {"loss": error.sqrt(), "loss_weight": len(batch[0])}


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class OwnNorm(Small):
    """Statistics of the batch in the chain, of which no module of torch tells."""

    def __init__(self) -> None:
        super().__init__()
        assert isinstance(self.net, nn.Sequential)
        self.net[1] = Centred()


class Masked(Small):
    """A mean over rows with a mask, which says what it is over; a batch has rows without any."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = functional.cross_entropy(self.logits(batch[0]), batch[1], reduction="none")
        return {"loss": (losses * batch[2]).sum() / batch[2].sum().clamp(min=1e-9), "loss_weight": batch[2].sum()}


class Noisy(Small):
    """Draws numbers for each row, and drops some in training."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs = functional.dropout(batch[0], 0.3, training=self.training)
        return functional.cross_entropy(self.logits(inputs + 0.1 * torch.randn_like(inputs)), batch[1])


class Teacher(Small):
    """A layer without gradients, which follows the model in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 8).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.before.weight, 0.1)
        return super().training_step(batch, batch_idx)


def told(layout: Layout, kind: type[L.LightningModule]) -> list[str]:
    """What this package warns of in a fit, but for losses that are taken for means over rows."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make_trainer(layout, max_epochs=2, limit_val_batches=0).fit(kind(), Data(24))
    starts = ("training_step moves", "the model of", f"the loss of {kind.__name__}.training_step is not")
    return sorted(str(one.message) for one in found if str(one.message).startswith(starts))


COUPLED = "the loss of {}.training_step is not made of its rows one by one"


@pytest.mark.parametrize(
    ("kind", "layout", "shown"),
    [
        (Negatives, M2, COUPLED.format("Negatives")),
        (Negatives, DP2, COUPLED.format("Negatives")),
        (Negatives, PP2, COUPLED.format("Negatives")),
        (Negatives, DP2PP2, COUPLED.format("Negatives")),
        # There the step has all rows, and the model's calls alone are cut.
        (Negatives, COLLECTIVE, ""),
        (Negatives, WHOLE, ""),
        (OwnNorm, M2, COUPLED.format("OwnNorm")),
        (OwnNorm, PP2, COUPLED.format("OwnNorm")),
        (OwnNorm, COLLECTIVE, "the model of OwnNorm computes rows of a batch together"),
        (RootOfMean, DP2, COUPLED.format("RootOfMean")),
        (Confirmed, DP2, ""),
        (Gathered, DP2, ""),
        (Masked, PP2, ""),
        (Masked, DP2, ""),
        (Noisy, PP2, ""),
        (Noisy, DP2, ""),
        (Teacher, M2, "training_step moves teacher.weight, once for each of the 2 parts"),
        (Teacher, DP2, ""),
    ],
)
def test_rows_that_depend_on_each_other_are_told(kind: type[L.LightningModule], layout: Layout, shown: str) -> None:
    *silent, found = sorted(run_on_ranks(layout.world, told, layout, kind, init=False), key=len)
    assert not any(silent)
    assert len(found) == bool(shown) and (not shown or found[0].startswith(shown)), found


class Counted(Logger):
    """Writes down what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    name = version = "counted"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.given.append(dict(metrics))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Nothing."""


class Keeps(Negatives):
    """Keeps all that a step can keep."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.by_index = 0, [0], {"calls": 0}
        self.error = torchmetrics.MeanSquaredError()
        self.dropout = nn.Dropout(0.5)
        self.late: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        self.seen.append(batch_idx)
        self.by_index["calls"] += 1
        if not self.training:
            self.attribute_of_evaluation = True
        self.error(batch[0][:, 0], batch[0][:, 1])
        batch[0].mul_(1.0)
        assert self.logger is not None
        self.logger.log_metrics({"calls": float(self.calls)})
        self.log("drawn", torch.rand(()))
        return super().training_step(batch, batch_idx)


def kept(layout: Layout) -> dict[str, Any]:
    logger, module = Counted(), Keeps()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer = make_trainer(layout, max_epochs=1, limit_val_batches=0, logger=logger)
        trainer.fit(module, Data(24))
    return {
        "told": sum("not made of its rows" in str(one.message) for one in found),
        "calls": module.calls,
        "seen": module.seen,
        "by_index": module.by_index,
        "updates": module.error._update_count,
        "total": int(module.error.total),
        "given": sum("calls" in given for given in logger.given),
        "attribute": "attribute_of_evaluation" in vars(module),
        "training": [child.training for child in module.modules()],
        "loggers": trainer.loggers == [logger],
    }


@pytest.mark.parametrize("layout", [DP2, M2], ids=["dp2", "m2"])
def test_the_look_at_rows_leaves_no_trace_in_the_module(layout: Layout) -> None:
    batches = range(3)
    seen = [0, *(batch for batch in batches for _ in range(layout.microbatches))]
    for rank, found in enumerate(run_on_ranks(layout.world, kept, layout, init=False)):
        assert found["told"] == (rank == 0)
        assert found["seen"] == seen
        assert found["calls"] == found["by_index"]["calls"] == found["updates"] == len(seen) - 1
        assert found["given"] == len(seen) - 1
        # Rows that the metric has counted, of which a data-parallel rank has its part.
        assert found["total"] == 24 // layout.world
        assert found["loggers"] and not found["attribute"] and all(found["training"])


def confirmed(layout: Layout) -> Trace:
    return Case(module=Masked, trainer={"limit_val_batches": 0}).run(layout)


def test_a_step_that_was_looked_at_goes_on_with_the_numbers_of_one_device() -> None:
    [wanted] = run_on_ranks(1, confirmed, PLAIN, init=False)
    for layout in (DP2, PP2, M2):
        for trace in run_on_ranks(layout.world, confirmed, layout, init=False):
            assert difference(trace, wanted) < 1e-12
