"""Cross-entropy of a language model's hidden states, whose logits are never all there: only those of a few tokens.

    forward    of each chunk of tokens: x = h W^T + b over the own columns, and of x what the loss needs
    backward   x again, and from it the gradients of h, W and b

The logits of a chunk are computed once more in backward, one product of three more for the head, and only `lse`, a
number a token, is saved. With m = max over V of x and u = (1 - e) x_label + e mean over V of x:

    lse = m + ln(sum over V of exp(x - m))    loss = lse - u    dloss/dx = exp(x - lse) - (1 - e) [is label] - e/V

V is the full vocabulary without padding; e the label smoothing. Two sums over `tp`, of all tokens at once.
Dims: T tokens, I features in, V vocabulary columns of this rank, C tokens of a chunk.
Source: Wijmans et al., arXiv 2411.09009, section 4 (logits in parts); `cross_entropy` for the sums over `tp`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis
from lightning_megatron.precision.cast import Operand
from lightning_megatron.tensor.cross_entropy import IGNORED
from lightning_megatron.tensor.gemm import TORCH_GEMM
from lightning_megatron.tensor.linear import as_gemm_input, sum_to_shard
from lightning_megatron.tensor.vocabulary import num_own, own_entries, zero_foreign_
from lightning_megatron.tensor.weight_gradients import WeightGradientMode, WeightGradients, add_gradient


def linear_cross_entropy(
    hidden_TI: Tensor,
    weight_VI: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    *,
    tp: Axis,
    sp: Axis,
    vocab_size: int,
    chunk_tokens: int,
    gradients: WeightGradients,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    """Loss of each token [T] of hidden states [T/sp, I], 0 where the label is -100; float32, or float64 for float64.

    The logits of at most `chunk_tokens` tokens are in memory at a time; x becomes c tanh(x / c) for a `softcap` c. The
    gradient of the weight goes where `gradients` says; it is not put off. Waits for `tp` twice in forward, for `sp` or
    `tp` in backward.
    """
    call = _Call(tp, sp, vocab_size, chunk_tokens, gradients, label_smoothing, softcap)
    losses: Tensor = _LinearCrossEntropy.apply(as_gemm_input(hidden_TI), weight_VI, bias_V, labels_T, call)
    return losses


class _Call(NamedTuple):
    """Arguments of the Function besides its tensors."""

    tp: Axis
    sp: Axis
    vocab_size: int
    chunk_tokens: int
    gradients: WeightGradients
    smoothing: float
    softcap: float


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own_TI: Tensor, weight_VI: Tensor, bias_V: Tensor | None, labels_T: Tensor, call: _Call
    ) -> Tensor:
        # See `linear`, Note: a weight is its owner.
        ctx.call, ctx.owner = call, weight_VI
        tp, smoothing, length = call.tp, call.smoothing, len(weight_VI)
        valid = num_own(call.vocab_size, length, tp)
        is_ignored_T = labels_T == IGNORED
        index_T, is_foreign_T = own_entries(labels_T.masked_fill(is_ignored_T, 0), call.vocab_size, length, tp)
        dtype = torch.promote_types(own_TI.dtype, torch.float32)
        max_T = torch.full(labels_T.shape, -torch.inf, dtype=dtype, device=own_TI.device)
        wanted_T, sum_T = torch.zeros_like(max_T), torch.zeros_like(max_T)
        hidden_TI = collectives.all_gather(own_TI, call.sp)
        for chunk in _chunks(len(labels_T), call.chunk_tokens):
            logits_CV = _logits(hidden_TI[chunk], weight_VI, bias_V, dtype, call.softcap)
            label_C = logits_CV.gather(1, index_T[chunk].unsqueeze(1)).squeeze(1).mul_(1.0 - smoothing)
            wanted_T[chunk] = zero_foreign_(label_C, None if is_foreign_T is None else is_foreign_T[chunk])
            logits_CV = logits_CV.narrow(1, 0, valid)
            if smoothing:
                wanted_T[chunk] += logits_CV.sum(1).mul_(smoothing / call.vocab_size)
            if valid:
                max_T[chunk] = logits_CV.amax(1)
                sum_T[chunk] = logits_CV.sub_(max_T[chunk].unsqueeze(1)).exp_().sum(1)
        own_max_T, max_T = max_T, collectives.all_reduce(max_T, tp, "max")
        sum_T.mul_((own_max_T - max_T).exp_())
        wanted_T, sum_T = collectives.all_reduce(torch.stack((wanted_T, sum_T)), tp)
        lse_T = sum_T.log().add_(max_T)
        ctx.save_for_backward(own_TI, weight_VI, bias_V, lse_T, index_T, is_foreign_T, is_ignored_T)
        losses_T: Tensor = lse_T - wanted_T
        return losses_T.masked_fill_(is_ignored_T, 0.0).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        own_TI, weight_VI, bias_V, lse_T, index_T, is_foreign_T, is_ignored_T = ctx.saved_tensors
        call: _Call = ctx.call
        owner: Tensor = ctx.owner
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        valid = num_own(call.vocab_size, len(weight_VI), call.tp)
        grad_T = grad_T.masked_fill(is_ignored_T, 0.0)
        target_T = zero_foreign_(grad_T * (call.smoothing - 1.0), is_foreign_T)
        hidden_TI = collectives.all_gather(own_TI, call.sp)
        grad_TI = torch.empty_like(hidden_TI) if needs_hidden else None
        returns_weight = needs_weight and call.gradients.mode(owner) is WeightGradientMode.RETURN
        grad_view = None if returns_weight or not needs_weight else call.gradients.grad_view(owner)
        # In 16 bits every chunk would round what the chunks before it summed.
        is_wide = owner.dtype == lse_T.dtype if grad_view is None else grad_view.dtype == lse_T.dtype
        sums_chunks = needs_weight and (returns_weight or not is_wide)
        grad_weight_VI = torch.zeros_like(weight_VI, dtype=lse_T.dtype) if sums_chunks else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=lse_T.dtype) if needs_bias else None
        for chunk in _chunks(len(grad_T), call.chunk_tokens):
            logits_CV = _logits(hidden_TI[chunk], weight_VI, bias_V, lse_T.dtype, call.softcap)
            slopes_CV = 1.0 - (logits_CV / call.softcap).square_() if call.softcap else None
            logits_CV.narrow(1, valid, len(weight_VI) - valid).fill_(-torch.inf)
            grad_CV = logits_CV.sub_(lse_T[chunk].unsqueeze(1)).exp_().mul_(grad_T[chunk].unsqueeze(1))
            if call.smoothing:
                smooth_C = grad_T[chunk] * (call.smoothing / call.vocab_size)
                grad_CV.narrow(1, 0, valid).sub_(smooth_C.unsqueeze(1))
            grad_CV.scatter_add_(1, index_T[chunk].unsqueeze(1), target_T[chunk].unsqueeze(1))
            if slopes_CV is not None:
                grad_CV.mul_(slopes_CV)
            grad, hidden = Operand(grad_CV.to(own_TI.dtype), None), Operand(hidden_TI[chunk], None)
            if grad_TI is not None:
                grad_TI[chunk] = TORCH_GEMM.input_gradient(grad, weight_VI, own_TI.dtype)
            if grad_weight_VI is not None:
                grad_weight_VI += TORCH_GEMM.weight_gradient(grad, hidden, weight_VI)
            elif needs_weight:
                TORCH_GEMM.add_weight_gradient(owner, grad, hidden, grad_view)
            if grad_bias_V is not None:
                grad_bias_V += grad.values.sum(0)
        if grad_TI is not None:
            grad_TI = sum_to_shard(grad_TI, call.tp, call.sp).wait()
        if grad_weight_VI is not None and not returns_weight:
            add_gradient(owner, grad_weight_VI, grad_view)
            grad_weight_VI = None
        elif grad_weight_VI is not None:
            grad_weight_VI = grad_weight_VI.to(weight_VI.dtype)
        if grad_bias_V is not None:
            grad_bias_V = grad_bias_V.to(bias_V.dtype)
        return grad_TI, grad_weight_VI, grad_bias_V, None, None


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, num_tokens, chunk_tokens)]


def _logits(hidden_CI: Tensor, weight_VI: Tensor, bias_V: Tensor | None, dtype: torch.dtype, softcap: float) -> Tensor:
    made = TORCH_GEMM.forward(Operand(hidden_CI, None), weight_VI, bias_V, hidden_CI.dtype, is_training=True)
    logits_CV = made.to(dtype)
    return logits_CV.div_(softcap).tanh_().mul_(softcap) if softcap else logits_CV
