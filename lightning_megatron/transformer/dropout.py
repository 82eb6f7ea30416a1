"""Dropout whose masks are a function of what is dropped (step, sample, position, layer, feature), not of the rank.

Each rank draws only the masks of its own tokens. One byte per element is saved for backward.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.comm import rng
from lightning_megatron.context.attention import DropoutSpec
from lightning_megatron.tensor.linear import TokenKeys
from lightning_megatron.transformer.tokens import Tokens


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return _masked(x, keep, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return _masked(grad, keep, ctx.scale), None, None


def _masked(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    # One kernel: the product of all three, which serves forward as well as backward.
    masked: Tensor = torch.ops.aten.native_dropout_backward(x, keep, scale)
    return masked


def drop(x: Tensor, keep: Tensor, probability: float) -> Tensor:
    """`x` where `keep`, else 0, scaled by 1 / (1 - probability) so that the expectation stays."""
    dropped: Tensor = _Drop.apply(x, keep, 1.0 / (1.0 - probability))
    return dropped


class NamedDropout(nn.Module):
    """Drops in training; `name` says which of the model's dropouts of its `kind` this is."""

    kind: str

    def __init__(self, probability: float, name: str) -> None:
        super().__init__()
        self.probability = probability
        self.key = rng.key_tensor(name, self.kind)

    @property
    def is_active(self) -> bool:
        return self.training and self.probability > 0.0

    def extra_repr(self) -> str:
        return f"probability={self.probability}"


class Dropout(NamedDropout):
    """Drops features of hidden states [T/sp, H]."""

    kind = "dropout"

    def forward(self, hidden_TH: Tensor, tokens: Tokens) -> Tensor:
        if not self.is_active:
            return hidden_TH
        keys_T = rng.bits(self.key, tokens.shard_keys)
        return drop(hidden_TH, rng.keep_mask(keys_T, hidden_TH.shape[-1], self.probability), self.probability)


class ShardedDropout(NamedDropout):
    """Drops features [T, F/tp], of which this rank has those from `first_column` on."""

    kind = "feature dropout"

    def __init__(self, probability: float, name: str, first_column: int) -> None:
        super().__init__(probability, name)
        self.first_column = first_column

    def forward(self, x_TF: Tensor, tokens: TokenKeys) -> Tensor:
        if not self.is_active:
            return x_TF
        keys_T = rng.bits(self.key, tokens.stream_keys)
        keep_TF = rng.keep_mask(keys_T, x_TF.shape[-1], self.probability, self.first_column)
        return drop(x_TF, keep_TF, self.probability)


class AttentionDropout(NamedDropout):
    """Drops attention weights: the mask [B, A/tp, S, S] of this rank's heads, the same on every mesh."""

    kind = "attention dropout"

    def __init__(self, probability: float, name: str, first_head: int) -> None:
        super().__init__(probability, name)
        self.first_head = first_head

    def spec(self, tokens: Tokens) -> DropoutSpec | None:
        """Dropout for attention that draws its masks by itself; None where nothing is dropped."""
        if not self.is_active:
            return None
        return DropoutSpec(
            keys_BT=tokens.keys_BX, name_key=self.key, first_head=self.first_head, probability=self.probability
        )

    def forward(self, weights_BASS: Tensor, tokens: Tokens) -> Tensor:
        if not self.is_active:
            return weights_BASS
        heads, length = weights_BASS.shape[1], weights_BASS.shape[-1]
        heads_A = torch.arange(self.first_head, self.first_head + heads, device=weights_BASS.device)
        keys_BAS = rng.bits(rng.bits(self.key, tokens.keys_BN).unsqueeze(1), heads_A.unsqueeze(-1))
        return drop(weights_BASS, rng.keep_mask(keys_BAS, length, self.probability), self.probability)
