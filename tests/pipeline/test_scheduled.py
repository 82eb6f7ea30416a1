"""A step under a schedule, with no Lightning: the loss and every gradient of the unsplit model, on real ranks."""

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Mesh, Sizes, StageLayout
from lightning_megatron.pipeline.module import Part, PipelineModule
from lightning_megatron.pipeline.plans import training_plan
from lightning_megatron.pipeline.registry import placement_of
from lightning_megatron.pipeline.runtime import Runtime
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.scheduled import ScheduledCall
from lightning_megatron.sharding import Initial
from lightning_megatron.tensor.linear import ColumnParallelLinear
from lightning_megatron.tensor.weight_gradients import WeightGradients, share
from tests.harness.ranks import run_on_ranks
from tests.pipeline.meshes import make_mailbox, make_mesh

LAYERS = 8


SCHEDULES = [
    Schedule(name="1f1b", pp=2, chunks=1, microbatches=1),
    Schedule(name="1f1b", pp=2, chunks=1, microbatches=4),
    Schedule(name="1f1b", pp=3, chunks=1, microbatches=2),
    Schedule(name="1f1b", pp=4, chunks=1, microbatches=7),
    Schedule(name="gpipe", pp=2, chunks=3, microbatches=3),
    Schedule(name="interleaved", pp=2, chunks=2, microbatches=4),
    Schedule(name="interleaved", pp=2, chunks=3, microbatches=3),
    Schedule(name="interleaved", pp=3, chunks=2, microbatches=7, group_size=4),
    Schedule(name="interleaved", pp=4, chunks=2, microbatches=5),
    Schedule(name="zb_h1", pp=2, chunks=1, microbatches=4),
    Schedule(name="zb_h1", pp=4, chunks=1, microbatches=6),
    Schedule(name="zb_v", pp=2, chunks=2, microbatches=1),
    Schedule(name="zb_v", pp=2, chunks=2, microbatches=4),
    Schedule(name="zb_v", pp=4, chunks=2, microbatches=6),
]


def sizes_of(schedule: Schedule, text: str = "") -> Sizes:
    return Sizes(
        world=schedule.pp,
        pp=schedule.pp,
        vp=schedule.chunks,
        placement=placement_of(schedule.name),
        stage_layout=StageLayout(text=text),
    )


class Chain(PipelineModule):
    """A chain of layers, between which one tensor travels, or a dict with what all layers read."""

    def __init__(self, mesh: Mesh, travels: str) -> None:
        def build(i: int) -> nn.Module:
            torch.manual_seed(i)
            if i % 3 == 0:
                # A user's own module, which puts no gradient off.
                return nn.Linear(4, 4).double()
            single = Mesh.single()
            layer = ColumnParallelLinear(4, 4, tp=single.tp, sp=single.sp, bias=True, initial=Initial(std=0.0)).double()
            for parameter in layer.parameters():
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(i))
            return layer

        super().__init__([Part(name=f"l{i}", build=partial(build, i)) for i in range(LAYERS)], mesh=mesh)
        self.travels = travels

    def prepare(self, x: Tensor) -> tuple[Any, None]:
        if self.travels == "dict":
            counts = torch.arange(len(x))
            return {"x": x, "memory": x.tanh(), "counts": counts, "half": x.detach().half()}, None
        return x, None

    def run_part(self, name: str, hidden: Any, context: None) -> Any:
        layer = self.get_submodule(name)
        if self.travels == "tensor":
            return layer(hidden).tanh()
        assert hidden["counts"].tolist() == list(range(len(hidden["x"]))) and hidden["half"].dtype is torch.float16
        x = (layer(hidden["x"]) + hidden["memory"]).tanh()
        return {**hidden, "x": x}

    def run_stage(self, stage: int, hidden: Any, context: None) -> Any:
        hidden = super().run_stage(stage, hidden, context)
        return hidden["x"] if self.travels == "dict" and stage == self.mesh.sizes.num_stages - 1 else hidden


def data(num: int, is_even: bool) -> list[Tensor]:
    """Microbatches, of different sizes on request: no shape may be assumed."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2 if is_even else 2 + m % 3, 4, generator=generator, dtype=torch.float64) for m in range(num)]


def unsplit(num: int, travels: str, is_even: bool) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    model = Chain(Mesh.single(), travels)
    inputs = [x.requires_grad_() for x in data(num, is_even)]
    losses = [model(x).square().sum() for x in inputs]
    torch.stack(losses).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [loss.item() for loss in losses], grads, [x.grad for x in inputs if x.grad is not None]


def staged(schedule: Schedule, travels: str, text: str) -> tuple[list[float], dict[str, Tensor], list[Tensor], int]:
    mesh = make_mesh(sizes_of(schedule, text))
    model = Chain(mesh, travels)
    gradients = WeightGradients()
    share(model, gradients)
    num = schedule.microbatches
    inputs: list[Tensor] = []
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

    call = ScheduledCall([model], mesh, enter, lambda loss: loss.backward(), [0] * num, gradients.opened)
    model.driver = call
    runtime = Runtime(mesh.pp, make_mailbox(mesh))
    for is_even in (True, True, False, True):
        # Several times: nothing may be left of the run before. The second run expects the shapes of the first.
        inputs[:] = [x.requires_grad_() for x in data(num, is_even)]
        losses.clear()
        entered = 0
        model.zero_grad()
        runtime.run(training_plan(schedule), call)
        if not is_even:
            uneven = losses[:]
    assert bool(uneven) == mesh.pp.is_last
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses, grads, [x.grad for x in inputs if x.grad is not None], entered


def check(schedule: Schedule, travels: str, text: str = "") -> None:
    losses, grads, input_grads = unsplit(schedule.microbatches, travels, is_even=True)
    covered: set[str] = set()
    sizes = sizes_of(schedule)
    for global_rank, found in enumerate(run_on_ranks(schedule.pp, staged, schedule, travels, text)):
        own_losses, own_grads, own_input_grads, entered = found
        rank = schedule.pp - 1 - global_rank
        assert entered == schedule.chunks * schedule.microbatches
        assert own_losses == (pytest.approx(losses, rel=1e-12) if global_rank == 0 else [])
        for name, grad in own_grads.items():
            torch.testing.assert_close(grad, grads[name], rtol=1e-12, atol=1e-12)
        covered |= own_grads.keys()
        # What is before the model gets its gradient on the first stage.
        assert len(own_input_grads) == (schedule.microbatches if sizes.pp_rank_of(0) == rank else 0)
        for grad, wanted in zip(own_input_grads, input_grads, strict=False):
            torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-12)
    assert covered == grads.keys()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.name}-pp{s.pp}-v{s.chunks}-m{s.microbatches}")
def test_a_schedule_gives_the_losses_and_gradients_of_the_unsplit_model(schedule: Schedule) -> None:
    check(schedule, "tensor")


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s.microbatches == 4 and s.pp == 2], ids=lambda s: s.name)
def test_a_dict_of_tensors_travels_between_stages(schedule: Schedule) -> None:
    check(schedule, "dict")


def test_a_stage_may_have_no_layer() -> None:
    text = f"t*{LAYERS - 2}||t|t"
    check(Schedule(name="interleaved", pp=2, chunks=2, microbatches=4), "tensor", text)
    check(Schedule(name="zb_v", pp=2, chunks=2, microbatches=2), "dict", text)


class Watched(ScheduledCall):
    """Looks, when a microbatch comes back, whether the output that was sent is still in memory."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.outputs: dict[tuple[int, int], Any] = {}
        self.is_alive: list[bool] = []

    def forward(self, stage: int, microbatch: int, received: Any) -> Any:
        output = super().forward(stage, microbatch, received)
        if output is not None:
            self.outputs[stage, microbatch] = weakref.ref(output.untyped_storage())
        return output

    def backward(self, stage: int, microbatch: int, grad: Any) -> Any:
        if (stage, microbatch) in self.outputs:
            self.is_alive.append(self.outputs[stage, microbatch]() is not None)
        return super().backward(stage, microbatch, grad)


def outputs_alive(chunks: int) -> list[bool]:
    schedule = Schedule(name="interleaved" if chunks > 1 else "1f1b", pp=2, chunks=chunks, microbatches=6)
    mesh = make_mesh(sizes_of(schedule))
    # Nothing that follows a linear saves its output.
    model = PipelineModule.from_modules({f"l{i}": nn.Linear(4, 4) for i in range(2 * chunks)}, mesh=mesh)
    inputs = torch.randn(6, 3, 4)
    call = Watched(
        [model], mesh, lambda m: model(inputs[m]).sum(), lambda loss: loss.backward(), [0] * 6, WeightGradients().opened
    )
    model.driver = call
    Runtime(mesh.pp, make_mailbox(mesh)).run(training_plan(schedule), call)
    return call.is_alive


@pytest.mark.parametrize("chunks", [1, 2])
def test_an_output_is_let_go_once_it_has_been_sent(chunks: int) -> None:
    is_alive = [each for rank in run_on_ranks(2, outputs_alive, chunks) for each in rank]
    assert len(is_alive) == 6 * (2 * chunks - 1) and not any(is_alive)


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
    inputs = data(2, is_even=True)

    def enter(microbatch: int) -> Tensor:
        return (model(inputs[microbatch]) * weight).sum()

    call = ScheduledCall([model], mesh, enter, lambda loss: loss.backward(), [0, 0], WeightGradients().opened)
    model.driver = call
    plan = training_plan(Schedule(name="1f1b", pp=2, chunks=1, microbatches=2))
    Runtime(mesh.pp, make_mailbox(mesh)).run(plan, call)
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
    opened = WeightGradients().opened
    call = ScheduledCall([model], mesh, lambda m: model(torch.zeros(2, 4)).sum(), lambda loss: None, [0], opened)
    model.driver = call
    plan = training_plan(Schedule(name="1f1b", pp=2, chunks=1, microbatches=1))
    Runtime(mesh.pp, make_mailbox(mesh)).run(plan, call)


def test_an_error_tells_the_stage_and_the_microbatch_and_marks_the_position() -> None:
    message = r"(?s)shapes cannot be multiplied.*in action 1F0: stage 1 of 2, microbatch 0.*rank 1 .*>1F0<"
    with pytest.raises(AssertionError, match=message):
        run_on_ranks(2, fails_in_stage)
