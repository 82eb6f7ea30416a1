"""Stages hold of the modules around the layers those that their layers read, and no other number is read for them."""

from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import ModelPlan
from lightning_megatron.any_module.around_layers import readers_of
from lightning_megatron.any_module.cut_model import cut_of
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.planner.memory_tracker import MemoryTracker
from lightning_megatron.testing import certify
from lightning_megatron.trainer.setup.pipelined_models import cut_plain_networks
from tests.any_module import networks
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.trainer.layouts import Layout, make_trainer

LAYERS = tuple(f"blocks.{index}" for index in range(4))
TOKENS = torch.zeros(2, networks.TOKENS, dtype=torch.long)


class ReadAgain(networks.UntiedGPT):
    """Every block reads the embedding, beside the block before."""

    def run_blocks(self, x: Tensor) -> Tensor:
        first = x
        for block in self.blocks:
            x = block(x + first)
        return x


class NormedTokens(networks.UntiedGPT):
    """What comes before its blocks is more than an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Sequential(self.tokens, nn.LayerNorm(networks.WIDTH), nn.Dropout(0.0))


class Towered(networks.UntiedGPT):
    """What comes before its blocks has linears of its own, as a vision tower has."""

    def __init__(self) -> None:
        super().__init__()
        width = networks.WIDTH
        self.tokens = nn.Sequential(self.tokens, nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Noting(networks.UntiedGPT):
    """Keeps a table that its first call makes, for the next ones."""

    table: Tensor | None = None

    def run_blocks(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, networks.WIDTH)
            self.register_buffer("count", torch.zeros(()))
        return super().run_blocks(x * self.table)


class ReadsPast(networks.UntiedGPT):
    """Adds rows of a table that it reads without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(networks.TOKENS, networks.WIDTH)

    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(x + self.table.weight[: x.shape[1]])


class Places(nn.Embedding):
    """A place for each token of a shape."""

    def forward(self, shape: torch.Size) -> Tensor:  # type: ignore[override]
        return super().forward(torch.arange(shape[1], device=self.weight.device))


class ShapedPlaces(networks.UntiedGPT):
    """Asks for places by a shape, and sends its tokens to where their embedding is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Places(networks.TOKENS, networks.WIDTH)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return super().forward(tokens.to(self.tokens.weight.device), targets)

    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(x + self.table(x.shape))


class Curious(networks.UntiedGPT):
    """Looks at numbers, of which a call without memory has none."""

    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(x / max(float(x.detach().abs().max()), 1e-3))


@pytest.mark.parametrize(
    ("network", "found"),
    [
        (networks.UntiedGPT, {"tokens": {0}, "norm": {4}, "head": {4}}),
        (networks.GPT, {"tokens": {0, 4}, "norm": {4}, "head": {0, 4}}),
        (ReadAgain, {"tokens": {0, 1, 2, 3}, "norm": {4}, "head": {4}}),
        (Noting, {"tokens": {0}, "norm": {4}, "head": {4}}),
        # Every stage has what is read without a call.
        (ReadsPast, {"tokens": {0}, "norm": {4}, "head": {4}}),
        (ShapedPlaces, {"tokens": {0}, "table": {0}, "norm": {4}, "head": {4}}),
        (Curious, {}),
    ],
)
def test_readers_are_found_without_numbers(network: type[nn.Module], found: dict[str, set[int]]) -> None:
    root = nn.ModuleDict({"net": network()})
    random, attributes = torch.get_rng_state(), [dict(module.__dict__) for module in root.modules()]
    buffers = dict(root.named_buffers())
    assert readers_of(root["net"], "", LAYERS, (TOKENS,), {}) == found
    # All is as it was.
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.__dict__ for module in root.modules()] == attributes and dict(root.named_buffers()) == buffers


class Trains(networks.Trains):
    """Says by an example how its network is called."""

    network = networks.UntiedGPT
    example_input_array = TOKENS

    def forward(self, tokens: Tensor) -> Any:
        return self.net(tokens)


class TrainsReadAgain(Trains):
    """Trains the network whose blocks all read the embedding."""

    network = ReadAgain


class TrainsNormedTokens(Trains):
    """Trains the network with more before its blocks."""

    network = NormedTokens


class TrainsTowered(Trains):
    """Cuts the linears before the blocks over tp."""

    network = Towered

    def model_plan(self) -> ModelPlan:
        return ModelPlan(
            styles={"net.tokens.1": "colwise", "net.tokens.3": "rowwise", "net.blocks.*.up": "colwise_gather_output"}
        )


class TrainsReadsPast(Trains):
    """Trains the network that reads a table without calling it."""

    network = ReadsPast


class TrainsShapedPlaces(Trains):
    """Trains the network that asks for places by a shape."""

    network = ShapedPlaces


class OnAllStages(Trains):
    """Wants the embedding everywhere."""

    def model_plan(self) -> ModelPlan:
        return ModelPlan(on_all_stages=("net.tokens",))


class Wrong(ModelPlan):
    """Takes the embedding for one that the first block alone reads."""

    def readers_in(self, module: nn.Module, name: str, layers: Sequence[str]) -> dict[str, frozenset[int]]:
        return {"tokens": frozenset({0})}


class WronglyPlanned(TrainsReadAgain):
    """Has what stages read taken from them."""

    def model_plan(self) -> ModelPlan:
        return Wrong()


class Projected(ReadAgain):
    """What its blocks read comes from two modules, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(networks.WIDTH, networks.WIDTH)

    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(self.projection(x))


class WrongOfBoth(ModelPlan):
    """The same for two modules, of which one reads the other."""

    def readers_in(self, module: nn.Module, name: str, layers: Sequence[str]) -> dict[str, frozenset[int]]:
        return {"tokens": frozenset({0}), "projection": frozenset({0})}


class WronglyPlannedBoth(Trains):
    """Has both taken from it."""

    network = Projected

    def model_plan(self) -> ModelPlan:
        return WrongOfBoth()


class CallsOutside(Trains):
    """Calls the embedding by itself, before the network."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net.tokens(batch["tokens"])
        return super().training_step(batch, batch_idx)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        (Trains, ("dp2pp2-zero", "pp2")),
        (TrainsReadAgain, ("pp2vp2",)),
        (TrainsNormedTokens, ("pp2",)),
        (TrainsTowered, ("pp2tp2",)),
        (TrainsReadsPast, ("pp2",)),
        (TrainsShapedPlaces, ("pp2", "pp2tp2")),
        (OnAllStages, ("pp2",)),
    ],
)
def test_numbers_are_those_of_one_device(kind: type[Trains], layouts: tuple[str, ...]) -> None:
    certify(kind, networks.batches, layouts=every_nth(layouts, 2), steps=2).assert_equal()


class Held(L.Callback):
    """What a rank has of the modules around the blocks."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.names = {name.split(".")[1] for name, _ in pl_module.named_parameters()} - {"blocks"}


def held(layout: Layout, kind: type[L.LightningModule]) -> set[str]:
    held, loader = Held(), DataLoader(networks.batches(), batch_size=None)
    make_trainer(layout, max_steps=1, limit_val_batches=0, callbacks=held).fit(kind(), loader)
    return held.names


@pytest.mark.parametrize(
    ("kind", "of_last"),
    [
        (Trains, {"norm", "head"}),
        (TrainsNormedTokens, {"norm", "head"}),
        (TrainsReadAgain, {"tokens", "norm", "head"}),
        (OnAllStages, {"tokens", "norm", "head"}),
    ],
)
def test_a_rank_has_what_its_stage_reads(kind: type[L.LightningModule], of_last: set[str]) -> None:
    last, first = run_on_ranks(2, held, Layout(world=2, pp=2, microbatches=2), kind, init=False)
    # What is no module of its own is everywhere.
    assert first == {"places", "tokens"} and last == {"places"} | of_last


def test_linears_that_are_cut_over_tp_are_held_by_the_stage_that_reads_them() -> None:
    layout = Layout(world=4, tp=2, pp=2, microbatches=2)
    held_by = run_on_ranks(4, held, layout, TrainsTowered, init=False)
    assert held_by == [{"places", "norm", "head"}] * 2 + [{"places", "tokens"}] * 2


class Experts(nn.Module):
    """Experts, whose shapes are those of tokens."""

    _is_expert_parallel = True
    num_experts = 4

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, networks.WIDTH, networks.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.einsum("bth,ehf->btf", x, self.weight) / 4


class WithExperts(networks.UntiedGPT):
    """What comes before its blocks has experts."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Sequential(self.tokens, Experts())


class TrainsExperts(Trains):
    """Trains it."""

    network = WithExperts


class Apart(networks.UntiedGPT):
    """Two linears that belong together stand beside the blocks, and the head reads the first one too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(networks.WIDTH, 32), nn.Linear(32, networks.WIDTH)
        self.out = nn.Linear(32, networks.WIDTH)

    def run_blocks(self, x: Tensor) -> Tensor:
        wide = self.up(x)
        return super().run_blocks(self.down(wide.tanh())) + self.out(wide)


class TrainsApart(Trains):
    """Cuts them over tp."""

    network = Apart

    def model_plan(self) -> ModelPlan:
        return ModelPlan(styles={"net.up": "colwise", "net.down": "rowwise", "net.out": "rowwise"})


def absent_on_last(kind: type[Trains]) -> set[str]:
    """Names of the modules around the layers that are without weights on the last stage."""
    module = kind()
    module.configure_model()
    cut_plain_networks(module, Mesh.imagine(0, Sizes(world=4, tp=2, pp=2)))
    held_here = {name for name, _ in module.net.named_parameters()}
    return {name for name, _ in module.net.named_children() if not any(one.startswith(name) for one in held_here)}


@pytest.mark.parametrize(
    ("kind", "absent"),
    [
        (TrainsTowered, {"tokens"}),
        (TrainsExperts, set()),
        # Where the first is cut the second has to be.
        (TrainsApart, set()),
    ],
)
def test_what_cannot_tell_its_shapes_is_on_every_stage(kind: type[Trains], absent: set[str]) -> None:
    assert absent_on_last(kind) == absent


def test_shapes_of_what_a_stage_has_not_are_no_work_of_its_own() -> None:
    module = TrainsTowered()
    module.configure_model()
    cut_plain_networks(module, Mesh.imagine(0, Sizes(world=4, tp=2, pp=2)))
    cut = cut_of(module.net)
    assert cut is not None
    cut._stage = 1
    with MemoryTracker(torch.device("meta")) as tracker:
        shape = module.net.tokens(TOKENS.to("meta")).shape
    assert shape == (*TOKENS.shape, networks.WIDTH) and not tracker.take_flops()


class OfNumbers(networks.UntiedGPT):
    """Takes numbers in place of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: Any = nn.Linear(3, networks.WIDTH)


def test_an_example_may_be_on_another_device_than_weights() -> None:
    root = nn.ModuleDict({"net": OfNumbers()})
    example = torch.zeros(*TOKENS.shape, 3, device="meta")
    assert readers_of(root["net"], "", LAYERS, (example,), {}) == {"tokens": {0}, "norm": {4}, "head": {4}}


class Chained(L.LightningModule):
    """A chain of which the parts are no layers, and the layers no parts."""

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.Sequential(*(networks.Block() for _ in range(6)))
        width, words = networks.WIDTH, networks.VOCABULARY
        self.net = nn.Sequential(nn.Embedding(words, width), blocks, nn.Linear(width, words))

    def model_plan(self) -> ModelPlan:
        return ModelPlan(styles={"net.1.*.up": "colwise", "net.1.*.down": "rowwise"})


def test_a_chain_that_is_cut_over_tp_is_cut_at_its_layers() -> None:
    module = Chained()
    cut_plain_networks(module, Mesh.imagine(0, Sizes(world=4, tp=2, pp=2)))
    cut = cut_of(module.net)
    assert cut is not None and cut.stages == (range(3), range(3, 6))


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        (CallsOutside, "tokens is called outside of the call of UntiedGPT"),
        (WronglyPlanned, "blocks.2 reads argument 0, which layers of an earlier stage computed"),
        (WronglyPlannedBoth, "blocks.2 reads argument 0, which layers of an earlier stage computed"),
    ],
)
def test_no_stage_reads_what_it_has_not(kind: type[Trains], shown: str) -> None:
    [result] = certify(kind, networks.batches, layouts=("pp2",), steps=1).results
    assert result.verdict == "refused" and shown in result.message


def test_an_unknown_name_is_told() -> None:
    plan = ModelPlan(on_all_stages=("net.embedding",))
    assert plan.faults(Trains()) == ["plan on_all_stages ('net.embedding') is no module of Trains"]
