"""Steps of every schedule end under NCCL's rules: real plans, lanes, mailbox and runtime, on ranks that are threads."""

import pytest
import torch

from lightning_megatron.comm.p2p import Mailbox, Payload, build_lanes, connect_lanes
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.pipeline.forward_backward_overlap import ForwardBackwardOverlap
from lightning_megatron.pipeline.lower import ScheduledProgram, lower
from lightning_megatron.pipeline.registry import SCHEDULES, order_of, overlapped_forwards, placement_of
from lightning_megatron.pipeline.runtime import Runtime
from lightning_megatron.pipeline.schedule import Action, Kind
from lightning_megatron.pipeline.schedule_spec import Schedule
from tests.harness.board import DeadlockError, MismatchError
from tests.harness.nccl import split
from tests.harness.sample import sampled
from tests.harness.threads import ThreadGroup, new_group, run_on_threads
from tests.pipeline.threads import hops_of

CPU = torch.device("cpu")
CHUNKS = {"gpipe": (1, 2), "1f1b": (1,), "interleaved": (2, 3, 4), "zb_h1": (1,), "zb_v": (2,), "dualpipe_v": (2,)}
ALL = [
    Schedule(name=name, pp=pp, chunks=chunks, microbatches=microbatches, is_overlapped=is_overlapped)
    for name, spec in SCHEDULES.items()
    for chunks in CHUNKS[name]
    for is_overlapped in (False, True)[: 1 if spec.make_overlapped is None else 2]
    for pp in (2, 3, 4, 6, 8)
    for microbatches in (1, 2, 3, 4, 6, 8, 12)
]


def settings_of(schedule: Schedule) -> list[tuple[object, str, int]]:
    kind = (schedule.name, schedule.chunks, schedule.is_overlapped)
    return [(kind, "pp", schedule.pp), (kind, "microbatches", schedule.microbatches)]


def name_of(schedule: Schedule) -> str:
    joint = "-joint" if schedule.is_overlapped else ""
    return f"{schedule.name}-pp{schedule.pp}-v{schedule.chunks}-m{schedule.microbatches}{joint}"


class Relay:
    """Stages that hand on one number."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages

    def forward(self, stage: int, microbatch: int, received: Payload | None) -> Payload | None:
        return torch.ones(1) if stage < self.num_stages - 1 else None

    def backward(self, stage: int, microbatch: int, grad: Payload | None) -> Payload | None:
        return torch.ones(1) if stage else None

    backward_input = backward

    def backward_weight(self, stage: int, microbatch: int) -> None: ...

    def reduce_gradients(self, stage: int) -> None: ...

    def gather_parameters(self, stage: int) -> None: ...


def program_of(schedule: Schedule) -> ScheduledProgram:
    return lower(order_of(schedule), overlapped_forwards(schedule))


def steps_on_thread(world: ThreadGroup, schedule: Schedule, program: ScheduledProgram, is_connected: bool) -> None:
    """Two steps: the first sends what no receiver expects, the second what each does."""
    sizes = Sizes(world=schedule.pp, pp=schedule.pp, vp=schedule.chunks, placement=placement_of(schedule.name))
    pp = Mesh.build(sizes, world.global_rank, split).pp
    lanes = build_lanes(pp, hops_of(sizes), split, new_group)
    if is_connected:
        connect_lanes(pp, lanes, CPU)
    runtime = Runtime(pp, Mailbox(pp, lanes, CPU), ForwardBackwardOverlap(CPU))
    for _ in range(2):
        runtime.run(program, Relay(sizes.num_stages))


def ends(schedule: Schedule, *, is_connected: bool, program: ScheduledProgram | None = None) -> bool:
    """Whether the steps end; else all ranks wait for each other."""
    try:
        run_on_threads(schedule.pp, steps_on_thread, schedule, program or program_of(schedule), is_connected)
    except DeadlockError:
        return False
    return True


@pytest.mark.parametrize("schedule", sampled(ALL, settings_of), ids=name_of)
def test_a_step_of_every_schedule_ends(schedule: Schedule) -> None:
    assert ends(schedule, is_connected=True)


# Of the plans for 4 ranks, of which there are 7 for each kind and number of chunks.
HANGING = {
    ("gpipe", 1): 6,
    ("gpipe", 2): 7,
    ("1f1b", 1): 2,
    ("interleaved", 2): 4,
    ("interleaved", 3): 4,
    ("interleaved", 4): 4,
    ("zb_h1", 1): 2,
    ("zb_v", 2): 4,
    ("dualpipe_v", 2): 4,
}


@pytest.mark.parametrize(("name", "chunks"), HANGING)
def test_without_a_first_byte_over_each_lane_steps_hang(name: str, chunks: int) -> None:
    plans = [one for one in ALL if (one.name, one.chunks, one.pp) == (name, chunks, 4) and not one.is_overlapped]
    assert sum(not ends(schedule, is_connected=False) for schedule in plans) == HANGING[name, chunks]


def test_a_step_hangs_with_two_computes_of_a_rank_swapped() -> None:
    schedule = Schedule(name="1f1b", pp=2, chunks=1, microbatches=4)
    first, last = order_of(schedule)
    backward, forward = Action(Kind.BACKWARD, 1, 0), Action(Kind.FORWARD, 1, 2)
    swap = {backward: forward, forward: backward}
    swapped = lower((first, tuple(swap.get(action, action) for action in last)))
    assert ends(schedule, is_connected=True, program=lower((first, last)))
    assert not ends(schedule, is_connected=True, program=swapped)


def makes_groups(world: ThreadGroup, groups: list[list[tuple[int, ...]]]) -> None:
    for ranks in groups[world.global_rank]:
        split(ranks)


def test_splits_that_ranks_do_not_enter_together_are_found() -> None:
    alike = [[(0, 1), (0,)], [(0, 1), (1,)]]
    run_on_threads(2, makes_groups, alike)
    with pytest.raises(DeadlockError):
        run_on_threads(2, makes_groups, [alike[0], alike[1][:1]])
    with pytest.raises(MismatchError, match="not all of these do, at one turn"):
        run_on_threads(2, makes_groups, [alike[0], alike[1][::-1]])
