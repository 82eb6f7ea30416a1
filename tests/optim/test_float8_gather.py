"""Weights that are gathered in float8: half of the bytes, the products of 16 bits, and shards that lose nothing."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.optim.bucket import FlatParams, ModelParam
from lightning_megatron.optim.bucket_layout import bucket_layouts
from lightning_megatron.optim.sharded_params import ShardedParams
from lightning_megatron.precision.cast import E4M3, amax_of
from lightning_megatron.precision.gemm import Fp8Gemm
from lightning_megatron.precision.scaling import CurrentScaling, WeightCast
from lightning_megatron.sharding import shard_of
from tests.harness.ranks import run_on_ranks
from tests.pipeline.meshes import make_mesh

SHAPES = {"linear": (48, 32), "experts": (3, 16, 32), "small": (16, 16)}
ALONE = Axis.alone(0)


def scaling(axis: Axis = ALONE) -> CurrentScaling:
    return CurrentScaling(E4M3, 0, partial(collectives.all_reduce, axis=axis, op="max"))


def values(tp: Axis) -> dict[str, Tensor]:
    torch.manual_seed(0)
    # Sizes of all orders, some of which are zero, or subnormal, in float8.
    made = {name: torch.randn(shape) * torch.rand(shape) ** 8 for name, shape in SHAPES.items()}
    # A part of a weight, whose others are larger on one rank of tp.
    made["linear"] *= 1 + 40 * tp.rank
    # Its cast is the least number of the largest binade, so that a second cast has twice the scale.
    made["small"][0, 0] = 225 / 64
    made["small"].clamp_(-225 / 64, 225 / 64)
    made["experts"][1] *= 1000.0
    return made


def sharded_params(mesh: Mesh, *, in_float8: bool) -> ShardedParams:
    made, dp, tp = values(mesh.tp), mesh.axis("dp+cp"), mesh.tp
    members = [
        ModelParam(
            name, nn.Parameter(one.clone()), shard_of(nn.Parameter(one)), dp, None, is_outside=False, stages=(0,)
        )
        for name, one in made.items()
    ]
    [layout] = bucket_layouts([one.numel() for one in made.values()], num_shards=dp.size, bucket_size=10**6)
    casts = [WeightCast(scaling(tp), tp, 1), WeightCast(scaling(), ALONE, 3), WeightCast(scaling(), ALONE, 1)]
    flat = FlatParams(members, layout, shards=dp)
    return ShardedParams(flat, torch.bfloat16, casts=casts if in_float8 else ())


def weights_of(one: ShardedParams) -> dict[str, Tensor]:
    return {param.name: param.parameter.detach() for param in one.flat.members}


def product(weight: Tensor, axis: Axis) -> Tensor:
    gemm = Fp8Gemm(x=scaling(), weight=scaling(axis), gradient=scaling())
    x = torch.linspace(-1, 1, 16 * weight.shape[-1]).view(16, -1).bfloat16()
    y = gemm.forward(gemm.cast_input(x, is_training=True), weight, None, torch.bfloat16, is_training=True)
    grad = gemm.input_gradient(gemm.cast_gradient(y), weight, torch.bfloat16)
    return torch.cat([y.flatten(), grad.flatten()])


def products(weights: dict[str, Tensor], tp: Axis) -> list[Tensor]:
    matrices = [(weights["linear"], tp), *((one, ALONE) for one in weights["experts"]), (weights["small"], ALONE)]
    return [product(weight, axis) for weight, axis in matrices]


def gathered(num_tp: int) -> dict[str, Any]:
    """Facts of weights that are gathered in 16 bits, in float8, exactly while they are rounded, and in float8 again."""
    mesh = make_mesh(Sizes(world=torch.distributed.get_world_size(), tp=num_tp))
    plain, rounded = (sharded_params(mesh, in_float8=one) for one in (False, True))
    shard, sent = rounded.shard.clone(), []
    all_gather_ = collectives.all_gather_

    def noted(x: Tensor, axis: Axis, *, wait: bool) -> Any:
        sent.append(x.nbytes)
        return all_gather_(x, axis, wait=wait)

    collectives.all_gather_ = noted  # type: ignore[assignment]
    try:
        for one in (plain, rounded):
            one.hold("part")
            one.wait()
    finally:
        collectives.all_gather_ = all_gather_
    of_plain, of_rounded = ({k: v.clone() for k, v in weights_of(one).items()} for one in (plain, rounded))
    rounded.let_go("part")
    is_kept = torch.equal(rounded.shard, shard) and not rounded.is_written
    scales = rounded.float8.scales if rounded.float8 is not None else None
    rounded.hold("part")
    rounded.wait()
    assert rounded.float8 is not None and rounded.float8.scales is scales is not None
    # A layer writes to one weight of a few, and code between parts wants the numbers.
    with torch.no_grad():
        weights_of(rounded)["linear"][0].fill_(2.0)
    assert rounded.hold("hook", is_exact=True)
    rounded.wait()
    exact = {k: v.clone() for k, v in weights_of(rounded).items()}
    rounded.let_go("part")
    with torch.no_grad():
        weights_of(rounded)["small"][0].fill_(1000.0)
    rounded.let_go("hook")
    rounded.hold("part")
    rounded.wait()
    small = weights_of(rounded)["small"].clone()
    rounded.let_go("part")
    rounded.let_all_go()
    if mesh.axis("dp+cp").is_first:
        rounded.shard[0] = torch.inf
    rounded.hold("part")
    rounded.wait()
    return {
        "bytes": sent,
        "are products equal": [
            torch.equal(*both) for both in zip(products(of_plain, mesh.tp), products(of_rounded, mesh.tp), strict=True)
        ],
        "furthest": max(float((of_rounded[k] - v).abs().max() / v.abs().max()) for k, v in of_plain.items()),
        "has twice the scale": bool(amax_of(of_rounded["small"]) == 224 / 64),
        "is kept": is_kept,
        "is written": bool(collectives.all_reduce(rounded.is_written.int(), mesh.world, "max")),
        "is exact": all(torch.equal(exact[k], v) for k, v in of_plain.items()),
        "is scaled anew": bool((small[0] - 1000.0).abs().max() <= 1000.0 / 16),
        "is nan": bool(weights_of(rounded)["linear"].isnan().any()),
        "are others finite": bool(weights_of(rounded)["small"].isfinite().all()),
    }


def test_products_have_the_bits_of_weights_gathered_in_16_bits_and_shards_keep_theirs() -> None:
    for world, num_tp in ((1, 1), (2, 1), (4, 2)):
        for found in run_on_ranks(world, gathered, num_tp):
            in_16_bits, in_float8 = found["bytes"]
            assert in_16_bits == 2 * in_float8
            assert found["are products equal"] == [True] * 5
            # It has been rounded.
            assert found["furthest"] > 0.01
            assert found["has twice the scale"] and found["is kept"]
            # What is written meanwhile is noticed, and counts for nothing.
            assert found["is written"] and found["is exact"]
            assert found["is scaled anew"]
            assert found["is nan"] and found["are others finite"]
