"""Float64 throughout: what a model computes in float32, whatever its weights are in, it computes in float64."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class LiftedIslands(TorchFunctionMode):
    """Inside the block every cast to float32 is one to float64.

    Transformers' norms, rotary tables, routers and losses cast to float32. In float64 such a model is good to 1e-7
    alone, and ranks that sum in another order differ as much.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        lifted = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **lifted)
