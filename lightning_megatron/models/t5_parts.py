"""The parts of a T5 in the order in which stages cut them: the encoder from embedding to norm, then the decoder.

    embedding | encoder.layers.0 ... | encoder.final_norm | decoder.embedding | decoder.layers.0 ...
        | decoder.final_norm | head

Relative positions are one table for a stack, built with its first layer; the layers of other stages share it.
"""

from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.models.embedding import PositionEmbedding, build_token_embedding
from lightning_megatron.models.heads import LanguageModelHead
from lightning_megatron.models.t5_config import T5Config
from lightning_megatron.pipeline.module import Part
from lightning_megatron.transformer import cost
from lightning_megatron.transformer.attention import BIDIRECTIONAL
from lightning_megatron.transformer.build import build_norm
from lightning_megatron.transformer.decoder_layer import DecoderLayer
from lightning_megatron.transformer.dropout import Dropout
from lightning_megatron.transformer.layer import TransformerLayer
from lightning_megatron.transformer.relative_position_embedding import RelativePositionEmbedding
from lightning_megatron.transformer.tokens import Tokens


class StackEmbedding(nn.Module):
    """The embedding of a stack: token ids [T] to hidden states [T/sp, H], with learned positions where there are some.

    `tokens` is none where the stack uses another's; `name` names the dropout, `length` is how many positions there are.
    """

    def __init__(
        self, config: T5Config, *, tp: Axis, sp: Axis, name: str, length: int, has_tokens: bool = True
    ) -> None:
        super().__init__()
        if has_tokens:
            self.tokens = build_token_embedding(config, tp=tp, sp=sp)
        self.has_positions = config.position == "learned"
        if self.has_positions:
            self.positions = PositionEmbedding(replace(config, max_sequence_length=length), tp=tp, sp=sp)
        self.dropout = Dropout(config.hidden_dropout, name)

    def forward(self, embedded_TH: Tensor, tokens: Tokens) -> Tensor:
        """Hidden states from the output of the token embedding."""
        hidden_TH = embedded_TH + self.positions(tokens) if self.has_positions else embedded_TH
        dropped_TH: Tensor = self.dropout(hidden_TH, tokens)
        return dropped_TH


class StackNorm(nn.Module):
    """The end of a stack: a norm and a dropout of [T/sp, H]."""

    def __init__(self, config: T5Config, *, tp: Axis, sp: Axis, name: str) -> None:
        super().__init__()
        self.norm = build_norm(config, tp=tp, sp=sp)
        self.dropout = Dropout(config.hidden_dropout, name)

    def forward(self, hidden_TH: Tensor, tokens: Tokens) -> Tensor:
        dropped_TH: Tensor = self.dropout(self.norm(hidden_TH), tokens)
        return dropped_TH


def t5_parts(config: T5Config, mesh: Mesh) -> list[Part]:
    """The parts of a T5 in order; costs are the FLOPs of the forward of a full sequence of either stack."""
    tp, sp = mesh.tp, mesh.sp
    length, decoder_length = config.max_sequence_length, config.max_decoder_sequence_length
    tokens = partial(build_token_embedding, config, tp=tp, sp=sp)
    of_decoder = {config.decoder_embedding: tokens}
    embedding, norm = partial(StackEmbedding, config, tp=tp, sp=sp), partial(StackNorm, config, tp=tp, sp=sp)
    return [
        Part(name="embedding", build=partial(embedding, name="encoder.embedding", length=length), symbol="E", cost=0.0),
        *_layers(config, mesh, "encoder"),
        Part(name="encoder.final_norm", build=partial(norm, name="encoder.final_norm"), symbol="", cost=0.0),
        Part(
            name="decoder.embedding",
            build=partial(
                embedding,
                name="decoder.embedding",
                length=decoder_length,
                has_tokens=not config.share_embeddings,
            ),
            symbol="",
            cost=0.0,
            shares=of_decoder if config.share_embeddings else {},
        ),
        *_layers(config, mesh, "decoder"),
        Part(name="decoder.final_norm", build=partial(norm, name="decoder.final_norm"), symbol="", cost=0.0),
        Part(
            name="head",
            build=partial(LanguageModelHead, config, tp=tp, sp=sp),
            symbol="L",
            cost=cost.head_flops(config, num_tokens=decoder_length),
            shares=of_decoder if config.tie_embeddings else {},
        ),
    ]


def table_of(stack: str) -> str:
    """The name of the relative positions of a stack: its first layer has them."""
    return f"{stack}.layers.0.relative_bias"


def layer_flops(config: T5Config, memory: int, length: int, *, is_decoder: bool) -> int:
    """Forward FLOPs of a layer of a stack for `memory` tokens of the encoder and `length` tokens of the decoder, matrix
    products alone."""
    own = length if is_decoder else memory
    flops = cost.layer_linear_flops(config, num_tokens=own)
    flops += cost.layer_attention_flops(config, batch=1, sequence=own, is_causal=is_decoder)
    if is_decoder:
        flops += cost.cross_attention_flops(config, batch=1, sequence=length, memory=memory)
    return flops


def _layers(config: T5Config, mesh: Mesh, stack: str) -> list[Part]:
    table = partial(_build_table, config, mesh, stack)
    is_decoder = stack == "decoder"
    return [
        Part(
            name=f"{stack}.layers.{i}",
            build=partial(_build_layer, config, mesh, stack, i),
            cost=layer_flops(
                config, config.max_sequence_length, config.max_decoder_sequence_length, is_decoder=is_decoder
            ),
            shares={table_of(stack): table} if config.position == "relative" and i > 0 else {},
        )
        for i in range(config.num_decoder_layers if is_decoder else config.num_layers)
    ]


def _build_table(config: T5Config, mesh: Mesh, stack: str) -> RelativePositionEmbedding:
    return RelativePositionEmbedding(
        num_buckets=config.relative_buckets,
        max_distance=config.relative_max_distance,
        num_heads=config.num_attention_heads,
        is_causal=stack == "decoder",
        std=config.init_std,
        tp=mesh.tp,
    )


def _build_layer(config: T5Config, mesh: Mesh, stack: str, index: int) -> TransformerLayer:
    tp, sp, name = mesh.tp, mesh.sp, f"{stack}.layers.{index}"
    layer = (
        DecoderLayer(config, tp=tp, sp=sp, name=name)
        if stack == "decoder"
        else TransformerLayer(config, tp=tp, sp=sp, name=name, mask_spec=BIDIRECTIONAL)
    )
    if config.position == "relative" and index == 0:
        layer.add_module("relative_bias", _build_table(config, mesh, stack))
    return layer
