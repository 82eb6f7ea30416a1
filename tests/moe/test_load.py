"""Tests of the end of a step: what routers learn and report, in how many messages, once."""

from typing import Any

import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.moe.config import AuxLoss, RouterConfig
from lightning_megatron.moe.router import Router, end_step
from lightning_megatron.sharding import Initial
from tests.harness.threads import new_group, run_on_threads


def build(num_experts: int, mesh: Mesh) -> Router:
    config = RouterConfig(num_experts=num_experts, bias_update_rate=0.5, aux_losses=(AuxLoss(scope="global"),))
    return Router(config, 4, tp=mesh.tp, cut=mesh.tp, name="router", initial=Initial())


def counts(chosen: list[int]) -> Tensor:
    """Of tokens that each chose what they like best."""
    return torch.tensor([chosen, chosen])


def sums(num_tokens: float, loss: float) -> Tensor:
    return torch.tensor([num_tokens, loss], dtype=torch.float64)


def test_routers_of_any_size_learn_from_all_ranks_in_two_messages(monkeypatch: Any) -> None:
    messages = []
    all_reduce = collectives.all_reduce

    def counting(x: Tensor, axis: Any, *args: Any, **options: Any) -> Any:
        if axis.size > 1:
            messages.append(axis.rank)
        return all_reduce(x, axis, *args, **options)

    monkeypatch.setattr(collectives, "all_reduce", counting)

    def on_rank(world: Any) -> None:
        mesh = Mesh.build(Sizes(world=2), world.rank(), new_group)
        routers = [build(2, mesh), build(3, mesh)]
        # The first rank has two calls, the second one: data-parallel ranks with batches of different sizes.
        routers[0].records.add(0, [counts([3, 1]), counts([0, 2])][mesh.dp.rank], sums(4, 1))
        routers[1].records.add(0, counts([1, 1, 1]), sums(3, 6))
        if mesh.dp.is_first:
            routers[0].records.add(1, counts([0, 4]), sums(4, 3))
        reports = end_step(routers, cut=mesh.tp, data=mesh.axis("dp+cp"))
        assert [report.counts_E.tolist() for report in reports] == [[3, 7], [2, 2, 2]]
        assert float(reports[0].losses["global"]) == 5 / 12 and float(reports[1].losses["global"]) == 2
        assert routers[0].expert_bias.tolist() == [0.5, -0.5] and routers[1].expert_bias.tolist() == [0.0] * 3
        assert routers[0].global_tokens_per_expert.tolist() == [3, 7]

    run_on_threads(2, on_rank)
    assert sorted(messages) == [0, 0, 1, 1]


def test_a_step_is_learnt_from_once_and_a_skipped_one_not_at_all() -> None:
    mesh = Mesh.single()
    router = build(2, mesh)
    router.records.add(0, counts([4, 0]), sums(4, 1))
    end_step([router], cut=mesh.tp, data=mesh.dp)
    assert router.expert_bias.tolist() == [-0.5, 0.5]
    # A step in which no router was called moves nothing.
    report = end_step([router], cut=mesh.tp, data=mesh.dp)[0]
    assert router.expert_bias.tolist() == [-0.5, 0.5] and report.counts_E.tolist() == [0, 0]
    assert router.global_tokens_per_expert.tolist() == [4, 0]
    router.records.add(0, counts([4, 0]), sums(4, 1))
    router.records.forget()
    end_step([router], cut=mesh.tp, data=mesh.dp)
    assert router.expert_bias.tolist() == [-0.5, 0.5]


def test_the_dropped_share_is_that_of_all_choices_and_zero_where_there_is_none() -> None:
    mesh = Mesh.single()
    routers = [build(2, mesh), build(2, mesh), build(2, mesh)]
    routers[0].records.add(0, counts([6, 2]), sums(4, 1))
    routers[1].records.add(0, counts([6, 2]), sums(4, 1))
    routers[1].records.add_accepted(0, torch.tensor([3, 1]))
    reports = end_step(routers, cut=mesh.tp, data=mesh.dp)
    assert [float(report.dropped_share) for report in reports] == [0.0, 0.5, 0.0]
    assert [report.accepted_E.tolist() for report in reports] == [[6, 2], [3, 1], [0, 0]]
    assert reports[1].load_E.tolist() == [1.5, 0.5] and reports[2].load_E.tolist() == [1.0, 1.0]


def test_a_recomputed_call_counts_once_and_its_accepted_tokens_too() -> None:
    mesh = Mesh.single()
    router = build(2, mesh)
    for _ in range(2):
        router.records.add(3, counts([3, 1]), sums(2, 1))
        router.records.add_accepted(3, torch.tensor([1, 1]))
    report = end_step([router], cut=mesh.tp, data=mesh.dp)[0]
    assert report.counts_E.tolist() == [3, 1] and report.accepted_E.tolist() == [1, 1]
    assert float(report.dropped_share) == 0.5


def test_a_stage_without_routers_says_nothing() -> None:
    mesh = Mesh.imagine(0, Sizes(world=4, tp=2, sequence_parallel=True))
    assert end_step([], cut=mesh.tp, data=mesh.axis("dp+cp")) == []
