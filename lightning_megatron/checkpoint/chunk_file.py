"""Chunks of tensors in a file, one after the other, each with a checksum.

A chunk's bytes are what `torch.save` makes of it, so that torch's own readers read them. The checksum (CRC-32) is over
those bytes, and the chunks fill the file: there is no byte that no checksum covers.
"""

import io
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChunkLocation:
    """The bytes of a chunk in a file, and the checksum that they must have."""

    file: str
    offset: int
    num_bytes: int
    checksum: int


class DamagedError(ValueError):
    """A file of a checkpoint does not hold what was written."""


def checksum_of(data: bytes | memoryview) -> int:
    """The CRC-32 of the bytes."""
    return zlib.crc32(data)


class ChunkWriter:
    """Writes chunks to a stream, counts their bytes and computes their checksums."""

    def __init__(self, stream: IO[bytes], file: str) -> None:
        self._stream = stream
        self._file = file
        self._offset = 0
        self._counter = _Counter(stream)

    def write(self, value: Tensor | bytes) -> ChunkLocation:
        """Writes the value and returns its location; a tensor must own its memory, because all of that is written."""
        counter = self._counter
        counter.num_bytes = counter.checksum = 0
        if isinstance(value, Tensor):
            try:
                torch.save(value, cast(IO[bytes], counter))
            except RuntimeError:
                # torch reports of a failing stream only the position.
                if counter.fault is not None:
                    raise counter.fault from None
                raise
        else:
            counter.write(value)
        location = ChunkLocation(self._file, self._offset, counter.num_bytes, counter.checksum)
        self._offset += counter.num_bytes
        return location


class _Counter:
    """The methods of a stream that `torch.save` calls."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.num_bytes = 0
        self.checksum = 0
        self.fault: OSError | None = None

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        num_bytes = len(data)
        self.num_bytes += num_bytes
        try:
            self._stream.write(data)
        except OSError as error:
            self.fault = error
            raise
        return num_bytes

    def flush(self) -> None:
        """Whoever opened the stream flushes it."""


def read_chunk(stream: IO[bytes], location: ChunkLocation) -> Tensor:
    """The tensor at the location. Raises DamagedError where the bytes are not those that were written."""
    data = read_bytes(stream, location)
    try:
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        # Forged bytes can raise any error in the unpickler.
        raise DamagedError(f"{where(location)} is no tensor: {error}") from error
    if not isinstance(tensor, Tensor):
        raise DamagedError(f"{where(location)} is a {type(tensor).__name__}, not a tensor")
    return tensor


def read_bytes(stream: IO[bytes], location: ChunkLocation) -> bytes:
    """The bytes at the location. Raises DamagedError where they are not those that were written."""
    stream.seek(location.offset)
    data, place, file = stream.read(location.num_bytes), where(location), location.file
    if len(data) < location.num_bytes:
        raise DamagedError(f"{place} ends after {len(data)} of its {location.num_bytes} bytes: {file} is cut")
    if (found := checksum_of(data)) != location.checksum:
        raise DamagedError(
            f"{place} has checksum {found:08x} and was written with {location.checksum:08x}: {file} is damaged, or of "
            "another checkpoint"
        )
    return data


def where(location: ChunkLocation) -> str:
    """The location in words, for a message."""
    return f"{location.file}, bytes {location.offset} to {location.offset + location.num_bytes},"


def gaps(locations: Iterable[ChunkLocation], num_bytes: int) -> list[str]:
    """Ranges of a file of that many bytes that belong to no chunk or to two, one line each."""
    faults, end = [], 0
    for location in sorted(locations, key=lambda one: one.offset):
        if location.offset != end:
            faults.append(f"{location.file} has bytes {end} to {location.offset} in no chunk or in two")
        end = location.offset + location.num_bytes
    if end != num_bytes:
        faults.append(f"the file has {num_bytes} bytes and its chunks end at {end}")
    return faults
