"""Writing a checkpoint so that it is there whole or not at all, behind training or while it waits.

    all ranks    agree on who writes what; copy that to host memory          training waits for this
    all ranks    write their files, flush them to the disk                   behind training
    first rank   when all have: manifest, flush, one step makes it the checkpoint

One save is in flight at a time; what it ran into is told at the next question. A second save of the same tensors, as
Lightning's `save_last=True` makes one, flies behind the first and links its files. Removing an old checkpoint waits for
the saves in flight, so that a complete one always stands.
"""

import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_megatron.checkpoint import plain_data
from lightning_megatron.checkpoint.attempt import on_all
from lightning_megatron.checkpoint.chunk_file import ChunkWriter, Place
from lightning_megatron.checkpoint.draft import Draft, new_id, remove
from lightning_megatron.checkpoint.folder import Address, is_remote
from lightning_megatron.checkpoint.manifest import META_FILE, Chunk, Entry, Manifest
from lightning_megatron.checkpoint.plan import Item, Planning
from lightning_megatron.checkpoint.staging import Staging, one_by_one
from lightning_megatron.checkpoint.state import Pieces
from lightning_megatron.checkpoint.torch_index import INDEX_FILE, REST_FILE, Beside, index_bytes
from lightning_megatron.comm.collectives import all_reduce, broadcast_object, gather_objects
from lightning_megatron.mesh import Axis


def save(path: Address, pieces: Pieces, meta: Mapping[str, Any], *, world: Axis) -> None:
    """Writes the checkpoint; every rank of the axis calls it with its own pieces, and returns when it is in place.

    The first rank's `path` and `meta` count. Raises ValueError for metadata that is not plain data, for pieces that do
    not make whole tensors and for a path that holds something else; RuntimeError when it cannot be written, and what
    stood at the path still stands.
    """
    Saver(world).save(path, pieces, meta)


@dataclass(frozen=True)
class _Order:
    """A checkpoint to write: where, and all that is not in the tensors' files."""

    draft: Draft
    tensors: Mapping[str, tuple[Any, Any]]
    content: bytes
    beside: Beside


@dataclass
class _Flight:
    """Saves that are being written, one after the other, all of the same tensors."""

    orders: list[_Order]
    copies: Future[list[Item]] = field(default_factory=Future)
    fault: RuntimeError | None = None
    removals: list[str] = field(default_factory=list)
    """Checkpoints to remove when all are in place."""
    not_removed: list[str] = field(default_factory=list)
    """Of them, in words; the first rank alone knows, so that it is no error."""
    is_held: bool = False
    """Its owner is about to say whether one more comes."""
    has_landed: bool = False
    change: threading.Condition = field(default_factory=threading.Condition)
    thread: threading.Thread = field(init=False)

    def hold(self) -> bool:
        """Keeps it from landing until `let_go`; whether it was in the air still."""
        with self.change:
            self.is_held = not self.has_landed
            return self.is_held

    def let_go(self, order: _Order | None) -> None:
        """Lets it land, after one more order if there is one."""
        with self.change:
            if order is not None:
                self.orders.append(order)
                # What is written again is not to go.
                self.removals = [old for old in self.removals if old != order.draft.path]
            self.is_held = False
            self.change.notify()

    def next_order(self) -> _Order | None:
        """The next to write; None: it has landed."""
        with self.change:
            self.change.wait_for(lambda: self.orders or not self.is_held)
            self.has_landed = not self.orders
            return None if self.has_landed else self.orders.pop(0)


class Saver:
    """Saves checkpoints of the ranks of one axis; every rank makes the same calls in the same order.

    `behind` is the same axis over another process group, over which nobody else talks: for the saves that are written
    behind training. Both talk over host memory.
    """

    def __init__(self, world: Axis, behind: Axis | None = None) -> None:
        self._world = world
        self._behind = behind if behind is not None else world
        self._planning = Planning(world)
        self._staging = Staging()
        self._flight: _Flight | None = None

    def save(self, path: Address, pieces: Pieces, meta: Mapping[str, Any], *, wait: bool = True) -> None:
        """As the function `save`; with `wait=False` it returns when the pieces have been copied to host memory.

        The save before is waited for first, unless it is of the very same tensors: then this one follows it, and its
        tensors' files are links to those. What cannot be written is told by `wait`.
        """
        if wait or (self._world.size > 1 and self._behind is self._world):
            # One group for two threads: whose message is whose would be chance.
            self.wait()
        flight = self._flight
        is_held = flight is not None and flight.hold()
        follower: _Order | None = None
        try:
            # Note: one rank judges and all hear it, so that none waits in a collective that another never enters.
            begun, content, beside = _begin(path, meta) if self._world.is_first else (None, b"", Beside())
            draft = broadcast_object(begun, self._world)
            if not isinstance(draft, Draft):
                raise draft
            try:
                items = self._planning.items(pieces)
                is_same = on_all(lambda: is_held and not wait and self._staging.holds(items), self._world)
            except (ValueError, RuntimeError) as error:
                if self._world.is_first:
                    draft.discard()
                kind = ValueError if isinstance(error, ValueError) else RuntimeError
                raise kind(f"checkpoint {draft.path} was not written: {error}") from error
            order = _Order(draft, self._planning.tensors, content, beside)
            if int(all_reduce(torch.tensor(int(is_same)), self._world, "min")):
                follower = order
                return
        finally:
            if is_held and flight is not None:
                flight.let_go(follower)
        try:
            self.wait()
        except RuntimeError:
            if self._world.is_first:
                draft.discard()
            raise
        if wait:
            if (failure := _write(order, self._world, one_by_one(items), None)[1]) is not None:
                raise failure
            return
        self._flight = flight = _Flight([order])
        flight.thread = threading.Thread(target=self._fly, args=(flight,), name="checkpoint", daemon=True)
        # Before the copies are there: a thread with something to do would keep this one from going on.
        flight.thread.start()
        try:
            flight.copies.set_result(self._staging.copy(items))
        except Exception as error:
            # Raised where they are written, and told there on all ranks.
            flight.copies.set_exception(error)
        finally:
            if not flight.copies.done():
                flight.copies.set_exception(RuntimeError("interrupted while the state was copied"))

    @property
    def is_saving(self) -> bool:
        """Whether a save is in flight."""
        return self._flight is not None and self._flight.thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether the save in flight has failed; `wait` tells how."""
        return self._flight is not None and self._flight.fault is not None and not self.is_saving

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
        for sentence in flight.not_removed:
            warnings.warn(sentence, stacklevel=2)
        return True

    def remove(self, path: Address) -> None:
        """Removes the checkpoint, once the saves in flight are in place; if one fails, not at all. First rank only."""
        if self._flight is None:
            remove(path)
        else:
            # Whoever comes last, the thread or the next `wait`, does it.
            self._flight.removals.append(os.fspath(path))

    def close(self, timeout_seconds: float | None = None) -> bool:
        """As `wait`; gives the buffers back."""
        try:
            return self.wait(timeout_seconds)
        finally:
            if self._flight is None:
                self._staging.release()

    def _fly(self, flight: _Flight) -> None:
        first: _Written | None = None
        source: Draft | None = None
        try:
            while (order := flight.next_order()) is not None:
                if flight.fault is not None:
                    flight.fault.add_note(f"nor was {order.draft.path}, of the same tensors")
                    if self._behind.is_first:
                        order.draft.discard()
                    continue
                link = None if source is None or first is None else (source, first)
                written, flight.fault = _write(order, self._behind, _landed(flight.copies), link)
                source, first = order.draft, written
            self._remove_all(flight)
        except BaseException as error:
            # Whatever it is: what did not come to its end must not be taken for durable.
            flight.fault = RuntimeError(f"writing checkpoints behind training ended: {_in_words(error)}")
            flight.fault.__cause__ = error
            with flight.change:
                flight.has_landed = True

    @staticmethod
    def _remove_all(flight: _Flight) -> None:
        while flight.fault is None and flight.removals:
            old = flight.removals.pop()
            try:
                remove(old)
            except Exception as error:
                # Remote file systems have errors of their own.
                flight.not_removed.append(f"checkpoint {old} was not removed: {_in_words(error)}")


def _begin(path: Address, meta: Mapping[str, Any]) -> tuple[Draft | Exception, bytes, Beside]:
    """A draft, or what is in the way; the metadata's bytes, and what the index needs beside the tensors."""
    try:
        content, beside = plain_data.to_bytes(meta), Beside.of(meta)
        return Draft.start(path, new_id()), content, beside
    except ValueError as fault:
        return fault, b"", Beside()
    except Exception as error:
        return RuntimeError(f"checkpoint {path} was not written: rank 0: {_in_words(error)}"), b"", Beside()


def _landed(copies: Future[list[Item]]) -> Iterator[Item]:
    """The copies, once they are there; raises what making them ran into."""
    yield from copies.result()


@dataclass(frozen=True)
class _Written:
    """What a rank wrote: the places of its items, and the bytes of its files."""

    chunks: list[tuple[str, Chunk]]
    files: dict[str, int]


def _write(
    order: _Order, world: Axis, items: Iterable[Item], twin: tuple[Draft, _Written] | None
) -> tuple[_Written | None, RuntimeError | None]:
    """Writes this rank's files and, when all ranks have, makes them the checkpoint.

    What was written, and what went wrong, on every rank. `twin` is a checkpoint in place with the same tensors, and
    what this rank wrote of it.
    """
    written: _Written | None = None
    fault: Exception | None = None
    draft = order.draft
    try:
        written = None if twin is None else _link_items(draft, *twin)
        if written is None:
            written = _write_items(draft, world.rank, items)
    except Exception as error:
        fault = error
    try:
        by_rank = gather_objects((written, _in_words(fault)), world)
        faults = [f"rank {rank}: {said}" for rank, (_, said) in enumerate(by_rank) if said]
        if world.is_first:
            if not faults:
                try:
                    _finish(order, [own for own, _ in by_rank])
                except Exception as error:
                    fault, faults = error, [f"rank {world.rank}: {_in_words(error)}"]
            if faults:
                draft.discard()
        faults = broadcast_object(faults, world)
    except RuntimeError as error:
        # Another rank is gone: what is written stays unfinished.
        fault, faults = error, [f"rank {world.rank} waited for the others: {_in_words(error)}"]
    if not faults:
        return written, None
    failure = RuntimeError(f"checkpoint {draft.path} was not written: {'; '.join(faults)}")
    failure.__cause__ = fault
    return None, failure


def _link_items(draft: Draft, twin: Draft, written: _Written) -> _Written | None:
    """As `_write_items`, by links to the twin's files; None where the file system has no links from there to here."""
    if is_remote(draft.path) or is_remote(twin.path):
        return None
    try:
        for name in written.files:
            draft.link(name, twin)
    except OSError:
        for name in written.files:
            draft.drop(name)
        return None
    return written


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


def _finish(order: _Order, by_rank: list[_Written]) -> None:
    draft, tensors, rest = order.draft, order.tensors, order.beside.rest
    chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
    files: dict[str, int] = {}
    for written in by_rank:
        files |= written.files
        for name, chunk in written.chunks:
            chunks[name].append(chunk)
    entries = {name: Entry(shape, dtype, tuple(chunks[name])) for name, (shape, dtype) in tensors.items()}
    whole: dict[str, Place] = {}
    places = {}
    if rest:
        name = draft.name_of(REST_FILE)
        with draft.create(name) as stream:
            writer = ChunkWriter(stream, name)
            places = {keys: writer.write(value) for keys, value in rest.items()}
        files[name] = sum(place.num_bytes for place in places.values())
        whole |= {"/".join(keys): place for keys, place in places.items()}
    for role, base, data in (
        ("meta", META_FILE, order.content),
        ("index", INDEX_FILE, index_bytes(draft.save_id, entries, places, order.beside.titles)),
    ):
        name = draft.name_of(base)
        with draft.create(name) as stream:
            whole[role] = ChunkWriter(stream, name).write(data)
        files[name] = len(data)
    draft.put_in_place(Manifest.of(draft.save_id, files, whole, entries).to_bytes())


def _in_words(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"
