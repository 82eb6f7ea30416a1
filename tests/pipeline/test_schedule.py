"""Orders of computes against their formulas and against what torch.distributed.pipelining really executes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from lightning_megatron.pipeline.schedule import (
    WHOLE_STAGE,
    Action,
    Kind,
    Order,
    backward_chunks,
    forward_chunks,
    paired,
)
from lightning_megatron.pipeline.schedules.gpipe import gpipe
from lightning_megatron.pipeline.schedules.one_f_one_b import one_f_one_b
from lightning_megatron.pipeline.simulate import Costs, play

counts = {"pp": st.integers(1, 9), "microbatches": st.integers(1, 20)}


def as_text(steps: Any) -> str:
    return " ".join(map(str, steps))


def texts(order: Order) -> list[str]:
    return [as_text(actions) for actions in order]


def displayed_by_torch(schedule: str, pp: int, microbatches: int, chunks: int | None = None) -> list[str]:
    """The computes of each rank in torch's own picture of a schedule."""
    ranks = get_schedule_ops(schedule, pp, microbatches, chunks)
    return [as_text(action for action in actions if action is not None and action.is_compute_op) for actions in ranks]


def test_one_f_one_b_of_a_small_pipeline_is_the_one_drawn_by_hand() -> None:
    order = one_f_one_b(pp=3, microbatches=4)
    assert [as_text(actions) for actions in order] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_with_fewer_microbatches_than_ranks_the_first_rank_runs_all_forwards_first() -> None:
    assert as_text(one_f_one_b(pp=4, microbatches=2)[0]) == "0F0 0F1 0B0 0B1"


def test_an_action_reads_as_stage_kind_microbatch() -> None:
    assert str(Action(Kind.FORWARD, 2, 0)) == "2F0"
    assert str(Action(Kind.SEND_BACKWARD, 1, 13)) == "1SB13"
    assert str(Action(Kind.REDUCE_GRADS, 3, WHOLE_STAGE)) == "3RG"


@settings(max_examples=100, deadline=None)
@given(**counts)
def test_each_rank_runs_each_microbatch_forward_and_backward_once_and_in_turn(pp: int, microbatches: int) -> None:
    for rank, actions in enumerate(one_f_one_b(pp=pp, microbatches=microbatches)):
        assert {action.stage for action in actions} == {rank}
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            assert [action.microbatch for action in actions if action.kind is kind] == list(range(microbatches))
        assert len(actions) == 2 * microbatches


@settings(max_examples=100, deadline=None)
@given(**counts)
def test_the_warm_up_is_one_forward_shorter_on_each_rank(pp: int, microbatches: int) -> None:
    for rank, actions in enumerate(one_f_one_b(pp=pp, microbatches=microbatches)):
        first_backward = next(at for at, action in enumerate(actions) if action.kind is Kind.BACKWARD)
        # The forwards of the warm-up, and the one with which the first backward makes a pair if one is left.
        assert first_backward == min(pp - rank, microbatches)


# -- GPipe


def test_gpipe_of_two_chunks_is_the_one_drawn_by_hand() -> None:
    assert texts(gpipe(pp=2, chunks=2, microbatches=2)) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
    ]


@settings(max_examples=100, deadline=None)
@given(chunks=st.integers(1, 4), **counts)
def test_gpipe_has_every_compute_once_and_saves_every_activation(pp: int, chunks: int, microbatches: int) -> None:
    order = gpipe(pp=pp, chunks=chunks, microbatches=microbatches)
    for rank, actions in enumerate(order):
        stages = range(rank, pp * chunks, pp)
        half = chunks * microbatches
        for kind, part in ((Kind.FORWARD, actions[:half]), (Kind.BACKWARD, actions[half:])):
            assert sorted(map(str, part)) == sorted(f"{s}{kind.value}{m}" for s in stages for m in range(microbatches))
    assert play(order).peak_activations == (chunks * microbatches,) * pp


@settings(max_examples=100, deadline=None)
@given(chunks=st.integers(1, 4), backward=st.sampled_from([1.0, 2.0, 5.0]), **counts)
def test_the_bubble_of_gpipe_is_p_minus_1_of_v_m_plus_p_minus_1(
    pp: int, chunks: int, microbatches: int, backward: float
) -> None:
    if chunks > 1:
        # A chunk of fewer microbatches would end before its first is back from the last rank.
        microbatches += pp - 1
    timeline = play(gpipe(pp=pp, chunks=chunks, microbatches=microbatches), Costs(backward=backward))
    assert timeline.makespan == (chunks * microbatches + pp - 1) * (1 + backward)
    assert timeline.bubbles == pytest.approx([(pp - 1) / (chunks * microbatches + pp - 1)] * pp)


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 3), (2, 4), (3, 3), (4, 9)])
def test_gpipe_is_what_torch_displays(pp: int, microbatches: int) -> None:
    assert texts(gpipe(pp=pp, chunks=1, microbatches=microbatches)) == displayed_by_torch("GPipe", pp, microbatches)


@pytest.mark.parametrize(("pp", "chunks", "microbatches"), [(2, 2, 4), (3, 4, 5), (4, 2, 8)])
def test_gpipe_with_chunks_is_torchs_looped_bfs_but_for_backwards_in_turn(
    pp: int, chunks: int, microbatches: int
) -> None:
    # torch runs the backwards of a chunk from the last microbatch to the first. Ours run in turn, as in all our orders,
    # so that gradients add up in one order under all of them.
    def last_first(match: re.Match[str]) -> str:
        return f"{match[1]}{microbatches - 1 - int(match[2])}"

    order = gpipe(pp=pp, chunks=chunks, microbatches=microbatches)
    displayed = displayed_by_torch("LoopedBFS", pp, microbatches, chunks)
    assert [re.sub(r"(\d+B)(\d+)", last_first, line) for line in texts(order)] == displayed


# -- chunk after chunk


@pytest.mark.parametrize(
    ("ranks", "forwards", "backwards"),
    [
        ((0, 1), ["0F0 0F1", "1F0 1F1"], ["0B0 0B1", "1B0 1B1"]),
        ((0, 1, 0, 1), ["0F0 0F1 2F0 2F1", "1F0 1F1 3F0 3F1"], ["2B0 2B1 0B0 0B1", "3B0 3B1 1B0 1B1"]),
        ((1, 0, 0, 1), ["1F0 1F1 2F0 2F1", "0F0 0F1 3F0 3F1"], ["2B0 2B1 1B0 1B1", "3B0 3B1 0B0 0B1"]),
    ],
    ids=["one each", "loop", "v"],
)
def test_chunks_run_in_the_order_of_the_model_and_backwards_against_it(
    ranks: tuple[int, ...], forwards: list[str], backwards: list[str]
) -> None:
    assert texts(forward_chunks(ranks=ranks, microbatches=2)) == forwards
    assert texts(backward_chunks(ranks=ranks, microbatches=2)) == backwards


@settings(max_examples=100, deadline=None)
@given(placement=st.lists(st.permutations(range(4)), min_size=1, max_size=3), microbatches=st.integers(1, 6))
def test_chunk_after_chunk_runs_to_its_end_wherever_the_stages_are(
    placement: list[list[int]], microbatches: int
) -> None:
    ranks = tuple(rank for permutation in placement for rank in permutation)
    forwards = forward_chunks(ranks=ranks, microbatches=microbatches)
    backwards = backward_chunks(ranks=ranks, microbatches=microbatches)
    timeline = play(tuple(map(tuple.__add__, forwards, backwards)))
    assert timeline.peak_activations == (len(placement) * microbatches,) * 4
    assert len({span.action for spans in timeline.spans for span in spans}) == 2 * len(ranks) * microbatches


@pytest.mark.parametrize("make", [forward_chunks, backward_chunks])
def test_ranks_with_a_gap_and_no_stages_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"ranks \[1\] hold no stage, though rank 2 does"):
        make(ranks=(0, 2), microbatches=1)
    with pytest.raises(ValueError, match=r"stages \(0\) must be at least 1; microbatches \(0\) must be at least 1"):
        make(ranks=(), microbatches=0)


def test_pairs_begin_after_the_warm_up_and_leave_as_many_backwards() -> None:
    forwards = [Action(Kind.FORWARD, 0, m) for m in range(3)]
    backwards = [Action(Kind.BACKWARD, 0, m) for m in range(3)]
    assert as_text(paired(forwards, backwards, 0)) == "0F0 0B0 0F1 0B1 0F2 0B2"
    assert as_text(paired(forwards, backwards, 1)) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert as_text(paired(forwards, backwards, 3)) == "0F0 0F1 0F2 0B0 0B1 0B2"


@pytest.mark.parametrize("make", [one_f_one_b, lambda **sizes: gpipe(chunks=1, **sizes)])
def test_no_ranks_and_no_microbatches_are_refused_together(make: Any) -> None:
    with pytest.raises(ValueError, match=r"pp \(0\) must be at least 1; .*microbatches \(-2\) must be at least 1"):
        make(pp=0, microbatches=-2)


# -- 1F1B against torch


class Recorder:
    """A stage for torch's 1F1B that computes nothing, sends nothing, and records what it is called for."""

    group_rank = 0
    group_size = 1
    has_backward = True

    def __init__(self, stage: int, num_stages: int) -> None:
        self.stage_index = stage
        self.num_stages = num_stages
        self.computes: list[str] = []

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.computes.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.computes.append(f"{self.stage_index}B{microbatch}")

    def no_messages(self, microbatch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages

    def perform_reduce_grad(self, *args: Any) -> None:
        pass


class RecordedSchedule1F1B(Schedule1F1B):
    """torch's 1F1B loop as it is, over a Recorder: only what needs real tensors and losses is left out."""

    def _initialize_stage(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _maybe_compute_loss(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _maybe_get_loss(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _update_losses(self, *args: Any, **kwargs: Any) -> None:
        pass


def executed_by_torch(stage: int, pp: int, microbatches: int) -> str:
    recorder: Any = Recorder(stage, pp)
    RecordedSchedule1F1B(recorder, microbatches)._step_microbatches()
    return as_text(recorder.computes)


# torch refuses fewer microbatches than stages.
@pytest.mark.parametrize(("pp", "microbatches"), [(1, 1), (1, 3), (2, 2), (2, 5), (3, 3), (4, 4), (4, 9), (8, 16)])
def test_one_f_one_b_is_what_torch_executes(pp: int, microbatches: int) -> None:
    executed = [executed_by_torch(rank, pp, microbatches) for rank in range(pp)]
    assert texts(one_f_one_b(pp=pp, microbatches=microbatches)) == executed


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (3, 4), (4, 8)])
def test_one_f_one_b_is_what_torch_displays_for_all_ranks_but_the_last(pp: int, microbatches: int) -> None:
    # torch's display is a second description of the schedule that nothing runs. For the last rank it is wrong: it shows
    # the forwards of microbatches 1 to m and never that of 0. What torch executes there is in the test above.
    displayed = displayed_by_torch("1F1B", pp, microbatches)
    assert texts(one_f_one_b(pp=pp, microbatches=microbatches))[:-1] == displayed[:-1]
