"""The precision plugin: Lightning's own choice of dtypes, with clipping by the norm of the whole model."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_megatron.optim.gradients import Gradients

SUPPORTED = ("64-true", "32-true", "bf16-true", "bf16-mixed")


class MegatronPrecision(Precision):
    """Wraps the plugin that Lightning chose for `precision`; dtypes are its, gradients are ours."""

    def __init__(self, chosen: Precision) -> None:
        super().__init__()
        known = type(chosen) in (Precision, DoublePrecision, HalfPrecision, MixedPrecision)
        if not known or chosen.precision not in SUPPORTED:
            raise ValueError(
                f"precision {chosen.precision!r} ({type(chosen).__name__}) is not supported by MegatronStrategy; "
                f"use one of {', '.join(SUPPORTED)}"
            )
        self.chosen = chosen
        self.precision = chosen.precision
        self.gradients: Gradients | None = None
        self.gradient_norm: Tensor | None = None
        # norm of the whole model's gradient before the last clipping, [], float64

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return self.chosen.convert_module(module)

    @override
    def convert_input(self, data: Any) -> Any:
        return self.chosen.convert_input(data)

    @override
    def convert_output(self, data: Any) -> Any:
        return self.chosen.convert_output(data)

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self.chosen.tensor_init_context()

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.chosen.module_init_context()

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        return self.chosen.forward_context()

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Steppable, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs forward and backward before torch's step and not inside it, so that step hooks of the optimizer see
        gradients. LBFGS runs the closure by itself, several times."""
        if isinstance(optimizer, LBFGS):
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        self._after_closure(model, optimizer)
        if result is None and model.automatic_optimization:
            # training_step chose to skip the batch: there is no gradient to step by.
            return None
        optimizer.step(**kwargs)
        return result

    @override
    def clip_grad_by_norm(self, optimizer: Steppable, clip_val: int | float) -> None:
        assert self.gradients is not None and isinstance(optimizer, Optimizer)
        self.gradient_norm = self.gradients.clip(float(clip_val), self.main_params(optimizer))

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.chosen.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.chosen.load_state_dict(state_dict)


def compute_dtype(precision: str) -> torch.dtype:
    """The dtype in which matrix products run under a `Trainer(precision=...)`."""
    if precision.startswith("bf16"):
        return torch.bfloat16
    return torch.float64 if precision.startswith("64") else torch.float32
