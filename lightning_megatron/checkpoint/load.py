"""Loading of a checkpoint on any mesh, chunk by chunk, each verified by its checksum.

Before a byte of a tensor is read, all ranks together compare what they request with what is there.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from typing_extensions import override

from lightning_megatron.checkpoint.chunk_file import ChunkLocation, DamagedError, read_chunk, where
from lightning_megatron.checkpoint.folder import Address, Folder
from lightning_megatron.checkpoint.manifest import read_entries
from lightning_megatron.checkpoint.save_plan import ShardedTensorProxy, chunk_metadata
from lightning_megatron.checkpoint.state import Piece, Pieces, as_pieces
from lightning_megatron.checkpoint.tensor_entry import Chunk, TensorEntry
from lightning_megatron.comm.collectives import all_reduce, gather_objects, merge_objects
from lightning_megatron.comm.raise_on_all_ranks import read_on_first_rank
from lightning_megatron.mesh import Axis

_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Names and shapes that did not fit, over all ranks; empty if everything did."""

    missing: tuple[str, ...] = ()
    """Names that were requested and are not in the checkpoint."""
    unexpected: tuple[str, ...] = ()
    """Names in the checkpoint that no rank requested."""
    misshapen: Mapping[str, str] = field(default_factory=dict)
    """Names whose global shape in the checkpoint is another one: text of both shapes."""

    def faults(self) -> list[str]:
        """One line for each kind of misfit."""
        misshapen = [f"{name}: {how}" for name, how in self.misshapen.items()]
        kinds = (
            (self.missing, "asked for but not in it", ", "),
            (self.unexpected, "in it but asked for by no rank", ", "),
            (misshapen, "of another shape", "; "),
        )
        return [
            f"{len(names)} {kind}: {between.join(names[:_SHOWN])}" + (", ..." if len(names) > _SHOWN else "")
            for names, kind, between in kinds
            if names
        ]


def load(
    path: Address,
    pieces: Pieces,
    *,
    world: Axis,
    strict: bool = True,
    among: Callable[[str], bool] = lambda name: True,
) -> LoadReport:
    """Fills the tensors of the pieces in place, and reports what did not fit; every rank of the axis calls it.

    Only names of the checkpoint that `among` accepts can be unexpected. Values are converted to the dtype of the
    tensor they go to. Raises ValueError when the path is no checkpoint and, with `strict`, when anything does not fit;
    then nothing was read. Without `strict` a misfit is left as it was. Raises DamagedError, naming the file, when a
    chunk that is read is not as it was written, RuntimeError when one cannot be read; then pieces are partly filled.
    """
    requested = as_pieces(pieces)
    entries = read_on_first_rank(partial(read_entries, path), world)
    report = _compare(requested, entries, world, among)
    if strict:
        _require_fit(report, path)
    proxies = {
        name: ShardedTensorProxy(full)
        for name, held in requested.items()
        if name in entries
        and name not in report.misshapen
        and (full := [piece for piece in held if not piece.is_empty])
    }
    fault: BaseException | None = None
    try:
        with _no_warning_of_one_process():
            # Each rank plans what it reads by the manifest, which all have: torch's ranks need not agree on it.
            state_dict_loader.load(
                proxies,
                storage_reader=_ChunkReader(path, entries),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=True,
            )
    except CheckpointException as error:
        ((fault, _),) = error.failures.values()
    _raise_of_any(fault, path, world)
    return report


def fill(
    path: Address, tensors: Mapping[str, torch.Tensor], pieces: Pieces, *, world: Axis, strict: bool = True
) -> LoadReport:
    """Fills the pieces as `load` does, from the unsharded tensors of a file at the path, which every rank has read."""
    requested = as_pieces(pieces)
    entries = {name: TensorEntry(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    report = _compare(requested, entries, world, lambda name: True)
    if strict:
        _require_fit(report, path)
    for name, held in requested.items():
        if name in tensors and name not in report.misshapen:
            for piece in held:
                piece.tensor.copy_(piece.box.of(tensors[name]))
    return report


def _require_fit(report: LoadReport, path: Address) -> None:
    if faults := report.faults():
        head = f"checkpoint {path} does not fit what is to be loaded (strict=False reads what fits):"
        raise ValueError("\n  ".join([head, *faults]))


@contextmanager
def _no_warning_of_one_process() -> Iterator[None]:
    """Silences torch's warning that torch.distributed is not used, which an axis of one rank does not need."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _raise_of_any(fault: BaseException | None, path: Address, world: Axis) -> None:
    """Raises what ranks ran into, on all of them. Collective."""
    if not int(all_reduce(torch.tensor(int(fault is not None)), world, "max")):
        return
    own = None if fault is None else (isinstance(fault, DamagedError), f"{type(fault).__name__}: {fault}")
    by_rank = {rank: one for rank, one in enumerate(gather_objects(own, world)) if one is not None}
    kind = DamagedError if all(is_damaged for is_damaged, _ in by_rank.values()) else RuntimeError
    words = "; ".join(f"rank {rank}: {text}" for rank, (_, text) in by_rank.items())
    raise kind(f"checkpoint {path} could not be read: {words}") from fault


def _compare(
    requested: dict[str, list[Piece]], entries: dict[str, TensorEntry], world: Axis, among: Callable[[str], bool]
) -> LoadReport:
    """The report of all ranks together. Collective."""
    names = sorted(entries)
    # A tensor without elements is never written.
    shapes = {name: tuple(held[0].global_shape) for name, held in requested.items() if held}
    missing = {name for name, shape in shapes.items() if name not in entries and 0 not in shape}
    misshapen = {
        name: f"{entries[name].shape} there, {shape} asked for"
        for name, shape in shapes.items()
        if name in entries and entries[name].shape != shape
    }
    # One byte a name, because it comes from thousands of ranks.
    is_requested = bytes(name in requested for name in names)
    all_missing, all_misshapen, requested_by_any = merge_objects((missing, misshapen, is_requested), world, _merged)
    unexpected = [name for name, known in zip(names, requested_by_any, strict=True) if not known and among(name)]
    return LoadReport(
        missing=tuple(sorted(all_missing)), unexpected=tuple(unexpected), misshapen=dict(sorted(all_misshapen.items()))
    )


def _merged(found: list[tuple[set[str], dict[str, str], bytes]]) -> tuple[set[str], dict[str, str], bytes]:
    """What any of the ranks misses, has in another shape and asks for."""
    missing: set[str] = set()
    misshapen: dict[str, str] = {}
    for one, other, _ in found:
        missing |= one
        misshapen |= other
    return missing, misshapen, bytes(map(any, zip(*(marks for *_, marks in found), strict=True)))


class _ChunkReader(StorageReader):
    """Reads the chunks that a plan names, each once; the manifest takes the place of torch's pickled metadata."""

    def __init__(self, path: Address, entries: Mapping[str, TensorEntry]) -> None:
        self._folder = Folder(path)
        self._entries = entries

    @override
    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between loads."""

    @override
    def read_metadata(self) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=entry.dtype),
                    size=torch.Size(entry.shape),
                    chunks=[chunk_metadata(chunk.box) for chunk in entry.chunks],
                )
                for name, entry in self._entries.items()
            }
        )

    @override
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing to set up."""

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items: dict[ChunkLocation, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            items[self._chunk(item.storage_index).location].append(item)
        by_file: dict[str, list[ChunkLocation]] = defaultdict(list)
        for location in items:
            by_file[location.file].append(location)
        for file, locations in by_file.items():
            with self._folder.open(file) as stream:
                for location in sorted(locations, key=lambda one: one.offset):
                    tensor = self._read(stream, location, items[location][0].storage_index)
                    for item in items[location]:
                        _copy_part(tensor, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def _chunk(self, index: MetadataIndex) -> Chunk:
        chunks = self._entries[index.fqn].chunks
        # The planner's hint is the chunk's number; the offsets decide.
        if index.index is not None and chunks[index.index].box.offsets == index.offset:
            return chunks[index.index]
        return next(chunk for chunk in chunks if chunk.box.offsets == index.offset)

    def _read(self, stream: IO[bytes], location: ChunkLocation, index: MetadataIndex) -> torch.Tensor:
        tensor = read_chunk(stream, location)
        sizes, dtype = tuple(self._chunk(index).box.sizes), self._entries[index.fqn].dtype
        if (tuple(tensor.shape), tensor.dtype) != (sizes, dtype):
            raise DamagedError(
                f"{where(location)} is a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}, not of {sizes} and "
                f"{dtype} as a part of {index.fqn}: {location.file} is not as it was written"
            )
        return tensor


def _copy_part(chunk: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    part = chunk
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        part = part.narrow(dim, start, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(part)
    planner.commit_tensor(item, target)
