"""Megatron's parallelism for ordinary PyTorch Lightning modules.

Importing the package also registers the strategy, so that `Trainer(strategy="megatron")` finds it.
"""

from lightning_megatron.mesh import StageLayout
from lightning_megatron.trainer import ConfigurationError, MegatronStrategy, PipelineConfig

__all__ = ["ConfigurationError", "MegatronStrategy", "PipelineConfig", "StageLayout", "__version__"]

__version__ = "0.1.0"
