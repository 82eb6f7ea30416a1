"""The embedding of a language model: tokens, and learned positions where configured, become hidden states."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import Initial, shard_parameter
from lightning_megatron.tensor.embedding import VocabParallelEmbedding
from lightning_megatron.transformer.config import LanguageModelConfig, TransformerConfig
from lightning_megatron.transformer.dropout import Dropout
from lightning_megatron.transformer.tokens import Tokens


def build_token_embedding(config: LanguageModelConfig, *, tp: Axis, sp: Axis) -> VocabParallelEmbedding:
    """The token embedding, which other stages build for themselves under the same name, as for a tied head."""
    initial, multiple = Initial(std=config.token_embedding_std), config.vocab_multiple
    return VocabParallelEmbedding(
        config.vocab_size, config.hidden_size, tp=tp, sp=sp, initial=initial, multiple=multiple
    )


def scaled(hidden_TH: Tensor) -> Tensor:
    """Embedded tokens times the root of their width, which is rounded to their dtype, as in transformers."""
    # The factor is on the host whatever the default device is: a GPU waits for no copy of it.
    return hidden_TH * torch.tensor(math.sqrt(hidden_TH.shape[-1]), dtype=hidden_TH.dtype, device="cpu")


class PositionEmbedding(nn.Module):
    """A learned vector for each position, for this rank's part of the stream: [T/sp, H]."""

    def __init__(self, config: TransformerConfig, *, tp: Axis, sp: Axis) -> None:
        super().__init__()
        self.weight = shard_parameter(
            (config.max_sequence_length, config.hidden_size),
            initial=Initial(std=config.init_std),
            replicas=(tp,),
            partial=sp,
        )

    def forward(self, tokens: Tokens, more_SH: Tensor | None = None) -> Tensor:
        """Vectors of the own tokens, with what else is added to those of all positions."""
        weight_SH = self.weight if more_SH is None else self.weight + more_SH
        return F.embedding(tokens.shard(tokens.positions_T), weight_SH)


class Embedding(nn.Module):
    """Token ids [T] to hidden states [T/sp, H], with learned positions where the configuration has them."""

    def __init__(self, config: LanguageModelConfig, *, tp: Axis, sp: Axis) -> None:
        super().__init__()
        self.tokens = build_token_embedding(config, tp=tp, sp=sp)
        self.is_scaled = config.scales_embedding
        self.has_positions = config.position == "learned"
        if self.has_positions:
            self.positions = PositionEmbedding(config, tp=tp, sp=sp)
        self.dropout = Dropout(config.hidden_dropout, "embedding")

    def forward(self, ids_T: Tensor, tokens: Tokens) -> Tensor:
        return self.placed(self.embed(ids_T), tokens)

    def embed(self, ids_T: Tensor) -> Tensor:
        """The vectors of tokens, without positions: [T/sp, H]."""
        hidden_TH: Tensor = self.tokens(ids_T)
        return scaled(hidden_TH) if self.is_scaled else hidden_TH

    def placed(self, hidden_TH: Tensor, tokens: Tokens) -> Tensor:
        """Embedded tokens, or features that replace them, with positions and dropout."""
        if self.has_positions:
            hidden_TH = hidden_TH + self.positions(tokens)
        dropped_TH: Tensor = self.dropout(hidden_TH, tokens)
        return dropped_TH
