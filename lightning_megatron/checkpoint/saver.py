"""Saving of checkpoints: while training waits, or in the background after a copy to host memory.

    all ranks    agree on who writes what; copy that to host memory          training waits for this
    all ranks    write their files, flush them to the disk                   in the background
    first rank   when all have: manifest, flush, one step makes it the checkpoint

Saves are written one after the other. A second save of the same tensors, as Lightning's `save_last=True` makes one, is
queued after the first and links its files; any other waits for the save in flight, and raises what that ran into.
Removing an old checkpoint waits for the saves in flight, so that a complete one always stands.
"""

import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.checkpoint import safe_metadata
from lightning_megatron.checkpoint.atomic_directory import AtomicDirectory, new_id, remove
from lightning_megatron.checkpoint.chunk_file import ChunkLocation, ChunkWriter
from lightning_megatron.checkpoint.folder import Address, is_remote
from lightning_megatron.checkpoint.manifest import META_FILE, Manifest
from lightning_megatron.checkpoint.save_plan import ChunkKey, ChunkToWrite, SavePlanner
from lightning_megatron.checkpoint.state import Pieces
from lightning_megatron.checkpoint.tensor_entry import Chunk, TensorEntry
from lightning_megatron.checkpoint.torch_index import INDEX_FILE, REST_FILE, IndexExtras, index_bytes
from lightning_megatron.comm.collectives import all_reduce, broadcast_object, gather_on_first
from lightning_megatron.comm.raise_on_all_ranks import raise_on_all_ranks
from lightning_megatron.mesh import Axis


def save(path: Address, pieces: Pieces, meta: Mapping[str, Any], *, world: Axis) -> None:
    """Writes the checkpoint; every rank of the axis calls it with its own pieces, and returns when it is in place.

    The first rank's `path` and `meta` count. Raises ValueError for metadata that is not plain data, for pieces that do
    not make full tensors and for a path that holds something else; RuntimeError when it cannot be written; then the old
    checkpoint at the path is still there.
    """
    Saver(world).save(path, pieces, meta)


@dataclass(frozen=True)
class _Contents:
    """A checkpoint to write: where, and all that is not in the files of its tensors."""

    directory: AtomicDirectory
    tensors: Mapping[str, tuple[Any, Any]]
    meta: bytes
    extras: IndexExtras


@dataclass(frozen=True)
class _Written:
    """The locations of the chunks that a rank wrote, and the bytes of its files."""

    chunks: list[tuple[str, Chunk]]
    files: dict[str, int]


@dataclass
class _InFlight:
    """A save that is written in the background."""

    contents: _Contents
    previous: "_InFlight | None"
    """The save of the same tensors that this one is queued after, if any."""
    copies: Future[list[ChunkToWrite]]
    written: _Written | None = None
    fault: RuntimeError | None = None
    may_remove: bool = True
    """Whether its thread removes old checkpoints at its end; else a later save or `wait` does."""
    thread: threading.Thread = field(init=False)


class Saver:
    """Saves checkpoints of the ranks of one axis; every rank makes the same calls in the same order.

    `background` is the same axis over another process group, over which nobody else talks: for the saves that are
    written while training goes on. Both talk over host memory.
    """

    def __init__(self, world: Axis, background: Axis | None = None) -> None:
        self._world = world
        self._background = background if background is not None else world
        self._planner = SavePlanner(world)
        self._staging = Staging()
        self._last: _InFlight | None = None
        # Checkpoints to remove when all saves in flight are in place.
        self._removals: list[str] = []
        # Why some were not removed. The first rank alone knows, so that it is no error.
        self._not_removed: list[str] = []

    def save(self, path: Address, pieces: Pieces, meta: Mapping[str, Any], *, wait: bool = True) -> None:
        """Writes the checkpoint as `save` does; with `wait=False` it returns once the pieces are copied to host memory.

        The save before is waited for first, unless it is of the very same tensors: then this one follows it, and its
        tensors' files are links to those. `wait` raises what could not be written.
        """
        if wait or (self._world.size > 1 and self._background is self._world):
            # One process group for two threads: whose message is whose would be chance.
            self.wait()
        if self._last is not None:
            self._last.may_remove = False
        # Note: one rank judges and all hear it, so that none waits in a collective that another never enters.
        begun, content, extras = _begin(path, meta) if self._world.is_first else (None, b"", IndexExtras())
        directory = broadcast_object(begun, self._world)
        if not isinstance(directory, AtomicDirectory):
            raise directory
        try:
            chunks = self._planner.chunks(pieces)
            is_same = raise_on_all_ranks(
                lambda: self.is_saving and not wait and self._staging.holds(chunks), self._world
            )
        except (ValueError, RuntimeError) as error:
            if self._world.is_first:
                directory.discard()
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            raise kind(f"checkpoint {directory.path} was not written: {error}") from error
        contents = _Contents(directory, self._planner.tensors, content, extras)
        if int(all_reduce(torch.tensor(int(is_same)), self._world, "min")):
            assert self._last is not None
            # A checkpoint that is rewritten must not be removed.
            self._removals = [old for old in self._removals if old != directory.path]
            self._start(_InFlight(contents, self._last, self._last.copies))
            return
        try:
            self.wait()
        except RuntimeError:
            if self._world.is_first:
                directory.discard()
            raise
        if wait:
            if (failure := _write(contents, self._world, one_by_one(chunks), None)[1]) is not None:
                raise failure
            return
        copies: Future[list[ChunkToWrite]] = Future()
        # Before the copies are made: a thread with work would delay this one.
        self._start(_InFlight(contents, None, copies))
        try:
            copies.set_result(self._staging.copy(chunks))
        except Exception as error:
            # The thread raises it where it writes the copies, and so on all ranks.
            copies.set_exception(error)
        finally:
            if not copies.done():
                copies.set_exception(RuntimeError("interrupted while the state was copied"))

    @property
    def is_saving(self) -> bool:
        """Whether a save is in flight."""
        return self._last is not None and self._last.thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether the last save in flight has failed; `wait` raises its error."""
        return self._last is not None and self._last.fault is not None and not self.is_saving

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Whether no save is in flight any more. Raises RuntimeError where the last one failed."""
        if self._last is None:
            return True
        self._last.thread.join(timeout_seconds)
        if self._last.thread.is_alive():
            return False
        last, self._last = self._last, None
        if last.fault is not None:
            self._removals, self._not_removed = [], []
            raise last.fault
        self._remove_all()
        not_removed, self._not_removed = self._not_removed, []
        for sentence in not_removed:
            warnings.warn(sentence, stacklevel=2)
        return True

    def remove(self, path: Address) -> None:
        """Removes the checkpoint, once the saves in flight are in place; if one fails, not at all. First rank only."""
        if self._last is None:
            remove(path)
        else:
            # The thread at its end or the next `wait` removes it.
            self._removals.append(os.fspath(path))

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Waits as `wait`, and frees the buffers."""
        try:
            return self.wait(timeout_seconds)
        finally:
            if self._last is None:
                self._staging.release()

    def _start(self, save: _InFlight) -> None:
        self._last = save
        save.thread = threading.Thread(target=self._run, args=(save,), name="checkpoint", daemon=True)
        save.thread.start()

    def _run(self, save: _InFlight) -> None:
        """Writes a save in the background, after the one that it is queued after."""
        try:
            previous, save.previous = save.previous, None
            linked: tuple[AtomicDirectory, _Written] | None = None
            if previous is not None:
                previous.thread.join()
                if previous.fault is not None:
                    previous.fault.add_note(f"nor was {save.contents.directory.path}, of the same tensors")
                    if self._background.is_first:
                        save.contents.directory.discard()
                    save.fault = previous.fault
                    return
                if previous.written is not None:
                    linked = previous.contents.directory, previous.written
            save.written, save.fault = _write(save.contents, self._background, _copied(save.copies), linked)
            if save.may_remove and save.fault is None:
                self._remove_all()
        except BaseException as error:
            # Any error at all: a save that did not end must not be taken for durable.
            save.fault = RuntimeError(f"writing checkpoints in the background ended: {_error_text(error)}")
            save.fault.__cause__ = error

    def _remove_all(self) -> None:
        while self._removals:
            old = self._removals.pop()
            try:
                remove(old)
            except Exception as error:
                # Remote file systems have errors of their own.
                self._not_removed.append(f"checkpoint {old} was not removed: {_error_text(error)}")


def _begin(path: Address, meta: Mapping[str, Any]) -> tuple[AtomicDirectory | Exception, bytes, IndexExtras]:
    """The directory, or the error; the metadata's bytes, and what the index needs besides the tensors."""
    try:
        content, extras = safe_metadata.to_bytes(meta), IndexExtras.of(meta)
        return AtomicDirectory.start(path, new_id()), content, extras
    except ValueError as fault:
        return fault, b"", IndexExtras()
    except Exception as error:
        return RuntimeError(f"checkpoint {path} was not written: rank 0: {_error_text(error)}"), b"", IndexExtras()


def _copied(copies: Future[list[ChunkToWrite]]) -> Iterator[ChunkToWrite]:
    """The copies, once they are made; raises the error of making them."""
    yield from copies.result()


def _write(
    contents: _Contents,
    world: Axis,
    chunks: Iterable[ChunkToWrite],
    linked: tuple[AtomicDirectory, _Written] | None,
) -> tuple[_Written | None, RuntimeError | None]:
    """Writes this rank's files and, when all ranks have, makes them the checkpoint.

    Returns what was written, and what went wrong, on every rank. `linked` is a checkpoint in place with the same
    tensors, and what this rank wrote of it.
    """
    written: _Written | None = None
    fault: Exception | None = None
    directory = contents.directory
    try:
        written = None if linked is None else _link_files(directory, *linked)
        if written is None:
            written = _write_chunks(directory, world.rank, chunks)
    except Exception as error:
        fault = error
    try:
        by_rank = gather_on_first((written, _error_text(fault)), world)
        faults = [f"rank {rank}: {words}" for rank, (_, words) in enumerate(by_rank) if words]
        if world.is_first:
            if not faults:
                try:
                    _finish(contents, [own for own, _ in by_rank if own is not None])
                except Exception as error:
                    fault, faults = error, [f"rank {world.rank}: {_error_text(error)}"]
            if faults:
                directory.discard()
        faults = broadcast_object(faults, world)
    except RuntimeError as error:
        # Another rank is gone: what is written stays unfinished.
        fault, faults = error, [f"rank {world.rank} waited for the others: {_error_text(error)}"]
    if not faults:
        return written, None
    failure = RuntimeError(f"checkpoint {directory.path} was not written: {'; '.join(faults)}")
    failure.__cause__ = fault
    return None, failure


def _link_files(directory: AtomicDirectory, other: AtomicDirectory, written: _Written) -> _Written | None:
    """Links the other's files instead of `_write_chunks`; None where the file system has no such links."""
    if is_remote(directory.path) or is_remote(other.path):
        return None
    try:
        for name in written.files:
            directory.link(name, other)
    except OSError:
        for name in written.files:
            directory.drop(name)
        return None
    return written


def _write_chunks(directory: AtomicDirectory, rank: int, chunks: Iterable[ChunkToWrite]) -> _Written:
    name = directory.name_of(f"__{rank}_0.distcp")
    chunks = iter(chunks)
    chunk = next(chunks, None)
    if chunk is None:
        return _Written([], {})
    written = _Written([], {name: 0})
    with directory.create(name) as stream:
        writer = ChunkWriter(stream, name)
        while chunk is not None:
            location = writer.write(chunk.tensor)
            written.files[name] += location.num_bytes
            written.chunks.append((chunk.name, Chunk(chunk.box, location)))
            chunk = next(chunks, None)
    return written


def _finish(contents: _Contents, by_rank: list[_Written]) -> None:
    """Writes what is not in the ranks' files, the manifest last, and puts the checkpoint in place."""
    directory, rest = contents.directory, contents.extras.rest
    chunks: dict[str, list[Chunk]] = {name: [] for name in contents.tensors}
    files: dict[str, int] = {}
    for written in by_rank:
        files |= written.files
        for name, chunk in written.chunks:
            chunks[name].append(chunk)
    entries = {
        name: TensorEntry(shape, dtype, tuple(chunks[name])) for name, (shape, dtype) in contents.tensors.items()
    }
    locations: dict[str, ChunkLocation] = {}
    rest_locations = {}
    if rest:
        name = directory.name_of(REST_FILE)
        with directory.create(name) as stream:
            writer = ChunkWriter(stream, name)
            rest_locations = {keys: writer.write(value) for keys, value in rest.items()}
        files[name] = sum(location.num_bytes for location in rest_locations.values())
        locations |= {"/".join(keys): location for keys, location in rest_locations.items()}
    index = index_bytes(directory.save_id, entries, rest_locations, contents.extras.titles)
    for role, file, data in (("meta", META_FILE, contents.meta), ("index", INDEX_FILE, index)):
        name = directory.name_of(file)
        with directory.create(name) as stream:
            locations[role] = ChunkWriter(stream, name).write(data)
        files[name] = len(data)
    directory.put_in_place(Manifest.of(directory.save_id, files, locations, entries).to_bytes())


def _error_text(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


# --- copies in host memory --------------------------------------------------------------------------------------------


class Staging:
    """Buffers in host memory for the chunks that this rank writes, made once and used for every save.

    They are page-locked where the tensors are on a GPU. Each chunk has its own, because `torch.save` writes all of the
    memory that a tensor owns.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._keys: list[ChunkKey] = []

    def copy(self, chunks: Sequence[ChunkToWrite]) -> list[ChunkToWrite]:
        """The chunks in host memory, until the next call; all copies are complete."""
        if not _fit(self._buffers, chunks):
            self._buffers = [_buffer(chunk.tensor) for chunk in chunks]
        self._keys = [chunk.key for chunk in chunks]
        devices = set()
        for buffer, chunk in zip(self._buffers, chunks, strict=True):
            buffer.copy_(chunk.tensor, non_blocking=True)
            if chunk.tensor.is_cuda:
                devices.add(chunk.tensor.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return [ChunkToWrite(one.name, one.box, buffer) for buffer, one in zip(self._buffers, chunks, strict=True)]

    def holds(self, chunks: Sequence[ChunkToWrite]) -> bool:
        """Whether the last copies are of these chunks, bit for bit."""
        return self._keys == [chunk.key for chunk in chunks] and all(
            _fit([buffer], [chunk]) and _equal(buffer, chunk.tensor)
            for buffer, chunk in zip(self._buffers, chunks, strict=True)
        )

    def release(self) -> None:
        """Gives the memory back."""
        self._buffers, self._keys = [], []


def one_by_one(chunks: Sequence[ChunkToWrite]) -> Iterator[ChunkToWrite]:
    """The chunks in host memory, each gone before the next: for a save that training waits for."""
    for chunk in chunks:
        yield ChunkToWrite(chunk.name, chunk.box, _buffer(chunk.tensor).copy_(chunk.tensor))


def _buffer(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _equal(buffer: Tensor, tensor: Tensor) -> bool:
    # As bytes: NaN is not equal to itself. On the tensor's device, where it is fast.
    ours, theirs = (t.contiguous().view(-1).view(torch.uint8) for t in (tensor, buffer.to(tensor.device)))
    return torch.equal(ours, theirs)


def _fit(buffers: Sequence[Tensor], chunks: Sequence[ChunkToWrite]) -> bool:
    return len(buffers) == len(chunks) and all(
        buffer.shape == chunk.tensor.shape
        and buffer.dtype == chunk.tensor.dtype
        and buffer.is_pinned() == chunk.tensor.is_cuda
        for buffer, chunk in zip(buffers, chunks, strict=True)
    )
