"""Ranks find out together which of them made NaN or Inf, and which copies of a weight differ."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.device_work import DeviceWork
from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.master_weights import MasterWeights
from lightning_megatron.optim.reductions import fingerprint
from lightning_megatron.optim.replica_check import (
    bullet_list,
    describe_nonfinite,
    differing_copies,
    finite_norm,
    found_nonfinite,
)
from lightning_megatron.sharding import Initial, shard_parameter
from tests.harness.ranks import run_on_ranks
from tests.optim.test_gradients import group, no_group
from tests.pipeline.meshes import make_mesh

CPU = torch.device("cpu")
ALONE = Axis.alone(0)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fingerprint_tells_one_bit(dtype: torch.dtype) -> None:
    x = torch.arange(60).reshape(5, 12).to(dtype)
    bits = torch.uint8
    for byte in range(0, x.numel() * x.element_size(), 7):
        for bit in (0, 7) if dtype != torch.bool else (0,):
            y = x.clone()
            y.view(-1).view(bits)[byte] ^= 1 << bit
            assert fingerprint(y) != fingerprint(x)
    assert fingerprint(x.clone()) == fingerprint(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_fingerprint_tells_two_elements_that_changed_places(dtype: torch.dtype) -> None:
    # 1 and -1 differ in the highest bit alone; 1 and 2 in high bits, at a distance of a power of two.
    x = torch.zeros(4100, dtype=dtype)
    x[0], x[1], x[2049] = 1.0, -1.0, 2.0
    for one, other in ((0, 1), (0, 2049), (1, 2049), (0, 4096)):
        y = x.clone()
        y[one], y[other] = x[other], x[one]
        assert fingerprint(y) != fingerprint(x), (one, other)


def test_a_fingerprint_does_not_depend_on_strides() -> None:
    x = torch.randn(6, 4)
    assert fingerprint(x.T.contiguous()) == fingerprint(x.T) != fingerprint(x)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_number_is_found(value: float) -> None:
    parameter = nn.Parameter(torch.zeros(1000))
    parameter.grad = torch.zeros(1000)
    empty, without = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(3))
    empty.grad = torch.zeros(0)
    stepped = [parameter, empty, without]
    assert not found_nonfinite(stepped, ALONE, CPU)
    parameter.grad[77] = value
    assert found_nonfinite(stepped, ALONE, CPU)


def checked(*gradients: Tensor) -> tuple[Gradients, list[nn.Parameter]]:
    """Parameters of a model on one device that have these gradients, in buckets."""
    named = [(str(number), nn.Parameter(torch.zeros_like(each))) for number, each in enumerate(gradients)]
    engine = Gradients(named, set(), Mesh.single(), no_group, CPU)
    for (_, parameter), gradient in zip(named, gradients, strict=True):
        parameter.grad = gradient.clone()
    engine.reduce(outside_over_stages=False)
    return engine, [parameter for _, parameter in named]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_norm_that_gradients_are_checked_by_is_the_one_of_all_numbers(dtype: torch.dtype) -> None:
    given = [torch.randn(shape).to(dtype) for shape in ((64, 32), (7,), (3, 5))]
    engine, stepped = checked(*given)
    norm, wanted = finite_norm(engine, stepped), torch.cat([each.flatten().double() for each in given]).norm()
    assert norm is not None and norm.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert norm.equal(engine.norm(stepped))
    part = finite_norm(engine, stepped[1:])
    assert part is not None and part.equal(engine.norm(stepped[1:])) and part < norm


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("counts", [True, False])
def test_there_is_no_norm_with_a_bad_number_even_in_a_copy_that_does_not_count(
    value: float, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, stepped = checked(torch.ones(300), torch.ones(5))
    if not counts:
        monkeypatch.setattr(engine, "counted", lambda: iter(stepped[:1]))
    before = finite_norm(engine, stepped)
    assert before is not None and before.item() == pytest.approx((305 if counts else 300) ** 0.5)
    assert stepped[1].grad is not None
    stepped[1].grad[3] = value
    assert finite_norm(engine, stepped) is None and finite_norm(engine, stepped[:1]) is not None


def test_large_numbers_whose_squares_overflow_are_not_bad() -> None:
    engine, stepped = checked(torch.full((512,), 3e38))
    norm = finite_norm(engine, stepped)
    assert norm is not None and norm.isinf() and norm.equal(engine.norm(stepped))


def test_gradients_are_read_once_to_be_checked_and_clipped() -> None:
    given = [torch.randn(256, 256), torch.randn(64, 1024)]
    num_bytes = 4 * sum(each.numel() for each in given)
    passes = []
    for is_known in (True, False):
        engine, stepped = checked(*given)
        with DeviceWork("cpu") as counted:
            norm = finite_norm(engine, stepped)
            engine.clip(1.0, stepped, norm if is_known else None)
        passes.append(counted.work.num_bytes / num_bytes)
        clipped = engine.norm(stepped)
        assert clipped.item() == pytest.approx(1.0, abs=1e-5)
    # The scaling counts as one more, of what it reads or writes.
    assert passes == pytest.approx([2, 3], abs=0.05)


def test_large_numbers_whose_sum_overflows_are_not_bad() -> None:
    parameter = nn.Parameter(torch.zeros(1000))
    parameter.grad = torch.full((1000,), 3e38)
    assert parameter.grad.sum().isinf() and not found_nonfinite([parameter], ALONE, CPU)


def weight(name_values: float, *, tp: Axis | None = None) -> nn.Parameter:
    """Replicated over tp where it is given, else a user's own."""
    if tp is None:
        return nn.Parameter(torch.full((3,), name_values))
    parameter = shard_parameter((3,), initial=Initial(), replicas=(tp,))
    with torch.no_grad():
        parameter.fill_(name_values)
    return parameter


def copies(sizes: Sizes, changed: tuple[int, str]) -> list[str]:
    """What all ranks hear when one rank changes the lowest bit of one parameter."""
    mesh = make_mesh(sizes)
    named = [
        ("outside", weight(1.0)),
        (f"model.{mesh.pp.rank}.norm", weight(2.0, tp=mesh.tp)),
        ("model.tied", weight(3.0, tp=mesh.tp)),
        (f"model.{mesh.pp.rank}.cut", shard_parameter((8,), initial=Initial(), dim=0, axis=mesh.tp)),
    ]
    with torch.no_grad():
        # Of a cut weight ranks of tp hold different parts.
        named[-1][1].fill_(10.0 + mesh.tp.rank)
    inside = {name for name, _ in named if name.startswith("model")}
    gradients = Gradients(named, inside, mesh, group, CPU)
    assert differing_copies(gradients, mesh) == []
    rank, name = changed
    if mesh.global_rank == rank:
        dict(named)[name].data.view(torch.int32)[1] ^= 1
    return differing_copies(gradients, mesh)


# Global ranks of pp 2 x dp 2 x tp 2: the last stage has 0 to 3.
SIZES = Sizes(world=8, pp=2, tp=2)


@pytest.mark.parametrize(
    ("changed", "axes"),
    [
        ((5, "model.0.norm"), ["4, 5", "5, 7"]),
        ((5, "model.0.cut"), ["5, 7"]),
        ((2, "model.tied"), ["0, 2", "2, 3", "6, 2"]),
        ((0, "outside"), ["0, 1", "0, 2", "4, 0"]),
    ],
)
def test_every_axis_that_shares_a_changed_weight_is_reported_on_every_rank(
    changed: tuple[int, str], axes: list[str]
) -> None:
    by_rank = run_on_ranks(8, copies, SIZES, changed)
    assert by_rank == [[f"{changed[1]} on ranks {ranks}" for ranks in axes]] * 8


def named_gradients(values: dict[str, Tensor]) -> list[tuple[str, nn.Parameter]]:
    named = [(name, nn.Parameter(torch.zeros(20))) for name in values]
    for name, parameter in named:
        parameter.grad = values[name]
    return named


def makes_nan(kind: str) -> dict[str, Any]:
    """Of three parameters in one bucket, rank 0 makes NaN in `a`, rank 1 Inf in `b`, rank 2 both; `e` is in another."""
    mesh = make_mesh(Sizes(world=3))
    values: dict[str, Tensor] = {name: torch.ones(20) for name in ("a", "b", "c", "d", "e", "f")}
    if mesh.global_rank in (0, 2):
        values["a"][3] = float("nan")
    if mesh.global_rank in (1, 2):
        values["b"][4] = -float("inf")
    named = named_gradients(values)
    config = OptimizerConfig(bucket_size=60, kind=kind)  # type: ignore[arg-type]
    gradients = Gradients(named, set(), mesh, no_group, CPU, config=config)
    if kind == "distributed":
        MasterWeights(gradients, [torch.optim.SGD([parameter for _, parameter in named], lr=1.0)])
    gradients.reduce(outside_over_stages=False)
    found: dict[str, Any] = {"buckets": [{param.name for param in bucket.members} for bucket in gradients.buckets]}
    found["sent"] = describe_nonfinite(gradients, mesh.world)
    for shard in gradients.param_shards:
        shard.tensor.grad.zero_()  # type: ignore[union-attr]
        if mesh.global_rank == 2 and shard.param.name == "e":
            shard.tensor.grad[0] = float("inf")  # type: ignore[index]
    found["later"] = describe_nonfinite(gradients, mesh.world)
    return found


@pytest.mark.parametrize("kind", ["replicated", "distributed"])
def test_each_rank_is_named_with_its_own_bad_parameters_though_they_share_a_bucket(kind: str) -> None:
    ranks = run_on_ranks(3, makes_nan, kind)
    assert {"a", "b", "c"} in ranks[0]["buckets"]
    for found in ranks:
        assert found["sent"] == ["rank 0: a", "rank 1: b", "rank 2: a, b"]
    # After the sum nobody can say who it was.
    if kind == "replicated":
        assert all(found["later"] == ["no rank by itself, after the sum: e"] for found in ranks)


def makes_nothing() -> list[str]:
    """Ranks have large finite numbers, of which the sum alone leaves the range."""
    mesh = make_mesh(Sizes(world=2))
    values = {"a": torch.ones(20), "b": torch.full((20,), 3e38)}
    gradients = Gradients(named_gradients(values), set(), mesh, no_group, CPU)
    gradients.reduce(outside_over_stages=False)
    return describe_nonfinite(gradients, mesh.world)


def test_where_the_sum_alone_leaves_the_range_no_rank_is_named() -> None:
    for found in run_on_ranks(2, makes_nothing):
        assert found == ["no rank by itself, after the sum: b"]


def thaws() -> list[str]:
    """A parameter that has no bucket, because it was frozen when those were made, and a sparse gradient's."""
    mesh = make_mesh(Sizes(world=2))
    named = named_gradients({"a": torch.ones(20), "thawed": torch.ones(20)})
    late = named[1][1]
    late.requires_grad_(False)
    gradients = Gradients(named, set(), mesh, no_group, CPU)
    late.requires_grad_(True)
    late.grad = torch.full((20,), float("nan") if mesh.global_rank == 1 else 1.0)
    gradients.reduce(outside_over_stages=False)
    return describe_nonfinite(gradients, mesh.world)


def test_a_parameter_that_is_in_no_bucket_is_reported_as_well() -> None:
    for found in run_on_ranks(2, thaws):
        assert found == ["rank 1: thawed"]


def test_a_sparse_gradient_of_one_rank_is_reported_as_well() -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    gradients = Gradients([("weight", weight)], set(), Mesh.single(), no_group, CPU)
    weight.grad = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.full((1, 3), float("nan")), (4, 3), check_invariants=True
    )
    gradients.reduce(outside_over_stages=False)
    assert describe_nonfinite(gradients, Mesh.single().world) == ["rank 0: weight"]


def test_many_lines_are_cut_short() -> None:
    text = bullet_list([str(i) for i in range(25)], limit=3)
    assert text == "  - 0\n  - 1\n  - 2\n  - and 22 more"
    assert bullet_list(["a", "b"], limit=2) == "  - a\n  - b"
