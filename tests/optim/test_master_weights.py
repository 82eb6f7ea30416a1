"""Whatever the optimizer, sharded master weights step as parameters do on one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.data_parallel_comm import DataParallelComm
from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.master_weights import MasterWeights
from lightning_megatron.optim.update_scope import is_elementwise
from tests.harness.ranks import run_on_ranks
from tests.optim.test_gradients import no_group
from tests.pipeline.meshes import make_mesh

CPU = torch.device("cpu")
SHAPES: dict[str, tuple[int, ...]] = {
    "first": (7, 5),
    "bias": (7,),
    "second": (3, 7, 2),
    "seldom": (11,),
    "frozen": (4, 4),
    "number": (),
    "third": (5, 9),
}
Made = Callable[[list[dict[str, Any]]], Optimizer]
OPTIMIZERS: dict[str, Made] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "AdamW foreach amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.01, foreach=True, amsgrad=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "SGD nesterov": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.3),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.05),
    "of a user": lambda groups: NormedSGD(groups, {"lr": 0.1}),
}


class NormedSGD(Optimizer):
    """Steps by the gradient over its norm: a part of a parameter would go another way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad / (parameter.grad.norm() + 1e-3)


def parameters(dtype: torch.dtype, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    made = {n: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for n, shape in shapes.items()}
    for name, parameter in made.items():
        parameter.requires_grad_(name != "frozen")
    return made


def groups_of(named: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups with rates and decays of their own, by names."""
    decayed = [(name, p) for name, p in named.items() if p.dim() > 1]
    rest = [(name, p) for name, p in named.items() if p.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.02, "lr": 0.003}]


def gradients_of_step(step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    del made["frozen"]
    if step != 1:
        del made["seldom"]
    return made


class Training:
    """One rank's parameters, optimizer and scheduler."""

    def __init__(
        self, made: Made, mesh: Mesh, kind: Any, dtype: torch.dtype, low: torch.dtype | None, is_on_host: bool = False
    ) -> None:
        self.named, self.mesh = parameters(dtype), mesh
        self.optimizer = made(groups_of(self.named))
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        config = OptimizerConfig(kind=kind, bucket_size=60, cpu_offload=is_on_host)
        no_split = not is_elementwise(self.optimizer, "auto")
        self.gradients = Gradients(
            self.named.items(), set(), mesh, no_group, CPU, config=config, no_split=no_split, low=low
        )
        self.main = MasterWeights(self.gradients, [self.optimizer])
        self.dp_comm = DataParallelComm(self.gradients, self.main)

    def step(self, number: int) -> None:
        """Each data-parallel rank's share of the gradient is proportional to rank + 1; the shares sum to 1."""
        dp = self.mesh.dp
        share = 2 * (dp.rank + 1) / (dp.size * (dp.size + 1))
        self.gradients.free(dropped=False)
        for name, gradient in gradients_of_step(number, torch.float64).items():
            parameter = self.named[name]
            wanted = parameter.grad_dtype or parameter.dtype
            parameter.grad = (share * gradient).to(wanted)
        self.gradients.reduce(outside_over_stages=False)
        self.dp_comm.prepare_step()
        self.optimizer.step()
        self.dp_comm.update_params()
        self.scheduler.step()
        self.optimizer.zero_grad()


def plain(made: Made, dtype: torch.dtype, steps: int) -> dict[str, nn.Parameter]:
    """On one device, with no master weights."""
    named = parameters(dtype)
    optimizer = made(groups_of(named))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for number in range(steps):
        for name, gradient in gradients_of_step(number, dtype).items():
            named[name].grad = gradient
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return named


def apart(named: dict[str, nn.Parameter], wanted: dict[str, nn.Parameter]) -> float:
    return max(float((named[n].double() - wanted[n].double()).detach().abs().max()) for n in wanted)


def trained(kind: str, low: torch.dtype | None, is_on_host: bool) -> dict[str, Any]:
    """How far every optimizer is from one device; in float64, or in float32 with `low`."""
    mesh = make_mesh(Sizes(world=3))
    dtype = torch.float64 if low is None else torch.float32
    found: dict[str, Any] = {}
    for name, made in OPTIMIZERS.items():
        run = Training(made, mesh, kind, dtype, low, is_on_host)
        before = parameters(dtype)
        held = sum(p.numel() for group in run.optimizer.param_groups for p in group["params"])
        for number in range(4):
            run.step(number)
        lowered = {str(p.dtype) for p in run.named.values() if p.dim() > 1 and p.requires_grad}
        run.dp_comm.release()
        wanted = plain(made, dtype, 4)
        names = [group["param_names"] for group in run.optimizer.param_groups]
        assert [len(group["params"]) for group in run.optimizer.param_groups] == [len(own) for own in names]
        found[name] = {
            "apart": apart(run.named, wanted),
            "moved": apart(before, wanted),
            "held": held,
            "names": names,
            "lowered": lowered,
            "after": {str(p.dtype) for p in run.named.values()},
            "is frozen unchanged": bool(torch.equal(run.named["frozen"], before["frozen"])),
        }
    return found


NUM = sum(torch.Size(shape).numel() for shape in SHAPES.values())
FROZEN = 16


@pytest.mark.parametrize("is_on_host", [False, True])
@pytest.mark.parametrize("kind", ["distributed", "replicated"])
@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_every_optimizer_steps_as_on_one_device(kind: str, low: torch.dtype | None, is_on_host: bool) -> None:
    by_rank = run_on_ranks(3, trained, kind, low, is_on_host)
    for name in OPTIMIZERS:
        for found in by_rank:
            result = found[name]
            # Gradients do not depend on weights here, so those of float32 are not rounded by bfloat16.
            assert result["apart"] < (1e-12 if low is None else 1e-5), name
            assert result["moved"] > 0.01 and result["is frozen unchanged"]
            assert result["lowered"] == {"torch.float64" if low is None else "torch.bfloat16"}
            assert result["after"] == {"torch.float64" if low is None else "torch.float32"}
        # A frozen parameter is in no bucket: the optimizer of every data-parallel rank has it.
        held = sum(found[name]["held"] for found in by_rank)
        assert held == (NUM + 2 * FROZEN if kind == "distributed" else 3 * NUM)
        all_names = [{n for found in by_rank for n in found[name]["names"][group]} for group in (0, 1)]
        assert all_names == [{"first", "second", "frozen", "third"}, {"bias", "seldom", "number"}]


def names_and_parts() -> list[tuple[str, int, int]]:
    mesh = make_mesh(Sizes(world=3))
    run = Training(OPTIMIZERS["AdamW"], mesh, "distributed", torch.float64, None)
    return [(o.param.name, o.range.start, o.range.end) for o in run.gradients.param_shards]


def test_data_parallel_ranks_own_unequal_parts_and_together_everything_once() -> None:
    by_rank = run_on_ranks(3, names_and_parts)
    sizes = [sum(end - start for _, start, end in parts) for parts in by_rank]
    assert len(set(sizes)) > 1 and sum(sizes) == NUM - FROZEN
    parts = [part for parts in by_rank for part in parts]
    assert any(start > 0 for _, start, _ in parts), "some part begins in the middle of a parameter"


# --- what somebody does to the weights between steps ------------------------------------------------------------------


def alone(low: torch.dtype | None, made: str = "SGD", is_on_host: bool = False) -> Training:
    return Training(OPTIMIZERS[made], Mesh.single(), "replicated", torch.float32, low, is_on_host)


@pytest.mark.parametrize("is_on_host", [False, True])
@pytest.mark.parametrize("low", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["first", "bias"])
@pytest.mark.parametrize("how", ["in place", "data replaced", "data replaced by float32"])
def test_a_changed_weight_is_taken_over(low: torch.dtype | None, name: str, how: str, is_on_host: bool) -> None:
    run = alone(low, is_on_host=is_on_host)
    run.step(0)
    parameter = run.named[name]
    master = next(shard.tensor for shard in run.gradients.param_shards if shard.param.name == name)
    untouched = master.detach().clone().view(-1)[1:]
    changed = parameter.detach().clone()
    changed.view(-1)[0] = 5.0
    if how == "in place":
        with torch.no_grad():
            parameter.copy_(changed)
    else:
        parameter.data = changed.float() if how.endswith("float32") else changed
    run.dp_comm.synchronize()
    assert master.view(-1)[0] == 5.0 and parameter.dtype == run.main._param_views[parameter].dtype
    # What was not changed has all its bits.
    assert torch.equal(master.detach().view(-1)[1:], untouched)
    run.step(2)
    assert float(parameter.detach().view(-1)[0]) != 5.0, "it is trained on"
    torch.testing.assert_close(parameter.float(), master, atol=0.02, rtol=0.01)


@pytest.mark.parametrize("is_on_host", [False, True])
def test_released_weights_have_every_bit_of_the_master_weights_and_no_gradient_stands_on_them(is_on_host: bool) -> None:
    run = alone(torch.bfloat16, "AdamW", is_on_host)
    for number in range(3):
        run.step(number)
    for parameter in run.named.values():
        if parameter.requires_grad:
            parameter.grad = torch.ones(parameter.shape, dtype=parameter.grad_dtype)
    run.gradients.reduce(outside_over_stages=False)
    mains = {shard.param.name: shard.tensor.detach().clone() for shard in run.gradients.param_shards}
    assert not torch.equal(mains["first"], mains["first"].bfloat16().float())
    run.dp_comm.release()
    for name, main in mains.items():
        assert run.named[name].dtype == torch.float32 and torch.equal(run.named[name], main)
    run.optimizer.zero_grad(set_to_none=False)
    for name, main in mains.items():
        assert torch.equal(run.named[name], main)


def test_a_parameter_given_to_the_optimizer_later_is_refused() -> None:
    named = parameters(torch.float32)
    first = named.pop("first")
    optimizer = torch.optim.SGD([p for p in named.values() if p.requires_grad], lr=0.1)
    gradients = Gradients([*named.items(), ("first", first)], set(), Mesh.single(), no_group, CPU, low=torch.bfloat16)
    dp_comm = DataParallelComm(gradients, MasterWeights(gradients, [optimizer]))
    dp_comm.prepare_step()
    optimizer.add_param_group({"params": [first]})
    with pytest.raises(RuntimeError, match=r"param group 1 of SGD got a parameter after training began.*replicated"):
        dp_comm.prepare_step()
