"""Small ordinary LightningModules and their data: nothing in them knows of any layout, unless a test needs it to."""

from typing import Any

import lightning as L
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_megatron.mesh import Axis, ambient_mesh
from lightning_megatron.pipeline.module import PipelineModule
from lightning_megatron.sharding import Initial
from lightning_megatron.tensor.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.transformer.init import initialise
from tests.trainer.layouts import replica_of

WIDTH, NUM_CLASSES = 6, 4


def samples(num_rows: int) -> TensorDataset:
    """Inputs [rows, 6], classes [rows] and weights [rows] of which a third are zero."""
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(num_rows, WIDTH, generator=generator, dtype=torch.float64)
    classes = torch.randint(0, NUM_CLASSES, (num_rows,), generator=generator)
    weights = (torch.rand(num_rows, generator=generator) > 0.33).double()
    # The first microbatch of the first batch has nothing valid, for every number of microbatches in the tests; neither
    # has the second batch of eight.
    weights[:4] = 0
    weights[8:16] = 0
    return TensorDataset(inputs, classes, weights)


class Data(L.LightningDataModule):
    """The rows in order, in global batches of `batch`, of which each dp rank takes its part."""

    def __init__(self, num_rows: int = 27, batch: int = 8) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.batch = batch

    def _loader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        rank, size = replica_of(self.trainer)
        indices = []
        for first in range(0, self.num_rows, self.batch):
            rows = range(first, min(first + self.batch, self.num_rows))
            # The larger parts first, as the samples of a last smaller batch fall.
            bounds = [-(-len(rows) * i // size) for i in range(size + 1)]
            indices += list(rows[bounds[rank] : bounds[rank + 1]])
        return DataLoader(Subset(samples(self.num_rows), indices), batch_size=self.batch // size)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader()

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader()

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader()

    def predict_dataloader(self) -> DataLoader[Any]:
        return self._loader()


def chain() -> nn.Sequential:
    """Six modules, of which some have no parameters."""
    return nn.Sequential(
        nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
    )


class TwoCuts(nn.Module):
    """A column-parallel and a row-parallel layer, whose tokens may be divided over `sp`."""

    def __init__(self, tp: Axis, sp: Axis, std: float) -> None:
        super().__init__()
        initial = Initial(std=std)
        self.up = ColumnParallelLinear(8, 16, tp=tp, sp=sp, bias=True, initial=initial)
        self.down = RowParallelLinear(16, 8, tp=tp, sp=sp, bias=True, initial=initial)
        initialise(self, 3)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down(torch.tanh(self.up(hidden)))
        return output


class Small(L.LightningModule):
    """A chain with a plain layer before it, and one after it behind layers that are cut over tp.

    SGD, because Adam hides a gradient wrong by a factor.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.before = nn.Linear(WIDTH, 8)
        self.net: nn.Module = chain()
        self.after = nn.Linear(8, NUM_CLASSES)

    def configure_model(self) -> None:
        if not hasattr(self, "cut"):
            mesh = ambient_mesh()
            self.cut = TwoCuts(mesh.tp, Axis.alone(mesh.global_rank), 0.2)

    def logits(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.after(self.cut(self.net(self.before(inputs))))
        return output

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = functional.cross_entropy(self.logits(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", functional.cross_entropy(self.logits(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", functional.cross_entropy(self.logits(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.logits(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


class OwnPipeline(Small):
    """Its chain is a PipelineModule, made in `configure_model`, with names of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = {f"blocks.{i}": part for i, part in enumerate(chain())}
        del self.net

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "net"):
            self.net = PipelineModule.from_modules(self.parts)


class Embedded(Small):
    """An embedding of the user's before the chain, and a second look at it after: one weight on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Embedding(NUM_CLASSES, 8)  # type: ignore[assignment]
        del self.after

    def logits(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.net(self.before((inputs[:, 0] * 7).long() % NUM_CLASSES))
        return hidden @ self.before.weight.T


class Weighted(Small):
    """Says what its loss is a mean over; some microbatches and one whole batch are over nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, classes, weights = batch
        losses = functional.cross_entropy(self.logits(inputs), classes, reduction="none")
        total = weights.sum()
        loss = (losses * weights).sum() / total.clamp(min=1)
        self.log("train_loss", loss)
        self.log("valid", total, reduce_fx="sum")
        return {"loss": loss, "loss_weight": total}


class Scheduled(Small):
    """One rate that changes every step, and one every epoch."""

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.parameters(), lr=0.3)
        by_step = torch.optim.lr_scheduler.ExponentialLR(first, 0.7)
        by_epoch = torch.optim.lr_scheduler.StepLR(first, step_size=1, gamma=0.5)
        return [first], [{"scheduler": by_step, "interval": "step"}, {"scheduler": by_epoch, "interval": "epoch"}]


class Partly(Small):
    """Frozen weights inside the chain and outside; one layer is used in every second batch; weight decay, so that a
    missing gradient and one of zeros differ."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, NUM_CLASSES)
        self.never = nn.Linear(3, 3)
        self.after.bias.requires_grad_(False)
        assert isinstance(self.net, nn.Sequential)
        self.net[0].requires_grad_(False)
        self.net[4].weight.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net(self.before(batch[0]))
        logits = self.after(hidden) + (self.extra(hidden) if batch_idx % 2 else 0.0)
        loss = functional.cross_entropy(logits, batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, weight_decay=0.1)


class Manual(Small):
    """Steps its optimizer by itself, twice a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        for _ in range(2):
            loss = functional.cross_entropy(self.logits(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
        self.log("train_loss", loss)


class CalledTwice(Small):
    """Two calls of the chain in one step, the second dependent on the first."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first = self.net(self.before(batch[0]))
        second = self.net(first)
        loss = functional.cross_entropy(self.after(second), batch[1]) + (first - second).square().mean()
        self.log("train_loss", loss)
        return loss


class Measured(Small):
    """Logs in many ways: metrics as objects, sums, extremes, many names, with and without batch sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.seen = torchmetrics.SumMetric()
        self.all_losses = torchmetrics.CatMetric()
        self.val_accuracy = torchmetrics.classification.MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.val_losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes, _ = batch
        logits = self.logits(inputs)
        losses = functional.cross_entropy(logits, classes, reduction="none")
        loss = losses.mean()
        self.accuracy(logits, classes)
        self.seen(float(len(inputs)))
        self.all_losses(losses.detach())
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        self.log("rows", len(inputs), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("largest", losses.max(), reduce_fx=torch.max, on_step=True, on_epoch=True)
        self.log("smallest", losses.min(), reduce_fx="min", on_step=True, on_epoch=False)
        self.log("sized", losses.mean(), batch_size=len(inputs), on_step=True, on_epoch=True)
        self.log_dict({f"many/{i}": loss * i for i in range(70)}, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        # Metrics keep float32; only their sum shall not depend on the order.
        self.log("cat_mean", self.all_losses.compute().double().mean(), sync_dist=True)
        self.all_losses.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.logits(batch[0])
        loss = functional.cross_entropy(logits, batch[1])
        self.val_accuracy.update(logits, batch[1])
        self.log("val_loss", loss)
        self.log("val_sized", loss, batch_size=len(batch[0]))
        self.log("val_accuracy", self.val_accuracy)
        self.log("val_rows", float(len(batch[0])), reduce_fx="sum")
        self.val_losses.append(loss)

    def on_validation_epoch_end(self) -> None:
        self.log("val_list", float(len(self.val_losses)), sync_dist=True)
        self.val_losses.clear()


class Parallel(Small):
    """Its chain is cut over the tensor-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "net"):
            mesh = ambient_mesh()
            self.net = TwoCuts(mesh.tp, mesh.sp, 0.5)
