"""What every rank did in one step, and when, on one clock: as a trace for Chrome and Perfetto, with the prediction of
its schedule.

    lane           what is in it
    forward        forwards, of a schedule by stage and microbatch
    backward       backwards, full or split into dgrad and wgrad
    messages       waiting for what other stages send, and for this rank's sends to complete
    data-parallel  sums of gradients, gathered parameters
    optimizer      checks and clipping, the optimizer's step
    data           waiting for the next batch

Times are seconds on the first rank's clock. The prediction simulates the same schedule with the measured mean of each
kind of compute of each stage, and messages that take no time: the difference to the measured step is messages, and
computes that were slower or faster than their mean.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_megatron.pipeline.registry import order_of
from lightning_megatron.pipeline.schedule import COMPUTES, MESSAGES, WHOLE_STAGE, Action, Kind
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.simulate import Costs, play
from lightning_megatron.pipeline.step_hooks import Activity

DATA = "data"
FORWARD = "forward"
BACKWARD = "backward"
REDUCE = "sum gradients"
CLIP = "check and clip gradients"
OPTIMIZER = "optimizer"
GATHER = "gather parameters"

LANES = ("forward", "backward", "messages", "data-parallel", "optimizer", "data")
_LANE_OF_NAME = {
    DATA: "data",
    FORWARD: "forward",
    BACKWARD: "backward",
    REDUCE: "data-parallel",
    GATHER: "data-parallel",
    CLIP: "optimizer",
    OPTIMIZER: "optimizer",
}
KIND_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input",
    Kind.BACKWARD_WEIGHT: "backward, weights",
    Kind.RECV_FORWARD: "wait for input",
    Kind.RECV_BACKWARD: "wait for gradient",
    Kind.SEND_FORWARD: "wait until output has left",
    Kind.SEND_BACKWARD: "wait until gradient has left",
    Kind.REDUCE_GRADS: "hand over gradients",
    Kind.GATHER_PARAMS: "wait for parameters",
}
"""Actions in words, for a reader."""
# A computer's clock has no seconds as short, and a cost must be above 0.
_SHORTEST_SECONDS = 1e-9


@dataclass(frozen=True, slots=True)
class ActivitySpan:
    """Something that a rank did, and when."""

    activity: Activity
    batch: int
    """Number of the batch among those of one step, from 0."""
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def is_compute(self) -> bool:
        """Whether it is a compute of a schedule."""
        return isinstance(self.activity, Action) and self.activity.kind in COMPUTES


@dataclass(frozen=True, slots=True)
class RankSpans:
    """The activities of one rank in a step."""

    rank: int
    """Global rank."""
    pp_rank: int
    stages: tuple[int, ...]
    spans: tuple[ActivitySpan, ...]
    is_shown: bool
    """Whether the picture shows the rank."""


def lane_of(activity: Activity) -> str:
    """The lane of `LANES` in which an activity is shown."""
    if isinstance(activity, str):
        return _LANE_OF_NAME.get(activity, "messages")
    if activity.kind in MESSAGES:
        return "messages"
    if activity.kind in COMPUTES:
        return "forward" if activity.kind is Kind.FORWARD else "backward"
    return "data-parallel"


def describe(activity: Activity) -> str:
    """An activity in words, for a reader."""
    if isinstance(activity, str):
        return activity
    microbatch = "" if activity.microbatch == WHOLE_STAGE else f", microbatch {activity.microbatch}"
    return f"{KIND_WORDS[activity.kind]}, stage {activity.stage}{microbatch}"


def stage_costs(ranks: Sequence[RankSpans], num_stages: int) -> tuple[Costs, ...]:
    """The mean seconds of each kind of compute of each stage, over all ranks that hold it.

    A kind that was not run costs nothing, but for a full backward, which costs as much as dgrad and wgrad together.
    """
    seconds: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
    for rank in ranks:
        for span in rank.spans:
            if isinstance(span.activity, Action) and span.is_compute:
                seconds[span.activity.stage, span.activity.kind].append(span.seconds)
    means = {key: max(sum(values) / len(values), _SHORTEST_SECONDS) for key, values in seconds.items()}

    def cost(stage: int, kind: Kind) -> float:
        return means.get((stage, kind), 0.0)

    found = []
    for stage in range(num_stages):
        split = cost(stage, Kind.BACKWARD_INPUT), cost(stage, Kind.BACKWARD_WEIGHT)
        found.append(
            Costs(
                forward=cost(stage, Kind.FORWARD),
                backward=cost(stage, Kind.BACKWARD) or sum(split),
                backward_input=split[0],
                backward_weight=split[1],
            )
        )
    return tuple(found)


def predicted(
    schedules: Sequence[Schedule], costs: Sequence[Costs], starts: Sequence[float]
) -> list[tuple[ActivitySpan, ...]]:
    """The computes of each pipeline rank under the schedules, one schedule a batch, simulated from those moments on."""
    spans: list[list[ActivitySpan]] = [[] for _ in range(schedules[0].pp)]
    for batch, (schedule, start) in enumerate(zip(schedules, starts, strict=True)):
        for rank, played in enumerate(play(order_of(schedule), costs).spans):
            spans[rank] += [ActivitySpan(span.action, batch, start + span.start, start + span.end) for span in played]
    return [tuple(own) for own in spans]


def windows(all_spans: Sequence[Sequence[ActivitySpan]]) -> list[tuple[float, float]]:
    """The moments at which each batch's first compute of a schedule begins and its last one ends."""
    computes = [span for spans in all_spans for span in spans if span.is_compute]
    return [
        (
            min(span.start for span in computes if span.batch == batch),
            max(span.end for span in computes if span.batch == batch),
        )
        for batch in sorted({span.batch for span in computes})
    ]


def bubble(all_spans: Sequence[Sequence[ActivitySpan]]) -> float:
    """The share of the schedules' time in which ranks compute nothing, their mean, 0 to 1."""
    lasting = sum(end - start for start, end in windows(all_spans))
    busy = sum(span.seconds for spans in all_spans for span in spans if span.is_compute)
    return 1 - busy / (lasting * len(all_spans))


def chrome_trace(
    ranks: Sequence[RankSpans],
    predictions: Sequence[tuple[str, Sequence[Sequence[ActivitySpan]]]],
    about: dict[str, Any],
) -> dict[str, Any]:
    """The record as Chrome's JSON: a process for each rank, and for each pipeline rank of each named prediction.

    Source: "Trace Event Format", Google, events X and M; `ts` and `dur` are microseconds. It begins with the step.
    """
    begin = min((span.start for rank in ranks for span in rank.spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank in ranks:
        stages = f", stages {' '.join(map(str, rank.stages))}" if rank.stages else ""
        events += _process(rank.rank, f"rank {rank.rank}{stages}", rank.spans, begin)
    number = max((rank.rank for rank in ranks), default=0)
    for name, by_rank in predictions:
        for pp_rank, spans in enumerate(by_rank):
            number += 1
            events += _process(number, f"{name}: pipeline rank {pp_rank}", spans, begin)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _process(number: int, name: str, spans: Sequence[ActivitySpan], begin: float) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": number, "tid": 0, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": number, "tid": 0, "name": "process_sort_index", "args": {"sort_index": number}},
    ]
    for index, lane in enumerate(LANES):
        if any(lane_of(span.activity) == lane for span in spans):
            events.append({"ph": "M", "pid": number, "tid": index, "name": "thread_name", "args": {"name": lane}})
    for span in spans:
        lane = lane_of(span.activity)
        what = {"batch": span.batch}
        if isinstance(span.activity, Action):
            what |= {"stage": span.activity.stage, "microbatch": span.activity.microbatch}
        events.append(
            {
                "ph": "X",
                "pid": number,
                "tid": LANES.index(lane),
                "cat": lane,
                "name": str(span.activity),
                "ts": (span.start - begin) * 1e6,
                "dur": span.seconds * 1e6,
                "args": what | {"what": describe(span.activity)},
            }
        )
    return events
