"""What the strategy chooses for an optimizer whose user leaves it open."""

from typing import Any

import pytest
import torch

from lightning_megatron.sharding import Initial, shard_parameter
from lightning_megatron.trainer.setup.optimizers import choose_kernels

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def chosen_for(parameter: torch.nn.Parameter, device: torch.device, **settings: Any) -> tuple[Any, Any]:
    """Whether AdamW's kernels are those over lists of weights, and whether fused ones."""
    optimizer = torch.optim.AdamW([parameter], **settings)
    choose_kernels([optimizer], device)
    [group] = optimizer.param_groups
    return group["foreach"], group["fused"]


def sharded(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    parameter = shard_parameter((2, 2), initial=Initial())
    parameter.data = parameter.data.to(dtype)
    return parameter


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_is_fused_on_a_gpu_alone(dtype: torch.dtype) -> None:
    for parameter in (sharded(dtype), torch.nn.Parameter(torch.zeros(2, 2, dtype=dtype))):
        assert chosen_for(parameter, GPU) == (None, True) and chosen_for(parameter, CPU) == (None, None)


def test_weights_that_no_fused_kernel_rounds_alike_or_takes_are_stepped_at_once() -> None:
    assert chosen_for(sharded(torch.bfloat16), GPU) == (True, None)
    transposed = torch.nn.Parameter(torch.zeros(2, 3).t())
    # Of this torch knows by itself that it is to be stepped with others.
    assert chosen_for(transposed, GPU) == (None, None)
    optimizer = torch.optim.RMSprop([sharded()])
    choose_kernels([optimizer], GPU)
    assert optimizer.param_groups[0]["foreach"] is True


def stepped(dtype: torch.dtype, device: torch.device, num_parts: int, **settings: Any) -> torch.Tensor:
    """Weights after some steps of AdamW, which has them in parts."""
    source = torch.Generator().manual_seed(0)
    drawn = torch.randn(21, 10007, generator=source, dtype=torch.float64).to(dtype).to(device)
    parts = [torch.nn.Parameter(part.clone()) for part in drawn[0].tensor_split(num_parts)]
    optimizer = torch.optim.AdamW(parts, lr=1e-3, **settings)
    for gradient in drawn[1:]:
        for parameter, part in zip(parts, gradient.tensor_split(num_parts), strict=True):
            parameter.grad = part.clone()
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in parts])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fused_adamw_differs_in_the_last_bits_alone_and_in_none_between_shards(dtype: torch.dtype) -> None:
    fused, at_once = (stepped(dtype, GPU, 1, **{name: True}) for name in ("fused", "foreach"))
    assert torch.equal(fused, stepped(dtype, GPU, 97, fused=True))
    # Twenty steps, each with one rounding of a weight and some five of what it adds, at most the rate.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(fused, at_once, rtol=20 * eps, atol=5 * 20 * 1e-3 * eps)


@pytest.mark.parametrize("settings", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_what_a_user_says_stays(settings: Any) -> None:
    assert chosen_for(sharded(), GPU, **settings) == (settings.get("foreach"), settings.get("fused"))


def test_a_user_who_wants_no_fused_kernel_gets_none() -> None:
    assert chosen_for(sharded(), GPU, fused=False) == (True, False)
    assert chosen_for(torch.nn.Parameter(torch.zeros(2)), GPU, differentiable=True) == (None, None)


def test_a_step_on_the_host_reads_each_weight_once() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    plain, closure_free = torch.optim.AdamW([parameter]), torch.optim.RMSprop([parameter])
    exact, chosen = torch.optim.AdamW([parameter], differentiable=True), torch.optim.AdamW([parameter], foreach=True)
    choose_kernels([plain, closure_free, exact, chosen], GPU, steps_on_host=True)
    assert plain.param_groups[0]["fused"] is True and "fused" not in closure_free.param_groups[0]
    assert not exact.param_groups[0]["fused"] and chosen.param_groups[0]["fused"] is None


def test_an_optimizer_without_the_setting_is_left_alone() -> None:
    optimizer = torch.optim.LBFGS([shard_parameter((2, 2), initial=Initial())])
    choose_kernels([optimizer], GPU)
    assert "foreach" not in optimizer.param_groups[0]
