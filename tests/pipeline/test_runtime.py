"""The runtime does what its plan says, in order, and hands every message to the compute it is for."""

import random
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.comm.p2p import Payload, TensorMeta
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.pipeline.forward_backward_overlap import ForwardBackwardOverlap
from lightning_megatron.pipeline.lower import (
    P2PBatch,
    Plan,
    ScheduledProgram,
    add_messages,
    lane_of,
    lower,
    rank_of_stage,
)
from lightning_megatron.pipeline.plans import backward_plan, forward_plan
from lightning_megatron.pipeline.registry import order_of, overlapped_forwards, placement_of
from lightning_megatron.pipeline.runtime import OutputMetas, Runtime
from lightning_megatron.pipeline.schedule import Action, Kind, ScheduleError
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.simulate import check
from lightning_megatron.pipeline.step_hooks import Activity
from tests.harness.ranks import run_on_ranks
from tests.harness.threads import DeadlockError, MismatchError, ThreadGroup, run_on_threads
from tests.pipeline.meshes import make_mailbox, make_mesh
from tests.pipeline.queues import plan_of_text
from tests.pipeline.threads import hops_of, make_thread_mailbox, make_thread_pp

SCHEDULES = [
    Schedule(name="gpipe", pp=1, chunks=3, microbatches=2),
    Schedule(name="gpipe", pp=2, chunks=1, microbatches=1),
    Schedule(name="gpipe", pp=2, chunks=3, microbatches=4),
    Schedule(name="gpipe", pp=4, chunks=2, microbatches=5),
    Schedule(name="1f1b", pp=1, chunks=1, microbatches=3),
    Schedule(name="1f1b", pp=2, chunks=1, microbatches=1),
    Schedule(name="1f1b", pp=2, chunks=1, microbatches=5),
    Schedule(name="1f1b", pp=4, chunks=1, microbatches=6),
    Schedule(name="interleaved", pp=2, chunks=2, microbatches=1),
    Schedule(name="interleaved", pp=2, chunks=3, microbatches=5),
    Schedule(name="interleaved", pp=3, chunks=2, microbatches=7, group_size=4),
    Schedule(name="interleaved", pp=4, chunks=3, microbatches=4),
    Schedule(name="zb_h1", pp=2, chunks=1, microbatches=3),
    Schedule(name="zb_h1", pp=4, chunks=1, microbatches=6),
    Schedule(name="zb_v", pp=1, chunks=2, microbatches=3),
    Schedule(name="zb_v", pp=2, chunks=2, microbatches=1),
    Schedule(name="zb_v", pp=2, chunks=2, microbatches=5),
    Schedule(name="zb_v", pp=4, chunks=2, microbatches=4),
    Schedule(name="1f1b", pp=1, chunks=1, microbatches=4, is_overlapped=True),
    Schedule(name="1f1b", pp=3, chunks=1, microbatches=7, is_overlapped=True),
    Schedule(name="interleaved", pp=2, chunks=2, microbatches=5, is_overlapped=True),
]
WITH_LANES = [s for s in SCHEDULES if s.pp > 1 and s.microbatches > 1]


def name_of(schedule: Schedule) -> str:
    joint = "-joint" if schedule.is_overlapped else ""
    return f"{schedule.name}-pp{schedule.pp}-v{schedule.chunks}-m{schedule.microbatches}{joint}"


def sizes_of(schedule: Schedule) -> Sizes:
    placement = placement_of(schedule.name)
    return Sizes(world=schedule.pp, pp=schedule.pp, vp=schedule.chunks, placement=placement)


class Diary:
    """Stages that know what they must be given: a payload's values tell who made it, in which run and of what.

    `rows(run, stage, microbatch)` is the length of an output.
    """

    def __init__(self, num_stages: int, rows: Callable[[int, int, int], int], travels: str) -> None:
        self.num_stages, self.rows, self.travels = num_stages, rows, travels
        self.run = 0
        self.lines: list[str] = []
        self.random = random.Random(num_stages)

    def output(self, stage: int, microbatch: int) -> Payload:
        length = self.rows(self.run, stage, microbatch)
        x = torch.full((length, 2), float(self.number(stage, microbatch)), dtype=torch.float64)
        if self.travels == "tensor":
            return x
        return {"n": torch.full((3,), self.number(stage, microbatch)), "x": x, "y": -x.T.half()}

    def gradient(self, stage: int, microbatch: int) -> Payload:
        """Of what the stage was given, as long as that."""
        length = self.rows(self.run, stage - 1, microbatch)
        dx = torch.full((length, 2), -0.5 - self.number(stage, microbatch), dtype=torch.float64)
        return dx if self.travels == "tensor" else {"x": dx, "y": dx.T.half()}

    def number(self, stage: int, microbatch: int) -> int:
        return (self.run * 20 + stage) * 20 + microbatch

    def note(self, kind: Kind, stage: int, microbatch: int) -> None:
        self.lines.append(str(Action(kind, stage, microbatch)))
        # So that ranks meet in ever new ways.
        time.sleep(self.random.choice((0.0, 0.0, 1e-4, 1e-3)))

    def forward(self, stage: int, microbatch: int, received: Payload | None) -> Payload | None:
        self.note(Kind.FORWARD, stage, microbatch)
        require_same(received, self.output(stage - 1, microbatch) if stage > 0 else None)
        if stage == self.num_stages - 1:
            return None
        output = self.output(stage, microbatch)
        for tensor in tensors_of(output):
            tensor.requires_grad_(tensor.is_floating_point())
        return output

    def backward(self, stage: int, microbatch: int, grad: Payload | None) -> Payload | None:
        self.note(Kind.BACKWARD, stage, microbatch)
        return self.differentiated(stage, microbatch, grad)

    def backward_input(self, stage: int, microbatch: int, grad: Payload | None) -> Payload | None:
        self.note(Kind.BACKWARD_INPUT, stage, microbatch)
        return self.differentiated(stage, microbatch, grad)

    def differentiated(self, stage: int, microbatch: int, grad: Payload | None) -> Payload | None:
        require_same(grad, self.gradient(stage + 1, microbatch) if stage < self.num_stages - 1 else None)
        return self.gradient(stage, microbatch) if stage > 0 else None

    def backward_weight(self, stage: int, microbatch: int) -> None:
        self.note(Kind.BACKWARD_WEIGHT, stage, microbatch)

    def reduce_gradients(self, stage: int) -> None:
        self.note(Kind.REDUCE_GRADS, stage, -1)

    def gather_parameters(self, stage: int) -> None:
        self.note(Kind.GATHER_PARAMS, stage, -1)


def tensors_of(payload: Payload | None) -> list[Tensor]:
    if payload is None:
        return []
    return list(payload.values()) if isinstance(payload, dict) else [payload]


def require_same(got: Payload | None, wanted: Payload | None) -> None:
    assert type(got) is type(wanted)
    if isinstance(got, dict) and isinstance(wanted, dict):
        assert list(got) == list(wanted)
    for one, two in zip(tensors_of(got), tensors_of(wanted), strict=True):
        assert one.dtype is two.dtype and one.shape == two.shape and torch.equal(one, two)
        assert one.is_leaf and not one.requires_grad


ROWS: dict[str, Callable[[int, int, int], int]] = {
    "even": lambda run, stage, microbatch: 3,
    "new with every run": lambda run, stage, microbatch: 3 + run,
    "new with every stage": lambda run, stage, microbatch: stage % 3,
    "new with every microbatch": lambda run, stage, microbatch: microbatch + 1,
    "odd one out": lambda run, stage, microbatch: 3 + (microbatch == 1 and run > 0),
    "now and then": lambda run, stage, microbatch: 3 + (run % 3 == 1) * ((stage + microbatch) % 3),
}


def on_thread(world: ThreadGroup, schedule: Schedule, rows: str, travels: str, num_runs: int, plan: Plan | None) -> Any:
    """Several runs over one mailbox; what was done in each."""
    sizes = sizes_of(schedule)
    pp = make_thread_pp(sizes, world)
    runtime = Runtime(pp, make_thread_mailbox(pp, hops_of(sizes)), ForwardBackwardOverlap(torch.device("cpu")))
    return pp.rank, run_diary(runtime, schedule, rows, travels, num_runs, plan)


def run_diary(
    runtime: Runtime, schedule: Schedule, rows: str, travels: str, num_runs: int, plan: Plan | None = None
) -> list[list[str]]:
    program = lower(order_of(schedule), overlapped_forwards(schedule))
    diary = Diary(len(program.ranks), ROWS[rows], travels)
    lines = []
    for run in range(num_runs):
        diary.run = run
        runtime.run(program if plan is None else ScheduledProgram(plan, program.ranks, program.overlapped), diary)
        lines.append(diary.lines)
        diary.lines = []
    return lines


def require_all_done(schedule: Schedule, rank: int, runs: list[list[str]]) -> None:
    steps = lower(order_of(schedule), overlapped_forwards(schedule)).plan[rank]
    assert runs == [[str(step) for step in steps if isinstance(step, Action)]] * len(runs)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=name_of)
def test_computes_run_in_order_and_get_the_message_that_is_theirs(schedule: Schedule) -> None:
    for rank, runs in run_on_threads(schedule.pp, on_thread, schedule, "even", "tensor", 3, None):
        require_all_done(schedule, rank, runs)


@pytest.mark.matrix
@pytest.mark.parametrize("rows", list(ROWS))
@pytest.mark.parametrize("schedule", WITH_LANES[::2], ids=name_of)
def test_shapes_travel_with_the_messages(schedule: Schedule, rows: str) -> None:
    for rank, runs in run_on_threads(schedule.pp, on_thread, schedule, rows, "tensor", 5, None):
        require_all_done(schedule, rank, runs)


@pytest.mark.matrix
@pytest.mark.parametrize("rows", ["even", "new with every microbatch", "now and then"])
@pytest.mark.parametrize("schedule", WITH_LANES[1::2], ids=name_of)
def test_dicts_of_tensors_travel_and_their_floating_tensors_come_back(schedule: Schedule, rows: str) -> None:
    for rank, runs in run_on_threads(schedule.pp, on_thread, schedule, rows, "dict", 4, None):
        require_all_done(schedule, rank, runs)


def on_rank(schedule: Schedule) -> Any:
    mesh = make_mesh(sizes_of(schedule))
    runtime = Runtime(mesh.pp, make_mailbox(mesh))
    return mesh.pp.rank, run_diary(runtime, schedule, "now and then", "dict", 4)


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(name="interleaved", pp=2, chunks=2, microbatches=5),
        Schedule(name="zb_v", pp=3, chunks=2, microbatches=4),
    ],
    ids=name_of,
)
def test_on_processes_all_is_the_same(schedule: Schedule) -> None:
    for rank, runs in run_on_ranks(schedule.pp, on_rank, schedule):
        require_all_done(schedule, rank, runs)


class Ear:
    """A step hook that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def begin(self, activity: Activity) -> None:
        self.heard.append(("begin", str(activity)))

    def end(self, activity: Activity) -> None:
        self.heard.append(("end", str(activity)))


def heard_on_thread(world: ThreadGroup, schedule: Schedule) -> Any:
    """What a step hook hears in one run, and what it hears when it has left."""
    sizes = sizes_of(schedule)
    pp = make_thread_pp(sizes, world)
    runtime, ear = (
        Runtime(pp, make_thread_mailbox(pp, hops_of(sizes)), ForwardBackwardOverlap(torch.device("cpu"))),
        Ear(),
    )
    runtime.step_hook = ear
    done = run_diary(runtime, schedule, "even", "tensor", 1)
    heard, ear.heard, runtime.step_hook = ear.heard, [], None
    run_diary(runtime, schedule, "even", "tensor", 1)
    return pp.rank, done, heard, ear.heard


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s.pp in (1, 2)], ids=name_of)
def test_a_listener_hears_computes_and_waits_in_order_and_nothing_once_it_has_left(schedule: Schedule) -> None:
    for rank, done, heard, later in run_on_threads(schedule.pp, heard_on_thread, schedule):
        require_all_done(schedule, rank, done)
        plan = lower(order_of(schedule), overlapped_forwards(schedule)).plan[rank]
        wanted = []
        for step in plan:
            waits = (*step.awaited, *step.released) if isinstance(step, P2PBatch) else (step,)
            wanted += [str(action) for action in waits]
        assert sorted(activity for when, activity in heard if when == "begin") == sorted([*wanted, Runtime.SENDS])
        assert sorted(activity for when, activity in heard if when == "end") == sorted([*wanted, Runtime.SENDS])
        if not schedule.is_overlapped:
            # One at a time, in the order of the plan.
            assert heard == [(when, activity) for activity in [*wanted, Runtime.SENDS] for when in ("begin", "end")]
        assert later == []


class Keeper(Diary):
    """Keeps what its outputs were like, for a plan of backwards."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.output_metas: OutputMetas = {}

    def forward(self, stage: int, microbatch: int, received: Payload | None) -> Payload | None:
        output = super().forward(stage, microbatch, received)
        if output is not None:
            self.output_metas[stage, microbatch] = TensorMeta.of(output)
        return output


def forwards_then_backwards(world: ThreadGroup, sizes: Sizes, microbatches: int) -> list[str]:
    pp = make_thread_pp(sizes, world)
    runtime = Runtime(pp, make_thread_mailbox(pp, hops_of(sizes)))
    diary = Keeper(sizes.num_stages, ROWS["new with every microbatch"], "dict")
    for diary.run in range(3):
        runtime.run(forward_plan(sizes, microbatches), diary)
        runtime.run(backward_plan(sizes, microbatches), diary, diary.output_metas)
    return diary.lines


@pytest.mark.parametrize(
    ("pp", "chunks", "placement"),
    [(1, 2, "loop"), (2, 2, "loop"), (2, 2, "v"), (3, 1, "loop"), (3, 2, "loop"), (3, 2, "v")],
)
def test_a_plan_of_backwards_takes_up_what_a_plan_of_forwards_left(pp: int, chunks: int, placement: Any) -> None:
    sizes = Sizes(world=pp, pp=pp, vp=chunks, placement=placement)
    done = [line for lines in run_on_threads(pp, forwards_then_backwards, sizes, 3) for line in lines]
    assert sorted(done) == sorted(3 * [f"{s}{kind}{m}" for s in range(pp * chunks) for kind in "FB" for m in range(3)])


# -- what is wrong shows


def with_two_posts_swapped(plan: Plan, kinds: set[Kind], ranks: tuple[int, ...]) -> Plan:
    """The first two messages of one lane that a rank posts, swapped at this end."""
    for rank, steps in enumerate(plan):
        places = [
            (index, message)
            for index, step in enumerate(steps)
            if isinstance(step, P2PBatch)
            for message in step.posted
            if message.kind in kinds
        ]
        for (_, one), (_, two) in pairwise(places):
            if lane_of(one, ranks) == lane_of(two, ranks):
                swapped = {one: two, two: one}
                changed = tuple(
                    P2PBatch(tuple(swapped.get(m, m) for m in step.posted), step.awaited, step.released)
                    if isinstance(step, P2PBatch)
                    else step
                    for step in steps
                )
                return (*plan[:rank], changed, *plan[rank + 1 :])
    raise AssertionError("no lane has two messages")


@pytest.mark.parametrize("kind", [Kind.RECV_FORWARD, Kind.RECV_BACKWARD])
@pytest.mark.parametrize("schedule", WITH_LANES, ids=name_of)
def test_two_receives_of_a_lane_that_are_swapped_show_on_paper_and_on_the_ranks(schedule: Schedule, kind: Kind) -> None:
    order = order_of(schedule)
    ranks = rank_of_stage(order)
    plan = with_two_posts_swapped(add_messages(order, ahead=9), {kind}, ranks)
    with pytest.raises(ScheduleError):
        check(plan)
    with pytest.raises((AssertionError, MismatchError, DeadlockError, KeyError)) as error:
        run_on_threads(schedule.pp, on_thread, schedule, "new with every microbatch", "tensor", 1, plan)
    assert any(">" in note and "rank 0" in note for note in error.value.__notes__)


def test_a_receive_that_is_missing_ends_in_a_deadlock_of_the_ranks() -> None:
    schedule = Schedule(name="1f1b", pp=2, chunks=1, microbatches=2)
    plan = plan_of_text(
        "0F0 [0SF0 0RB0] 0F1 [0SF1 0RB0!] 0B0 [0RB1 0RB1!] 0B1",
        "[1RF0 1RF0!] 1F0 1B0 [1SB0 1RF1 1RF1!] 1F1 1B1",
    )
    with pytest.raises(ScheduleError, match="its other end, 1SB1, is not in the plan"):
        check(plan)
    with pytest.raises(DeadlockError) as error:
        run_on_threads(2, on_thread, schedule, "even", "tensor", 1, plan)
    assert "in exchange [0RB1 0RB1!]" in error.value.__notes__[0]


def test_a_release_that_is_too_early_ends_in_a_deadlock_of_the_ranks() -> None:
    schedule = Schedule(name="1f1b", pp=2, chunks=1, microbatches=2)
    good = (
        "0F0 [0SF0] 0F1 [0SF1] [0RB0 0RB0!] 0B0 [0RB1 0RB1!] 0B1",
        "[1RF0 1RF0!] 1F0 1B0 [1SB0] [1RF1 1RF1!] 1F1 1B1 [1SB1]",
    )
    check(plan_of_text(*good))
    run_on_threads(2, on_thread, schedule, "even", "tensor", 2, plan_of_text(*good))
    plan = plan_of_text(good[0].replace("[0SF1]", "[0SF1 0SF1-]"), good[1].replace("[1SB0]", "[1SB0 1SB0-]"))
    with pytest.raises(ScheduleError, match="it is held to have left, and may not have"):
        check(plan)
    with pytest.raises(DeadlockError):
        run_on_threads(2, on_thread, schedule, "even", "tensor", 1, plan)


def single_runtime() -> Runtime:
    pp = Mesh.single().pp
    return Runtime(pp, make_thread_mailbox(pp, []))


class Faulty(Diary):
    def backward_weight(self, stage: int, microbatch: int) -> None:
        raise ArithmeticError("too small")


def test_an_error_tells_the_action_and_marks_its_position() -> None:
    plan = plan_of_text("0F0 1F0 1I0 1W0 0I0 0W0")
    with pytest.raises(ArithmeticError) as error:
        single_runtime().run(ScheduledProgram(plan, (0, 0)), Faulty(2, ROWS["even"], "tensor"))
    [note] = error.value.__notes__
    assert note.splitlines()[0] == "in action 1W0: stage 1 of 2, microbatch 0"
    assert note.splitlines()[2] == "rank 0 0F0 1F0 1I0 >1W0< 0I0 0W0 end"


@pytest.mark.parametrize("faulty", ["0F1", "0B0"])
def test_an_error_of_a_pair_tells_which_of_the_two_it_was(faulty: str) -> None:
    class OneFails(Diary):
        def note(self, kind: Kind, stage: int, microbatch: int) -> None:
            if str(Action(kind, stage, microbatch)) == faulty:
                raise ArithmeticError("too small")

    schedule = Schedule(name="1f1b", pp=1, chunks=1, microbatches=3, is_overlapped=True)
    program = lower(order_of(schedule), overlapped_forwards(schedule))
    assert "0F1 0B0" in " ".join(map(str, program.plan[0])) and "0F1" in map(str, program.overlapped)
    pp = Mesh.single().pp
    runtime = Runtime(pp, make_thread_mailbox(pp, []), ForwardBackwardOverlap(torch.device("cpu")))
    with pytest.raises(ArithmeticError) as error:
        runtime.run(program, OneFails(1, ROWS["even"], "tensor"))
    assert [note.splitlines()[0].split(":")[0] for note in error.value.__notes__] == [f"in action {faulty}"]


class Untravelled(Diary):
    def forward(self, stage: int, microbatch: int, received: Payload | None) -> Any:
        return [1.0]


def test_what_cannot_travel_is_reported_with_the_stage_that_made_it() -> None:
    plan = plan_of_text("0F0 1F0")
    with pytest.raises(ValueError, match="a stage hands list to the next") as error:
        single_runtime().run(ScheduledProgram(plan, (0, 0)), Untravelled(2, ROWS["even"], "dict"))
    assert error.value.__notes__[0].startswith("in action 0F0: stage 0 of 2, microbatch 0")


def test_nothing_of_a_failed_run_reaches_the_next() -> None:
    runtime = single_runtime()
    good = ScheduledProgram(plan_of_text("0F0 1F0 1B0 0B0"), (0, 0))
    with pytest.raises(ArithmeticError):
        runtime.run(ScheduledProgram(plan_of_text("0F0 0W0 1F0"), (0, 0)), Faulty(2, ROWS["even"], "tensor"))
    diary = Diary(2, ROWS["even"], "tensor")
    # Were the output of microbatch 0 still there, a forward without its input would not be noticed.
    with pytest.raises(AssertionError):
        runtime.run(ScheduledProgram(plan_of_text("1F0"), (0, 0)), diary)
    diary.lines.clear()
    runtime.run(good, diary)
    assert diary.lines == ["0F0", "1F0", "1B0", "0B0"]


def test_a_message_outside_of_an_exchange_is_refused() -> None:
    with pytest.raises(AssertionError, match="0SF0 stands outside of an P2PBatch"):
        single_runtime().run(ScheduledProgram(plan_of_text("0SF0"), (0,)), Diary(1, ROWS["even"], "tensor"))
