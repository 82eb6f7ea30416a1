"""Shards of parameters: the slice that a rank holds, read by initialiser, gradient norm, checkpoint and import.

A `Shard` is attached to a parameter when its layer is built, and nothing flags a parameter by hand later. A cut
dim is split into equal local lengths; where the axis does not divide it, the last ranks hold padding after their valid
part (`box` says which part is valid). Padding is zero, stays zero and never leaves the rank.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Axis

_WITHOUT_MEMORY: ContextVar[bool] = ContextVar("lightning_megatron_without_memory", default=False)
# Elements that are written at a time, which bounds what drawing or reading takes beside them.
_NUM_WRITTEN = 1 << 24


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: first index and size along each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor, which shares its memory."""
        for dim, (start, length) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor


@dataclass(frozen=True)
class Initial:
    """Initial distribution of a parameter: normal with `mean` and `std`; with std 0 it is a constant."""

    std: float = 0.0
    mean: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Fused:
    """Matrices that lie between each other in the rows of one weight.

    Along `dim` of the rows, which have this `shape`, lie `sizes` of each: gate and up are (2, F), dim 0 and sizes
    (1, 1); queries, keys and values of G groups with R heads each are (G, R + 2, D), dim 1 and sizes (R, 1, 1).
    """

    shape: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]


Write = Callable[[Box, Tensor], None]
"""Writes the values of a box of an unsplit parameter to memory, in the dtype of that."""


@dataclass(frozen=True)
class Later:
    """The values of a parameter on the meta device, which it gets with its memory."""

    write: Write
    dtype: torch.dtype
    """Dtype in which they are made, whatever the parameter's is by then."""
    version: int
    """Torch's count of writes to the parameter: what is written to it before it has memory is lost."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The shape of a parameter in the unsplit model, and the slice of it that this rank holds."""

    global_shape: tuple[int, ...]
    """Shape of the parameter in the unsplit model, without padding."""
    dim: int | None = None
    """Dim that is cut, if any."""
    axis: Axis | None = None
    """Axis over which `dim` is cut."""
    local_length: int = 0
    """Length of the cut dim on this rank, padding included."""
    blocks: int = 1
    """Equal blocks that stand side by side along `dim`, each cut over `axis` without padding (gate and up)."""
    leading: Axis | None = None
    """Axis over which dim 0 is cut as well, into equal parts without padding (experts: ep)."""
    replicas: tuple[Axis, ...] = ()
    """Axes whose ranks hold the same values; each counts once in a norm."""
    partial: Axis | None = None
    """Axis over which the gradient is partial, a term of a sum (sequence parallelism), if any."""
    data: Axis | None = None
    """Data-parallel axis: its ranks hold the same slice and see other samples. None: dp+cp (experts have edp)."""
    initial: Initial = Initial()
    """Initial distribution of the parameter."""
    fused: Fused | None = None
    """Matrices that the unsplit parameter consists of, where it is not one."""
    later: Later | None = None
    """Values that the parameter gets with its memory, which it has not got yet."""

    @property
    def boxes(self) -> list[Box]:
        """The parts of the unsplit parameter that this rank holds one behind the other along `dim`."""
        if self.blocks == 1 or self.dim is None or self.axis is None:
            return [self.box]
        own, block = self.local_length // self.blocks, self.global_shape[self.dim] // self.blocks
        before, behind = self.global_shape[: self.dim], self.global_shape[self.dim + 1 :]
        zeros = (0,) * len(behind)
        return [
            Box((*(0 for _ in before), number * block + self.axis.rank * own, *zeros), (*before, own, *behind))
            for number in range(self.blocks)
        ]

    def part_of(self, whole: Tensor) -> Tensor:
        """What this rank holds of the unsplit parameter, without padding: a view of it, or a copy of several blocks."""
        parts = [box.of(whole) for box in self.boxes]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim or 0)

    @property
    def box(self) -> Box:
        """The part of the unsplit parameter that this rank holds, without padding; of several blocks there is none."""
        assert self.blocks == 1, "several blocks make no box"
        offsets, sizes = [0] * len(self.global_shape), list(self.global_shape)
        if self.dim is not None and self.axis is not None:
            offsets[self.dim] = min(self.axis.rank * self.local_length, self.global_shape[self.dim])
            sizes[self.dim] = min(self.local_length, self.global_shape[self.dim] - offsets[self.dim])
        if self.leading is not None:
            sizes[0] //= self.leading.size
            offsets[0] = self.leading.rank * sizes[0]
        return Box(tuple(offsets), tuple(sizes))

    @property
    def is_cut(self) -> bool:
        """Whether this rank holds only a part of the parameter."""
        return [box.sizes for box in self.boxes] != [self.global_shape]

    @property
    def is_counted(self) -> bool:
        """Whether this rank's copy is the one that counts in sums over all parameters."""
        return all(axis.rank == 0 for axis in self.replicas)

    def valid(self, local: Tensor) -> Tensor:
        """The view of `local` (a parameter, its gradient or a moment) that leaves padding out."""
        if self.dim is None or self.blocks > 1:
            return local
        return local.narrow(self.dim, 0, self.box.sizes[self.dim])


def boxes_of_range(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[int, Box]]:
    """Elements `start` to before `end` of a flattened tensor as boxes: first element of each, and the box.

    Each box is contiguous in memory; there are at most 2n - 1 of them for n dims.
    """
    if end <= start:
        return
    if len(shape) <= 1:
        yield start, Box((start,) * len(shape), (end - start,) * len(shape))
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row
    if first > last:
        # Within one row.
        yield from _boxes_in_row(shape, last, start, end)
        return
    yield from _boxes_in_row(shape, first - 1, start, first * row)
    if last > first:
        yield first * row, Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _boxes_in_row(shape, last, last * row, end)


def _boxes_in_row(shape: tuple[int, ...], row: int, start: int, end: int) -> Iterator[tuple[int, Box]]:
    first = row * math.prod(shape[1:])
    for begin, box in boxes_of_range(shape[1:], start - first, end - first):
        yield first + begin, Box((row, *box.offsets), (1, *box.sizes))


def cut_length(global_length: int, axis: Axis, multiple: int = 1) -> int:
    """Local length of a dim cut over `axis`: the ceiling of the quotient, rounded up to `multiple`."""
    share = -(-global_length // axis.size)
    return -(-share // multiple) * multiple


class ShardedParameter(nn.Parameter):
    """A parameter whose `Shard` stays with its copies: an average of the weights is a deep copy of the module."""

    shard: Shard

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedParameter":
        copied: ShardedParameter = super().__deepcopy__(memo)
        copied.shard = self.shard
        return copied


def shard_parameter(
    global_shape: tuple[int, ...],
    *,
    initial: Initial,
    dim: int | None = None,
    axis: Axis | None = None,
    multiple: int = 1,
    replicas: tuple[Axis, ...] = (),
    partial: Axis | None = None,
    data: Axis | None = None,
    leading: Axis | None = None,
    fused: Fused | None = None,
) -> nn.Parameter:
    """An unfilled parameter of this rank's slice that carries its `Shard`; `initialise` fills it.

    Cut along `dim` over `axis`, each local length a multiple of `multiple`; and along dim 0 over `leading`, which must
    divide it. Made on torch's default device (the meta device `without_memory`), in its default dtype.
    """
    if (dim is None) != (axis is None):
        raise ValueError(f"dim ({dim}) and axis ({axis}) go together: give both or neither")
    local_shape = list(global_shape)
    length = 0
    if dim is not None and axis is not None:
        dim = dim % len(global_shape)
        length = local_shape[dim] = cut_length(global_shape[dim], axis, multiple)
    if leading is not None:
        if dim == 0:
            raise ValueError(f"dim 0 of {global_shape} is cut over {leading.name} already; dim must be another one")
        if global_shape[0] % leading.size:
            raise ValueError(f"dim 0 of {global_shape} must be a multiple of {leading.name} ({leading.size})")
        local_shape[0] //= leading.size
    parameter = ShardedParameter(torch.empty(local_shape, device="meta" if _WITHOUT_MEMORY.get() else None))
    parameter.shard = Shard(
        global_shape=tuple(global_shape),
        dim=dim,
        axis=axis,
        local_length=length,
        replicas=replicas,
        partial=partial,
        data=data,
        leading=leading,
        initial=initial,
        fused=fused,
    )
    return parameter


def shard_of(parameter: Tensor) -> Shard:
    """The parameter's `Shard`; one that carries none is a plain parameter of a user's module, replicated everywhere."""
    shard: Shard | None = getattr(parameter, "shard", None)
    return shard if shard is not None else Shard(global_shape=tuple(parameter.shape))


def without_values(parameter: Tensor) -> Tensor:
    """A tensor of the parameter's shape and `Shard` that takes no memory."""
    found = ShardedParameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    found.shard = shard_of(parameter)
    return found


def sharded_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Shard]]:
    """Name, parameter and shard of every parameter that was built with a shard."""
    for name, parameter in module.named_parameters():
        shard: Shard | None = getattr(parameter, "shard", None)
        if shard is not None:
            yield name, parameter, shard


# --- parameters that wait for their memory ---------------------------------------------------------------------------


@contextmanager
def without_memory() -> Iterator[None]:
    """Makes parameters on the meta device inside the block (`shard_parameter`)."""
    token = _WITHOUT_MEMORY.set(True)
    try:
        yield
    finally:
        _WITHOUT_MEMORY.reset(token)


def write_later(parameter: Tensor, write: Write) -> None:
    """Says by whom a parameter on the meta device gets its values, once it gets memory."""
    later = Later(write, parameter.dtype, parameter._version)
    parameter.shard = replace(shard_of(parameter), later=later)  # type: ignore[attr-defined]


@torch.no_grad()
def write_elements(parameter: Tensor, start: int, end: int, out: Tensor) -> None:
    """Writes the elements `start` to before `end` of a flattened parameter to `out`, also where they wait for memory:
    then no others are made."""
    shard, later = shard_of(parameter), shard_of(parameter).later
    if later is None:
        out.copy_(parameter.detach().reshape(-1)[start:end])
        return
    is_direct = out.dtype == parameter.dtype == later.dtype
    for first in range(start, end, _NUM_WRITTEN):
        for begin, box in boxes_of_range(tuple(parameter.shape), first, min(first + _NUM_WRITTEN, end)):
            part = out[begin - start :][: math.prod(box.sizes)].view(box.sizes)
            values = part if is_direct else torch.empty_like(part, dtype=later.dtype)
            _write_local(shard, later.write, box, values)
            if not is_direct:
                part.copy_(values.to(parameter.dtype))


def _write_local(shard: Shard, write: Write, box: Box, out: Tensor) -> None:
    """Writes a box of this rank's slice, and zeros where that is padding."""
    own, sizes = shard.box, list(box.sizes)
    if shard.dim is not None:
        dim = shard.dim
        sizes[dim] = max(0, min(own.sizes[dim] - box.offsets[dim], box.sizes[dim]))
        out.narrow(dim, sizes[dim], box.sizes[dim] - sizes[dim]).zero_()
        out = out.narrow(dim, 0, sizes[dim])
    if out.numel():
        offsets = tuple(first + more for first, more in zip(own.offsets, box.offsets, strict=True))
        write(Box(offsets, tuple(sizes)), out)


@torch.no_grad()
def give_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Gives a parameter other memory, on whatever device; it stays the one that others hold."""
    if parameter.is_meta == values.is_meta:
        parameter.data = values
        return
    # Torch takes no memory for a tensor that has none.
    made = type(parameter)(values, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, made)
    if shard_of(parameter).later is not None:
        parameter.shard = replace(shard_of(parameter), later=None)  # type: ignore[attr-defined]


def move_whole(parameter: nn.Parameter, device: torch.device) -> None:
    """Moves all of a parameter to a device, or makes its values there."""
    if shard_of(parameter).later is not None:
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        write_elements(parameter, 0, parameter.numel(), values.view(-1))
        give_values(parameter, values)
    elif parameter.device != device:
        give_values(parameter, parameter.detach().to(device))


def give_memory(module: nn.Module, device: torch.device) -> None:
    """Makes the values of the parameters that wait for memory, on a device."""
    for _, parameter, shard in sharded_parameters(module):
        if shard.later is not None:
            move_whole(parameter, device)
