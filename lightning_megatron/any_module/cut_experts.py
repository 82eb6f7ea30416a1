"""Experts of a network that was written for one device, spread over `ep`, or without it over `tp`.

Modules of experts, as transformers has them, hold the weights of all experts, cut along their first dim, and are called
with tokens, the experts that each token chose, and their probabilities. On a rank they have the weights of its own
experts, and are called with rows, each with the one expert that it is for.

    over   rows                                     outputs
    ep     travel to the ranks of their experts     travel back
    tp     are on all ranks: a rank takes its own   are added over tp

T tokens, K experts of each, R rows, H hidden, L own experts.
"""

from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Axis, Sizes
from lightning_megatron.moe.experts import ExpertAxes
from lightning_megatron.moe.token_dispatcher import (
    AllToAllTokenDispatcher,
    DispatchWork,
    SharedTokenDispatcher,
    TokenDispatcher,
)
from lightning_megatron.sharding import Shard, ShardedParameter

_THEIR_MARK = "_is_expert_parallel"
"""The attribute that modules of experts have in transformers."""
_MARK = "_lightning_megatron_experts"
"""The attribute of a module that a plan names as one of experts."""


def expert_modules(network: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules of a network that hold experts as transformers has them, or a plan names, by name."""
    for name, module in network.named_modules():
        if has_experts(module) and isinstance(getattr(module, "num_experts", None), int):
            yield name, module


def has_experts(module: nn.Module) -> bool:
    """Whether a module is marked as one of experts, by transformers or by a plan."""
    return getattr(module, _THEIR_MARK, None) is not None or _MARK in vars(module)


def mark_experts(module: nn.Module) -> None:
    """Marks a module as one of experts."""
    module.__dict__[_MARK] = True


def misfit_of_experts(module: nn.Module) -> str:
    """Why a module is not one of experts as `ModelPlan.experts` says; empty where it is."""
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int):
        return "has no num_experts, the number of its experts"
    wrong = [name for name, weight in module.named_parameters() if "." in name or weight.shape[:1] != (count,)]
    if wrong:
        return f"has weights without a row for each of its {count} experts: {', '.join(wrong)}"
    if kept := expert_buffers(module):
        return _misfit_of_buffers(kept)
    if len(signature(module.forward).parameters) != len(("tokens", "experts", "probabilities")):
        return "must be called with tokens [T, H], the experts that each chose [T, K] and their probabilities [T, K]"
    return ""


def expert_weights(module: Any) -> list[tuple[str, nn.Parameter]]:
    """The weights of a module of experts that have a row for each expert, by name."""
    named = module.named_parameters(recurse=False)
    return [(name, weight) for name, weight in named if weight.shape[:1] == (module.num_experts,)]


def expert_buffers(module: Any) -> list[str]:
    """Names of the buffers of a module of experts that have a row for each expert, and that no rank has a part of."""
    return [name for name, buffer in module.named_buffers() if buffer.shape[:1] == (module.num_experts,)]


def _misfit_of_buffers(names: list[str]) -> str:
    return (
        f"has buffers with a row for each of its experts: {', '.join(names)}; buffers are whole on every rank: make "
        "them parameters with requires_grad=False, which are cut and saved as its weights are"
    )


def expert_faults(network: nn.Module, sizes: Sizes) -> list[str]:
    """Errors of experts that ranks of these sizes cannot share, one sentence each."""
    counts: dict[int, str] = {module.num_experts: name for name, module in expert_modules(network)}
    if sizes.ep * sizes.tp == 1 or not counts:
        return []
    faults = [
        f"{name} ({type(module).__name__}) {_misfit_of_buffers(kept)}"
        for name, module in expert_modules(network)
        if (kept := expert_buffers(module))
    ]
    if sizes.ep == 1:
        return faults
    faults += [
        f"{name} has {count} experts, which must be a multiple of expert_model_parallel_size ({sizes.ep}); it may be "
        + ", ".join(str(fit) for fit in range(1, count + 1) if count % fit == 0)
        for count, name in counts.items()
        if count % sizes.ep
    ]
    if sizes.etp != sizes.tp:
        faults.append(
            f"expert_tensor_parallel_size ({sizes.etp}) must be tensor_model_parallel_size ({sizes.tp}) for the "
            f"experts of {type(network).__name__}, of which ranks of tp hold the same"
        )
    return faults


def cut_experts(network: nn.Module, axes: ExpertAxes) -> None:
    """Leaves each rank of ep its own experts, in place."""
    # Ranks of etp hold the same experts, and each brings the same tokens.
    alone = Axis.alone(axes.ep.ranks[axes.ep.rank], "etp")
    for _, module in expert_modules(network):
        dispatcher = AllToAllTokenDispatcher(module.num_experts, ep=axes.ep, etp=alone)
        _Dispatched(module, dispatcher, data=axes.edp, replicas=(axes.etp,))


def share_experts(network: nn.Module, tp: Axis) -> None:
    """Leaves each rank of tp its own experts, in place, where the ranks divide them."""
    for module in shared_experts(network, tp.size):
        _Dispatched(module, SharedTokenDispatcher(module.num_experts, ep=tp, etp=Axis.alone(tp.ranks[tp.rank], "etp")))


def shared_experts(network: nn.Module, size: int) -> list[Any]:
    """The modules of experts that so many ranks of tp divide."""
    return [module for _, module in expert_modules(network) if module.num_experts % size == 0]


def token_dispatchers(network: nn.Module) -> Iterator[TokenDispatcher]:
    """What sends tokens to the experts of a network that are spread over ranks."""
    for module in network.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(owner := getattr(hook, "__self__", None), _Dispatched):
                yield owner.dispatcher


class _Dispatched:
    """What a module of experts does before its forward and after it; `kinds` are those of its weights' shards."""

    def __init__(self, module: Any, dispatcher: TokenDispatcher, **kinds: Any) -> None:
        self.dispatcher = dispatcher
        # One at a time: recomputation may leave the forward before it is combined.
        self._work: DispatchWork | None = None
        axis = dispatcher.ep
        for name, weight in expert_weights(module):
            # Leading: a rank whose experts no token chose steps them as the others do.
            shard = Shard(global_shape=tuple(weight.shape), leading=axis, **kinds)
            setattr(module, name, _own_experts(weight, axis, shard))
        module.num_experts //= axis.size
        module.register_forward_pre_hook(self._dispatch, with_kwargs=True)
        module.register_forward_hook(self._combine)

    def _dispatch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            # One operator runs the module with its hooks (`uncompiled_modules`).
            return None
        hidden_TH, expert_ids_TK, probs_TK = signature(module.forward).bind(*args, **kwargs).args
        self._work = work = self.dispatcher.dispatch(hidden_TH, expert_ids_TK, probs_TK)
        rows_RH, probs_R, groups = work.wait()
        own_L = torch.arange(len(groups.sizes_L), device=rows_RH.device)
        ids_R = own_L.repeat_interleave(groups.sizes_L, output_size=groups.num_rows)
        return (rows_RH, ids_R[:, None], probs_R[:, None]), {}

    def _combine(self, module: nn.Module, args: Any, output_RH: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return output_RH
        rows_RH, _, probs_R1 = args
        if not len(rows_RH):
            # What no row went through has no backward, and other ranks would wait for its messages.
            output_RH = rows_RH * probs_R1
        work, self._work = self._work, None
        assert work is not None, "a forward comes before"
        return work.combine(output_RH)


@torch.no_grad()
def _own_experts(weight: nn.Parameter, axis: Axis, shard: Shard) -> nn.Parameter:
    num_own = weight.shape[0] // axis.size
    part = weight.detach().narrow(0, axis.rank * num_own, num_own).clone()
    held = ShardedParameter(part, requires_grad=weight.requires_grad)
    held.shard = shard
    return held
