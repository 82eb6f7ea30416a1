"""Cross-entropy of logits whose vocabulary is cut over `tp`; no rank ever holds a full row.

    m = max over V of x        s = sum over V of exp(x - m)        u = (1 - e) (x_label - m) + e mean over V of (x - m)
    loss = ln s - u            dloss/dx = exp(x - m)/s - (1 - e) [is label] - e/V        e: label smoothing

Two sums over `tp`: one for m, one for s and u together. V is the full vocabulary without padding; padded columns take
no part. Dims: T tokens, V vocabulary columns of this rank, padding included.
Source: Shoeybi et al., arXiv 1909.08053, section 3; label smoothing as in torch.nn.functional.cross_entropy.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis
from lightning_megatron.tensor.vocabulary import num_own, own_entries, zero_foreign_

# A label that is no target.
IGNORED = -100


def vocab_parallel_cross_entropy(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    tp: Axis,
    vocab_size: int,
    label_smoothing: float = 0.0,
    scratch_TV: Tensor | None = None,
    is_kept: bool = False,
) -> Tensor:
    """Loss of each token [T], 0 where the label is -100; float32, or float64 for float64 logits.

    Waits for `tp` twice in forward. `scratch_TV` is room for the exponentials, contiguous and of the losses' dtype; it
    may be that of the logits, where nobody reads them later. A label outside of the vocabulary raises, on CPU, as in
    torch. Backward overwrites what forward saved, so it can run only once: a second one raises RuntimeError, unless it
    `is_kept`.
    """
    losses: Tensor = _CrossEntropy.apply(logits_TV, labels_T, tp, vocab_size, label_smoothing, scratch_TV, is_kept)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        labels_T: Tensor,
        tp: Axis,
        vocab_size: int,
        smoothing: float,
        scratch_TV: Tensor | None,
        is_kept: bool,
    ) -> Tensor:
        length = logits_TV.shape[1]
        valid = num_own(vocab_size, length, tp)
        is_ignored_T = labels_T == IGNORED
        index_T, is_foreign_T = own_entries(labels_T.masked_fill(is_ignored_T, 0), vocab_size, length, tp)

        dtype = torch.promote_types(logits_TV.dtype, torch.float32)
        exps_TV = scratch_TV
        if exps_TV is None:
            exps_TV = torch.empty_like(logits_TV, dtype=dtype, memory_format=torch.contiguous_format)
        assert exps_TV.dtype == dtype and exps_TV.is_contiguous() and exps_TV.shape == logits_TV.shape
        exps_TV.narrow(1, valid, length - valid).zero_()
        own_logits_TV, own_exps_TV = logits_TV.narrow(1, 0, valid), exps_TV.narrow(1, 0, valid)

        max_T = own_logits_TV.amax(1) if valid else logits_TV.new_full((len(logits_TV),), -torch.inf)
        max_T = collectives.all_reduce(max_T, tp, "max").to(dtype)
        torch.sub(own_logits_TV, max_T.unsqueeze(1), out=own_exps_TV)
        # One tensor for one message.
        sums_2T = torch.empty(2, len(exps_TV), dtype=dtype, device=exps_TV.device)
        wanted_T, sum_T = sums_2T
        torch.gather(exps_TV, 1, index_T.unsqueeze(1), out=wanted_T.unsqueeze(1))
        zero_foreign_(wanted_T, is_foreign_T)
        if smoothing:
            wanted_T.mul_(1.0 - smoothing).add_(own_exps_TV.sum(1).mul_(smoothing / vocab_size))
        torch.sum(own_exps_TV.exp_(), 1, out=sum_T)
        collectives.all_reduce_(sums_2T, tp)

        ctx.save_for_backward(exps_TV, sum_T, index_T, is_foreign_T, is_ignored_T)
        ctx.valid, ctx.vocab_size, ctx.smoothing, ctx.dtype = valid, vocab_size, smoothing, logits_TV.dtype
        ctx.is_kept = is_kept
        losses_T: Tensor = sum_T.log() - wanted_T
        return losses_T.masked_fill_(is_ignored_T, 0.0).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        exps_TV, sum_T, index_T, is_foreign_T, is_ignored_T = ctx.saved_tensors
        grad_T = grad_T.masked_fill(is_ignored_T, 0.0)
        # Exponentials less the sum at the label: these times grad/sum are the gradient, in one pass and of its dtype.
        scaled_TV = exps_TV.clone() if ctx.is_kept else exps_TV
        if ctx.smoothing:
            scaled_TV.narrow(1, 0, ctx.valid).sub_((sum_T * (ctx.smoothing / ctx.vocab_size)).unsqueeze(1))
        target_T = zero_foreign_(sum_T * (ctx.smoothing - 1.0), is_foreign_T)
        scaled_TV.scatter_add_(1, index_T.unsqueeze(1), target_T.unsqueeze(1))
        grad_TV = scaled_TV if scaled_TV.dtype == ctx.dtype else torch.empty_like(scaled_TV, dtype=ctx.dtype)
        torch.mul(scaled_TV, (grad_T / sum_T).unsqueeze(1), out=grad_TV)
        return grad_TV, None, None, None, None, None, None
