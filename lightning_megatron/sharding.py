"""Shards of parameters: the slice that a rank holds, read by initialiser, gradient norm, checkpoint and import.

A `Shard` is attached to a parameter when its layer is built, and nothing flags a parameter by hand later. A cut
dim is split into equal local lengths; where the axis does not divide it, the last ranks hold padding after their valid
part (`box` says which part is valid). Padding is zero, stays zero and never leaves the rank.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree

from lightning_megatron.mesh import Axis

# Parameters that were made without values, where they are made so.
_DEFERRED: ContextVar["list[ref[nn.Parameter]] | None"] = ContextVar("lightning_megatron_deferred", default=None)
# Elements that are drawn or read at a time, which bounds the memory that this takes beside them.
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
    deferral: "Deferral | None" = None
    """How the parameter gets its values, until it has them."""

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
    divide it. Made on torch's default device, in its default dtype; inside `deferring` without memory.
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
    made = _DEFERRED.get()
    stand_in = None if made is None else torch.full((), math.nan)
    parameter = ShardedParameter(torch.empty(local_shape) if stand_in is None else stand_in.expand(local_shape))
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
    if made is not None and stand_in is not None:
        made.append(ref(parameter))
        parameter.deferral = Deferral(_write_nothing, stand_in)
        # Tensors of another kind than torch's own, which have no numbers, keep their class.
        if type(parameter) is ShardedParameter:
            parameter.__class__ = DeferredParameter
    return parameter


# --- parameters without values yet -----------------------------------------------------------------------------------


Write = Callable[[Box, Tensor], None]
"""Draws or reads a box of an unsplit parameter into memory of the parameter's dtype."""


@dataclass(frozen=True)
class Deferral:
    """Values that a parameter gets when they are first used."""

    write: Write
    stand_in: Tensor
    """What is in place of all values: one number [], NaN, which nobody writes to."""


@contextmanager
def deferring() -> Iterator[list[ref[nn.Parameter]]]:
    """Inside the block parameters are made without values (`shard_parameter`); yields the list of them, which keeps
    none alive."""
    outer = _DEFERRED.get()
    made: list[ref[nn.Parameter]] = [] if outer is None else outer
    token = _DEFERRED.set(made)
    try:
        yield made
    finally:
        _DEFERRED.reset(token)


def is_deferring() -> bool:
    """Whether parameters are made without values."""
    return _DEFERRED.get() is not None


class DeferredParameter(ShardedParameter):
    """A parameter without values, which are drawn or read when they are first used.

    Whoever uses them gets all of them: whatever needs more than its shape makes it an ordinary parameter, the same
    object, first. Of one that nobody has used a data-parallel rank writes the elements of its shard alone.
    """

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> Any:
        # Code that makes another parameter of the type of this one gives it values.
        return ShardedParameter(data, requires_grad)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call: Callable[..., Any] = super().__torch_function__
        kwargs = kwargs or {}
        if func in _CONVERSIONS and call(func, types, args, kwargs) is args[0]:
            return args[0]
        if func == _SET_DATA and args[0] is args[1]:
            # `Module.to` sets the data even of what is as it should be.
            return None
        if func not in _NEED_NO_VALUES:
            for one in pytree.tree_leaves((args, kwargs)):
                if isinstance(one, DeferredParameter):
                    materialize(one)
        return call(func, types, args, kwargs)


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_CONVERSIONS = (Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.double, Tensor.float, Tensor.half, Tensor.bfloat16)
_NEED_NO_VALUES = {
    *(
        getattr(Tensor, name).__get__
        for name in (
            *("shape", "ndim", "dtype", "device", "layout", "itemsize", "nbytes"),
            *("is_leaf", "is_meta", "is_cpu", "is_cuda", "is_sparse", "is_nested", "is_quantized"),
            *("requires_grad", "retains_grad", "grad", "grad_fn", "grad_dtype", "_grad"),
            *("_backward_hooks", "_post_accumulate_grad_hooks"),
        )
    ),
    *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad", "grad_dtype")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.element_size),
    *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex),
    *(Tensor.requires_grad_, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
    torch._has_compatible_shallow_copy_type,
}


def _write_nothing(box: Box, out: Tensor) -> None:
    out.fill_(math.nan)


@torch.no_grad()
def fill(parameter: Tensor, write: Write) -> None:
    """Writes a parameter; one that has no values yet gets them so when they are first used."""
    if is_deferred(parameter):
        parameter.deferral = replace(parameter.deferral, write=write)  # type: ignore[attr-defined]
    elif not parameter.is_meta:
        write_local(shard_of(parameter), write, Box((0,) * parameter.dim(), tuple(parameter.shape)), parameter)


def is_deferred(parameter: Tensor) -> bool:
    """Whether a parameter has no values yet: it has none of its own memory, in whatever way it might have got some."""
    deferral = getattr(parameter, "deferral", None)
    with torch._C.DisableTorchFunctionSubclass():
        return deferral is not None and _storage(parameter) == _storage(deferral.stand_in)


def _storage(x: Tensor) -> int:
    """What tells storages apart, also those without memory."""
    return int(x.untyped_storage()._cdata)


def settle(parameter: Tensor) -> None:
    """Makes a deferred parameter an ordinary one, whose memory the caller sees to."""
    if isinstance(parameter, DeferredParameter):
        parameter.__class__ = ShardedParameter  # type: ignore[assignment]
    parameter.__dict__.pop("deferral", None)


def materialize(parameter: Tensor) -> None:
    """Gives a parameter all of its values, if it has none yet."""
    if not is_deferred(parameter):
        settle(parameter)
        return
    # Somebody may use it within another mode or a transform of torch.func, and it outlives these.
    with torch.inference_mode(False), torch.no_grad(), temporarily_clear_interpreter_stack():
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        write_elements(parameter, 0, values.numel(), values.view(-1))
        settle(parameter)
        parameter.data = values


@torch.no_grad()
def write_elements(parameter: Tensor, start: int, end: int, out: Tensor) -> None:
    """Writes the elements `start` to before `end` of a flattened parameter to `out`; of one without values no others
    are drawn, or read."""
    if not is_deferred(parameter):
        out.copy_(parameter.detach().reshape(-1)[start:end])
        return
    if out.is_meta:
        return
    assert out.dtype == parameter.dtype, "values are rounded once"
    deferral: Deferral = parameter.deferral  # type: ignore[attr-defined]
    shape = tuple(parameter.shape)
    if bool(deferral.stand_in == deferral.stand_in):
        raise RuntimeError(
            f"a weight of shape {shape} was written to before it has values, by code that torch does not tell of; "
            'write to it in on_fit_start, or use OptimizerConfig(kind="distributed_gradients")'
        )
    for first in range(start, end, _NUM_WRITTEN):
        for begin, box in boxes_of_range(shape, first, min(first + _NUM_WRITTEN, end)):
            part = out[begin - start :][: math.prod(box.sizes)].view(box.sizes)
            write_local(shard_of(parameter), deferral.write, box, part)


def write_local(shard: Shard, write: Write, box: Box, out: Tensor) -> None:
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


# --- the shards of a module ------------------------------------------------------------------------------------------


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
