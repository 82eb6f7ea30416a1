"""What ranks did becomes costs, a prediction and a trace, each checked against its own arithmetic."""

import json
from typing import Any

import pytest

from lightning_megatron.metrics.step_timeline import (
    DATA,
    GATHER,
    LANES,
    OPTIMIZER,
    REDUCE,
    ActivitySpan,
    RankSpans,
    bubble,
    chrome_trace,
    describe,
    lane_of,
    predicted,
    stage_costs,
    windows,
)
from lightning_megatron.pipeline.registry import order_of
from lightning_megatron.pipeline.schedule import WHOLE_STAGE, Action, Kind
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.simulate import Costs, play

SCHEDULE = Schedule(name="1f1b", pp=2, chunks=1, microbatches=3)
COSTS = (Costs(forward=1.0, backward=2.0), Costs(forward=1.5, backward=4.0))


def played(schedule: Schedule, costs: Any, start: float = 10.0) -> list[RankSpans]:
    """Ranks that did exactly what a schedule says."""
    spans = play(order_of(schedule), costs).spans
    return [
        RankSpans(
            rank, rank, (rank,), tuple(ActivitySpan(s.action, 0, start + s.start, start + s.end) for s in own), True
        )
        for rank, own in enumerate(spans)
    ]


def test_ranks_that_keep_to_a_schedule_give_its_costs_back_and_the_prediction_is_what_they_did() -> None:
    ranks = played(SCHEDULE, COSTS)
    found = stage_costs(ranks, 2)
    for got, wanted in zip(found, COSTS, strict=True):
        assert (got.forward, got.backward) == pytest.approx((wanted.forward, wanted.backward))
    again = predicted([SCHEDULE], found, [10.0])
    for rank, spans in zip(ranks, again, strict=True):
        assert [span.activity for span in spans] == [span.activity for span in rank.spans]
        assert [span.start for span in spans] == pytest.approx([span.start for span in rank.spans])
    [(start, end)] = windows(again)
    timeline = play(order_of(SCHEDULE), COSTS)
    assert (start, end) == pytest.approx((10.0, 10.0 + timeline.makespan))
    assert bubble(again) == pytest.approx(timeline.bubble)


def test_costs_are_means_over_microbatches_and_over_the_ranks_that_hold_a_stage() -> None:
    def rank(number: int, seconds: list[float]) -> RankSpans:
        spans = [ActivitySpan(Action(Kind.FORWARD, 0, m), 0, 0.0, length) for m, length in enumerate(seconds)]
        spans.append(ActivitySpan(Action(Kind.BACKWARD_INPUT, 0, 0), 0, 5.0, 5.5))
        spans.append(ActivitySpan(Action(Kind.BACKWARD_WEIGHT, 0, 0), 0, 6.0, 6.25))
        # What is no compute is no cost.
        spans.append(ActivitySpan(Action(Kind.RECV_FORWARD, 0, 0), 0, 0.0, 99.0))
        return RankSpans(number, 0, (0,), tuple(spans), True)

    [costs] = stage_costs([rank(0, [1.0, 2.0]), rank(1, [3.0, 6.0])], 1)
    assert costs.forward == 3.0
    assert (costs.backward_input, costs.backward_weight, costs.backward) == (0.5, 0.25, 0.75)


def test_batches_of_a_step_are_predicted_one_after_another() -> None:
    first, second = predicted([SCHEDULE, SCHEDULE], COSTS, [10.0, 50.0])
    assert {span.batch for span in first} == {0, 1}
    for spans in (first, second):
        halves = [[span for span in spans if span.batch == batch] for batch in (0, 1)]
        assert [span.start + 40 for span in halves[0]] == pytest.approx([span.start for span in halves[1]])
    assert len(windows([first, second])) == 2


@pytest.mark.parametrize(
    ("activity", "lane", "words"),
    [
        (Action(Kind.FORWARD, 2, 3), "forward", "forward, stage 2, microbatch 3"),
        (Action(Kind.BACKWARD_WEIGHT, 2, 3), "backward", "backward, weights, stage 2, microbatch 3"),
        (Action(Kind.RECV_BACKWARD, 2, 3), "messages", "wait for gradient, stage 2, microbatch 3"),
        (Action(Kind.REDUCE_GRADS, 2, WHOLE_STAGE), "data-parallel", "hand over gradients, stage 2"),
        (REDUCE, "data-parallel", "sum gradients"),
        (GATHER, "data-parallel", "gather parameters"),
        (OPTIMIZER, "optimizer", "optimizer"),
        (DATA, "data", "data"),
        ("sends", "messages", "sends"),
    ],
)
def test_everything_has_its_lane_and_its_words(activity: Any, lane: str, words: str) -> None:
    assert (lane_of(activity), describe(activity)) == (lane, words)


def test_every_kind_of_action_has_words_and_a_lane() -> None:
    for kind in Kind:
        assert lane_of(Action(kind, 0, 0)) in LANES and describe(Action(kind, 0, 0))


def test_a_trace_has_a_process_for_each_rank_and_prediction_and_every_span_to_the_microsecond() -> None:
    ranks = played(SCHEDULE, COSTS)
    spans = (*ranks[1].spans, ActivitySpan(DATA, 0, 9.5, 9.75))
    ranks[1] = RankSpans(1, 1, (1,), spans, True)
    trace = json.loads(json.dumps(chrome_trace(ranks, [("planned", predicted([SCHEDULE], COSTS, [10.0]))], {"a": 1})))
    assert trace["otherData"] == {"a": 1}
    events = trace["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {
        0: "rank 0, stages 0",
        1: "rank 1, stages 1",
        2: "planned: pipeline rank 0",
        3: "planned: pipeline rank 1",
    }
    shown = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert len(shown) == len(spans)
    for event, span in zip(shown, spans, strict=True):
        # The earliest of all, the wait for data, is at 0.
        assert (event["ts"], event["dur"]) == pytest.approx(((span.start - 9.5) * 1e6, (span.end - span.start) * 1e6))
        assert event["name"] == str(span.activity) and LANES[event["tid"]] == event["cat"] == lane_of(span.activity)
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert lanes == {0: "forward", 1: "backward", 5: "data"}
