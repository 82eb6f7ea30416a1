"""A step under a schedule, with no Lightning: the loss and every gradient of the unsplit model, on real ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.comm.p2p import Mailbox
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.pipeline.lower import add_messages
from lightning_megatron.pipeline.module import PipelineModule
from lightning_megatron.pipeline.runtime import Runtime
from lightning_megatron.pipeline.schedule import one_f_one_b
from lightning_megatron.pipeline.scheduled import ScheduledCall
from tests.harness.ranks import run_on_ranks
from tests.pipeline.meshes import make_mesh

CPU = torch.device("cpu")


def layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {f"l{i}": nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for i in range(5)}


def data(num: int) -> list[Tensor]:
    """Microbatches of different sizes: no shape may be assumed."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2 + m % 3, 4, generator=generator, dtype=torch.float64) for m in range(num)]


def unsplit(num: int) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    model = PipelineModule.from_modules(layers(), mesh=Mesh.single())
    inputs = [x.requires_grad_() for x in data(num)]
    losses = [model(x).square().sum() for x in inputs]
    torch.stack(losses).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [loss.item() for loss in losses], grads, [x.grad for x in inputs if x.grad is not None]


def staged(pp: int, num: int) -> tuple[list[float], dict[str, Tensor], list[Tensor], int]:
    mesh = make_mesh(Sizes(world=pp, pp=pp))
    model = PipelineModule.from_modules(layers(), mesh=mesh)
    inputs = [x.requires_grad_() for x in data(num)]
    losses: list[float] = []
    entered = 0

    def enter(microbatch: int) -> Tensor:
        nonlocal entered
        entered += 1
        try:
            loss: Tensor = model(inputs[microbatch]).square().sum()
        except Exception:
            pytest.fail("the exit of a stage must pass `except Exception`")
        losses.append(loss.item())
        return loss

    call = ScheduledCall([model], mesh.pp, enter, lambda loss: loss.backward(), [0] * num)
    model.driver = call
    runtime = Runtime(mesh.pp, Mailbox(mesh.pp, CPU))
    steps = add_messages(one_f_one_b(pp=pp, microbatches=num))[mesh.pp.rank]
    for _ in range(2):
        # Twice: the second must find nothing left of the first.
        runtime.run(steps, call)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses, grads, [x.grad for x in inputs if x.grad is not None], entered


@pytest.mark.parametrize(("pp", "num"), [(2, 1), (2, 4), (3, 2), (4, 7)])
def test_a_schedule_gives_the_losses_and_gradients_of_the_unsplit_model(pp: int, num: int) -> None:
    losses, grads, input_grads = unsplit(num)
    covered: set[str] = set()
    for rank, (own_losses, own_grads, own_input_grads, entered) in enumerate(run_on_ranks(pp, staged, pp, num)):
        assert entered == 2 * num
        is_last, is_first = rank == 0, rank == pp - 1
        assert own_losses == (pytest.approx(losses * 2, rel=1e-12) if is_last else [])
        for name, grad in own_grads.items():
            torch.testing.assert_close(grad, 2 * grads[name], rtol=1e-12, atol=1e-12)
        covered |= own_grads.keys()
        # What is before the model gets its gradient on the first stage.
        assert len(own_input_grads) == (num if is_first else 0)
        for grad, wanted in zip(own_input_grads, input_grads, strict=False):
            torch.testing.assert_close(grad, 2 * wanted, rtol=1e-12, atol=1e-12)
    assert covered == grads.keys()


class Frozen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach() + 1


def frozen_ends(kind: str) -> Any:
    """Nothing to differentiate before a stage, or an output of a stage that needs no gradient."""
    mesh = make_mesh(Sizes(world=2, pp=2))
    made = {"a": nn.Linear(4, 4).double(), "b": nn.Linear(4, 4).double()}
    if kind == "frozen":
        made["a"].requires_grad_(False)
    elif kind == "detached":
        made["b"] = Frozen()
    model = PipelineModule.from_modules(made, mesh=mesh)
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    inputs = data(2)

    def enter(microbatch: int) -> Tensor:
        return (model(inputs[microbatch]) * weight).sum()

    call = ScheduledCall([model], mesh.pp, enter, lambda loss: loss.backward(), [0, 0])
    model.driver = call
    steps = add_messages(one_f_one_b(pp=2, microbatches=2))[mesh.pp.rank]
    Runtime(mesh.pp, Mailbox(mesh.pp, CPU)).run(steps, call)
    return {n: p.grad for n, p in model.named_parameters()}, weight.grad


@pytest.mark.parametrize("kind", ["frozen", "detached"])
def test_stages_without_gradients_are_passed_through(kind: str) -> None:
    (last, weight_grad), (first, none) = run_on_ranks(2, frozen_ends, kind)
    assert weight_grad is not None and none is None
    if kind == "frozen":
        assert set(first.values()) == {None} and all(grad is not None for grad in last.values())
    else:
        assert all(grad is None or not grad.any() for grad in first.values()) and not last


def fails_in_stage() -> None:
    mesh = make_mesh(Sizes(world=2, pp=2))
    model = PipelineModule.from_modules({"a": nn.Linear(4, 4), "b": nn.Linear(3, 4)}, mesh=mesh)
    call = ScheduledCall([model], mesh.pp, lambda m: model(torch.zeros(2, 4)).sum(), lambda loss: None, [0])
    model.driver = call
    Runtime(mesh.pp, Mailbox(mesh.pp, CPU)).run(add_messages(one_f_one_b(pp=2, microbatches=1))[mesh.pp.rank], call)


def test_an_error_tells_the_stage_and_the_microbatch() -> None:
    with pytest.raises(AssertionError, match=r"(?s)shapes cannot be multiplied.*in action 1F0: stage 1 of 2, microb"):
        run_on_ranks(2, fails_in_stage)
