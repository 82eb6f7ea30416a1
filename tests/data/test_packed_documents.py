"""Whole documents in rows: every token but a document's first is a target once; tables appear once and whole."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.data import (
    DocumentRows,
    LongDocuments,
    MegatronCorpus,
    PackedDocuments,
    load_documents,
    megatron_writer,
    pack_rows,
    packed_documents,
    prepare_corpus,
    train_tokenizer,
)
from tests.harness.ranks import run_on_ranks

END = 0
DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [], [11, 12]]


def write(path: Path, documents: list[list[int]] = DOCUMENTS) -> Path:
    with megatron_writer(path, np.uint16) as writer:
        for ids in documents:
            writer.add_document([[*ids, END]])
    return path


def pairs_of(rows: DocumentRows) -> list[tuple[list[int], list[int]]]:
    """The inputs and the labels of every segment of every row."""
    found = []
    for row in (rows[i] for i in range(len(rows))):
        assert {name: len(value) for name, value in row.items()} == dict.fromkeys(row, rows.sequence_length)
        segments = row["segments"]
        used = segments != -1
        assert torch.equal(row["loss_mask"], used.float()) and torch.equal(row["labels"] == -100, ~used)
        # Numbered from 0, each in one stretch, and what is unused is after them.
        assert torch.equal(segments[used], segments[used].sort().values) and used.int().diff().le(0).all()
        assert segments[used].unique().tolist() == list(range(int(segments.max()) + 1))
        for number in range(int(segments.max()) + 1):
            part = segments == number
            found.append((row["tokens"][part].tolist(), row["labels"][part].tolist()))
    return sorted(found)


def test_a_document_of_n_tokens_has_n_minus_1_positions_and_ends_as_a_label() -> None:
    rows = pack_rows(DOCUMENTS, 6, end_of_text=END)
    # The empty document has its end alone, from which nothing is predicted.
    whole = [[*ids, END] for ids in DOCUMENTS if ids]
    assert pairs_of(rows) == sorted((ids[:-1], ids[1:]) for ids in whole)
    assert len(rows) == 2 and rows.table.packed.num_documents == 5


@given(
    st.lists(st.lists(st.integers(1, 50), max_size=40), min_size=1, max_size=30).filter(any),
    st.integers(1, 16),
    st.integers(0, 2),
)
def test_every_token_but_a_documents_first_is_a_target_once(documents: list[list[int]], length: int, seed: int) -> None:
    rows = pack_rows(documents, length, end_of_text=END, seed=seed)
    wanted = [
        (ids[i : i + length], [*ids[i + 1 :], END][:length]) for ids in documents for i in range(0, len(ids), length)
    ]
    assert pairs_of(rows) == sorted(wanted)


def test_pieces_of_a_long_document_are_segments_of_their_own() -> None:
    rows = pack_rows([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], 4, end_of_text=END)
    assert pairs_of(rows) == [([1, 2, 3, 4], [2, 3, 4, 5]), ([5], [END]), ([6, 7, 8, 9], [7, 8, 9, 10]), ([10], [END])]
    assert len(rows) == 3, "the two ends share a row"


@pytest.mark.parametrize(("long_documents", "kept"), [("drop", [0, 1, 4]), ("split", [0, 1, 2, 4])])
def test_long_documents_are_dropped_or_split_and_counted(
    tmp_path: Path, long_documents: LongDocuments, kept: list[int]
) -> None:
    path = write(tmp_path / "tokens")
    rows = PackedDocuments(path, 5, end_of_text=END, long_documents=long_documents)
    labels = sorted(label for _, labels in pairs_of(rows) for label in labels)
    assert labels == sorted(i for number in kept for i in [*DOCUMENTS[number], END][1:])
    assert rows.table.packed.num_long == 1
    assert f"1 of them were longer and {'dropped' if long_documents == 'drop' else 'cut'}" in str(rows)


def test_long_documents_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens")
    with pytest.raises(ValueError, match=r"1 of 5 .*number 2 from 0, takes 6; raise sequence_length to 6"):
        PackedDocuments(path, 5, end_of_text=END, long_documents="refuse")
    rows = PackedDocuments(path, 6, end_of_text=END, long_documents="refuse")
    assert str(rows) == "5 documents in 2 rows of 6, 100.0% full"


def test_rows_of_a_file_are_those_of_its_documents_in_memory(tmp_path: Path) -> None:
    rows = PackedDocuments(write(tmp_path / "tokens"), 4, end_of_text=END, seed=3)
    others = pack_rows(DOCUMENTS, 4, end_of_text=END, seed=3)
    assert len(rows) == len(others)
    for i in range(len(rows)):
        assert all(
            torch.equal(rows[i][name], others[i][name]) for name in ("tokens", "labels", "loss_mask", "segments")
        )
    with pytest.raises(IndexError, match=f"row {len(rows)} of {len(rows)}"):
        rows[len(rows)]


def test_documents_of_prepared_text_come_back(tmp_path: Path) -> None:
    texts = ["one two three\n" * 5, "four <|endoftext|> five", "séven\n" * 40]
    (tmp_path / "text").mkdir()
    for index, text in enumerate(texts):
        (tmp_path / "text" / f"{index}.txt").write_text(text, encoding="utf-8")
    tokenizer = train_tokenizer(texts, 270, tmp_path / "tokenizer.json")
    documents = load_documents(path=tmp_path / "text", cache_dir=tmp_path / "cache")
    path = prepare_corpus(documents, tokenizer, tmp_path / "tokens")
    rows = PackedDocuments(path, 512, end_of_text=tokenizer.end_of_text)
    assert sorted(tokenizer.decode([*tokens, labels[-1]]) for tokens, labels in pairs_of(rows)) == sorted(
        f"{text}<|endoftext|>" for text in texts
    )
    wanted = [len(ids) + 1 for ids in tokenizer.encode(documents["text"])]
    assert MegatronCorpus(path).document_sizes().tolist() == wanted


# --- the tables -------------------------------------------------------------------------------------------------------


def test_tables_are_written_once_and_read_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "tokens")
    first = PackedDocuments(path, 4, end_of_text=END)
    written = sorted(file.name for file in tmp_path.iterdir())
    assert len(written) == 3
    with monkeypatch.context() as patch:
        patch.setattr(packed_documents, "pack_lengths", lambda *_: pytest.fail("packed again"))
        second = PackedDocuments(path, 4, end_of_text=END)
    assert sorted(file.name for file in tmp_path.iterdir()) == written
    assert pairs_of(first) == pairs_of(second) and isinstance(second.table.pieces.base, np.memmap)


def test_other_options_make_other_tables(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens", [[i] * (1 + i % 7) for i in range(1, 200)])
    made = [
        PackedDocuments(path, 8, end_of_text=END),
        PackedDocuments(path, 9, end_of_text=END),
        PackedDocuments(path, 8, end_of_text=END, seed=1),
        PackedDocuments(path, 8, end_of_text=END, long_documents="drop"),
    ]
    assert len(list(tmp_path.iterdir())) == 2 + 4
    assert made[0][0]["tokens"].tolist() != made[2][0]["tokens"].tolist()
    assert [rows.sequence_length for rows in made] == [8, 9, 8, 8]


def test_token_files_that_are_rewritten_are_repacked(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens", [[1, 2, 3], [4]])
    assert len(pairs_of(PackedDocuments(path, 4, end_of_text=END))[0][0]) == 3
    write(path, [[1, 2], [3, 4]])
    os.utime(f"{path}.idx", ns=(0, Path(f"{path}.idx").stat().st_mtime_ns + 1))  # clocks may be coarse
    assert [len(tokens) for tokens, _ in pairs_of(PackedDocuments(path, 4, end_of_text=END))] == [2, 2]


def build(path: Path) -> list[tuple[list[int], list[int]]]:
    return pairs_of(PackedDocuments(path, 8, end_of_text=END))


def test_two_processes_that_pack_at_once_end_with_complete_tables(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens", [[i] * (1 + i % 7) for i in range(1, 500)])
    first, second = run_on_ranks(2, build, path, init=False)
    assert first == second == build(path)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_failure_midway_leaves_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "tokens")
    written = sorted(tmp_path.iterdir())
    monkeypatch.setattr(packed_documents, "pack_lengths", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        PackedDocuments(path, 8, end_of_text=END)
    assert sorted(tmp_path.iterdir()) == written


def test_a_pickled_dataset_carries_its_path_and_not_its_tokens(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens", [[i] * (1 + i % 7) for i in range(1, 500)])
    rows = PackedDocuments(path, 6, end_of_text=END, seed=4, long_documents="drop")
    content = pickle.dumps(rows)
    assert len(content) < 1000
    copy = pickle.loads(content)
    assert len(copy) == len(rows) and str(copy) == str(rows)
    assert all(torch.equal(copy[i]["labels"], rows[i]["labels"]) for i in range(len(rows)))


def test_files_that_hold_no_documents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"token files .*none\.bin .* do not exist"):
        PackedDocuments(tmp_path / "none", 4, end_of_text=END)
    with pytest.raises(ValueError, match="none of the 1 documents"):
        pack_rows([[1, 2, 3]], 2, end_of_text=END, long_documents="drop")
