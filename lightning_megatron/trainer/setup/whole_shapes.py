"""Shapes of the unsplit model for code that sorts parameters by them, such as groups without weight decay."""

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_megatron.sharding import shard_of

_READERS = (
    Tensor.numel,
    Tensor.nelement,
    Tensor.size,
    Tensor.__len__,
    Tensor.shape.__get__,  # type: ignore[attr-defined]
)


class WholeShapes(TorchFunctionMode):
    """Inside the block the parameters of a module show the shapes that they have in the unsplit model.

    Only to code outside of optimizers: those make states for what a rank holds.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        shapes = {id(one): torch.Size(shard_of(one).global_shape) for one in module.parameters()}
        self._shapes = {id(one): shapes[id(one)] for one in module.parameters() if one.shape != shapes[id(one)]}

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        shape = self._shapes.get(id(args[0])) if func in _READERS and args else None
        if shape is None or _is_in_optimizer(sys._getframe(1)):
            return func(*args, **(kwargs or {}))
        # A meta tensor answers in all the forms in which torch does.
        return func(torch.empty(shape, device="meta"), *args[1:], **(kwargs or {}))


def _is_in_optimizer(frame: FrameType | None) -> bool:
    """Whether a method of an optimizer is among the calls that lead to a frame."""
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), Optimizer):
            return True
        frame = frame.f_back
    return False
