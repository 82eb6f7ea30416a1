"""The door to Lightning: the strategy, its precision plugin and callbacks."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_megatron.trainer.checkpointing.loading import load_from_checkpoint
from lightning_megatron.trainer.config import ConfigurationError, PipelineConfig
from lightning_megatron.trainer.strategy import MegatronStrategy
from lightning_megatron.transformer.recompute import RecomputeConfig

__all__ = ["ConfigurationError", "MegatronStrategy", "PipelineConfig", "RecomputeConfig", "load_from_checkpoint"]

# Lightning has no entry point for strategies: importing the package is what makes the name known.
if "megatron" not in StrategyRegistry:
    MegatronStrategy.register_strategies(StrategyRegistry)
