"""Stages of few layers: of many equal ones in a row a few run, and one stands for all those between the ends.

A stage's layers repeat with a period: one layer, or several where kinds alternate. The first, the second and the last
period run; what the second does to memory, in a forward and in a backward, is counted for all between the ends.
A network's own forward calls all of its layers, and those that do not run return what they are given.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_megatron.any_module.skeleton import put_together, taken_apart
from lightning_megatron.pipeline.module import StagePart, StageRunner
from lightning_megatron.transformer.recompute import RecomputeConfig, RecomputeRunner, groups_of

_LONGEST_PERIOD = 8


@dataclass(frozen=True, eq=False)
class Block:
    """Neighbours in a stage that run, and how often they count. Each call of a stage has its own."""

    indices: range
    times: int = 1


def blocks_of(kinds: Sequence[object]) -> list[Block]:
    """The neighbours that stand for a sequence of such kinds, in order."""
    blocks: list[Block] = []
    start = 0
    while start < len(kinds):
        period, count = max(
            ((period, _repeats(kinds, start, period)) for period in range(1, _LONGEST_PERIOD + 1)),
            key=lambda one: one[0] * max(one[1] - 3, 0),
        )
        if count > 3:
            last = start + (count - 1) * period
            blocks += [Block(range(start, start + period)), Block(range(start + period, start + 2 * period), count - 2)]
            blocks.append(Block(range(last, last + period)))
            start = last + period
        else:
            blocks.append(Block(range(start, start + 1)))
            start += 1
    return blocks


def _repeats(kinds: Sequence[object], start: int, period: int) -> int:
    """How often the kinds of a period follow one another."""
    count = 1
    while list(kinds[start + count * period : start + (count + 1) * period]) == list(kinds[start : start + period]):
        count += 1
    return count


class ShallowStage:
    """Runs the parts of a stage that stand for all of them, as a stage's runner.

    `kinds` has equal values for parts that do the same. `enter_forward` and `enter_backward` are called with a block
    when the forward or the backward of one of its groups begins.
    """

    def __init__(
        self,
        inner: StageRunner,
        recompute: RecomputeConfig,
        kinds: Mapping[nn.Module, object],
        enter_forward: Callable[[Block], None],
        enter_backward: Callable[[Block], None],
    ) -> None:
        self._inner, self._recompute, self._kinds = inner, recompute, kinds
        self._enter_forward, self._enter_backward = enter_forward, enter_backward
        self.stands_for: dict[nn.Module, list[nn.Module]] = {}
        """Modules that did not run, by the one that stands for them."""

    def __call__(self, parts: Sequence[StagePart], hidden: Any) -> Any:
        groups = groups_of(self._recompute, [part.is_layer for part in parts])
        kinds = [
            (is_recomputed, *(self._kinds[parts[index].module] for index in indices))
            for indices, is_recomputed in groups
        ]
        run, num_recomputed = [], 0
        for block in blocks_of(kinds):
            for index in block.indices:
                members, is_recomputed = groups[index]
                run += [self._watched(parts[one], block, one == members[0], one == members[-1]) for one in members]
                num_recomputed += is_recomputed
                for number in range(1, block.times):
                    skipped = groups[index + number * len(block.indices)][0]
                    for one, other in zip(members, skipped, strict=True):
                        left = self.stands_for.setdefault(parts[one].module, [])
                        if parts[other].module not in left:
                            left.append(parts[other].module)
        inner = self._inner
        if self._recompute.granularity == "full" and self._recompute.method == "block" and num_recomputed:
            assert isinstance(inner, RecomputeRunner)
            inner = inner.with_config(replace(self._recompute, num_layers=num_recomputed))
        return inner(run, hidden)

    def _watched(self, part: StagePart, block: Block, is_first: bool, is_last: bool) -> StagePart:
        """The part, whose beginnings are reported where it is the first or the last of a group."""

        def run(hidden: Any) -> Any:
            if is_first:
                self._enter_forward(block)
            output = part.run(hidden)
            if is_last:
                for tensor in tree_leaves(output):
                    if isinstance(tensor, Tensor) and tensor.requires_grad:
                        tensor.register_hook(lambda _: self._enter_backward(block))
            return output

        return part._replace(run=run)


class LayersDifferError(BaseException):
    """Layers of a network are not alike, and none can stand for others: their arguments differ, or what they return is
    not like what they are given. A BaseException, so `except Exception` of the network's code lets it pass."""


class ShallowLayers:
    """Runs the layers of a stage that stand for all of them, where a network's own forward calls all.

    `kinds` has the layers in order, with equal values for those that do the same. `enter_forward` and `enter_backward`
    are called with a block when its forward or backward begins, and with None when another layer is called. A call
    raises LayersDifferError where that shows that layers differ.
    """

    def __init__(
        self,
        kinds: Mapping[nn.Module, object],
        enter_forward: Callable[[Block | None], None],
        enter_backward: Callable[[Block], None],
    ) -> None:
        self._kinds = list(kinds.values())
        self._enter_forward, self._enter_backward = enter_forward, enter_backward
        self.stands_for: dict[nn.Module, list[nn.Module]] = {}
        """Modules that do not run, by the one that stands for them."""
        self._blocks: dict[int, Block] = {}
        # Of the block that ran last: what its layers were given, and what the last of them returned.
        self._given: list[Any] = []
        self._text, self._others = "", list[Tensor]()
        # By index of a layer that does not run: which one of its block stands for it.
        self._places: dict[int, int] = {}
        layers, start = list(kinds), 0
        for block in blocks_of(self._kinds):
            period = len(block.indices)
            for index in range(start, start + period * block.times):
                if (place := (index - start) % period) != index - start:
                    self._places[index] = place
                    self.stands_for.setdefault(layers[start + place], []).append(layers[index])
            start += period * block.times
        for index, layer in enumerate(layers):
            layer.__dict__["forward"] = partial(self._run, index, layer.forward)

    def _run(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if index == 0:
            # Each call of the stage has its own.
            self._blocks = {one: block for block in blocks_of(self._kinds) for one in block.indices}
        given = tree_map(_description, (args, kwargs))
        if index in self._places:
            # Not before: what called the last layer has let go of its input by now.
            self._enter_forward(None)
            if given != self._given[self._places[index]]:
                raise LayersDifferError(f"layer {index} is given other arguments than the one that stands for it")
            return self._passed_on(args, kwargs)
        block = self._blocks[index]
        if index == block.indices.start:
            self._given = []
            self._enter_forward(block)
        self._given.append(given)
        output = forward(*args, **kwargs)
        if index == block.indices.stop - 1:
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: self._enter_backward(block))
            self._others = []
            if block.times > 1:
                self._note(output)
        return output

    def _note(self, output: Any) -> None:
        """Notes what a layer returns whose block stands for others. Hidden states come first, and are not kept."""
        self._text, tensors = taken_apart(output)
        hidden = next(one for one in tree_leaves(self._given[0]) if isinstance(one, _Described))
        if not tensors or _description(tensors[0]) != hidden:
            raise LayersDifferError("a layer does not return what the next one is given")
        self._others = tensors[1:]

    def _passed_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor))
        return put_together(self._text, [hidden, *self._others])


@dataclass(frozen=True)
class _Described:
    """What a layer may do otherwise by, of a tensor."""

    shape: tuple[int, ...]
    dtype: Any


def _description(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Described(tuple(value.shape), value.dtype)
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value)


# --- kinds of layers --------------------------------------------------------------------------------------------------

_OF_ALL_MODULES = frozenset(vars(nn.Module()))


def kinds_of_layers(layers: Sequence[nn.Module]) -> list[tuple[Any, ...]]:
    """What each layer is, as far as modules tell: equal for layers that are made alike.

    Numbers that count the layers are left out.
    """
    traits = [_traits(layer) for layer in layers]
    counted = {
        key
        for key, first in traits[0].items()
        if type(first) is int and all(of.get(key) == first + index for index, of in enumerate(traits))
    }
    return [tuple((key, value) for key, value in of.items() if key not in counted) for of in traits]


def _traits(layer: nn.Module) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for name, module in layer.named_modules():
        found[name, ""] = type(module)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            found[name, key] = None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for key, value in vars(module).items():
            if key not in _OF_ALL_MODULES:
                found[name, key] = _trait(value)
    return found


def _trait(value: Any) -> Any:
    """A value as others are compared with it; what has no plain one is equal to itself alone."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_trait, value))
    if isinstance(value, (set, frozenset)):
        return frozenset(map(_trait, value))
    if isinstance(value, partial):
        return _trait(value.func), _trait(value.args), _trait(value.keywords)
    if isinstance(value, dict):
        return tuple((_trait(key), _trait(one)) for key, one in value.items())
    return type(value), id(value)
