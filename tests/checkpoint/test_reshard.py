"""What one mesh saves, every other mesh loads bit for bit, and training goes on as if it had never stopped."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_megatron.checkpoint import (
    is_module_name,
    is_optimizer_name,
    load,
    merge_rest,
    pieces_of_module,
    pieces_of_optimizer,
    read_entries,
    read_meta,
    rebuild_optimizer,
    save,
)
from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.sharding import shard_of
from tests.checkpoint.small_model import (
    OPTIMIZERS,
    SHAPES,
    mesh_of,
    parameters_of,
    slice_of,
    train,
)
from tests.harness.ranks import on_ranks, run_on_ranks

LAYOUTS = {
    "one process": Sizes(),
    "tp2": Sizes(world=2, tp=2),
    "tp3": Sizes(world=3, tp=3),
    "tp4": Sizes(world=4, tp=4),
    "dp2": Sizes(world=2),
    "pp2": Sizes(world=2, pp=2),
    "tp2 dp2": Sizes(world=4, tp=2),
    "tp2 pp2": Sizes(world=4, tp=2, pp=2),
}


def on_layout(layout: str, fn, *args):
    """`fn(layout, *args)` on each rank of the layout; one process has no process group at all."""
    world = LAYOUTS[layout].world
    return run_on_ranks(world, fn, layout, *args, init=world > 1)


def save_after_training(layout: str, path: Path, kind: str) -> None:
    mesh = mesh_of(LAYOUTS[layout])
    parameters = parameters_of(mesh, fill=True)
    optimizer = OPTIMIZERS[kind](parameters)
    train(parameters, optimizer, range(3))
    optimizer.param_groups[-1]["lr"] = 0.123  # as a scheduler would
    pieces, rest = pieces_of_optimizer(optimizer, {parameter: name for name, parameter in parameters.items()})
    rest = merge_rest(rest, mesh.world)
    save(path, {**pieces_of_module(parameters), **pieces}, {"optimizers": [rest]}, world=mesh.world)


def load_and_compare(layout: str, path: Path, kind: str) -> None:
    reference = parameters_of(Mesh.single(), fill=True)
    reference_optimizer = OPTIMIZERS[kind](reference)
    train(reference, reference_optimizer, range(3))
    reference_optimizer.param_groups[-1]["lr"] = 0.123

    mesh = mesh_of(LAYOUTS[layout])
    parameters = parameters_of(mesh, fill=False)
    names = {parameter: name for name, parameter in parameters.items()}
    optimizer = OPTIMIZERS[kind](parameters)
    load(path, pieces_of_module(parameters), world=mesh.world, among=is_module_name)
    pieces = rebuild_optimizer(optimizer, names, read_meta(path)["optimizers"][0], read_entries(path))
    load(path, pieces, world=mesh.world, among=is_optimizer_name)

    assert optimizer.param_groups[-1]["lr"] == 0.123
    assert [group["weight_decay"] for group in optimizer.param_groups] == [
        group["weight_decay"] for group in reference_optimizer.param_groups
    ]
    compare(parameters, optimizer, reference, reference_optimizer)
    train(parameters, optimizer, range(3, 5))
    train(reference, reference_optimizer, range(3, 5))
    compare(parameters, optimizer, reference, reference_optimizer)


def compare(parameters, optimizer, reference, reference_optimizer) -> None:
    """Weights and states are the reference's slices, bit for bit, and padding is zero."""
    for name, parameter in parameters.items():
        shard = shard_of(parameter)
        assert torch.equal(shard.valid(parameter), slice_of(parameter, reference[name])), name
        padding = parameter.detach().clone()
        shard.valid(padding).zero_()
        assert not padding.any(), f"padding of {name}"
        state, reference_state = optimizer.state[parameter], reference_optimizer.state[reference[name]]
        assert state.keys() == reference_state.keys(), name
        for key, value in state.items():
            if key == "step":
                assert torch.equal(value, reference_state[key])
            else:
                assert torch.equal(shard.valid(value), slice_of(parameter, reference_state[key])), (name, key)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_what_tp2_saves_loads_on_every_other_mesh(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "step.ckpt"
    on_layout("tp2", save_after_training, path, kind)
    for layout in ("one process", "tp3", "tp4", "tp2 dp2", "tp2 pp2"):
        on_layout(layout, load_and_compare, path, kind)


@pytest.mark.parametrize("saved", ["one process", "dp2", "tp3", "pp2", "tp2 pp2", "tp2 dp2"])
def test_what_any_mesh_saves_loads_in_one_process_and_on_tp2(tmp_path: Path, saved: str) -> None:
    path = tmp_path / "step.ckpt"
    on_layout(saved, save_after_training, path, "adamw")
    on_layout("one process", load_and_compare, path, "adamw")
    on_layout("tp2", load_and_compare, path, "adamw")


def test_every_mesh_saves_the_same_names_shapes_and_groups(tmp_path: Path) -> None:
    seen = []
    for layout in ("one process", "tp3", "tp2 pp2"):
        path = tmp_path / f"{layout}.ckpt"
        on_layout(layout, save_after_training, path, "adamw")
        meta = read_meta(path)
        groups = [{**group, "params": set(group["params"])} for group in meta["optimizers"][0]["groups"]]
        seen.append(({name: entry.shape for name, entry in read_entries(path).items()}, groups))
    assert seen[0] == seen[1] == seen[2]
    names = seen[0][0]
    assert {name: shape for name, shape in names.items() if is_module_name(name)} == SHAPES
    assert names["optimizer.0.layers.1.gate_up.weight.exp_avg"] == (2, 10, 6)
    assert names["optimizer.0.embedding.weight.step"] == ()
    # It never got a gradient.
    assert not any(name.startswith("optimizer.0.layers.0.norm.weight") for name in names)


def file_sizes(layout: str, path: Path) -> list[int]:
    mesh = mesh_of(LAYOUTS[layout])
    save(path, {f"w{i}": torch.full((64, 64), float(i)) for i in range(8)}, {}, world=mesh.world)
    return sorted(file.stat().st_size for file in path.glob("*.distcp"))


def test_replicated_parts_are_written_once_and_share_the_writing(tmp_path: Path) -> None:
    sizes = on_layout("dp2", file_sizes, tmp_path / "w.ckpt")[0]
    payload = 8 * 64 * 64 * 4
    # Each tensor carries a header of about 1.2 kB.
    assert payload <= sum(sizes) < 1.2 * payload
    assert len(sizes) == 2
    assert sizes[1] < 1.2 * sizes[0]


@on_ranks(3)
def test_ranks_off_the_axis_take_no_part(tmp_path: Path) -> None:
    rank = dist.get_rank()
    if rank == 2:
        return  # a collective over the default group would wait for this rank
    group = dist.new_group([0, 1], use_local_synchronization=True)
    world = Axis("world", 2, rank, (0, 1), group)
    path = tmp_path / "two.ckpt"
    save(path, {"w": torch.arange(5.0)}, {}, world=world)
    target = torch.zeros(5)
    load(path, {"w": target}, world=world)
    assert torch.equal(target, torch.arange(5.0))


@on_ranks(2)
def test_one_process_among_others_saves_alone(tmp_path: Path) -> None:
    if dist.get_rank() == 1:
        return
    world = Mesh.single().world
    save(tmp_path / "one.ckpt", {"w": torch.arange(5.0)}, {}, world=world)
    target = torch.zeros(5)
    load(tmp_path / "one.ckpt", {"w": target}, world=world)
    assert torch.equal(target, torch.arange(5.0))
