"""Rules of every plan, checked from its slots alone, and cost models to plan with."""

from collections.abc import Sequence

from lightning_megatron.context.balance import CostModel, DynamicContextConfig, StepPlan, group_sizes
from lightning_megatron.context.balance.empty import without_empty_groups
from lightning_megatron.context.balance.slots import shortest_at_ends, step_seconds

# Of one layer of Llama-13B with full recomputation on a device that reaches 400 and 300 TFLOP/s, 300 GB/s in a node of
# 8 and 50 GB/s between nodes; 5120 hidden, 13824 feed-forward.
LLAMA_13B = CostModel(
    seconds_per_token=4 * 2 * (4 * 5120**2 + 3 * 5120 * 13824) / 400e12,
    seconds_per_square=4 * 2 * 5120 / 300e12,
    seconds_per_sent_token=4 * 2 * 2 * 5120 / 300e9,
    seconds_per_far_token=4 * 2 * 2 * 5120 / 50e9,
    fixed_seconds=500e-6,
    latency_seconds=50e-6,
    ranks_per_node=8,
)
ONLY_LINEAR = CostModel(seconds_per_token=1.0)
ONLY_COMPUTE = CostModel(seconds_per_token=1.0, seconds_per_square=1e-3)
SLOW_RING = CostModel(
    seconds_per_token=1.0,
    seconds_per_square=1e-4,
    fixed_seconds=100.0,
    seconds_per_sent_token=0.5,
    seconds_per_far_token=2.0,
    latency_seconds=30.0,
    ranks_per_node=4,
)
COSTS = {"llama": LLAMA_13B, "linear": ONLY_LINEAR, "compute": ONLY_COMPUTE, "slow ring": SLOW_RING}


def require_sound(
    plan: StepPlan, lengths: Sequence[int], ranks: int, config: DynamicContextConfig, cost: CostModel, pp: int = 1
) -> None:
    """Every document once, every rank once a slot, aligned groups of allowed sizes, the memory cap, the slot count; a
    group is empty only where documents do not go round, or joining it would make the step slower."""
    sizes = group_sizes(ranks, config)
    placed = [document for slot in plan.slots for group in slot for document in group.documents]
    assert sorted(placed) == list(range(len(lengths)))
    for slot in plan.slots:
        assert [rank for group in slot for rank in range(group.first, group.first + group.size)] == list(range(ranks))
        for group in slot:
            assert group.size in sizes and group.first % group.size == 0
            assert sum(lengths[d] for d in group.documents) <= group.size * config.max_tokens_per_rank
            assert list(group.documents) == sorted(group.documents)
    assert len(plan.slots) % config.microbatch_multiple == 0 and len(plan.slots) >= config.min_microbatches
    has_empty = any(not group.documents for slot in plan.slots for group in slot)
    if has_empty and len(lengths) >= len(plan.slots) * (ranks // sizes[-1]):
        joined = without_empty_groups(plan.slots, sizes[::-1], lengths)
        if pp > 1:
            joined = shortest_at_ends(joined, lengths, cost)
        assert step_seconds(joined, lengths, cost, pp) > plan.seconds


def seconds_by_hand(plan: StepPlan, lengths: Sequence[int], cost: CostModel, pp: int) -> float:
    """The time of a plan, rank by rank and by the formula as it is written."""
    clocks = dict.fromkeys(range(plan.num_ranks), 0.0)
    longest = 0.0
    for slot in plan.slots:
        for group in slot:
            g = group.size
            tokens = sum(lengths[d] for d in group.documents)
            squares = sum(lengths[d] ** 2 for d in group.documents)
            is_far = 0 < cost.ranks_per_node < g
            sent = cost.seconds_per_far_token if is_far else cost.seconds_per_sent_token
            hidden = cost.seconds_per_square * squares / g**2
            ring = (g - 1) * max(0.0, sent * tokens / g + cost.latency_seconds - hidden) if tokens else 0.0
            compute = (cost.seconds_per_token * tokens + cost.seconds_per_square * squares) / g
            seconds = cost.fixed_seconds + compute + ring
            longest = max(longest, seconds)
            ranks = range(group.first, group.first + g)
            started = max(clocks[rank] for rank in ranks)
            clocks.update(dict.fromkeys(ranks, started + seconds))
    return max(clocks.values()) + (pp - 1) * longest
