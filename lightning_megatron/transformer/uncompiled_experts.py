"""Layers of experts in compiled code: one operator, which runs such a layer as it is, uncompiled, and its backward.

A compiler can trace neither sizes that are data nor messages in flight. The operator keeps the graph of the layer that
autograd makes in it, as long as what was saved for the backward is kept; its backward runs that graph, which adds the
gradients of the layer's parameters to their `.grad` as in any backward.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from lightning_megatron.handles import handle_of, held_by
from lightning_megatron.precision.autocast import autocast, autocast_dtype


class Uncompiled:
    """Access of compiled code to a layer: `find` gives the function to call, and keeps it no longer than it lives."""

    def __init__(self, find: Callable[[], Any]) -> None:
        self.handle = handle_of(find)
        # The operator is differentiated where an input is: hidden states are not, if all before the layer is frozen.
        self.anchor = torch.zeros((), device="cpu", requires_grad=True)

    def run(self, inputs: list[Tensor], further: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Output of the layer, as large as its first input and of that dtype, and its auxiliary losses, 0 where it has
        none; `further` holds its further arguments."""
        first = inputs[0]
        output_TH, auxiliary, _ = _run(
            inputs, self.anchor, self.handle, further, torch.is_grad_enabled(), autocast_dtype(first), dtype
        )
        return output_TH, auxiliary


@torch.library.custom_op("lightning_megatron::run_experts", mutates_args=())
def _run(
    inputs: Sequence[Tensor],
    anchor: Tensor,
    find: Tensor,
    further: Tensor,
    is_training: bool,
    autocast_to: torch.dtype | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    first = inputs[0]
    with with_autograd(), torch.set_grad_enabled(is_training), autocast(first, autocast_to):
        leaves = [one.detach().requires_grad_(is_training and one.is_floating_point()) for one in inputs]
        found = held_by(find)()(*leaves, *held_by(further))
        output_TH, auxiliary = found if isinstance(found, tuple) else (found, first.new_zeros((), dtype=_wide(first)))
    assert output_TH.shape == first.shape and output_TH.dtype == dtype
    kept = handle_of((leaves, (output_TH, auxiliary)) if is_training else None)
    # Compiled code may write what it gets, which is a part of that graph.
    return output_TH.detach().clone(memory_format=torch.contiguous_format), auxiliary.detach().clone(), kept


@_run.register_fake
def _(
    inputs: Sequence[Tensor],
    anchor: Tensor,
    find: Tensor,
    further: Tensor,
    is_training: bool,
    autocast_to: torch.dtype | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    first = inputs[0]
    output_TH, auxiliary = first.new_empty(first.shape, dtype=dtype), first.new_empty((), dtype=_wide(first))
    return output_TH, auxiliary, torch.empty(1, dtype=torch.uint8, device="cpu")


def _wide(hidden_TH: Tensor) -> torch.dtype:
    """The dtype of auxiliary losses."""
    return torch.promote_types(hidden_TH.dtype, torch.float32)


@torch.library.custom_op("lightning_megatron::run_experts_backward", mutates_args=())
def _run_backward(
    grad_TH: Tensor, grad_auxiliary: Tensor, differentiated: Sequence[Tensor], kept: Tensor
) -> list[Tensor]:
    leaves, outputs = held_by(kept)
    pairs = [pair for pair in zip(outputs, (grad_TH, grad_auxiliary), strict=True) if pair[0].requires_grad]
    with with_autograd():
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
    of_inputs = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves if leaf.requires_grad]
    # The last is that of the anchor: a backward whose results nobody wants would be left out.
    return [*of_inputs, torch.zeros((), device="cpu")]


@_run_backward.register_fake
def _(grad_TH: Tensor, grad_auxiliary: Tensor, differentiated: Sequence[Tensor], kept: Tensor) -> list[Tensor]:
    return [*(one.new_empty(one.shape) for one in differentiated), torch.empty((), device="cpu")]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.is_differentiated = [one.is_floating_point() for one in inputs[0]]
    ctx.save_for_backward(*(one for one in inputs[0] if one.is_floating_point()), output[2])


def _backward(ctx: Any, grad_TH: Tensor, grad_auxiliary: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    *differentiated, kept = ctx.saved_tensors
    *found, of_anchor = _run_backward(grad_TH, grad_auxiliary, differentiated, kept)
    gradients = iter(found)
    of_inputs = [next(gradients) if is_differentiated else None for is_differentiated in ctx.is_differentiated]
    return of_inputs, of_anchor, None, None, None, None, None


_run.register_autograd(_backward, setup_context=_save)


@contextmanager
def with_autograd() -> Iterator[None]:
    """Autograd on its own terms, inside of an operator, which torch runs without it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield
