"""Experts and dense weights train as on one device, whatever data-parallel ranks, shards and stages both have."""

import math
from typing import Any

import pytest
import torch

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.replica_check import describe_nonfinite, differing_copies
from lightning_megatron.sharding import shard_of
from tests.harness.ranks import run_on_ranks
from tests.harness.threads import new_group, run_on_threads
from tests.optim import expert_model
from tests.optim.expert_model import (
    FACTOR,
    LAYOUTS,
    NUM_STEPS,
    Given,
    Kind,
    Run,
    Stage,
    experts_on,
    furthest,
    layout,
    name_of,
    plain_run,
    true_values,
    uncounted,
)
from tests.pipeline import meshes

CPU = torch.device("cpu")
# Sums of some hundred products near 1 in another order, after three steps of AdamW.
TOLERANCE = 1e-10
CONFIGS = {
    "replicated": OptimizerConfig(bucket_size=60),
    "replicated, overlap": OptimizerConfig(bucket_size=60, overlap_grad_reduce=True),
    "distributed": OptimizerConfig(bucket_size=60, kind="distributed"),
    "distributed, overlap": OptimizerConfig(
        kind="distributed", overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=100
    ),
}
any_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
any_layout = pytest.mark.parametrize("sizes", LAYOUTS, ids=name_of)


def mesh_of(world: Any, sizes: Sizes) -> Mesh:
    return Mesh.build(sizes, world.rank(), new_group)


def assert_as_on_one_device(runs: list[tuple[float, list[float]]], norms: list[float]) -> None:
    for apart, own_norms in runs:
        assert apart < TOLERANCE
        assert own_norms == pytest.approx(norms, rel=TOLERANCE)


def trained(mesh: Mesh, make_group: Any, config: OptimizerConfig, no_split: bool) -> tuple[float, list[float]]:
    run = Run(mesh, make_group, config, no_split=no_split)
    run.finish()
    return furthest(run.named, plain_run(mesh.pp.size)[0]), run.norms


@pytest.mark.matrix
@any_layout
@any_config
def test_experts_and_dense_weights_step_as_on_one_device(sizes: Sizes, config: OptimizerConfig) -> None:
    runs = run_on_threads(sizes.world, lambda world: trained(mesh_of(world, sizes), new_group, config, False))
    plain, norms = plain_run(sizes.pp)
    assert_as_on_one_device(runs, norms)
    # It bites: weights moved, and every step was clipped.
    assert all((plain[name] - value).abs().max() > 0.01 for name, value in true_values(sizes.pp).items())
    assert min(norms) > 2 * expert_model.MAX_NORM


@pytest.mark.parametrize("sizes", LAYOUTS[3:8:2], ids=name_of)
def test_unsplit_experts_go_to_one_rank_where_an_update_is_not_elementwise(sizes: Sizes) -> None:
    config = CONFIGS["distributed"]
    runs = run_on_threads(sizes.world, lambda world: trained(mesh_of(world, sizes), new_group, config, True))
    assert_as_on_one_device(runs, plain_run(sizes.pp)[1])


def trained_on_gloo(sizes: Sizes, config: OptimizerConfig) -> tuple[float, list[float]]:
    return trained(meshes.make_mesh(sizes), meshes.new_group, config, False)


@pytest.mark.parametrize("name", ["replicated", "distributed, overlap"])
def test_experts_step_as_on_one_device_on_real_ranks(name: str) -> None:
    # One stage has experts and one has none; each expert is on two data-parallel ranks.
    sizes = LAYOUTS[-1]
    assert_as_on_one_device(run_on_ranks(sizes.world, trained_on_gloo, sizes, CONFIGS[name]), plain_run(sizes.pp)[1])


# --- which rank has what ----------------------------------------------------------------------------------------------


def shards_of(world: Any, sizes: Sizes) -> list[tuple[str, tuple[int, ...], int, int]]:
    """Name, offsets in the unsplit model and elements of what this rank's optimizer steps."""
    run = Run(mesh_of(world, sizes), new_group, CONFIGS["distributed"])
    parts = []
    for own in run.gradients.param_shards:
        parts.append((own.param.name, own.param.shard.box.offsets, own.range.start, own.range.end))
    return parts


@any_layout
def test_ranks_that_hold_an_expert_shard_it_and_each_part_is_stepped_by_one(sizes: Sizes) -> None:
    by_rank = run_on_threads(sizes.world, lambda world: shards_of(world, sizes))
    stepped: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for name, offsets, start, end in (part for parts in by_rank for part in parts):
        stepped.setdefault((name, offsets), []).extend(range(start, end))
    experts = {place: elements for place, elements in stepped.items() if "experts" in place[0]}
    assert len(experts) == 2 * sizes.ep * sizes.etp
    for elements in experts.values():
        assert sorted(elements) == list(range(len(set(elements))))


# --- the sums that matter ---------------------------------------------------------------------------------------------


def counted_wrongly(world: Any, sizes: Sizes, change: str) -> tuple[float, list[float]]:
    mesh = mesh_of(world, sizes)
    model = Stage(mesh)
    for parameter in [] if model.experts is None else model.experts.parameters():
        uncounted(parameter, **{"data": None} if change == "data" else {"replicas": (mesh.tp,)})
    named = model.named()
    for name, value in true_values(mesh.pp.size).items():
        if name in named:
            expert_model.fill(named[name], value)
    gradients = Gradients(named.items(), set(named), mesh, new_group, CPU)
    for batch in expert_model.microbatches(0, mesh.pp.rank):
        model.loss(batch).backward()
    gradients.reduce(outside_over_stages=True, factor=torch.tensor(FACTOR, dtype=torch.float64))
    return 0.0, [gradients.norm().item()]


@pytest.mark.parametrize("change", ["data", "replicas"])
def test_the_norm_would_tell_experts_that_are_summed_or_counted_as_dense_weights_are(change: str) -> None:
    sizes = layout(8, 2, 1, 4, 1)
    norms = plain_run(1)[1]
    for _, [norm] in run_on_threads(8, lambda world: counted_wrongly(world, sizes, change)):
        assert abs(norm / norms[0] - 1) > 1e-3


# --- gradients that are there on some ranks only ----------------------------------------------------------------------


def presence(world: Any, sizes: Sizes, givers: set[int], config: OptimizerConfig) -> dict[str, Any]:
    """Only some ranks have a gradient of `up`, none has one of `down`."""
    run = Run(mesh_of(world, sizes), new_group, config)
    up = run.named["model.0.experts.up"]
    if world.rank() in givers:
        up.grad = torch.ones_like(up)
    run.gradients.reduce(outside_over_stages=True)
    stepped = {shard.param.name: shard.tensor.grad for shard in run.gradients.param_shards}
    return {name: None if grad is None else float(grad.max()) for name, grad in stepped.items()}


@any_config
@pytest.mark.parametrize("sizes", [layout(4, 1, 1, 2, 1), layout(4, 2, 2, 4, 1), layout(8, 2, 2, 2, 2)], ids=name_of)
def test_all_experts_of_a_tensor_have_a_gradient_if_one_has_one_on_any_rank(
    sizes: Sizes, config: OptimizerConfig
) -> None:
    # All ranks of etp get the same rows.
    givers = {sizes.etp, sizes.etp + sizes.etp - 1}
    by_rank = run_on_threads(sizes.world, lambda world: presence(world, sizes, givers, config))
    ups = [found["model.0.experts.up"] for found in by_rank if "model.0.experts.up" in found]
    assert None not in ups and {0.0, 1.0} == set(ups)
    if not config.overlap_grad_reduce:
        assert all(found.get("model.0.experts.down") is None for found in by_rank)


# --- frozen, thawed, built early --------------------------------------------------------------------------------------


def thawed_norm(world: Any, sizes: Sizes, kind: Kind) -> tuple[float, float]:
    """The norm of ones in all experts, frozen when buckets were made; and one of a run in which they stay frozen."""
    mesh = mesh_of(world, sizes)
    experts = experts_on(mesh).double().requires_grad_(False)
    gradients = Gradients(experts.named_parameters(), set(), mesh, new_group, CPU, config=OptimizerConfig(kind=kind))
    gradients.reduce(outside_over_stages=False)
    frozen = gradients.norm().item()
    for parameter in experts.parameters():
        parameter.requires_grad_(True)
        parameter.grad = torch.zeros_like(parameter)
        shard_of(parameter).valid(parameter.grad).fill_(1.0)
    gradients.reduce(outside_over_stages=False)
    return frozen, gradients.norm().item()


@pytest.mark.parametrize("kind", ["replicated", "distributed"])
@pytest.mark.parametrize("sizes", LAYOUTS[:-1], ids=name_of)
def test_experts_thawed_later_are_summed_over_their_data_parallel_ranks_and_count_once(
    sizes: Sizes, kind: Kind
) -> None:
    norm = sizes.edp * math.sqrt(2 * expert_model.E * expert_model.FFN * expert_model.H)
    for frozen, thawed in run_on_threads(sizes.world, lambda world: thawed_norm(world, sizes, kind)):
        assert frozen == 0.0 and thawed == pytest.approx(norm, rel=1e-12)


def built_early(world: Any) -> list[float]:
    mesh = mesh_of(world, Sizes(world=2))
    experts = experts_on(Mesh.single())
    for parameter in experts.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + world.rank())
    Gradients(experts.named_parameters(), set(), mesh, new_group, CPU).reduce(outside_over_stages=False)
    return [float(parameter.grad.max()) for parameter in experts.parameters() if parameter.grad is not None]


def test_unsharded_experts_that_were_built_before_the_ranks_were_known_are_summed_over_data_parallel_ranks() -> None:
    assert run_on_threads(2, built_early) == [[3.0, 3.0]] * 2


# --- master weights in 16 bits and in float32 -------------------------------------------------------------------------


def trained_in_16_bits(world: Any, sizes: Sizes, config: OptimizerConfig) -> tuple[set[torch.dtype], float]:
    plain = {name: torch.nn.Parameter(value.float()) for name, value in true_values(1).items()}
    optimizer = expert_model.optimizer_of(plain)
    mesh = mesh_of(world, sizes)
    named = Stage(mesh).float().named()
    for name, value in true_values(1).items():
        expert_model.fill(named[name], value.float())
    given = Given(named, mesh, new_group, expert_model.optimizer_of(named), config, low=torch.bfloat16)
    for number in range(NUM_STEPS):
        given.step(number)
        for name, parameter in plain.items():
            parameter.grad = expert_model.gradient_of(name, parameter.shape, number)
        optimizer.step()
    lowered = {parameter.dtype for parameter in named.values()}
    given.dp_comm.release()
    return lowered, furthest(named, plain)


@any_config
@pytest.mark.parametrize("sizes", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[6]], ids=name_of)
def test_master_weights_of_experts_step_in_float32_with_weights_in_16_bits(
    sizes: Sizes, config: OptimizerConfig
) -> None:
    for lowered, apart in run_on_threads(sizes.world, lambda world: trained_in_16_bits(world, sizes, config)):
        # Gradients are of float32's size, rounded by sums in another order; 16 bits would be 1e-2 apart.
        assert lowered == {torch.bfloat16} and apart < 2e-5


# --- what all ranks find out together ---------------------------------------------------------------------------------


def findings(world: Any, sizes: Sizes, kind: Kind) -> dict[str, Any]:
    run = Run(mesh_of(world, sizes), new_group, OptimizerConfig(kind=kind))
    same = differing_copies(run.gradients, run.mesh)
    up = run.named.get("model.0.experts.up")
    if world.rank() == sizes.world - 1:
        assert up is not None
        up.data.view(torch.int64)[0, 0, 0] ^= 1
    for name, parameter in run.named.items():
        parameter.grad = torch.ones_like(parameter)
        if world.rank() == sizes.world - 1 and name.endswith("experts.up"):
            parameter.grad[0, 0, 0] = float("inf")
    differing = differing_copies(run.gradients, run.mesh)
    run.gradients.reduce(outside_over_stages=True)
    return {
        "same": same,
        "edp": run.mesh.axis("edp").ranks,
        "differing": differing,
        "nonfinite": describe_nonfinite(run.gradients, run.mesh.world),
    }


@pytest.mark.parametrize("kind", ["replicated", "distributed"])
@any_layout
def test_a_copy_of_an_expert_that_differs_and_a_nonfinite_gradient_are_reported_on_every_rank(
    sizes: Sizes, kind: Kind
) -> None:
    last = sizes.world - 1
    by_rank = run_on_threads(sizes.world, lambda world: findings(world, sizes, kind))
    ranks = ", ".join(map(str, by_rank[last]["edp"]))
    for found in by_rank:
        assert found["same"] == []
        # An expert without a copy has nothing to differ from.
        assert found["differing"] == ([f"model.0.experts.up on ranks {ranks}"] if sizes.edp > 1 else [])
        assert found["nonfinite"] == [f"rank {last}: model.0.experts.up"]
