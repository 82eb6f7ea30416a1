"""The precision plugin: Lightning's own choice of dtypes, with the norm, the checks and the weights of the whole model.

    precision     weights    matrix products    gradients    master weights    loss scale
    64-true       float64    float64            float64      -               -
    32-true       float32    float32            float32      -               -
    bf16-true     bfloat16   bfloat16           bfloat16     -               -
    bf16-mixed    bfloat16   bfloat16           float32      float32         -
    16-mixed      float16    float16            float32      float32         dynamic

Vectors (weights of norms, biases) stay in float32 under mixed precision, and frozen weights in their dtype. Outside of
fit, weights are in the master weights' dtype.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_megatron.metrics.step_timeline import CLIP, GATHER, OPTIMIZER
from lightning_megatron.optim.config import LossScaleConfig, OptimizerConfig
from lightning_megatron.optim.data_parallel_comm import DataParallelComm
from lightning_megatron.optim.loss_scale import LossScale
from lightning_megatron.optim.replica_check import bullet_list, describe_nonfinite, finite_norm
from lightning_megatron.optim.separable import needs_closure
from lightning_megatron.pipeline.step_hooks import StepHook, hooked
from lightning_megatron.precision.fp8 import Fp8Config, config_of_recipe
from lightning_megatron.transformer.fp8_layers import Fp8Layers

SUPPORTED = ("64-true", "32-true", "bf16-true", "bf16-mixed", "16-mixed", "transformer-engine")

_LOW = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_GRADIENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# The part of the plugin's state that delayed scales follow from.
_FP8_AMAXES = "fp8_amaxes"
_LOSS_SCALE = "loss_scale"


class MegatronPrecision(Precision):
    """Wraps the plugin that Lightning chose for `precision`; dtypes are its, gradients are ours."""

    def __init__(self, chosen: Precision) -> None:
        super().__init__()
        # What `precision="transformer-engine"` asks for.
        self.fp8: Fp8Config | None = None
        # The layers of the model that multiply, or multiplied, in FP8.
        self.fp8_layers: Fp8Layers | None = None
        precision = chosen.precision
        if isinstance(chosen, TransformerEnginePrecision):
            self.fp8 = _fp8_of(chosen)
            # Lightning's plugin would replace every nn.Linear by name; all else it does is this.
            chosen = HalfPrecision("bf16-true")
        known = type(chosen) in (Precision, DoublePrecision, HalfPrecision, MixedPrecision)
        if not known or chosen.precision not in SUPPORTED:
            raise ValueError(
                f"precision {chosen.precision!r} ({type(chosen).__name__}) is not supported by MegatronStrategy; "
                f"use one of {', '.join(SUPPORTED)}"
            )
        self.chosen = chosen
        self.precision = precision
        if isinstance(chosen, MixedPrecision):
            # As a module may ask Lightning's own for it.
            self.device = chosen.device
        self.dp_comm: DataParallelComm | None = None
        self.loss_scale: LossScale | None = None
        # Whether the last optimizer step was done, and whether it was skipped because a gradient was no number.
        self.has_stepped = self.has_skipped = False
        # Norm of the whole model's gradient before the last clipping, [], float64.
        self.gradient_norm: Tensor | None = None
        # Norm of the gradients that the step under way was checked by, for as long as they are sure to be the same.
        self._checked_norm: Tensor | None = None
        # Whether hooks of a user's may change gradients between the check and the clipping.
        self._has_hooks = False
        # Its hooks run around what is done with the gradients of a step.
        self.step_hook: StepHook | None = None
        # Whether the step under way has come through `optimizer_step`.
        self._is_checked = False
        self._before_step: Callable[[Optimizer], int] = _nothing
        self._after_step: Callable[[Optimizer], object] = _nothing
        self._handles: list[RemovableHandle] = []

    def begin(
        self,
        dp_comm: DataParallelComm,
        config: LossScaleConfig,
        optimizers: Iterable[Optimizer],
        before_step: Callable[[Optimizer], int],
        after_step: Callable[[Optimizer], object],
        *,
        has_hooks: bool,
    ) -> None:
        """A fit begins that sums its gradients by `dp_comm`; `config` is that of float16's loss scale.

        `before_step` and `after_step` are called around each step of an optimizer; the first returns its number.
        `has_hooks` says that a user's code may change gradients before they are clipped.
        """
        self._checked_norm, self._has_hooks = None, has_hooks
        self.dp_comm, self.gradient_norm, self.has_skipped, self._is_checked = dp_comm, None, False, False
        self._before_step, self._after_step = before_step, after_step
        self.loss_scale = LossScale(config) if self.precision == "16-mixed" else None
        # By torch's hooks, because a user's code may step an optimizer itself, past Lightning.
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._prepare_step))
            self._handles.append(ended := optimizer.register_step_post_hook(self._end_step))
            if dp_comm.shards_parameters or dp_comm.owned.optimizers:
                # Hooks of a user's read weights after it.
                hooks = optimizer._optimizer_step_post_hooks
                for number in [number for number in hooks if number != ended.id]:
                    hooks[number] = hooks.pop(number)

    def end(self) -> None:
        """The fit ends, or never began."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._before_step, self._after_step = [], _nothing, _nothing
        self.dp_comm = self.step_hook = None

    def __getstate__(self) -> dict[str, Any]:
        # Autograd's nodes stay where they are: a copy, such as that of a callback with its Trainer, is of no fit.
        of_this_fit: dict[str, Any] = {"dp_comm": None, "step_hook": None, "_handles": []}
        return vars(self) | of_this_fit | {"_before_step": _nothing, "_after_step": _nothing}

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
        if self.fp8_layers is None:
            return self.chosen.forward_context()
        stack = ExitStack()
        stack.enter_context(self.chosen.forward_context())
        stack.enter_context(self.fp8_layers.context())
        return stack

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Steppable, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs forward and backward before torch's step and not inside it, so that step hooks of the optimizer see
        gradients. An optimizer that asks for the closure (LBFGS) runs it by itself, several times."""
        if needs_closure(optimizer):
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        assert self.dp_comm is not None and isinstance(optimizer, Optimizer)
        returned, gradients = closure(), self.dp_comm.gradients
        with hooked(self.step_hook, CLIP):
            self.dp_comm.take_gradients()
            self.has_skipped = self._is_to_skip(optimizer, model.trainer.global_step)
            self._after_closure(model, optimizer)
            self._checked_norm = None
        # Without new gradients training_step chose to skip the batch. The closure's result does not tell, because where
        # a user's hook has run the step's closure by itself, Lightning hands an empty one to the optimizer.
        # Under manual optimization optimizers share gradients.
        if not self.has_skipped and (gradients.are_new or not model.automatic_optimization):
            self._is_checked = True
            stepped = optimizer.step(**kwargs)
            self._is_checked = False
            # An optimizer of torch's returns what its closure does.
            returned = returned if stepped is None else stepped
        gradients.are_new = False
        return returned

    def _prepare_step(self, optimizer: Optimizer, *_: Any) -> None:
        assert self.dp_comm is not None
        if self.step_hook is not None:
            self.step_hook.begin(OPTIMIZER)
        self.dp_comm.require_same_parts()
        self.dp_comm.prepare_step()
        step = self._before_step(optimizer)
        if not self._is_checked and not needs_closure(optimizer) and self._is_to_skip(optimizer, step):
            raise RuntimeError(
                f"NaN or Inf in gradients at step {step}, which training_step took by torch's own "
                f"{type(optimizer).__name__} and which cannot be skipped there; step what self.optimizers() returns"
            )
        self.dp_comm.owned.begin_step(optimizer)

    def _end_step(self, optimizer: Optimizer, *_: Any) -> None:
        assert self.dp_comm is not None
        self.dp_comm.owned.end_step(optimizer)
        self.has_stepped = True
        if self.step_hook is not None:
            self.step_hook.end(OPTIMIZER)
        with hooked(self.step_hook, GATHER):
            self.dp_comm.update_params()
        self._after_step(optimizer)

    def _is_to_skip(self, optimizer: Optimizer, step: int) -> bool:
        """Whether the step must not be done because some rank made NaN or Inf; raises RuntimeError on all ranks where
        that ends the run. Talks over the world."""
        assert self.dp_comm is not None
        gradients = self.dp_comm.gradients
        policy = gradients.config.on_nonfinite
        if self.loss_scale is None and policy == "ignore":
            return False
        world = gradients.mesh.world
        norm = finite_norm(gradients, list(self.main_params(optimizer)))
        self._checked_norm, found = None if self._has_hooks else norm, norm is None
        if self.loss_scale is not None:
            self.loss_scale.update(found_nonfinite=found)
            return found
        if not found:
            return False
        if policy == "skip":
            return True
        raise RuntimeError(
            f"NaN or Inf in gradients at step {step}:\n"
            f"{bullet_list(describe_nonfinite(gradients, world))}\nlower the learning rate or look at that rank's data;"
            ' OptimizerConfig(on_nonfinite="skip") leaves out such steps, "ignore" does them'
        )

    @override
    def clip_grad_by_norm(self, optimizer: Steppable, clip_val: int | float) -> None:
        assert self.dp_comm is not None and isinstance(optimizer, Optimizer)
        self.dp_comm.take_gradients()
        self.gradient_norm = self.dp_comm.gradients.clip(
            float(clip_val), self.main_params(optimizer), self._checked_norm
        )
        self.dp_comm.refresh_gradients()

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        assert self.dp_comm is not None
        self.dp_comm.take_gradients()
        super().clip_grad_by_value(optimizer, clip_val)
        self.dp_comm.refresh_gradients()

    def low_dtype(self) -> torch.dtype | None:
        """The dtype of weights that have float32 master weights; None where weights are stepped as they are."""
        return _LOW.get(self.precision)

    def gradient_dtype(self, config: OptimizerConfig) -> torch.dtype | None:
        """The dtype of accumulated gradients; None: as the parameters before they were lowered."""
        return _GRADIENTS.get(config.grad_dtype)

    @override
    def state_dict(self) -> dict[str, Any]:
        amaxes = self.fp8_layers.state_dict() if self.fp8_layers is not None else {}
        state: dict[str, Any] = {_FP8_AMAXES: amaxes} if amaxes else {}
        return state if self.loss_scale is None else state | {_LOSS_SCALE: self.loss_scale.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.fp8_layers is not None:
            self.fp8_layers.load_state_dict(state_dict.get(_FP8_AMAXES, {}))
        if self.loss_scale is not None and _LOSS_SCALE in state_dict:
            self.loss_scale.load_state_dict(state_dict[_LOSS_SCALE])


def _nothing(optimizer: Optimizer) -> int:
    """Is called around steps outside of a fit."""
    return 0


def _fp8_of(plugin: TransformerEnginePrecision) -> Fp8Config:
    """FP8 configuration of Lightning's plugin for Transformer Engine; raises ValueError for what is not offered."""
    if plugin.weights_dtype != torch.bfloat16 or plugin.replace_layers:
        raise ValueError(
            f"TransformerEnginePrecision(weights_dtype={plugin.weights_dtype}, replace_layers={plugin.replace_layers}) "
            "is not supported by MegatronStrategy, which runs the linears of transformer layers in FP8 and keeps "
            "weights in bfloat16; use Trainer(precision='transformer-engine')"
        )
    return config_of_recipe(plugin.recipe)


def compute_dtype(precision: str) -> torch.dtype:
    """The dtype of activations and of what is not done in FP8 under a `Trainer(precision=...)`."""
    if precision.startswith("bf16") or precision == TransformerEnginePrecision.precision:
        return torch.bfloat16
    if precision.startswith("16"):
        return torch.float16
    return torch.float64 if precision.startswith("64") else torch.float32
