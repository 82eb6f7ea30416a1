"""What a killed save leaves is removed by the next one; what a live one writes is not; a folder has one live run."""

import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lightning_megatron.checkpoint import is_checkpoint, save
from lightning_megatron.checkpoint.atomic_directory import UNFINISHED, AtomicDirectory, new_id
from lightning_megatron.checkpoint.consolidate import write_file
from lightning_megatron.checkpoint.owner_lock import RUN_LOCK, FolderInUseError, FolderOwner
from lightning_megatron.mesh import Mesh


@contextmanager
def another_process(act: Callable[[], object]) -> Iterator[int]:
    """The id of a process that has acted and lives on, until it is killed; at the end it is."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        held = None
        try:
            held = act()
            os.write(writing, b"x")
            signal.pause()
        finally:
            # The object lives as long as the process.
            os._exit(held is None)
    try:
        assert os.read(reading, 1) == b"x"
        yield child
    finally:
        end(child)
        os.close(reading)
        os.close(writing)


def end(child: int) -> None:
    if os.path.exists(f"/proc/{child}"):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def begun(folder: Path) -> AtomicDirectory:
    """A save that has written something."""
    directory = AtomicDirectory.start(folder / "lost.ckpt", new_id())
    with directory.create("part") as stream:
        stream.write(b"half")
    return directory


def saves_again(folder: Path, *, is_file: bool) -> None:
    if is_file:
        write_file(folder / "next.ckpt", {"state_dict": {}})
    else:
        save(folder / "next.ckpt", {"w": torch.ones(2)}, {}, world=Mesh.single().world)


@pytest.mark.parametrize("is_file", [False, True])
def test_a_save_removes_those_whose_process_has_ended_and_no_other(tmp_path: Path, is_file: bool) -> None:
    with another_process(lambda: begun(tmp_path)) as living:
        with another_process(lambda: begun(tmp_path)):
            assert len(list((tmp_path / UNFINISHED).iterdir())) == 2
        own = begun(tmp_path)
        saves_again(tmp_path, is_file=is_file)
        left = sorted((tmp_path / UNFINISHED).iterdir())
        # That of this process, which goes on, and that of the one that lives.
        assert len(left) == 2 and tmp_path / UNFINISHED / own.save_id in left
        own.discard()
        end(living)
    saves_again(tmp_path, is_file=is_file)
    assert [path.name for path in tmp_path.iterdir()] == ["next.ckpt"]
    assert is_file != is_checkpoint(tmp_path / "next.ckpt")


def test_a_folder_is_of_one_process_until_that_ends_however_it_does(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with another_process(lambda: FolderOwner.take(folder)) as owner:
        with pytest.raises(FolderInUseError, match=rf"checkpoints is saved into by another run .*process {owner} on"):
            FolderOwner.take(folder)
        end(owner)
        # Its file is still there.
        assert (folder / RUN_LOCK).exists()
        taken = FolderOwner.take(folder)
        assert taken is not None
        taken.release()
    assert list(folder.iterdir()) == []
    # A folder that nothing was saved into is not left.
    new = FolderOwner.take(tmp_path / "new")
    assert new is not None
    new.release()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


class Kills:
    """Ends its process where it is pickled, after the tensors before it."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        os.kill(os.getpid(), signal.SIGKILL)
        return Kills, ()


def test_a_file_whose_write_is_killed_is_still_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    write_file(path, {"step": 1})
    child = os.fork()
    if child == 0:
        try:
            write_file(path, {"step": 2, "w": torch.zeros(1000), "last": Kills()})
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert torch.load(path) == {"step": 1}
    assert len(list((tmp_path / UNFINISHED).glob("*/one.ckpt"))) == 1
    write_file(path, {"step": 3})
    assert torch.load(path) == {"step": 3} and [one.name for one in tmp_path.iterdir()] == ["one.ckpt"]
    # Nor is a directory of something else replaced, nor anything left of a write that fails.
    (tmp_path / "other.ckpt").mkdir()
    (tmp_path / "other.ckpt" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="holds something else than a checkpoint"):
        write_file(tmp_path / "other.ckpt", {})
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        write_file(path, {"a": lambda: 0})
    assert torch.load(path) == {"step": 3} and not (tmp_path / UNFINISHED).exists()
