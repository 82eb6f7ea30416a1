"""The state that `checkpoint` saves on each rank, and the ways of saving it that are compared.

Each rank holds its share of float32 weights and of two moments, as a distributed optimizer leaves them. Ours saves the
share as it is, a range of all numbers that begins and ends within parameters; torch's tools get as many bytes as
DTensors sharded on their first dim. A number encodes its position, so that any loaded part can be checked.
"""

import gc
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_megatron.checkpoint import Piece, Saver, load
from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import Box, boxes_of_range

KINDS = ("", "optimizer.0.{}.exp_avg", "optimizer.0.{}.exp_avg_sq")
BYTES_OF_A_PARAMETER = 4 * len(KINDS)
Shape = tuple[int, ...]


def shapes_of(num_bytes: int) -> dict[str, Shape]:
    """Shapes of the weights of a GPT whose state has about so many bytes, by name."""
    num_parameters = num_bytes / BYTES_OF_A_PARAMETER
    # Eight layers at least, no wider than large models are.
    hidden = min(2048, max(32, int(math.sqrt(num_parameters / (8 * 12))) // 32 * 32))
    shapes: dict[str, Shape] = {"embedding.weight": (8 * hidden, hidden)}
    for layer in range(max(1, round((num_parameters - 8 * hidden**2) / (12 * hidden**2)))):
        for name, shape in (
            ("norm.weight", (hidden,)),
            ("qkv.weight", (3 * hidden, hidden)),
            ("projection.weight", (hidden, hidden)),
            ("up.weight", (4 * hidden, hidden)),
            ("down.weight", (hidden, 4 * hidden)),
        ):
            shapes[f"layers.{layer}.{name}"] = shape
    return shapes


def name_of(kind: str, name: str) -> str:
    """Name of a weight, or of one of its moments."""
    return kind.format(name) or name


def true_values(name: str, shape: Shape, step: int) -> Tensor:
    """The full tensor at a step."""
    start = step + sum(map(ord, name)) % 1000
    return (torch.arange(start, start + math.prod(shape), dtype=torch.int32) % 9973).float().view(shape)


@dataclass
class Share:
    """This rank's share of the state."""

    world: Axis
    shapes: dict[str, Shape]

    def held(self) -> dict[str, list[Piece]]:
        """A range of all numbers, of each kind, in one memory."""
        total = sum(map(math.prod, self.shapes.values()))
        start, end = (total * rank // self.world.size for rank in (self.world.rank, self.world.rank + 1))
        pieces = {}
        for kind in KINDS:
            flat, offset = torch.zeros(end - start), 0
            for name, shape in self.shapes.items():
                first, last = max(start, offset), min(end, offset + math.prod(shape))
                pieces[name_of(kind, name)] = [
                    Piece(shape, box, flat[offset + begin - start :][: math.prod(box.sizes)].view(box.sizes))
                    for begin, box in boxes_of_range(shape, first - offset, last - offset)
                ]
                offset += math.prod(shape)
        return {name: own for name, own in pieces.items() if own}

    def shards(self, dim: int) -> dict[str, list[Piece]]:
        """Every tensor sharded on a dim, as by tensor parallelism; vectors on their only one."""
        pieces = {}
        for kind in KINDS:
            for name, shape in self.shapes.items():
                cut = min(dim, len(shape) - 1)
                sizes = [size // self.world.size if d == cut else size for d, size in enumerate(shape)]
                offsets = [sizes[d] * self.world.rank if d == cut else 0 for d in range(len(shape))]
                pieces[name_of(kind, name)] = [Piece(shape, Box(tuple(offsets), tuple(sizes)), torch.zeros(sizes))]
        return pieces


def fill(pieces: dict[str, list[Piece]], step: int) -> None:
    """Gives each piece its part of the true values."""
    for piece, wanted in _parts(pieces, step):
        piece.tensor.copy_(wanted)


def is_right(pieces: dict[str, list[Piece]], step: int) -> bool:
    """Whether each piece has its part of the true values."""
    return all(torch.equal(piece.tensor, wanted) for piece, wanted in _parts(pieces, step))


def _parts(pieces: dict[str, list[Piece]], step: int) -> Iterator[tuple[Piece, Tensor]]:
    for name, own in pieces.items():
        full = true_values(name, own[0].global_shape, step)
        for piece in own:
            yield piece, full[_slices(piece.box)]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))


class Ours:
    """This package's saver."""

    def __init__(self, share: Share, *, is_async: bool) -> None:
        self._world = share.world
        self._is_async = is_async
        self._saver = Saver(share.world)
        self.state = share.held()

    def begin(self, path: Path) -> Callable[[], object]:
        """Begins a save and returns when training may go on; the returned function waits until it is durable."""
        self._saver.save(path, self.state, {}, wait=not self._is_async)
        return self._saver.wait

    def load(self, path: Path, pieces: dict[str, list[Piece]]) -> None:
        """Fills the pieces."""
        load(path, pieces, world=self._world)


class Dcp:
    """torch.distributed.checkpoint with its defaults, flushed to the disk."""

    def __init__(self, share: Share, *, is_async: bool = False, reuses_buffers: bool = False) -> None:
        self._is_async = is_async
        self._stager = DefaultStager(StagingOptions(False, False, False, False)) if reuses_buffers else None
        self._mesh = init_device_mesh("cpu", (share.world.size,))
        self.state = share.shards(0)

    def begin(self, path: Path) -> Callable[[], object]:
        """Begins a save, as `Ours.begin` does."""
        state = _as_dtensors(self.state, self._mesh, 0)
        if not self._is_async:
            dcp.save(state, checkpoint_id=path)
            return lambda: None
        future: Any = dcp.async_save(state, checkpoint_id=path, async_stager=self._stager)
        return lambda: (future.result(), dist.barrier())

    def load(self, path: Path, pieces: dict[str, list[Piece]]) -> None:
        """Fills the pieces."""
        dim = 1 if any(own[0].box.sizes[0] == own[0].global_shape[0] for own in pieces.values()) else 0
        dcp.load(_as_dtensors(pieces, self._mesh, dim), checkpoint_id=path)


def _as_dtensors(pieces: dict[str, list[Piece]], mesh: DeviceMesh, dim: int) -> dict[str, Any]:
    return {
        name: DTensor.from_local(piece.tensor, mesh, [Shard(min(dim, piece.tensor.dim() - 1))], run_check=False)
        for name, [piece] in pieces.items()
    }


class Gathered:
    """`torch.save` of all on the first rank, into one file; all wait for the file, none for the disk."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self.state = share.held()

    def begin(self, path: Path) -> Callable[[], object]:
        """Begins a save, as `Ours.begin` does."""
        world = self._share.world
        boxes_by_rank: list[Any] = [None] * world.size
        dist.all_gather_object(boxes_by_rank, [(n, piece.box) for n, own in self.state.items() for piece in own])
        mine = [piece.tensor for own in self.state.values() for piece in own]
        if world.is_first:
            full = {name_of(k, name): torch.empty(shape) for k in KINDS for name, shape in self._share.shapes.items()}
            for rank, boxes in enumerate(boxes_by_rank):
                for position, (name, box) in enumerate(boxes):
                    target = full[name][_slices(box)]
                    if rank == 0:
                        target.copy_(mine[position])
                    else:
                        dist.recv(target, rank)
            path.mkdir()
            torch.save(full, path / "state.pt")
        else:
            for tensor in mine:
                dist.send(tensor, 0)
        dist.barrier()
        return lambda: self._flush(path)

    def _flush(self, path: Path) -> None:
        if self._share.world.is_first:
            with open(path / "state.pt", "rb") as stream:
                os.fsync(stream.fileno())
        dist.barrier()

    def load(self, path: Path, pieces: dict[str, list[Piece]]) -> None:
        """Every rank reads the complete file and takes its shards."""
        full = torch.load(path / "state.pt")
        for name, own in pieces.items():
            for piece in own:
                piece.tensor.copy_(full[name][_slices(piece.box)])


class MemoryPeak:
    """The largest resident memory of this process while it is open, in bytes above that at the start."""

    def __enter__(self) -> "MemoryPeak":
        self._start = self._most = resident_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def num_bytes(self) -> int:
        """The peak so far, in bytes."""
        return self._most - self._start

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            self._most = max(self._most, resident_bytes())


def resident_bytes() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ways() -> dict[str, Callable[[Share], Any]]:
    """Ways of saving that are compared, by name."""
    return {
        "ours": lambda share: Ours(share, is_async=True),
        "ours, waiting": lambda share: Ours(share, is_async=False),
        "torch.save, gathered": Gathered,
        "DCP save": Dcp,
        "DCP async_save": lambda share: Dcp(share, is_async=True),
        "DCP async_save, kept buffers": lambda share: Dcp(share, is_async=True, reuses_buffers=True),
    }


def run_rank(way: str, num_bytes: int, num_saves: int, folder: Path) -> dict[str, Any]:
    """Saves on this rank, each in place of the one before, loads the last, and returns the seconds of each."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    world = Axis("world", size, rank, tuple(range(size)), dist.new_group())
    share = Share(world, shapes_of(num_bytes))
    runner = ways()[way](share)
    own_bytes = sum(piece.tensor.nbytes for own in runner.state.values() for piece in own)
    found: dict[str, Any] = {"state_bytes": own_bytes, "wait_seconds": [], "durable_seconds": []}
    with MemoryPeak() as peak:
        for step in range(num_saves):
            fill(runner.state, step)
            # Nothing of the save before is left for the disk to do.
            os.sync()
            dist.barrier()
            began = time.perf_counter()
            finish = runner.begin(folder / f"{step}")
            found["wait_seconds"].append(time.perf_counter() - began)
            finish()
            found["durable_seconds"].append(time.perf_counter() - began)
            dist.barrier()
            if rank == 0 and step > 0:
                shutil.rmtree(folder / f"{step - 1}")
    found["peak_bytes"] = peak.num_bytes
    last = num_saves - 1
    for title, cut in (("load", None), ("reshard", 1)):
        if title == "reshard" and size == 1:
            continue
        target = _blank(runner, share, cut)
        dist.barrier()
        began = time.perf_counter()
        runner.load(folder / f"{last}", target)
        dist.barrier()
        found[f"{title}_seconds"] = time.perf_counter() - began
        found["is_right"] = is_right(target, last) and found.get("is_right", True)
        del target
        gc.collect()
    return found


def _blank(runner: Any, share: Share, cut: int | None) -> dict[str, list[Piece]]:
    """An empty state to load into, sharded as it was saved or in another way."""
    if cut is not None:
        return share.shards(cut)
    for own in runner.state.values():
        for piece in own:
            piece.tensor.zero_()
    state: dict[str, list[Piece]] = runner.state
    return state
