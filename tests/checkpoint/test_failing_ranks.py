"""An error of one rank, at any call, is raised on every rank; the old checkpoint stands, nothing unfinished is left."""

import ctypes
import errno
import os
import resource
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from lightning_megatron.checkpoint import Saver, atomic_directory, chunk_file, load, save, save_plan
from lightning_megatron.checkpoint import saver as saver_module
from lightning_megatron.checkpoint.state import Piece
from lightning_megatron.mesh import Axis, Sizes
from lightning_megatron.sharding import Box
from tests.checkpoint.small_model import mesh_of
from tests.checkpoint.steps import step_in
from tests.harness import ranks
from tests.harness.ranks import RankFailed, on_ranks, run_on_ranks

# Of each rank's half: larger than the buffer of a file.
LENGTH = 3000


def world_of_two() -> Axis:
    return mesh_of(Sizes(world=2)).world


def halves(step: int) -> dict[str, Any]:
    """Of a tensor, this rank's half; both have the small one."""
    rank = dist.get_rank()
    half = torch.full((LENGTH,), float(step))
    return {"w": Piece((2 * LENGTH,), Box((LENGTH * rank,), (LENGTH,)), half), "v": torch.full((5,), step)}


def require_step(path: Path, step: int, world: Axis) -> None:
    found = {"w": torch.zeros(2 * LENGTH), "v": torch.zeros(5, dtype=torch.int64)}
    load(path, found, world=world)
    assert (found["w"] == step).all() and (found["v"] == step).all(), (step, found)


def finish(saver: Saver, path: Path, *, wait: bool) -> None:
    """Saves the second step and waits for its end."""
    saver.save(path, halves(2), {}, wait=wait)
    saver.wait()


class Fault:
    """Raises OSError at one of the calls to the system that a save makes."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.at = 0
        self.passed = 0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.passed += 1
            if self.passed == self.at:
                raise OSError(self.number, os.strerror(self.number))
            return call(*args, **kwargs)

        return run

    @contextmanager
    def opened(self, *args: Any) -> Iterator[Any]:
        """A file of which each write is a call."""
        with open(*args) as stream:
            yield SimpleNamespace(write=self.around(stream.write), flush=stream.flush, fileno=stream.fileno)

    @contextmanager
    def put(self, at: int) -> Iterator[None]:
        self.at, self.passed = at, 0
        places: list[tuple[Any, str, Any]] = [(os, name, getattr(os, name)) for name in ("mkdir", "rename")]
        places.append((atomic_directory, "_exchange", atomic_directory._exchange))
        for owner, name, call in places:
            setattr(owner, name, self.around(call))
        fsync = os.fsync
        # Nothing is to outlive the machine here, and it takes long.
        os.fsync = self.around(lambda descriptor: None)
        atomic_directory.open = self.around(self.opened)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for owner, name, call in places:
                setattr(owner, name, call)
            os.fsync = fsync
            del atomic_directory.open  # type: ignore[attr-defined]


@pytest.mark.parametrize(("in_background", "can_exchange"), [(False, False), (True, True)])
@on_ranks(2, timeout=120)
def test_no_space_at_any_call_of_either_rank_is_reported_on_both(
    tmp_path: Path, in_background: bool, can_exchange: bool
) -> None:
    world, path = world_of_two(), tmp_path / "last.ckpt"
    if not can_exchange:
        atomic_directory._exchange = lambda one, other: False
    saver, fault, tally = Saver(world), Fault(errno.ENOSPC), Counter[str]()
    saver.save(path, halves(1), {"step": 1})
    stands = 1
    with fault.put(0):
        saver.save(path, halves(1), {"step": 1})
    most = max(fault.passed, *_gathered(fault.passed, world))
    for step, (failing, at) in enumerate(((r, at) for r in (0, 1) for at in range(1, most + 1)), start=2):
        message = ""
        with fault.put(at if dist.get_rank() == failing else 0):
            try:
                saver.save(path, halves(step), {"step": step}, wait=not in_background)
                saver.wait()
            except RuntimeError as error:
                message = str(error)
        by_rank = _gathered(message, world)
        assert len(set(by_rank)) == 1, by_rank
        if message:
            tally["reported"] += 1
            assert f"{path} was not written: rank {failing}: OSError: [Errno 28]" in message
        else:
            tally["well"] += 1
            stands = step
        require_step(path, stands, world)
        assert os.listdir(tmp_path) == ["last.ckpt"], (failing, at, os.listdir(tmp_path))
        dist.barrier()
    # The second rank makes fewer calls than the first.
    assert tally["reported"] > most + 10 and tally["well"] > 0, (tally, most)


def _gathered(value: Any, world: Axis) -> list[Any]:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, value, group=world.group)
    return found


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("limited", [0, 1])
@on_ranks(2)
def test_a_file_that_cannot_grow_is_reported_on_both_ranks(tmp_path: Path, limited: int, in_background: bool) -> None:
    world, path = world_of_two(), tmp_path / "last.ckpt"
    saver = Saver(world)
    saver.save(path, halves(1), {})
    with file_limit(LENGTH) if dist.get_rank() == limited else file_limit(10**9):
        with pytest.raises(RuntimeError, match=rf"was not written: rank {limited}: OSError: .*File too large"):
            finish(saver, path, wait=not in_background)
        dist.barrier()
    require_step(path, 1, world)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    dist.barrier()
    # And the next goes well.
    saver.save(path, halves(3), {})
    require_step(path, 3, world)


def raise_in(where: str, saver: Saver) -> None:
    """From now on this rank cannot do that, before it comes to ask the others."""

    def fail(*args: Any, **options: Any) -> Any:
        raise MemoryError("not on this rank")

    if where == "its own plan":
        save_plan.chunks = fail
    elif where == "the plan of all":
        DefaultSavePlanner.create_global_plan = fail  # type: ignore[method-assign]
    else:
        saver._staging.holds = fail  # type: ignore[method-assign]


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("where", ["its own plan", "the plan of all", "the comparison", "its input"])
@on_ranks(2)
def test_what_one_rank_runs_into_before_it_writes_ends_the_save_on_both(
    tmp_path: Path, where: str, in_background: bool
) -> None:
    if where == "the comparison" and not in_background:
        return
    world, path = world_of_two(), tmp_path / "last.ckpt"
    save(path, halves(1), {}, world=world)
    saver, pieces, wanted = Saver(world, mesh_of(Sizes(world=2)).world), halves(2), "MemoryError: not on this rank"
    kind: type[Exception] = RuntimeError
    opened, write = threading.Event(), chunk_file.ChunkWriter.write
    if where == "the comparison":
        # It is made with a save that is in the air, which stays there until the rank has failed.
        def after_failure(self: chunk_file.ChunkWriter, value: torch.Tensor | bytes) -> chunk_file.ChunkLocation:
            assert opened.wait(30)
            return write(self, value)

        chunk_file.ChunkWriter.write = after_failure  # type: ignore[method-assign]
        saver.save(tmp_path / "other.ckpt", halves(2), {}, wait=False)
    if where == "its input":
        kind, wanted = ValueError, "ValueError: .*must have the sizes of its box"
    # The first rank makes the plan of all.
    failing = 0 if where == "the plan of all" else 1
    if dist.get_rank() == failing:
        if where == "its input":
            pieces["v"] = bad_pieces()
        else:
            raise_in(where, saver)
    with pytest.raises(kind, match=rf"last\.ckpt was not written: rank {failing}: {wanted}") as raised:
        saver.save(path, pieces, {}, wait=not in_background)
    opened.set()
    assert (raised.value.__cause__.__cause__ is not None) == (dist.get_rank() == failing)
    saver.wait()
    require_step(path, 1, world)
    assert atomic_directory.UNFINISHED not in os.listdir(tmp_path)


def bad_pieces() -> Iterator[Piece]:
    """A user's own pieces, that are made when they are read."""
    yield Piece((5,), Box((0,), (5,)), torch.zeros(4))


def mount_small(folder: Path, num_bytes: int) -> None:
    """A file system of that size for this process alone; skips where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, new_user, private, recursive = 0x20000, 0x10000000, 1 << 18, 1 << 14
    if libc.unshare(new_namespace | (new_user if os.getuid() else 0)):
        pytest.skip("this process may not have mounts of its own")
    libc.mount(b"none", b"/", None, private | recursive, None)
    if libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={num_bytes}".encode()):
        pytest.skip("this process may not mount")


@on_ranks(1, init=False)
def test_a_full_disk_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    mount_small(tmp_path, 2**20)
    from tests.checkpoint.steps import ALONE

    def save_sized(step: int, num_bytes: int) -> None:
        save(tmp_path / "last.ckpt", {"w": torch.full((num_bytes // 4,), float(step))}, {"step": step}, world=ALONE)

    save_sized(1, 300_000)
    for num_bytes in (900_000, 5_000_000):
        with pytest.raises(RuntimeError, match=r"was not written: rank 0: OSError: .*No space left on device"):
            save_sized(2, num_bytes)
        found = torch.zeros(75_000)
        load(tmp_path / "last.ckpt", {"w": found}, world=ALONE)
        assert (found == 1).all()
        assert os.listdir(tmp_path) == ["last.ckpt"]
    save_sized(3, 300_000)


@on_ranks(2)
def test_a_rank_without_memory_for_its_copies_is_reported_on_both(tmp_path: Path) -> None:
    world, path = world_of_two(), tmp_path / "last.ckpt"
    save(path, halves(1), {}, world=world)
    saver, make = Saver(world), saver_module._buffer
    if dist.get_rank() == 1:

        def no_memory(tensor: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("not enough memory: you tried to allocate 12000 bytes")

        saver_module._buffer = no_memory
    with pytest.raises(RuntimeError, match="was not written: rank 1: RuntimeError: not enough memory"):
        finish(saver, path, wait=False)
    require_step(path, 1, world)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    dist.barrier()
    saver_module._buffer = make
    saver.save(path, halves(3), {}, wait=False)
    saver.wait()
    require_step(path, 3, world)


def save_where_one_dies(folder: Path, dying: int, at: int, in_background: bool) -> None:
    """The other rank writes down its error message."""
    world, path = world_of_two(), folder / "last.ckpt"
    saver = Saver(world)
    saver.save(path, halves(1), {})
    dist.barrier()
    write, num_writes = chunk_file._Counter.write, iter(range(10**6))

    def die(stream: Any, data: Any) -> int:
        if next(num_writes) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(stream, data)

    if dist.get_rank() == dying:
        chunk_file._Counter.write = die  # type: ignore[method-assign]
    try:
        saver.save(path, halves(2), {}, wait=not in_background)
        saver.wait()
    except RuntimeError as error:
        (folder / ".error").write_text(str(error))


@pytest.mark.parametrize(("dying", "at", "in_background"), [(1, 0, False), (1, 15, True), (0, 5, True), (0, 40, False)])
def test_a_rank_that_dies_is_reported_to_the_other(
    tmp_path: Path, dying: int, at: int, in_background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It learns this from its connections, and writes it down.
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 60.0)
    with pytest.raises(RankFailed, match="SIGKILL"):
        run_on_ranks(2, save_where_one_dies, tmp_path, dying, at, in_background)
    message = (tmp_path / ".error").read_text()
    assert f"last.ckpt was not written: rank {1 - dying} waited for the others" in message
    found = {"w": torch.zeros(2 * LENGTH), "v": torch.zeros(5, dtype=torch.int64)}
    from tests.checkpoint.steps import ALONE

    load(tmp_path / "last.ckpt", found, world=ALONE)
    assert (found["w"] == 1).all() and (found["v"] == 1).all()
    # What was written stays, and nobody takes it for a checkpoint.
    [left] = (tmp_path / atomic_directory.UNFINISHED).glob("*/*")
    with pytest.raises(ValueError, match=r"last\.ckpt has no manifest\.json|last\.ckpt is an empty directory"):
        step_in(left)
