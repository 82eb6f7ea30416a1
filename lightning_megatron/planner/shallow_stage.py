"""Stages of few layers: of many equal ones in a row a few run, and one stands for all those between the ends.

A stage's layers repeat with a period: one layer, or several where kinds alternate. The first, the second and the last
period run; what the second does to memory, in a forward and in a backward, is counted for all between the ends.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

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
