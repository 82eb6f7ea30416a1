"""Verification of a checkpoint: every byte against its checksum, every tensor against its chunks."""

import math
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from lightning_megatron.checkpoint.chunk_file import ChunkLocation, DamagedError, where
from lightning_megatron.checkpoint.folder import Address, Folder
from lightning_megatron.checkpoint.manifest import Chunk, TensorEntry, read_stored_manifest

_NUM_THREADS = 8
# Bytes that each thread reads at a time.
_BLOCK_BYTES = 8 * 2**20


def verify(path: Address, *, num_threads: int = _NUM_THREADS) -> list[str]:
    """Faults of the checkpoint, one line for each file and each tensor, none if it is sound. Reads every byte.

    Memory is 8 MiB a thread, whatever the size of the checkpoint. Raises ValueError where the path is no checkpoint.
    """
    folder = Folder(path)
    try:
        manifest = read_stored_manifest(path)
    except DamagedError as error:
        return [str(error)]
    sizes = folder.sizes()
    faults = []
    for name, entry in manifest.entries.items():
        faults += [f"tensor {name}: {fault}" for fault in cover_faults(entry)]
    # A location may be listed twice, and is read once.
    locations = sorted({location for location in manifest.locations() if location.file in sizes}, key=_position)
    with ThreadPoolExecutor(num_threads, "verify") as threads:
        found = list(threads.map(lambda location: _fault(folder, location), locations))
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


def cover_faults(entry: TensorEntry) -> list[str]:
    """Holes between the chunks of a tensor, overlaps, and chunks outside of its shape, one line each."""
    faults = []
    for chunk in entry.chunks:
        offsets, sizes = chunk.box.offsets, chunk.box.sizes
        if not len(offsets) == len(sizes) == len(entry.shape) or any(
            start < 0 or start + size > length for start, size, length in zip(offsets, sizes, entry.shape, strict=True)
        ):
            faults.append(f"{_of(chunk)} is not within its shape {entry.shape}")
    if faults:
        return faults
    faults += [f"{_of(one)} and {_of(other)} overlap" for one, other in _overlaps(entry.chunks)]
    # Chunks that lie within the shape and apart from each other cover it where they have as many elements.
    if not faults and entry.num_elements_of_chunks != entry.num_elements:
        faults.append(
            f"its chunks have {entry.num_elements_of_chunks} of the {entry.num_elements} elements of {entry.shape}"
        )
    return faults


def _overlaps(chunks: tuple[Chunk, ...]) -> Iterator[tuple[Chunk, Chunk]]:
    """Pairs of chunks that share an element."""
    near: list[Chunk] = []
    for chunk in sorted((chunk for chunk in chunks if math.prod(chunk.box.sizes)), key=lambda chunk: chunk.box.offsets):
        if chunk.box.offsets:
            # Only chunks that reach this one's first index can share an element with it, or with a later one.
            near = [other for other in near if other.box.offsets[0] + other.box.sizes[0] > chunk.box.offsets[0]]
        for other in near:
            corners = zip(chunk.box.offsets, chunk.box.sizes, other.box.offsets, other.box.sizes, strict=True)
            if all(start < begin + length and begin < start + size for start, size, begin, length in corners):
                yield other, chunk
        near.append(chunk)


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


def _of(chunk: Chunk) -> str:
    return f"the chunk at {list(chunk.box.offsets)} of {list(chunk.box.sizes)} ({where(chunk.location).rstrip(',')})"
