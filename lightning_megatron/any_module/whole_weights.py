"""Gradients of weights that ranks of an axis hold whole, among linears or tokens that are cut.

A rank computes the whole gradient of such a weight, or, where it is used on a part of the features or tokens, a term of
it. Which one cannot be read off a network: so before the first step it is differentiated as it is cut and as it was
written, and gradients that are terms are summed over the axis in every backward from then on.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_megatron.any_module.deviation import coarsest, tolerance_of
from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import ShardedParameter
from lightning_megatron.tensor.linear import ParallelLinear


def whole_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trained weights of a module that no axis cuts, by name, but for those of linears that are cut."""
    # Such linears add the gradients of their biases, too, where an optimizer finds them.
    linears = [one for one in module.modules() if isinstance(one, ParallelLinear)]
    theirs = {id(weight) for one in linears for weight in one.parameters()}
    return {
        name: weight
        for name, weight in module.named_parameters()
        if weight.requires_grad
        and weight.numel()
        and id(weight) not in theirs
        and not (isinstance(weight, ShardedParameter) and weight.shard.global_shape != tuple(weight.shape))
    }


def gradients(
    weights: Mapping[str, nn.Parameter], others: Iterable[nn.Parameter], run: Callable[[], Tensor]
) -> dict[str, Tensor]:
    """The gradients of weights by the number [] that `run` returns, by name; those of others are not computed."""
    # Linears add the gradients of their weights where an optimizer finds them.
    off = [one for one in {*others} - {*weights.values()} if one.requires_grad]
    for one in off:
        one.requires_grad_(False)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            number = run()
            held = list(weights.values())
            if not number.requires_grad:
                # No weight is used.
                given: tuple[Tensor, ...] = tuple(torch.zeros_like(one) for one in held)
            else:
                given = torch.autograd.grad(number, held, allow_unused=True, materialize_grads=True)
    finally:
        for one in off:
            one.requires_grad_()
    return dict(zip(weights, given, strict=True))


def copied(value: Any) -> Any:
    """A copy of nested tensors, through which gradients can be computed where inference mode is off."""
    return tree_map(lambda one: one.detach().clone() if isinstance(one, Tensor) else one, value)


def terms_among(
    found: Mapping[str, Tensor], meant: Mapping[str, Tensor], axis: Axis
) -> tuple[list[str], dict[str, str]]:
    """Names of the gradients of which ranks of the axis found terms, and of those that are neither that nor whole.

    The second have what differs, in words.
    """
    if not meant:
        return [], {}
    sums = {name: collectives.all_reduce(one, axis) for name, one in found.items()}
    largest = {name: float(one.abs().max()) for name, one in meant.items()}
    errors = [[float((of[name] - one).abs().max()) for name, one in meant.items()] for of in (found, sums)]
    device = next(iter(meant.values())).device
    as_whole, as_terms = collectives.all_reduce(torch.tensor(errors, device=device), axis, "max").tolist()
    terms, wrong = [], {}
    for name, one, error, error_of_sum in zip(meant, meant.values(), as_whole, as_terms, strict=True):
        # A gradient that is zero but for rounding is rounded as those beside it.
        rounding = 64 * torch.finfo(coarsest(one)).eps * max(largest.values())
        if not min(error, error_of_sum) <= max(tolerance_of(one) * largest[name], rounding):
            wrong[name] = f"off by {min(error, error_of_sum) / max(largest[name], 1e-300):.0e} of the largest"
        elif error_of_sum < error:
            terms.append(name)
    return terms, wrong


def sum_in_backward(weight: nn.Parameter, axis: Axis) -> None:
    """Sums the gradient of a weight over the axis in each backward, before it is added to others."""
    weight.register_hook(lambda gradient: collectives.all_reduce(gradient, axis))
