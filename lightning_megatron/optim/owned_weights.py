"""Weights of optimizers that read whole ones, where ranks hold parts of them: for a step each is whole at its owner.

    before a step    the parts of a weight and of its gradient go to its owner (`optim.owners`)
    step             the optimizer has whole weights and their states in place of the parts; on other ranks nothing
    after it         the parts come back

Between steps optimizers have the parts, with the states of a whole weight at its owner. A weight that is padded, and
cut by no axis, is its own rank's. Experts that two axes cut become whole over one and then over the other.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.mesh import Axis
from lightning_megatron.optim.owners import PartExchange, spread, whole_shape
from lightning_megatron.sharding import Shard, shard_of


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """A weight as one axis cuts it, and the rank on it that owns it."""

    shard: Shard
    axis: Axis
    owner: int


@dataclass(frozen=True, kw_only=True)
class _Exchanged:
    """Weights whose parts this rank has given to their owners over an axis, and those that it owns, whole."""

    weights: list[nn.Parameter]
    exchange: PartExchange
    wholes: dict[nn.Parameter, Tensor]


class OwnedWeights:
    """Weights of these optimizers of which ranks hold parts, with an owner for each among the ranks that cut it."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.optimizers = frozenset(optimizers)
        """Optimizers that read whole weights."""
        self._cuts: dict[Tensor, list[_Cut]] = {}
        self._loads: dict[Axis, list[float]] = {}
        # Of the step under way: parameters of groups, exchanges, and the whole weight in place of each that is owned.
        self._groups: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
        self._exchanges: list[list[_Exchanged]] = []
        self._wholes: dict[nn.Parameter, nn.Parameter] = {}
        for optimizer in self.optimizers:
            self._assign(optimizer)

    def owns(self, stepped: Tensor) -> bool | None:
        """Whether this rank has the states of a weight; None where it has its part of them, as of its values."""
        cuts = self._cuts.get(stepped)
        return None if cuts is None else all(cut.owner == cut.axis.rank for cut in cuts)

    def _assign(self, optimizer: Optimizer) -> None:
        """Gives owners to the weights of an optimizer that have none yet."""
        new = [one for group in optimizer.param_groups for one in group["params"] if one not in self._cuts]
        cut = {one: shards for one in new if (shards := _shards(one))}
        by_axis: dict[Axis, list[tuple[nn.Parameter, Shard]]] = {}
        for one, shards in cut.items():
            for shard in shards:
                assert shard.axis is not None
                by_axis.setdefault(shard.axis, []).append((one, shard))
        for axis, own in by_axis.items():
            sizes = [float(torch.Size(shard.global_shape).numel()) for _, shard in own]
            for (one, shard), owner in zip(
                own, spread(sizes, axis.size, self._loads.setdefault(axis, [])), strict=True
            ):
                self._cuts.setdefault(one, []).append(_Cut(shard=shard, axis=axis, owner=owner))

    @torch.no_grad()
    def begin_step(self, optimizer: Optimizer) -> None:
        """Gives the optimizer, which is about to step, whole weights. Collective over the axes that cut them."""
        if optimizer not in self.optimizers:
            return
        self._assign(optimizer)
        own = [one for group in optimizer.param_groups for one in group["params"] if one in self._cuts]
        own = [one for one in own if one.grad is not None]
        kinds: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for one in own:
            axes = [cut.axis for cut in self._cuts[one]]
            kinds.setdefault((*((axis.name, axis.ranks) for axis in axes), str(one.dtype)), []).append(one)
        for kind in sorted(kinds, key=str):
            self._exchanges.append(self._gather(kinds[kind]))
        self._groups = [(group, group["params"]) for group in optimizer.param_groups]
        for group, params in self._groups:
            is_given = [one.grad is not None and one in self._cuts for one in params]
            stepped = [self._wholes.get(one) if given else one for one, given in zip(params, is_given, strict=True)]
            group["params"] = [one for one in stepped if one is not None]
        for one, whole in self._wholes.items():
            _move_state(optimizer, one, whole)

    def _gather(self, weights: list[nn.Parameter]) -> list[_Exchanged]:
        """Gives the parts of weights that the same axes cut to their owners, over one axis after the other."""
        exchanges = []
        held = {one: (one.detach(), one.grad) for one in weights if one.grad is not None}
        for level in range(len(self._cuts[weights[0]])):
            cuts = [self._cuts[one][level] for one in weights]
            shards, owners = [cut.shard for cut in cuts], [cut.owner for cut in cuts]
            parts = [
                cut.shard.valid(held[one][kind]) for kind in (0, 1) for one, cut in zip(weights, cuts, strict=True)
            ]
            wholes, _ = PartExchange(cuts[0].axis, shards * 2, owners * 2).gather(parts)
            held = {one: (wholes[i], wholes[i + len(weights)]) for i, one in enumerate(weights) if i in wholes}
            own = {one: whole for one, (whole, _) in held.items()}
            exchanges.append(
                _Exchanged(weights=weights, exchange=PartExchange(cuts[0].axis, shards, owners), wholes=own)
            )
            weights = list(held)
            if not weights:
                break
        for one, (weight, gradient) in held.items():
            whole = self._wholes[one] = nn.Parameter(weight)
            whole.grad = gradient
        return exchanges

    @torch.no_grad()
    def end_step(self, optimizer: Optimizer) -> None:
        """Gives the optimizer, which has stepped, its parts of the new weights. Collective over the axes that cut
        them."""
        if optimizer not in self.optimizers:
            return
        for one, whole in self._wholes.items():
            _move_state(optimizer, whole, one)
        for group, params in self._groups:
            group["params"] = params
        for exchanges in self._exchanges:
            self._give_back(exchanges)
        self._groups, self._exchanges, self._wholes = [], [], {}

    def _give_back(self, exchanges: list[_Exchanged]) -> None:
        for level, exchanged in reversed(list(enumerate(exchanges))):
            # Those of the last level were stepped in place.
            wholes = [exchanged.wholes.get(one) for one in exchanged.weights]
            found = {index: whole for index, whole in enumerate(wholes) if whole is not None}
            memory = exchanged.weights[0].new_empty(0)
            for one, part in zip(exchanged.weights, exchanged.exchange.give_back(found, memory), strict=True):
                target = one.detach() if level == 0 else exchanges[level - 1].wholes[one]
                valid = self._cuts[one][level].shard.valid(target)
                valid.copy_(part.view(valid.shape))


def _shards(parameter: Tensor) -> list[Shard]:
    """A weight as one axis after another cuts it, from this rank's part to the whole one; none where all ranks have it
    whole."""
    shard, found = shard_of(parameter), []
    if shard.axis is not None and (shard.axis.size > 1 or parameter.shape != shard.global_shape):
        found.append(replace(shard, leading=None, global_shape=whole_shape(shard)))
    if shard.leading is not None and shard.leading.size > 1:
        num_own, *_ = whole_shape(shard)
        found.append(Shard(global_shape=shard.global_shape, dim=0, axis=shard.leading, local_length=num_own))
    return found


def _move_state(optimizer: Optimizer, source: nn.Parameter, target: nn.Parameter) -> None:
    if (state := optimizer.state.pop(source, None)) is not None:
        optimizer.state[target] = state
