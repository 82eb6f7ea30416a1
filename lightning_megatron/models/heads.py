"""The head of a language model: hidden states become logits, or a loss that is a mean over valid tokens.

T tokens of the stream, H hidden, V vocabulary, B batch, S sequence.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.comm import collectives, differentiable
from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import Initial, shard_parameter
from lightning_megatron.tensor.cross_entropy import IGNORED, vocab_parallel_cross_entropy
from lightning_megatron.tensor.linear import column_parallel_linear
from lightning_megatron.tensor.linear_cross_entropy import linear_cross_entropy
from lightning_megatron.tensor.vocab_parallel_argmax import vocab_parallel_argmax
from lightning_megatron.tensor.weight_gradients import WeightGradientLayer
from lightning_megatron.transformer.config import LanguageModelConfig
from lightning_megatron.transformer.tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Target and weight of each token of the stream; padding counts nothing."""

    labels_T: Tensor
    """Labels, int64, -100 where there is no target."""
    weights_T: Tensor
    """Weight of each token's loss in the mean."""
    sum_of_weights: Tensor
    """Divisor of the mean, float64 [], summed over all ranks of cp."""
    weights_BS: Tensor
    """Weights of the caller's tokens."""


def targets_of(labels_BS: Tensor, loss_mask_BS: Tensor | None, tokens: Tokens) -> Targets:
    """The targets of a stream: the mask, or ones, where there is a label; zero elsewhere.

    They are this rank's; their sum is that of all ranks of cp, which read the same labels.
    """
    if loss_mask_BS is None:
        weights_BS = torch.ne(labels_BS, IGNORED, out=torch.empty_like(labels_BS, dtype=torch.float32))
    else:
        mask_BS = loss_mask_BS if loss_mask_BS.is_floating_point() else loss_mask_BS.float()
        # Not a product: a mask may hold anything where there is no label, NaN too.
        weights_BS = mask_BS.masked_fill(labels_BS == IGNORED, 0.0)
    return Targets(
        labels_T=tokens.flat(labels_BS, padding=IGNORED),
        weights_T=tokens.flat(weights_BS),
        # In float64, so that sums over microbatches and ranks do not depend on how the batch was cut.
        sum_of_weights=tokens.select(weights_BS).sum(dtype=torch.float64),
        weights_BS=weights_BS,
    )


class LanguageModelHead(WeightGradientLayer):
    """Logits of the own part of the vocabulary from hidden states; the weight is its own or the embedding's.

    With `chunk_tokens` the logits of so many tokens at most are there at a time, where a loss is wanted; 0: all.
    """

    bias: nn.Parameter | None

    def __init__(self, config: LanguageModelConfig, *, tp: Axis, sp: Axis) -> None:
        super().__init__()
        self.tp, self.sp = tp, sp
        self.vocab_size, self.label_smoothing = config.vocab_size, config.label_smoothing
        self.softcap = config.logit_softcap
        self.chunk_tokens = 0
        self.register_parameter("bias", None)
        if not config.tie_embeddings:
            self.weight = shard_parameter(
                (config.vocab_size, config.hidden_size),
                initial=Initial(std=config.init_std),
                dim=0,
                axis=tp,
                multiple=config.vocab_multiple,
            )

    def forward(self, hidden_TH: Tensor, weight_VH: Tensor) -> Tensor:
        """Logits [T, V/tp] from [T/sp, H], padded columns included."""
        return self._logits(self.features(hidden_TH), weight_VH, self.sp)

    def features(self, hidden_TH: Tensor) -> Tensor:
        """What the logits are a linear function of: [T/sp, H]."""
        return hidden_TH

    def _logits(self, features_TH: Tensor, weight_VH: Tensor, sp: Axis) -> Tensor:
        logits_TV = column_parallel_linear(
            features_TH, weight_VH, self.bias, tp=self.tp, sp=sp, gradients=self.weight_gradients
        )
        return (logits_TV / self.softcap).tanh() * self.softcap if self.softcap else logits_TV

    def full_logits(self, logits_TV: Tensor, tokens: Tokens) -> Tensor:
        """Logits [B, S, V] on every rank of tp and cp, for ranks that all do the same with them; 0 of no document."""
        return tokens.unflat(self.joined_logits(logits_TV))

    def joined_logits(self, logits_TV: Tensor) -> Tensor:
        """Logits [T, V] of the full vocabulary, without padding, on every rank of tp."""
        return differentiable.all_gather_invariant(logits_TV, self.tp, dim=-1)[:, : self.vocab_size]

    def losses(
        self, hidden_TH: Tensor, weight_VH: Tensor, targets: Targets, tokens: Tokens
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each token [T], and for evaluation sums over the tokens of all ranks of cp, by their weights:

            correct                   1 where the likeliest token is the label
            negative_log_likelihood   of the label, which label smoothing leaves as it is

        Each is a float64 []. Where gradients are wanted there are none: training pays nothing for it.
        """
        sizes: dict[str, Any] = {"tp": self.tp, "vocab_size": self.vocab_size}
        smoothing = self.label_smoothing
        if not torch.is_grad_enabled():
            return self._evaluated(hidden_TH, weight_VH, targets, tokens)
        if self.chunk_tokens:
            losses_T = linear_cross_entropy(
                self.features(hidden_TH),
                weight_VH,
                self.bias,
                targets.labels_T,
                sp=self.sp,
                chunk_tokens=self.chunk_tokens,
                gradients=self.weight_gradients,
                label_smoothing=smoothing,
                softcap=self.softcap,
                **sizes,
            )
            return losses_T, {}
        logits_TV = self(hidden_TH, weight_VH)
        # The logits are not read afterwards: a copy would be the largest tensor of the step.
        scratch_TV = logits_TV.detach() if logits_TV.dtype in (torch.float32, torch.float64) else None
        losses_T = vocab_parallel_cross_entropy(
            logits_TV, targets.labels_T, label_smoothing=smoothing, scratch_TV=scratch_TV, **sizes
        )
        return losses_T, {}

    def _evaluated(
        self, hidden_TH: Tensor, weight_VH: Tensor, targets: Targets, tokens: Tokens
    ) -> tuple[Tensor, dict[str, Tensor]]:
        sizes: dict[str, Any] = {"tp": self.tp, "vocab_size": self.vocab_size}
        features_TH = collectives.all_gather(self.features(hidden_TH), self.sp)
        found = []
        for start in range(0, len(features_TH), step := self.chunk_tokens or max(1, len(features_TH))):
            labels_C = targets.labels_T[start : start + step]
            logits_CV = self._logits(features_TH[start : start + step], weight_VH, Axis.alone(0))
            likelihood_C = vocab_parallel_cross_entropy(logits_CV, labels_C, **sizes)
            losses_C = likelihood_C
            if self.label_smoothing:
                losses_C = vocab_parallel_cross_entropy(
                    logits_CV, labels_C, label_smoothing=self.label_smoothing, **sizes
                )
            found.append((losses_C, vocab_parallel_argmax(logits_CV, **sizes) == labels_C, likelihood_C))
        losses_T, is_right_T, likelihood_T = (torch.cat(parts) for parts in zip(*found, strict=True))
        weighed_2 = (torch.stack((is_right_T.double(), likelihood_T.double())) * targets.weights_T).sum(1)
        correct, likelihood = collectives.all_reduce(weighed_2, tokens.cp)
        return losses_T, {"correct": correct, "negative_log_likelihood": likelihood}

    def loss(
        self,
        losses_T: Tensor,
        targets: Targets,
        tokens: Tokens,
        auxiliary: Tensor | None = None,
        of_samples: Tensor | None = None,
    ) -> Tensor:
        """The mean loss of the tokens that count, or 0 where none does: [].

        `of_samples` is one more term of this rank's sum of losses. `auxiliary`, a sum over this rank's tokens of what
        layers add to the objective, gets a gradient as one more term of the sum, and leaves the value as it is. The
        loss is that of all ranks of cp, on each of them; as over data-parallel ranks gradients are to be averaged.
        """
        own = (losses_T * targets.weights_T.to(losses_T.dtype)).sum()
        if of_samples is not None:
            own = own + of_samples.to(own.dtype)
        if auxiliary is not None:
            own = own + (auxiliary - auxiliary.detach()).to(own.dtype)
        total = differentiable.reduce(differentiable.copy(own, tokens.cp), tokens.cp)
        # The sum of weights, or 1 in place of 0.
        divisor = torch.empty_like(targets.sum_of_weights, dtype=total.dtype)
        torch.add(targets.sum_of_weights, targets.sum_of_weights == 0, out=divisor)
        return total / divisor
