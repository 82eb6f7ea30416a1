"""Reductions of single gradients, and the axes of pp ranks that hold one name."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_megatron.mesh import Axis, Mesh, NewGroup

# Elements of a gradient whose squares are summed in float32.
_NORM_ROW = 256
# Wider elements count as several of 32 bits: the highest of 64, times an even number, would leave the sum.
_INTEGERS = {1: torch.uint8, 2: torch.int16}
# Elements that are hashed at once.
_STRETCH = 1 << 22


def square(x: Tensor) -> Tensor:
    """The sum of the squares of `x`, float64 [].

    Stretches of 256 elements are summed in float32 at least and those sums in float64: one float32 sum over a large
    tensor drifts on CPU, and float64 throughout converts every element.
    """
    if x.is_sparse:
        x = x.coalesce().values()
    if x.is_contiguous() and x.numel() % _NORM_ROW == 0:
        dtype = torch.promote_types(x.dtype, torch.float32)
        x = torch.linalg.vector_norm(x.view(-1, _NORM_ROW), dim=1, dtype=dtype)
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square()


def total(numbers: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of float64 numbers on the device, [], zero where there are none."""
    return joined(numbers, device).sum() if numbers else torch.zeros((), dtype=torch.float64, device=device)


def joined(numbers: Sequence[Tensor], device: torch.device) -> Tensor:
    """The numbers in one tensor on the device [numbers, ...], in any order: those of each other device come by one
    copy."""
    devices = dict.fromkeys(number.device for number in numbers)
    stacked = (torch.stack([x for x in numbers if x.device == one]) for one in devices)
    return torch.cat([x.to(device, non_blocking=x.device.type == "cpu") for x in stacked])


def extremes(x: Tensor) -> Tensor:
    """Minimum and maximum of `x`, float64 [2], finite only if all of `x` is; zeros for an empty tensor.

    Its sum would not do, which may overflow where no element does, nor its largest magnitude, whose CPU kernel takes
    twenty times as long. NaN in `x` is both minimum and maximum.
    """
    values = x.coalesce().values() if x.is_sparse else x
    if not values.numel():
        return torch.zeros(2, dtype=torch.float64, device=x.device)
    return torch.stack(torch.aminmax(values)).double()


def fingerprint(x: Tensor) -> Tensor:
    """A hash of the tensor's bits, int64 []: the sum of all elements as integers, each times its own odd number."""
    bits = x.contiguous().view(-1).view(_INTEGERS.get(x.element_size(), torch.int32))
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    # In stretches, because as int64 the whole would take several times the memory of the tensor.
    for start in range(0, bits.numel(), _STRETCH):
        part = bits[start : start + _STRETCH].to(torch.int64)
        total += (part * torch.arange(2 * start + 1, 2 * (start + part.numel()), 2, device=x.device)).sum()
    return total


def scale_in_place(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies each tensor in place by the number `factor` []."""
    for device, dtype in {(tensor.device, tensor.dtype) for tensor in tensors}:
        alike = [t for t in tensors if t.dtype is dtype and t.device == device]
        torch._foreach_mul_(alike, factor.to(device, dtype))


def divided(axis: Axis, size: int, new_group: NewGroup) -> tuple[Axis, Axis]:
    """The axis of `size` ranks next to each other of which this one is, and the axis of those in its place among other
    such; the full axis and this rank alone where that has no more. Collective over the axis."""
    if not size or size >= axis.size:
        return axis, Axis.alone(axis.ranks[axis.rank])
    first = axis.rank // size * size
    inner, outer = axis.ranks[first : first + size], axis.ranks[axis.rank % size :: size]
    groups = [new_group(tuple(sorted(ranks))) for ranks in (inner, outer)]
    return (
        Axis(f"{axis.name} inner", len(inner), axis.rank % size, inner, groups[0]),
        Axis(f"{axis.name} outer", len(outer), axis.rank // size, outer, groups[1]),
    )


def stage_axes(names_by_rank: Sequence[Sequence[str]], mesh: Mesh, new_group: NewGroup) -> dict[str, Axis]:
    """The axis of the pp ranks that hold a name, for each name that several of them hold. Collective over the world."""
    by_rank = [set(param) for param in names_by_rank]
    holders: dict[str, tuple[int, ...]] = {}
    for name in sorted(set().union(*by_rank)):
        ranks = tuple(rank for rank, param in enumerate(by_rank) if name in param)
        if len(ranks) > 1:
            holders[name] = ranks
    axes: dict[tuple[int, ...], Axis] = {}
    for pp_ranks in sorted(set(holders.values())):
        if len(pp_ranks) == mesh.pp.size:
            axes[pp_ranks] = mesh.pp
            continue
        if mesh.pp.rank not in pp_ranks:
            # torch names a group after how many groups its rank has made: a rank that made none here would disagree
            # with the others about the name of the next one, and both would wait for ever.
            new_group((mesh.global_rank,))
            continue
        global_ranks = tuple(mesh.pp.ranks[rank] for rank in pp_ranks)
        group = new_group(tuple(sorted(global_ranks)))
        axes[pp_ranks] = Axis("stages", len(pp_ranks), pp_ranks.index(mesh.pp.rank), global_ranks, group)
    return {name: axes[ranks] for name, ranks in holders.items() if ranks in axes}
