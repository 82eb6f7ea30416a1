"""The heads of BERT: which token was at a masked position, and in which order the two parts of a sample were.

Note: a sample weighs its targets. The loss is

    sum over tokens of w loss  +  sum over samples of W loss          W: sum of the w of the sample's tokens
    --------------------------------------------------------
                     sum over tokens of w

The second term is a mean over samples, each of which weighs as much as in the first. So one number, the sum of w, says
what either is a mean over, and microbatches and data-parallel ranks add up exactly.

T tokens of the stream, H hidden, V vocabulary, B samples.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.comm import collectives, differentiable
from lightning_megatron.comm.host_numbers import on_device
from lightning_megatron.context.context_layout import PADDING
from lightning_megatron.mesh import Axis
from lightning_megatron.models.heads import LanguageModelHead
from lightning_megatron.sharding import Initial, shard_parameter
from lightning_megatron.tensor.activation import activate
from lightning_megatron.tensor.cross_entropy import IGNORED
from lightning_megatron.tensor.replicated_linear import ReplicatedLinear
from lightning_megatron.transformer.build import build_norm
from lightning_megatron.transformer.config import LanguageModelConfig
from lightning_megatron.transformer.tokens import Tokens


class MaskedTokenHead(LanguageModelHead):
    """Dense, activation and norm before the logits of the own part of the vocabulary, which have a bias."""

    def __init__(self, config: LanguageModelConfig, *, tp: Axis, sp: Axis) -> None:
        super().__init__(config, tp=tp, sp=sp)
        self.activation = config.activation
        hidden = config.hidden_size
        self.dense = ReplicatedLinear(hidden, hidden, tp=tp, partial=sp, initial=Initial(std=config.init_std))
        self.norm = build_norm(config, tp=tp, sp=sp)
        self.bias = shard_parameter(
            (config.vocab_size,), initial=Initial(), dim=0, axis=tp, multiple=config.vocab_multiple
        )

    def features(self, hidden_TH: Tensor) -> Tensor:
        features_TH: Tensor = self.norm(activate(self.dense(hidden_TH), self.activation))
        return features_TH


@dataclass(frozen=True, kw_only=True)
class SampleTargets:
    """Sentence-order target of each sample of the batch, and its weight."""

    labels_B: Tensor
    """Labels, int64: 0 or 1, -100 where there is no target."""
    weights_B: Tensor
    """Weight of each sample's loss in the sum, that of its tokens together; see Note: a sample weighs its targets."""


class SentenceOrderHead(nn.Module):
    """Two logits of each sample from its first token, through a pooler: a dense layer and tanh.

    Every rank of tp does the same with the first tokens that its rank of cp holds.
    """

    def __init__(self, config: LanguageModelConfig, *, tp: Axis, sp: Axis) -> None:
        super().__init__()
        self.sp = sp
        hidden, initial = config.hidden_size, Initial(std=config.init_std)
        # Of no axis parts of a sum: the first tokens are brought to all ranks of sp.
        self.pooler = ReplicatedLinear(hidden, hidden, tp=tp, partial=None, initial=initial)
        self.output = ReplicatedLinear(hidden, 2, tp=tp, partial=None, initial=initial)

    def forward(self, hidden_TH: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Logits [B, 2] from [T/sp, H], and 1 for each sample whose first token is this rank of cp's: int64 [B]."""
        first_BH, is_own_B = self._first_tokens(hidden_TH, tokens)
        return self.output(self.pooler(first_BH).tanh()), is_own_B

    def full_logits(self, hidden_TH: Tensor, tokens: Tokens) -> Tensor:
        """Logits of all samples on every rank of tp and cp, for ranks that all do the same with them; 0 of an empty
        sample."""
        logits_B2, is_own_B = self(hidden_TH, tokens)
        own_B2 = torch.where(is_own_B.bool().unsqueeze(1), logits_B2, 0)
        return differentiable.reduce(differentiable.copy(own_B2, tokens.cp), tokens.cp)

    def loss_sum(self, hidden_TH: Tensor, targets: SampleTargets, tokens: Tokens) -> Tensor:
        """The weighted sum of the losses of this rank of cp's samples: []."""
        logits_B2, is_own_B = self(hidden_TH, tokens)
        wide = torch.promote_types(logits_B2.dtype, torch.float32)
        losses_B = F.cross_entropy(logits_B2.to(wide), targets.labels_B, ignore_index=IGNORED, reduction="none")
        weights_B = torch.mul(targets.weights_B, is_own_B, out=torch.empty_like(losses_B))
        own: Tensor = (losses_B * weights_B).sum()
        return own

    def tallies(self, hidden_TH: Tensor, targets: SampleTargets, tokens: Tokens) -> dict[str, Tensor]:
        """Sums for evaluation over the samples of the call that have a label and a token that counts, float64 []: how
        many they are, and of how many the likelier order is the label. Nothing where gradients are wanted."""
        if torch.is_grad_enabled():
            return {}
        logits_B2, is_own_B = self(hidden_TH, tokens)
        counts_B = is_own_B.bool() & (targets.labels_B != IGNORED) & (targets.weights_B > 0)
        is_right_B = counts_B & (logits_B2.argmax(dim=-1) == targets.labels_B)
        counts = torch.stack((is_right_B, counts_B)).sum(1, dtype=torch.float64)
        correct, samples = collectives.all_reduce(counts, tokens.cp)
        return {"sentence_order_correct": correct, "sentence_order_samples": samples}

    def beside(self, loss: Tensor) -> Tensor:
        """A loss of which no weight of this head has a part, and each gets a gradient all the same: zeros."""
        beside: Tensor = _Beside.apply(loss, *self.parameters())
        return beside

    def _first_tokens(self, hidden_TH: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """The hidden state of each sample's first token, zeros for those that other ranks of cp hold, [B, H]; and 1 for
        each that is this rank of cp's, int64 [B]."""
        places, length = tokens.first_places(), hidden_TH.shape[0]
        own = range(self.sp.rank * length, (self.sp.rank + 1) * length)
        # One copy to the device of what the host knows.
        index_B, is_here_B, is_own_B = on_device(
            [
                [place - own.start if place in own else 0 for place in places],
                [place in own for place in places],
                [place != PADDING for place in places],
            ],
            hidden_TH.device,
        )
        first_BH = hidden_TH.index_select(0, index_B) * is_here_B.unsqueeze(1)
        return differentiable.reduce(first_BH, self.sp), is_own_B


class _Beside(torch.autograd.Function):
    """The first argument, which gives the others gradients of zero."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        first = parameters[0]
        # In the dtype of gradients, or autograd would cast each.
        ctx.dtype, ctx.device = first.grad_dtype or first.dtype, first.device
        ctx.shapes = [parameter.shape for parameter in parameters]
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sizes = [shape.numel() for shape in ctx.shapes]
        zeros = torch.zeros(sum(sizes), dtype=ctx.dtype, device=ctx.device).split(sizes)
        return grad, *(each.view(shape) for each, shape in zip(zeros, ctx.shapes, strict=True))


class BertHead(nn.Module):
    """Heads for masked tokens and, with `has_sentence_order`, sentence order."""

    def __init__(self, config: LanguageModelConfig, *, has_sentence_order: bool, tp: Axis, sp: Axis) -> None:
        super().__init__()
        self.masked_tokens = MaskedTokenHead(config, tp=tp, sp=sp)
        self.sentence_order = SentenceOrderHead(config, tp=tp, sp=sp) if has_sentence_order else None
