"""What hooks do to the gradients on parameters reaches the master weights; nothing else does, whatever the dtypes."""

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Mesh
from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.hook_gradients import HookGradients
from lightning_megatron.optim.master_weights import MasterWeights
from tests.optim.test_gradients import no_group

WANTED = torch.tensor([[1.0, -2.0], [4.0, 8.0]])


class Reduced:
    """Two weights whose gradients are reduced and shown; master weights in float32."""

    def __init__(self, grad_dtype: torch.dtype) -> None:
        self.model = {name: nn.Parameter(torch.ones(2, 2)) for name in ("a", "b")}
        named = list(self.model.items())
        self.optimizer = torch.optim.SGD(self.model.values(), lr=1.0)
        self.gradients = Gradients(
            named, set(), Mesh.single(), no_group, torch.device("cpu"), dtype=grad_dtype, low=torch.bfloat16
        )
        MasterWeights(self.gradients, [self.optimizer])
        for parameter in self.model.values():
            parameter.grad = WANTED.to(grad_dtype)
        self.gradients.reduce(outside_over_stages=False)
        self.hooks = HookGradients(self.gradients)
        self.hooks.show()

    @property
    def stepped(self) -> list[Tensor | None]:
        """Gradients that the optimizer will step by."""
        return [parameter.grad for parameter in self.optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_changed_in_place_and_put_in_their_place(dtype: torch.dtype) -> None:
    found = Reduced(dtype)
    a, b = found.model.values()
    assert a.grad is not None and b.grad is not None
    assert torch.equal(a.grad, WANTED.to(dtype)) and torch.equal(b.grad, WANTED.to(dtype))
    a.grad.mul_(0.5)
    b.grad = torch.full_like(b.grad, 3.0)
    found.hooks.take()
    first, second = found.stepped
    assert first is not None and second is not None and first.dtype == torch.float32
    assert torch.equal(first, 0.5 * WANTED) and torch.equal(second, torch.full((2, 2), 3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_by_data_count_and_leave_other_elements_alone(dtype: torch.dtype) -> None:
    found = Reduced(dtype)
    fine = 1.0 + 2.0**-12
    # What clipping leaves in the master weights has more digits than a bucket of bfloat16.
    for gradient in found.stepped:
        assert gradient is not None
        gradient.mul_(fine)
    found.hooks.refresh()
    a = found.model["a"].grad
    assert a is not None
    a.data[0, 0] = 16.0
    found.hooks.take()
    first, second = found.stepped
    wanted = WANTED * fine
    assert second is not None and torch.equal(second, wanted)
    wanted[0, 0] = 16.0
    assert first is not None and torch.equal(first, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_dropped_is_not_stepped_by(dtype: torch.dtype) -> None:
    found = Reduced(dtype)
    found.model["a"].grad = None
    found.hooks.take()
    first, second = found.stepped
    assert first is None and second is not None and torch.equal(second, WANTED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_clipped_on_master_weights_stays_clipped(dtype: torch.dtype) -> None:
    found = Reduced(dtype)
    for gradient in found.stepped:
        assert gradient is not None
        gradient.mul_(0.25)
    found.hooks.take()
    assert all(gradient is not None and torch.equal(gradient, 0.25 * WANTED) for gradient in found.stepped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_an_optimizer_has_zeroed_does_not_come_back(dtype: torch.dtype) -> None:
    found = Reduced(dtype)
    for parameter in found.model.values():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)
    found.optimizer.zero_grad()
    found.hooks.end(dropped=False)
    assert found.stepped == [None, None]


def test_what_a_module_has_zeroed_is_zeroed_for_its_optimizer() -> None:
    found = Reduced(torch.float32)
    found.model["a"].grad = None
    found.hooks.end(dropped=False)
    first, second = found.stepped
    assert first is None and second is not None and torch.equal(second, WANTED)
