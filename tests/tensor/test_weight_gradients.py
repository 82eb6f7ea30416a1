"""Tests of weight gradients past autograd: the same numbers, added in place or deferred, and never twice."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.sharding import Initial
from lightning_megatron.tensor.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.tensor.weight_gradients import Task, WeightGradients, add_product, product_in, share
from tests.harness.threads import new_group, run_on_threads
from tests.tensor.plain import send_in_chunks

INPUT, MIDDLE = 6, 8


def build(tp: Axis, sp: Axis) -> nn.Sequential:
    initial = Initial(std=1.0)
    return nn.Sequential(
        ColumnParallelLinear(INPUT, (2, MIDDLE // 2), tp=tp, sp=sp, bias=True, initial=initial, cut=1),
        nn.Flatten(),
        nn.Tanh(),
        RowParallelLinear(MIDDLE, INPUT, tp=tp, sp=sp, bias=True, initial=initial),
    ).double()


def run(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().sum()
    return out


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def seed_weights(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


@pytest.mark.parametrize("way", ["now", "later"])
@pytest.mark.parametrize(("is_sequence_parallel", "num_chunks"), [(False, 1), (True, 1), (True, 2)])
def test_gradients_added_past_autograd_are_those_of_autograd(
    way: str, is_sequence_parallel: bool, num_chunks: int
) -> None:
    inputs = torch.randn(3, 4, INPUT, dtype=torch.float64)

    def on_rank(world: Any) -> None:
        sizes = Sizes(world=2, tp=2, sequence_parallel=is_sequence_parallel)
        mesh = Mesh.build(sizes, world.rank(), new_group)
        sp = mesh.axis("sp")
        model = build(mesh.tp, sp)
        seed_weights(model)
        # Differentiable, as between layers: a task that runs later must not build a graph.
        rows = [x.chunk(sp.size)[sp.rank].clone().requires_grad_() for x in inputs]
        for x in rows:
            run(model, x).backward()
        expected = gradients_of(model)
        model.zero_grad()
        gradients = WeightGradients()
        share(model, gradients)
        send_in_chunks(model, num_chunks)
        for x in rows:
            queue: list[Task] = []
            loss = run(model, x)
            with gradients.opened(queue if way == "later" else None):
                loss.backward()
            assert len(queue) == (2 if way == "later" else 0)
            before = gradients_of(model)["0.weight"]
            for _, task in queue:
                task()
            after = model.get_parameter("0.weight").grad
            assert (before is None or not before.equal(after)) == (way == "later")  # type: ignore[arg-type]
        for name, value in gradients_of(model).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-13, atol=1e-13)

    run_on_threads(2, on_rank)


def single() -> tuple[nn.Sequential, WeightGradients]:
    mesh = Mesh.single()
    model = build(mesh.tp, mesh.axis("sp"))
    seed_weights(model)
    gradients = WeightGradients()
    share(model, gradients)
    return model, gradients


def test_closed_it_leaves_everything_to_autograd() -> None:
    model, _ = single()
    weight = model.get_parameter("0.weight")
    x = torch.randn(2, INPUT, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(run(model, x), [weight])
    assert gradient.abs().max() > 0 and weight.grad is None


def test_weights_with_hooks_and_weights_that_are_computed_stay_with_autograd() -> None:
    model, gradients = single()
    seen: list[str] = []
    model.get_parameter("0.weight").register_hook(lambda grad: seen.append("tensor hook"))
    model.get_parameter("3.weight").register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    with gradients.opened():
        run(model, torch.randn(2, INPUT, dtype=torch.float64)).backward()
    assert sorted(seen) == ["accumulated", "tensor hook"]
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


@pytest.mark.parametrize("way", ["now", "later"])
def test_hooks_on_saved_tensors_do_not_come_between_a_weight_and_its_gradient(way: str) -> None:
    """Recomputation and offloading give the backward other tensors than the weights themselves."""
    model, gradients = single()
    x = torch.randn(2, INPUT, dtype=torch.float64)
    run(model, x).backward()
    expected = gradients_of(model)
    for runs in (
        lambda: run(model, x),
        lambda: checkpoint(run, model, x, use_reentrant=False),
    ):
        model.zero_grad()
        queue: list[Task] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            loss = runs()
        with gradients.opened(queue if way == "later" else None):
            loss.backward()
        for _, task in queue:
            task()
        for name, value in gradients_of(model).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_a_frozen_weight_gets_no_gradient() -> None:
    model, gradients = single()
    model.get_parameter("3.weight").requires_grad_(False)
    queue: list[Task] = []
    loss = run(model, torch.randn(2, INPUT, dtype=torch.float64))
    with gradients.opened(queue):
        loss.backward()
    assert len(queue) == 1
    queue[0][1]()
    assert model.get_parameter("3.weight").grad is None
    assert model.get_parameter("0.weight").grad is not None


def test_a_deferred_weight_gradient_holds_its_operands_and_not_what_they_came_from() -> None:
    """Else a microbatch between dgrad and wgrad holds what its stage received, and the gradient of that."""
    model, gradients = single()
    received = torch.randn(2, INPUT, dtype=torch.float64, requires_grad=True)
    queue: list[Task] = []
    loss = run(model, received.tanh())
    with gradients.opened(queue):
        loss.backward()
    assert len(queue) == 2
    held = weakref.ref(received)
    del received, loss
    assert held() is None


def test_a_backward_inside_a_backward_is_our_own_slip() -> None:
    gradients = WeightGradients()
    with gradients.opened(), pytest.raises(AssertionError, match="inside another"), gradients.opened():
        pass


class Writes(TorchDispatchMode):
    """Notes the operations that run, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


def test_products_of_16_bits_go_into_float32_gradients_by_one_kernel() -> None:
    left, right = (torch.randn(*shape, dtype=torch.bfloat16, device="meta") for shape in ((4, 8), (8, 6)))
    weight, view = nn.Parameter(torch.randn(4, 6, device="meta")), torch.empty(24, device="meta").view(4, 6)
    with Writes() as written:
        add_product(weight, left, right, view)
        assert weight.grad is view
        add_product(weight, left, right, view)
        product_in(torch.float32, left, right)
    assert written.names == ["mm.dtype_out", "addmm.dtype_out", "mm.dtype"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_they_are_not_rounded_to_16_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left, right = (torch.randn(*shape, dtype=dtype, device="cuda") for shape in ((64, 256), (256, 48)))
    weight, view = nn.Parameter(torch.zeros(64, 48, device="cuda")), torch.empty(64, 48, device="cuda")
    wanted = left.double() @ right.double()
    for num_added in (1, 2, 3):
        add_product(weight, left, right, view)
        assert weight.grad is not None
        # Sums of 256 products in float32; rounded to 16 bits they would be off by 2^-9 and more.
        torch.testing.assert_close(weight.grad.double(), num_added * wanted, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(product_in(torch.float32, left, right).double(), wanted, rtol=1e-5, atol=1e-4)
