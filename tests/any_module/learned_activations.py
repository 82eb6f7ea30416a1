"""Networks whose activations have weights of their own, between linears that tensor parallelism cuts."""

from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_megatron import ModelPlan
from tests.any_module import networks
from tests.any_module.networks import VOCABULARY, WIDTH


class Leaky(nn.Module):
    """A slope of what is below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.full((1,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, x * self.slope)


class Block(nn.Module):
    """A feed-forward network and its residual."""

    def __init__(self, activation: Leaky) -> None:
        super().__init__()
        self.up, self.activation, self.down = nn.Linear(WIDTH, 2 * WIDTH), activation, nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(x)))


class Net(nn.Module):
    """Three blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList([Block(Leaky()) for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def run(self, x: Tensor) -> Tensor:
        """The blocks in turn."""
        for block in self.blocks:
            x = block(x)
        return self.norm(x)  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.run(self.tokens(tokens)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class Trains(networks.Trains):
    """Trains three blocks."""

    network: Any = Net

    def model_plan(self) -> ModelPlan:
        """The linears of each block are cut."""
        return ModelPlan(styles={"net.blocks.*.up": "colwise", "net.blocks.*.down": "rowwise"})


class SharedNet(Net):
    """All blocks have one activation, and do nothing at first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(self.blocks[0].activation) for _ in range(3)])
        for block in self.blocks:
            nn.init.zeros_(block.down.weight)


class TrainsShared(Trains):
    network = SharedNet


class HeadNet(Net):
    """An activation is used once more where all features are."""

    def run(self, x: Tensor) -> Tensor:
        return self.blocks[0].activation(super().run(x))  # type: ignore[no-any-return]


class TrainsHead(Trains):
    network = HeadNet


class CheckpointedNet(Net):
    """Recomputes its blocks."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.norm(x)  # type: ignore[no-any-return]


class TrainsCheckpointed(Trains):
    """The block that is looked at does not train, nor does the last one."""

    network = CheckpointedNet

    def configure_model(self) -> None:
        super().configure_model()
        self.net.blocks[0].requires_grad_(False)
        self.net.blocks[2].requires_grad_(False)


class RootNet(Net):
    """Its linears are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.up, self.activation, self.down = nn.Linear(WIDTH, 2 * WIDTH), Leaky(), nn.Linear(2 * WIDTH, WIDTH)

    def run(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(x)))  # type: ignore[no-any-return]


class TrainsRoot(Trains):
    network = RootNet

    def model_plan(self) -> ModelPlan:
        """The linears of the network itself."""
        return ModelPlan(styles={"net.up": "colwise", "net.down": "rowwise"})


class Gated(Block):
    """Its factor has a gradient of which each rank has a term."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(x)) * torch.sigmoid(x.mean(-1, keepdim=True)))


class GatedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Gated(Leaky()) for _ in range(3)])


class TrainsGated(Trains):
    network = GatedNet


@dataclass
class Output:
    """What attention returns."""

    hidden: Tensor


class Told(networks.FixedHeads):
    """Counts heads by a constant, and returns a dataclass."""

    def forward(self, x: Tensor) -> Any:
        return Output(super().forward(x))


class ToldBlock(networks.Block):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Told()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x)).hidden
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class ToldGPT(networks.GPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ToldBlock() for _ in range(4)])


class TrainsTold(networks.TrainsOverTensor):
    network = ToldGPT


class MatrixBlock(networks.HandedBlock):
    """Hands a weight of three dims to its attention, which works on all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(1, 1, WIDTH))


class MatrixGPT(networks.GPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([MatrixBlock() for _ in range(4)])


class TrainsMatrix(networks.TrainsOverTensor):
    network = MatrixGPT


TRAINED: list[type[L.LightningModule]] = [TrainsShared, TrainsHead, TrainsCheckpointed, TrainsRoot]
REFUSED = [
    (TrainsGated, "tp2", "the gradient of argument 0 of blocks.0 (Gated) is another one with the features of a rank"),
    (TrainsTold, "tp2", "blocks.0.attention (Told) computes other numbers with the features of a rank"),
    (TrainsMatrix, "tp2-sp", "the gradient of blocks.0.shift is another one where its layer runs on a rank's own"),
]
