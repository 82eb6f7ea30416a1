"""A second save of the same tensors follows the first in the background, and is complete by itself."""

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_megatron.checkpoint import Saver, atomic_directory, load, read_meta
from lightning_megatron.checkpoint.atomic_directory import AtomicDirectory
from lightning_megatron.checkpoint.chunk_file import ChunkLocation, ChunkWriter
from lightning_megatron.checkpoint.state import Piece
from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.sharding import Box
from tests.checkpoint.small_model import mesh_of
from tests.harness.ranks import RankFailed, on_ranks, run_on_ranks

WORLD = Mesh.single().world


class Gate:
    """Nothing is written until it is opened; counts the tensors that are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.opened, self.tensors = threading.Event(), 0
        write, gate = ChunkWriter.write, self

        def wait(self: ChunkWriter, value: torch.Tensor | bytes) -> ChunkLocation:
            assert gate.opened.wait(120)
            gate.tensors += isinstance(value, torch.Tensor)
            return write(self, value)

        if monkeypatch is None:
            ChunkWriter.write = wait  # type: ignore[method-assign]
        else:
            monkeypatch.setattr(ChunkWriter, "write", wait)


def value_in(path: Path, world: Axis = WORLD) -> float:
    target = torch.zeros(100)
    load(path, {"w": target}, world=world)
    assert (target == target[0]).all() or target.isnan().all()
    return float(target[0])


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_a_save_of_the_same_tensors_does_not_wait_and_links_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    gate, saver, tensor = Gate(monkeypatch), Saver(WORLD), torch.full((100,), value)
    saver.save(tmp_path / "1.ckpt", {"w": tensor}, {"name": 1}, wait=False)
    saver.save(tmp_path / "2.ckpt", {"w": tensor}, {"name": 2}, wait=False)
    assert saver.is_saving and not (tmp_path / "1.ckpt").exists()
    tensor.zero_()
    gate.opened.set()
    assert saver.wait()
    assert gate.tensors == 1
    inodes = {os.stat(tmp_path / f"{name}.ckpt" / "__0_0.distcp").st_ino for name in (1, 2)}
    assert len(inodes) == 1
    assert [read_meta(tmp_path / f"{name}.ckpt")["name"] for name in (1, 2)] == [1, 2]
    # Each stands without the other.
    shutil.rmtree(tmp_path / "1.ckpt")
    assert str(value_in(tmp_path / "2.ckpt")) == str(value)


def test_a_save_of_other_tensors_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither other values, nor another shape, nor one more tensor."""
    gate = Gate(monkeypatch)
    seconds = [{"w": torch.full((100,), 2.0)}, {"w": torch.ones(99)}, {"w": torch.ones(100), "v": torch.zeros(())}]
    for index, second in enumerate(seconds):
        gate.opened.clear()
        saver = Saver(WORLD)
        saver.save(tmp_path / "1.ckpt", {"w": torch.ones(100)}, {}, wait=False)
        threading.Timer(0.1, gate.opened.set).start()
        saver.save(tmp_path / "2.ckpt", second, {}, wait=False)
        # It has waited.
        assert value_in(tmp_path / "1.ckpt") == 1
        saver.close()
        loaded = {name: torch.zeros_like(tensor) for name, tensor in second.items()}
        load(tmp_path / "2.ckpt", loaded, world=WORLD)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in second.items()), index


def test_a_second_save_over_the_same_path_and_one_without_links_are_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)

    def no_link(*args: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    for link in (os.link, no_link):
        monkeypatch.setattr(os, "link", link)
        for second in ("1.ckpt", "2.ckpt"):
            gate.opened.clear()
            saver = Saver(WORLD)
            saver.save(tmp_path / "1.ckpt", {"w": torch.ones(100)}, {"name": 1}, wait=False)
            saver.save(tmp_path / second, {"w": torch.ones(100)}, {"name": 2}, wait=False)
            gate.opened.set()
            saver.close()
            assert value_in(tmp_path / second) == 1 and read_meta(tmp_path / second)["name"] == 2
    assert sorted(os.listdir(tmp_path)) == ["1.ckpt", "2.ckpt"]


def test_the_old_one_goes_when_both_are_in_place_and_stays_when_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Saver(WORLD)
    saver.save(tmp_path / "0.ckpt", {"w": torch.zeros(100)}, {})
    gate = Gate(monkeypatch)
    create = AtomicDirectory.create

    def full(self: AtomicDirectory, name: str):
        if self.path.endswith("2.ckpt"):
            raise OSError("disk full")
        return create(self, name)

    monkeypatch.setattr(AtomicDirectory, "create", full)
    for fails in (True, False):
        if not fails:
            monkeypatch.setattr(AtomicDirectory, "create", create)
        gate.opened.clear()
        saver.save(tmp_path / "1.ckpt", {"w": torch.ones(100)}, {}, wait=False)
        saver.remove(tmp_path / "0.ckpt")
        saver.save(tmp_path / "2.ckpt", {"w": torch.ones(100)}, {}, wait=False)
        gate.opened.set()
        if fails:
            with pytest.raises(RuntimeError, match=r"2\.ckpt was not written: rank 0: OSError: disk full"):
                saver.wait()
            assert sorted(os.listdir(tmp_path)) == ["0.ckpt", "1.ckpt"]
        else:
            saver.wait()
            assert sorted(os.listdir(tmp_path)) == ["1.ckpt", "2.ckpt"]
    assert value_in(tmp_path / "1.ckpt") == value_in(tmp_path / "2.ckpt") == 1


def pieces_of(rank: int, value: float) -> dict[str, Piece]:
    return {"w": Piece((100,), Box((50 * rank,), (50,)), torch.full((50,), value))}


@on_ranks(2)
def test_ranks_agree_whether_tensors_are_the_same(tmp_path: Path) -> None:
    world, background, gate = mesh_of(Sizes(world=2)).world, mesh_of(Sizes(world=2)).world, Gate()
    saver, rank = Saver(world, background), dist.get_rank()
    gate.opened.set()
    # Equal on rank 0, not on rank 1; then on both; then on neither; and with a rank that is late.
    for step, (first, second) in enumerate([(1, 1 + rank), (3, 3), (4, 5), (6, 6)]):
        before = gate.tensors
        saver.save(tmp_path / f"{step}a.ckpt", pieces_of(rank, first), {"step": step}, wait=False)
        if step == 3 and rank == 0:
            saver.wait()
        saver.save(tmp_path / f"{step}b.ckpt", pieces_of(rank, second), {"step": step}, wait=False)
        saver.wait()
        target = torch.zeros(100)
        load(tmp_path / f"{step}b.ckpt", {"w": target}, world=world)
        assert target.unique().tolist() == ([1, 2] if step == 0 else [second])
        assert gate.tensors - before in ((1, 2) if step == 1 else (2,))


def save_twice_and_die(path: Path, at: str, in_second: bool) -> None:
    world, background = mesh_of(Sizes(world=2)).world, mesh_of(Sizes(world=2)).world
    create, put_in_place, link = AtomicDirectory.create, atomic_directory.replace, AtomicDirectory.link
    rank = dist.get_rank()

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def is_it(target: str) -> bool:
        return ("last" in target) == in_second

    def die_at(self: AtomicDirectory, name: str):
        if name == at and is_it(self.path):
            die()
        return create(self, name)

    def die_in_place(source: Path, target: Path, save_id: str) -> None:
        if at == "place" and is_it(str(target)):
            die()
        put_in_place(source, target, save_id)

    def die_after_link(self: AtomicDirectory, name: str, other: AtomicDirectory) -> None:
        link(self, name, other)
        if at == "link":
            die()

    if rank == 0:
        AtomicDirectory.create, atomic_directory.replace, AtomicDirectory.link = die_at, die_in_place, die_after_link
    saver, gate = Saver(world, background), Gate()
    saver.save(path / "1.ckpt", pieces_of(rank, 2), {}, wait=False)
    if rank == 0:
        saver.remove(path / "0.ckpt")
    saver.save(path / "last.ckpt", pieces_of(rank, 2), {}, wait=False)
    gate.opened.set()
    saver.wait()


@pytest.mark.parametrize(
    ("at", "in_second"),
    [("__0_0.distcp", False), ("place", False), ("link", True), ("manifest.json", True), ("place", True)],
)
def test_a_crash_in_either_leaves_complete_ones(tmp_path: Path, at: str, in_second: bool) -> None:
    saver = Saver(WORLD)
    for name in ("0.ckpt", "last.ckpt"):
        saver.save(tmp_path / name, {"w": torch.ones(100)}, {})
    with pytest.raises(RankFailed, match="SIGKILL"):
        run_on_ranks(2, save_twice_and_die, tmp_path, at, in_second)
    assert value_in(tmp_path / "0.ckpt") == value_in(tmp_path / "last.ckpt") == 1
    if in_second:
        assert value_in(tmp_path / "1.ckpt") == 2
    else:
        assert not (tmp_path / "1.ckpt").exists()
