"""Operations on tensors without numbers give what torch's own shape functions give, whatever they write to."""

import torch

from lightning_megatron.planner.memory_tracker import MemoryTracker

META = torch.device("meta")


def test_an_operation_that_writes_to_several_tensors_returns_them() -> None:
    x, low, high = torch.empty(3, 4, device=META), torch.empty(3, device=META), torch.empty(3, device=META)
    with MemoryTracker(META):
        found = torch.aminmax(x, dim=1, out=(low, high))
    assert found.min is low and found.max is high


def test_an_operation_makes_a_new_tensor_each_time() -> None:
    x = torch.empty(3, 4, device=META)
    with MemoryTracker(META):
        first, second = x + 1, x + 1
        written = x.add_(1)
    assert first.shape == second.shape == (3, 4) and first.untyped_storage()._cdata != second.untyped_storage()._cdata
    assert written is x
