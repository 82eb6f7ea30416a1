"""Orders of computes against their formulas and against what torch.distributed.pipelining really executes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from lightning_megatron.pipeline.lower import Exchange, add_messages
from lightning_megatron.pipeline.schedule import WHOLE_STAGE, Action, Kind, forward_only, one_f_one_b

counts = {"pp": st.integers(1, 9), "microbatches": st.integers(1, 20)}


def as_text(steps: Any) -> str:
    return " ".join(map(str, steps))


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


@settings(max_examples=50, deadline=None)
@given(**counts)
def test_forward_only_has_every_forward_in_turn_and_nothing_else(pp: int, microbatches: int) -> None:
    for rank, actions in enumerate(forward_only(pp=pp, microbatches=microbatches)):
        assert actions == tuple(Action(Kind.FORWARD, rank, m) for m in range(microbatches))


@pytest.mark.parametrize("make", [one_f_one_b, forward_only])
def test_no_ranks_and_no_microbatches_are_refused_together(make: Any) -> None:
    with pytest.raises(ValueError, match=r"pp \(0\) must be at least 1; microbatches \(-2\) must be at least 1"):
        make(pp=0, microbatches=-2)


class Recorder:
    """A stage for torch's 1F1B that computes nothing, sends nothing, and writes down what it is asked for."""

    group_rank = 0
    group_size = 1
    has_backward = True

    def __init__(self, stage: int, num_stages: int) -> None:
        self.stage_index = stage
        self.num_stages = num_stages
        self.steps: list[str | set[str]] = []
        self.messages: set[str] = set()

    def _compute(self, kind: str, microbatch: int) -> None:
        self.flush()
        self.steps.append(f"{self.stage_index}{kind}{microbatch}")

    def flush(self) -> None:
        if self.messages:
            self.steps.append(self.messages)
            self.messages = set()

    def _message(self, kind: str, microbatch: int, exists: bool) -> list[Any]:
        if exists:
            self.messages.add(f"{self.stage_index}{kind}{microbatch}")
        return []

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self._compute("F", microbatch)

    def backward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self._compute("B", microbatch)

    def get_fwd_recv_ops(self, microbatch: int) -> list[Any]:
        return self._message("RF", microbatch, self.stage_index > 0)

    def get_fwd_send_ops(self, microbatch: int) -> list[Any]:
        return self._message("SF", microbatch, self.stage_index < self.num_stages - 1)

    def get_bwd_recv_ops(self, microbatch: int) -> list[Any]:
        return self._message("RB", microbatch, self.stage_index < self.num_stages - 1)

    def get_bwd_send_ops(self, microbatch: int) -> list[Any]:
        return self._message("SB", microbatch, self.stage_index > 0)

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


def executed_by_torch(stage: int, pp: int, microbatches: int) -> list[str | set[str]]:
    recorder: Any = Recorder(stage, pp)
    schedule = RecordedSchedule1F1B(recorder, microbatches)
    schedule._step_microbatches()
    recorder.flush()
    steps: list[str | set[str]] = recorder.steps
    return steps


# torch refuses fewer microbatches than stages.
@pytest.mark.parametrize(("pp", "microbatches"), [(1, 1), (1, 3), (2, 2), (2, 5), (3, 3), (4, 4), (4, 9), (8, 16)])
def test_one_f_one_b_with_its_messages_is_what_torch_executes(pp: int, microbatches: int) -> None:
    plan = add_messages(one_f_one_b(pp=pp, microbatches=microbatches))
    for rank, steps in enumerate(plan):
        # Between two computes both have the same messages; torch posts some of them in batches of one.
        ours = [set(map(str, step.messages)) if isinstance(step, Exchange) else str(step) for step in steps]
        assert ours == executed_by_torch(rank, pp, microbatches)


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (3, 4), (4, 8)])
def test_one_f_one_b_is_what_torch_displays_for_all_ranks_but_the_last(pp: int, microbatches: int) -> None:
    # torch's display is a second description of the schedule that nothing runs. For the last rank it is wrong: it shows
    # the forwards of microbatches 1 to m and never that of 0. What torch executes there is in the test above.
    displayed = get_schedule_ops("1F1B", pp, microbatches)
    for rank, actions in enumerate(one_f_one_b(pp=pp, microbatches=microbatches)[:-1]):
        computes = [str(action) for action in displayed[rank] if action is not None and action.is_compute_op]
        assert list(map(str, actions)) == computes
