"""Experts, their master weights and moments, and routers' buffers, saved on one layout and loaded on any other."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor, nn

from lightning_megatron.checkpoint import load, read_entries, rebuild_optimizer, save
from lightning_megatron.checkpoint.verify import verify
from lightning_megatron.mesh import Mesh, NewGroup, Sizes
from lightning_megatron.moe.config import AuxLoss, RouterConfig
from lightning_megatron.moe.experts import Experts
from lightning_megatron.moe.router import Router
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.pipeline.module import PipelineModule
from lightning_megatron.sharding import Initial, shard_of, shard_parameter
from lightning_megatron.trainer.checkpointing import checkpoint_dict
from lightning_megatron.trainer.checkpointing.checkpoint_saver import CheckpointSaver
from lightning_megatron.trainer.checkpointing.contents import MasterSlots, names_of
from tests.harness.ranks import run_on_ranks
from tests.harness.threads import new_group, run_on_threads
from tests.optim.expert_model import E, Given, H, Kind, drawn, experts_on, layout, name_of
from tests.pipeline import meshes
from tests.tensor.plain import fill, part_of

ROUTER = RouterConfig(
    num_experts=E,
    top_k=2,
    score_function="sigmoid",
    bias_update_rate=0.01,
    aux_losses=(AuxLoss(scope="global", coefficient=0.1),),
)
BIAS, COUNTS = "model.layers.0.router.expert_bias", "model.layers.0.router.global_tokens_per_expert"
BIG = 2**53 + 1
# A count that no float64 holds.


class How(NamedTuple):
    """On which ranks, with which optimizer, in which dtype next to master weights."""

    sizes: Sizes
    kind: Kind
    low: torch.dtype | None

    def __str__(self) -> str:
        return f"{name_of(self.sizes)}-{self.kind}" + ("" if self.low is None else "-bf16")


ONE = How(Sizes(), "replicated", None)
HOWS = [
    ONE,
    How(layout(4, 1, 1, 2, 1), "distributed", torch.bfloat16),
    How(layout(4, 1, 1, 4, 1), "distributed", None),
    How(layout(4, 2, 1, 2, 2), "replicated", torch.bfloat16),
    How(layout(4, 2, 1, 1, 1), "distributed", torch.bfloat16),
    How(layout(8, 2, 2, 2, 2), "distributed", None),
    How(layout(8, 2, 1, 4, 1), "replicated", None),
    How(layout(8, 2, 1, 2, 2), "distributed", torch.bfloat16),
]
any_how = pytest.mark.parametrize("how", HOWS, ids=str)


class Layer(nn.Module):
    """A matrix cut over tp, one that is whole, and of the first layer experts with their router."""

    def __init__(self, mesh: Mesh, has_experts: bool) -> None:
        super().__init__()
        self.cut = shard_parameter((7, H), initial=Initial(), dim=0, axis=mesh.tp)
        self.whole = shard_parameter((H, H), initial=Initial(), replicas=(mesh.tp,))
        if has_experts:
            self.router = Router(ROUTER, H, tp=mesh.tp, cut=mesh.tp, name="router", initial=Initial())
            self.experts: Experts = experts_on(mesh)


class Whole(L.LightningModule):
    """Two layers, on two stages where there are two."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        layers = {f"layers.{number}": Layer(mesh, number == 0) for number in range(2)}
        self.model = PipelineModule.from_modules(layers, mesh=mesh)
        for name, parameter in self.named_parameters():
            fill(parameter, drawn(name, *shard_of(parameter).global_shape).float())


class Held:
    """One rank's module, optimizer and what sums for it."""

    def __init__(self, mesh: Mesh, make_group: NewGroup, how: How) -> None:
        self.mesh, self.module = mesh, Whole(mesh)
        cast(Any, self.module)._trainer = SimpleNamespace()
        named = dict(self.module.named_parameters())
        # A stage without experts has an empty group.
        experts = [parameter for name, parameter in named.items() if "experts" in name]
        rest = [parameter for name, parameter in named.items() if "experts" not in name]
        self.optimizer = torch.optim.AdamW([{"params": experts, "lr": 0.02}, {"params": rest}], lr=0.01)
        config = OptimizerConfig(kind=how.kind, bucket_size=60)
        self.given = Given(named, mesh, make_group, self.optimizer, config, low=how.low, is_exact=True)

    @property
    def mains(self) -> MasterSlots:
        return MasterSlots.of(self.given.dp_comm)

    def train(self, steps: range) -> None:
        for number in steps:
            self.given.step(number)
            if BIAS in (buffers := dict(self.module.named_buffers())):
                buffers[BIAS] += torch.arange(E) * 1e-3
                buffers[COUNTS] += BIG

    def save(self, path: Path) -> None:
        self.given.dp_comm.gather_all()
        checkpoint = {"state_dict": self.module.state_dict(), "optimizer_states": [], "epoch": 3}
        saving = cast(CheckpointSaver, _Saving(self.mesh))
        checkpoint_dict.save(str(path), checkpoint, self.module, [self.optimizer], self.mains, self.mesh, saving)

    def load(self, path: Path) -> None:
        mesh, mains = self.mesh, self.mains
        # A mesh with no process groups can read too: each rank by itself, which does not ask for all there is.
        is_imagined = mesh.world.size > 1 and mesh.world.group is None
        world = Mesh.single().world if is_imagined else mesh.world
        io = TorchCheckpointIO()
        checkpoint = checkpoint_dict.load(str(path), self.module, mains, mesh, world, io, True, strict=True)
        self.module.load_state_dict(checkpoint["state_dict"])
        if self.given.main is not None:
            self.given.main.load(checkpoint["state_dict"])
        if not is_imagined:
            checkpoint_dict.load_optimizers(checkpoint, self.module, [self.optimizer], mains, mesh, world)
            return
        [rest], names = checkpoint["optimizer_states"].rests, names_of(self.module, mains)
        moments = rebuild_optimizer(self.optimizer, names, rest, read_entries(path))
        load(path, moments, world=world, among=lambda name: False)

    def differences(self, wanted: Mapping[str, Tensor]) -> list[str]:
        """Names of what is not, bit by bit, this rank's part of the unsplit tensors."""
        found = [
            name
            for name, b in self.module.named_buffers()
            if b.dtype != wanted[name].dtype or not b.equal(wanted[name])
        ]
        for shard in self.given.gradients.param_shards:
            name, parameter = shard.param.name, shard.param.parameter
            states: dict[str, Tensor] = self.optimizer.state[shard.tensor]
            held = {name: shard.tensor} | {f"optimizer.0.{name}.{key}": value for key, value in states.items()}
            for full_name, tensor in held.items():
                if full_name.endswith(".step"):
                    part = wanted[full_name]
                else:
                    local = torch.zeros(parameter.shape)
                    shard_of(parameter).valid(local).copy_(part_of(wanted[full_name], shard_of(parameter)))
                    part = local.flatten()[shard.range.start : shard.range.end].view(tensor.shape)
                found += [] if part.equal(tensor.detach()) else [full_name]
        for name, parameter in self.module.named_parameters():
            part = part_of(wanted[name], shard_of(parameter)).to(parameter.dtype)
            found += [] if shard_of(parameter).valid(parameter.detach()).equal(part) else [f"parameter {name}"]
        return found


class _Saving:
    """Writes while the run waits."""

    def __init__(self, mesh: Mesh) -> None:
        self.world = mesh.world

    def save_state(self, path: str, pieces: Any, meta: Any, trainer: Any) -> None:
        save(path, pieces, meta, world=self.world)


def unsplit(held: Held) -> dict[str, Tensor]:
    """All that one device holds, by the names of a checkpoint."""
    tensors = {name: tensor.detach().clone() for name, tensor in held.module.state_dict().items()}
    for name, parameter in held.module.named_parameters():
        for key, value in held.optimizer.state[parameter].items():
            tensors[f"optimizer.0.{name}.{key}"] = value.detach().clone()
    return tensors


@pytest.fixture(scope="module")
def wanted() -> dict[str, Tensor]:
    """What every layout must save."""
    held = Held(Mesh.single(), new_group, ONE)
    held.train(range(3))
    return unsplit(held)


def trained_and_saved(world: Any, how: How, path: Path) -> None:
    mesh = Mesh.single() if how is ONE else Mesh.build(how.sizes, world.rank(), new_group)
    held = Held(mesh, new_group, how)
    held.train(range(3))
    held.save(path)


@any_how
def test_what_a_layout_saves_every_other_one_loads_bit_by_bit(
    how: How, wanted: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "step.ckpt"
    run_on_threads(how.sizes.world, lambda world: trained_and_saved(world, how, path))
    # Chunks of every tensor cover it, and none overlap.
    assert verify(path) == []
    entries = read_entries(path)
    assert {name: (entry.shape, entry.dtype) for name, entry in entries.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in wanted.items()
    }
    assert wanted[COUNTS].tolist() == [3 * BIG] * E and wanted[BIAS].count_nonzero() == E - 1
    for other in HOWS:
        for rank in range(other.sizes.world):
            held = Held(Mesh.imagine(rank, other.sizes), new_group, other)
            assert held.differences(wanted), "it would be noticed"
            held.load(path)
            assert held.differences(wanted) == [], f"rank {rank} of {other}"


@any_how
def test_each_rank_writes_a_share_of_the_experts(how: How, tmp_path: Path) -> None:
    run_on_threads(how.sizes.world, lambda world: trained_and_saved(world, how, tmp_path / "step.ckpt"))
    experts = [entry for name, entry in read_entries(tmp_path / "step.ckpt").items() if ".experts." in name]
    files = {chunk.location.file for entry in experts for chunk in entry.chunks}
    # Replicas share the writing, where they are several and where they hold parts.
    assert len(files) == how.sizes.world


# --- real ranks, one stage with experts and one without ---------------------------------------------------------------

PIPELINED = How(layout(8, 2, 1, 2, 1, pp=2), "distributed", torch.bfloat16)


def saves_and_goes_on(path: Path) -> None:
    held = Held(meshes.make_mesh(PIPELINED.sizes), meshes.new_group, PIPELINED)
    held.train(range(3))
    held.save(path)


def loads_and_goes_on(path: Path, how: How, wanted: dict[str, Tensor], after: dict[str, Tensor]) -> tuple[Any, Any]:
    held = Held(meshes.make_mesh(how.sizes), meshes.new_group, how)
    held.load(path)
    first = held.differences(wanted)
    held.train(range(3, 4))
    return first, held.differences(after)


def test_a_run_with_experts_on_one_stage_goes_on_bit_by_bit_on_real_ranks(
    wanted: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "step.ckpt"
    held = Held(Mesh.single(), new_group, ONE)
    held.train(range(4))
    after = unsplit(held)
    run_on_ranks(8, saves_and_goes_on, path)
    for how in (PIPELINED, HOWS[3]):
        found = run_on_ranks(how.sizes.world, loads_and_goes_on, path, how, wanted, after)
        assert found == [([], [])] * how.sizes.world


# --- a single file that one device wrote ------------------------------------------------------------------------------


class _File:
    """Reads what a test has."""

    def __init__(self, checkpoint: dict[str, Any]) -> None:
        self._checkpoint = checkpoint

    def load_checkpoint(self, path: Any, **options: Any) -> dict[str, Any]:
        return dict(self._checkpoint)


def loaded_file(rank: int, sizes: Sizes, path: Path, checkpoint: dict[str, Any]) -> tuple[Whole, dict[str, Any]]:
    mesh = Mesh.imagine(rank, sizes)
    module = Whole(mesh)
    io, alone = cast(Any, _File(checkpoint)), Mesh.single().world
    # Alone, a rank does not know what the others ask for.
    return module, checkpoint_dict.load(str(path), module, MasterSlots(), mesh, alone, io, True, strict=sizes.pp == 1)


@pytest.mark.parametrize("sizes", [layout(2, 1, 1, 2, 1), layout(2, 1, 1, 1, 2), layout(4, 2, 1, 2, 2)], ids=name_of)
def test_each_rank_takes_its_experts_of_a_file(sizes: Sizes, wanted: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "file.ckpt"
    path.touch()
    weights = {name: tensor for name, tensor in wanted.items() if not name.startswith("optimizer")}
    for rank in range(sizes.world):
        module, checkpoint = loaded_file(rank, sizes, path, {"state_dict": weights})
        module.load_state_dict(checkpoint["state_dict"])
        for name, parameter in module.named_parameters():
            shard = shard_of(parameter)
            assert shard.valid(parameter.detach()).equal(part_of(weights[name], shard)), name


def test_ranks_that_hold_all_experts_take_a_file_as_it_is(wanted: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "file.ckpt"
    path.touch()
    weights = {name: tensor for name, tensor in wanted.items() if not name.startswith("optimizer")}
    checkpoint = {"state_dict": weights, "optimizer_states": [{"state": {}}]}
    assert loaded_file(1, Sizes(world=2), path, checkpoint)[1] == checkpoint


def test_a_step_changes_every_number_that_is_compared(wanted: dict[str, Tensor]) -> None:
    experts = {name: tensor for name, tensor in wanted.items() if "experts" in name and not name.endswith("step")}
    # Weights and two moments of two matrices.
    assert len(experts) == 6
    for name, tensor in experts.items():
        before = torch.zeros(tensor.shape) if name.startswith("optimizer") else drawn(name, *tensor.shape).float()
        assert (tensor != before).all(), name
