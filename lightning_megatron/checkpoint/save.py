"""Writing a checkpoint so that it is there whole or not at all.

Everything goes into a draft beside the final place. When all ranks have written, one rename makes it the checkpoint.
One that stood there before steps aside by a rename and is removed only after that.
"""

import os
import shutil
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_megatron.checkpoint import carrier
from lightning_megatron.checkpoint.manifest import META_FILE, is_checkpoint, meta_bytes
from lightning_megatron.checkpoint.state import Pieces, as_pieces
from lightning_megatron.comm.collectives import broadcast_object
from lightning_megatron.mesh import Axis


def save(path: str | os.PathLike[str], pieces: Pieces, meta: Mapping[str, Any], *, world: Axis) -> None:
    """Writes the checkpoint; every rank of the axis calls it with its own pieces, and returns when it is in place.

    The first rank's `path` and `meta` count. Raises ValueError for metadata that is not plain data and for a path that
    holds something else; OSError or RuntimeError when it cannot be written, and what stood at the path still stands.
    """
    # Note: one rank judges and all hear it, so that none waits in a collective that another never enters.
    draft, fault = broadcast_object(_start_draft(path, meta) if world.is_first else None, world)
    if fault is not None:
        raise fault
    carriers = {
        name: carrier.Carrier([chunk for piece in full for chunk in carrier.chunks(piece, carrier.MAX_CHUNK_BYTES)])
        for name, held in as_pieces(pieces).items()
        if (full := [piece for piece in held if not piece.is_empty])
    }
    try:
        with single_process_is_meant():
            state_dict_saver.save(
                carriers,
                storage_writer=FileSystemWriter(draft, sync_files=False),
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=world.group,
                no_dist=world.size == 1,
            )
    except CheckpointException as error:
        if world.is_first:
            shutil.rmtree(draft, ignore_errors=True)
        raise RuntimeError(f"checkpoint {path} was not written: {causes(error)}") from error
    # The last thing torch's save does is to hear on the first rank that every rank has written.
    fault = broadcast_object(_put_in_place(draft, Path(path)) if world.is_first else None, world)
    if fault is not None:
        raise fault


def causes(error: CheckpointException) -> str:
    """What each rank says went wrong, one after the other."""
    by_rank = sorted(error.failures.items())
    return "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in by_rank)


@contextmanager
def single_process_is_meant() -> Iterator[None]:
    """No warning that torch.distributed is not used: an axis of one rank needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _start_draft(
    address: str | os.PathLike[str], meta: Mapping[str, Any]
) -> tuple[Path | None, ValueError | OSError | None]:
    """An empty draft with its metadata in it, or what is in the way."""
    path = Path(address)
    try:
        if "://" in str(address):
            raise ValueError(f"checkpoint path {address} must be on a mounted file system; URLs are not supported")
        if path.is_dir() and any(path.iterdir()) and not is_checkpoint(path):
            raise ValueError(f"{path} is a directory that holds something else than a checkpoint; choose another path")
        content = meta_bytes(meta)
        # Not named after the checkpoint: who looks for checkpoints by name must not find a draft.
        draft = path.absolute().with_name(f".unfinished-{uuid.uuid4().hex[:12]}")
        draft.mkdir(parents=True)
        Path(draft, META_FILE).write_bytes(content)
    except (ValueError, OSError) as fault:
        return None, fault
    return draft, None


def _put_in_place(draft: Path, path: Path) -> OSError | None:
    """Renames the draft to its final name, or tells why it cannot be and leaves what was there before."""
    aside = path.absolute().with_name(f".replaced-{uuid.uuid4().hex[:12]}")
    try:
        # lexists: a link to a checkpoint elsewhere is replaced, not followed.
        if os.path.lexists(path):
            os.rename(path, aside)
        try:
            os.rename(draft, path)
        except OSError:
            if os.path.lexists(aside):
                os.rename(aside, path)
            raise
    except OSError as fault:
        shutil.rmtree(draft, ignore_errors=True)
        return fault
    if aside.is_symlink() or aside.is_file():
        aside.unlink()
    else:
        shutil.rmtree(aside, ignore_errors=True)
    return None
