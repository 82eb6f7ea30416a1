"""What attention waits for where ranks share sequences, against sums by hand."""

from dataclasses import replace

import pytest

from lightning_megatron.context.config import ContextConfig
from lightning_megatron.mesh import Sizes
from lightning_megatron.planner.constants import Constants
from lightning_megatron.planner.context_time import context_seconds
from lightning_megatron.planner.framework_profile import MEGATRON, OURS
from lightning_megatron.planner.hardware import gpu_of
from lightning_megatron.planner.presets import PRESETS
from lightning_megatron.planner.run import Run, context_fields
from lightning_megatron.planner.step_time import step_time

H100 = gpu_of("h100")
# 450 GB/s inside a node, 50 GB/s outside, 3.35 TB/s of memory.
FREE = replace(
    Constants(),
    link_share=1.0,
    network_share=1.0,
    exchange_share=1.0,
    link_seconds=1e-15,
    network_seconds=1e-15,
)
KEYS, QUERIES = 9e8, 6.7e8
HOP, MERGE = KEYS / 450e9, 5 * QUERIES / 3.35e12


def waited(kind: str = "ring", *, cp: int = 4, tp: int = 1, attention: float = 0.0, is_backward: bool = False) -> float:
    context = ContextConfig(comm_type=kind, ulysses_size=2 if kind == "hierarchical" else 0)  # type: ignore[arg-type]
    sizes = Sizes(world=cp * tp, cp=cp, tp=tp, **context_fields(context, cp))
    tensors = {"key_bytes": KEYS, "query_bytes": QUERIES, "attention_seconds": attention, "gradient_share": 2.0}
    return context_seconds(sizes, **tensors, gpu=H100, constants=FREE, is_backward=is_backward)


def test_a_ring_waits_for_what_a_step_of_attention_does_not_hide() -> None:
    assert waited() == pytest.approx(3 * (HOP + MERGE))
    assert waited(attention=4 * 0.75 * HOP) == pytest.approx(3 * (0.25 * HOP + MERGE))
    assert waited(attention=100.0) == pytest.approx(3 * MERGE)


def test_gradients_are_sent_with_the_keys_and_the_last_hop_is_theirs_alone() -> None:
    assert waited(is_backward=True) == pytest.approx(3 * (3 * HOP + MERGE) + 2 * HOP)
    assert waited(attention=100.0, is_backward=True) == pytest.approx(3 * MERGE + 2 * HOP)


def test_a_ring_over_nodes_is_as_slow_as_its_hop_between_them() -> None:
    assert waited(cp=4, tp=4) == pytest.approx(3 * (9 * HOP + MERGE))


def test_own_keys_hide_a_gather_and_nothing_hides_the_scatter() -> None:
    gather = 3 * HOP
    assert waited("all_gather") == pytest.approx(gather)
    assert waited("all_gather", attention=4 * HOP) == pytest.approx(gather - HOP)
    assert waited("all_gather", attention=100.0, is_backward=True) == pytest.approx(2 * gather)


def test_heads_go_there_and_back() -> None:
    there = (2 * QUERIES + KEYS) * 3 / 4 / 450e9
    assert waited("all_to_all", attention=100.0) == pytest.approx(there)


def test_neighbours_exchange_heads_and_their_groups_pass_keys_on() -> None:
    there = (2 * QUERIES + KEYS) / 2 / 450e9
    assert waited("hierarchical") == pytest.approx(there + HOP + MERGE)


def test_one_rank_waits_for_nobody() -> None:
    assert waited(cp=1) == waited("all_gather", cp=1) == 0.0


def test_a_step_counts_both_ways_and_gradients_as_wide_as_the_code_sums_them() -> None:
    preset = PRESETS["llama3_8b"]
    run = Run(
        model=preset.model,
        lengths=preset.lengths,
        sizes=Sizes(world=8, cp=8),
        global_batch_size=8,
        framework=replace(MEGATRON, ring_gradient_bytes=OURS.ring_gradient_bytes),
    )
    narrow = replace(run, framework=MEGATRON)
    slow = replace(FREE, link_share=0.02)
    wide, thin = (step_time(one, H100, slow).exposed["cp"] for one in (run, narrow))
    key_bytes = 2 * 1024 * 8 * 128 * 2
    # Each layer of each sample has seven hops with keys, and the last hop of gradients.
    assert wide - thin == pytest.approx(32 * 8 * 8 * key_bytes / (0.02 * 450e9))
    assert step_time(run, H100, FREE).exposed["cp"] < 0.1 * thin
