"""The embedding of BERT: tokens, positions and token types are added and normed. Dims: T tokens, H hidden."""

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.mesh import Axis
from lightning_megatron.models.embedding import PositionEmbedding, build_token_embedding
from lightning_megatron.sharding import Initial, shard_parameter
from lightning_megatron.transformer.build import build_norm
from lightning_megatron.transformer.config import LanguageModelConfig
from lightning_megatron.transformer.dropout import Dropout
from lightning_megatron.transformer.tokens import Tokens


class TokenTypeEmbedding(nn.Module):
    """A learned vector for each token type, for this rank's part of the stream: [T/sp, H]."""

    def __init__(self, num_token_types: int, config: LanguageModelConfig, *, tp: Axis, sp: Axis) -> None:
        super().__init__()
        self.weight = shard_parameter(
            (num_token_types, config.hidden_size), initial=Initial(std=config.init_std), replicas=(tp,), partial=sp
        )

    def forward(self, types_T: Tensor, tokens: Tokens) -> Tensor:
        return F.embedding(tokens.shard(types_T), self.weight)


class BertEmbedding(nn.Module):
    """Token ids [T] and token types [T] to hidden states [T/sp, H]."""

    def __init__(
        self, config: LanguageModelConfig, *, num_token_types: int, has_norm: bool, tp: Axis, sp: Axis
    ) -> None:
        super().__init__()
        self.tokens = build_token_embedding(config, tp=tp, sp=sp)
        self.positions = PositionEmbedding(config, tp=tp, sp=sp) if config.position == "learned" else None
        self.token_types = TokenTypeEmbedding(num_token_types, config, tp=tp, sp=sp) if num_token_types else None
        self.norm = build_norm(config, tp=tp, sp=sp) if has_norm else None
        self.dropout = Dropout(config.hidden_dropout, "embedding")

    def forward(self, ids_T: Tensor, types_T: Tensor, tokens: Tokens) -> Tensor:
        hidden_TH: Tensor = self.tokens(ids_T)
        if self.positions is not None:
            hidden_TH = hidden_TH + self.positions(tokens)
        if self.token_types is not None:
            hidden_TH = hidden_TH + self.token_types(types_T, tokens)
        if self.norm is not None:
            hidden_TH = self.norm(hidden_TH)
        dropped_TH: Tensor = self.dropout(hidden_TH, tokens)
        return dropped_TH
