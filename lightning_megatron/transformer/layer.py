"""Transformer layers whose residual stream has no norm: attention and feed-forward, dense or of experts.

norm_placement   pre              sandwich              output
a half adds      drop(f(norm x))  drop(norm f(norm x))  drop(norm f(x))
"""

from collections.abc import Callable

from torch import Tensor, nn

from lightning_megatron.context.attention_step import RelativePositionBias
from lightning_megatron.context.context_layout import MaskSpec
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.moe.config import MoEConfig
from lightning_megatron.moe.experts import ExpertAxes
from lightning_megatron.moe.sequence_groups import RoutedTokens
from lightning_megatron.tensor.linear import as_gemm_input
from lightning_megatron.transformer.attention import CAUSAL
from lightning_megatron.transformer.build import (
    Norm,
    build_attention,
    build_input_norm,
    build_mlp,
    build_output_norm,
)
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.dropout import Dropout
from lightning_megatron.transformer.moe import MoELayer
from lightning_megatron.transformer.recompute import RecomputeLayer, apply_recomputed, checkpoint
from lightning_megatron.transformer.tokens import Tokens


class PreNormLayer(RecomputeLayer):
    """The half that layers share: x + drop(attention(norm(x))), or with norms elsewhere.

    `name` is the layer's name in the model: it names the dropout masks. `mask_spec` is that of its attention.
    """

    def __init__(
        self, config: TransformerConfig, *, tp: Axis, sp: Axis, name: str, mask_spec: MaskSpec = CAUSAL
    ) -> None:
        super().__init__()
        self.attention_norm = build_input_norm(config, tp=tp, sp=sp)
        self.attention = build_attention(config, tp=tp, sp=sp, name=f"{name}.attention", mask_spec=mask_spec)
        self.attention_output_norm = build_output_norm(config, tp=tp, sp=sp)
        self.after_attention = Dropout(config.hidden_dropout, f"{name}.attention")
        self.mlp_norm = build_input_norm(config, tp=tp, sp=sp)
        self.mlp_output_norm = build_output_norm(config, tp=tp, sp=sp)
        self.after_mlp = Dropout(config.hidden_dropout, f"{name}.mlp")

    def attend(self, hidden_TH: Tensor, tokens: Tokens, bias: RelativePositionBias | None = None) -> Tensor:
        """The residual stream after attention."""
        attended_TH = self._norm_and(self.attention_norm, lambda x: self.attention(x, tokens, bias), hidden_TH)
        stream_TH: Tensor = hidden_TH + self.after_attention(self.attention_output_norm(attended_TH), tokens)
        return stream_TH

    def _norm_and(self, norm: Norm | nn.Identity, half: Callable[[Tensor], Tensor], hidden_TH: Tensor) -> Tensor:
        """One half of the layer, which begins with a linear, on normed hidden states."""
        # Without a norm there is nothing to recompute: the residual stream itself is saved.
        if "norm" in self.recomputed and not isinstance(norm, nn.Identity):
            output_TH: Tensor = apply_recomputed(lambda x: as_gemm_input(norm(x)), half, hidden_TH)
        else:
            output_TH = half(norm(hidden_TH))
        return output_TH


class TransformerLayer(PreNormLayer):
    """A dense layer: after attention x + drop(mlp(norm(x))); [T/sp, H] to [T/sp, H]."""

    recomputable = frozenset({"norm", "mlp"})

    def __init__(
        self, config: TransformerConfig, *, tp: Axis, sp: Axis, name: str, mask_spec: MaskSpec = CAUSAL
    ) -> None:
        super().__init__(config, tp=tp, sp=sp, name=name, mask_spec=mask_spec)
        self.mlp = build_mlp(config, tp=tp, sp=sp, name=f"{name}.mlp")

    def forward(self, hidden_TH: Tensor, tokens: Tokens, bias: RelativePositionBias | None = None) -> Tensor:
        return self.feed_forward(self.attend(hidden_TH, tokens, bias), tokens)

    def feed_forward(self, hidden_TH: Tensor, tokens: Tokens) -> Tensor:
        """The residual stream after the MLP."""
        fed_TH = self.mlp_output_norm(self._norm_and_mlp(hidden_TH, tokens))
        output_TH: Tensor = hidden_TH + self.after_mlp(fed_TH, tokens)
        return output_TH

    def _norm_and_mlp(self, hidden_TH: Tensor, tokens: Tokens) -> Tensor:
        if "mlp" not in self.recomputed:
            return self._norm_and(self.mlp_norm, lambda x: self.mlp(x, tokens), hidden_TH)
        if "norm" in self.recomputed:
            output_TH: Tensor = checkpoint(lambda x: self.mlp(self.mlp_norm(x), tokens), hidden_TH, by=self.checkpoint)
        else:
            output_TH = checkpoint(
                lambda x: self.mlp(x, tokens), as_gemm_input(self.mlp_norm(hidden_TH)), by=self.checkpoint
            )
        return output_TH


class ExpertLayer(PreNormLayer):
    """A layer of experts: after attention x + drop(moe(norm(x))); [T/sp, H] to [T/sp, H] and its auxiliary losses, a
    sum over this rank's tokens, []."""

    recomputable = frozenset({"norm", "moe"})

    def __init__(
        self,
        config: TransformerConfig,
        moe: MoEConfig,
        *,
        tp: Axis,
        sp: Axis,
        experts: ExpertAxes,
        name: str,
        mask_spec: MaskSpec = CAUSAL,
    ) -> None:
        super().__init__(config, tp=tp, sp=sp, name=name, mask_spec=mask_spec)
        self.moe = MoELayer(config, moe, tp=tp, sp=sp, experts=experts, name=f"{name}.moe")

    def forward(self, hidden_TH: Tensor, tokens: Tokens, routed: RoutedTokens) -> tuple[Tensor, Tensor]:
        hidden_TH = self.attend(hidden_TH, tokens)
        mixed_TH, auxiliary = self._norm_and_moe(hidden_TH, routed, tokens)
        return hidden_TH + self.after_mlp(self.mlp_output_norm(mixed_TH), tokens), auxiliary

    def _norm_and_moe(self, hidden_TH: Tensor, routed: RoutedTokens, tokens: Tokens) -> tuple[Tensor, Tensor]:
        # The router reads what the norm gives in full precision, and the experts what they multiply.
        if "moe" not in self.recomputed:
            output: tuple[Tensor, Tensor] = self.moe(self.mlp_norm(hidden_TH), routed, tokens)
        elif "norm" in self.recomputed:
            output = checkpoint(lambda x: self.moe(self.mlp_norm(x), routed, tokens), hidden_TH, by=self.checkpoint)
        else:
            output = checkpoint(lambda x: self.moe(x, routed, tokens), self.mlp_norm(hidden_TH), by=self.checkpoint)
        return output


def build_layer(config: TransformerConfig, mesh: Mesh, index: int, name: str) -> TransformerLayer | ExpertLayer:
    """The causal layer of that index, counted from 0: dense or of experts, with the window of that layer."""
    tp, sp, mask_spec = mesh.tp, mesh.sp, MaskSpec(is_causal=True, window=config.window_of(index))
    if config.moe is None or not config.has_experts(index):
        return TransformerLayer(config, tp=tp, sp=sp, name=name, mask_spec=mask_spec)
    return ExpertLayer(config, config.moe, tp=tp, sp=sp, experts=ExpertAxes.of(mesh), name=name, mask_spec=mask_spec)
