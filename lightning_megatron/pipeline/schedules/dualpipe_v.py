"""DualPipeV: DeepSeek's bidirectional DualPipe cut in half, each rank holding two stages of a V.

Two streams meet on every rank: forwards on their way down the V with backwards on their way out, and forwards on their
way up with backwards on their way in. In the steady state each forward is paired with a backward of the other stage;
with `is_overlapped` the two of a pair run side by side, otherwise one after the other. Some backwards at both ends are
cut in two (`I` and `W`), so that the half that nobody waits for fills the bubble.

    pp 2, rank 1    0F0 0F1 0F2 3F0  3I0 3W0 3F1  (0F3 3B1)  (3F2 0B0)  3B2  (3F3 0B1)  3B3 0I2 0W2 0I3 0W3
"""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import pairwise

from lightning_megatron.pipeline.schedule import Action, Kind, Order, require_counts
from lightning_megatron.pipeline.schedule_spec import Formula, Schedule, ScheduleSpec
from lightning_megatron.pipeline.simulate import Costs


def dualpipe_v(*, pp: int, microbatches: int) -> tuple[Order, frozenset[Action]]:
    """The DualPipeV order, rank r holding stages pp - 1 - r and pp + r, and the forwards paired with the backward after
    them.

    The ranks are counted backwards from the source's, so that the last stage is on the last rank. A rank saves at most
    2*pp + 1 activations of its half as large stages. With F, I and W alike and pairs one after the other, the bubble is
    (pp - 1)/(6*microbatches + pp - 1) for microbatches >= 2*pp. Of fewer, the order is that of 2*pp without those that
    there are not: no other microbatch waits for them.
    Raises ValueError for fewer than one rank or microbatch.
    Source: DeepSeek-V3 Technical Report (arXiv 2412.19437), section 3.2.1, and the repository deepseek-ai/DualPipe,
    `dualpipev.py`; the cut in half is by Sea AI Lab.
    """
    require_counts(pp=pp, microbatches=microbatches)
    makers = [_RankOrder(rank, pp, max(microbatches, 2 * pp)) for rank in range(pp)]
    pairs = frozenset(
        forward
        for maker in makers
        for forward, backward in pairwise(maker.actions)
        if forward in maker.overlapped and max(forward.microbatch, backward.microbatch) < microbatches
    )
    return tuple(
        tuple(action for action in maker.actions if action.microbatch < microbatches) for maker in makers
    ), pairs


class _RankOrder:
    """The order of one rank as it is made; every compute of a stage takes the microbatches in turn."""

    def __init__(self, rank: int, pp: int, microbatches: int) -> None:
        self.actions: list[Action] = []
        self.overlapped: set[Action] = set()
        self._nexts: defaultdict[tuple[Kind, int], int] = defaultdict(int)
        self._weights: deque[Action] = deque()
        # Ranks that a microbatch passes before this one, on its way in and on its way out.
        before = pp - 1 - rank
        down, up = before, pp + rank
        for _ in range(2 * rank):
            self._forward(down)
        for _ in range(before + 1):
            self._forward(down)
            self._forward(up)
        for _ in range(rank):
            self._backward_input(up)
            self._weight()
            self._forward(up)
        for turn in range(microbatches - 2 * pp + before + 1):
            # The rank at the turn of the V begins with no pair: its first forward need not wait for the backward.
            self._forward(down, is_paired=turn > 0 or rank > 0)
            self._backward(up)
            self._forward(up, is_paired=True)
            self._backward(down)
        for _ in range(rank):
            self._backward(up)
            self._forward(up, is_paired=True)
            self._backward(down)
        self._cool_down(down, up, rank, before)

    def _cool_down(self, down: int, up: int, rank: int, before: int) -> None:
        """The backwards that are left; the later ones defer their `W`, since other ranks wait for each `I`."""
        for number, stage in enumerate([up, down] * (before + 1)):
            if number <= before:
                self._backward(stage)
            else:
                self._backward_input(stage)
        for _ in range(rank):
            self._weight()
            self._backward_input(down)
        while self._weights:
            self._weight()

    def _add(self, kind: Kind, stage: int) -> Action:
        """The next microbatch's compute."""
        action = Action(kind, stage, self._nexts[kind, stage])
        self._nexts[kind, stage] += 1
        self.actions.append(action)
        return action

    def _forward(self, stage: int, *, is_paired: bool = False) -> None:
        forward = self._add(Kind.FORWARD, stage)
        if is_paired:
            self.overlapped.add(forward)

    def _backward(self, stage: int) -> None:
        action = self._add(Kind.BACKWARD_INPUT, stage)
        self.actions[-1] = Action(Kind.BACKWARD, stage, action.microbatch)

    def _backward_input(self, stage: int) -> None:
        action = self._add(Kind.BACKWARD_INPUT, stage)
        self._weights.append(Action(Kind.BACKWARD_WEIGHT, stage, action.microbatch))

    def _weight(self) -> None:
        if self._weights:
            self.actions.append(self._weights.popleft())


def _bubble(schedule: Schedule, costs: Costs) -> Formula | None:
    p, m = schedule.pp, schedule.microbatches
    if not costs.forward == costs.backward_input == costs.backward_weight == costs.backward / 2 or m < 2 * p:
        return None
    return Formula(text="(p - 1)/(6 m + p - 1)", bubble=(p - 1) / (6 * m + p - 1))


DUALPIPE_V = ScheduleSpec(
    name="dualpipe_v",
    make=lambda schedule: dualpipe_v(pp=schedule.pp, microbatches=schedule.microbatches)[0],
    make_overlapped=lambda schedule: dualpipe_v(pp=schedule.pp, microbatches=schedule.microbatches),
    min_chunks=2,
    max_chunks=2,
    placement="v",
    splits_backward=True,
    bubble=_bubble,
)
