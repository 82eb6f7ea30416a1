"""A step takes longer where more is done or sent, and the parts of its time add up."""

from dataclasses import replace

import pytest

from lightning_megatron.mesh import Sizes
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.planner.constants import Constants, fitted
from lightning_megatron.planner.flops import step_flops
from lightning_megatron.planner.hardware import gpu_of
from lightning_megatron.planner.memory import rank_memory
from lightning_megatron.planner.network import Group, exchange_seconds, gather_seconds, groups_of
from lightning_megatron.planner.presets import PRESETS
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.step_time import StepTime, step_time
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.transformer.recompute import RecomputeConfig

H100 = gpu_of("h100")
LLAMA = PRESETS["llama3_70b"]
CONSTANTS = Constants()


def run_of(**changes: object) -> Run:
    fields = {
        "model": LLAMA.model,
        "texts": LLAMA.texts,
        "sizes": Sizes(world=64, tp=4, pp=4, sequence_parallel=True),
        "global_batch_size": 64,
        "optimizer": OptimizerConfig(kind="distributed", overlap_grad_reduce=True, overlap_param_gather=True),
    }
    return Run(**(fields | changes))  # type: ignore[arg-type]


def time_of(run: Run) -> StepTime:
    return step_time(run, H100, CONSTANTS)


def test_the_parts_of_a_step_add_up_and_none_is_negative() -> None:
    time = time_of(run_of())
    parts = [time.compute, *time.exposed.values(), time.bubble, time.optimizer, time.other]
    assert sum(parts) == pytest.approx(time.total) and min(parts) >= 0


def test_no_product_is_faster_than_the_measured_ceiling() -> None:
    run = run_of()
    flops = 6 * run.anatomy.parameters() * run.num_tokens / 64
    assert time_of(run).compute > flops / H100.matmul_flops(is_fp8=False)


@pytest.mark.parametrize(
    ("slower", "quicker"),
    [
        (run_of(recompute=RecomputeConfig(granularity="full")), run_of()),
        (run_of(), run_of(fp8=Fp8Config())),
        (run_of(), run_of(sizes=Sizes(world=64, tp=4, pp=4, vp=5, sequence_parallel=True))),
        (run_of(sizes=Sizes(world=64, tp=8, pp=2, sequence_parallel=True)), run_of()),
        (run_of(optimizer=OptimizerConfig(kind="distributed")), run_of()),
        (run_of(global_batch_size=128), run_of()),
        (run_of(recompute=RecomputeConfig(granularity="selective", parts=("mlp",))), run_of()),
    ],
    ids=["recompute", "half", "one chunk", "more tp", "no overlap", "more samples", "mlp again"],
)
def test_more_work_or_more_messages_take_longer(slower: Run, quicker: Run) -> None:
    assert time_of(slower).total > 1.001 * time_of(quicker).total


def test_accumulated_batches_are_summed_once_and_late() -> None:
    one, two = time_of(run_of()), time_of(run_of(num_accumulated=2))
    assert two.compute == 2 * one.compute and two.bubble == pytest.approx(2 * one.bubble)
    assert two.exposed["tp"] == 2 * one.exposed["tp"] and two.optimizer == one.optimizer
    late = time_of(run_of(optimizer=OptimizerConfig(kind="distributed", overlap_param_gather=True)))
    assert two.exposed["dp"] == late.exposed["dp"] > one.exposed["dp"]
    assert step_flops(run_of(num_accumulated=2)) == 2 * step_flops(run_of())
    assert run_of(num_accumulated=2).num_tokens == 2 * run_of().num_tokens
    # The sum of the batches before stands beside the gradients of the one at work.
    held, more = rank_memory(run_of(), 0), rank_memory(run_of(num_accumulated=2), 0)
    assert more.allocated - held.allocated == pytest.approx(held.gradients) and more.static == held.static


def test_full_recomputation_costs_a_forward() -> None:
    plain, again = time_of(run_of()), time_of(run_of(recompute=RecomputeConfig(granularity="full")))
    head = plain.forwards[-1] - plain.forwards[1]
    assert again.backwards[1] - plain.backwards[1] == pytest.approx(plain.forwards[1], rel=0.05)
    assert head > 0


def test_a_group_of_neighbours_shares_a_node_and_one_of_stages_does_not() -> None:
    groups = groups_of(Sizes(world=64, tp=4, pp=4, sequence_parallel=True))
    assert groups["tp"].is_on_one_node(H100) and not groups["pp"].is_on_one_node(H100)
    assert groups["replicas"] == Group(size=4, stride=4) and groups["replicas"].per_node(H100) == 2
    assert groups["pp"].stride == 16


def test_a_ring_over_nodes_uses_the_ports_of_all_its_ranks_on_a_node() -> None:
    free = replace(CONSTANTS, link_share=1.0, network_share=1.0, link_seconds=1e-12, network_seconds=1e-12)
    num_bytes = 1e9
    alone = gather_seconds(num_bytes, Group(size=8, stride=8), H100, free)
    paired = gather_seconds(num_bytes, Group(size=8, stride=4), H100, free)
    inside = gather_seconds(num_bytes, Group(size=8), H100, free)
    assert alone == pytest.approx(7 / 8 / 50) and paired == pytest.approx(7 / 8 / 100)
    assert inside == pytest.approx(7 / 8 / 450)


def test_an_exchange_sends_over_the_network_what_leaves_the_node() -> None:
    free = replace(CONSTANTS, link_share=1.0, exchange_share=1.0, link_seconds=1e-12, network_seconds=1e-12)
    assert exchange_seconds(1e9, Group(size=8), H100, free) == pytest.approx(7 / 8 / 450)
    assert exchange_seconds(1e9, Group(size=32), H100, free) == pytest.approx(24 / 32 / 50)


def test_a_rank_without_companions_sends_nothing() -> None:
    assert gather_seconds(1e9, Group(size=1), H100, CONSTANTS) == 0.0
    assert exchange_seconds(1e9, Group(size=1), H100, CONSTANTS) == 0.0


def test_fitted_constants_are_within_their_meaning() -> None:
    constants = fitted()
    for family in ("volta", "ampere", "hopper", "blackwell"):
        assert 0.5 < constants.product_share(family, is_fp8=False) < 1
    assert 0 < constants.step_seconds < 0.3 and 0 < constants.straggling < 0.02
