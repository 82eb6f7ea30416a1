"""Bytes that a rank holds from step to step, tensor by tensor, and an error of used-up memory that says them."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_megatron.planner.hardware import GIGA
from lightning_megatron.planner.memory_tracker import allocated_bytes

# What torch's allocator of host memory says.
_NO_HOST_MEMORY = "can't allocate memory"


def storage_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the tensors' storages by address, each storage once, as much as an allocator of a GPU takes for it."""
    found = {}
    for tensor in tensors:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = own.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = allocated_bytes(storage)
    return found


def stepped_by(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """The tensors that optimizers step: parameters, master weights, or shards of these."""
    return [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]


def gradients_of(module: nn.Module, optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Gradients on the parameters and on what the optimizers step."""
    parameters = [*module.parameters(), *stepped_by(optimizers)]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def held_bytes(module: nn.Module, optimizers: Sequence[Optimizer], gradient_bytes: int | None = None) -> dict[str, int]:
    """Bytes of its device that this rank holds from step to step, by kind; `gradient_bytes` where they were counted
    before."""
    # Weights without values (`sharding.deferring`) must not get them for that.
    with torch._C.DisableTorchFunctionSubclass():
        if gradient_bytes is None:
            gradient_bytes = sum(storage_bytes(gradients_of(module, optimizers)).values())
        weights = storage_bytes(module.parameters())
        device = {parameter.device.type for parameter in module.parameters()}
        stepped = storage_bytes(x for x in stepped_by(optimizers) if x.device.type in device)
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        # Beside a GPU the host has the numbers of steps, and what is offloaded to it.
        tensors = [x for state in states for x in state.values() if isinstance(x, Tensor) and x.dim()]
        moments = storage_bytes(x for x in tensors if x.device.type in device)
    return {
        "weights": sum(weights.values()),
        "gradients": gradient_bytes,
        "master_weights": sum(size for address, size in stepped.items() if address not in weights),
        "moments": sum(moments.values()),
    }


def tell_what_was_held(error: BaseException, module: nn.Module, optimizers: Sequence[Optimizer], rank: int) -> None:
    """Adds to an error of memory that is used up what this rank held; leaves other errors as they are."""
    if not isinstance(error, torch.OutOfMemoryError) and _NO_HOST_MEMORY not in str(error):
        return
    kinds = held_bytes(module, optimizers)
    told = ", ".join(f"{kind.replace('_', ' ')} {size / GIGA:.3g}" for kind, size in kinds.items() if size)
    error.add_note(
        f"rank {rank} held from step to step, in GB: {told}; the rest is activations and what is computed from them. "
        "Less is held with OptimizerConfig(kind='distributed'), cpu_offload=True there, RecomputeConfig("
        "granularity='selective'), smaller microbatches, or more ranks of tensor, pipeline or context parallelism"
    )
