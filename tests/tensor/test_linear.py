"""Tests of the parallel linear layers: each equals the plain one, saves what it says, and overlaps its messages."""

import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import _symmetric_memory
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.comm import collectives
from lightning_megatron.comm.collectives import all_reduce, shard_slice
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.sharding import Initial, shard_of
from lightning_megatron.tensor.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel_linear,
    row_parallel_linear,
)
from lightning_megatron.tensor.weight_gradients import WeightGradients
from lightning_megatron.transformer.init import initialise
from tests.harness.ranks import run_on_ranks
from tests.harness.threads import run_on_threads
from tests.tensor.plain import (
    BITE,
    TOLERANCE,
    assert_gradient_is_slice,
    distance,
    fill,
    gradient,
    on_every_layout,
    part_of,
    thread_mesh,
)

T, INPUT, OUTPUT = 8, 12, 16
INITIAL = Initial(std=0.02)


class Plain:
    """A plain linear layer in float64, run forward and backward on one device."""

    def __init__(self, out_shape: tuple[int, ...], in_features: int = INPUT) -> None:
        out_features = torch.Size(out_shape).numel()
        self.x = torch.randn(T, in_features, dtype=torch.float64, requires_grad=True)
        self.weight = torch.randn(out_features, in_features, dtype=torch.float64, requires_grad=True)
        self.bias = torch.randn(out_features, dtype=torch.float64, requires_grad=True)
        self.out_grad = torch.randn(T, out_features, dtype=torch.float64)
        self.out = F.linear(self.x, self.weight, self.bias)
        self.out.backward(self.out_grad)
        self.out_shape = out_shape

    def shaped(self, tensor: Tensor, *rest: int) -> Tensor:
        """A tensor of the output's features in the shape that the cut layer gives them."""
        return tensor.detach().view(*tensor.shape[: tensor.dim() - 1 - len(rest)], *self.out_shape, *rest)


@on_every_layout
@pytest.mark.parametrize(("out_shape", "cut"), [((OUTPUT,), 0), ((2, OUTPUT), 1), ((4, 3, 5), 0), ((131,), 0)])
def test_a_column_layer_equals_the_plain_one(
    num_ranks: int, is_sequence_parallel: bool, out_shape: tuple[int, ...], cut: int
) -> None:
    plain = Plain(out_shape)

    def on_rank(world: Any) -> None:
        mesh = thread_mesh(world, is_sequence_parallel)
        tp, sp = mesh.tp, mesh.axis("sp")
        layer = ColumnParallelLinear(INPUT, out_shape, tp=tp, sp=sp, bias=True, initial=INITIAL, cut=cut).double()
        fill(layer.weight, plain.shaped(plain.weight, INPUT))
        fill(layer.bias, plain.shaped(plain.bias))
        x = shard_slice(plain.x.detach(), sp).clone().requires_grad_()
        out = layer(x)
        shard = shard_of(layer.bias)
        out_grad = torch.zeros_like(out)
        for i in range(T):
            assert_close(shard.valid(out[i]), part_of(plain.shaped(plain.out)[i], shard), rtol=0, atol=TOLERANCE)
            shard.valid(out_grad[i]).copy_(part_of(plain.shaped(plain.out_grad)[i], shard))
        out.backward(out_grad)
        assert_gradient_is_slice(layer.weight, plain.shaped(gradient(plain.weight), INPUT))
        assert_gradient_is_slice(layer.bias, plain.shaped(gradient(plain.bias)))
        assert_close(gradient(x), shard_slice(gradient(plain.x), sp), rtol=0, atol=TOLERANCE)
        if tp.size > 1:
            own_part = out_grad.flatten(1) @ layer.weight.detach().flatten(0, -2)
            assert distance(shard_slice(own_part, sp), gradient(x)) > BITE  # the input's gradient without the sum

    run_on_threads(num_ranks, on_rank)


def check_row_layer(mesh: Mesh, plain: Plain) -> None:
    """A row layer on this mesh equals the plain one."""
    tp, sp = mesh.tp, mesh.axis("sp")
    layer = RowParallelLinear(INPUT, OUTPUT, tp=tp, sp=sp, bias=True, initial=INITIAL).double()
    fill(layer.weight, plain.weight)
    fill(layer.bias, plain.bias)
    x = shard_slice(plain.x.detach(), tp, dim=1).clone().requires_grad_()
    out = layer(x)
    assert_close(out, shard_slice(plain.out.detach(), sp), rtol=0, atol=TOLERANCE)
    out.backward(shard_slice(plain.out_grad, sp))
    assert_gradient_is_slice(layer.weight, gradient(plain.weight))
    assert_gradient_is_slice(layer.bias, gradient(plain.bias))
    assert_close(gradient(x), shard_slice(gradient(plain.x), tp, dim=1), rtol=0, atol=TOLERANCE)
    if tp.size > 1:
        biased_by_each = all_reduce(F.linear(x, layer.weight, layer.bias).detach(), tp)
        assert distance(shard_slice(biased_by_each, sp), out) > BITE
    if sp.size > 1:
        assert distance(gradient(layer.bias), gradient(plain.bias)) > BITE  # partial until it is summed over sp


@on_every_layout
def test_a_row_layer_equals_the_plain_one(num_ranks: int, is_sequence_parallel: bool) -> None:
    plain = Plain((OUTPUT,))
    run_on_threads(num_ranks, lambda world: check_row_layer(thread_mesh(world, is_sequence_parallel), plain))


def column_into_row_on_gloo(
    is_sequence_parallel: bool, num_chunks: int = 1, is_symmetric: bool = False
) -> list[Tensor]:
    """Output and gradients of a column layer into a row layer on real ranks, and those of the plain two."""
    size = torch.distributed.get_world_size()
    mesh = Mesh.build(
        Sizes(world=size, tp=size, sequence_parallel=is_sequence_parallel),
        torch.distributed.get_rank(),
        lambda ranks: torch.distributed.new_group(list(ranks)),
    )
    tp, sp = mesh.tp, mesh.axis("sp")
    up, up_bias, down, down_bias, x = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((OUTPUT, INPUT), (OUTPUT,), (6, OUTPUT), (6,), (40, INPUT))
    )
    plain = F.linear(torch.tanh(F.linear(x, up, up_bias)), down, down_bias)
    plain.square().sum().backward()
    cut_up, cut_up_bias, cut_down, cut_down_bias, cut_x = (
        shard_slice(one.detach(), axis, dim).clone().requires_grad_()
        for one, axis, dim in ((up, tp, 0), (up_bias, tp, 0), (down, tp, 1), (down_bias, mesh.pp, 0), (x, sp, 0))
    )
    options: dict[str, Any] = {"tp": tp, "sp": sp, "gradients": WeightGradients(), "num_chunks": num_chunks}
    options["is_symmetric"] = is_symmetric
    inner = torch.tanh(column_parallel_linear(cut_x, cut_up, cut_up_bias, **options))
    out = row_parallel_linear(inner, cut_down, cut_down_bias, **options)
    out.square().sum().backward()
    pairs = [
        (out, shard_slice(plain, sp)),
        (gradient(cut_x), shard_slice(gradient(x), sp)),
        (gradient(cut_up), shard_slice(gradient(up), tp)),
        (gradient(cut_up_bias), shard_slice(gradient(up_bias), tp)),
        (gradient(cut_down), shard_slice(gradient(down), tp, dim=1)),
        (all_reduce(gradient(cut_down_bias), sp), gradient(down_bias)),
    ]
    return [tensor.detach() for pair in pairs for tensor in pair]


@pytest.mark.parametrize(
    ("num_ranks", "is_sequence_parallel", "num_chunks"),
    # Each of 4 ranks has 10 tokens: 3, 3, 3 and 1.
    [(2, False, 1), (2, True, 1), (2, True, 4), (4, True, 4), (4, False, 4)],
)
def test_a_column_into_a_row_layer_equals_the_plain_two_on_real_ranks(
    num_ranks: int, is_sequence_parallel: bool, num_chunks: int
) -> None:
    for tensors in run_on_ranks(num_ranks, column_into_row_on_gloo, is_sequence_parallel, num_chunks):
        for cut, plain in zip(tensors[::2], tensors[1::2], strict=True):
            assert_close(cut, plain, rtol=1e-12, atol=1e-12)
            assert plain.abs().max() > BITE


def on_symmetric_memory() -> list[Tensor]:
    """A column layer into a row layer by torch's operators of symmetric memory, which on CPUs run as in torch's own
    tests: by collectives."""
    library, fused = torch.library.Library("symm_mem", "IMPL"), []

    def noting(name: str, fallback: Any) -> None:
        def run(*args: Any, **kwargs: Any) -> Any:
            fused.append(name)
            return fallback(*args, **kwargs)

        library.impl(name, run, "CPU")

    noting("fused_all_gather_matmul", _symmetric_memory._fused_all_gather_matmul_fallback)
    noting("fused_matmul_reduce_scatter", _symmetric_memory._fused_matmul_reduce_scatter_fallback)
    tensors = column_into_row_on_gloo(is_sequence_parallel=True, is_symmetric=True)
    assert fused == ["fused_all_gather_matmul", "fused_matmul_reduce_scatter"]
    return tensors


def test_products_fused_by_symmetric_memory_equal_the_plain_ones() -> None:
    for tensors in run_on_ranks(2, on_symmetric_memory):
        for cut, plain in zip(tensors[::2], tensors[1::2], strict=True):
            assert_close(cut, plain, rtol=1e-12, atol=1e-12)
            assert plain.abs().max() > BITE


class Recorder(TorchDispatchMode):
    """Writes down each matrix product into `log`, between the collectives that others write there."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.log.append("product")
        return func(*args, **(kwargs or {}))


def test_a_column_layer_overlaps_its_messages_with_its_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    logs: dict[int, list[str]] = defaultdict(list)

    def recorded(name: str) -> None:
        real = getattr(collectives, name)

        def collective(*args: Any, **kwargs: Any) -> Any:
            log = logs[threading.get_ident()]
            log.append(f"{name} starts")
            pending = real(*args, **{**kwargs, "wait": False})
            finish = pending.finish or (lambda landed: landed)
            pending.finish = lambda landed: (log.append(f"{name} lands"), finish(landed))[1]
            return pending if kwargs.get("wait") is False else pending.wait()

        monkeypatch.setattr(collectives, name, collective)

    for name in ("all_gather", "reduce_scatter", "all_reduce_"):
        recorded(name)

    def on_rank(world: Any, is_sequence_parallel: bool) -> list[str]:
        mesh = thread_mesh(world, is_sequence_parallel)
        sp = mesh.axis("sp")
        layer = ColumnParallelLinear(INPUT, OUTPUT, tp=mesh.tp, sp=sp, bias=False, initial=INITIAL)
        out = layer(torch.randn(T // sp.size, INPUT, requires_grad=True))
        log = logs[threading.get_ident()]
        log.clear()
        with Recorder(log):
            out.backward(torch.ones_like(out))
        return list(log)

    for log in run_on_threads(2, on_rank, True):
        assert log == [
            "all_gather starts",
            "product",
            "reduce_scatter starts",
            "all_gather lands",
            "product",
            "reduce_scatter lands",
        ]
    for log in run_on_threads(2, on_rank, False):
        products = [line for line in log if not line.startswith("all_gather")]  # over an axis of one: no message
        assert products == ["product", "all_reduce_ starts", "product", "all_reduce_ lands"]


def saved_by(call: Any) -> list[Tensor]:
    """The tensors that autograd saves for the backward of `call()`."""
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        call()
    return saved


def test_a_column_layer_saves_the_tokens_of_this_rank_alone() -> None:
    def on_rank(world: Any) -> None:
        mesh = thread_mesh(world, True)
        layer = ColumnParallelLinear(INPUT, OUTPUT, tp=mesh.tp, sp=mesh.axis("sp"), bias=True, initial=INITIAL)
        x = torch.randn(T // 4, INPUT, requires_grad=True)
        saved = saved_by(lambda: layer(x))
        assert sorted(tensor.data_ptr() for tensor in saved) == sorted([x.data_ptr(), layer.weight.data_ptr()])

    run_on_threads(4, on_rank)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_a_frozen_layer_saves_no_input_and_still_passes_the_gradient_on(kind: Any) -> None:
    mesh = Mesh.single()
    layer = kind(INPUT, OUTPUT, tp=mesh.tp, sp=mesh.axis("sp"), bias=True, initial=INITIAL)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    layer.requires_grad_(False)
    x = torch.randn(T, INPUT, requires_grad=True)
    assert [tensor.data_ptr() for tensor in saved_by(lambda: layer(x))] == [layer.weight.data_ptr()]
    layer(x).sum().backward()
    assert_close(gradient(x), layer.weight.sum(0).expand(T, -1))
    layer.requires_grad_(True)
    # The weight itself is no copy; it is saved to know where its gradient goes.
    saved = [tensor.data_ptr() for tensor in saved_by(lambda: layer(x.detach()))]
    assert saved == [x.data_ptr(), layer.weight.data_ptr()]


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_the_gradient_of_a_float32_bias_is_not_rounded_as_its_weight_is(kind: Any) -> None:
    mesh = Mesh.single()
    layer = kind(INPUT, OUTPUT, tp=mesh.tp, sp=mesh.axis("sp"), bias=True, initial=INITIAL)
    layer.weight.data = torch.randn(layer.weight.shape, dtype=torch.bfloat16)
    grad = torch.randn(T, OUTPUT, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(T, INPUT)).backward(grad)
    assert layer.bias.dtype == torch.float32
    exact = grad.double().sum(0)
    assert_close(gradient(layer.bias).double(), exact, rtol=1e-6, atol=1e-5)
    # As the weight's dtype would give it.
    assert (exact.bfloat16().double() - exact).abs().max() > 1e-3


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_autocast_gives_what_it_gives_the_plain_layer(kind: Any) -> None:
    mesh = Mesh.single()
    layer = kind(INPUT, OUTPUT, tp=mesh.tp, sp=mesh.axis("sp"), bias=True, initial=INITIAL)
    plain = torch.nn.Linear(INPUT, OUTPUT)
    layer.load_state_dict(plain.state_dict())
    x = torch.randn(T, INPUT)
    outs = []
    for each in (layer, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outs.append(each(x))
        outs[-1].float().square().sum().backward()
    assert outs[0].dtype == torch.bfloat16 and gradient(layer.weight).dtype == torch.float32
    # One rounding to bfloat16 apart: the row layer adds its bias to a rounded sum.
    assert_close(outs[0], outs[1], rtol=2**-7, atol=2**-7)
    assert_close(gradient(layer.weight), gradient(plain.weight), rtol=2**-6, atol=2**-5)
    assert distance(outs[0].float(), F.linear(x, plain.weight)) > 2**-5  # it would notice a bias left out
    double = layer.double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert double(x.double()).dtype == torch.float64


def test_a_second_derivative_is_refused() -> None:
    mesh = Mesh.single()
    layer = ColumnParallelLinear(INPUT, OUTPUT, tp=mesh.tp, sp=mesh.axis("sp"), bias=False, initial=INITIAL)
    x = torch.randn(T, INPUT, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_the_output_may_be_changed_in_place() -> None:
    mesh = Mesh.single()
    for out_shape in ((OUTPUT,), (2, OUTPUT)):
        layer = ColumnParallelLinear(INPUT, out_shape, tp=mesh.tp, sp=mesh.axis("sp"), bias=False, initial=INITIAL)
        torch.nn.init.normal_(layer.weight)
        x = torch.randn(T, INPUT)
        layer(x).mul_(3.0).sum().backward()
        assert_close(gradient(layer.weight), (3.0 * x.sum(0)).expand(layer.weight.shape))


def test_autocast_saves_no_copy_of_a_weight_for_backward() -> None:
    mesh = Mesh.single()
    layer = ColumnParallelLinear(8, 16, tp=mesh.tp, sp=mesh.sp, bias=True, initial=Initial(std=1.0))
    initialise(layer, 0)
    saved: list[Tensor] = []
    x = torch.randn(4, 8, requires_grad=True)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        torch.autocast("cpu", torch.bfloat16),
    ):
        y = layer(x)
    assert y.dtype is torch.bfloat16
    weights = [t for t in saved if t.shape == layer.weight.shape]
    assert len(weights) == 1 and weights[0].data_ptr() == layer.weight.data_ptr()
    # bfloat16 keeps 8 bits: rounding of both factors and of the sum.
    y.sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype is torch.float32
    torch.testing.assert_close(layer.weight.grad, torch.ones(16, 4) @ x.detach(), rtol=3e-2, atol=3e-2)
