"""Checks that all ranks make together: non-finite gradients, and copies of a weight that differ."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.reductions import extremes, fingerprint, joined, square, total


class DifferingCopiesError(RuntimeError):
    """Ranks that hold copies of one weight have different ones."""


def found_nonfinite(stepped: Sequence[Tensor], world: Axis, device: torch.device) -> bool:
    """Whether any rank has NaN or Inf in a gradient of what an optimizer is about to step. Collective over the world,
    with one answer on all ranks."""
    ends = [extremes(tensor.grad) for tensor in stepped if tensor.grad is not None]
    flag = torch.zeros((), dtype=torch.int32, device=device)
    if ends:
        flag = (~joined(ends, device).isfinite()).any().to(torch.int32)
    return bool(collectives.all_reduce_(flag, world, "max").item())


@torch.no_grad()
def finite_norm(gradients: Gradients, stepped: Sequence[nn.Parameter]) -> Tensor | None:
    """The norm of the gradients of what an optimizer is about to step, as `Gradients.norm` has it; None where any rank
    has NaN or Inf in one. Collective over the world, with one answer on all ranks.

    Gradients are read once for both, and again only where a sum of squares says nothing because it overflows.
    """
    squares = {tensor: square(tensor.grad) for tensor in stepped if tensor.grad is not None}
    counted = [squares[tensor] for tensor in gradients.counted() if tensor in squares]
    # A copy that does not count in the norm may have become NaN by itself.
    sums = [total(each, gradients.device) for each in (counted, list(squares.values()))]
    of_counted, of_all = collectives.all_reduce_(torch.stack(sums), gradients.mesh.world)
    is_unclear = (~of_all.isfinite()).item()
    if is_unclear and found_nonfinite(stepped, gradients.mesh.world, gradients.device):
        return None
    norm: Tensor = of_counted.sqrt()
    return norm


def describe_nonfinite(gradients: Gradients, world: Axis) -> list[str]:
    """Ranks whose own gradients have NaN or Inf, with the parameters, one line each. Collective over the world.

    Reduced gradients show NaN on all ranks, so each rank has checked its own before the reduction. NaN or Inf that no
    rank had by itself came with the reduction, or after it.
    """
    summed = {
        param.name
        for param, tensor, _ in gradients.stepped()
        if tensor.grad is not None and not bool(extremes(tensor.grad).isfinite().all())
    }
    by_rank = collectives.gather_objects((gradients.nonfinite_before_reduce(), summed), world)
    bad: set[str] = set().union(*(found for _, found in by_rank))
    # A gradient of an earlier reduction of the same step may be gone: zeroed, or left out by a hook.
    by_themselves = [
        f"rank {rank}: {', '.join(sorted(own & bad))}" for rank, (own, _) in enumerate(by_rank) if own & bad
    ]
    return by_themselves or [f"no rank by itself, after the sum: {', '.join(sorted(bad))}"]


def differing_copies(gradients: Gradients, mesh: Mesh) -> list[str]:
    """Weights of which the ranks that hold them have different bits, one line each, on every rank.

    Collective over data-parallel ranks, the axes of replicated parameters, the holders of tied names, and the world.
    """
    params = sorted(gradients.params, key=lambda param: param.name)
    # Of a sharded parameter data-parallel ranks have other parts, up to copies; other ranks have the part of this one.
    sharded = {param.parameter: gradients.copies_of(param) for flat in gradients.sharded for param in flat.members}
    parts = {shard.param.parameter: shard.tensor for shard in gradients.param_shards}
    axes: dict[tuple[int, ...], tuple[Axis, list[int]]] = {}
    for index, param in enumerate(params):
        shared = [sharded.get(param.parameter, param.replicas), *param.shard.replicas]
        if param.holders is not None:
            shared.append(param.holders)
        for axis in shared:
            if axis.size > 1:
                axes.setdefault(axis.ranks, (axis, []))[1].append(index)
    nothing = torch.zeros((), device=gradients.device)
    held = [parts.get(p.parameter, nothing) if p.parameter in sharded else p.parameter for p in params]
    prints = [fingerprint(tensor.detach()).to(gradients.device) for tensor in held]
    differing = set()
    for axis, indices in (axes[ranks] for ranks in sorted(axes)):
        own = torch.stack([prints[index] for index in indices])
        least, most = collectives.all_reduce(own, axis, "min"), collectives.all_reduce(own, axis, "max")
        for index, is_same in zip(indices, (least == most).tolist(), strict=True):
            if not is_same:
                differing.add(f"{params[index].name} on ranks {', '.join(map(str, axis.ranks))}")
    # That any rank has found something is one number, which all tell each other first.
    if not int(collectives.all_reduce(torch.tensor(len(differing), device=gradients.device), mesh.world, "max")):
        return []
    return sorted({line for lines in collectives.gather_objects(sorted(differing), mesh.world) for line in lines})


def bullet_list(lines: Iterable[str], limit: int = 20) -> str:
    """The lines as a list for a message, cut off after `limit`."""
    all_lines = list(lines)
    more = [f"and {len(all_lines) - limit} more"] if len(all_lines) > limit else []
    return "\n".join(f"  - {line}" for line in [*all_lines[:limit], *more])
