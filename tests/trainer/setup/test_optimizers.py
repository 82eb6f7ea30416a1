"""What the strategy chooses for an optimizer whose user leaves it open."""

from typing import Any

import pytest
import torch

from lightning_megatron.sharding import Initial, shard_parameter
from lightning_megatron.trainer.setup.optimizers import choose_kernels

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def foreach_of(parameter: torch.nn.Parameter, device: torch.device, **settings: Any) -> Any:
    optimizer = torch.optim.AdamW([parameter], **settings)
    choose_kernels([optimizer], device)
    return optimizer.param_groups[0]["foreach"]


def test_weights_that_know_their_shard_are_stepped_at_once_on_a_gpu() -> None:
    sharded = shard_parameter((2, 2), initial=Initial())
    assert foreach_of(sharded, GPU) is True and foreach_of(sharded, CPU) is None
    # Of these torch knows by itself.
    assert foreach_of(torch.nn.Parameter(torch.zeros(2)), GPU) is None


@pytest.mark.parametrize("settings", [{"foreach": False}, {"fused": True}])
def test_what_a_user_says_stays(settings: Any) -> None:
    wanted = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], **settings).param_groups[0]["foreach"]
    assert foreach_of(shard_parameter((2, 2), initial=Initial()), GPU, **settings) is wanted


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
