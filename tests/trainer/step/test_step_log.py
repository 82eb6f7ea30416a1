"""What a step logs under a schedule and over dp: the same on every rank, or an error that says what differs."""

from typing import Any

import pytest
import torch
import torchmetrics
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.trainer import modules
from tests.trainer.fits import numbers
from tests.trainer.layouts import PLAIN, Layout, make_trainer
from tests.trainer.modules import Data

LAYOUTS = {
    "pp2 dp2": Layout(world=4, pp=2, microbatches=2),
    "pp2": Layout(world=2, pp=2, microbatches=2),
    "dp2 m2": Layout(world=2, microbatches=2),
    "dp2": Layout(world=2),
    "pp2 vp2": Layout(world=2, pp=2, vp=2, microbatches=2),
    "pp2 collective": Layout(world=2, pp=2, microbatches=2, collective=True),
}


METRICS = ("batch_accuracy", "Multiclass", "median", "early", "of_epoch")


class Median(torchmetrics.CatMetric):
    def compute(self) -> torch.Tensor:
        return torch.as_tensor(super().compute()).median()


class Counted(torchmetrics.SumMetric):
    num_updates = 0

    def update(self, value: Any) -> None:
        self.num_updates += 1
        super().update(value)


class Synced(modules.Small):
    """Asks Lightning to sync what the strategy has reduced already; logs metrics by the step."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = torchmetrics.MetricCollection(
            [
                torchmetrics.classification.MulticlassAccuracy(modules.NUM_CLASSES, average="micro"),
                torchmetrics.classification.MulticlassAccuracy(modules.NUM_CLASSES, average="micro", top_k=2),
            ][:1]
        )
        self.batch_accuracy = torchmetrics.classification.MulticlassAccuracy(modules.NUM_CLASSES, average="micro")
        # No means over rows: ratios of counts by class, and one that keeps all rows.
        self.f1 = torchmetrics.MetricCollection([torchmetrics.classification.MulticlassF1Score(modules.NUM_CLASSES)])
        self.median, self.early = Median(), torchmetrics.SumMetric()
        self.of_epoch, self.num_calls = Counted(), 0
        self.ratio = torchmetrics.MaxMetric() / torchmetrics.SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        # A rank of several stages comes here once for each.
        self.early(batch[0][:, 0] / 100)
        self.log("early", self.early)
        logits = self.logits(batch[0])
        losses = functional.cross_entropy(logits, batch[1], reduction="none")
        self.log("rows", float(len(batch[0])), reduce_fx="sum", sync_dist=True, on_step=True, on_epoch=True)
        self.log("loss", losses.mean(), sync_dist=True, on_step=True, on_epoch=True)
        self.log("largest", losses.max(), reduce_fx="max", sync_dist=True, on_epoch=True)
        self.log("constant", 3.0, prog_bar=True)
        self.batch_accuracy(logits, batch[1])
        self.log("batch_accuracy", self.batch_accuracy, on_step=True, on_epoch=True)
        self.log_dict(self.metrics(logits, batch[1]), on_step=True, on_epoch=True)
        self.f1(logits, batch[1])
        self.log_dict(self.f1)
        self.of_epoch(losses.detach() / 100)
        self.num_calls += 1
        self.log("of_epoch", self.of_epoch, on_step=False, on_epoch=True)
        self.median(losses.detach())
        self.log("median", self.median)
        self.ratio(losses.detach())
        self.log("ratio", self.ratio, on_step=True, on_epoch=True)
        if batch_idx == 2:
            self.log("only_now", losses.sum(), reduce_fx="sum")
        self.log_dict({f"{i}": losses.mean() + i for i in range(40)})
        return losses.mean()

    def on_train_end(self) -> None:
        # What no step's value asks for is not added up a second time.
        assert self.of_epoch.num_updates == self.num_calls

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = functional.cross_entropy(self.logits(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_rows", float(len(batch[0])), sync_dist=True, reduce_fx="sum", add_dataloader_idx=False)


class Keeper(modules.L.Callback):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.rows.append(numbers(trainer))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.rows.append(numbers(trainer))


def logged(layout: Layout) -> list[dict[str, float]]:
    keeper = Keeper()
    make_trainer(layout, callbacks=[keeper]).fit(Synced(), Data())
    return keeper.rows


@pytest.fixture(scope="module")
def wanted() -> list[dict[str, float]]:
    [rows] = run_on_ranks(1, logged, PLAIN, init=False)
    return rows


@pytest.mark.matrix
@pytest.mark.parametrize("name", every_nth(LAYOUTS, 2))
def test_every_value_is_that_of_the_global_batch_on_every_rank(name: str, wanted: list[dict[str, float]]) -> None:
    assert len(wanted) == 10 and len(wanted[0]) > 40 and "only_now" in wanted[2]
    assert wanted[0]["rows_step"] == 8 and wanted[3]["rows_step"] == 3 and wanted[0]["constant"] == 3
    for rows in run_on_ranks(LAYOUTS[name].world, logged, LAYOUTS[name], init=False):
        for found, expected in zip(rows, wanted, strict=True):
            assert found.keys() == expected.keys()
            # Compositions of metrics have the mean over the parts.
            found, expected = ({k: v for k, v in one.items() if "ratio" not in k} for one in (found, expected))
            # Metrics count in float32.
            assert found == pytest.approx(expected, abs=1e-6)
            tensors = {k: v for k, v in found.items() if not k.startswith(METRICS)}
            assert tensors == pytest.approx({k: expected[k] for k in tensors}, abs=1e-11)


class Uneven(modules.Small):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        rank = self.trainer.strategy.data_parallel_rank  # type: ignore[attr-defined]
        if self.kind == "names":
            self.log(f"loss_of_{rank}", loss)
        elif self.kind == "options":
            self.log("sometimes", loss, prog_bar=rank == 1)
        elif self.kind == "order":
            for name in ("a", "b") if rank == 0 else ("b", "a"):
                self.log(name, loss)
        else:
            self.log("custom", loss, reduce_fx=torch.median)
        return loss


def disagreements(layout: Layout) -> dict[str, str]:
    found = {}
    for kind in ("names", "options", "order", "custom"):
        try:
            make_trainer(layout, max_epochs=1, limit_val_batches=0).fit(Uneven(kind), Data(16))
        except (RuntimeError, ValueError) as error:
            found[kind] = str(error)
    return found


def test_dp_ranks_that_log_differently_get_an_error_with_what_differs() -> None:
    for found in run_on_ranks(2, disagreements, Layout(world=2), init=False):
        assert "'loss_of_0' by ranks [0]; 'loss_of_1' by ranks [1]" in found["names"]
        assert "ranks of dp x cp logged 'sometimes' with different options" in found["options"]
        assert "['train_loss', 'a', 'b'], ['train_loss', 'b', 'a']" in found["order"]
        assert "reduce_fx (<built-in method median" in found["custom"] and "mean, sum, max or min" in found["custom"]


class Keeping(modules.Small):
    """Metrics with lists and with numbers that take something in before the model call, after it, and on both sides."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("before", "after", "both"):
            setattr(self, f"{name}_list", torchmetrics.CatMetric())
            setattr(self, f"{name}_sum", torchmetrics.SumMetric())
        self.kept: list[dict[str, Any]] = []

    def take(self, name: str, values: torch.Tensor) -> None:
        self.get_submodule(f"{name}_list")(values.detach())
        self.get_submodule(f"{name}_sum").update(values.detach())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for name in ("before", "both"):
            self.take(name, batch[0][:, 0])
        losses = functional.cross_entropy(self.logits(batch[0]), batch[1], reduction="none")
        for name in ("both", "after"):
            self.take(name, losses)
        return losses.mean()

    def on_train_batch_end(self, *_: Any) -> None:
        metrics = {n: m for n, m in self.named_children() if isinstance(m, torchmetrics.Metric)}
        self.kept.append({name: sorted(metric.compute().reshape(-1).tolist()) for name, metric in metrics.items()})


def kept(layout: Layout) -> list[dict[str, Any]]:
    module = Keeping()
    make_trainer(layout, max_epochs=1, limit_val_batches=0).fit(module, Data())
    return module.kept


def test_metrics_take_everything_in_once_on_every_stage() -> None:
    [wanted] = run_on_ranks(1, kept, PLAIN, init=False)
    assert [len(step["both_list"]) for step in wanted] == [16, 32, 48, 54]
    for found in run_on_ranks(2, kept, LAYOUTS["pp2"], init=False):
        for step, expected in zip(found, wanted, strict=True):
            assert step.keys() == expected.keys()
            for name, values in step.items():
                # Metrics count in float32.
                assert values == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name


class Extremes(modules.Small):
    """Logs largest and smallest losses under six names."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = functional.cross_entropy(self.logits(batch[0]), batch[1], reduction="none")
        for i in range(3):
            self.log(f"largest_{i}", losses.max() + i, reduce_fx="max", sync_dist=True, on_step=True, on_epoch=False)
            self.log(f"smallest_{i}", losses.min() - i, reduce_fx="min", sync_dist=True, on_step=True, on_epoch=False)
        return losses.mean()


def extremes_logged(layout: Layout) -> tuple[list[dict[str, float]], list[int]]:
    """What was logged, and how many numbers each message held that looked for an extreme."""
    keeper, sent = Keeper(), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        all_reduce = collectives.all_reduce

        def counted(x: torch.Tensor, axis: Axis, op: Any = "sum") -> torch.Tensor:
            if op in ("max", "min") and x.dtype == torch.float64 and axis.size > 1:
                sent.append(x.numel())
            return all_reduce(x, axis, op)

        patch.setattr(collectives, "all_reduce", counted)
        make_trainer(layout, callbacks=[keeper]).fit(Extremes(), Data())
    return [{name: row[name] for name in row if "est_" in name} for row in keeper.rows if row], sent


def test_all_extremes_of_a_step_go_in_one_message() -> None:
    [(wanted, _)] = run_on_ranks(1, extremes_logged, PLAIN, init=False)
    found = run_on_ranks(2, extremes_logged, LAYOUTS["dp2 m2"], init=False)
    assert len(wanted[0]) == 6
    for rows, sent in found:
        # All six names of a step are in one message, where each had one of its own.
        assert sent and set(sent) == {6}
        assert rows == [pytest.approx(row, abs=1e-10) for row in wanted]


class LogsTables(modules.Small):
    """Logs what is no number."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = functional.cross_entropy(self.logits(batch[0]), batch[1])
        self.log("odd", self.value)
        return loss


@pytest.mark.parametrize("value", [{"a": {"b": None}}, {"a": None}, None, "x", [1.0]])
def test_what_is_no_number_is_refused_in_lightnings_words(value: Any) -> None:
    texts = []
    for layout in (PLAIN, Layout(world=1, microbatches=2)):
        with pytest.raises((ValueError, MisconfigurationException), match="odd") as refused:
            make_trainer(layout, max_steps=1).fit(LogsTables(value), Data())
        texts.append(str(refused.value))
    assert texts[0] == texts[1]


def refused_by_log(value: Any) -> str:
    with pytest.raises((ValueError, MisconfigurationException), match="odd") as refused:
        make_trainer(Layout(world=2, tp=2), max_steps=1).fit(LogsTables(value), Data())
    return str(refused.value)


def test_what_is_no_number_is_refused_over_tensor_parallel_ranks_too() -> None:
    value = {"a": {"b": None}}
    with pytest.raises((ValueError, MisconfigurationException)) as wanted:
        make_trainer(PLAIN, max_steps=1).fit(LogsTables(value), Data())
    assert run_on_ranks(2, refused_by_log, value, init=False) == [str(wanted.value)] * 2
