"""Writing a checkpoint so that it is there whole or not at all, behind training or while it waits.

    all ranks    agree on who writes what; copy that to host memory          training waits for this
    all ranks    write their files, flush them to the disk                   behind training
    first rank   when all have: manifest, flush, one step makes it the checkpoint

One save is in flight at a time; what it ran into is told at the next question. Removing an old checkpoint waits for the
save in flight, so that a complete one always stands.
"""

import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_megatron.checkpoint import plain_data
from lightning_megatron.checkpoint.chunk_file import ChunkWriter, Place
from lightning_megatron.checkpoint.draft import Draft, remove
from lightning_megatron.checkpoint.folder import Address
from lightning_megatron.checkpoint.manifest import META_FILE, Chunk, Entry, Manifest
from lightning_megatron.checkpoint.plan import Item, Planning
from lightning_megatron.checkpoint.staging import Staging, one_by_one
from lightning_megatron.checkpoint.state import Pieces, as_pieces
from lightning_megatron.checkpoint.torch_index import INDEX_FILE, REST_FILE, Beside, index_bytes
from lightning_megatron.comm.collectives import broadcast_object, gather_objects
from lightning_megatron.mesh import Axis


def save(path: Address, pieces: Pieces, meta: Mapping[str, Any], *, world: Axis) -> None:
    """Writes the checkpoint; every rank of the axis calls it with its own pieces, and returns when it is in place.

    The first rank's `path` and `meta` count. Raises ValueError for metadata that is not plain data, for pieces that do
    not make whole tensors and for a path that holds something else; RuntimeError when it cannot be written, and what
    stood at the path still stands.
    """
    Saver(world).save(path, pieces, meta)


@dataclass
class _Flight:
    """A save that is being written."""

    path: str
    thread: threading.Thread
    fault: RuntimeError | None = None
    removals: list[str] = field(default_factory=list)
    # checkpoints to remove when it is in place


class Saver:
    """Saves checkpoints of the ranks of one axis; every rank makes the same calls in the same order.

    The axis must talk over host memory, and over a process group of its own where saves are to run behind training.
    """

    def __init__(self, world: Axis) -> None:
        self._world = world
        self._planning = Planning(world)
        self._staging = Staging()
        self._flight: _Flight | None = None

    def save(self, path: Address, pieces: Pieces, meta: Mapping[str, Any], *, wait: bool = True) -> None:
        """As the function `save`; with `wait=False` it returns when the pieces have been copied to host memory.

        The save before is waited for first. Then what cannot be written is told by `wait` or `check`.
        """
        self.wait()
        # Note: one rank judges and all hear it, so that none waits in a collective that another never enters.
        started, content = _start(path, meta) if self._world.is_first else (None, b"")
        draft = broadcast_object(started, self._world)
        if not isinstance(draft, Draft):
            raise draft
        try:
            items = self._planning.items(as_pieces(pieces))
        except ValueError as error:
            if self._world.is_first:
                draft.discard()
            raise ValueError(f"checkpoint {path} was not written: {error}") from error
        tensors = self._planning.tensors
        beside = Beside.of(meta) if self._world.is_first else Beside()

        def write(items: Iterable[Item]) -> RuntimeError | None:
            return _write(draft, self._world, items, tensors, content, beside)

        if wait:
            if (failure := write(one_by_one(items))) is not None:
                raise failure
            return
        copies = self._staging.copy(items)
        thread = threading.Thread(target=self._fly, args=(write, copies), name="checkpoint", daemon=True)
        self._flight = _Flight(draft.path, thread)
        thread.start()

    @property
    def is_saving(self) -> bool:
        """Whether a save is in flight."""
        return self._flight is not None and self._flight.thread.is_alive()

    def check(self) -> None:
        """Raises RuntimeError where the last save has failed by now; it does not wait."""
        if not self.is_saving:
            self.wait()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Whether no save is in flight any more. Raises RuntimeError where the last one failed."""
        if self._flight is None:
            return True
        self._flight.thread.join(timeout_seconds)
        if self._flight.thread.is_alive():
            return False
        flight, self._flight = self._flight, None
        if flight.fault is not None:
            raise flight.fault
        self._remove_all(flight)
        return True

    def remove(self, path: Address) -> None:
        """Removes the checkpoint, once the save in flight is in place; if that fails, not at all. First rank only."""
        if self._flight is None:
            remove(path, _new_id())
        else:
            # Whoever comes last, the thread or the next `wait`, does it.
            self._flight.removals.append(str(path))

    def close(self, timeout_seconds: float | None = None) -> bool:
        """As `wait`; gives the buffers back."""
        try:
            return self.wait(timeout_seconds)
        finally:
            if self._flight is None:
                self._staging.release()

    def _fly(self, write: Callable[[Iterable[Item]], RuntimeError | None], copies: list[Item]) -> None:
        fault = write(copies)
        flight = self._flight
        assert flight is not None
        flight.fault = fault
        self._remove_all(flight)

    @staticmethod
    def _remove_all(flight: _Flight) -> None:
        while flight.fault is None and flight.removals:
            remove(flight.removals.pop(), _new_id())


def _start(path: Address, meta: Mapping[str, Any]) -> tuple[Draft | Exception, bytes]:
    """A draft, or what is in the way, and the metadata's bytes."""
    try:
        content = plain_data.to_bytes(meta)
        return Draft.start(path, _new_id()), content
    except (ValueError, OSError) as fault:
        return fault, b""


def _new_id() -> str:
    return uuid.uuid4().hex[:16]


@dataclass(frozen=True)
class _Written:
    """What a rank wrote: the places of its items, and the bytes of its files."""

    chunks: list[tuple[str, Chunk]]
    files: dict[str, int]


def _write(
    draft: Draft,
    world: Axis,
    items: Iterable[Item],
    tensors: Mapping[str, tuple[Any, Any]],
    content: bytes,
    beside: Beside,
) -> RuntimeError | None:
    """Writes this rank's files and, when all ranks have, makes them the checkpoint; what went wrong, on every rank."""
    written: _Written | None = None
    fault: Exception | None = None
    try:
        written = _write_items(draft, world.rank, items)
    except Exception as error:
        fault = error
    try:
        by_rank = gather_objects((written, _in_words(fault)), world)
        faults = [f"rank {rank}: {said}" for rank, (_, said) in enumerate(by_rank) if said]
        if world.is_first:
            if not faults:
                try:
                    _finish(draft, [own for own, _ in by_rank], tensors, content, beside)
                except Exception as error:
                    fault, faults = error, [f"rank {world.rank}: {_in_words(error)}"]
            if faults:
                draft.discard()
        faults = broadcast_object(faults, world)
    except RuntimeError as error:
        # Another rank is gone: what is written stays unfinished.
        fault, faults = error, [f"rank {world.rank} waited for the others: {_in_words(error)}"]
    if not faults:
        return None
    failure = RuntimeError(f"checkpoint {draft.path} was not written: {'; '.join(faults)}")
    failure.__cause__ = fault
    return failure


def _write_items(draft: Draft, rank: int, items: Iterable[Item]) -> _Written:
    name = draft.name_of(f"__{rank}_0.distcp")
    chunks: list[tuple[str, Chunk]] = []
    num_bytes = 0
    items = iter(items)
    first = next(items, None)
    if first is None:
        return _Written([], {})
    with draft.create(name) as stream:
        writer = ChunkWriter(stream, name)
        item: Item | None = first
        while item is not None:
            place = writer.write(item.tensor)
            num_bytes += place.num_bytes
            chunks.append((item.name, Chunk(item.box, place)))
            item = next(items, None)
    return _Written(chunks, {name: num_bytes})


def _finish(
    draft: Draft,
    by_rank: list[_Written],
    tensors: Mapping[str, tuple[Any, Any]],
    content: bytes,
    beside: Beside,
) -> None:
    chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
    files: dict[str, int] = {}
    for written in by_rank:
        files |= written.files
        for name, chunk in written.chunks:
            chunks[name].append(chunk)
    entries = {name: Entry(shape, dtype, tuple(chunks[name])) for name, (shape, dtype) in tensors.items()}
    whole: dict[str, Place] = {}
    places = {}
    if beside.rest:
        name = draft.name_of(REST_FILE)
        with draft.create(name) as stream:
            writer = ChunkWriter(stream, name)
            places = {keys: writer.write(value) for keys, value in beside.rest.items()}
        files[name] = sum(place.num_bytes for place in places.values())
        whole |= {"/".join(keys): place for keys, place in places.items()}
    for role, base, data in (
        ("meta", META_FILE, content),
        ("index", INDEX_FILE, index_bytes(draft.save_id, entries, places, beside.titles)),
    ):
        name = draft.name_of(base)
        with draft.create(name) as stream:
            whole[role] = ChunkWriter(stream, name).write(data)
        files[name] = len(data)
    draft.put_in_place(Manifest.of(draft.save_id, files, whole, entries).to_bytes())


def _in_words(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"
