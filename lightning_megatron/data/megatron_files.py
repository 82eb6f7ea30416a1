"""Megatron's token files: a `.bin` of tokens and a `.idx` of their positions.

Between prepared text and samples. Little-endian throughout; the `.idx` holds

| bytes | what |
|---|---|
| 9 | `MMIDIDX`, two zeros |
| 8, 1 | version 1; the code of the tokens' dtype |
| 8, 8 | S, the number of sequences; B, one more than the number of documents |
| 4 S | int32: the tokens of each sequence |
| 8 S | int64: the byte of the `.bin` where each sequence starts |
| 8 B | int64: the sequence with which each document starts, and S |
| S | int8, where there are any: the mode of each sequence (1 for an image, where text has 0) |
"""

import shutil
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lightning_megatron.data.atomic_file import atomic_write
from lightning_megatron.data.corpus import TokenArray, TokenCorpus
from lightning_megatron.data.index_cache import cached_index
from lightning_megatron.data.packing import Numbers

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")

DTYPE_CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
"""Dtypes of tokens, by their code in the file."""

LONGEST_SEQUENCE = 2**31 - 1

_BLOCK = 1 << 24
"""Tokens that are read together."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype that Megatron's own tool gives the tokens of a vocabulary."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def megatron_paths(prefix: str | Path) -> tuple[Path, Path]:
    """The `.bin` and the `.idx` of a prefix."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def is_megatron_prefix(path: str | Path) -> bool:
    """Whether one of the two files of a prefix exists, and no file named as the prefix itself."""
    return not Path(path).exists() and any(file.is_file() for file in megatron_paths(path))


class MegatronCorpus(TokenCorpus):
    """The corpus of `PREFIX.bin` and `PREFIX.idx`, mapped into memory.

    `documents` is the range (first, last + 1) of those that count, by their numbers in the file; None: all.
    `modes` holds one number a sequence, or is empty where the file has none. A copy sent to a loader's worker carries
    the prefix alone. Raises ValueError for files that are missing, damaged, or not of one another.
    """

    def __init__(self, prefix: str | Path, documents: tuple[int, int] | None = None) -> None:
        self.prefix = str(prefix)
        self.documents = documents
        bin_path, idx_path = megatron_paths(prefix)
        if missing := [str(path) for path in (bin_path, idx_path) if not path.is_file()]:
            raise ValueError(
                f"token files {' and '.join(missing)} do not exist; give the path of a .bin and .idx without its ending"
            )
        dtype, lengths, pointers, bounds, self.modes = _read_index(idx_path)
        num_bytes = bin_path.stat().st_size
        if faults := _faults(dtype, lengths, pointers, bounds, num_bytes):
            raise ValueError(
                f"{idx_path} and {bin_path} do not match: {'; '.join(faults)}; take both files of one run of the tool"
                " that wrote them, or prepare the text anew"
            )
        tokens: TokenArray = np.empty(0, dtype) if num_bytes == 0 else np.memmap(bin_path, dtype, mode="r")
        if documents is not None:
            first, last = documents
            if not 0 <= first <= last < len(bounds):
                raise ValueError(f"documents {first} to {last} of {prefix} must lie within its {len(bounds) - 1}")
            bounds = bounds[first : last + 1]
        super().__init__(tokens, lengths, pointers, bounds)

    def __reduce__(self) -> tuple[type["MegatronCorpus"], tuple[str, tuple[int, int] | None]]:
        # A memory-mapped array pickles as all of its tokens.
        return MegatronCorpus, (self.prefix, self.documents)

    def token_bounds(self, directory: str | Path | None = None) -> tuple[int, int]:
        """The smallest and the largest token of the file, found once and cached in `directory`, or next to it. Raises
        ValueError for tokens that are no integers."""
        if self.tokens.dtype.kind not in "iu":
            raise ValueError(f"{self.prefix} holds tokens of {self.tokens.dtype}, and token ids are whole numbers")
        if len(self.tokens) == 0:
            return 0, 0
        index = megatron_paths(self.prefix)[1]
        smallest, largest = cached_index(index, "bounds", 1, self._find_bounds, directory).tolist()
        return smallest, largest

    def _find_bounds(self) -> Numbers:
        starts = range(0, len(self.tokens), _BLOCK)
        blocks = [self.tokens[start : start + _BLOCK] for start in starts]
        return np.array([min(int(b.min()) for b in blocks), max(int(b.max()) for b in blocks)], dtype=np.int64)


class MegatronWriter:
    """Appends sequences to an open `.bin` and collects the content of the `.idx`; `megatron_writer` makes it."""

    def __init__(self, file: BinaryIO, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.code = _code_of(self.dtype)
        self.file = file
        self.lengths = array("i")
        self.document_bounds = array("q", [0])
        self.modes = array("b")

    def add_document(self, sequences: Iterable[Sequence[int]], modes: Sequence[int] = ()) -> None:
        """Adds one document of the token ids of its sequences; `modes` has a number for each of them, or none at all.

        Raises ValueError for an id that the dtype does not hold; the file is then of no use.
        """
        first = len(self.lengths)
        for ids in sequences:
            self._add(np.asarray(ids, dtype=None if len(ids) else self.dtype))
        num_added = len(self.lengths) - first
        if (modes or self.modes) and (len(modes) != num_added or len(self.modes) != first):
            raise ValueError(
                f"document {len(self.document_bounds) - 1} has {len(modes)} modes for {num_added} sequences, and"
                f" {len(self.modes)} of the {first} before have one; give one for every sequence of the file, or none"
            )
        self.modes.extend(modes)
        self.document_bounds.append(len(self.lengths))

    def append(self, prefix: str | Path) -> None:
        """Appends all documents of other files, whose tokens have the same dtype."""
        other = MegatronCorpus(prefix)
        if other.tokens.dtype != self.dtype:
            raise ValueError(
                f"{prefix} holds {other.tokens.dtype} and this file {self.dtype}; files of one dtype can be appended"
            )
        first = len(self.lengths)
        if first and other.num_sequences and bool(self.modes) != bool(len(other.modes)):
            raise ValueError(f"{prefix} and what was written before it must both have modes, or neither")
        with megatron_paths(prefix)[0].open("rb") as source:
            shutil.copyfileobj(source, self.file, 1 << 24)
        self.lengths.frombytes(np.asarray(other.lengths, dtype=np.int32).tobytes())
        self.document_bounds.frombytes((np.asarray(other.document_bounds[1:], dtype=np.int64) + first).tobytes())
        self.modes.frombytes(np.asarray(other.modes, dtype=np.int8).tobytes())

    def index_bytes(self) -> Iterator[bytes]:
        """The `.idx` of the added documents."""
        lengths = np.frombuffer(self.lengths, dtype=np.int32) if self.lengths else np.empty(0, dtype=np.int32)
        sizes = lengths.astype(np.int64) * self.dtype.itemsize
        yield _HEADER.pack(_MAGIC, _VERSION, self.code, len(lengths), len(self.document_bounds))
        yield lengths.astype("<i4").tobytes()
        yield (np.cumsum(sizes) - sizes).astype("<i8").tobytes()
        yield np.frombuffer(self.document_bounds, dtype=np.int64).astype("<i8").tobytes()
        yield self.modes.tobytes()

    def _add(self, ids: NDArray[Any]) -> None:
        number = len(self.lengths)
        if len(ids) > LONGEST_SEQUENCE:
            raise ValueError(
                f"sequence {number} has {len(ids)} tokens, and a .idx counts up to {LONGEST_SEQUENCE}; split it"
            )
        if len(ids) and self.dtype.kind in "iu":
            held = np.iinfo(self.dtype)
            lowest, highest = ids.min(), ids.max()
            if ids.dtype.kind not in "iu" or lowest < held.min or highest > held.max:
                raise ValueError(
                    f"sequence {number} holds {ids.dtype} from {lowest} to {highest}, and the file's {self.dtype} whole"
                    f" numbers from {held.min} to {held.max}; token_dtype says what a vocabulary needs"
                )
        self.file.write(ids.astype(self.dtype, copy=False).tobytes())
        self.lengths.append(len(ids))


@contextmanager
def megatron_writer(prefix: str | Path, dtype: DTypeLike) -> Iterator[MegatronWriter]:
    """A writer of `PREFIX.bin` and `PREFIX.idx`, which appear complete at the end of the block, or not if it fails."""
    bin_path, idx_path = megatron_paths(prefix)
    # The .bin is renamed first: where there is a new .idx, there is its .bin.
    with atomic_write(idx_path) as idx_temporary, atomic_write(bin_path) as bin_temporary:
        with bin_temporary.open("wb") as file:
            writer = MegatronWriter(file, dtype)
            yield writer
        with idx_temporary.open("wb") as file:
            file.writelines(writer.index_bytes())


def _code_of(dtype: np.dtype[Any]) -> int:
    for code, known in DTYPE_CODES.items():
        if known == dtype:
            return code
    raise ValueError(
        f"dtype ({dtype}) of tokens must be one of {', '.join(str(known) for known in DTYPE_CODES.values())}"
    )


def _read_index(path: Path) -> tuple[np.dtype[Any], Numbers, Numbers, Numbers, Numbers]:
    """The dtype of the tokens, the lengths, pointers and document bounds, and the modes, mapped."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise ValueError(f"{path} is not an index of Megatron: it does not start with the {_HEADER.size} bytes of one")
    _, version, code, num_sequences, num_bounds = _HEADER.unpack(header)
    if version != _VERSION:
        raise ValueError(f"{path} is of version {version}, and version {_VERSION} is read; write it anew")
    if code not in DTYPE_CODES:
        raise ValueError(f"{path} says dtype {code} for tokens, and {min(DTYPE_CODES)} to {max(DTYPE_CODES)} are known")
    without_modes = _HEADER.size + 12 * num_sequences + 8 * num_bounds
    if num_bytes not in (without_modes, without_modes + num_sequences):
        raise ValueError(
            f"{path} has {num_bytes} bytes; {num_sequences} sequences and {num_bounds} document bounds take"
            f" {without_modes}, or {without_modes + num_sequences} with modes: it was cut off or written over;"
            " copy it again or prepare the text anew"
        )

    def part(dtype: str, offset: int, count: int) -> Numbers:
        if count == 0:
            return np.empty(0, dtype)
        mapped: Numbers = np.memmap(path, dtype, mode="r", offset=offset, shape=(count,))
        return mapped

    return (
        DTYPE_CODES[code],
        part("<i4", _HEADER.size, num_sequences),
        part("<i8", _HEADER.size + 4 * num_sequences, num_sequences),
        part("<i8", _HEADER.size + 12 * num_sequences, num_bounds),
        part("i1", without_modes, num_bytes - without_modes),
    )


def _faults(dtype: np.dtype[Any], lengths: Numbers, pointers: Numbers, bounds: Numbers, num_bytes: int) -> list[str]:
    faults = []
    sizes = lengths.astype(np.int64) * dtype.itemsize
    expected = int(sizes.sum())
    if len(lengths) and lengths.min() < 0:
        faults.append(f"sequence {int(lengths.argmin())} has {lengths.min()} tokens")
    elif expected != num_bytes:
        faults.append(
            f"the index tells of {expected} bytes of tokens ({expected // dtype.itemsize} of {dtype}), and there are"
            f" {num_bytes}"
        )
    if len(gaps := np.flatnonzero(pointers != np.cumsum(sizes) - sizes)):
        faults.append(f"sequence {gaps[0]} starts at byte {pointers[gaps[0]]}, which is not where the one before ends")
    if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != len(lengths) or (np.diff(bounds) < 0).any():
        faults.append(f"the bounds of documents do not rise from 0 to the number of sequences ({len(lengths)})")
    return faults
