"""Modules that cut their weights themselves, by parallelize_module, compute what they compute on one device."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional as F

from lightning_megatron.any_module.dtensor_weights import dtensor_faults, take_dtensors
from lightning_megatron.checkpoint import read_entries
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.sharding import Box, shard_of
from lightning_megatron.testing import certify
from tests.any_module import networks
from tests.harness.ranks import RankFailed, run_on_ranks
from tests.trainer.fits import Parts, parts_apart, weights
from tests.trainer.layouts import Layout, make_trainer


class PlacedGPT(networks.GPT):
    """A GPT whose positions are an embedding, too, and whose norms are no longer ones."""

    def __init__(self) -> None:
        super().__init__()
        del self.places
        self.places = nn.Embedding(networks.TOKENS, networks.WIDTH)
        for norm in (one for one in self.modules() if isinstance(one, nn.LayerNorm)):
            nn.init.normal_(norm.weight, 1, 0.1)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1])[None])
        logits = self.head(self.norm(self.run_blocks(x)))
        assert targets is not None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class Parallelizes(networks.Trains):
    """Cuts its network over the mesh of the strategy, as one does under ModelParallelStrategy."""

    network = PlacedGPT

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            if self.device_mesh is not None:
                parallelize_module(self.net, self.device_mesh["tensor_parallel"], self.styles())
                # What is cut is a weight each.
                self.net.head.weight = self.net.tokens.weight

    def styles(self) -> dict[str, Any]:
        """Linears, embedding and head, between activations that all ranks have."""
        attention = {f"blocks.*.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        return attention | {
            "tokens": RowwiseParallel(input_layouts=Replicate()),
            "blocks.*.attention.out": RowwiseParallel(),
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }


class ParallelizesTokens(Parallelizes):
    """Cuts the tokens between linears, too."""

    def styles(self) -> dict[str, Any]:
        """Norms and residuals on the tokens of a rank, attention and linears on all of them."""
        whole, own = Replicate(), Shard(1)
        return super().styles() | {
            "tokens": RowwiseParallel(input_layouts=whole, output_layouts=own),
            "places": RowwiseParallel(input_layouts=whole, output_layouts=own),
            "blocks.*.norm_1": SequenceParallel(),
            "blocks.*.attention": PrepareModuleInput(input_layouts=(own,), desired_input_layouts=(whole,)),
            "blocks.*.attention.out": RowwiseParallel(output_layouts=own),
            "blocks.*.norm_2": SequenceParallel(),
            "blocks.*.up": ColwiseParallel(input_layouts=own),
            "blocks.*.down": RowwiseParallel(output_layouts=own),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=own, output_layouts=whole),
        }


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["dp2tp2m2", "dp2tp2-zero"])
@pytest.mark.parametrize("module", [Parallelizes, ParallelizesTokens])
def test_a_network_that_is_cut_by_dtensors_computes_what_one_device_computes(
    module: Callable[[], Any], layout: str
) -> None:
    certificate = certify(
        module,
        networks.batches,
        layouts=(layout,),
        steps=2,
        # The first gradients have norms of 1.3 and more.
        trainer={"gradient_clip_val": 0.5},
    )
    certificate.assert_equal()
    largest = {name: value for result in certificate.results for name, value in result.largest.items()}
    assert {"loss", "gradient", "norm", "weights"} <= largest.keys() and max(largest.values()) < 1e-10


class Validates(ParallelizesTokens, networks.Validates):
    """Is validated, too."""


def validated(layout: Layout) -> float:
    [metrics] = make_trainer(layout).validate(Validates(), networks.loader(), verbose=False)
    return metrics["validation"]


def test_a_network_that_is_cut_by_dtensors_is_validated() -> None:
    [wanted] = run_on_ranks(1, validated, Layout(is_plain=True), init=False)
    found = run_on_ranks(2, validated, Layout(world=2, tp=2), init=False)
    assert found == pytest.approx([wanted] * 2, rel=1e-12)


ZERO = OptimizerConfig(kind="distributed", bucket_size=700)


class Losses(L.Callback):
    """Keeps the loss of each step, and saves after some."""

    def __init__(self, path: str = "", num_steps: int = 0) -> None:
        self.path, self.num_steps, self.losses = path, num_steps, list[float]()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        if trainer.global_step == self.num_steps:
            trainer.save_checkpoint(self.path)


def fitted(layout: Layout, callback: Losses, ckpt_path: str | None = None) -> tuple[list[float], Parts]:
    """The losses of a fit of 6 steps, or what is left of them, and the weights behind it."""
    module = ParallelizesTokens()
    options = {"gradient_clip_val": 0.5, "callbacks": [callback], "use_distributed_sampler": True}
    make_trainer(layout, **options).fit(module, networks.loader(networks.ROWS // layout.dp), ckpt_path=ckpt_path)
    return callback.losses, weights(module)


@pytest.mark.parametrize("layout", [Layout(), Layout(world=4, tp=2, optimizer=ZERO)])
def test_a_checkpoint_of_dtensors_holds_whole_weights_that_any_layout_goes_on_with(
    layout: Layout, tmp_path: Path
) -> None:
    path = str(tmp_path / "saved")
    [(wanted, full)] = run_on_ranks(1, fitted, Layout(is_plain=True), Losses(), init=False)
    run_on_ranks(2, fitted, Layout(world=2, tp=2), Losses(path, 2), init=False)
    shapes = {name: tuple(entry.shape) for name, entry in read_entries(path).items()}
    assert all(shapes[name] == tuple(weight.shape) for name, (_, weight) in full.items())
    for rank, (losses, parts) in enumerate(run_on_ranks(layout.world, fitted, layout, Losses(), path, init=False)):
        assert losses == pytest.approx(wanted[2:], rel=1e-10), rank
        assert parts_apart(parts, full) < 1e-10


class UnseededGPT(PlacedGPT):
    """Begins with other values in each process."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(os.getpid())
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.0, 0.1, generator)


class Unseeded(ParallelizesTokens):
    """Cuts such a network."""

    network = UnseededGPT


def began_with(layout: Layout) -> dict[str, Tensor]:
    module = Unseeded()
    make_trainer(layout, limit_train_batches=0).fit(module, networks.loader())
    return {name: weight.detach() for name, weight in module.named_parameters()}


def test_copies_of_a_slice_begin_as_one_whatever_the_seeds() -> None:
    first, second, third, fourth = run_on_ranks(4, began_with, Layout(world=4, tp=2), init=False)
    for name, weight in first.items():
        assert torch.equal(weight, third[name]) and torch.equal(second[name], fourth[name])
        is_cut = "norm" not in name and not name.endswith(("down.bias", "out.bias"))
        assert torch.equal(weight, second[name]) != is_cut, name


def cut_mlp() -> tuple[nn.Sequential, Mesh, DeviceMesh]:
    """Two linears, cut over the two ranks of tp."""
    mesh = Mesh.build(Sizes(world=2, tp=2), dist.get_rank(), lambda ranks: dist.group.WORLD)
    device_mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
    parallelize_module(net, device_mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return net, mesh, device_mesh


def reads() -> None:
    net, mesh, _ = cut_mlp()
    first = net[0]
    whole, names = first.weight.full_tensor(), list(net.state_dict())
    assert take_dtensors(net, mesh.tp) and not take_dtensors(net, mesh.tp)
    assert list(net.state_dict()) == names == [name for name, _ in net.named_parameters()]
    assert isinstance(first.weight, DTensor) and torch.equal(first.weight.full_tensor(), whole)
    held = first._parameters["weight"]
    assert not isinstance(held, DTensor) and torch.equal(held, whole[3 * mesh.tp.rank :][:3])
    assert shard_of(held).box == Box((3 * mesh.tp.rank, 0), (3, 4))
    copied = copy.deepcopy(net)
    assert torch.equal(copied(torch.ones(2, 4)), net(torch.ones(2, 4)))
    with torch.no_grad():
        first.weight.fill_(2)
    assert torch.equal(held, torch.full((3, 4), 2.0)) and not torch.equal(copied[0].weight.full_tensor(), whole * 0 + 2)
    first.weight = nn.Parameter(torch.zeros(6, 4))
    assert not isinstance(first.weight, DTensor) and isinstance(first, nn.Linear)


def test_a_weight_is_read_as_a_dtensor_and_trained_as_a_slice() -> None:
    run_on_ranks(2, reads)


def faults_of(change: Callable[[nn.Sequential, DeviceMesh], None], sizes: dict[str, Any]) -> str:
    net, mesh, device_mesh = cut_mlp()
    change(net, device_mesh)
    mesh = Mesh.imagine(mesh.global_rank, Sizes(**({"world": 2, "tp": 2} | sizes)))
    return "\n".join(dtensor_faults(net, mesh))


def nothing(net: nn.Sequential, mesh: DeviceMesh) -> None:
    """Leaves all as it is."""


def uneven(net: nn.Sequential, mesh: DeviceMesh) -> None:
    net.append(parallelize_module(nn.Linear(4, 3), mesh, ColwiseParallel()))


def buffered(net: nn.Sequential, mesh: DeviceMesh) -> None:
    net.append(distribute_module(nn.BatchNorm1d(4), mesh))


def strided(net: nn.Sequential, mesh: DeviceMesh) -> None:
    weight = distribute_tensor(torch.ones(4, 4), mesh, [_StridedShard(0, split_factor=2)])
    net.register_parameter("odd", nn.Parameter(weight))


def two_dimensional(net: nn.Sequential, mesh: DeviceMesh) -> None:
    both = init_device_mesh("cpu", (1, 2))
    net.register_parameter("odd", nn.Parameter(distribute_tensor(torch.ones(4), both, [Replicate(), Shard(0)])))


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (nothing, {}, ""),
    (uneven, {}, "3.weight of Sequential is a DTensor of the shape [3, 4], whose dim 0 must be a multiple of"),
    (buffered, {}, "3.running_mean (and 2 more) of Sequential is a DTensor and a buffer; buffers are whole on every"),
    (strided, {}, "odd of Sequential is a DTensor placed as"),
    (two_dimensional, {}, "odd of Sequential is a DTensor over the ranks [[0, 1]], and weights are cut over those of"),
    (nothing, {"tp": 1}, "0.weight (and 3 more) of Sequential is a DTensor over the ranks [0, 1], and weights are"),
    (nothing, {"world": 4, "pp": 2}, "is a DTensor beside pipeline_model_parallel_size (2), and one trains over"),
    (nothing, {"world": 4, "cp": 2}, "is a DTensor beside context_parallel_size (2), and one trains over"),
    (nothing, {"ep": 2}, "is a DTensor beside expert_model_parallel_size (2), and one trains over"),
    (nothing, {"sequence_parallel": True}, "is a DTensor beside sequence_parallel (True), and one trains over"),
]


@pytest.mark.parametrize(("change", "sizes", "shown"), REFUSED)
def test_dtensors_that_cannot_be_taken_are_refused_by_name(change: Any, sizes: dict[str, Any], shown: str) -> None:
    for faults in run_on_ranks(2, faults_of, change, sizes):
        assert shown in faults and bool(faults) == bool(shown)


class ReturnsDTensor(Parallelizes):
    """Computes its loss of a DTensor."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net.head.weight.square().mean()


class LogsDTensor(Parallelizes):
    """Logs a norm of the whole weight."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("norm", self.net.head.weight.detach().norm())
        return super().training_step(batch, batch_idx)


def fit(module: Callable[[], L.LightningModule], callbacks: list[L.Callback]) -> None:
    make_trainer(Layout(world=2, tp=2), callbacks=callbacks).fit(module(), networks.loader())


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")
@pytest.mark.parametrize(
    ("module", "callbacks", "shown"),
    [
        (ReturnsDTensor, [], "the step returned a DTensor as its loss"),
        (LogsDTensor, [], "got a DTensor; log its full_tensor"),
        (Parallelizes, [WeightAveraging()], "WeightAveraging copies the module before the DTensors"),
        (networks.TrainsOverTensor, [WeightAveraging()], "WeightAveraging copies the module before its network"),
    ],
)
def test_a_module_that_hands_on_dtensors_is_told(
    module: Callable[[], L.LightningModule], callbacks: list[L.Callback], shown: str
) -> None:
    with pytest.raises(RankFailed, match=shown):
        run_on_ranks(2, fit, module, callbacks, init=False)


class TellsMesh(networks.Trains):
    """Keeps the mesh that it finds where it builds its network."""

    def configure_model(self) -> None:
        super().configure_model()
        self.found = self.device_mesh


def meshes(layout: Layout) -> list[Any]:
    module = TellsMesh()
    make_trainer(layout, limit_train_batches=0).fit(module, networks.loader())
    mesh = module.found
    if mesh is None:
        return []
    rows = [mesh[name] for name in ("data_parallel", "tensor_parallel")]
    return [(row.mesh.tolist(), row.get_local_rank(), dist.get_process_group_ranks(row.get_group())) for row in rows]


def test_the_device_mesh_of_a_module_has_the_ranks_of_dp_and_tp() -> None:
    assert run_on_ranks(1, meshes, Layout(), init=False) == [[]]
    assert run_on_ranks(2, meshes, Layout(world=2), init=False)[1] == [([0, 1], 1, [0, 1]), ([1], 0, [1])]
    found = run_on_ranks(4, meshes, Layout(world=4, pp=2, microbatches=2), init=False)
    assert found[2] == [([2, 3], 0, [2, 3]), ([2], 0, [2])]
