"""Gradients of one rank become those of one device, over data-parallel ranks, stages and sharded activations."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.master_weights import MasterWeights
from lightning_megatron.sharding import Initial, shard_parameter
from tests.harness.ranks import run_on_ranks
from tests.pipeline.meshes import make_mesh


def no_group(ranks: tuple[int, ...]) -> None:
    return None


def group(ranks: tuple[int, ...]) -> Any:
    return torch.distributed.new_group(list(ranks), use_local_synchronization=True)


def plain(value: float, size: int = 2) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(size, dtype=torch.float64))
    parameter.grad = torch.full((size,), value, dtype=torch.float64)
    return parameter


@pytest.mark.parametrize("is_in_bucket", [False, True])
def test_taking_and_adding_gradients_lose_nothing(is_in_bucket: bool) -> None:
    a, b = plain(1.0), plain(2.0)
    gradients = Gradients([("a", a), ("b", b)], set(), Mesh.single(), no_group, torch.device("cpu"))
    for parameter in (a, b) if is_in_bucket else ():
        grad_view = gradients.reducer.grad_view(parameter)
        assert grad_view is not None and parameter.grad is not None
        parameter.grad = grad_view.copy_(parameter.grad)
    taken = gradients.take()
    assert a.grad is None and b.grad is None
    a.grad = torch.ones(2, dtype=torch.float64)
    gradients.add(taken)
    assert a.grad.tolist() == [2, 2] and b.grad is not None and b.grad.tolist() == [2, 2]


def test_clipping_is_torchs_own_on_one_device() -> None:
    named = [("a", plain(3.0, 5)), ("b", plain(-1.0, 7)), ("none", nn.Parameter(torch.zeros(2)))]
    twins = [nn.Parameter(p.detach().clone()) for _, p in named]
    for twin, (_, p) in zip(twins, named, strict=True):
        twin.grad = None if p.grad is None else p.grad.clone()
    gradients = Gradients(named, set(), Mesh.single(), no_group, torch.device("cpu"))
    norm = gradients.clip(0.5, [p for _, p in named])
    wanted = nn.utils.clip_grad_norm_(twins, 0.5)
    assert norm.item() == pytest.approx(wanted.item(), rel=1e-12) and norm > 1
    for twin, (_, p) in zip(twins, named, strict=True):
        torch.testing.assert_close(p.grad, twin.grad, rtol=1e-12, atol=0)
    before = [p.grad.clone() for _, p in named if p.grad is not None]
    gradients.clip(100.0, [p for _, p in named])
    assert all(torch.equal(a, p.grad) for a, (_, p) in zip(before, named, strict=False) if p.grad is not None)


def over_four_ranks() -> dict[str, Any]:
    """tp 2 within pp 2; every rank's gradient is a power of ten, so that a sum shows its terms."""
    mesh = make_mesh(Sizes(world=4, pp=2, tp=2, sequence_parallel=True))
    stage, tp = mesh.pp.rank, mesh.tp
    own = 10.0**mesh.global_rank

    def cut(partial: Axis | None = None, **kwargs: Any) -> nn.Parameter:
        parameter = shard_parameter((4,), initial=Initial(), partial=partial, **kwargs)
        parameter.grad = torch.full_like(parameter, own)
        return parameter

    named: list[tuple[str, nn.Parameter]] = [
        (f"model.layers.{stage}.cut", cut(dim=0, axis=tp)),
        (f"model.layers.{stage}.norm", cut(replicas=(tp,), partial=mesh.sp)),
        ("model.tied", cut(dim=0, axis=tp)),
        ("outside", plain(own, 4)),
    ]
    # Used on one stage only, and nowhere.
    some, never = plain(own, 4), plain(own, 4)
    if not mesh.pp.is_last:
        some.grad = None
    never.grad = None
    named += [("some", some), ("never", never)]
    inside = {name for name, _ in named if name.startswith("model.")}
    gradients = Gradients(named, inside, mesh, group, torch.device("cpu"))
    gradients.reduce(outside_over_stages=True)
    norm = gradients.norm()
    clipped = gradients.norm([named[0][1], named[3][1]])
    return {
        "stage": stage,
        "tp": tp.rank,
        "grads": {name: None if p.grad is None else p.grad.double().mean().item() for name, p in named},
        "norm": norm.item(),
        "part": clipped.item(),
    }


def test_every_kind_of_gradient_is_summed_over_the_ranks_that_hold_a_part_of_it() -> None:
    ranks = run_on_ranks(4, over_four_ranks)
    by_place = {(found["stage"], found["tp"]): found for found in ranks}
    # Global rank of (stage, tp): the last stage has ranks 0 and 1.
    number = {(1, 0): 1.0, (1, 1): 10.0, (0, 0): 100.0, (0, 1): 1000.0}
    assert set(by_place) == set(number)
    square = 0.0
    for place, found in by_place.items():
        stage, tp = place
        grads = found["grads"]
        other_tp, other_stage = number[stage, 1 - tp], number[1 - stage, tp]
        assert grads[f"model.layers.{stage}.cut"] == number[place]
        assert grads[f"model.layers.{stage}.norm"] == number[place] + other_tp
        assert grads["model.tied"] == number[place] + other_stage
        assert grads["outside"] == number[place] + other_stage
        assert grads["some"] == number[1, tp] and grads["never"] is None
        # In the unsplit model: each cut element once, a replicated parameter once, a tied one once.
        square += 2 * grads[f"model.layers.{stage}.cut"] ** 2
        if tp == 0:
            square += 4 * grads[f"model.layers.{stage}.norm"] ** 2
        if stage == 0:
            square += 2 * grads["model.tied"] ** 2
        if place == (0, 0):
            square += 4 * (grads["outside"] ** 2 + grads["some"] ** 2)
    for found in ranks:
        assert found["norm"] == pytest.approx(math.sqrt(square), rel=1e-6)
    part = sum(2 * n**2 for n in number.values()) + 4 * (100.0 + 1.0) ** 2
    assert ranks[0]["part"] == pytest.approx(math.sqrt(part), rel=1e-6)


def over_replicas() -> list[Any]:
    mesh = make_mesh(Sizes(world=3))
    own = float(mesh.dp.rank + 1)
    used, sometimes, frozen = plain(own), plain(own), plain(own)
    if mesh.dp.rank != 1:
        sometimes.grad = None
    frozen.requires_grad_(False)
    frozen.grad = None
    large = plain(own, 1 << 18)
    strided = nn.Parameter(torch.zeros(4, 6).T)
    strided.grad = torch.full((4, 6), own).T
    narrow = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    narrow.grad = torch.full((3,), own, dtype=torch.bfloat16)
    mixed = [large, strided, narrow]
    named = [("used", used), ("sometimes", sometimes), ("frozen", frozen)]
    named += [(str(i), parameter) for i, parameter in enumerate(mixed)]
    gradients = Gradients(named, set(), mesh, group, torch.device("cpu"))
    gradients.reduce(outside_over_stages=False)
    grads: list[Tensor] = [p.grad for p in mixed if p.grad is not None]
    return [None if p.grad is None else p.grad.tolist() for p in (used, sometimes, frozen)] + [
        (g.dtype, g.unique().tolist()) for g in grads
    ]


def test_data_parallel_ranks_sum_and_agree_on_which_parameters_have_a_gradient() -> None:
    for found in run_on_ranks(3, over_replicas):
        assert found[:3] == [[6, 6], [2, 2], None]
        assert [values for _, values in found[3:]] == [[6], [6], [6]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4096, 256), (1001, 1001)])
def test_the_norm_of_a_large_gradient_does_not_drift(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = nn.Parameter(torch.empty(shape, dtype=dtype))
    weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    gradients = Gradients([("weight", weight)], set(), Mesh.single(), lambda ranks: None, torch.device("cpu"))
    exact = weight.grad.double().norm()
    assert abs(gradients.norm() / exact - 1) < 1e-7
    # As torch takes it, in one sum.
    if dtype == torch.float32:
        assert abs(torch.linalg.vector_norm(weight.grad) / exact - 1) > 1e-6


def held_in_different_orders() -> dict[str, list[float]]:
    """Two stages hold the same names, each in an order of its own; one of the gradients is there on one stage only."""
    mesh = make_mesh(Sizes(world=2, pp=2))
    stage = mesh.pp.rank
    values = {"a": 1.0, "b": 10.0, "model.c": 100.0, "d": 1000.0}
    order = ["model.c", "a", "d", "b"] if stage == 0 else ["b", "d", "a", "model.c"]
    named = [(name, plain(values[name] * (1 + stage))) for name in order]
    for name, parameter in named:
        if name == "a" and stage == 1:
            parameter.grad = None
    Gradients(named, {"model.c"}, mesh, group, torch.device("cpu")).reduce(outside_over_stages=True)
    return {name: p.grad.tolist() for name, p in named if p.grad is not None}


def test_stages_that_hold_shared_names_in_different_orders_sum_like_with_like() -> None:
    wanted = {"a": [1.0, 1.0], "b": [30.0, 30.0], "model.c": [300.0, 300.0], "d": [3000.0, 3000.0]}
    assert run_on_ranks(2, held_in_different_orders) == [wanted, wanted]


def experts_among_four() -> dict[str, Any]:
    """Two ranks share the experts, so each expert is on two data-parallel ranks; the rest is on all ranks."""
    mesh = make_mesh(Sizes(world=4, ep=2))
    ep, edp = mesh.axis("ep"), mesh.axis("edp")
    own = 10.0**mesh.global_rank
    expert = shard_parameter((4, 3), initial=Initial(), dim=0, axis=ep, data=edp)
    dense = shard_parameter((5,), initial=Initial())
    found: dict[str, Any] = {"ep": ep.rank, "edp": edp.rank, "dp": mesh.dp.rank}
    for kind in ("replicated", "distributed"):
        expert.grad, dense.grad = torch.full((2, 3), own), torch.full((5,), own)
        named = [("model.experts", expert), ("model.dense", dense)]
        config = OptimizerConfig(kind=kind)  # type: ignore[arg-type]
        gradients = Gradients(named, {name for name, _ in named}, mesh, group, torch.device("cpu"), config=config)
        if kind == "distributed":
            optimizer = torch.optim.SGD([expert, dense], lr=1.0)
            MasterWeights(gradients, [optimizer])
        gradients.reduce(outside_over_stages=False)
        found[kind] = {
            "norm": gradients.norm().item(),
            "held": {
                o.param.name: o.tensor.grad.flatten().tolist()
                for o in gradients.param_shards
                if o.tensor.grad is not None
            },
        }
    return found


def test_experts_are_summed_over_their_own_data_parallel_ranks_alone() -> None:
    # Ep varies faster than edp: global ranks 0 and 2 hold the first experts.
    ranks = run_on_ranks(4, experts_among_four)
    sums = {0: 1.0 + 100.0, 1: 10.0 + 1000.0}
    norm = math.sqrt(6 * sums[0] ** 2 + 6 * sums[1] ** 2 + 5 * 1111.0**2)
    for found in ranks:
        assert found["replicated"]["held"]["model.experts"] == [sums[found["ep"]]] * 6
        assert found["replicated"]["held"]["model.dense"] == [1111.0] * 5
        for kind in ("replicated", "distributed"):
            assert found[kind]["norm"] == pytest.approx(norm, rel=1e-6)
    for name, count in (("model.experts", 12), ("model.dense", 5)):
        # Sharded over data-parallel ranks, every number is on one rank.
        assert sum(len(found["distributed"]["held"].get(name, [])) for found in ranks) == count


def norm_of_master_weights(kind: Any) -> float:
    mesh = make_mesh(Sizes(world=2))
    weight = nn.Parameter(torch.zeros(4, 4))
    config = OptimizerConfig(kind=kind)
    gradients = Gradients(
        [("weight", weight)], set(), mesh, group, torch.device("cpu"), config=config, low=torch.bfloat16
    )
    MasterWeights(gradients, [torch.optim.SGD([weight], lr=1.0)])
    weight.sum().backward()
    gradients.reduce(outside_over_stages=False)
    return gradients.norm().item()


@pytest.mark.parametrize("kind", ["replicated", "distributed"])
def test_master_weights_count_once_in_the_norm_whether_every_data_parallel_rank_has_them_or_one(kind: str) -> None:
    # Sixteen twos.
    assert run_on_ranks(2, norm_of_master_weights, kind) == [8.0, 8.0]


def thawed_norm(kind: Any) -> float:
    """A parameter that was frozen when the buckets were made is unsharded on every data-parallel rank."""
    mesh = make_mesh(Sizes(world=2))
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.float64), requires_grad=False)
    config = OptimizerConfig(kind=kind)
    gradients = Gradients([("thawed", parameter)], set(), mesh, group, torch.device("cpu"), config=config)
    parameter.requires_grad_(True)
    parameter.grad = torch.ones(4, dtype=torch.float64)
    gradients.reduce(outside_over_stages=False)
    return gradients.norm().item()


@pytest.mark.parametrize("kind", ["replicated", "distributed"])
def test_a_parameter_thawed_later_counts_once_in_the_norm(kind: str) -> None:
    assert run_on_ranks(2, thawed_norm, kind) == [4.0, 4.0]


@pytest.mark.parametrize("kind", ["replicated", "distributed"])
def test_master_weights_get_sparse_gradients_too(kind: Any) -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    optimizer, config = torch.optim.SGD([weight], lr=1.0), OptimizerConfig(kind=kind)
    gradients = Gradients([("weight", weight)], set(), Mesh.single(), no_group, torch.device("cpu"), config=config)
    main = MasterWeights(gradients, [optimizer])
    nn.functional.embedding(torch.tensor([2, 2]), weight, sparse=True).sum().backward()
    gradients.reduce(outside_over_stages=False)
    optimizer.step()
    main.update_params()
    assert weight[:, 0].tolist() == [1, 1, -1, 1]
