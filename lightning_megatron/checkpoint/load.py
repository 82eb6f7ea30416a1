"""Reading a checkpoint into the memory of whatever mesh this is.

Before a byte of a tensor is read, all ranks together compare what they ask for with what is there.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, cast

from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from lightning_megatron.checkpoint.carrier import Carrier
from lightning_megatron.checkpoint.chunk_file import DamagedError
from lightning_megatron.checkpoint.chunk_reader import ChunkReader
from lightning_megatron.checkpoint.folder import Address
from lightning_megatron.checkpoint.manifest import Entry, read_entries
from lightning_megatron.checkpoint.state import Piece, Pieces, as_pieces
from lightning_megatron.comm.collectives import broadcast_object, gather_objects
from lightning_megatron.mesh import Axis

T = TypeVar("T")

_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What did not fit, over all ranks: empty if everything did."""

    missing: tuple[str, ...] = ()
    """Asked for, not in the checkpoint."""
    unexpected: tuple[str, ...] = ()
    """In the checkpoint, asked for by no rank."""
    misshapen: Mapping[str, str] = field(default_factory=dict)
    """In the checkpoint with another global shape: which one, and which was asked for."""

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


def read_once(read: Callable[[], T], world: Axis) -> T:
    """What the first rank reads, on every rank; what it runs into is raised on every rank.

    Thousands of ranks would ask the file system for thousands of files each.
    """
    found: T | Exception | None = None
    if world.is_first:
        try:
            found = read()
        except (ValueError, OSError) as fault:
            found = fault
        except Exception as error:
            # In words: not every error can be sent.
            found = RuntimeError(f"{type(error).__name__}: {error}")
    found = broadcast_object(found, world)
    if isinstance(found, Exception):
        raise found
    return cast(T, found)


def load(
    path: Address,
    pieces: Pieces,
    *,
    world: Axis,
    strict: bool = True,
    among: Callable[[str], bool] = lambda name: True,
) -> LoadReport:
    """What did not fit, after the tensors of the pieces were filled in place; every rank of the axis calls it.

    Only names of the checkpoint that `among` says yes to can be unexpected. Values are converted to the dtype of the
    tensor they go to. Raises ValueError when the path is no checkpoint and, with `strict`, when anything does not fit;
    then nothing was read. Without `strict` a misfit is left as it was. Raises DamagedError, naming the file, when a
    chunk that is read is not as it was written, RuntimeError when one cannot be read; then what was asked for is partly
    filled.
    """
    asked = as_pieces(pieces)
    entries = read_once(partial(read_entries, path), world)
    report = _compare(asked, entries, world, among)
    if strict and (faults := report.faults()):
        head = f"checkpoint {path} does not fit what is to be loaded (strict=False reads what fits):"
        raise ValueError("\n  ".join([head, *faults]))
    carriers = {
        name: Carrier(full)
        for name, held in asked.items()
        if name in entries
        and name not in report.misshapen
        and (full := [piece for piece in held if not piece.is_empty])
    }
    try:
        with _single_process_is_meant():
            state_dict_loader.load(
                carriers,
                storage_reader=ChunkReader(path, entries),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=world.group,
                no_dist=world.size == 1,
            )
    except CheckpointException as error:
        is_damaged = all(isinstance(cause, DamagedError) for cause, _ in error.failures.values())
        kind = DamagedError if is_damaged else RuntimeError
        raise kind(f"checkpoint {path} could not be read: {_causes(error)}") from error
    return report


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    """No warning that torch.distributed is not used: an axis of one rank needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _causes(error: CheckpointException) -> str:
    """What each rank says went wrong, one after the other."""
    by_rank = sorted(error.failures.items())
    return "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in by_rank)


def _compare(
    asked: dict[str, list[Piece]], entries: dict[str, Entry], world: Axis, among: Callable[[str], bool]
) -> LoadReport:
    """What does not fit, as all ranks see it together."""
    names = sorted(entries)
    # A tensor without elements is never written.
    shapes = {name: tuple(held[0].global_shape) for name, held in asked.items() if held}
    missing = [name for name, shape in shapes.items() if name not in entries and 0 not in shape]
    misshapen = {
        name: f"{entries[name].shape} there, {shape} asked for"
        for name, shape in shapes.items()
        if name in entries and entries[name].shape != shape
    }
    # One byte a name: thousands of ranks tell each other.
    is_asked = bytes(name in asked for name in names)
    by_rank = gather_objects((missing, misshapen, is_asked), world)
    asked_by_any = [any(marks) for marks in zip(*(rank_is_asked for *_, rank_is_asked in by_rank), strict=True)]
    unexpected = [name for name, known in zip(names, asked_by_any, strict=True) if not known and among(name)]
    all_misshapen = {name: how for _, one, _ in by_rank for name, how in one.items()}
    return LoadReport(
        missing=tuple(sorted({name for one, _, _ in by_rank for name in one})),
        unexpected=tuple(unexpected),
        misshapen=dict(sorted(all_misshapen.items())),
    )
