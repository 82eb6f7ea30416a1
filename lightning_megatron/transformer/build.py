"""What a transformer layer is made of, by the values of its configuration: one builder for each part.

A new kind of norm, attention or feed-forward network is a class in a file of its own and one more value here; layers
and models call the builders and do not know the kinds.
"""

from collections.abc import Mapping

from torch import nn

from lightning_megatron.context.context_layout import MaskSpec
from lightning_megatron.mesh import Axis
from lightning_megatron.tensor.norm import LayerNorm, RMSNorm, ZeroCenteredRMSNorm
from lightning_megatron.transformer.attention import Attention, SelfAttention
from lightning_megatron.transformer.config import Normalization, TransformerConfig
from lightning_megatron.transformer.latent_attention import LatentAttention
from lightning_megatron.transformer.mlp import MLP

Norm = LayerNorm | RMSNorm

NORMS: Mapping[Normalization, type[Norm]] = {
    "layernorm": LayerNorm,
    "rmsnorm": RMSNorm,
    "zero_centered_rmsnorm": ZeroCenteredRMSNorm,
}


def build_norm(config: TransformerConfig, *, tp: Axis, sp: Axis) -> Norm:
    """A norm of hidden states [T/sp, H]."""
    return NORMS[config.normalization](config.hidden_size, eps=config.norm_epsilon, tp=tp, sp=sp)


def build_input_norm(config: TransformerConfig, *, tp: Axis, sp: Axis) -> Norm | nn.Identity:
    """The norm of what a half of a layer reads, [T/sp, H], or nothing where only outputs are normed."""
    return nn.Identity() if config.norm_placement == "output" else build_norm(config, tp=tp, sp=sp)


def build_output_norm(config: TransformerConfig, *, tp: Axis, sp: Axis) -> Norm | nn.Identity:
    """The norm of what a half of a layer adds to the residual stream, [T/sp, H], or nothing where there is none."""
    has_one = config.norm_placement in ("sandwich", "output")
    return build_norm(config, tp=tp, sp=sp) if has_one else nn.Identity()


def build_attention(config: TransformerConfig, *, tp: Axis, sp: Axis, name: str, mask_spec: MaskSpec) -> Attention:
    """Self-attention of a layer, [T/sp, H] to [T/sp, H]; `name` is its name in the model."""
    if config.latent is not None:
        return LatentAttention(config, config.latent, tp=tp, sp=sp, name=name, mask_spec=mask_spec)
    return SelfAttention(config, tp=tp, sp=sp, name=name, mask_spec=mask_spec)


def build_mlp(config: TransformerConfig, *, tp: Axis, sp: Axis, name: str) -> MLP:
    """The dense feed-forward network of a layer, [T/sp, H] to [T/sp, H]; `name` is its name in the model."""
    return MLP(config, tp=tp, sp=sp, name=name)
