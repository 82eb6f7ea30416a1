"""DualPipeV against torch's order of every rank, its formulas, and what it refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from lightning_megatron.mesh import Sizes
from lightning_megatron.pipeline.lower import lower, rank_of_stage
from lightning_megatron.pipeline.registry import bubble_formula, order_of, overlapped_forwards, schedule_faults
from lightning_megatron.pipeline.schedule import Action, Kind, Order
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.schedules.dualpipe_v import dualpipe_v
from lightning_megatron.pipeline.simulate import Costs, check, play

KINDS = {kind.value: kind for kind in Kind}
# Stages half as large, so that a rank with two of them does the work of one with a full one.
HALF = Costs(forward=0.5, backward=1, backward_input=0.5, backward_weight=0.5)
SIZES = [(pp, microbatches) for pp in range(1, 9) for microbatches in (2 * pp, 2 * pp + 1, 3 * pp + 2, 6 * pp)]
# Those that a last batch may have, which does not fill the pipeline.
FEWER = [(pp, microbatches) for pp in range(1, 9) for microbatches in range(1, 2 * pp)]


def displayed_by_torch(pp: int, microbatches: int) -> tuple[Order, set[Action]]:
    """torch's order, and the forwards of its overlapped pairs; torch counts the ranks from the open end of the V."""
    pairs: set[Action] = set()
    ranks = []
    displayed: Any = get_schedule_ops("DualPipeV", pp, microbatches)
    for actions in displayed:
        own: list[Action] = []
        for action in filter(None, actions):
            parts = [re.fullmatch(r"(\d+)([A-Z]+)(\d+)", str(a)) for a in action.sub_actions or (action,)]
            computes = [Action(KINDS[part[2]], int(part[1]), int(part[3])) for part in parts if part]
            own += computes
            pairs |= set(computes[:-1])
        ranks.append(tuple(own))
    return tuple(ranks[::-1]), pairs


@pytest.mark.parametrize(("pp", "microbatches"), SIZES)
def test_the_order_and_the_pairs_are_torchs(pp: int, microbatches: int) -> None:
    order, pairs = dualpipe_v(pp=pp, microbatches=microbatches)
    wanted, wanted_pairs = displayed_by_torch(pp, microbatches)
    assert order == wanted and pairs == wanted_pairs
    assert pp == 1 or pairs


@pytest.mark.parametrize(("pp", "microbatches"), [*FEWER, *SIZES])
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_the_program_ends_where_the_mesh_puts_its_stages(pp: int, microbatches: int, is_overlapped: bool) -> None:
    schedule = Schedule(name="dualpipe_v", pp=pp, chunks=2, microbatches=microbatches, is_overlapped=is_overlapped)
    program = lower(order_of(schedule), overlapped_forwards(schedule))
    check(program.plan)
    sizes = Sizes(world=pp, pp=pp, vp=2, placement="v")
    assert program.ranks == rank_of_stage(program.plan) == tuple(map(sizes.pp_rank_of, range(2 * pp)))
    assert bool(program.overlapped) == is_overlapped or microbatches < 2 * pp


@pytest.mark.parametrize(("pp", "microbatches"), SIZES)
def test_the_bubble_is_that_of_the_formula_and_a_rank_saves_one_chunk_more_than_zb_v(
    pp: int, microbatches: int
) -> None:
    timeline = play(dualpipe_v(pp=pp, microbatches=microbatches)[0], HALF)
    assert timeline.bubbles == pytest.approx([(pp - 1) / (6 * microbatches + pp - 1)] * pp)
    assert timeline.peak_activations == (2 * pp + 1,) * pp


@pytest.mark.parametrize(("pp", "microbatches"), [*FEWER, *SIZES])
def test_weight_gradients_of_a_stage_come_in_the_order_of_the_microbatches(pp: int, microbatches: int) -> None:
    order, _ = dualpipe_v(pp=pp, microbatches=microbatches)
    for stage, rank in enumerate(rank_of_stage(order)):
        own = [action for action in order[rank] if action.stage == stage]
        for kinds in ({Kind.FORWARD}, {Kind.BACKWARD, Kind.BACKWARD_INPUT}, {Kind.BACKWARD, Kind.BACKWARD_WEIGHT}):
            assert [action.microbatch for action in own if action.kind in kinds] == list(range(microbatches))


@pytest.mark.parametrize("pp", range(1, 9))
def test_the_bubble_has_no_formula_for_fewer_microbatches_than_fill_the_pipeline(pp: int) -> None:
    schedule = Schedule(name="dualpipe_v", pp=pp, chunks=2, microbatches=2 * pp)
    formula = bubble_formula(schedule, HALF)
    assert formula is not None and formula.bubble == (pp - 1) / (13 * pp - 1)
    assert bubble_formula(replace(schedule, microbatches=2 * pp - 1), HALF) is None


def test_what_does_not_fit_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"microbatches \(0\)"):
        dualpipe_v(pp=4, microbatches=0)
    assert schedule_faults(Schedule(name="dualpipe_v", pp=4, chunks=1, microbatches=8)) == [
        "chunks (1) must be 2 for schedule dualpipe_v; use 2, or schedule gpipe, 1f1b or zb_h1"
    ]
