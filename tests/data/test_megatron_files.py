"""Megatron's token files: the bytes are those of the format, and what does not match is refused."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.data.megatron_files import (
    DTYPE_CODES,
    MegatronCorpus,
    megatron_paths,
    megatron_writer,
    token_dtype,
)

Documents = list[list[list[int]]]
DOCUMENTS: Documents = [[[1, 2, 3], [4]], [], [[5, 6]], [[], [7]]]


def write(prefix: Path, documents: Documents, dtype: object = np.uint16, modes: int | None = None) -> Path:
    with megatron_writer(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document, () if modes is None else [modes] * len(document))
    return prefix


def index_by_hand(documents: Documents, code: int, itemsize: int, modes: int | None = None) -> bytes:
    """The `.idx`, number by number."""
    sequences = [ids for document in documents for ids in document]
    out = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    out += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents) + 1)
    for ids in sequences:
        out += struct.pack("<i", len(ids))
    position = 0
    for ids in sequences:
        out += struct.pack("<q", position)
        position += len(ids) * itemsize
    first = 0
    out += struct.pack("<q", first)
    for document in documents:
        first += len(document)
        out += struct.pack("<q", first)
    return out + b"".join(struct.pack("<b", modes) for _ in sequences if modes is not None)


@pytest.mark.parametrize("code", sorted(DTYPE_CODES))
@pytest.mark.parametrize("modes", [None, 1])
def test_files_are_those_of_the_format_byte_for_byte(tmp_path: Path, code: int, modes: int | None) -> None:
    dtype = DTYPE_CODES[code]
    bin_path, idx_path = megatron_paths(write(tmp_path / "text.v1", DOCUMENTS, dtype, modes))
    assert bin_path.name == "text.v1.bin"
    letter = {"u1": "B", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "f8": "d", "f4": "f", "u2": "H"}[dtype.str[1:]]
    assert bin_path.read_bytes() == struct.pack(f"<7{letter}", *range(1, 8))
    assert idx_path.read_bytes() == index_by_hand(DOCUMENTS, code, dtype.itemsize, modes)


# As the reference tool writes them: 2 sequences of uint16 in 2 documents.
WRITTEN = bytes.fromhex(
    "4d4d494449445800000100000000000000080200000000000000030000000000000003000000010000000000000000000000060000000000"
    "0000000000000000000001000000000000000200000000000000"
)


def test_an_index_is_the_one_that_was_written_elsewhere(tmp_path: Path) -> None:
    write(tmp_path / "a", [[[1, 2, 3]], [[4]]])
    assert (tmp_path / "a.idx").read_bytes() == WRITTEN


@given(st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=4), max_size=6))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, documents: Documents) -> None:
    corpus = MegatronCorpus(write(tmp_path_factory.mktemp("files") / "a", documents))
    sequences = [ids for document in documents for ids in document]
    assert [corpus.sequence(i).tolist() for i in range(corpus.num_sequences)] == sequences
    assert corpus.num_documents == len(documents)
    assert corpus.document_sizes().tolist() == [sum(map(len, document)) for document in documents]
    flat = corpus.tokens.tolist()
    for number, document in enumerate(documents):
        whole = [i for ids in document for i in ids]
        start = corpus.document_start(number)
        assert flat[start : start + len(whole)] == whole


def test_files_are_appended_as_if_written_at_once(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS, modes=0)
    write(tmp_path / "b", [[[9, 8]]], modes=1)
    write(tmp_path / "empty", [])
    with megatron_writer(tmp_path / "both", np.uint16) as writer:
        for name in ("a", "empty", "b"):
            writer.append(tmp_path / name)
    with megatron_writer(tmp_path / "once", np.uint16) as writer:
        for document in DOCUMENTS:
            writer.add_document(document, [0] * len(document))
        writer.add_document([[9, 8]], [1])
    for both, once in zip(megatron_paths(tmp_path / "both"), megatron_paths(tmp_path / "once"), strict=True):
        assert both.read_bytes() == once.read_bytes()
    assert MegatronCorpus(tmp_path / "both").modes.tolist() == [0, 0, 0, 0, 0, 1]


def test_files_of_another_dtype_are_not_appended(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS, np.int32)
    with (
        pytest.raises(ValueError, match="holds int32 and this file uint16"),
        megatron_writer(tmp_path / "b", np.uint16) as writer,
    ):
        writer.append(tmp_path / "a")


def write_with_modes(prefix: Path, modes: list[list[int]]) -> None:
    with megatron_writer(prefix, np.uint16) as writer:
        for numbers in modes:
            writer.add_document([[1]], numbers)


@pytest.mark.parametrize("modes", [[[], [1]], [[1], []], [[1, 0]]])
def test_modes_are_for_all_sequences_or_for_none(tmp_path: Path, modes: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="give one for every sequence of the file, or none"):
        write_with_modes(tmp_path / "a", modes)
    assert list(tmp_path.iterdir()) == [], "nothing is left of a file that failed"


@pytest.mark.parametrize("wrong", [-1, 65536, 1.5])
def test_an_id_that_the_dtype_does_not_hold_is_refused(tmp_path: Path, wrong: float) -> None:
    with pytest.raises(ValueError, match=r"sequence 1 holds .*and the file's uint16"):
        write(tmp_path / "a", [[[1], [2, wrong]]])  # type: ignore[list-item]
    assert list(tmp_path.iterdir()) == []


def test_a_copy_for_a_worker_carries_the_prefix_alone(tmp_path: Path) -> None:
    corpus = MegatronCorpus(write(tmp_path / "a", [[list(range(60_000))]]))
    copy = pickle.dumps(corpus)
    assert len(copy) < 1000
    assert pickle.loads(copy).sequence(0).tolist() == corpus.sequence(0).tolist()


def test_tokens_are_not_read_before_they_are_asked_for(tmp_path: Path) -> None:
    assert isinstance(MegatronCorpus(write(tmp_path / "a", DOCUMENTS)).tokens, np.memmap)


def changed(prefix: Path, at: int, new: bytes) -> None:
    path = megatron_paths(prefix)[1]
    old = path.read_bytes()
    path.write_bytes(old[:at] + new + old[at + len(new) :])


def test_files_that_do_not_match_are_refused_by_what_is_wrong(tmp_path: Path) -> None:
    a = write(tmp_path / "a", DOCUMENTS)
    bin_path, idx_path = megatron_paths(a)
    whole, tokens = idx_path.read_bytes(), bin_path.read_bytes()
    num_sequences = sum(map(len, DOCUMENTS))
    pointers = 34 + 4 * num_sequences
    cases = [
        (lambda: changed(a, 0, b"X"), "is not an index"),
        (lambda: idx_path.write_bytes(whole[:20]), "is not an index"),
        (lambda: changed(a, 9, b"\x02"), "is of version 2, and version 1 is read"),
        (lambda: changed(a, 17, b"\x09"), "says dtype 9"),
        (lambda: idx_path.write_bytes(whole[:-1]), "it was cut off or written over"),
        (lambda: idx_path.write_bytes(whole + b"00"), "it was cut off or written over"),
        (lambda: bin_path.write_bytes(tokens[:-2]), r"tells of 14 bytes of tokens \(7 of uint16\), and there are 12"),
        (lambda: changed(a, 17, b"\x04"), "tells of 28 bytes of tokens"),
        (lambda: changed(a, 34, struct.pack("<i", -3)), "sequence 0 has -3 tokens"),
        (lambda: changed(a, pointers + 8, struct.pack("<q", 4)), "sequence 1 starts at byte 4"),
        (lambda: changed(a, pointers + 8 * num_sequences, struct.pack("<q", 1)), "do not rise from 0"),
        (lambda: changed(a, len(whole) - 8, struct.pack("<q", 4)), r"the number of sequences \(5\)"),
        (lambda: changed(a, len(whole) - 16, struct.pack("<q", 6)), "do not rise"),
        (bin_path.unlink, "a.bin do not exist"),
    ]
    for spoil, shown in cases:
        idx_path.write_bytes(whole)
        bin_path.write_bytes(tokens)
        spoil()
        with pytest.raises(ValueError, match=shown):
            MegatronCorpus(a)
    bin_path.write_bytes(tokens)
    idx_path.write_bytes(whole)
    assert MegatronCorpus(a).num_sequences == num_sequences


def test_a_path_with_its_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without its ending"):
        MegatronCorpus(f"{write(tmp_path / 'a', DOCUMENTS)}.bin")


def test_the_dtype_of_a_vocabulary_is_that_of_the_tool() -> None:
    assert [token_dtype(size).str for size in (257, 65499, 65500, 200_000)] == ["<u2", "<u2", "<i4", "<i4"]
