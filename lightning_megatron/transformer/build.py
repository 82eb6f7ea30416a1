"""The norm of a transformer layer, by the value of its configuration: a new kind is a class and one more value here."""

from collections.abc import Mapping

from lightning_megatron.mesh import Axis
from lightning_megatron.tensor.norm import LayerNorm, RMSNorm
from lightning_megatron.transformer.config import Normalization, TransformerConfig

Norm = LayerNorm | RMSNorm

NORMS: Mapping[Normalization, type[Norm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def build_norm(config: TransformerConfig, *, tp: Axis, sp: Axis) -> Norm:
    """A norm of hidden states [T/sp, H]."""
    return NORMS[config.normalization](config.hidden_size, eps=config.norm_epsilon, tp=tp, sp=sp)
