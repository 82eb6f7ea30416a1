"""A bucket is reduced as soon as its last gradient is ready: during backward, in one order, with every use added."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.optim.bucket import Bucket, ModelParam, frozen_params, make_buckets
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.data_parallel_comm import DataParallelComm
from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.pipeline.scheduled import ScheduledCall
from lightning_megatron.sharding import Initial, shard_of
from lightning_megatron.tensor.linear import ColumnParallelLinear
from lightning_megatron.tensor.weight_gradients import WeightGradients, share
from tests.harness.ranks import run_on_ranks
from tests.optim.test_gradients import no_group
from tests.pipeline.meshes import make_mesh, new_group

CPU = torch.device("cpu")
OVERLAP = OptimizerConfig(overlap_grad_reduce=True, bucket_size=1)


class Watched:
    """Events in order: that a bucket's sum began, and that autograd reached a layer of the model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.sums: list[list[float]] = []
        original = Bucket.reduce

        def reduce(bucket: Bucket, *, is_checked: bool) -> None:
            self.events.append("reduce " + ",".join(param.name for param in bucket.members))
            self.sums.append([round(float(grad_view.sum()), 6) for grad_view in bucket.grad_views.values()])
            original(bucket, is_checked=is_checked)

        monkeypatch.setattr(Bucket, "reduce", reduce)

    def passes(self, x: Tensor, place: str) -> Tensor:
        x.register_hook(lambda grad: self.events.append(f"at {place}"))
        return x


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def exchange_of(
    named: list[tuple[str, nn.Parameter]], config: OptimizerConfig = OVERLAP, mesh: Mesh | None = None
) -> DataParallelComm:
    return DataParallelComm(Gradients(named, set(), mesh or Mesh.single(), no_group, CPU, config=config))


def members_around(*shapes: tuple[int, ...], are_frozen: bool = False) -> list[list[int]]:
    """Sizes of the parameters in each flat tensor, where all of them are around the layers of a network."""
    replicas = Axis("dp", 2, 0, (0, 1))
    weights = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    params = [ModelParam(str(i), one, shard_of(one), replicas, None, False, (0,)) for i, one in enumerate(weights)]
    if are_frozen:
        frozen = frozen_params(params, shards_of=lambda axis: axis, bucket_size=100_000, part_of=lambda parameter: None)
        return [[param.parameter.numel() for param in flat.members] for flat in frozen]
    buckets = make_buckets(
        params,
        shards_of=lambda axis: axis,
        bucket_size=100_000,
        no_split=False,
        dtype_of=lambda parameter: parameter.dtype,
        low_of=lambda parameter: None,
        adds_shards=True,
        part_of=lambda parameter: None,
    )
    return [[param.parameter.numel() for param in bucket.members] for bucket in buckets]


def test_large_sharded_matrices_around_layers_go_apart_and_small_ones_together() -> None:
    assert members_around((32, 16), (16,), (32, 16)) == [[512, 16], [512]]
    # A network without layers has many of one size.
    assert [len(bucket) for bucket in members_around(*[(4, 4)] * 80)] == [20] * 4


def test_frozen_matrices_around_layers_go_apart_too() -> None:
    # Vectors stay whole.
    assert members_around((32, 16), (16,), (32, 16), are_frozen=True) == [[512], [512]]
    assert [len(flat) for flat in members_around(*[(4, 4)] * 80, are_frozen=True)] == [20] * 4


def scalars(*names: str) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.tensor([2.0]))) for name in names]


def chain(named: list[tuple[str, nn.Parameter]], watched: Watched, x: float = 1.0) -> Tensor:
    """x times each parameter in turn."""
    hidden = torch.tensor([x], requires_grad=True)
    for name, parameter in named:
        hidden = watched.passes(hidden * parameter, f"after {name}")
    return hidden.sum()


def test_a_bucket_is_sent_before_the_backward_of_the_parts_before_it(watched: Watched) -> None:
    named = scalars("a", "b", "c")
    dp_comm = exchange_of(named)
    loss = chain(named, watched)
    dp_comm.begin_backwards()
    dp_comm.expect(0)
    loss.backward()
    places = {event: place for place, event in enumerate(watched.events)}
    assert places["reduce c"] < places["at after a"] and places["reduce b"] < places["reduce a"]
    assert [e for e in watched.events if e.startswith("reduce")] == ["reduce c", "reduce b", "reduce a"]
    before = list(watched.events)
    dp_comm.complete(0)
    dp_comm.gradients.reduce(outside_over_stages=False)
    # Each of them once.
    assert watched.events == before


def test_only_the_last_backward_of_a_step_reduces(watched: Watched) -> None:
    named = scalars("a", "b")
    dp_comm = exchange_of(named)
    dp_comm.begin_backwards()
    chain(named, watched).backward()
    assert not any(event.startswith("reduce") for event in watched.events)
    dp_comm.expect(0)
    chain(named, watched).backward()
    assert watched.sums == [[4.0], [4.0]]


def test_without_overlap_nothing_is_sent_before_the_reduction_is_called(watched: Watched) -> None:
    named = scalars("a", "b")
    dp_comm = exchange_of(named, OptimizerConfig(bucket_size=1))
    dp_comm.begin_backwards()
    dp_comm.expect(0)
    chain(named, watched).backward()
    dp_comm.complete(0)
    assert not any(event.startswith("reduce") for event in watched.events)
    dp_comm.gradients.reduce(outside_over_stages=False)
    assert [e for e in watched.events if e.startswith("reduce")] == ["reduce b", "reduce a"]


def test_buckets_are_sent_in_one_order_though_they_fill_in_another(watched: Watched) -> None:
    named = scalars("a", "b", "c")
    dp_comm = exchange_of(named)
    dp_comm.begin_backwards()
    dp_comm.expect(0)
    # The model holds its parts in another order than it runs them.
    chain([named[2], named[0], named[1]], watched).backward()
    # C is ready last, and all wait for it.
    assert [e for e in watched.events if e.startswith("reduce")] == ["reduce c", "reduce b", "reduce a"]
    assert watched.events.index("reduce c") > watched.events.index("at after c")


def test_a_bucket_that_fills_late_does_not_hold_up_others(watched: Watched) -> None:
    """Norms (which stay in float32) have a bucket of their own, complete at the end of the backward only."""
    named = [(n, nn.Parameter(torch.ones(1, 1) if n[0] == "m" else torch.ones(1))) for n in ("v0", "m0", "v1", "m1")]
    named.append(("v2", nn.Parameter(torch.ones(1))))
    config = OptimizerConfig(overlap_grad_reduce=True, bucket_size=1000)
    both = Gradients(named, set(), Mesh.single(), no_group, CPU, config=config, low=torch.bfloat16)
    assert [[param.name for param in bucket.members] for bucket in both.buckets] == [["m1", "m0"], ["v2", "v1", "v0"]]


def test_a_parameter_used_twice_is_reduced_once_after_both_uses(watched: Watched) -> None:
    named = scalars("a", "b")
    a, b = named[0], named[1]
    dp_comm = exchange_of(named)
    dp_comm.begin_backwards()
    dp_comm.expect(0)
    # Loss = b a b: its gradients are b^2 and 2 a b.
    chain([b, a, b], watched).backward()
    assert watched.sums == [[8.0], [4.0]]
    assert watched.events.index("reduce b") > watched.events.index("at after a")


def test_a_parameter_of_two_stages_is_reduced_in_the_last_backward_of_the_second(watched: Watched) -> None:
    named = scalars("tied")
    stages = {"tied": (0, 1)}
    dp_comm = DataParallelComm(Gradients(named, {"tied"}, Mesh.single(), no_group, CPU, config=OVERLAP, stages=stages))
    dp_comm.begin_backwards()
    dp_comm.expect(1)
    (3 * named[0][1]).sum().backward()
    dp_comm.complete(1)
    assert watched.sums == []
    dp_comm.expect(0)
    (4 * named[0][1]).sum().backward()
    assert watched.sums == [[7.0]]


def test_a_parameter_without_a_gradient_goes_as_zeros_when_the_stage_is_done(watched: Watched) -> None:
    named = scalars("a", "never", "c")
    dp_comm = exchange_of(named)
    dp_comm.begin_backwards()
    dp_comm.expect(0)
    dp_comm.gradients.reducer.grad_view(named[1][1]).fill_(7.0)  # type: ignore[union-attr]
    chain([named[0], named[2]], watched).backward()
    reductions = [e for e in watched.events if e.startswith("reduce")]
    assert reductions == ["reduce c"]
    dp_comm.complete(0)
    assert [e for e in watched.events if e.startswith("reduce")] == ["reduce c", "reduce never", "reduce a"]
    dp_comm.gradients.reduce(outside_over_stages=False)
    assert named[1][1].grad is None
    assert dp_comm.gradients.reducer.grad_view(named[1][1]).tolist() == [0.0]  # type: ignore[union-attr]


def test_a_backward_after_its_bucket_was_sent_is_refused_by_name(watched: Watched) -> None:
    named = scalars("a", "b")
    dp_comm = exchange_of(named)
    dp_comm.begin_backwards()
    dp_comm.expect(0)
    chain(named, watched).backward()
    with pytest.raises(RuntimeError, match=r"gradient of 'b' was made after its sum.*overlap_grad_reduce=False"):
        chain(named, watched).backward()


def test_a_weight_unfrozen_later_is_in_no_bucket_and_is_reduced_all_the_same() -> None:
    named = scalars("a", "thawed")
    named[1][1].requires_grad_(False)
    dp_comm = exchange_of(named)
    named[1][1].requires_grad_(True)
    dp_comm.grad_ready(named[1][1])
    named[1][1].grad = torch.ones(1)
    dp_comm.gradients.reduce(outside_over_stages=False, factor=torch.tensor(0.5))
    assert named[1][1].grad.tolist() == [0.5]


def test_released_nobody_watches() -> None:
    named = scalars("a")
    dp_comm = exchange_of(named)
    dp_comm.release()
    grad_view = dp_comm.grad_view(named[0][1])
    (named[0][1] * 3).sum().backward()
    assert named[0][1].grad is not grad_view


def test_split_off_weight_gradients_are_reduced_at_their_task(watched: Watched) -> None:
    """A zero-bubble schedule: dgrad reduces nothing, wgrad each weight as it is done."""
    mesh = Mesh.single()
    layers = nn.Sequential(
        *(ColumnParallelLinear(3, 3, tp=mesh.tp, sp=mesh.sp, bias=False, initial=Initial()) for _ in range(2))
    )
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.fill_(0.5)
    dp_comm = exchange_of(list(layers.named_parameters()))
    gradients = WeightGradients(dp_comm.grad_view)
    share(layers, gradients)
    inputs = [torch.full((2, 3), float(i + 1)) for i in range(2)]

    def enter(microbatch: int) -> Tensor:
        output: Tensor = layers(inputs[microbatch]).sum()
        return output

    def differentiate(loss: Tensor) -> None:
        loss.backward()

    call = ScheduledCall([], Mesh.single(), enter, differentiate, [0, 2], gradients.opened, dp_comm)
    dp_comm.begin_backwards()
    for microbatch in range(2):
        call.forward(0, microbatch, None)
    for microbatch in range(2):
        call.backward_input(0, microbatch, None)
    assert watched.events == []
    call.backward_weight(0, 0)
    assert watched.events == []
    call.backward_weight(0, 1)
    assert watched.events == ["reduce 1.weight", "reduce 0.weight"]
    dp_comm.complete(0)
    dp_comm.gradients.reduce(outside_over_stages=False)
    wanted = [parameter.grad.clone() for parameter in layers.parameters() if parameter.grad is not None]
    assert len(wanted) == 2
    for parameter in layers.parameters():
        parameter.grad = None
    share(layers, WeightGradients())
    (enter(0) + enter(1)).backward()
    for parameter, sent in zip(layers.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, sent)


# --- several ranks ----------------------------------------------------------------------------------------------------


def in_flight(kind: Any) -> dict[str, Any]:
    """Replicas with a gradient each of their own; which of them one rank leaves out, its sums have all the same."""
    mesh = make_mesh(Sizes(world=3))
    named = [(name, nn.Parameter(torch.full((5,), 2.0, dtype=torch.float64))) for name in ("a", "b", "c", "d")]
    config = OptimizerConfig(kind=kind, overlap_grad_reduce=True, bucket_size=1)
    dp_comm = exchange_of(named, config, mesh)
    dp_comm.begin_backwards()
    dp_comm.expect(0)
    # Each data-parallel rank uses its parameters in an order of its own, one of them not at all.
    order = named[mesh.dp.rank :] + named[: mesh.dp.rank]
    if mesh.dp.rank == 1:
        order = [(name, parameter) for name, parameter in order if name != "c"]
    loss = torch.ones((), dtype=torch.float64)
    for _, parameter in order:
        loss = loss * parameter.mean()
    loss.backward()
    dp_comm.complete(0)
    dp_comm.gradients.reduce(outside_over_stages=False, factor=torch.tensor(0.5, dtype=torch.float64))
    buckets = dp_comm.gradients.buckets
    return {"own": [bucket.own.tolist() for bucket in buckets], "grads": [p.grad is not None for _, p in named]}


def test_data_parallel_ranks_that_fill_buckets_in_other_orders_sum_like_with_like() -> None:
    # Products of four numbers of 2 on ranks 0 and 2, of three on rank 1.
    full, short = 2.0**3 / 5, 2.0**2 / 5
    wanted = {"a": 2 * full + short, "b": 2 * full + short, "c": 2 * full, "d": 2 * full + short}
    for found in run_on_ranks(3, in_flight, "replicated"):
        assert found["grads"] == [True] * 4
        for values, name in zip(found["own"], ("d", "c", "b", "a"), strict=True):
            assert values[:5] == pytest.approx([wanted[name] / 2] * 5)
    by_rank = run_on_ranks(3, in_flight, "distributed")
    for place, name in enumerate(("d", "c", "b", "a")):
        joined = [value for found in by_rank for value in found["own"][place]]
        assert joined[:5] == pytest.approx([wanted[name] / 2] * 5) and not any(joined[5:])


def tied_twice() -> list[list[list[str]]]:
    """pp 2 with two stages each; `x` is tied over stages 0 and 1, `y` over 0 and 3."""
    mesh = make_mesh(Sizes(world=2, pp=2, vp=2))
    stages = {"x": (mesh.own_stages[0],), "y": ((0,), (3,))[mesh.pp.rank]}
    named = [(name, nn.Parameter(torch.zeros(4))) for name in ("x", "y")]
    for name, parameter in named:
        parameter.grad = torch.full((4,), {"x": 1.0, "y": 10.0}[name] * (1 + mesh.pp.rank))
    gradients = Gradients(named, {"x", "y"}, mesh, new_group, CPU, stages=stages)
    gradients.reduce(outside_over_stages=True)
    return [p.grad.tolist() for _, p in named if p.grad is not None]


def test_weights_tied_over_other_stages_are_summed_apart() -> None:
    for found in run_on_ranks(2, tied_twice):
        assert found == [[3.0] * 4, [30.0] * 4]


def test_a_bucket_has_one_dtype() -> None:
    dtypes = {"narrow": torch.float32, "wide": torch.float64, "narrow too": torch.float32}
    named = [(name, nn.Parameter(torch.zeros(3, dtype=dtype))) for name, dtype in dtypes.items()]
    gradients = Gradients(named, set(), Mesh.single(), no_group, CPU)
    assert [[h.name for h in b.members] for b in gradients.buckets] == [["wide"], ["narrow too", "narrow"]]
