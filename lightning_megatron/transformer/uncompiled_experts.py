"""Layers of experts in compiled code: one operator, which runs the layer as it is, uncompiled, and its backward.

A compiler can trace neither sizes that are data nor messages in flight. The operator keeps the graph of the layer that
autograd makes in it, as long as what was saved for the backward is kept; its backward runs that graph, which adds the
gradients of the layer's parameters to their `.grad` as in any backward.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DispatchKey

from lightning_megatron.handles import handle_of, held_by
from lightning_megatron.precision.autocast import autocast, autocast_dtype


class Uncompiled:
    """Access of compiled code to a layer, which has a method `mixed`."""

    def __init__(self, layer: nn.Module) -> None:
        self.handle = handle_of(weakref.ref(layer))
        # The operator is differentiated where an input is: hidden states are not, if all before the layer is frozen.
        self.anchor = torch.zeros((), device="cpu", requires_grad=True)

    def run(self, hidden_TH: Tensor, call: Tensor) -> tuple[Tensor, Tensor]:
        """Output and auxiliary losses of the layer; `call` holds the further arguments of its `mixed`."""
        output_TH, auxiliary, _ = _run(
            hidden_TH, self.anchor, self.handle, call, torch.is_grad_enabled(), autocast_dtype(hidden_TH)
        )
        return output_TH, auxiliary


@torch.library.custom_op("lightning_megatron::run_experts", mutates_args=())
def _run(
    hidden_TH: Tensor,
    anchor: Tensor,
    layer: Tensor,
    call: Tensor,
    is_training: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    module = held_by(layer)()
    with with_autograd(), torch.set_grad_enabled(is_training), autocast(hidden_TH, dtype):
        leaf_TH = hidden_TH.detach().requires_grad_(is_training)
        outputs = module.mixed(leaf_TH, *held_by(call))
    kept = handle_of((leaf_TH, outputs) if is_training else None)
    output_TH, auxiliary = (one.detach() for one in outputs)
    # Compiled code may write what it gets, which is a part of that graph.
    return output_TH.clone(memory_format=torch.contiguous_format), auxiliary.clone(), kept


@_run.register_fake
def _(
    hidden_TH: Tensor,
    anchor: Tensor,
    layer: Tensor,
    call: Tensor,
    is_training: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    is_double = hidden_TH.dtype == torch.float64
    output_TH = hidden_TH.new_empty(hidden_TH.shape, dtype=hidden_TH.dtype if dtype is None or is_double else dtype)
    auxiliary = hidden_TH.new_empty((), dtype=torch.promote_types(hidden_TH.dtype, torch.float32))
    return output_TH, auxiliary, torch.empty(1, dtype=torch.uint8, device="cpu")


@torch.library.custom_op("lightning_megatron::run_experts_backward", mutates_args=())
def _run_backward(grad_TH: Tensor, grad_auxiliary: Tensor, hidden_TH: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    leaf_TH, outputs = held_by(kept)
    pairs = [pair for pair in zip(outputs, (grad_TH, grad_auxiliary), strict=True) if pair[0].requires_grad]
    with with_autograd():
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
    # The second is that of the anchor: a backward whose results nobody wants would be left out.
    return torch.zeros_like(leaf_TH) if leaf_TH.grad is None else leaf_TH.grad, torch.zeros((), device="cpu")


@_run_backward.register_fake
def _(grad_TH: Tensor, grad_auxiliary: Tensor, hidden_TH: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    return hidden_TH.new_empty(hidden_TH.shape), torch.empty((), device="cpu")


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[2])


def _backward(ctx: Any, grad_TH: Tensor, grad_auxiliary: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_run_backward(grad_TH, grad_auxiliary, *ctx.saved_tensors), None, None, None, None


_run.register_autograd(_backward, setup_context=_save)


@contextmanager
def with_autograd() -> Iterator[None]:
    """Autograd on its own terms, inside of an operator, which torch runs without it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield
