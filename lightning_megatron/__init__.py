"""Megatron's parallelism for ordinary PyTorch Lightning modules.

Importing the package also registers the strategy, so that `Trainer(strategy="megatron")` finds it, and the file system
by which Lightning's own loading reads checkpoint directories.
"""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_exports import lazy_exports
from lightning_megatron.registration import register
from lightning_megatron.version import VERSION

if TYPE_CHECKING:
    from lightning_megatron.any_module.plan import ModelPlan
    from lightning_megatron.checkpoint import CheckpointConfig
    from lightning_megatron.context.balance import CostModel, DynamicContextConfig
    from lightning_megatron.context.config import ContextConfig
    from lightning_megatron.mesh import StageLayout
    from lightning_megatron.moe.capacity import ExpertCapacity
    from lightning_megatron.moe.config import AuxLoss, MoEConfig, RouterConfig
    from lightning_megatron.optim.config import LossScaleConfig, OptimizerConfig
    from lightning_megatron.precision.fp8 import Fp8Config
    from lightning_megatron.precision.kernels import KernelConfig
    from lightning_megatron.trainer import (
        ConfigurationError,
        MegatronStrategy,
        PipelineConfig,
        RecomputeConfig,
        clip_grad_norm_,
        grad_norm,
        load_from_checkpoint,
        named_gradients,
        weight_norm,
    )
else:
    __getattr__, __dir__ = lazy_exports(__name__, __file__)

__all__ = [
    "AuxLoss",
    "CheckpointConfig",
    "ConfigurationError",
    "ContextConfig",
    "CostModel",
    "DynamicContextConfig",
    "ExpertCapacity",
    "Fp8Config",
    "KernelConfig",
    "LossScaleConfig",
    "MegatronStrategy",
    "MoEConfig",
    "ModelPlan",
    "OptimizerConfig",
    "PipelineConfig",
    "RecomputeConfig",
    "RouterConfig",
    "StageLayout",
    "__version__",
    "clip_grad_norm_",
    "grad_norm",
    "load_from_checkpoint",
    "named_gradients",
    "weight_norm",
]

__version__ = VERSION

register()
