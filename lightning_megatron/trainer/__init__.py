"""The door to Lightning: the strategy, its precision plugin and callbacks."""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lightning_megatron.trainer.checkpointing.loading import load_from_checkpoint
    from lightning_megatron.trainer.config import ConfigurationError, PipelineConfig
    from lightning_megatron.trainer.model_norms import clip_grad_norm_, grad_norm, named_gradients, weight_norm
    from lightning_megatron.trainer.strategy import MegatronStrategy
    from lightning_megatron.transformer.recompute import RecomputeConfig
else:
    __getattr__, __dir__ = lazy_exports(__name__, __file__)

__all__ = [
    "ConfigurationError",
    "MegatronStrategy",
    "PipelineConfig",
    "RecomputeConfig",
    "clip_grad_norm_",
    "grad_norm",
    "load_from_checkpoint",
    "named_gradients",
    "weight_norm",
]
