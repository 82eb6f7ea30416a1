"""A checkpoint is there completely or not at all, and the one before it stays until then."""

import os
import signal
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

import pytest
import torch
import torch.distributed as dist

from lightning_megatron.checkpoint import (
    Saver,
    atomic_directory,
    is_checkpoint,
    load,
    read_entries,
    read_meta,
    save,
    save_plan,
)
from lightning_megatron.checkpoint.atomic_directory import UNFINISHED, AtomicDirectory
from lightning_megatron.checkpoint.chunk_file import ChunkLocation, ChunkWriter
from lightning_megatron.checkpoint.folder import Folder
from lightning_megatron.checkpoint.manifest import read_manifest
from lightning_megatron.checkpoint.state import Piece
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.sharding import Box
from tests.checkpoint.folders import begun, saved
from tests.checkpoint.object_store import ObjectStore, emptied, failing
from tests.checkpoint.small_model import mesh_of
from tests.harness.ranks import RankFailed, on_ranks, run_on_ranks

WORLD = Mesh.single().world


def value_in(path: Path) -> float:
    """The number that all of the checkpoint holds."""
    target = torch.zeros(100)
    load(path, {"w": target}, world=WORLD)
    assert (target == target[0]).all()
    return float(target[0])


def save_and_die(path: Path, at: str) -> None:
    """Ends its process where the first rank is about to make the file, or to put the checkpoint in place."""
    world = mesh_of(Sizes(world=2)).world
    create, put_in_place = AtomicDirectory.create, atomic_directory.replace

    def die(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_at(self: AtomicDirectory, name: str) -> AbstractContextManager[IO[bytes]]:
        if name == at:
            die()
        return create(self, name)

    if world.is_first:
        AtomicDirectory.create = die_at
        atomic_directory.replace = die if at == "place" else put_in_place
    save(path, {"w": torch.full((100,), 2.0)}, {}, world=world)


POINTS = ["__0_0.distcp", ".metadata", "manifest.json", "place"]


@pytest.mark.parametrize("at", POINTS)
def test_a_crash_before_the_rename_leaves_no_checkpoint(tmp_path: Path, at: str) -> None:
    with pytest.raises(RankFailed, match="SIGKILL"):
        run_on_ranks(2, save_and_die, tmp_path / "new.ckpt", at)
    assert not (tmp_path / "new.ckpt").exists()
    # Nothing that looks for checkpoints by name may take it for one.
    assert os.listdir(tmp_path) == [".unfinished"]


@pytest.mark.parametrize("at", POINTS)
def test_a_crash_while_writing_over_a_checkpoint_leaves_the_old_one_complete(tmp_path: Path, at: str) -> None:
    path = tmp_path / "last.ckpt"
    save(path, {"w": torch.full((100,), 1.0)}, {}, world=WORLD)
    with pytest.raises(RankFailed, match="SIGKILL"):
        run_on_ranks(2, save_and_die, path, at)
    assert value_in(path) == 1


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_checkpoint_is_replaced_when_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    path = tmp_path / "last.ckpt"
    save(path, {"w": torch.full((100,), 1.0)}, {"step": 1}, world=WORLD)
    seen = []
    exchange = atomic_directory._exchange

    def watch(one: Path, other: Path) -> bool:
        seen.append((value_in(other), value_in(one), read_meta(one)["step"]))
        return can_exchange and exchange(one, other)

    monkeypatch.setattr(atomic_directory, "_exchange", watch)
    save(path, {"w": torch.full((100,), 2.0)}, {"step": 2}, world=WORLD)
    assert seen == [(1, 2, 2)]
    assert (value_in(path), read_meta(path)["step"]) == (2, 2)
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_this_system_exchanges_names_in_one_step(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").mkdir()
    if not atomic_directory._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this system or file system has no exchange of names")
    assert (tmp_path / "a").is_dir()
    assert (tmp_path / "b").read_text() == "a"


def test_a_rename_that_fails_puts_the_old_checkpoint_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    save(path, {"w": torch.full((100,), 1.0)}, {}, world=WORLD)
    rename = os.rename

    def fail(source, target) -> None:
        if UNFINISHED in Path(source).parts:
            raise PermissionError("no")
        rename(source, target)

    monkeypatch.setattr(atomic_directory, "_exchange", lambda one, other: False)
    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(RuntimeError, match=r"last\.ckpt was not written: rank 0: PermissionError"):
        save(path, {"w": torch.full((100,), 2.0)}, {}, world=WORLD)
    assert value_in(path) == 1
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_every_file_and_the_directories_are_flushed_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    fsync, put_in_place = os.fsync, atomic_directory.replace

    def note(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def place(source: Path, path: Path, save_id: str) -> None:
        flushed.append("place")
        put_in_place(source, path, save_id)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(atomic_directory, "replace", place)
    save(tmp_path / "a.ckpt", {"w": torch.zeros(2)}, {}, world=WORLD)
    *files, folder, rename, parent = flushed
    assert sorted(files) == sorted(os.listdir(tmp_path / "a.ckpt"))
    assert files[-1] == "manifest.json"
    assert (folder, rename, parent) == ("a.ckpt", "place", tmp_path.name)


def test_folders_that_a_save_makes_are_flushed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    flush = atomic_directory.flush_directory
    monkeypatch.setattr(atomic_directory, "flush_directory", lambda path: flushed.append(path.name) or flush(path))
    save(tmp_path / "one" / "two" / "a.ckpt", {"w": torch.zeros(2)}, {}, world=WORLD)
    # Each holds the name of the next; and at last the name of the checkpoint.
    assert flushed == ["one", tmp_path.name, "a.ckpt", "two"]


@on_ranks(2)
def test_a_rank_that_cannot_write_is_reported_on_every_rank(tmp_path: Path) -> None:
    world = mesh_of(Sizes(world=2)).world
    path = tmp_path / "last.ckpt"
    pieces = {name: torch.full((100,), 1.0) for name in "wxyz"}
    save(path, pieces, {}, world=world)
    if dist.get_rank() == 1:

        def full(*args: object) -> ChunkLocation:
            raise OSError("disk full")

        ChunkWriter.write = full
    with pytest.raises(RuntimeError, match=r"last\.ckpt was not written: rank 1: OSError: disk full"):
        save(path, {name: 2 * value for name, value in pieces.items()}, {}, world=world)
    dist.barrier()
    assert os.listdir(tmp_path) == ["last.ckpt"]
    load(path, pieces, world=world)
    assert all((value == 1).all() for value in pieces.values())


@on_ranks(2)
def test_the_first_ranks_metadata_counts_and_its_fault_is_reported_on_every_rank(tmp_path: Path) -> None:
    world = mesh_of(Sizes(world=2)).world
    save(tmp_path / "a.ckpt", {}, {"rank": dist.get_rank()}, world=world)
    assert read_meta(tmp_path / "a.ckpt")["rank"] == 0
    with pytest.raises(ValueError, match=r"meta\['who'\]"):
        save(tmp_path / "b.ckpt", {}, {"who": range(1) if dist.get_rank() == 0 else 1}, world=world)


@on_ranks(2)
def test_parts_that_do_not_make_full_tensors_are_refused(tmp_path: Path) -> None:
    world = mesh_of(Sizes(world=2)).world
    piece = Piece((6,), Box((3 * dist.get_rank(),), (2,)), torch.zeros(2))
    with pytest.raises(ValueError, match=r"hole\.ckpt was not written.*w"):
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


@on_ranks(2)
def test_an_address_is_written_through_fsspec(tmp_path: Path) -> None:
    world = mesh_of(Sizes(world=2)).world
    address = f"file://{tmp_path}/a.ckpt"
    pieces = {name: torch.full((100,), 1.0) for name in "wxyz"}
    for step in (1, 2):
        save(address, {name: step * value for name, value in pieces.items()}, {"step": step}, world=world)
        load(address, pieces, world=world)
        assert all((value == step).all() for value in pieces.values())
        assert read_meta(address)["step"] == step
        pieces = {name: torch.full((100,), 1.0) for name in "wxyz"}
    dist.barrier()
    save_ids = {name.split("-")[0] for name in os.listdir(tmp_path / "a.ckpt")}
    assert save_ids == {"manifest.json", read_manifest(address).save_id}


def test_an_address_keeps_its_checkpoint_until_the_new_manifest_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"file://{tmp_path}/a.ckpt"
    save(address, {"w": torch.full((100,), 1.0)}, {}, world=WORLD)
    create = AtomicDirectory.create

    def fail(self: AtomicDirectory, name: str) -> AbstractContextManager[IO[bytes]]:
        if name == "manifest.json":
            raise OSError("no")
        return create(self, name)

    monkeypatch.setattr(AtomicDirectory, "create", fail)
    with pytest.raises(RuntimeError, match="OSError: no"):
        save(address, {"w": torch.full((100,), 2.0)}, {}, world=WORLD)
    target = torch.zeros(100)
    load(address, {"w": target}, world=WORLD)
    assert (target == 1).all()


@pytest.mark.parametrize("what", ["once", "ever"])
def test_what_an_object_store_does_not_remove_after_a_save_undoes_nothing(what: str) -> None:
    with emptied() as folder:
        address, refused = saved(f"{folder}/a.ckpt", 1), list[str]()

        def refuses(request: str, path: str) -> bool:
            if request != "remove" or (what == "once" and refused):
                return False
            refused.append(path)
            return True

        with failing(refuses):
            saved(address, 2)
            assert refused and read_meta(address)["global_step"] == 2
            # The rest of them is gone.
            num_left = len(ObjectStore.store) - len(read_manifest(address).files) - 1
            assert num_left == len(refused) == (1 if what == "once" else 3)
        saved(address, 3)
        assert len(ObjectStore.store) == len(read_manifest(address).files) + 1


@pytest.mark.parametrize("file", ["__0_0.distcp", "meta.pt", "manifest.json"])
@pytest.mark.parametrize("is_anything_there", [False, True])
def test_a_save_that_an_object_store_refuses_says_that_and_leaves_what_was_there(
    file: str, is_anything_there: bool
) -> None:
    with emptied() as folder:
        address = f"{folder}/a.ckpt"
        if is_anything_there:
            saved(address, 1)
        before = set(ObjectStore.store)
        with (
            failing(lambda request, path: request == "write" and path.endswith(file)),
            pytest.raises(RuntimeError, match="was not written: rank 0: OSError: 503 SlowDown: write"),
        ):
            saved(address, 2)
        assert set(ObjectStore.store) == before
        # Nothing can be read or removed either.
        with (
            failing(lambda request, path: request != "ask" or f"{file}" in path),
            pytest.raises(RuntimeError, match="503 SlowDown"),
        ):
            saved(address, 3)
        assert set(ObjectStore.store) >= before


def test_a_save_whose_manifest_came_although_the_store_reported_otherwise_is_not_taken_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_in_place = AtomicDirectory.put_in_place

    def place(self: AtomicDirectory, manifest: bytes) -> None:
        put_in_place(self, manifest)
        raise OSError("timed out")

    with emptied() as folder:
        address = saved(f"{folder}/a.ckpt", 1)
        monkeypatch.setattr(AtomicDirectory, "put_in_place", place)
        with pytest.raises(RuntimeError, match="timed out"):
            saved(address, 2)
        assert read_meta(address)["global_step"] == 2


def test_what_an_object_store_does_not_answer_is_no_absence() -> None:
    with emptied() as folder:
        address = saved(f"{folder}/a.ckpt", 1)
        with failing(lambda request, path: request == "ask"):
            for ask in (is_checkpoint, lambda path: Folder(path).kind(), atomic_directory.remove):
                with pytest.raises(OSError, match="503 SlowDown"):
                    ask(address)
        assert not is_checkpoint(f"{address}/manifest.json") and Folder(f"{folder}/b.ckpt").kind() == "nothing"
        assert is_checkpoint(address) and Folder(address).kind() == "folder"
        atomic_directory.remove(address)
        assert not ObjectStore.store
        # Nor is anything remembered that somebody else takes away.
        saved(address, 2)
        assert is_checkpoint(address) and Folder(address).kind() == "folder"
        ObjectStore.store.clear()
        assert not is_checkpoint(address) and Folder(address).kind() == "nothing"


def test_an_address_where_a_save_was_interrupted_is_saved_to_again(tmp_path: Path) -> None:
    address = begun(f"file://{tmp_path}/a.ckpt")
    saved(address, 3)
    assert read_meta(address)["global_step"] == 3
    assert not [name for name in os.listdir(tmp_path / "a.ckpt") if name not in read_manifest(address).files][1:]
    for other in ("b.ckpt/notes.txt", "c.ckpt/logs/x"):
        (tmp_path / other).parent.mkdir(parents=True)
        (tmp_path / other).touch()
        with pytest.raises(ValueError, match="holds something else than a checkpoint"):
            saved(f"file://{tmp_path}/{other[:6]}", 3)


def test_a_big_tensor_is_saved_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_plan, "MAX_CHUNK_BYTES", 100)
    tensor = torch.randn(3, 7, 11)
    save(tmp_path / "big.ckpt", {"w": tensor}, {}, world=WORLD)
    assert len(read_entries(tmp_path / "big.ckpt")["w"].chunks) > tensor.numel() * 4 / 100
    target = torch.zeros(3, 7, 11)
    load(tmp_path / "big.ckpt", {"w": target}, world=WORLD)
    assert torch.equal(target, tensor)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written until the event is set."""
    opened, write = threading.Event(), ChunkWriter.write

    def wait(self: ChunkWriter, value: torch.Tensor | bytes) -> ChunkLocation:
        assert opened.wait(120)
        return write(self, value)

    monkeypatch.setattr(ChunkWriter, "write", wait)
    return opened


def test_what_changes_after_an_asynchronous_save_is_not_saved(tmp_path: Path, gate: threading.Event) -> None:
    path, saver, tensor = tmp_path / "a.ckpt", Saver(WORLD), torch.full((100,), 1.0)
    saver.save(path, {"w": tensor}, {}, wait=False)
    assert saver.is_saving
    assert not path.exists()
    tensor.zero_()
    gate.set()
    assert saver.wait()
    assert value_in(path) == 1


def test_the_next_save_waits_for_the_one_in_flight(tmp_path: Path, gate: threading.Event) -> None:
    saver = Saver(WORLD)
    saver.save(tmp_path / "1.ckpt", {"w": torch.full((100,), 1.0)}, {}, wait=False)
    threading.Timer(0.2, gate.set).start()
    saver.save(tmp_path / "2.ckpt", {"w": torch.full((100,), 2.0)}, {}, wait=False)
    assert value_in(tmp_path / "1.ckpt") == 1
    saver.close()
    assert value_in(tmp_path / "2.ckpt") == 2


def test_the_buffers_are_made_once(tmp_path: Path) -> None:
    saver, tensor = Saver(WORLD), torch.full((100,), 1.0)
    seen = []
    for step in range(3):
        saver.save(tmp_path / f"{step}.ckpt", {"w": tensor + step}, {}, wait=False)
        seen.append([buffer.data_ptr() for buffer in saver._staging._buffers])
    saver.wait()
    assert seen[0] == seen[1] == seen[2]
    assert [value_in(tmp_path / f"{step}.ckpt") for step in range(3)] == [1, 2, 3]
    saver.save(tmp_path / "other.ckpt", {"w": tensor, "v": torch.zeros(7)}, {}, wait=False)
    saver.close()
    assert set(read_entries(tmp_path / "other.ckpt")) == {"w", "v"}
    assert saver._staging._buffers == []


def test_what_an_asynchronous_save_ran_into_is_raised_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> ChunkLocation:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ChunkWriter, "write", full)
    saver = Saver(WORLD)
    saver.save(tmp_path / "a.ckpt", {"w": torch.zeros(3)}, {}, wait=False)
    saver._last.thread.join()
    with pytest.raises(RuntimeError, match=r"a\.ckpt was not written: rank 0: OSError: .*No space left"):
        saver.wait()
    # Told once.
    saver.wait()
    assert os.listdir(tmp_path) == []


def test_an_old_checkpoint_is_removed_only_when_the_new_one_is_in_place(tmp_path: Path, gate: threading.Event) -> None:
    saver = Saver(WORLD)
    gate.set()
    saver.save(tmp_path / "1.ckpt", {"w": torch.full((100,), 1.0)}, {})
    gate.clear()
    saver.save(tmp_path / "2.ckpt", {"w": torch.full((100,), 2.0)}, {}, wait=False)
    saver.remove(tmp_path / "1.ckpt")
    assert value_in(tmp_path / "1.ckpt") == 1
    gate.set()
    saver.wait()
    assert os.listdir(tmp_path) == ["2.ckpt"]


def test_an_old_checkpoint_that_cannot_be_removed_is_reported(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Saver(WORLD)
    gate.set()
    saver.save(tmp_path / "1.ckpt", {"w": torch.full((100,), 1.0)}, {})
    gate.clear()

    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if atomic_directory.REMOVED in Path(target).parts:
            raise PermissionError("no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    saver.save(tmp_path / "2.ckpt", {"w": torch.full((100,), 2.0)}, {}, wait=False)
    saver.remove(tmp_path / "1.ckpt")
    gate.set()
    # Only one rank knows: an error would end it while the others go on.
    with pytest.warns(UserWarning, match=r"1\.ckpt was not removed: PermissionError: no"):
        saver.wait()
    assert (value_in(tmp_path / "1.ckpt"), value_in(tmp_path / "2.ckpt")) == (1, 2)


def test_an_old_checkpoint_stays_when_the_new_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(WORLD)
    saver.save(tmp_path / "1.ckpt", {"w": torch.full((100,), 1.0)}, {})
    failed = threading.Event()

    def full(*args: object) -> ChunkLocation:
        failed.wait(30)
        raise OSError("disk full")

    monkeypatch.setattr(ChunkWriter, "write", full)
    saver.save(tmp_path / "2.ckpt", {"w": torch.full((100,), 2.0)}, {}, wait=False)
    saver.remove(tmp_path / "1.ckpt")
    failed.set()
    with pytest.raises(RuntimeError, match="disk full"):
        saver.wait()
    assert value_in(tmp_path / "1.ckpt") == 1


def test_a_wait_with_a_time_out_comes_back_without_the_save(tmp_path: Path, gate: threading.Event) -> None:
    saver = Saver(WORLD)
    saver.save(tmp_path / "1.ckpt", {"w": torch.zeros(3)}, {}, wait=False)
    assert not saver.wait(0.05)
    gate.set()
    assert saver.wait(120)


@on_ranks(2)
def test_saves_of_other_boxes_are_planned_anew_and_of_the_same_boxes_are_not(tmp_path: Path) -> None:
    world = mesh_of(Sizes(world=2)).world
    saver, rank = Saver(world), dist.get_rank()
    agreed = []
    agree = save_plan._global_plan

    def count(*args):
        agreed.append(args)
        return agree(*args)

    save_plan._global_plan = count
    for step, extra in ((0, False), (1, False), (2, True), (3, True)):
        pieces = {"w": Piece((4,), Box((2 * rank,), (2,)), torch.full((2,), float(step)))}
        if extra and rank == 1:
            pieces["v"] = torch.ones(3)
        saver.save(tmp_path / f"{step}.ckpt", pieces, {}, wait=False)
    saver.wait()
    assert len(agreed) == 2
    for step, names in ((0, {"w"}), (1, {"w"}), (2, {"w", "v"}), (3, {"w", "v"})):
        assert set(read_entries(tmp_path / f"{step}.ckpt")) == names
        target = torch.zeros(4)
        load(tmp_path / f"{step}.ckpt", {"w": target}, world=world, strict=False)
        assert (target == step).all()


def test_a_checkpoint_that_is_saved_again_after_its_removal_was_requested_stays(
    tmp_path: Path, gate: threading.Event
) -> None:
    saver, path, pieces = Saver(WORLD), tmp_path / "a.ckpt", {"w": torch.full((100,), 1.0)}
    saver.save(path, pieces, {"n": 1}, wait=False)
    saver.remove(path)
    saver.save(path, pieces, {"n": 2}, wait=False)
    gate.set()
    saver.wait()
    assert read_meta(path)["n"] == 2
