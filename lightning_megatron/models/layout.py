"""Whether a model fits its ranks, told before a weight is made: its layers, and how its stages are cut."""

from lightning_megatron.mesh import Sizes
from lightning_megatron.pipeline.layout import layout_faults as stage_faults
from lightning_megatron.transformer.config import LanguageModelConfig


def require_fit(config: LanguageModelConfig, sizes: Sizes) -> None:
    """Raises ValueError with every rule that the architecture breaks on that many ranks, a line each."""
    faults = config.layout_faults(sizes)
    faults += stage_faults(config.num_staged_layers, True, True, sizes.num_stages, sizes.stage_layout)
    if faults:
        raise ValueError("\n".join(faults))
