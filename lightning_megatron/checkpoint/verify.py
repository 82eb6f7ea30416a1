"""Verification of a checkpoint: every byte against its checksum, every tensor against its chunks."""

import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from lightning_megatron.checkpoint.chunk_file import ChunkLocation, DamagedError, where
from lightning_megatron.checkpoint.folder import Address, Folder
from lightning_megatron.checkpoint.manifest import read_stored_manifest

_NUM_THREADS = 8
# Bytes that each thread reads at a time.
_BLOCK_BYTES = 8 * 2**20


Watch = Callable[[int, int], None]
"""What is called during long work: with how much is done, and of how much."""


def _unwatched(num_done: int, num_all: int) -> None:
    pass


def verify(path: Address, *, num_threads: int = _NUM_THREADS, watch: Watch = _unwatched) -> list[str]:
    """Faults of the checkpoint, one line for each file and each tensor, none if it is sound. Reads every byte.

    Memory is 8 MiB a thread, whatever the size of the checkpoint. `watch` is told the chunks that are read. Raises
    ValueError where the path is no checkpoint.
    """
    folder = Folder(path)
    try:
        manifest = read_stored_manifest(path)
    except DamagedError as error:
        return [str(error)]
    sizes = folder.sizes()
    faults = manifest.tensor_faults()
    # A location may be listed twice, and is read once.
    locations = sorted({location for location in manifest.locations() if location.file in sizes}, key=_position)
    with ThreadPoolExecutor(num_threads, "verify") as threads:
        found: list[str] = []
        for fault in threads.map(lambda location: _fault(folder, location), locations):
            found.append(fault)
            watch(len(found), len(locations))
    of_files = manifest.file_faults(sizes)
    for file in sorted(manifest.files):
        of_chunks = [fault for location, fault in zip(locations, found, strict=True) if location.file == file]
        if lines := of_files.get(file, []) + _summed_up(file, of_chunks):
            faults.append("; ".join(lines))
    return faults


def _summed_up(file: str, of_chunks: list[str]) -> list[str]:
    """Faults of chunks of a file, in one line at most; an empty text is a sound chunk."""
    faults = [fault for fault in of_chunks if fault]
    if len(faults) < 2:
        return faults
    return [f"{len(faults)} of the {len(of_chunks)} chunks of {file} are not as they were written; first, {faults[0]}"]


def _fault(folder: Folder, location: ChunkLocation) -> str:
    """The fault of the bytes at the location; empty if they are those that were written."""
    checksum, num_bytes = 0, 0
    try:
        with folder.open(location.file) as stream:
            stream.seek(location.offset)
            while block := stream.read(min(_BLOCK_BYTES, location.num_bytes - num_bytes)):
                checksum = zlib.crc32(block, checksum)
                num_bytes += len(block)
    except OSError as error:
        return f"{where(location)} cannot be read: {error.strerror or error}"
    if num_bytes < location.num_bytes:
        return f"{where(location)} ends after {num_bytes} of its {location.num_bytes} bytes"
    if checksum != location.checksum:
        return f"{where(location)} has checksum {checksum:08x} and was written with {location.checksum:08x}"
    return ""


def _position(location: ChunkLocation) -> tuple[str, int]:
    return location.file, location.offset
