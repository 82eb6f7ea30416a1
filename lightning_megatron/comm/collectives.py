"""Collectives over an `Axis`: blocking, or returning the work in flight.

This file alone knows that an axis of one rank needs no message, and both names of torch's single-tensor collectives.

Every function returns a new tensor unless its name ends in an underscore; an axis of one rank gives back `x` itself.
With `wait=False` they return a `Pending` whose `wait()` gives the tensor. Any number of collectives may be in flight
on an axis; they start in call order.

Note: sums on the CPU. Gloo's reductions cost several times an exchange followed by a local sum (`docs/benchmarks/
gloo.md`), so two CPU ranks swap tensors and add, and more of them scatter sums by an all-to-all.
"""

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_object_coll_device

from lightning_megatron.comm.tree_axis import TreeAxis
from lightning_megatron.handles import held_by
from lightning_megatron.mesh import Axis

T = TypeVar("T")
Op = Literal["sum", "max", "min"]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_LOCALLY: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
# Above so many bytes a swap of full tensors costs two CPU ranks more than gloo's all-reduce, which moves halves twice.
_SWAPPED_BYTES = 2 << 20
# Of the message that gathers objects, and of the length at its start: what ranks compare in a step is smaller.
_SMALL_BYTES, _LENGTH_BYTES = 512, 8

# torch 2.13 renamed the single-tensor collectives and warns about the old names, which are all that 2.11 has.
_all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(slots=True)
class Pending:
    """A collective in flight."""

    output: Tensor
    work: dist.Work | None = None
    finish: Callable[[Tensor], Tensor] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the collective is complete, but for what is made of its output."""
        return self.work is None or self.work.is_completed()

    def wait(self) -> Tensor:
        """The result, once the collective is complete."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        if self.finish is not None:
            self.output, self.finish = self.finish(self.output), None
        return self.output


def group_rank(axis: Axis, rank: int) -> int:
    """Rank in the axis's process group of a rank on the axis; groups sort their ranks, axes need not."""
    return sorted(axis.ranks).index(axis.ranks[rank])


def group_of(axis: Axis) -> dist.ProcessGroup:
    """The process group of an axis that needs messages; given None, torch would take the whole world."""
    assert axis.group is not None, f"axis {axis.name} of {axis.size} ranks has no process group: it is imagined"
    return axis.group


def _ascending(axis: Axis) -> None:
    assert axis.ranks == tuple(sorted(axis.ranks)), f"axis {axis.name} does not ascend: {axis.ranks}"


@overload
def all_reduce(x: Tensor, axis: Axis, op: Op = "sum", *, wait: Literal[True] = True) -> Tensor: ...
@overload
def all_reduce(x: Tensor, axis: Axis, op: Op = "sum", *, wait: Literal[False]) -> Pending: ...
def all_reduce(x: Tensor, axis: Axis, op: Op = "sum", *, wait: bool = True) -> Tensor | Pending:
    """All-reduce: sum, maximum or minimum of `x` over the ranks of the axis, or `TreeAxis`, on each of them."""
    if axis.size == 1:
        return x if wait else Pending(x)
    if isinstance(axis, TreeAxis):
        # What the parent gets of a family counts; to its children it comes from the first rank.
        total = all_reduce(all_reduce(x, axis.below, op), axis.above, op)
        broadcast_(broadcast_(total, axis.above), axis.below)
        return total if wait else Pending(total)
    if torch.compiler.is_compiling():
        return _done(_all_reduce_operator(x, op, _handle(axis)), wait=wait)
    pending = all_reduce_(x.clone(memory_format=torch.contiguous_format), axis, op, wait=False)
    return pending.wait() if wait else pending


@overload
def all_reduce_(x: Tensor, axis: Axis, op: Op = "sum", *, wait: Literal[True] = True) -> Tensor: ...
@overload
def all_reduce_(x: Tensor, axis: Axis, op: Op = "sum", *, wait: Literal[False]) -> Pending: ...
def all_reduce_(x: Tensor, axis: Axis, op: Op = "sum", *, wait: bool = True) -> Tensor | Pending:
    """In-place `all_reduce` of `x`, which must be contiguous."""
    if axis.size == 1:
        return x if wait else Pending(x)
    if torch.compiler.is_compiling():
        return _done(x.copy_(_all_reduce_operator(x, op, _handle(axis))), wait=wait)
    if _is_cpu_pair(x, axis) and x.numel() * x.element_size() <= _SWAPPED_BYTES:
        # Both ranks add the same two numbers, so both get the same bits.
        pending = _swap(x.view(-1), torch.empty_like(x).view(-1), axis)
        pending.finish = lambda other: _LOCALLY[op](x, other.view_as(x), out=x)
    else:
        pending = Pending(x, dist.all_reduce(x, op=_OPS[op], group=group_of(axis), async_op=True))
    return pending.wait() if wait else pending


@overload
def all_gather(x: Tensor, axis: Axis, dim: int = 0, *, wait: Literal[True] = True) -> Tensor: ...
@overload
def all_gather(x: Tensor, axis: Axis, dim: int = 0, *, wait: Literal[False]) -> Pending: ...
def all_gather(x: Tensor, axis: Axis, dim: int = 0, *, wait: bool = True) -> Tensor | Pending:
    """All-gather: the shards of all ranks, of one shape, joined along `dim` in the order of the axis."""
    if axis.size == 1:
        return x if wait else Pending(x)
    if torch.compiler.is_compiling():
        return _done(_all_gather_operator(x, dim, _handle(axis), axis.size), wait=wait)
    _ascending(axis)
    dim = dim % x.dim()
    # Shards of one row lie behind each other as they are.
    is_one_row = math.prod(x.shape[:dim]) == 1
    joined_shape = (*x.shape[:dim], axis.size * x.shape[dim], *x.shape[dim + 1 :])
    by_rank_shape = (axis.size * x.shape[0], *x.shape[1:])
    # No view: an autograd function gives it, and a view of one takes no change in place.
    joined = torch.empty(joined_shape if is_one_row else by_rank_shape, dtype=x.dtype, device=x.device)
    gathered = joined.view(by_rank_shape)
    if _is_cpu_pair(x, axis):
        length = x.shape[0]
        own = gathered.narrow(0, axis.rank * length, length)
        work = _swap(own.copy_(x.detach()), gathered.narrow(0, (1 - axis.rank) * length, length), axis).work
    else:
        work = _all_gather_single(gathered, x.contiguous(), group=group_of(axis), async_op=True)
    finish = None if is_one_row else lambda by_rank: torch.cat(by_rank.chunk(axis.size), dim=dim)
    pending = Pending(joined, work, finish)
    return pending.wait() if wait else pending


@overload
def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0, *, wait: Literal[True] = True) -> Tensor: ...
@overload
def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0, *, wait: Literal[False]) -> Pending: ...
def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0, *, wait: bool = True) -> Tensor | Pending:
    """Reduce-scatter: this rank's part, along `dim`, of the sum of `x` over the axis, whose size must divide `dim`."""
    if axis.size == 1:
        return x if wait else Pending(x)
    if torch.compiler.is_compiling():
        return _done(_reduce_scatter_operator(x, dim, _handle(axis), axis.size), wait=wait)
    _ascending(axis)
    dim = dim % x.dim()
    assert x.shape[dim] % axis.size == 0, f"dim {dim} of {tuple(x.shape)} does not divide by {axis.name} ({axis.size})"
    # One row that is contiguous is sent as it lies.
    parts = x.unflatten(dim, (axis.size, x.shape[dim] // axis.size)).movedim(dim, 0)
    full = parts.flatten(0, 1).contiguous()
    shape = (full.shape[0] // axis.size, *full.shape[1:])
    if _is_cpu_pair(x, axis):
        own, others = full[axis.rank * shape[0] :][: shape[0]], full[(1 - axis.rank) * shape[0] :][: shape[0]]
        pending = _swap(others, torch.empty_like(own), axis)
        pending.finish = own.add
    elif x.device.type == "cpu":
        parts = torch.empty_like(full)
        work = dist.all_to_all_single(parts, full, group=group_of(axis), async_op=True)
        pending = Pending(parts, work, lambda landed: landed.view(axis.size, *shape).sum(0))
    else:
        part = torch.empty(shape, dtype=x.dtype, device=x.device)
        pending = Pending(part, _reduce_scatter_single(part, full, group=group_of(axis), async_op=True))
    return pending.wait() if wait else pending


@overload
def reduce_scatter_(x: Tensor, axis: Axis, *, wait: Literal[True] = True) -> Tensor: ...
@overload
def reduce_scatter_(x: Tensor, axis: Axis, *, wait: Literal[False]) -> Pending: ...
def reduce_scatter_(x: Tensor, axis: Axis, *, wait: bool = True) -> Tensor | Pending:
    """In-place `reduce_scatter` of a flat `x` [N] into this rank's part of it, which is returned as a view [N/d].

    The other parts are undefined afterwards.
    """
    if axis.size == 1:
        return x if wait else Pending(x)
    _ascending(axis)
    own = shard_slice(x, axis)
    if _is_cpu_pair(x, axis):
        length = own.shape[0]
        pending = _swap(x[(1 - axis.rank) * length :][:length], torch.empty_like(own), axis)
        pending.finish = own.add_
    elif x.device.type == "cpu":
        parts = torch.empty_like(x)
        work = dist.all_to_all_single(parts, x, group=group_of(axis), async_op=True)
        pending = Pending(parts, work, lambda landed: torch.sum(landed.view(axis.size, -1), 0, out=own))
    else:
        pending = Pending(own, _reduce_scatter_single(own, x, group=group_of(axis), async_op=True))
    return pending.wait() if wait else pending


@overload
def all_gather_(x: Tensor, axis: Axis, *, wait: Literal[True] = True) -> Tensor: ...
@overload
def all_gather_(x: Tensor, axis: Axis, *, wait: Literal[False]) -> Pending: ...
def all_gather_(x: Tensor, axis: Axis, *, wait: bool = True) -> Tensor | Pending:
    """In-place `all_gather` of a flat `x` [N] from this rank's part of it; returns `x`."""
    if axis.size == 1:
        return x if wait else Pending(x)
    _ascending(axis)
    own = shard_slice(x, axis)
    if _is_cpu_pair(x, axis):
        length = own.shape[0]
        work = _swap(own, x[(1 - axis.rank) * length :][:length], axis).work
    else:
        # NCCL takes its own part from where it stands; gloo must not read what it writes.
        part = own.clone() if x.device.type == "cpu" else own
        work = _all_gather_single(x, part, group=group_of(axis), async_op=True)
    pending = Pending(x, work)
    return pending.wait() if wait else pending


@overload
def all_to_all(x: Tensor, axis: Axis, split: int, join: int, *, wait: Literal[True] = True) -> Tensor: ...
@overload
def all_to_all(x: Tensor, axis: Axis, split: int, join: int, *, wait: Literal[False]) -> Pending: ...
def all_to_all(x: Tensor, axis: Axis, split: int, join: int, *, wait: bool = True) -> Tensor | Pending:
    """All-to-all: this rank's part of every rank's `x` along the dim `split`, joined along the dim `join` in the order
    of the axis, whose size must divide `split`."""
    if axis.size == 1:
        return x if wait else Pending(x)
    if torch.compiler.is_compiling():
        return _done(_all_to_all_operator(x, split, join, _handle(axis), axis.size), wait=wait)
    _ascending(axis)
    assert x.shape[split] % axis.size == 0, (
        f"dim {split} of {tuple(x.shape)} does not divide by {axis.name} ({axis.size})"
    )
    given = torch.stack(x.chunk(axis.size, dim=split)).contiguous()
    taken = torch.empty_like(given)
    work = dist.all_to_all_single(taken, given, group=group_of(axis), async_op=True)
    pending = Pending(taken, work, lambda landed: torch.cat(landed.unbind(), dim=join))
    return pending.wait() if wait else pending


@overload
def all_to_all_v(
    x: Tensor, axis: Axis, given: Sequence[int], taken: Sequence[int], *, wait: Literal[True] = True
) -> Tensor: ...
@overload
def all_to_all_v(
    x: Tensor, axis: Axis, given: Sequence[int], taken: Sequence[int], *, wait: Literal[False]
) -> Pending: ...
def all_to_all_v(
    x: Tensor, axis: Axis, given: Sequence[int], taken: Sequence[int], *, wait: bool = True
) -> Tensor | Pending:
    """All-to-all with unequal splits of dim 0: what the ranks of the axis have for this one, in the order of the axis.

    `x` has `given[i]` entries for rank i, one rank after another; `taken[i]` come from it. All of them may be 0.
    """
    if axis.size == 1:
        return x if wait else Pending(x)
    _ascending(axis)
    received = torch.empty((sum(taken), *x.shape[1:]), dtype=x.dtype, device=x.device)
    work = dist.all_to_all_single(
        received, x.contiguous(), list(taken), list(given), group=group_of(axis), async_op=True
    )
    pending = Pending(received, work)
    return pending.wait() if wait else pending


def shard_slice(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's shard of `x` along `dim`, as a view; no message."""
    length, rest = divmod(x.shape[dim], axis.size)
    assert rest == 0, f"dim {dim} of {tuple(x.shape)} does not divide by {axis.name} ({axis.size})"
    return x.narrow(dim, axis.rank * length, length)


def broadcast_(x: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """Overwrites `x`, which must be contiguous, with the `x` of the rank `source` on the axis.

    On a `TreeAxis` it is that of the first rank.
    """
    if isinstance(axis, TreeAxis):
        assert source == 0, f"rank {source} broadcasts over a tree, whose first rank does"
        return broadcast_(broadcast_(x, axis.above), axis.below)
    if axis.size > 1:
        dist.broadcast(x, group=group_of(axis), group_src=group_rank(axis, source))
    return x


def broadcast_object(value: Any, axis: Axis, source: int = 0) -> Any:
    """A picklable value of the rank `source` on the axis; for set-up and logging, not for steps on a GPU.

    On a `TreeAxis` it is that of the first rank.
    """
    if axis.size == 1:
        return value
    if isinstance(axis, TreeAxis):
        assert source == 0, f"rank {source} broadcasts over a tree, whose first rank does"
        return broadcast_object(broadcast_object(value, axis.above), axis.below)
    box = [value]
    dist.broadcast_object_list(box, group=group_of(axis), group_src=group_rank(axis, source))
    return box[0]


def gather_objects(value: T, axis: Axis) -> list[T]:
    """Picklable values of all ranks, in the order of the axis, on each of them; small ones by a single message.

    What a rank gets grows with the axis: over the world prefer `merge_objects`, or `gather_on_first`.
    """
    if axis.size == 1:
        return [value]
    if isinstance(axis, TreeAxis):
        found: list[T] = broadcast_object(gather_on_first(value, axis), axis)
        return found
    group, data = group_of(axis), pickle.dumps(value)
    message = len(data).to_bytes(_LENGTH_BYTES, "little") + data[: _SMALL_BYTES - _LENGTH_BYTES]
    own = torch.frombuffer(bytearray(message.ljust(_SMALL_BYTES, b"\0")), dtype=torch.uint8)
    own = own.to(_get_object_coll_device(group))
    gathered = own.new_empty(axis.size * _SMALL_BYTES)
    _all_gather_single(gathered, own, group=group)
    messages = [row.numpy().tobytes() for row in gathered.cpu().view(axis.size, _SMALL_BYTES)]
    if all(int.from_bytes(one[:_LENGTH_BYTES], "little") <= _SMALL_BYTES - _LENGTH_BYTES for one in messages):
        by_group_rank = [pickle.loads(one[_LENGTH_BYTES:]) for one in messages]
    else:
        by_group_rank = [None] * axis.size
        dist.all_gather_object(by_group_rank, value, group=group)
    return [by_group_rank[group_rank(axis, rank)] for rank in range(axis.size)]


def merge_objects(value: T, axis: Axis, merge: Callable[[list[T]], T]) -> T:
    """The values of all ranks of the axis, or `TreeAxis`, merged into one, on each of them.

    `merge` must not depend on which ranks it has merged before, and raises nothing: not all ranks call it.
    """
    if not isinstance(axis, TreeAxis):
        return merge(gather_objects(value, axis))
    merged = merge(gather_on_first(value, axis.below))
    gather_on_first(merged, axis.above)
    result: T = broadcast_object(merged, axis)
    return result


def gather_on_first(value: T, axis: Axis) -> list[T]:
    """Picklable values of all ranks of the axis, or `TreeAxis`, in its order, on the first rank; nothing on others.

    It goes over host memory.
    """
    if axis.size == 1:
        return [value]
    if isinstance(axis, TreeAxis):
        held = {rank: one for part in gather_on_first({axis.rank: value}, axis.below) for rank, one in part.items()}
        gather_on_first(held, axis.above)
        return [held[rank] for rank in range(axis.size)] if axis.is_first else []
    # One by one, for torch's own pads all to the largest: in a tree some ranks have far more below them than others.
    if not axis.is_first:
        _send_object(value, axis, target=0)
        return []
    return [value, *(_receive_object(axis, source=rank) for rank in range(1, axis.size))]


def scatter_objects(values: Sequence[T], axis: Axis) -> T:
    """The value for this rank of those that the first rank has for all of the axis, or `TreeAxis`, in its order.

    It goes over host memory.
    """
    if axis.size == 1:
        return values[0]
    if isinstance(axis, TreeAxis):
        held: dict[int, T] = dict(enumerate(values)) if axis.is_first else scatter_objects([], axis.above)
        parts: list[dict[int, T]] = [{} for _ in range(axis.below.size)]
        for rank, one in held.items():
            parts[axis.member_towards(rank)][rank] = one
        return scatter_objects(parts, axis.below)[axis.rank]
    if not axis.is_first:
        own: T = _receive_object(axis, source=0)
        return own
    for rank in range(1, axis.size):
        _send_object(values[rank], axis, target=rank)
    return values[0]


def _send_object(value: Any, axis: Axis, *, target: int) -> None:
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    send(torch.tensor(len(data)), axis, target=target)
    send(data, axis, target=target)


def _receive_object(axis: Axis, *, source: int) -> Any:
    length = int(receive_(torch.zeros((), dtype=torch.int64), axis, source=source))
    return pickle.loads(receive_(torch.empty(length, dtype=torch.uint8), axis, source=source).numpy().tobytes())


def send(x: Tensor, axis: Axis, *, target: int) -> None:
    """Sends a contiguous tensor to the rank `target` on the axis, which calls `receive_`; not for steps."""
    dist.send(x, group=group_of(axis), group_dst=group_rank(axis, target))


def receive_(x: Tensor, axis: Axis, *, source: int) -> Tensor:
    """Overwrites `x`, which must be contiguous, with what the rank `source` on the axis sends."""
    dist.recv(x, group=group_of(axis), group_src=group_rank(axis, source))
    return x


def carries_to_first(axis: Axis, source: int) -> bool:
    """Whether a message of the rank `source` to the first rank of the axis, or `TreeAxis`, begins, passes or ends
    here."""
    return axis.rank in ((0, source) if not isinstance(axis, TreeAxis) else axis.way_to_first(source))


def carry_to_first_(x: Tensor, axis: Axis, *, source: int) -> Tensor:
    """Overwrites `x`, which must be contiguous, with that of the rank `source`, on the first rank and on the way.

    The ranks call it of which `carries_to_first` says so.
    """
    if isinstance(axis, TreeAxis):
        if axis.rank != source:
            receive_(x, axis.below, source=axis.member_towards(source))
        if not axis.is_first:
            send(x, axis.above, target=0)
    elif source != 0:
        if axis.is_first:
            receive_(x, axis, source=source)
        else:
            send(x, axis, target=0)
    return x


def barrier(axis: Axis) -> None:
    """Waits until every rank of the axis, or `TreeAxis`, has called this."""
    if isinstance(axis, TreeAxis):
        all_reduce(torch.zeros(()), axis)
    elif axis.size > 1:
        dist.barrier(group=group_of(axis))


def _is_cpu_pair(x: Tensor, axis: Axis) -> bool:
    return axis.size == 2 and x.device.type == "cpu"


def _swap(mine: Tensor, theirs: Tensor, axis: Axis) -> Pending:
    """Sends `mine` to the other rank of a pair and receives `theirs`; both contiguous and of one shape."""
    rows = mine.shape[0]
    splits = [0, rows] if group_rank(axis, axis.rank) == 0 else [rows, 0]
    return Pending(theirs, dist.all_to_all_single(theirs, mine, splits, splits, group=group_of(axis), async_op=True))


# ----------------------------------------------------------------------------------------------------------------------
# Compiled code calls collectives by custom operators, which run what stands above and wait.
# Each operator takes its axis by a handle.


def _handle(axis: Axis) -> Tensor:
    assert axis.handle is not None, f"axis {axis.name} of {axis.size} ranks has no process group: it is imagined"
    return axis.handle


def _axis_of(handle: Tensor) -> Axis:
    axis: Axis | None = held_by(handle)()
    assert axis is not None, "the layers of a compiled graph hold its axes"
    return axis


def _done(output: Tensor, *, wait: bool) -> Tensor | Pending:
    return output if wait else Pending(output)


@torch.library.custom_op("lightning_megatron::all_reduce", mutates_args=())
def _all_reduce_operator(x: Tensor, op: str, axis: Tensor) -> Tensor:
    return all_reduce(x, _axis_of(axis), cast(Op, op))


@_all_reduce_operator.register_fake
def _(x: Tensor, op: str, axis: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("lightning_megatron::all_gather", mutates_args=())
def _all_gather_operator(x: Tensor, dim: int, axis: Tensor, size: int) -> Tensor:
    return all_gather(x, _axis_of(axis), dim)


@_all_gather_operator.register_fake
def _(x: Tensor, dim: int, axis: Tensor, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= size
    return x.new_empty(shape)


@torch.library.custom_op("lightning_megatron::reduce_scatter", mutates_args=())
def _reduce_scatter_operator(x: Tensor, dim: int, axis: Tensor, size: int) -> Tensor:
    return reduce_scatter(x, _axis_of(axis), dim)


@_reduce_scatter_operator.register_fake
def _(x: Tensor, dim: int, axis: Tensor, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] //= size
    return x.new_empty(shape)


@torch.library.custom_op("lightning_megatron::all_to_all", mutates_args=())
def _all_to_all_operator(x: Tensor, split: int, join: int, axis: Tensor, size: int) -> Tensor:
    return all_to_all(x, _axis_of(axis), split, join)


@_all_to_all_operator.register_fake
def _(x: Tensor, split: int, join: int, axis: Tensor, size: int) -> Tensor:
    shape = list(x.shape)
    shape[split] //= size
    shape[join] *= size
    return x.new_empty(shape)
