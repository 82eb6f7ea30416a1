"""Weight gradients of linears in compiled code: one operator, which puts each product where uncompiled code puts it.

A compiler gives each input of a graph a gradient of the input's own dtype, in memory of its own: a weight in 16 bits
would get float32 products rounded to them, which autograd widens again, and adds. So compiled code gets a weight
without a graph, and beside it an anchor, a number that stands in for the weight where gradients are concerned, and a
handle. In the backward an operator multiplies: it adds to `.grad`, or leaves the product for autograd to take on.

    weight --- StandIn ---> anchor ---> compiled forward ---> loss
    .grad  <-- product, unless it was added <--- compiled backward: the operator, by the weight's handle

O rows, T tokens, I columns.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.handles import handle_of, held_by
from lightning_megatron.tensor.weight_gradients import (
    WeightGradientLayer,
    WeightGradientMode,
    WeightGradients,
    add_product,
    product_in,
)


@contextmanager
def stood_in(module: nn.Module) -> Iterator[None]:
    """Inside the block weights of a module's linears that need gradients have stand-ins, for one compiled call."""
    layers = [one for one in module.modules() if isinstance(one, WeightGradientLayer) and one.names_stood_in]
    for layer in layers if torch.is_grad_enabled() else ():
        weights = [(name, layer.get_parameter(name)) for name in layer.names_stood_in]
        layer.stand_ins |= {
            name: _stand_in(weight, layer.weight_gradients)
            for name, weight in weights
            if weight.requires_grad and weight.is_leaf
        }
    try:
        yield
    finally:
        for layer in layers:
            layer.stand_ins.clear()


def add_compiled_product(grad_TO: Tensor, x_TI: Tensor, handle: Tensor) -> Tensor:
    """The gradient [] of a weight's anchor, which says nothing; the product grad^T x goes to the weight."""
    nothing: Tensor = _add(grad_TO, x_TI, handle)
    return nothing


@dataclass
class _Standing:
    """A weight that compiled code has not, and its product of a backward that autograd is to take on."""

    weight: Tensor
    gradients: WeightGradients
    product: Tensor | None = None


def _stand_in(weight: Tensor, gradients: WeightGradients) -> tuple[Tensor, Tensor]:
    standing = _Standing(weight, gradients)
    return _Anchor.apply(weight, standing), handle_of(standing)


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, standing: _Standing) -> Tensor:
        ctx.standing = standing
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        product, ctx.standing.product = ctx.standing.product, None
        return product, None


@torch.library.custom_op("lightning_megatron::add_compiled_product", mutates_args=())
def _add(grad_TO: Tensor, x_TI: Tensor, handle: Tensor) -> Tensor:
    standing: _Standing = held_by(handle)
    weight, gradients = standing.weight, standing.gradients
    if gradients.mode(weight) is WeightGradientMode.RETURN:
        # A gradient of the weight's own dtype is what autograd expects where nothing else is said.
        product = product_in(weight.grad_dtype or weight.dtype, grad_TO.t(), x_TI).view(weight.shape)
        standing.product = product if standing.product is None else standing.product + product
    else:
        add_product(weight, grad_TO.t(), x_TI, gradients.grad_view(weight))
    return torch.zeros((), device="cpu")


@_add.register_fake
def _(grad_TO: Tensor, x_TI: Tensor, handle: Tensor) -> Tensor:
    return torch.zeros((), device="cpu")
