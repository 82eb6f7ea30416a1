"""The clock and the rivals of the simulation of dynamic context parallelism are what they are said to be."""

import numpy as np
import pytest

from benchmarks.context_schedulers import FORWARD_SHARE, pipeline_seconds, rounds_seconds, static_slots
from benchmarks.document_lengths import GITHUB, LOG_NORMAL
from lightning_megatron.context.balance import CostModel, DynamicContextConfig, RankGroup, lower_bound, plan
from lightning_megatron.pipeline.registry import order_of
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.simulate import Costs, play
from tests.context.plans import LLAMA_13B, require_sound

LINEAR = CostModel(seconds_per_token=1.0)


@pytest.mark.parametrize(("pp", "chunks", "count"), [(1, 1, 3), (4, 1, 8), (4, 1, 2), (3, 2, 6)])
@pytest.mark.parametrize("is_recomputed", [True, False])
def test_equal_microbatches_take_what_the_simulator_of_schedules_says(
    pp: int, chunks: int, count: int, is_recomputed: bool
) -> None:
    slots = [(RankGroup(0, 2, (2 * m,)), RankGroup(2, 2, (2 * m + 1,))) for m in range(count)]
    kind = "1f1b" if chunks == 1 else "interleaved"
    order = order_of(Schedule(name=kind, pp=pp, chunks=chunks, microbatches=count))
    taken = pipeline_seconds(order, slots, [24] * 2 * count, LINEAR, chunks=chunks, is_recomputed=is_recomputed)
    share, seconds = FORWARD_SHARE[is_recomputed], 12 / chunks
    wanted = play(order, Costs(forward=share * seconds, backward=(1 - share) * seconds)).makespan
    assert taken == pytest.approx(wanted)


def test_a_group_of_two_columns_waits_for_the_slower_one_on_every_stage() -> None:
    # Ranks 0 and 1 run 10 and 30 tokens alone, then 20 together: 30 + 10 on one stage.
    slots = [(RankGroup(0, 1, (0,)), RankGroup(1, 1, (1,))), (RankGroup(0, 2, (2,)),)]
    order = order_of(Schedule(name="1f1b", pp=1, chunks=1, microbatches=2))
    assert pipeline_seconds(order, slots, [10, 30, 20], LINEAR, chunks=1, is_recomputed=False) == pytest.approx(40)
    # Without the wait rank 1 would be done at 30 and rank 0 at 20.
    order = order_of(Schedule(name="1f1b", pp=2, chunks=1, microbatches=2))
    assert pipeline_seconds(order, slots, [10, 30, 20], LINEAR, chunks=1, is_recomputed=False) > 40


def test_the_static_layout_holds_every_document_once_under_the_cap() -> None:
    lengths = LOG_NORMAL.draw(np.random.default_rng(0), 300)
    slots = static_slots(lengths, 16, 4, 40_000)
    placed = [document for slot in slots for group in slot for document in group.documents]
    assert placed == list(range(300))
    assert all(group.size == 4 and group.first % 4 == 0 for slot in slots for group in slot)
    assert all(sum(lengths[d] for d in group.documents) <= 160_000 for slot in slots for group in slot)


def test_rounds_with_a_barrier_are_not_below_the_bound_and_plans_are_nearer_to_it() -> None:
    rng = np.random.default_rng(0)
    config = DynamicContextConfig(max_tokens_per_rank=16384)
    for _ in range(10):
        lengths = GITHUB.draw(rng, 128)
        made = plan(lengths, 8, LLAMA_13B, config)
        require_sound(made, lengths, 8, config, LLAMA_13B)
        rounds = rounds_seconds(lengths, 8, 16384, LLAMA_13B)
        assert rounds >= lower_bound(lengths, 8, LLAMA_13B, config) * 0.999
        assert made.seconds < rounds
