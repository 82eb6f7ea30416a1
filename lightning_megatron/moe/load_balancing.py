"""The maths of equally busy experts: auxiliary losses as sums over tokens, and the step of the bias.

    balance   sum over tokens t, experts e of  p_te load_e      load_e = E c_e / sum of c    p: scores that sum up to 1
    z         sum over tokens t of  logsumexp(logits_t)^2

c_e is how many tokens of a pool have expert e among their best by score alone: no gradient passes it. A loss is its sum
over all real tokens of the global batch, each times its weight, over the sum of these; a rank adds the sum over its own
tokens, and no number but c is told to others. The gradient of the balance loss needs c before the first backward: that
of a sequence is there, that of the whole batch is not where microbatches follow, hence there the one of the step
before.

A token counts in them as its sequence counts in the loss of the model: with `weights_T`, whose sum over a sequence is
that of the weights of its targets. So they are terms of the same mean, whatever calls it is made of.

Legend: T tokens, E experts, P pools.
Source: Fedus et al., arXiv 2101.03961, section 2.2 (balance); DeepSeek-AI, arXiv 2412.19437, section 2.1.2 (of a
sequence; scores that sum up to 1; bias); Zoph et al., arXiv 2202.08906, section 2.2 (z); Wang et al., arXiv 2408.15664.
"""

import torch
from torch import Tensor


def expert_load(counts_PE: Tensor, dtype: torch.dtype) -> Tensor:
    """How busy each expert of a pool is, 1 being as busy as the mean; 1 for all where none has anything: [P, E]."""
    total_P1 = counts_PE.sum(-1, keepdim=True)
    load_PE = counts_PE.to(dtype) * counts_PE.shape[-1] / total_P1.clamp(min=1).to(dtype)
    return torch.where(total_P1 > 0, load_PE, 1.0)


def aux_loss_sum(probabilities_TE: Tensor, load_TE: Tensor, weights_T: Tensor, is_real_T: Tensor) -> Tensor:
    """The weighted balance losses of this rank's tokens, not yet divided by the weights of all: []."""
    # Not a product with a weight of 0: padding may hold anything, NaN too.
    return torch.where(is_real_T.unsqueeze(1), weights_T.unsqueeze(1) * probabilities_TE * load_TE, 0.0).sum()


def z_loss_sum(logits_TE: Tensor, weights_T: Tensor, is_real_T: Tensor) -> Tensor:
    """The weighted z-losses of this rank's tokens, not yet divided by the weights of all: []."""
    return torch.where(is_real_T, weights_T * logits_TE.logsumexp(1).square(), 0.0).sum()


def expert_bias_step(counts_E: Tensor) -> Tensor:
    """Which way each expert's bias goes: 1 where it is less busy than the mean, -1 where more, else 0; int64 [E]."""
    return torch.sign(counts_E.sum() - counts_E * counts_E.shape[0])
