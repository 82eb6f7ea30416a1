"""Gradients of weights that ranks of an axis hold whole, among linears or tokens that are cut.

A rank computes the whole gradient of such a weight, or, where it is used on a part of the features or tokens, a term of
it. Which one cannot be read off a network: so before the first step a module is differentiated as it is cut and as it
was written, and gradients that are terms are summed over the axis where the module's calls use the weight.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_megatron.any_module.deviation import coarsest, tolerance_of
from lightning_megatron.comm import collectives, differentiable
from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import ShardedParameter
from lightning_megatron.tensor.linear import ParallelLinear

# How far stand-ins are from the weights, of the largest of these.
_MOVED = 0.02


def whole_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a module that no axis cuts, by name, but for those of linears that are cut."""
    linears = [one for one in module.modules() if isinstance(one, ParallelLinear)]
    theirs = {id(weight) for one in linears for weight in one.parameters()}
    return {
        name: weight
        for name, weight in module.named_parameters()
        if weight.is_floating_point()
        and weight.numel()
        and id(weight) not in theirs
        and not (isinstance(weight, ShardedParameter) and weight.shard.global_shape != tuple(weight.shape))
    }


def widened(x: Tensor) -> Tensor:
    """Numbers of 16 bits in 32, and others as they are: products in 16 bits do not tell small gradients apart."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@contextmanager
def stand_ins(
    module: nn.Module, replaced: Iterable[Tensor], cast: Callable[[Tensor], Tensor] = Tensor.detach
) -> Iterator[None]:
    """Inside the block others stand in for some weights of a module, and its buffers are what `cast` makes of them.

    The stand-ins, cast too, take gradients, and are a little off: a gradient is not zero there because training begins
    so.
    """
    wanted = {id(one) for one in replaced}
    made: dict[int, Tensor] = {}
    before: list[tuple[dict[str, Any], str, Tensor]] = []

    def moved(weight: Tensor) -> nn.Parameter:
        values = cast(weight.detach())
        scale = _MOVED * max(float(values.abs().max()), _MOVED) if values.numel() else 0.0
        pattern = torch.arange(values.numel(), dtype=torch.float32, device=values.device).cos().view(values.shape)
        found = nn.Parameter(values + scale * pattern.to(values.dtype))
        # A linear would add the gradient of a weight without hooks to what an optimizer finds.
        found.register_hook(lambda gradient: None)
        return found

    with torch.inference_mode(False), torch.no_grad():
        for owner in module.modules():
            for key, weight in owner._parameters.items():
                if weight is not None and id(weight) in wanted and weight.is_floating_point():
                    before.append((owner._parameters, key, weight))
                    if id(weight) not in made:
                        made[id(weight)] = moved(weight)
            for key, buffer in owner._buffers.items():
                if buffer is not None:
                    before.append((owner._buffers, key, buffer))
                    made[id(buffer)] = cast(buffer)
    try:
        for held, key, tensor in before:
            held[key] = made[id(tensor)]
        yield
    finally:
        for held, key, tensor in before:
            held[key] = tensor


def copied(value: Any) -> Any:
    """A copy of nested tensors, of which those that take gradients take their own."""

    def copy(one: Any) -> Any:
        return one.detach().clone().requires_grad_(one.requires_grad) if isinstance(one, Tensor) else one

    return tree_map(copy, value)


@contextmanager
def recording() -> Iterator[None]:
    """Inside the block gradients are recorded, apart from a recomputation that the block may stand in."""
    identity = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.enable_grad(), identity:
        yield


def gradients(number: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of tensors by a number [] that is computed from them, by name."""
    held = list(tensors.values())
    if not number.requires_grad or not held:
        return {name: torch.zeros_like(one) for name, one in tensors.items()}
    given = torch.autograd.grad(number, held, allow_unused=True, materialize_grads=True)
    return dict(zip(tensors, given, strict=True))


class Told(NamedTuple):
    """What gradients on ranks are, by name."""

    terms: list[str]
    """Terms of a sum."""
    noise: list[str]
    """Zero but for rounding, which differs from rank to rank: nobody can tell."""
    wrong: dict[str, str]
    """Neither whole nor a term, and what differs, in words."""


def told_apart(found: Mapping[str, Tensor], meant: Mapping[str, Tensor], axis: Axis) -> Told:
    """What the gradients are that ranks of the axis found, by those that are meant. Collective over the axis."""
    told = Told([], [], {})
    if not meant:
        return told
    sums = {name: collectives.all_reduce(one, axis) for name, one in found.items()}
    sizes = [[float((of[name] - one).abs().max()) for name, one in meant.items()] for of in (found, sums)]
    sizes.append([float(one.abs().max()) for one in meant.values()])
    device = next(iter(meant.values())).device
    # Ranks tell alike: of numbers that they have from each other.
    as_whole, as_terms, largests = collectives.all_reduce(
        torch.tensor(sizes, dtype=torch.float64, device=device), axis, "max"
    ).tolist()
    noise = max(torch.finfo(coarsest(one)).eps * size for one, size in zip(meant.values(), largests, strict=True))
    for name, error, error_of_sum, largest in zip(meant, as_whole, as_terms, largests, strict=True):
        # A gradient that is zero but for rounding is rounded as those beside it.
        if not min(error, error_of_sum) <= max(tolerance_of(meant[name]) * largest, 64 * noise):
            told.wrong[name] = f"off by {min(error, error_of_sum) / max(largest, 1e-300):.0e} of the largest"
        elif error and largest <= noise:
            told.noise.append(name)
        elif error_of_sum < error:
            told.terms.append(name)
    return told


class SummedInCalls:
    """Sums the gradients of weights of a module over an axis, where calls of this module use them while `is_on()`.

    Uses of the same weights elsewhere keep their gradients. Of those in `averaged` it takes the mean: copies of them
    stay alike.
    """

    def __init__(
        self,
        module: nn.Module,
        summed: Iterable[str],
        axis: Axis,
        is_on: Callable[[], bool],
        averaged: Iterable[str] = (),
    ) -> None:
        self._axis, self._is_on = axis, is_on
        held = dict(module.named_parameters())
        wanted = {id(held[name]) for name in (*summed, *averaged) if name in held}
        are_averaged = {id(held[name]) for name in averaged if name in held}
        self._places: list[tuple[dict[str, Any], str, bool]] = [
            (owner._parameters, key, id(weight) in are_averaged)
            for owner in module.modules()
            for key, weight in owner._parameters.items()
            if id(weight) in wanted
        ]
        self._before: list[tuple[dict[str, Any], str, Any]] = []
        module.register_forward_pre_hook(self.enter)
        module.register_forward_hook(self._leave, always_call=True)

    def enter(self, *_: Any) -> None:
        """Begins a call."""
        if not torch.is_grad_enabled() or not self._is_on():
            return
        made: dict[int, Tensor] = {}
        for held, key, is_averaged in self._places:
            weight: Any = held[key]
            self._before.append((held, key, weight))
            if id(weight) not in made:
                copy = differentiable.copy_of_mean if is_averaged else differentiable.copy
                made[id(weight)] = copy(weight, self._axis)
            held[key] = made[id(weight)]

    def _leave(self, *_: Any) -> None:
        while self._before:
            held, key, weight = self._before.pop()
            held[key] = weight
