"""What a module logs, by any name, at any place and in any kind of metric, is on every rank what one device logs."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.utilities import dim_zero_cat

from tests.harness.sample import diagonal
from tests.trainer.layouts import Layout
from tests.trainer.lightning_api.test_ledger import LAYOUTS, Case, Record, discrepancies, fit
from tests.trainer.modules import Small


class LogsAnywhere(Small):
    """Logs under names with slashes and blanks, before the call and after it, and in every hook that may."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = len(batch[0])
        self.log("before/the call", batch[0].mean(), on_step=True, on_epoch=True)
        self.log("before, summed", float(rows), reduce_fx="sum", on_step=True, on_epoch=True)
        loss = functional.cross_entropy(self.logits(batch[0]), batch[1])
        self.log("after", loss, on_step=True, on_epoch=True, prog_bar=True, logger=False)
        self.log("epoch only", loss, on_step=False, on_epoch=True)
        self.log_dict({"a": loss, "b": torch.tensor(2), "c": 3, "d": True})
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("batch start", float(batch_idx), on_step=True, on_epoch=True, batch_size=1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("before step", float(self.trainer.global_step))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("batch end", outputs["loss"], on_step=True, on_epoch=True, batch_size=1)

    def on_train_epoch_start(self) -> None:
        self.log("epoch start", float(self.current_epoch))

    def on_train_epoch_end(self) -> None:
        self.log("epoch end", self.trainer.callback_metrics["epoch only"] * 2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = functional.cross_entropy(self.logits(batch[0]), batch[1])
        self.log("val", loss, on_step=True, on_epoch=True)
        self.log("val max", batch[0].max(), reduce_fx="max")

    def on_validation_epoch_end(self) -> None:
        self.log("val epoch end", 4.0)


class Logs(L.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        module.log("callback/start", float(batch_idx))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("callback/end", float(batch_idx), on_step=True, on_epoch=True, batch_size=2)

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("callback/val", float(batch_idx), batch_size=3)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.log("callback/val end", 5.0)


class Spread(torchmetrics.Metric):
    """A metric of the user's own with a sum, a mean, an extreme and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("highest", torch.full((), -99.0, dtype=torch.float64), dist_reduce_fx="max")
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        values = values.detach().double()
        self.total += values.sum()
        self.highest = torch.maximum(self.highest, values.max())
        self.values.append(values)

    def compute(self) -> Tensor:
        values = dim_zero_cat(self.values).reshape(-1)
        return self.total + 10 * self.highest + values.square().sum()


class Listed(torchmetrics.Metric):
    """Reads its list as the list that `update` filled, which a needless sync would make a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        self.values.append(values.detach().double())

    def compute(self) -> Tensor:
        assert isinstance(self.values, list)
        return torch.stack([entry.mean() for entry in self.values]).sum()


class ReadsLists(Small):
    def __init__(self) -> None:
        super().__init__()
        self.listed = Listed()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.listed.update(self.logits(batch[0]))
        self.log("listed", self.listed)


class Metrics(Small):
    """Metrics of every kind of state: updated, called, logged as objects and as values, read in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.train_spread, self.val_spread = Spread(), Spread()
        self.many = torchmetrics.MetricCollection({"low": torchmetrics.MinMetric(), "high": torchmetrics.MaxMetric()})
        self.by_name = nn.ModuleDict({"sum": torchmetrics.SumMetric()})
        self.read: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.by_name["sum"].update(float(len(batch[0])))
        logits = self.logits(batch[0])
        losses = functional.cross_entropy(logits, batch[1], reduction="none")
        self.mean.update(losses.detach())
        self.train_spread(losses)
        self.many.update(losses.detach().float())
        self.log("spread", self.train_spread, on_step=False, on_epoch=True)
        self.log("rows", self.by_name["sum"], on_step=False, on_epoch=True)
        return losses.mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.read.append(float(self.train_spread.compute()))

    def on_train_epoch_end(self) -> None:
        # It counts in float32, in an order of its own.
        self.log("mean", round(float(self.mean.compute()), 4))
        self.mean.reset()
        found = self.many.compute()
        self.log_dict({name: value.double() for name, value in found.items()})
        self.many.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_spread(self.logits(batch[0]))
        self.log("val_spread", self.val_spread)


def metrics(layout: Layout, _: Path) -> Record:
    module = Metrics()
    return fit(layout, module) | {"read": module.read}


CASES: dict[str, Case] = {
    "logs anywhere": lambda layout, _: fit(layout, LogsAnywhere(), callbacks=[Logs()]),
    "metrics": metrics,
    "a list of a metric": lambda layout, _: fit(layout, ReadsLists()),
}


def names_for(layout: str) -> list[str]:
    """All; over several dp ranks a metric has to be synced, which makes tensors of its lists."""
    return [case for case in CASES if LAYOUTS[layout].dp == 1 or case != "a list of a metric"]


CELLS = diagonal([(layout, case) for layout in LAYOUTS if layout != "pp2 m1" for case in names_for(layout)])


@pytest.mark.matrix
@pytest.mark.parametrize(("layout", "case"), CELLS)
def test_what_is_logged_is_what_one_device_logs(layout: str, case: str) -> None:
    names = [case for name, case in CELLS if name == layout]
    assert discrepancies(__name__, names, LAYOUTS[layout], case, list(CASES)) == []
