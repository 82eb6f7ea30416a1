"""The word embedding with its vocabulary cut over `tp`.

Each rank looks up the ids it holds and puts zeros for the others; the sum over `tp` is the embedding. Under sequence
parallelism the sum is scattered, so the residual stream starts cut. Dims: T tokens, V vocabulary, H hidden.
Source: Shoeybi et al., arXiv 1909.08053, section 3.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.comm import differentiable
from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import Initial, shard_parameter
from lightning_megatron.tensor.vocabulary import own_entries
from lightning_megatron.tensor.weight_gradients import (
    WeightGradientLayer,
    WeightGradientMode,
    WeightGradients,
    add_gradient,
)


class VocabParallelEmbedding(WeightGradientLayer):
    """Word embedding, ids [T] to [T/sp, H]; weight [V/tp, H], its rows padded to a common multiple of `multiple`.

    An id outside of the vocabulary raises IndexError, on CPU, as in torch.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, tp: Axis, sp: Axis, initial: Initial, multiple: int = 1
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.tp, self.sp = tp, sp
        self.weight = shard_parameter((vocab_size, hidden_size), initial=initial, dim=0, axis=tp, multiple=multiple)

    def forward(self, ids_T: Tensor) -> Tensor:
        index_T, is_foreign_T = own_entries(ids_T, self.vocab_size, self.weight.shape[0], self.tp)
        own_TH = _LookUp.apply(self.weight, index_T, is_foreign_T, self.weight_gradients)
        if self.sp.size == self.tp.size:
            return differentiable.reduce_scatter(own_TH, self.sp)
        return differentiable.reduce(own_TH, self.tp)


class _LookUp(torch.autograd.Function):
    """Rows of the weight, zeros for ids of other ranks; its backward needs no mask [T, H]."""

    @staticmethod
    def forward(
        ctx: Any, weight_VH: Tensor, index_T: Tensor, is_foreign_T: Tensor | None, gradients: WeightGradients
    ) -> Tensor:
        # See `linear`, Note: a weight is its owner.
        ctx.gradients, ctx.owner = gradients, weight_VH
        own_TH = F.embedding(index_T, weight_VH)
        if is_foreign_T is not None:
            index_T = index_T.masked_fill(is_foreign_T, -1)
            # A product with zeros is many times as fast as masked_fill_ with a mask that is broadcast.
            own_TH.mul_(~is_foreign_T.unsqueeze(1))
        ctx.save_for_backward(index_T)
        return own_TH.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, None, None, None]:
        (index_T,) = ctx.saved_tensors
        weight_VH: Tensor = ctx.owner
        # A look-up touches few rows: it is not worth deferring.
        is_added = ctx.gradients.mode(weight_VH) is not WeightGradientMode.RETURN
        if is_added and grad_TH.device.type == "cpu":
            own_TH = grad_TH * (index_T >= 0).unsqueeze(1)
            ctx.gradients.add_rows(weight_VH, index_T.clamp_min(0), own_TH)
            return None, None, None, None
        # Index -1 is the padding index, whose gradient is left out.
        grad_VH = torch.ops.aten.embedding_dense_backward(grad_TH, index_T, weight_VH.shape[0], -1, False)
        if not is_added:
            return grad_VH, None, None, None
        add_gradient(weight_VH, grad_VH, ctx.gradients.grad_view(weight_VH))
        return None, None, None, None
