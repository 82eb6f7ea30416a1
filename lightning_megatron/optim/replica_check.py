"""What all ranks find out together about a step: a gradient that is no number, copies of a weight that differ."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.reductions import extremes

# Wider elements count as several of 32 bits: the highest of 64, times an even number, would leave the sum.
_INTEGERS = {1: torch.uint8, 2: torch.int16}


def found_nonfinite(stepped: Sequence[Tensor], world: Axis, device: torch.device) -> bool:
    """Whether NaN or Inf is in a gradient of what an optimizer is about to step, on any rank: the same answer
    everywhere. Collective over the world."""
    ends = [extremes(tensor.grad) for tensor in stepped if tensor.grad is not None]
    flag = torch.zeros((), dtype=torch.int32, device=device)
    if ends:
        flag = (~torch.stack(ends).isfinite()).any().to(torch.int32)
    return bool(collectives.all_reduce_(flag, world, "max").item())


def describe_nonfinite(gradients: Gradients, world: Axis) -> list[str]:
    """Which ranks made NaN or Inf, and in which parameters, one line each. Collective over the world.

    The sums are done by then, and show NaN to all ranks; what each had before them it has looked at then. What no rank
    made by itself came with the sum, or after it.
    """
    summed = {
        param.name
        for param, tensor, _ in gradients.stepped()
        if tensor.grad is not None and not bool(extremes(tensor.grad).isfinite().all())
    }
    by_rank = collectives.gather_objects((gradients.nonfinite_before_reduce(), summed), world)
    bad: set[str] = set().union(*(found for _, found in by_rank))
    # What an earlier sum of the same step had may be gone: zeroed, or left out by a hook.
    by_themselves = [
        f"rank {rank}: {', '.join(sorted(made & bad))}" for rank, (made, _) in enumerate(by_rank) if made & bad
    ]
    return by_themselves or [f"no rank by itself, after the sum: {', '.join(sorted(bad))}"]


def differing_copies(gradients: Gradients, mesh: Mesh) -> list[str]:
    """Weights that are not bit by bit the same on all ranks that hold them, one line each, on every rank.

    Collective over the replicas, the axes of replicated parameters, the holders of tied names, and the world.
    """
    params = sorted(gradients.params, key=lambda param: param.name)
    axes: dict[tuple[int, ...], tuple[Axis, list[int]]] = {}
    for place, param in enumerate(params):
        shared = [param.replicas, *param.shard.replicas]
        if param.holders is not None:
            shared.append(param.holders)
        for axis in shared:
            if axis.size > 1:
                axes.setdefault(axis.ranks, (axis, []))[1].append(place)
    prints = [fingerprint(param.parameter.detach()) for param in params]
    differing = set()
    for axis, places in (axes[ranks] for ranks in sorted(axes)):
        own = torch.stack([prints[place] for place in places])
        least, most = collectives.all_reduce(own, axis, "min"), collectives.all_reduce(own, axis, "max")
        for place, is_same in zip(places, (least == most).tolist(), strict=True):
            if not is_same:
                differing.add(f"{params[place].name} on ranks {', '.join(map(str, axis.ranks))}")
    return sorted({line for lines in collectives.gather_objects(sorted(differing), mesh.world) for line in lines})


def fingerprint(x: Tensor) -> Tensor:
    """A number, int64 [], that two tensors share only if they have the same bits, but for chance.

    The sum of the bits, each element's as an integer times an odd number that depends on its place.
    """
    bits = x.contiguous().view(-1).view(_INTEGERS.get(x.element_size(), torch.int32)).to(torch.int64)
    places = torch.arange(1, 2 * bits.numel(), 2, dtype=torch.int64, device=x.device)
    return (bits * places).sum()


def in_words(lines: Iterable[str], limit: int = 20) -> str:
    """Lines under each other, the first of them where there are many."""
    all_lines = list(lines)
    more = [f"and {len(all_lines) - limit} more"] if len(all_lines) > limit else []
    return "\n".join(f"  - {line}" for line in [*all_lines[:limit], *more])
