"""Chunks of tensors in a file, one behind the other, each with a checksum.

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
class Place:
    """Where the bytes of a chunk are, and what their checksum must be."""

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
    """Writes chunks to a stream that it counts and sums up."""

    def __init__(self, stream: IO[bytes], file: str) -> None:
        self._stream = stream
        self._file = file
        self._offset = 0
        self._counter = _Counter(stream)

    def write(self, value: Tensor | bytes) -> Place:
        """Where the value now is; a tensor must own its memory, for all of that is written."""
        counter = self._counter
        counter.num_bytes = counter.checksum = 0
        if isinstance(value, Tensor):
            try:
                torch.save(value, cast(IO[bytes], counter))
            except RuntimeError:
                # Of a stream that fails, torch says only where it stood.
                if counter.fault is not None:
                    raise counter.fault from None
                raise
        else:
            counter.write(value)
        place = Place(self._file, self._offset, counter.num_bytes, counter.checksum)
        self._offset += counter.num_bytes
        return place


class _Counter:
    """The part of a stream that `torch.save` uses."""

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


def read_chunk(stream: IO[bytes], place: Place) -> Tensor:
    """The tensor at the place. Raises DamagedError where the bytes are not those that were written."""
    data = read_bytes(stream, place)
    try:
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        # Bytes that someone made up can end in any error of the unpickler.
        raise DamagedError(f"{where(place)} is no tensor: {error}") from error
    if not isinstance(tensor, Tensor):
        raise DamagedError(f"{where(place)} is a {type(tensor).__name__}, not a tensor")
    return tensor


def read_bytes(stream: IO[bytes], place: Place) -> bytes:
    """The bytes at the place. Raises DamagedError where they are not those that were written."""
    stream.seek(place.offset)
    data = stream.read(place.num_bytes)
    if len(data) < place.num_bytes:
        raise DamagedError(f"{where(place)} ends after {len(data)} of its {place.num_bytes} bytes: {place.file} is cut")
    if (found := checksum_of(data)) != place.checksum:
        raise DamagedError(
            f"{where(place)} has checksum {found:08x} and was written with {place.checksum:08x}: {place.file} is "
            "damaged, or of another checkpoint"
        )
    return data


def where(place: Place) -> str:
    """The place in words."""
    return f"{place.file}, bytes {place.offset} to {place.offset + place.num_bytes},"


def gaps(places: Iterable[Place], num_bytes: int) -> list[str]:
    """What of a file of that many bytes is not exactly one chunk's, one line each."""
    faults, end = [], 0
    for place in sorted(places, key=lambda place: place.offset):
        if place.offset != end:
            faults.append(f"{place.file} has bytes {end} to {place.offset} in no chunk or in two")
        end = place.offset + place.num_bytes
    if end != num_bytes:
        faults.append(f"the file has {num_bytes} bytes and its chunks end at {end}")
    return faults
