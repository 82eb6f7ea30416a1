"""Memory and FLOPs of a rank while its own code runs, on tensors of any device.

A storage counts from the operation that returns it until it is freed, rounded up as by CUDA's allocator. Matrix
products count as in `torch.utils.flop_counter`. Attention counts the pairs of tokens that are needed, half of all where
it is causal, and its backward twice its forward; scores that a kernel recomputes there do not count.

Meta tensors have no values: the host reads zeros from them, or True from booleans that it copies. Integers that came
from the host (starts of sequences), or that count up (positions), are known to it, and so is what is computed from
these alone. Q queries, K keys.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from lightning_megatron.planner.kernel_counts import attention_counts, other_counts, product_counts
from lightning_megatron.planner.meta_kernels import KERNELS
from lightning_megatron.planner.output_shapes import OutputShapes
from lightning_megatron.transformer.recompute import to_host

# CUDA's allocator allocates multiples of this.
_BLOCK_BYTES = 512
_ATEN = torch.ops.aten
# The host computes no more integers than positions of a long sample.
_MOST_NUMBERS = 1 << 20
_WHOLE = frozenset({torch.bool, torch.int32, torch.int64})
_PRODUCTS = {
    packet: flop_registry[packet]
    for packet in (_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm, _ATEN._scaled_mm, _ATEN.convolution)
}
# The registry lacks products in place and by groups.
_PRODUCTS |= {_ATEN.addmm_: flop_registry[_ATEN.addmm], _ATEN.baddbmm_: flop_registry[_ATEN.baddbmm]}
_PRODUCTS |= {_ATEN._grouped_mm: lambda rows, weights, *_, **__: 2 * rows.numel() * weights.shape[-1]}
_RESIZE = torch.ops.inductor.resize_storage_bytes_.default
OTHERS = "activations and others"
HOST = "host memory"


def allocated_bytes(storage: torch.UntypedStorage) -> int:
    """Bytes that CUDA's allocator takes for a storage."""
    return -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES


class StorageWatch(Protocol):
    """Whoever is told of every storage that comes and goes."""

    def made(self, key: int, tensor: Tensor, size: int) -> None:
        """A storage is there, of so many bytes, which a tensor is the first to use."""
        ...

    def freed(self, key: int, size: int) -> None:
        """A storage of so many bytes is gone."""
        ...


class MemoryTracker(TorchDispatchMode):
    """A dispatch mode that tracks every tensor of one type of device."""

    def __init__(self, device: torch.device, watch: StorageWatch | None = None) -> None:
        super().__init__()
        self._watch = watch
        self._type = device.type
        # By address of the storage.
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._kinds: dict[int, str] = {}
        # Storages that stand for host memory.
        self._left_out: dict[int, int] = {}
        self._live_bytes = self._peak_bytes = 0
        # Bytes by kind that has a name, of now and of the peak: each is replaced where it changes.
        self._named: Mapping[str, int] = {}
        self._peak_named: Mapping[str, int] = {}
        self.owner: object = None
        """What the next storages belong to; None: to nothing."""
        self.owned: Counter[object] = Counter()
        """Bytes of the storages that are alive, by owner."""
        self._owners: dict[int, object] = {}
        # Bytes that are freed, by their owner and by that of then.
        self._freed: Counter[tuple[object, object]] = Counter()
        # By kind of product.
        self._flops: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        # Integers and booleans, by address of the storage on the device.
        self._from_host: dict[int, Tensor] = {}
        self._shapes = OutputShapes(_SHAPED)
        # They are there as long as their library is.
        self._kernels = KERNELS

    # --- memory -----------------------------------------------------------------------------------------------------

    def name(self, kind: str, tensors: Iterator[Tensor]) -> None:
        """Names the kind of tensors that have none yet."""
        for tensor in tensors:
            self._follow(tensor)
            key = tensor.untyped_storage()._cdata
            if key in self._sizes and key not in self._kinds:
                self._kinds[key] = kind
                self._add_named(kind, self._sizes[key])

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors as the host's and not the device's, and what is computed of them alone."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == self._type and (key := storage._cdata) not in self._left_out:
                if key in self._sizes:
                    self._let_go(key)
                self._left_out[key] = size = storage.nbytes()
                self._add_named(HOST, size)
                self._references[key] = weakref.ref(storage, partial(self._forget, key))

    def _forget(self, key: int, _: object) -> None:
        self._add_named(HOST, -self._left_out.pop(key))
        del self._references[key]

    def _is_left_out(self, tensors: Any) -> bool:
        """Whether all of the tensors stand for host memory, but for single numbers."""
        keys = [x.untyped_storage()._cdata for x in tree_leaves(tensors) if isinstance(x, Tensor) and x.dim()]
        return bool(keys) and all(key in self._left_out for key in keys)

    def to_host(self, x: Tensor) -> Tensor:
        """A tensor that stands for a copy in host memory."""
        if self._type != "meta":
            return to_host(x)
        held = torch.empty_like(x)
        self.leave_out([held])
        return held

    def kind_of(self, key: int) -> str:
        """The kind that a storage has been named as."""
        return self._kinds.get(key, OTHERS)

    def take_freed(self) -> Counter[tuple[object, object]]:
        """Bytes that were freed since they were last taken, by whom they belonged to and whose turn it was then."""
        freed, self._freed = self._freed, Counter()
        return freed

    def kept(self) -> Counter[object]:
        """Bytes of the storages that are alive and have no name, by owner."""
        found: Counter[object] = Counter()
        for key, owner in self._owners.items():
            if key not in self._kinds:
                found[owner] += self._sizes[key]
        return found

    @property
    def held(self) -> dict[str, int]:
        """Bytes by kind that are held now."""
        return _by_kind(self._live_bytes, self._named)

    def take_peak(self) -> dict[str, int]:
        """Bytes by kind at the peak since it was last taken."""
        peak = _by_kind(self._peak_bytes, self._peak_named)
        self._note_peak()
        return peak

    def take_flops(self) -> Counter[str]:
        """FLOPs by kind of product since they were last taken."""
        flops, self._flops = self._flops, Counter()
        return flops

    def take_counts(self) -> Counter[str]:
        """What kernels took since it was last taken, as in `kernel_counts`."""
        counts, self._counts = self._counts, Counter()
        return counts

    def _follow(self, tensor: Tensor) -> None:
        if tensor.device.type != self._type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or key in self._left_out:
            return
        size = allocated_bytes(storage)
        self._sizes[key] = size
        self._references[key] = weakref.ref(storage, lambda _: self._let_go(key))
        self._live_bytes += size
        if self.owner is not None:
            self._owners[key] = self.owner
            self.owned[self.owner] += size
        if self._watch is not None:
            self._watch.made(key, tensor, size)
        if self._live_bytes > self._peak_bytes:
            self._note_peak()

    def _let_go(self, key: int) -> None:
        size = self._sizes.pop(key)
        self._live_bytes -= size
        del self._references[key]
        self._from_host.pop(key, None)
        if (owner := self._owners.pop(key, None)) is not None:
            self.owned[owner] -= size
            if owner is not self.owner:
                self._freed[owner, self.owner] += size
        if (kind := self._kinds.pop(key, None)) is not None:
            self._add_named(kind, -size)
        if self._watch is not None:
            self._watch.freed(key, size)

    def _resized(self, tensor: Tensor) -> None:
        """Counts a storage anew, whose memory was freed or allocated under its tensors."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, allocated_bytes(storage)
        if tensor.device.type != self._type or key not in self._sizes:
            return
        change, self._sizes[key] = size - self._sizes[key], size
        self._live_bytes += change
        if (owner := self._owners.get(key)) is not None:
            self.owned[owner] += change
        if (kind := self._kinds.get(key)) is not None:
            self._add_named(kind, change)
        if self._watch is not None:
            self._watch.freed(key, size - change)
            self._watch.made(key, tensor, size)
        if self._live_bytes > self._peak_bytes:
            self._note_peak()

    def _add_named(self, kind: str, size: int) -> None:
        self._named = {**self._named, kind: self._named.get(kind, 0) + size}

    def _note_peak(self) -> None:
        self._peak_bytes, self._peak_named = self._live_bytes, self._named

    # --- operations -------------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing that runs here is compiled, and to tell torch so at each operation takes a tenth of a dry run."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _RESIZE:
            func(*args, **kwargs)
            self._resized(args[0])
            return None
        is_copied = func is _ATEN._to_copy.default and getattr(kwargs.get("device"), "type", "meta") != "meta"
        if (is_copied or func is _ATEN._local_scalar_dense.default) and (known := self._known(args[0])) is not None:
            args = (known, *args[1:])
        if self._type == "meta" and func in _ANSWERS and (answer := _ANSWERS[func](args, kwargs)):
            return answer[0]
        output = self._shapes.output_of(func, args, kwargs) if self._type == "meta" else func(*args, **kwargs)
        self._count(func, args, kwargs, output)
        if self._left_out and self._is_left_out((args, kwargs)):
            self.leave_out(x for x in tree_leaves(output) if isinstance(x, Tensor) and x.dim())
        if isinstance(output, Tensor):
            self._follow(output)
            self._note_numbers(func, args, kwargs, output)
        elif isinstance(output, (tuple, list)):
            for one in output:
                if isinstance(one, Tensor):
                    self._follow(one)
        return output

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        packet = func.overloadpacket
        if packet in _PRODUCTS:
            # Formulas know no dtype of an output.
            factors = (one for one in args if not isinstance(one, torch.dtype))
            flops = _PRODUCTS[packet](*factors, **kwargs, out_val=output)
            self._flops["products"] += flops
            counts = product_counts(packet, args, output, flops)
        elif packet in _ATTENTION or packet in _PACKED:
            is_packed = packet in _PACKED
            flops = int(_PACKED[packet](args, kwargs, self._known) if is_packed else _ATTENTION[packet](args, kwargs))
            self._flops["attention"] += flops
            counts = attention_counts(packet, flops)
        else:
            counts = other_counts(func, args, output)
        for kind, count in counts.items():
            self._counts[kind] += count  # type: ignore[assignment]

    def _note_numbers(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        """Saves integers and booleans that the host knows, until they change."""
        if not output.is_meta or not _is_whole(output):
            return
        key = output.untyped_storage()._cdata
        if func._schema.is_mutable:
            self._from_host.pop(key, None)
        elif key not in self._from_host and (numbers := self._computed(func, args, kwargs, output)) is not None:
            held = torch.empty_strided(output.shape, output.stride(), dtype=output.dtype)
            self._from_host[key] = held.copy_(numbers)

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        """What an operation returns on the host; None where that takes what the host does not know."""
        if output.numel() > _MOST_NUMBERS:
            return None
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if not given and func.overloadpacket is not _ATEN.arange:
            return None
        if any(not _is_whole(one) or self._known(one) is None for one in given):
            return None
        args, kwargs = tree_map_only(Tensor, self._known, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        numbers: Tensor = func(*args, **kwargs)
        return numbers

    def _known(self, x: Tensor) -> Tensor | None:
        """The values of a tensor on the host, where they are known."""
        if not x.is_meta:
            return x
        held = self._from_host.get(x.untyped_storage()._cdata)
        return None if held is None else held.as_strided(x.shape, x.stride(), x.storage_offset())


def _by_kind(size: int, named: Mapping[str, int]) -> dict[str, int]:
    return {**named, OTHERS: size - sum(named.values()) + named.get(HOST, 0)}


# --- answers of a device for meta tensors -----------------------------------------------------------------------

_Arguments = tuple[Any, ...]
_Named = dict[str, Any]
_Numbers = Callable[[Tensor], Tensor | None]


def _is_whole(x: Tensor) -> bool:
    """Whether a tensor has integers or booleans."""
    return x.dtype in _WHOLE


def _copied(args: _Arguments, kwargs: _Named) -> tuple[Tensor] | None:
    x, device = args[0], kwargs.get("device")
    if not x.is_meta or device is None or device.type == "meta":
        return None
    make = torch.ones if x.dtype == torch.bool else torch.zeros
    return (make(x.shape, dtype=kwargs.get("dtype") or x.dtype, device=device),)


def _number(args: _Arguments, kwargs: _Named) -> tuple[object] | None:
    return (torch.zeros((), dtype=args[0].dtype).item(),) if args[0].is_meta else None


def _efficient_gradients(grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, *rest: Any, **named: Any) -> Any:
    # Torch's own shape function takes other arguments than the operation.
    unused = queries.new_empty(())
    return *(torch.empty_like(x) for x in (queries, keys, values)), unused


_SHAPED: dict[Any, Callable[..., Any]] = {_ATEN._efficient_attention_backward.default: _efficient_gradients}
_ANSWERS: dict[Any, Callable[[_Arguments, _Named], tuple[Any, ...] | None]] = {
    _ATEN._to_copy.default: _copied,
    _ATEN._local_scalar_dense.default: _number,
}


# --- attention ------------------------------------------------------------------------------------------------------


def _pairs(queries: int, keys: int, is_causal: bool) -> float:
    """Needed pairs of queries and keys; a causal query is aligned with the key at its position, from either end."""
    if not is_causal:
        return queries * keys
    return min(queries, keys) ** 2 / 2 if keys <= queries else queries * keys - queries**2 / 2


def _by_head(queries: Tensor, keys: Tensor, is_causal: bool) -> float:
    """FLOPs of an attention forward with queries [B, A, Q, D]."""
    pairs = _pairs(queries.shape[-2], keys.shape[-2], is_causal)
    return 4 * queries.shape[:-2].numel() * pairs * queries.shape[-1]


def _by_token(queries: Tensor, keys: Tensor, is_causal: bool) -> float:
    """FLOPs of an attention forward with queries [B, Q, A, D]."""
    return _by_head(queries.transpose(1, 2), keys.transpose(1, 2), is_causal)


def _packed(queries: Tensor, bounds: _Arguments, is_causal: bool, named: _Named, numbers: _Numbers) -> float:
    """FLOPs of an attention forward with queries [T, A, D] of packed sequences. `bounds` are the starts of queries and
    of keys, and the longest sequence of each, which counts for all where the starts are unknown."""
    window = named.get("window_size_left", -1) + 1
    starts = [x.tolist() for x in map(numbers, bounds[:2]) if x is not None]
    if len(starts) == 2:
        lengths = [(b - a, d - c) for (a, b), (c, d) in zip(*map(pairwise, starts), strict=True)]
    else:
        lengths = [bounds[2:]] * (len(bounds[0]) - 1)
    pairs = sum(_in_band(*one, window) if window else _pairs(*one, is_causal) for one in lengths)
    return 4 * queries.shape[1] * pairs * queries.shape[2]


def _in_band(queries: int, keys: int, window: int) -> float:
    """Pairs of each query with its last `window` keys, the last query aligned with the last key; an area, like the half
    square of causal attention."""
    corners = (keys - queries, keys - window)
    return (keys**2 - sum(max(x, 0) ** 2 for x in corners) + max(keys - queries - window, 0) ** 2) / 2


def _attention(first: int, causal: int, times: int = 1, flops: Any = _by_head) -> Callable[..., float]:
    """FLOPs of a kernel by the indices of its arguments: queries (keys follow) and `is_causal`."""

    def flops_of(args: _Arguments, kwargs: _Named) -> float:
        is_causal = args[causal] if len(args) > causal else kwargs.get("is_causal")
        return float(times * flops(args[first], args[first + 1], bool(is_causal)))

    return flops_of


_ATTENTION: dict[Any, Callable[[_Arguments, _Named], float]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention(0, 4),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention(1, 7, 2),
    _ATEN._efficient_attention_forward: _attention(0, 9, 1, _by_token),
    _ATEN._efficient_attention_backward: _attention(1, 14, 2, _by_token),
}
_PACKED: dict[Any, Callable[[_Arguments, _Named, _Numbers], float]] = {
    _ATEN._flash_attention_forward: lambda a, k, numbers: _packed(a[0], a[3:7], a[8], k, numbers),
    _ATEN._flash_attention_backward: lambda a, k, numbers: 2 * _packed(a[1], a[6:10], a[11], k, numbers),
}
