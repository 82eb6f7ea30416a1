"""Orders and plans from their text, and a slow and simple runner of plans over queues.

`0F0 [0SF0 0RB0 0RB0! 0SF0-] 0B0`: a forward, an exchange that posts a send and a receive, awaits the receive and
releases the send, and a backward.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from lightning_megatron.pipeline.lower import SENDS, P2PBatch, Plan, Step, lane_of, message_key, rank_of_stage
from lightning_megatron.pipeline.schedule import WHOLE_STAGE, Action, Kind, Order

KINDS = {kind.value: kind for kind in Kind}


def order_of_text(*lines: str) -> Order:
    """An order from the text of each rank."""
    return tuple(tuple(action for action, _ in actions_of(line)) for line in lines)


def plan_of_text(*lines: str) -> Plan:
    """A plan from the text of each rank."""
    return tuple(tuple(map(step_of, re.findall(r"\[[^]]*\]|\S+", line))) for line in lines)


def text_of(plan: Plan) -> list[str]:
    """The text of each rank."""
    return [" ".join(map(str, steps)) for steps in plan]


def step_of(text: str) -> Step:
    actions = actions_of(text)
    if not text.startswith("["):
        return actions[0][0]
    return P2PBatch(*(tuple(action for action, how in actions if how == mark) for mark in ("", "!", "-")))


def actions_of(text: str) -> list[tuple[Action, str]]:
    """Actions and their marks."""
    words = re.findall(r"(\d+)([A-Z]+)(\d*)([!-]?)", text)
    return [(Action(KINDS[kind], int(stage), int(m or WHOLE_STAGE)), mark) for stage, kind, m, mark in words]


class CannotRun(Exception):
    """A rank does what it may not, or gets a message that is another's."""


def runs_to_its_end(plan: Plan, microbatches: int) -> bool:
    """Whether a plan runs over queues, each compute once, and releases only what has left whatever the ranks' speed."""
    try:
        _, hands = run(plan)
        if not all(map(is_left_in_time, [plan] * len(plan), range(len(plan)))):
            return False
    except CannotRun:
        return False
    wanted = {
        f"{stage}{kind}{m}" for stage in range(len(rank_of_stage(plan))) for kind in "FBW" for m in range(microbatches)
    }
    return wanted <= set().union(*hands)


def is_left_in_time(plan: Plan, rank: int) -> bool:
    """Whether a rank could never come past a release before the receiver has come past its wait for that message."""
    return all(
        run(plan, held=message_key(send))[0][rank] <= index
        for index, step in enumerate(plan[rank])
        if isinstance(step, P2PBatch)
        for send in step.released
    )


def run(plan: Plan, held: int | None = None) -> tuple[list[int], list[set[str]]]:
    """Number of steps that each rank takes in repeated attempts, and what it holds by then.

    A rank that awaits the message with the key `held` stays there, however fast the others are.
    """
    ranks = rank_of_stage(plan)
    sends: dict[object, list[int]] = defaultdict(list)
    receives: dict[object, list[int]] = defaultdict(list)
    hands: list[set[str]] = [set() for _ in plan]
    ends = [0] * len(plan)

    def take(rank: int, name: str, needs: set[str]) -> None:
        if not needs <= hands[rank] or name in hands[rank]:
            raise CannotRun(name)
        hands[rank].add(name)

    def compute(rank: int, action: Action) -> None:
        stage, m, kind = action.stage, action.microbatch, action.kind
        if kind is Kind.BACKWARD_WEIGHT:
            take(rank, f"{stage}W{m}", {f"{stage}B{m}"})
            return
        # The half of a backward that makes the gradient of the input counts as `B`.
        name = "F" if kind is Kind.FORWARD else "B"
        source = stage + (-1 if name == "F" else 1)
        needs = {f"{stage}F{m}"} if name == "B" else set()
        if 0 <= source < len(ranks):
            needs.add(f"{source}{name}{m}" if ranks[source] == rank else f"{stage}R{name}{m}!")
        take(rank, f"{stage}{name}{m}", needs)
        if kind is Kind.BACKWARD:
            take(rank, f"{stage}W{m}", set())

    def program(rank: int) -> Iterator[None]:
        for step in plan[rank]:
            if isinstance(step, Action):
                compute(rank, step)
                ends[rank] += 1
                continue
            for message in step.posted:
                stage, m, kind = message.stage, message.microbatch, message.kind
                needs = {f"{stage}{kind.value[1]}{m}"} if kind in SENDS else set()
                # The shape of a gradient is known once its forward has run.
                take(rank, str(message), {f"{stage}F{m}"} if kind is Kind.RECV_BACKWARD else needs)
                (sends if kind in SENDS else receives)[lane_of(message, ranks)].append(message_key(message))
            for message in step.awaited:
                lane, key = lane_of(message, ranks), message_key(message)
                if str(message) not in hands[rank] or message.kind in SENDS:
                    raise CannotRun(str(message))
                place = receives[lane].index(key)
                while len(sends[lane]) <= place or key == held:
                    yield
                if sends[lane][: place + 1] != receives[lane][: place + 1]:
                    raise CannotRun(str(message))
                take(rank, f"{message}!", set())
            for message in step.released:
                if message.kind not in SENDS:
                    raise CannotRun(str(message))
                take(rank, f"{message}-", {str(message)})
            ends[rank] += 1

    programs = [program(rank) for rank in range(len(plan))]
    before, now = -1, 0
    while now != before:
        before = now
        programs = [p for p in programs if next(p, "ended") is None]
        now = sum(ends) + sum(map(len, hands))
    if held is None and (sends != receives or programs):
        raise CannotRun("messages are left over, or ranks wait for ever")
    return ends, hands
