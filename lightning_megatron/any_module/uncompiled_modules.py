"""Modules of experts of networks that were written for one device, in compiled code: one operator runs each uncompiled.

How many rows an expert gets is data, and where ranks share experts rows travel: a compiler can trace neither. The
operator calls the module as it is, with its hooks, and keeps the graph that autograd makes in it; its backward runs
that graph, which adds the gradients of the module's weights to their `.grad` as in any backward.

T tokens, K experts of each, H hidden.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.any_module.cut_experts import expert_modules
from lightning_megatron.handles import handle_of, held_by
from lightning_megatron.precision.autocast import autocast, autocast_dtype
from lightning_megatron.transformer.uncompiled_experts import with_autograd

_NUM_ARGUMENTS = len(("tokens", "experts", "probabilities"))
# Attributes of a module of experts within a compiled call.
_HANDLE, _ANCHOR, _NAMES = (f"_lightning_megatron_{name}" for name in ("handle", "anchor", "names"))


@contextmanager
def experts_uncompiled(layer: nn.Module) -> Iterator[None]:
    """Inside the block compiled code runs the layer's modules of experts uncompiled.

    They are called with tokens [T, H], the experts that each chose [T, K] and their probabilities [T, K].
    """
    modules = {}
    for _, module in expert_modules(layer):
        names = tuple(signature(type(module).forward).parameters)[1:]
        if len(names) == _NUM_ARGUMENTS:
            modules[module] = names
    for module, names in modules.items():
        # In this call alone: a copy of the module would call this one.
        module.__dict__ |= {
            "forward": MethodType(_forward, module),
            _HANDLE: handle_of(weakref.ref(module)),
            # The operator is differentiated where an input is, and weights are no inputs.
            _ANCHOR: torch.zeros((), device="cpu", requires_grad=True),
            _NAMES: names,
        }
    try:
        yield
    finally:
        for module in modules:
            for name in ("forward", _HANDLE, _ANCHOR, _NAMES):
                del module.__dict__[name]


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        return type(module).forward(module, *args, **kwargs)
    names = module._lightning_megatron_names
    given = dict(zip(names, args, strict=False)) | kwargs
    hidden_TH, expert_ids_TK, probs_TK = [given[name] for name in names]
    output_TH, _ = _run(
        hidden_TH,
        expert_ids_TK,
        probs_TK,
        module._lightning_megatron_anchor,
        module._lightning_megatron_handle,
        torch.is_grad_enabled(),
        autocast_dtype(hidden_TH),
    )
    return output_TH


@torch.library.custom_op("lightning_megatron::run_expert_module", mutates_args=())
def _run(
    hidden_TH: Tensor,
    expert_ids_TK: Tensor,
    probs_TK: Tensor,
    anchor: Tensor,
    module: Tensor,
    is_training: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    call = held_by(module)()
    with with_autograd(), torch.set_grad_enabled(is_training), autocast(hidden_TH, dtype):
        leaves = [one.detach().requires_grad_(is_training) for one in (hidden_TH, probs_TK)]
        output_TH = call(leaves[0], expert_ids_TK, leaves[1])
    assert output_TH.shape == hidden_TH.shape and output_TH.dtype == hidden_TH.dtype
    kept = handle_of((leaves, output_TH) if is_training else None)
    # Compiled code may write what it gets, which is a part of that graph.
    return output_TH.detach().clone(memory_format=torch.contiguous_format), kept


@_run.register_fake
def _(
    hidden_TH: Tensor,
    expert_ids_TK: Tensor,
    probs_TK: Tensor,
    anchor: Tensor,
    module: Tensor,
    is_training: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    return hidden_TH.new_empty(hidden_TH.shape), torch.empty(1, dtype=torch.uint8, device="cpu")


@torch.library.custom_op("lightning_megatron::run_expert_module_backward", mutates_args=())
def _run_backward(grad_TH: Tensor, hidden_TH: Tensor, probs_TK: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    leaves, output_TH = held_by(kept)
    with with_autograd():
        torch.autograd.backward(output_TH, grad_TH)
    # The last is that of the anchor: a backward whose results nobody wants would be left out.
    hidden, probs = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)
    return hidden, probs, torch.zeros((), device="cpu")


@_run_backward.register_fake
def _(grad_TH: Tensor, hidden_TH: Tensor, probs_TK: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    of_hidden, of_probs = (one.new_empty(one.shape) for one in (hidden_TH, probs_TK))
    return of_hidden, of_probs, torch.empty((), device="cpu")


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[2], output[1])


def _backward(ctx: Any, grad_TH: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden, probs, anchor = _run_backward(grad_TH, *ctx.saved_tensors)
    return hidden, None, probs, anchor, None, None, None


_run.register_autograd(_backward, setup_context=_save)
