"""The choice of a schedule: what it makes, where it wants the stages, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.mesh import Sizes
from lightning_megatron.pipeline.choice import Schedule, ScheduleName, order_of, placement_of, schedule_faults
from lightning_megatron.pipeline.interleaved import interleaved_one_f_one_b
from lightning_megatron.pipeline.lower import rank_of_stage
from lightning_megatron.pipeline.schedule import gpipe, one_f_one_b
from lightning_megatron.pipeline.simulate import play
from lightning_megatron.pipeline.zero_bubble import zb_h1, zb_v

NAMES: tuple[Any, ...] = get_args(ScheduleName)


def schedule(name: Any, pp: int = 4, chunks: int = 1, microbatches: int = 6, group_size: int = 0) -> Schedule:
    return Schedule(name=name, pp=pp, chunks=chunks, microbatches=microbatches, group_size=group_size)


def test_each_name_makes_its_order() -> None:
    sizes = {"pp": 4, "microbatches": 6}
    assert order_of(schedule("gpipe", chunks=3)) == gpipe(chunks=3, **sizes)
    assert order_of(schedule("1f1b")) == one_f_one_b(**sizes)
    assert order_of(schedule("interleaved", chunks=2)) == interleaved_one_f_one_b(chunks=2, group_size=4, **sizes)
    in_fives = interleaved_one_f_one_b(chunks=2, group_size=5, **sizes)
    assert order_of(schedule("interleaved", chunks=2, group_size=5)) == in_fives
    assert in_fives != interleaved_one_f_one_b(chunks=2, group_size=4, **sizes)
    assert order_of(schedule("zb_h1")) == zb_h1(**sizes)
    assert order_of(schedule("zb_v", chunks=2)) == zb_v(**sizes)


def test_a_schedule_is_a_key() -> None:
    assert len({schedule("1f1b"), schedule("1f1b"), schedule("zb_h1")}) == 2


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    pp=st.integers(0, 5),
    chunks=st.integers(0, 3),
    microbatches=st.integers(0, 12),
    group_size=st.integers(-1, 8),
)
def test_what_has_no_faults_runs_where_the_mesh_puts_its_stages_and_the_rest_is_refused(
    name: ScheduleName, pp: int, chunks: int, microbatches: int, group_size: int
) -> None:
    chosen = schedule(name, pp, chunks, microbatches, group_size)
    if faults := schedule_faults(chosen):
        with pytest.raises(ValueError) as caught:
            order_of(chosen)
        assert str(caught.value) == "; ".join(faults)
        return
    order = order_of(chosen)
    play(order)
    sizes = Sizes(world=pp, pp=pp, vp=chunks, placement=placement_of(name))
    assert rank_of_stage(order) == tuple(map(sizes.pp_rank_of, range(pp * chunks)))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_sizes_without_faults_and_any_number_of_microbatches_fits_them(name: ScheduleName) -> None:
    chunks = 2 if name in ("interleaved", "zb_v") else 1
    assert [schedule_faults(schedule(name, chunks=chunks, microbatches=m)) for m in range(1, 20)] == [[]] * 19


@pytest.mark.parametrize(
    ("chosen", "faults"),
    [
        (
            schedule("1f1b", chunks=2),
            ["chunks (2) must be 1 for schedule 1f1b; use 1, or schedule interleaved or gpipe"],
        ),
        (
            schedule("zb_h1", chunks=3),
            ["chunks (3) must be 1 for schedule zb_h1; use 1, or schedule zb_v (with 2 chunks) or interleaved"],
        ),
        (schedule("zb_v", chunks=1), ["chunks (1) must be 2 for schedule zb_v; use 2, or schedule zb_h1 with 1"]),
        (
            schedule("interleaved"),
            ["chunks (1) must be at least 2 for schedule interleaved; use 2 or more, or schedule 1f1b"],
        ),
        (
            schedule("interleaved", pp=1, chunks=2),
            ["pp (1) must be at least 2 for schedule interleaved; use 2 or more, or schedule 1f1b with 1 chunk"],
        ),
        (
            schedule("interleaved", chunks=2, group_size=3),
            ["group_size (3) must be at least pp (4); use 0, which means 4, or 4 or more"],
        ),
        (
            schedule("gpipe", group_size=4),
            ["group_size (4) belongs to schedule interleaved; use 0 with schedule gpipe"],
        ),
        (schedule("2f2b", pp=0), ["schedule ('2f2b') must be one of gpipe, 1f1b, interleaved, zb_h1, zb_v"]),
    ],
)
def test_a_fault_says_the_thing_the_rule_and_the_way_out(chosen: Schedule, faults: list[str]) -> None:
    assert schedule_faults(chosen) == faults


def test_all_faults_are_told_at_once() -> None:
    chosen = schedule("zb_v", chunks=3, microbatches=0, group_size=2)
    assert schedule_faults(chosen) == [
        "microbatches (0) must be at least 1",
        "chunks (3) must be 2 for schedule zb_v; use 2, or schedule zb_h1 with 1",
        "group_size (2) belongs to schedule interleaved; use 0 with schedule zb_v",
    ]
    assert schedule_faults(replace(chosen, chunks=2, microbatches=1, group_size=0)) == []


def test_faults_of_different_sizes_are_told_together() -> None:
    told = schedule_faults(Schedule(name="zb_v", pp=0, chunks=3, microbatches=0, group_size=2))
    assert [fault.split(" must")[0].split(" belongs")[0] for fault in told] == [
        "pp (0)",
        "microbatches (0)",
        "chunks (3)",
        "group_size (2)",
    ]
