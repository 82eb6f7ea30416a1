"""A checkpoint is there whole or not at all, and the one before it stands until then."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem

from lightning_megatron.checkpoint import carrier, is_checkpoint, load, read_meta, save
from lightning_megatron.checkpoint.state import Piece
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.sharding import Box
from tests.checkpoint.small_model import mesh_of
from tests.harness.ranks import RankFailed, on_ranks, run_on_ranks

WORLD = Mesh.single().world


def value_in(path: Path) -> float:
    """The number that the whole checkpoint holds."""
    target = torch.zeros(100)
    load(path, {"w": target}, world=WORLD)
    assert (target == target[0]).all()
    return float(target[0])


def save_and_die(path: Path, at: str) -> None:
    world = mesh_of(Sizes(world=2)).world
    rename = os.rename

    def die(source, target) -> None:
        if Path(target).name == at:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    if world.is_first:
        os.rename = die
    save(path, {"w": torch.full((100,), 2.0)}, {}, world=world)


# Half written, and wholly written but not yet in place.
@pytest.mark.parametrize("at", [".metadata", "new.ckpt"])
def test_a_crash_before_the_rename_leaves_no_checkpoint(tmp_path: Path, at: str) -> None:
    with pytest.raises(RankFailed, match="SIGKILL"):
        run_on_ranks(2, save_and_die, tmp_path / "new.ckpt", at)
    assert not (tmp_path / "new.ckpt").exists()
    (draft,) = tmp_path.iterdir()
    # Nothing that looks for checkpoints by name may take it for one.
    assert draft.name.startswith(".unfinished-")
    assert "ckpt" not in draft.name


def test_a_crash_while_writing_over_a_checkpoint_leaves_the_old_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(path, {"w": torch.full((100,), 1.0)}, {}, world=WORLD)
    with pytest.raises(RankFailed, match="SIGKILL"):
        run_on_ranks(2, save_and_die, path, ".metadata")
    assert value_in(path) == 1


def test_the_old_checkpoint_stands_until_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    save(path, {"w": torch.full((100,), 1.0)}, {"step": 1}, world=WORLD)
    seen = []
    rename = os.rename

    def watch(source, target) -> None:
        if Path(source) == path:
            (draft,) = tmp_path.glob(".unfinished-*")
            seen.append((value_in(path), value_in(draft), read_meta(draft)["step"]))
        rename(source, target)

    monkeypatch.setattr(os, "rename", watch)
    save(path, {"w": torch.full((100,), 2.0)}, {"step": 2}, world=WORLD)
    assert seen == [(1, 2, 2)]
    assert (value_in(path), read_meta(path)["step"]) == (2, 2)
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_rename_that_fails_puts_the_old_checkpoint_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    save(path, {"w": torch.full((100,), 1.0)}, {}, world=WORLD)
    rename = os.rename

    def fail(source, target) -> None:
        if Path(source).name.startswith(".unfinished-"):
            raise PermissionError("no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(PermissionError):
        save(path, {"w": torch.full((100,), 2.0)}, {}, world=WORLD)
    assert value_in(path) == 1
    assert os.listdir(tmp_path) == ["last.ckpt"]


@on_ranks(2)
def test_a_rank_that_cannot_write_is_told_on_every_rank(tmp_path: Path) -> None:
    world = mesh_of(Sizes(world=2)).world
    path = tmp_path / "last.ckpt"
    pieces = {name: torch.full((100,), 1.0) for name in "wxyz"}
    save(path, pieces, {}, world=world)
    if dist.get_rank() == 1:

        def full(*args, **kwargs) -> None:
            raise OSError("disk full")

        filesystem._write_item = full
    with pytest.raises(RuntimeError, match=r"last\.ckpt was not written: rank 1: OSError: disk full"):
        save(path, {name: 2 * value for name, value in pieces.items()}, {}, world=world)
    dist.barrier()
    assert os.listdir(tmp_path) == ["last.ckpt"]
    load(path, pieces, world=world)
    assert all((value == 1).all() for value in pieces.values())


@on_ranks(2)
def test_the_first_ranks_metadata_counts_and_its_fault_is_told_on_every_rank(tmp_path: Path) -> None:
    world = mesh_of(Sizes(world=2)).world
    save(tmp_path / "a.ckpt", {}, {"rank": dist.get_rank()}, world=world)
    assert read_meta(tmp_path / "a.ckpt")["rank"] == 0
    with pytest.raises(ValueError, match=r"meta\['who'\]"):
        save(tmp_path / "b.ckpt", {}, {"who": Path() if dist.get_rank() == 0 else 1}, world=world)


@on_ranks(2)
def test_parts_that_do_not_make_the_whole_are_refused(tmp_path: Path) -> None:
    world = mesh_of(Sizes(world=2)).world
    piece = Piece((6,), Box((3 * dist.get_rank(),), (2,)), torch.zeros(2))
    with pytest.raises(RuntimeError, match=r"hole\.ckpt was not written.*w"):
        save(tmp_path / "hole.ckpt", {"w": piece}, {}, world=world)
    dist.barrier()
    assert os.listdir(tmp_path) == []


def test_a_directory_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="holds something else than a checkpoint"):
        save(tmp_path, {}, {}, world=WORLD)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_an_empty_directory_and_a_file_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").mkdir()
    (tmp_path / "b.ckpt").touch()
    for name in ("a.ckpt", "b.ckpt"):
        save(tmp_path / name, {}, {}, world=WORLD)
        assert is_checkpoint(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt"]


def test_a_link_is_replaced_and_what_it_pointed_to_stays(tmp_path: Path) -> None:
    save(tmp_path / "best.ckpt", {"w": torch.full((100,), 1.0)}, {}, world=WORLD)
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    save(tmp_path / "last.ckpt", {"w": torch.full((100,), 2.0)}, {}, world=WORLD)
    assert (value_in(tmp_path / "best.ckpt"), value_in(tmp_path / "last.ckpt")) == (1, 2)


def test_a_link_to_nothing_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").symlink_to("gone.ckpt")
    save(tmp_path / "last.ckpt", {}, {}, world=WORLD)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert is_checkpoint(tmp_path / "last.ckpt")


def test_an_address_is_no_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="URLs are not supported"):
        save("s3://bucket/a.ckpt", {}, {}, world=WORLD)


def test_a_big_tensor_is_saved_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier, "MAX_CHUNK_BYTES", 100)
    tensor = torch.randn(3, 7, 11)
    save(tmp_path / "big.ckpt", {"w": tensor}, {}, world=WORLD)
    tensors = filesystem.FileSystemReader(tmp_path / "big.ckpt").read_metadata().state_dict_metadata
    assert len(tensors["w"].chunks) > tensor.numel() * 4 / 100
    target = torch.zeros(3, 7, 11)
    load(tmp_path / "big.ckpt", {"w": target}, world=WORLD)
    assert torch.equal(target, tensor)
