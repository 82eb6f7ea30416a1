"""CUDA tensors without numbers, on any machine: code for a GPU runs forward and backward, and is seen to run there.

Tensors on the host are real; those on "cuda" have a shape, a dtype and a device (torch's `FakeTensorMode`), and an
operation on the wrong device raises as it would on a GPU. Integers and booleans that the host has copied to the device,
and what is computed of these alone, are known; the host reads zeros of everything else. `fake_cuda.cpp` gives a build
of torch without CUDA what autograd asks of a device; it is compiled once, into the folder `build` of the tree.

It changes the process for good: enter the mode only in a rank of its own (`on_ranks(1, init=False)`).
"""

import functools
import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.cpp_extension import load

from lightning_megatron.transformer.uncompiled_experts import with_autograd

ROOT = Path(__file__).resolve().parents[2]
_ATEN = torch.ops.aten
_apply_of_torch = nn.Module._apply
_grad_fn_of_torch = Tensor.grad_fn.__get__
# An H100's.
_CAPABILITY = (9, 0)
# Whoever writes what they make is not always seen: a message of another rank, say.
_UNWRITTEN = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}
# Elements of a tensor whose numbers are computed.
_MOST_FOLLOWED = 1 << 17
# What torch and Lightning ask of the device before they use it.
_ANSWERS: dict[str, Callable[..., Any]] = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "is_bf16_supported": lambda including_emulation=True: True,
    "get_device_capability": lambda device=None: _CAPABILITY,
    "get_device_name": lambda device=None: "NVIDIA H100 80GB HBM3",
    "empty_cache": lambda: None,
    "current_stream": lambda device=None: torch.Stream(device="cuda"),
}


@functools.cache
def load_device() -> None:
    """Gives a process without a CUDA device one that computes nothing. Raises where that cannot be compiled."""
    if torch.cuda.is_available():
        return
    source = Path(__file__).with_suffix(".cpp")
    built = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    library = ROOT / "build" / f"fake_cuda-{torch.__version__}-{built}.so"
    if library.exists():
        torch.ops.load_library(str(library))
        return
    library.parent.mkdir(exist_ok=True)
    # In a folder of its own: a process that is ended while it builds leaves nothing that others wait for.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        load("fake_cuda", [str(source)], extra_cflags=["-O0"], build_directory=folder, is_python_module=False)
        Path(folder, "fake_cuda.so").replace(library)


class FakeCuda(TorchDispatchMode):
    """A mode in which tensors on "cuda" have no numbers; `torch.cuda` answers as if there were one H100."""

    def __init__(self) -> None:
        super().__init__()
        load_device()
        self.fake = FakeTensorMode()
        self._answers = [mock.patch.object(torch.cuda, name, answer) for name, answer in _ANSWERS.items()]
        self._answers.append(mock.patch.object(nn.Module, "_apply", _apply))
        # Torch copies a tensor of any other kind to the host as one.
        self._answers.append(mock.patch.object(FakeTensor, "tolist", lambda x: x.cpu().tolist()))
        self._answers.append(mock.patch.object(FakeTensor, "grad_fn", property(_grad_fn)))
        # Storages on the device whose integers are known, and these, by their addresses.
        self._numbers: dict[int, tuple[Any, Tensor]] = {}

    def __enter__(self) -> "FakeCuda":
        for answer in self._answers:
            answer.start()
        # torch.tensor(..., device="cuda") makes a tensor on the host, and copies it by an operation that modes see.
        self._before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._before)
        for answer in self._answers:
            answer.stop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(is_cuda(x) for x in pytree.arg_tree_leaves(*args, **kwargs)):
            return func(*args, **kwargs)
        if func.overloadpacket is _ATEN.to:
            # Where autograd is not on the way it comes as it was called.
            with again(self):
                return func.decompose(*args, **kwargs)
        if func is _ATEN._local_scalar_dense.default:
            return self.read(args[0]).item()
        if func is _ATEN._to_copy.default and _goes_to_host(kwargs):
            return self.read(args[0]).to(kwargs.get("dtype") or args[0].dtype)
        if func is _ATEN.copy_.default and not args[0].is_cuda:
            return args[0].copy_(self.read(args[1]))
        # Without this torch would compute what takes no fake tensor for real.
        faked_args, faked = pytree.tree_map_only(Tensor, self._faked, (args, kwargs))
        with self.fake:
            output = func(*faked_args, **faked)
        if not func.is_view:
            self._follow(func, args, kwargs, output)
        return output

    def _faked(self, x: Tensor) -> Tensor:
        return x if x.is_cuda else self.fake.from_tensor(x)

    def read(self, x: Tensor) -> Tensor:
        """What the host gets: a real tensor."""
        known = self._known(x)
        return torch.zeros(x.shape, dtype=x.dtype) if known is None else known.clone()

    def _known(self, x: Tensor) -> Tensor | None:
        """The integers of a tensor, where they are known, as a view of those of its storage."""
        if not x.is_cuda:
            return x
        _, numbers = self._numbers.get(_address(x), (None, None))
        return None if numbers is None else numbers.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Computes the integers that an operation makes of integers."""
        written, outputs = list(_written(func, args, kwargs)), pytree.tree_leaves(output)
        inputs = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, Tensor)]
        is_known = all(not x.is_cuda or (_is_followed(x) and self._known(x) is not None) for x in inputs)
        if func.overloadpacket in _UNWRITTEN or not is_known or not any(map(_is_followed, outputs)):
            for x in written:
                self._numbers.pop(_address(x), None)
            return
        on_host = pytree.tree_map(self._moved, (args, kwargs))
        results = pytree.tree_leaves(func(*on_host[0], **on_host[1]))
        if written:
            return
        for x, numbers in zip(outputs, results, strict=True):
            if _is_followed(x):
                storage = x.untyped_storage()
                self._numbers[_address(x)] = storage, torch.empty(storage.nbytes(), dtype=torch.uint8)
                known = self._known(x)
                assert known is not None
                known.copy_(numbers)

    def _moved(self, x: Any) -> Any:
        """A leaf of arguments on the host."""
        if isinstance(x, Tensor):
            return self._known(x)
        return torch.device("cpu") if isinstance(x, torch.device) else x


@contextmanager
def again(mode: TorchDispatchMode) -> Iterator[None]:
    """A block in which a mode is on that is on already, or was: of its own dispatch, say."""
    TorchDispatchMode.__enter__(mode)
    try:
        yield
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)


def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """In place of torch's: parameters without numbers are not moved from the device, where torch would swap them."""
    if not any(isinstance(x, FakeTensor) for x in module._parameters.values()):
        return _apply_of_torch(module, fn, recurse)
    for child in module.children():
        child._apply(fn)
    for parameter in module._parameters.values():
        with torch.no_grad():
            assert parameter is None or fn(parameter).dtype == parameter.dtype, "build the module in its dtype"
    module._buffers = {name: x if x is None else fn(x) for name, x in module._buffers.items()}
    return module


def _grad_fn(x: Tensor) -> Any:
    """In place of torch's, which fails an assertion (`new_fn` in torch/csrc/autograd/variable.cpp) for a view whose
    memory was written since it was made: of a subclass it runs the view again, without autograd where operations run
    without it, as in inference mode, or under `no_grad` in a mode. Of tensors with numbers it runs nothing."""
    with with_autograd():
        return _grad_fn_of_torch(x)


def is_cuda(x: Any) -> bool:
    """Whether a leaf of arguments is a tensor on the device, or names it."""
    return x.device.type == "cuda" if isinstance(x, Tensor) else isinstance(x, torch.device) and x.type == "cuda"


def _is_followed(x: Any) -> bool:
    is_kind = isinstance(x, Tensor) and x.is_cuda and not x.is_floating_point() and not x.is_complex()
    return is_kind and x.numel() <= _MOST_FOLLOWED


def _goes_to_host(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and device.type == "cpu"


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operation writes."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (x for x in pytree.tree_leaves(value) if isinstance(x, Tensor))


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata
