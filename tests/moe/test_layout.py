"""Tests of what is refused of layouts with experts."""

from typing import Any

from lightning_megatron.mesh import Sizes
from lightning_megatron.moe import layout
from lightning_megatron.moe.config import MoEConfig, RouterConfig


def layout_faults(num_experts: int, sizes: Sizes, *, ffn: int = 24, **options: Any) -> list[str]:
    return layout.layout_faults(MoEConfig(router=RouterConfig(num_experts=num_experts), **options), ffn, sizes)


def test_experts_that_ep_does_not_divide_are_refused_with_what_would_do() -> None:
    assert layout_faults(8, Sizes(world=4, ep=4)) == []
    assert layout_faults(6, Sizes(world=4, ep=4)) == [
        "number of experts (6) must be a multiple of expert_model_parallel_size (4); expert_model_parallel_size may be "
        "1, 2, 3, 6"
    ]


def test_widths_that_their_axis_does_not_divide_are_refused_with_what_would_do() -> None:
    assert layout_faults(8, Sizes(world=4, etp=4)) == []
    assert layout_faults(8, Sizes(world=4, etp=4), ffn=6) == [
        "ffn_hidden_size of an expert (6) must be a multiple of expert_tensor_parallel_size (4); "
        "expert_tensor_parallel_size may be 1, 2, 3, 6"
    ]
    (fault,) = layout_faults(8, Sizes(world=4, tp=4), shared_expert_intermediate_size=10)
    assert fault.startswith("shared_expert_intermediate_size (10) must be a multiple of tensor_model_parallel_size (4)")
    assert layout_faults(8, Sizes(world=4, tp=4), shared_expert_intermediate_size=12) == []


def test_tp_without_sequence_parallelism_is_refused_under_ep_alone() -> None:
    (fault,) = layout_faults(8, Sizes(world=4, ep=4, tp=2))
    assert "needs sequence_parallel" in fault
    assert layout_faults(8, Sizes(world=4, ep=4, tp=2, sequence_parallel=True)) == []
    assert layout_faults(8, Sizes(world=4, ep=1, tp=2)) == []
    assert len(layout_faults(6, Sizes(world=4, ep=4, tp=2))) == 2
