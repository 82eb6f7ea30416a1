"""Many matrix products at once: the rows of each expert times that expert's weight, as a value that a layer holds.

    forward  y_e = x_e W_e^T        input gradient  dx_e = dy_e W_e        weight gradient  dW_e = dy_e^T x_e

`OneByOne` loops over the experts. `Grouped` is one kernel for all of them, torch's own, where that takes the tensors,
and the loop elsewhere. An expert with no rows has a gradient too: zeros.

R rows sorted by expert, L own experts, I features in, O features out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.tensor.linear import as_product_input
from lightning_megatron.tensor.weight_gradients import Way, WeightGradients

_KERNEL_DTYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16,)}
# The kernel wants rows to begin at multiples of so many bytes.
_ALIGNED_BYTES = 16


@dataclass(frozen=True, eq=False)
class Groups:
    """How many rows each own expert has, on the host and on the device."""

    sizes: tuple[int, ...]
    sizes_L: Tensor
    # int64

    @property
    def num_rows(self) -> int:
        return sum(self.sizes)

    def spans(self) -> Iterator[tuple[int, slice]]:
        """Each expert that has rows, and where they stand."""
        start = 0
        for expert, size in enumerate(self.sizes):
            if size:
                yield expert, slice(start, start + size)
            start += size


class GroupedProduct(Protocol):
    """How experts multiply."""

    def forward(self, x_RI: Tensor, weight_LOI: Tensor, groups: Groups) -> Tensor:
        """[R, O]."""
        ...

    def input_gradient(self, grad_RO: Tensor, weight_LOI: Tensor, groups: Groups) -> Tensor:
        """[R, I]."""
        ...

    def weight_gradient(self, grad_RO: Tensor, x_RI: Tensor, groups: Groups) -> Tensor:
        """[L, O, I]."""
        ...


class OneByOne:
    """One product for each expert in turn."""

    def forward(self, x_RI: Tensor, weight_LOI: Tensor, groups: Groups) -> Tensor:
        y_RO = x_RI.new_empty(len(x_RI), weight_LOI.shape[1])
        for expert, rows in groups.spans():
            torch.mm(x_RI[rows], weight_LOI[expert].t(), out=y_RO[rows])
        return y_RO

    def input_gradient(self, grad_RO: Tensor, weight_LOI: Tensor, groups: Groups) -> Tensor:
        grad_RI = grad_RO.new_empty(len(grad_RO), weight_LOI.shape[2])
        for expert, rows in groups.spans():
            torch.mm(grad_RO[rows], weight_LOI[expert], out=grad_RI[rows])
        return grad_RI

    def weight_gradient(self, grad_RO: Tensor, x_RI: Tensor, groups: Groups) -> Tensor:
        grad_LOI = x_RI.new_zeros(len(groups.sizes), grad_RO.shape[1], x_RI.shape[1])
        for expert, rows in groups.spans():
            torch.mm(grad_RO[rows].t(), x_RI[rows], out=grad_LOI[expert])
        return grad_LOI


class Grouped:
    """One kernel for all experts; the loop for what the kernel does not take (float64, unaligned rows, no rows)."""

    def __init__(self) -> None:
        self._loop = OneByOne()

    def forward(self, x_RI: Tensor, weight_LOI: Tensor, groups: Groups) -> Tensor:
        if not _is_for_kernel(x_RI, weight_LOI):
            return self._loop.forward(x_RI, weight_LOI, groups)
        return F.grouped_mm(x_RI, weight_LOI.transpose(1, 2), offs=_ends(groups))

    def input_gradient(self, grad_RO: Tensor, weight_LOI: Tensor, groups: Groups) -> Tensor:
        if not _is_for_kernel(grad_RO, weight_LOI):
            return self._loop.input_gradient(grad_RO, weight_LOI, groups)
        return F.grouped_mm(grad_RO, weight_LOI, offs=_ends(groups))

    def weight_gradient(self, grad_RO: Tensor, x_RI: Tensor, groups: Groups) -> Tensor:
        if not _is_for_kernel(grad_RO, x_RI):
            return self._loop.weight_gradient(grad_RO, x_RI, groups)
        grad_LOI = F.grouped_mm(grad_RO.t(), x_RI, offs=_ends(groups))
        for expert, size in enumerate(groups.sizes):
            if not size:
                # What the kernel leaves where there is nothing to sum is not told.
                grad_LOI[expert].zero_()
        return grad_LOI


ONE_BY_ONE: GroupedProduct = OneByOne()
GROUPED: GroupedProduct = Grouped()
"""Both hold nothing, so one of each is enough for all layers."""


def grouped_linear(
    x_RI: Tensor, weight: Tensor, groups: Groups, *, gradients: WeightGradients, product: GroupedProduct
) -> Tensor:
    """[R, *weight.shape[1:-1]] from the rows [R, I] of each expert; the weight is [L, *outputs, I].

    The gradient of the weight goes where `gradients` says.
    """
    y_RO: Tensor = _GroupedLinear.apply(as_product_input(x_RI), weight, groups, gradients, product)
    return y_RO.view(y_RO.shape[0], *weight.shape[1:-1])


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RI: Tensor, weight: Tensor, groups: Groups, gradients: WeightGradients, product: GroupedProduct
    ) -> Tensor:
        ctx.groups, ctx.gradients, ctx.product = groups, gradients, product
        # The weight itself, as in `tensor.linear`: what autograd saved of it may come back as another tensor.
        ctx.owner = weight
        ctx.save_for_backward(x_RI if ctx.needs_input_grad[1] else None, weight)
        return product.forward(x_RI, _flat(weight, x_RI.dtype), groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:
        x_RI, weight = ctx.saved_tensors
        groups: Groups = ctx.groups
        gradients: WeightGradients = ctx.gradients
        product: GroupedProduct = ctx.product
        owner: Tensor = ctx.owner
        grad_RO = grad_RO.contiguous()
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = product.input_gradient(grad_RO, _flat(weight, grad_RO.dtype), groups) if needs_x else None
        grad_weight = None
        if needs_weight:
            way = gradients.way(owner)

            # Put off, it runs where gradients are on.
            @torch.no_grad()
            def add() -> None:
                _add(owner, product.weight_gradient(grad_RO, x_RI, groups), gradients.home(owner))

            if way is Way.QUEUE:
                gradients.hand_in(owner, add)
            elif way is Way.ADD:
                add()
            else:
                grad_weight = product.weight_gradient(grad_RO, x_RI, groups).view(weight.shape).to(weight.dtype)
        return grad_x, grad_weight, None, None, None


def _add(weight: Tensor, gradient_LOI: Tensor, home: Tensor | None) -> None:
    """Adds to the weight's `.grad`, which is made at `home` where there is none yet."""
    gradient = gradient_LOI.view(weight.shape)
    if weight.grad is not None:
        weight.grad.add_(gradient)
    elif home is None:
        weight.grad = gradient.to(weight.dtype)
    else:
        weight.grad = home.copy_(gradient)


def _flat(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[L, O, I] in the dtype of the rows, as under autocast."""
    return weight.to(dtype).flatten(1, -2)


def _is_for_kernel(one: Tensor, other: Tensor) -> bool:
    """Whether torch's kernel takes these operands, whose last dims are rows in memory."""
    return (
        one.dtype in _KERNEL_DTYPES.get(one.device.type, ())
        and len(one) > 0
        and all(x.shape[-1] * x.element_size() % _ALIGNED_BYTES == 0 for x in (one, other))
    )


def _ends(groups: Groups) -> Tensor:
    return groups.sizes_L.cumsum(0, dtype=torch.int32)
