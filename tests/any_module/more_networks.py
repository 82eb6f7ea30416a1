"""More networks as people write them: images, tables, recurrences, experts, several heads, lists of lists."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron import ModelPlan

ROWS, WIDTH, CLASSES = 8, 16, 5


class Fits(L.LightningModule):
    """Trains a network that makes logits of what a batch has as `x`, on the classes in `y`."""

    network: type[nn.Module]
    plan: ModelPlan | None = None

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(2)
            self.net = self.network()

    def model_plan(self) -> ModelPlan:
        return self.plan or ModelPlan()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Residual(nn.Module):
    """A block of a ResNet, with norms that know one image at a time."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_1, self.conv_2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm_1, self.norm_2 = nn.GroupNorm(2, channels), nn.GroupNorm(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm_2(self.conv_2(F.relu(self.norm_1(self.conv_1(x))))))


class ResNet(nn.Module):
    """Two stages of two blocks each, with a stride between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 2, stride=2)
        self.narrow, self.wide = (nn.Sequential(Residual(c), Residual(c)) for c in (8, 16))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(self.down(self.narrow(self.stem(x))))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class FitsResNet(Fits):
    """Its layers stand in two lists."""

    network = ResNet
    plan = ModelPlan(layers=("net.narrow", "net.wide"))


class UNet(nn.Module):
    """What a layer down returns goes to a layer up, past all between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, CLASSES)
        self.blocks = nn.ModuleList(Residual(8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](self.stem(x))
        x = self.blocks[2](self.blocks[1](F.avg_pool2d(first, 2)))
        x = self.blocks[3](F.interpolate(x, scale_factor=2.0) + first)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class ChangingUNet(UNet):
    """What is read later is changed in place before."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](self.stem(x))
        first += 0.5
        x = self.blocks[2](self.blocks[1](F.avg_pool2d(first, 2)))
        x = self.blocks[3](F.interpolate(x, scale_factor=2.0) + first)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class FitsUNet(Fits):
    """Does not say which of its layers are read later."""

    network = UNet


class FitsSkips(FitsUNet):
    """Says so."""

    plan = ModelPlan(skip_connections=("net.blocks.0",))


class FitsChangingSkips(FitsSkips):
    """Adds to what is read later."""

    network = ChangingUNet


class Deep(nn.Module):
    """Two linears beside their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))  # type: ignore[no-any-return]


class Recommender(nn.Module):
    """Wide tables of ids in front of a deep network."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(40, WIDTH), nn.Embedding(60, WIDTH)
        self.deep = nn.ModuleList(Deep(2 * WIDTH) for _ in range(4))
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat((self.user(x[:, 0]), self.item(x[:, 1])), -1)
        for layer in self.deep:
            y = layer(y)
        return self.head(y)  # type: ignore[no-any-return]


class FitsRecommender(Fits):
    """Its tables and its layers are cut over tensor-parallel ranks."""

    network = Recommender
    plan = ModelPlan(
        styles={
            "net.user": "embedding_rowwise",
            "net.item": "embedding_rowwise",
            "net.deep.*.up": "colwise",
            "net.deep.*.down": "rowwise",
        }
    )


class Recurrent(nn.Module):
    """A stack of LSTMs, each of which returns its last state too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x)
        for layer in self.layers:
            y, (last, _) = layer(y)
        return self.head(y[:, -1] + last[-1])  # type: ignore[no-any-return]


class FitsRecurrent(Fits):
    """Nothing is said of how it is cut."""

    network = Recurrent


class HandMade(nn.Module):
    """A layer that sends each row to the expert that its gate likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            out[rows] = weights[rows, None] * expert(x[rows])
        return x + out


class Mixture(nn.Module):
    """Experts by hand: an expert that no row has chosen has no gradient in that microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, WIDTH)
        self.layers = nn.ModuleList(HandMade() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.table(x[:, 0])
        for layer in self.layers:
            y = layer(y)
        return self.head(y)  # type: ignore[no-any-return]


class FitsMixture(Fits):
    """Nothing is said of how it is cut."""

    network = Mixture


class StackedExperts(nn.Module):
    """Experts in weights with a row for each; called as those of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.randn(self.num_experts, WIDTH, WIDTH) / WIDTH)
        self.bias = nn.Parameter(torch.randn(self.num_experts, WIDTH))

    def forward(self, x: Tensor, chosen: Tensor, probs: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in range(self.num_experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            y = torch.tanh(x[rows] @ self.weight[number] + self.bias[number])
            out = out.index_add(0, rows, y * probs[rows, place, None])
        return out


class Routed(nn.Module):
    """A layer that sends each row to two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = StackedExperts()

    def forward(self, x: Tensor) -> Tensor:
        probs, chosen = self.gate(x).softmax(-1).topk(2)
        return x + self.experts(x, chosen, probs)  # type: ignore[no-any-return]


class StackedMixture(Mixture):
    """The mixture with its experts in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(4))


class FitsStackedMixture(Fits):
    """The plan says where its experts are."""

    network = StackedMixture
    plan = ModelPlan(experts=("net.layers.*.experts",))


class Forked(nn.Module):
    """One trunk with two heads, in lists of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, WIDTH)
        self.groups = nn.ModuleList(nn.ModuleList(Deep(WIDTH) for _ in range(2)) for _ in range(2))
        self.first, self.second = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.table(x[:, 0])
        for group in self.groups:
            for layer in group:
                y = layer(y)
        return self.first(y), self.second(y)[:, 0]


class Outside(Forked):
    """Adds to its hidden states outside of its layers."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.table(x[:, 0])
        for group in self.groups:
            for layer in group:
                y = y + layer(y)
        return self.first(y), self.second(y)[:, 0]


class FitsForked(Fits):
    """A weighted sum of two losses, each a mean over the rows."""

    network: type[nn.Module] = Forked
    plan = ModelPlan(
        layers=("net.groups.0", "net.groups.1"),
        styles={"net.groups.*.*.up": "colwise", "net.groups.*.*.down": "rowwise"},
    )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits, value = self.net(batch["x"])
        loss = F.cross_entropy(logits, batch["y"]) + 0.5 * F.mse_loss(value, batch["y"].to(value.dtype))
        return {"loss": loss, "loss_weight": torch.tensor(float(len(value)))}


class TwoHeads(nn.Module):
    """One trunk in one list, with a head for classes and one for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, WIDTH)
        self.trunk = nn.ModuleList(Deep(WIDTH) for _ in range(4))
        self.first, self.second = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.table(x[:, 0])
        for layer in self.trunk:
            y = layer(y)
        return self.first(y), self.second(y)[:, 0]


class FitsTwoHeads(FitsForked):
    """Its list is found."""

    network = TwoHeads
    plan = ModelPlan(styles={"net.trunk.*.up": "colwise", "net.trunk.*.down": "rowwise"})


class FitsOutside(FitsForked):
    """Cannot be cut between its layers."""

    network = Outside


def images() -> list[dict[str, Tensor]]:
    """Three batches: images [8, 3, 8, 8] and classes."""
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(ROWS, 3, 8, 8, generator=generator),
            "y": torch.randint(0, CLASSES, (ROWS,), generator=generator),
        }
        for _ in range(3)
    ]


def ids() -> list[dict[str, Tensor]]:
    """Three batches: ids [8, 6] and classes."""
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randint(0, 30, (ROWS, 6), generator=generator),
            "y": torch.randint(0, CLASSES, (ROWS,), generator=generator),
        }
        for _ in range(3)
    ]
