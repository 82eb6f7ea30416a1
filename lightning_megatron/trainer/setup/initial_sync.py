"""All ranks begin alike: one seed, one state of the random generators, one value of every replicated tensor."""

import os
import random
from functools import partial

import numpy as np
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from lightning_megatron.any_module.cut_model import names_around
from lightning_megatron.any_module.pipelined_modules import names_inside, pipelined_modules
from lightning_megatron.any_module.tensor_styles import names_of_taken
from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.sharding import Shard


def sync_seed(world: Axis) -> None:
    """Gives all ranks the first rank's seed, of which initial values and dropout masks are functions, and the states of
    its generators: a loader then shuffles as it would on one device. Collective, in host memory."""
    own = torch.initial_seed()
    first = collectives.broadcast_object(own, world)
    if int(collectives.all_reduce(torch.tensor(int(own != first)), world, "max")):
        rank_zero_warn(
            "ranks were seeded differently; all now use the seed of rank 0. Seed them alike: seed_everything"
        )
    if own != first:
        torch.manual_seed(first)
    sync_generators(world)


def sync_generators(world: Axis) -> None:
    """Gives all ranks the first rank's states of the default generators of the CPU, from which samplers draw."""
    if world.size == 1:
        return
    states = (torch.get_rng_state(), np.random.get_state(), random.getstate())
    torch_state, numpy_state, python_state = collectives.broadcast_object(states, world)
    torch.set_rng_state(torch_state)
    np.random.set_state(numpy_state)
    random.setstate(python_state)


@torch.no_grad()
def sync_module_states(module: nn.Module, mesh: Mesh) -> None:
    """Gives replicated parameters and buffers the first holder's values, as DistributedDataParallel does.

    Sharded parameters need none of this: they are equal by construction.
    """
    if mesh.world.size == 1:
        return
    inside = names_inside(module)
    model_prefixes = tuple(f"{name}." for name in pipelined_modules(module))
    tensors: list[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    # Of networks that were cut as they are, the values are not those of a seed.
    around, taken = names_around(module), names_of_taken(module)
    for name, tensor in tensors:
        shard = getattr(tensor, "shard", None)
        if (isinstance(shard, Shard) and name not in taken) or is_lazy(tensor):
            continue
        is_inside = name in inside or (bool(model_prefixes) and name.startswith(model_prefixes))
        axes = [mesh.axis("dp+cp"), mesh.tp] if is_inside else [mesh.world]
        if isinstance(shard, Shard):
            axes = [shard.data or mesh.axis("dp+cp"), *shard.replicas]
        contiguous = tensor.data.contiguous()
        for axis in axes:
            collectives.broadcast_(contiguous, axis)
        tensor.data.copy_(contiguous)
    _sync_over_stages(
        {name: tensor.data for name, tensor in tensors if name in around and not is_lazy(tensor)}, mesh.pp
    )


def _sync_over_stages(own: dict[str, Tensor], pp: Axis) -> None:
    """Gives tensors that several stages hold, by name, the value of the first one on `pp`."""
    shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
    holders: dict[str, list[int]] = {}
    held_by = collectives.gather_objects({name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}, pp)
    for rank, held in enumerate(held_by):
        shapes |= held
        for name in held:
            holders.setdefault(name, []).append(rank)
    device = next(iter(own.values())).device if own else torch.device("cpu")
    for name, ranks in sorted(holders.items()):
        if len(ranks) == 1:
            continue
        # The others take part, since a group of these ranks alone is not there yet.
        shape, dtype = shapes[name]
        tensor = own[name].contiguous() if name in own else torch.empty(shape, dtype=dtype, device=device)
        collectives.broadcast_(tensor, pp, ranks[0])
        if name in own:
            own[name].copy_(tensor)


def seed_workers_by_dp_rank(dataloader: object, dp: Axis) -> object:
    """Seeds loader workers by dp rank under `seed_everything(workers=True)`; Lightning would use the global rank."""
    is_seeded = bool(int(os.environ.get("PL_SEED_WORKERS", "0")))
    if is_seeded and isinstance(dataloader, DataLoader) and dataloader.worker_init_fn is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=dp.rank)
    return dataloader
