"""Tests of what is refused of layouts with experts."""

from lightning_megatron.mesh import Sizes
from lightning_megatron.moe.layout import layout_faults


def test_experts_that_ep_does_not_divide_are_refused_with_what_would_do() -> None:
    assert layout_faults(8, Sizes(world=4, ep=4)) == []
    assert layout_faults(6, Sizes(world=4, ep=4)) == [
        "number of experts (6) must be a multiple of expert_model_parallel_size (4); it may be 1, 2, 3, 6"
    ]


def test_tp_without_sequence_parallelism_is_refused_under_ep_alone() -> None:
    (fault,) = layout_faults(8, Sizes(world=4, ep=4, tp=2))
    assert "needs sequence_parallel" in fault
    assert layout_faults(8, Sizes(world=4, ep=4, tp=2, sequence_parallel=True)) == []
    assert layout_faults(8, Sizes(world=4, ep=1, tp=2)) == []
    assert len(layout_faults(6, Sizes(world=4, ep=4, tp=2))) == 2
