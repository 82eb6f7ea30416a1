"""Small ordinary modules that certify looks at: right ones, and one for each thing that goes wrong under a layout."""

from typing import Any

import lightning as L
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron.mesh import ambient_mesh
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.pipeline.module import Part, PipelineModule
from lightning_megatron.sharding import Initial
from lightning_megatron.tensor.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.transformer.init import initialise

WIDTH, NUM_CLASSES = 6, 4


def rows() -> DataLoader[Any]:
    """Inputs [4, 6] and classes [4] in small batches, shuffled."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, WIDTH, generator=generator)
    classes = torch.randint(NUM_CLASSES, (40,), generator=generator)
    return DataLoader(TensorDataset(inputs, classes), batch_size=4, shuffle=True)


class Right(L.LightningModule):
    """A chain that stages divide. SGD, because Adam hides a gradient wrong by a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module = nn.Sequential(
            nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES)
        )

    def loss(self, inputs: Tensor, classes: Tensor) -> Tensor:
        return functional.cross_entropy(self.net(inputs), classes)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


class _Cut(nn.Module):
    """Two linears of the package, cut over tp."""

    def __init__(self) -> None:
        super().__init__()
        mesh = ambient_mesh()
        tp, sp, initial = mesh.tp, mesh.sp, Initial(std=0.5)
        self.up = ColumnParallelLinear(WIDTH, 8, tp=tp, sp=sp, bias=True, initial=initial)
        self.down = RowParallelLinear(8, NUM_CLASSES, tp=tp, sp=sp, bias=True, initial=initial)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.down(torch.tanh(self.up(inputs)))
        return output


class TensorParallel(Right):
    """Its weights are cut over tensor-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = _Cut()
            initialise(self.net, 5)


class Summed(Right):
    """Its loss is a sum over rows."""

    def loss(self, inputs: Tensor, classes: Tensor) -> Tensor:
        return functional.cross_entropy(self.net(inputs), classes, reduction="sum")


class ClassWeights(Right):
    """Its loss is a mean weighted by classes, and it does not say so."""

    def loss(self, inputs: Tensor, classes: Tensor) -> Tensor:
        # Not `weight=` of cross_entropy, whose mean tells what it counts.
        weights = torch.tensor([1.0, 5.0, 0.2, 0.0], dtype=inputs.dtype)[classes]
        losses = functional.cross_entropy(self.net(inputs), classes, reduction="none")
        return (weights * losses).sum() / weights.sum()


class SaysItsWeight(ClassWeights):
    """The same, and it says what its loss is a mean over."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weights = torch.tensor([1.0, 5.0, 0.2, 0.0], dtype=batch[0].dtype)
        return {"loss": super().training_step(batch, batch_idx), "loss_weight": weights[batch[1]].sum()}


class Negatives(Right):
    """Each row is to be told from all others of the batch."""

    def loss(self, inputs: Tensor, classes: Tensor) -> Tensor:
        found = self.net(inputs)
        return functional.cross_entropy(found @ found.T, torch.arange(len(found)))


class Norms(Right):
    """Batch norm in the chain."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))


class Penalty(Right):
    """A term over the weights in the loss."""

    def loss(self, inputs: Tensor, classes: Tensor) -> Tensor:
        squares = torch.stack([parameter.square().sum() for parameter in self.parameters()])
        return super().loss(inputs, classes) + 0.1 * squares.sum()


class ClipsByItself(Right):
    """Clips by the norm of the gradients that it sees."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class LogsNorm(Right):
    """Logs the norm of the gradients that it sees."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm())


class LogsLate(Right):
    """Logs the norm when they have been stepped by."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm())


class LogsHidden(Right):
    """Logs the norm by code that does not name what it reads."""

    def on_train_batch_end(self, *_: Any) -> None:
        gradients = [getattr(p, "gr" + "ad") for p in self.parameters()]
        self.log("norm", torch.stack([torch.zeros(()), *(one.norm() for one in gradients if one is not None)]).norm())


class LogsCount(Right):
    """Logs how many rows a batch has, as a mean."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rows", float(len(batch[0])))
        return super().training_step(batch, batch_idx)


class Counts(Right):
    """A buffer that moves in each call of the step."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return super().training_step(batch, batch_idx)


class Drifts(Right):
    """Ranks change their weights by different numbers."""

    def on_train_batch_end(self, *_: Any) -> None:
        # By less than the check of what hooks did tells apart: the check of replicas is what finds it.
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(1 + 1e-4 * self.global_rank)


class DrawsNumbers(Right):
    """A dropout that no module tells of."""

    def loss(self, inputs: Tensor, classes: Tensor) -> Tensor:
        return functional.cross_entropy(functional.dropout(self.net(inputs), 0.3), classes)


class DropsInModule(Right):
    """A dropout that is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, NUM_CLASSES))


class _Parts(PipelineModule):
    def __init__(self) -> None:
        sizes = [(WIDTH, 8), (8, 8), (8, NUM_CLASSES)]
        super().__init__([Part(name=f"blocks.{i}", build=_Linear(*size)) for i, size in enumerate(sizes)])


class _Linear:
    """Builds a linear from the default generator."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.sizes = inputs, outputs

    def __call__(self) -> nn.Module:
        return nn.Linear(*self.sizes)


class DrawsPartsLate(Right):
    """A rank builds its own parts alone, from the default generator."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = _Parts()


class NeedsFloat32(Right):
    """Reads its inputs by a library that knows float32 alone, so that float64 fails."""

    def loss(self, inputs: Tensor, classes: Tensor) -> Tensor:
        return super().loss(torch.from_numpy(inputs.numpy().astype("float32")), classes)


class CallsTwice(Right):
    """Calls its chain twice, which a schedule refuses."""

    def loss(self, inputs: Tensor, classes: Tensor) -> Tensor:
        return super().loss(inputs, classes) + super().loss(-inputs, classes)


class NoLoss(Right):
    """Returns nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class SkipsABatch(Right):
    """Returns no loss for the second batch, which Lightning leaves out on one device."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class Fails(Right):
    """Fails on one device."""

    def loss(self, inputs: Tensor, classes: Tensor) -> Tensor:
        return functional.cross_entropy(self.net(inputs[:, :3]), classes)


class FailsOnARank(Right):
    """Ends a rank in the middle of a step."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 1:
            raise ZeroDivisionError("on purpose")


class FailsInTorch(Right):
    """Gives torch what it does not take, where there are several ranks."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.world_size > 1:
            torch.cat([])


class Adversarial(Right):
    """Two networks that learn from each other, each by an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[attr-defined]
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(self.other(self.net(batch[0]).tanh().repeat(1, 8)[:, :8]).square().mean())
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        second.zero_grad()
        found = self.net(batch[0]).detach().repeat(1, 8)[:, :8]
        self.manual_backward((self.other(found) - 1).square().mean())
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(one.parameters(), lr=1e-2) for one in (self.net, self.other)], []


class Unfreezes(Right):
    """Trains a layer more from its second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((self.before(batch[0]), *batch[1:]), batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            added = list(self.before.requires_grad_(True).parameters())
            self.optimizers().add_param_group({"params": added})  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Language(Right):
    """A language model far too large for a test, built from a configuration."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.config = GPTConfig(num_layers=96, hidden_size=12288, num_attention_heads=96, vocab_size=50257)

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = GPTModel(self.config)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch["tokens"], labels=batch["labels"])


def texts() -> list[dict[str, Tensor]]:
    """Tokens and labels [8, 100]."""
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(50257, (8, 101), generator=generator) for _ in range(2)]
    return [{"tokens": rows[:, :-1], "labels": rows[:, 1:]} for rows in tokens]


class Data(L.LightningDataModule):
    """The rows, changed by a hook of the data module."""

    def setup(self, stage: str) -> None:
        self.scale = 2.0

    def train_dataloader(self) -> DataLoader[Any]:
        return rows()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] * self.scale, batch[1]


class UsesDataModule(Right):
    """Looks at its data module in the step."""

    def loss(self, inputs: Tensor, classes: Tensor) -> Tensor:
        return super().loss(inputs, classes) * self.trainer.datamodule.scale  # type: ignore[attr-defined]


class NeedsArguments(Right):
    """Cannot be made without arguments."""

    def __init__(self, width: int) -> None:
        super().__init__()


def few_rows() -> list[tuple[Tensor, Tensor]]:
    """Two batches, which are not enough."""
    return [(torch.zeros(8, WIDTH), torch.zeros(8, dtype=torch.long))] * 2


class TwoOptimizers(Right):
    """Steps two optimizers a batch by hand, each by gradients of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):  # type: ignore[arg-type]
            loss = functional.cross_entropy(sign * self.net(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        halves = list(self.parameters())[::2], list(self.parameters())[1::2]
        return [torch.optim.SGD(half, lr=0.1) for half in halves]


class LogsMetric(Right):
    """Logs a metric, whose state was made in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.error(self.net(batch[0]).softmax(-1)[:, 0], (batch[1] == 0).to(batch[0].dtype))
        self.log("error", self.error)
        return super().training_step(batch, batch_idx)


class Validates(Right):
    """Validates by means over rows, and a scheduler and a callback wait for what it logs."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found = self.net(batch[0])
        self.log("val_loss", functional.cross_entropy(found, batch[1]))
        self.log("hits", (found.argmax(1) == batch[1]).double().mean())

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class ValidatesSome(Validates):
    """Validates by a mean over some classes, of data of its own."""

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [rows()]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        losses = functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        self.log("val_loss", losses[batch[1] > 0].mean())
