"""What a region of code asks of a device, counted as it runs on its tensors, real ones or fake: kernels, bytes, FLOPs,
copies between host and device, and moments at which the host waits for the device.

An operation counts as one kernel if it launches at least one, as none without elements does; some launch several, so
kernels are a lower bound. Bytes are those that kernels other than products and attention read and write: each argument
and each result once, also one named `out`, and what they pick by index alone. FLOPs are those of matrix products, as
in `torch.utils.flop_counter`; attention is not among them.

The host waits where it reads a value, where an operation's result has a size that only the device knows, and for every
copy but one that is `non_blocking`: from the device also unless it ends in pinned memory.
"""

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import lightning_megatron

PACKAGE = str(Path(lightning_megatron.__file__).parent)
_ATEN = torch.ops.aten
# The registry lacks the in-place products.
_PRODUCTS: dict[Any, Any] = {
    packet: flop_registry[packet]
    for packet in (_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm, _ATEN._scaled_mm, _ATEN.convolution)
}
_PRODUCTS |= {_ATEN.addmm_: flop_registry[_ATEN.addmm], _ATEN.baddbmm_: flop_registry[_ATEN.baddbmm]}
_PRODUCTS[_ATEN._grouped_mm] = lambda x, weight, *rest, out_val=None, **named: 2 * x.numel() * weight.shape[-1]
_PRODUCTS[_ATEN.convolution_backward] = flop_registry[_ATEN.convolution_backward]
_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_backward,
    _ATEN._scaled_dot_product_efficient_attention,
    _ATEN._scaled_dot_product_efficient_attention_backward,
    _ATEN._flash_attention_forward,
    _ATEN._flash_attention_backward,
    _ATEN._efficient_attention_forward,
    _ATEN._efficient_attention_backward,
}
# They make a tensor, and write nothing.
_WITHOUT_KERNEL = {
    _ATEN.empty,
    _ATEN.empty_like,
    _ATEN.empty_strided,
    _ATEN.new_empty,
    _ATEN.new_empty_strided,
    _ATEN.lift_fresh,
    _ATEN._local_scalar_dense,
    _ATEN._unsafe_view,
    torch.ops.prim.device,
}
# They overwrite what they get first.
_OVERWRITES = {_ATEN.copy_, _ATEN.fill_, _ATEN.zero_}
# They read of the first argument, or write of it, what an index picks.
_PICKS = {_ATEN.embedding, _ATEN.index_select, _ATEN.gather, _ATEN.index}
_PUTS = {_ATEN.index_put_, _ATEN.index_copy_, _ATEN.index_add_, _ATEN.scatter_, _ATEN.scatter_add_, _ATEN.index_copy}
# The size of what they return is on the device.
_SIZED_BY_VALUES = {
    _ATEN.nonzero,
    _ATEN.masked_select,
    _ATEN.bincount,
    _ATEN._unique2,
    _ATEN.unique_dim,
    _ATEN.unique_consecutive,
    _ATEN.equal,
}
OUTSIDE = "no line of the package, such as the backward of torch's own operations"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One operation on the device."""

    name: str
    site: str
    """File and line of the package that caused it."""
    num_kernels: int = 0
    num_bytes: int = 0
    flops: int = 0
    copy: str = ""
    """Direction of a copy between host and device."""
    waits: bool = False


@dataclass
class Work:
    """What a region asked of the device."""

    launches: list[Launch] = field(default_factory=list)

    @property
    def num_kernels(self) -> int:
        """Kernels other than products and attention."""
        return sum(launch.num_kernels for launch in self.launches)

    @property
    def num_bytes(self) -> int:
        return sum(launch.num_bytes for launch in self.launches)

    @property
    def flops(self) -> int:
        return sum(launch.flops for launch in self.launches)

    @property
    def waits(self) -> Counter[str]:
        """Number of times that the host waits, by operation and line."""
        return Counter(f"{launch.name} at {launch.site}" for launch in self.launches if launch.waits)

    @property
    def copies(self) -> Counter[str]:
        """Number of copies between host and device, by direction and line."""
        return Counter(f"{launch.copy} at {launch.site}" for launch in self.launches if launch.copy)


class DeviceWork(TorchDispatchMode):
    """A mode that notes in `work` every operation on the device; entered after `FakeCuda`, where that is used."""

    def __init__(self, device_type: str = "cuda") -> None:
        super().__init__()
        self.work = Work()
        self._device_type = device_type

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is _ATEN.to:
            # Where autograd is not on the way it comes as it was called.
            with self:
                return func.decompose(*args, **kwargs)
        output = func(*args, **kwargs)
        if any(_is_on(x, self._device_type) for x in pytree.arg_tree_leaves(*args, **kwargs)):
            launch = _launch(func, args, kwargs, output, self._device_type)
            if launch.num_kernels or launch.flops or launch.copy or launch.waits:
                self.work.launches.append(launch)
        return output


def _is_on(x: Any, device_type: str) -> bool:
    """Whether a leaf of arguments is a tensor on the device, or names it."""
    device = x.device if isinstance(x, Tensor) else x
    return isinstance(device, torch.device) and device.type == device_type


def _tensors(values: Any, device_type: str) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor) and x.device.type == device_type]


def _launch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, device_type: str) -> Launch:
    packet = func.overloadpacket
    where = {"name": packet.__name__, "site": _site()}
    if packet in _PRODUCTS:
        # Formulas know no dtype of an output.
        factors = (one for one in args if not isinstance(one, torch.dtype))
        return Launch(**where, flops=_PRODUCTS[packet](*factors, **kwargs, out_val=output))
    results = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
    if results and not any(x.numel() for x in results):
        return Launch(**where)
    if packet in _ATTENTION or packet in _WITHOUT_KERNEL or func.is_view or torch.Tag.inplace_view in func.tags:
        return Launch(**where, waits=packet is _ATEN._local_scalar_dense)
    if packet in (_ATEN._to_copy, _ATEN.copy_) and (copy := _copy_between(packet, args, kwargs, output)):
        return Launch(**where, **copy)
    waits = packet in _SIZED_BY_VALUES or _has_mask(packet, args) or _repeats_by_values(packet, args, kwargs)
    return Launch(
        **where, num_kernels=1, num_bytes=_bytes_of_kernel(packet, args, kwargs, output, device_type), waits=waits
    )


def _copy_between(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> dict[str, Any] | None:
    """Direction of a copy and whether the host waits for it; None within the device."""
    source, target = (args[0], output) if packet is _ATEN._to_copy else (args[1], args[0])
    if source.is_cuda == target.is_cuda or (not source.is_cuda and packet is _ATEN.copy_ and source.dim() == 0):
        return None
    is_asynchronous = kwargs.get("non_blocking", False) or (packet is _ATEN.copy_ and len(args) > 2 and args[2])
    if target.is_cuda:
        return {"copy": "host to device", "waits": not is_asynchronous}
    return {"copy": "device to host", "waits": not (is_asynchronous and target.is_pinned())}


def _has_mask(packet: Any, args: tuple[Any, ...]) -> bool:
    if packet not in (_ATEN.index, _ATEN.index_put_, _ATEN.index_put):
        return False
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def _repeats_by_values(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return packet is _ATEN.repeat_interleave and kwargs.get("output_size") is None


def _bytes_of_kernel(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, device_type: str) -> int:
    # What is named `out` is written alone.
    read = args, {name: value for name, value in kwargs.items() if name != "out"}
    inputs, outputs = _tensors(read, device_type), _tensors(output, device_type)
    if packet in _PICKS:
        return 2 * _bytes(outputs) + _bytes(inputs[1:])
    if packet in _PUTS:
        return 2 * _bytes(inputs[1:])
    return _bytes(inputs[1:] if packet in _OVERWRITES else inputs) + _bytes(outputs)


def _bytes(tensors: list[Tensor]) -> int:
    """Bytes that the tensors have in memory: an expanded dim is read once."""
    total = 0
    for x in tensors:
        sizes = [size for size, stride in zip(x.shape, x.stride(), strict=True) if stride]
        total += torch.Size(sizes).numel() * x.element_size() if x.numel() else 0
    return total


def _site() -> str:
    """The innermost line of the package on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            return f"{Path(name).relative_to(PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return OUTSIDE
