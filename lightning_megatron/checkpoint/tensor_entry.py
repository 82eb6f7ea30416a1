"""A tensor as a checkpoint's manifest describes it: shape, dtype and chunks, without its numbers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lightning_megatron.checkpoint.chunk_file import ChunkLocation, where
from lightning_megatron.sharding import Box


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and the location of its bytes."""

    box: Box
    location: ChunkLocation


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint: its shape in the unsplit model, its dtype, and its chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...] = ()

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def num_elements_of_chunks(self) -> int:
        """Elements of all chunks: as many as the tensor has, unless one is missing or there twice."""
        return sum(math.prod(chunk.box.sizes) for chunk in self.chunks)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in memory."""
        return self.dtype.itemsize * self.num_elements


def cover_faults(entry: TensorEntry) -> list[str]:
    """Holes between the chunks of a tensor, overlaps, and chunks outside of its shape or too short, one line each."""
    faults = []
    for chunk in entry.chunks:
        offsets, sizes = chunk.box.offsets, chunk.box.sizes
        if not len(offsets) == len(sizes) == len(entry.shape) or any(
            min(start, size) < 0 or start + size > length
            for start, size, length in zip(offsets, sizes, entry.shape, strict=True)
        ):
            faults.append(f"{_of(chunk)} is not within its shape {entry.shape}")
        elif chunk.location.num_bytes < (num_bytes := entry.dtype.itemsize * math.prod(sizes)):
            # A reader would allocate what no file holds.
            faults.append(f"{_of(chunk)} has {num_bytes} bytes of {entry.dtype}, and there are fewer in the file")
    if faults:
        return faults
    faults += [f"{_of(one)} and {_of(other)} overlap" for one, other in _overlaps(entry.chunks, entry.shape)]
    # Chunks that lie within the shape and apart from each other cover it where they have as many elements.
    if not faults and entry.num_elements_of_chunks != entry.num_elements:
        faults.append(
            f"its chunks have {entry.num_elements_of_chunks} of the {entry.num_elements} elements of {entry.shape}"
        )
    return faults


def _overlaps(chunks: tuple[Chunk, ...], shape: Sequence[int]) -> Iterator[tuple[Chunk, Chunk]]:
    """Pairs of chunks that share an element."""
    near: list[Chunk] = []
    # Along the longest dim, which is the one that is cut most often.
    dim = max(range(len(shape)), key=shape.__getitem__, default=0)
    present = [chunk for chunk in chunks if math.prod(chunk.box.sizes)]
    for chunk in sorted(present, key=lambda chunk: chunk.box.offsets[dim:]):
        if chunk.box.offsets:
            # Only chunks that reach this one's first index can share an element with it, or with a later one.
            first = chunk.box.offsets[dim]
            near = [other for other in near if other.box.offsets[dim] + other.box.sizes[dim] > first]
        for other in near:
            corners = zip(chunk.box.offsets, chunk.box.sizes, other.box.offsets, other.box.sizes, strict=True)
            if all(start < begin + length and begin < start + size for start, size, begin, length in corners):
                yield other, chunk
        near.append(chunk)


def _of(chunk: Chunk) -> str:
    return f"the chunk at {list(chunk.box.offsets)} of {list(chunk.box.sizes)} ({where(chunk.location).rstrip(',')})"
