"""Load balancing: auxiliary losses as sums over tokens, and the step of the expert bias.

    balance   sum over tokens t, experts e of  p_te load_e      load_e = E c_e / sum of c    p: scores that sum to 1
    z         sum over tokens t of  logsumexp(logits_t)^2

c_e counts the tokens of a group that have expert e among their top-k by score alone; it has no gradient. A loss is the
mean over all real tokens of the global batch, weighted by `weights_T`; each rank adds the sum over its own tokens, and
ranks exchange nothing but c. The gradient of the balance loss needs c before the first backward: c of a sequence is
known then, c of the global batch is not while microbatches follow, so the previous step's c is used for it.

`weights_T` of a sequence sum to the loss weights of its targets, so auxiliary losses and the loss of the model are
terms of one mean, however a batch is cut into calls.

T tokens, E experts, P sequence groups.
Source: Fedus et al., arXiv 2101.03961, section 2.2 (balance); DeepSeek-AI, arXiv 2412.19437, section 2.1.2 (of a
sequence; scores that sum to 1; bias); Zoph et al., arXiv 2202.08906, section 2.2 (z); Wang et al., arXiv 2408.15664.
"""

import torch
from torch import Tensor


def expert_load(counts_PE: Tensor, dtype: torch.dtype) -> Tensor:
    """Load of each expert relative to the mean of its group, [P, E]; 1 for all experts of a group without tokens."""
    total_P1 = counts_PE.sum(-1, keepdim=True)
    load_PE = counts_PE.to(dtype) * counts_PE.shape[-1] / total_P1.clamp(min=1).to(dtype)
    return torch.where(total_P1 > 0, load_PE, 1.0)


def aux_loss_sum(probabilities_TE: Tensor, load_TE: Tensor, weights_T: Tensor, is_real_T: Tensor) -> Tensor:
    """Sum of the weighted load-balancing losses of this rank's tokens: []."""
    # A product with a weight of 0 would let NaN in padding through.
    return torch.where(is_real_T.unsqueeze(1), weights_T.unsqueeze(1) * probabilities_TE * load_TE, 0.0).sum()


def z_loss_sum(logits_TE: Tensor, weights_T: Tensor, is_real_T: Tensor) -> Tensor:
    """Sum of the weighted z-losses of this rank's tokens: []."""
    return torch.where(is_real_T, weights_T * logits_TE.logsumexp(1).square(), 0.0).sum()


def expert_bias_step(counts_E: Tensor) -> Tensor:
    """Direction of each expert's bias: 1 below the mean load, -1 above it, else 0; int64 [E]."""
    return torch.sign(counts_E.sum() - counts_E * counts_E.shape[0])
