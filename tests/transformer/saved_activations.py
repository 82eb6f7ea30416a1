"""How many bytes layers save for backward, measured on fake tensors: what is alive once the forward is over."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_megatron.comm import collectives
from lightning_megatron.comm.rng import Draws
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.pipeline.module import StagePart
from lightning_megatron.transformer import recompute
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.layer import ExpertLayer, TransformerLayer, build_layer
from lightning_megatron.transformer.position_cache import PositionCache
from lightning_megatron.transformer.recompute import RecomputeConfig
from lightning_megatron.transformer.tokens import Tokens, stream_of
from tests.harness.threads import new_group, run_on_threads


@contextmanager
def pretended(sizes: Sizes, dtype: torch.dtype) -> Iterator[Mesh]:
    """A mesh whose collectives answer at once, with garbage; nothing but shapes is true. Layers are made in `dtype`."""
    before = torch.get_default_dtype()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=sizes.world)
    torch.set_default_dtype(dtype)
    try:
        with FakeTensorMode():
            yield Mesh.build(sizes, 0, lambda _: dist.group.WORLD)
    finally:
        torch.set_default_dtype(before)
        dist.destroy_process_group()


class _Made(TorchDispatchMode):
    """Notes every storage that an operation made, and not those that were there before."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[StorageWeakRef, int] = {}
        self.foreign: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and (ref := StorageWeakRef(tensor.untyped_storage())) not in self.storages:
                self.foreign.add(ref)
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                ref = StorageWeakRef(tensor.untyped_storage())
                if ref not in self.foreign:
                    self.storages[ref] = tensor.untyped_storage().nbytes()
        return made


def saved_bytes(
    config: TransformerConfig,
    sizes: Sizes,
    batch: int,
    sequence: int,
    dtype: torch.dtype,
    recomputed: RecomputeConfig | None = None,
    num_layers: int = 1,
) -> int:
    """Bytes of distinct storages, parameters left out, that are alive between forward and backward of a stage.

    The input of the stage is among them, where something saves it, its output is not.
    """
    recomputed = recomputed if recomputed is not None else RecomputeConfig()
    with pretended(sizes, dtype) as mesh:
        gc.disable()
        try:
            return _kept_bytes(config, mesh, batch, sequence, dtype, recomputed, num_layers)
        finally:
            gc.enable()


def expert_saved_bytes(
    config: TransformerConfig,
    sizes: Sizes,
    batch: int,
    sequence: int,
    dtype: torch.dtype,
    recomputed: RecomputeConfig | None = None,
) -> int:
    """The same of a layer of experts on rank 0: of real tensors on ranks that are threads, as its sizes are data."""
    recomputed = recomputed if recomputed is not None else RecomputeConfig()

    def on_rank(world: Any) -> int:
        mesh = Mesh.build(sizes, world.rank(), new_group)
        # A thread finds no circles while another one looks for them.
        return _kept_bytes(config, mesh, batch, sequence, dtype, recomputed, 1, is_watched=world.rank() == 0)

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    gc.disable()
    try:
        return int(run_on_threads(sizes.world, on_rank)[0])
    finally:
        gc.enable()
        torch.set_default_dtype(before)


def _kept_bytes(
    config: TransformerConfig,
    mesh: Mesh,
    batch: int,
    sequence: int,
    dtype: torch.dtype,
    recomputed: RecomputeConfig,
    num_layers: int,
    is_watched: bool = True,
) -> int:
    layers = [build_layer(config, mesh, i, f"layers.{i}").train() for i in range(num_layers)]
    tokens = stream_of(
        (batch, sequence), positions=PositionCache(config), mesh=mesh, draws=Draws(seed=1), device=torch.device("cpu")
    )
    # Once for all layers: no layer saves them.
    assert tokens.shard_keys.shape == (tokens.num_tokens // mesh.sp.size,)
    for layer in layers:
        recompute.set_recomputed(layer, recomputed)
    auxiliary: list[Tensor] = []
    runs = [_run_of(layer, tokens, mesh, auxiliary) for layer in layers]
    parts = [StagePart(layer, True, run) for layer, run in zip(layers, runs, strict=True)]
    runner = recompute.RecomputeRunner(recomputed, tp=mesh.tp, sp=mesh.sp)
    leaf = torch.empty(tokens.num_tokens // mesh.sp.size, config.hidden_size, dtype=dtype, requires_grad=True)
    with _Made() as made:
        # Not the leaf, which lives in any case.
        output = runner(parts, leaf.clone())
    # What is on its way to ranks that are threads is theirs.
    collectives.barrier(mesh.world)
    if is_watched:
        # What the forward leaves in circles is young, and found without a look at all that ever was.
        gc.collect(0)
    assert output.shape == leaf.shape
    of_output = StorageWeakRef(output.untyped_storage())
    return sum(nbytes for ref, nbytes in made.storages.items() if not ref.expired() and ref != of_output)


def _run_of(
    layer: TransformerLayer | ExpertLayer, tokens: Tokens, mesh: Mesh, auxiliary: list[Tensor]
) -> Callable[[Tensor], Tensor]:
    if isinstance(layer, TransformerLayer):
        return lambda hidden: layer(hidden, tokens)  # type: ignore[no-any-return]
    # Once for all layers, as the keys are; each token counts 1, as in a batch without targets.
    routed = tokens.routed(torch.ones(tokens.shape), mesh.tp, 1)

    def run(hidden: Tensor) -> Tensor:
        hidden, loss = layer(hidden, tokens, routed)
        # It is on its way to the head.
        auxiliary.append(loss)
        return hidden

    return run
