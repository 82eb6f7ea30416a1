"""Prepared token files hold the documents, each ended once, and appear whole or not at all."""

import json
from pathlib import Path

import numpy as np
import pytest

from lightning_megatron.data import (
    MegatronCorpus,
    PackedDocuments,
    Tokenizer,
    load_documents,
    load_tokenizer,
    prepare_corpus,
    split_documents,
    train_tokenizer,
)
from lightning_megatron.data.prepare import left_out
from lightning_megatron.data.sources import part_of
from tests.harness.ranks import run_on_ranks

TEXTS = ["one two three\n" * 30, "four five <|endoftext|> six\n" * 30, "séven\n" * 30]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of three files and a tokenizer for it."""
    root = tmp_path_factory.mktemp("corpus")
    (root / "text").mkdir()
    for index, text in enumerate(TEXTS):
        (root / "text" / f"{index}.txt").write_text(text, encoding="utf-8")
    train_tokenizer(TEXTS, 280, root / "tokenizer.json")
    return root


@pytest.fixture
def tokenizer(root: Path) -> Tokenizer:
    return load_tokenizer(root)


def prepare(root: Path, directory: Path) -> Path:
    """All that one process does before training; at the top of the file so that a new process can run it."""
    documents = load_documents(path=root / "text", cache_dir=directory / "cache")
    return prepare_corpus(documents, load_tokenizer(root), directory)


def test_prepared_tokens_are_the_documents_each_ended_once(root: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = MegatronCorpus(prepare(root, tmp_path)).tokens
    assert row.dtype == np.uint16
    (ends,) = np.nonzero(row == tokenizer.end_of_text)
    assert len(ends) == len(TEXTS) and ends[-1] == len(row) - 1
    documents = np.split(row, ends + 1)[:-1]
    assert [tokenizer.decode(document[:-1]) for document in documents] == TEXTS


def test_empty_documents_are_documents_without_an_end(root: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": ""}\n{"text": null}\n{"text": "b"}\n')
    documents = load_documents(path=tmp_path / "rows.jsonl", cache_dir=tmp_path / "cache")
    prefix = prepare_corpus(documents, tokenizer, tmp_path)
    corpus = MegatronCorpus(prefix)
    assert tokenizer.decode(corpus.tokens) == "a<|endoftext|>b<|endoftext|>"
    assert corpus.document_sizes().tolist() == [2, 0, 0, 2]
    for sequence_length in (1, 2):
        rows = PackedDocuments(prefix, sequence_length, end_of_text=tokenizer.end_of_text)
        assert sum(int(row["loss_mask"].sum()) for row in (rows[i] for i in range(len(rows)))) == 2


def test_a_large_vocabulary_takes_wider_tokens(root: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    documents = load_documents(path=root / "text", cache_dir=tmp_path / "cache")
    narrow = MegatronCorpus(prepare_corpus(documents, tokenizer, tmp_path / "narrow")).tokens
    tokenizer.vocab_size = 2**16 + 1
    wide = MegatronCorpus(prepare_corpus(documents, tokenizer, tmp_path / "wide")).tokens
    assert wide.dtype == np.int32
    assert np.array_equal(narrow, wide)


def test_tokens_are_written_once_and_once_more_for_another_tokenizer(root: Path, tmp_path: Path) -> None:
    first = prepare(root, tmp_path)
    index = Path(f"{first}.idx")
    written = index.stat()
    assert prepare(root, tmp_path) == first
    assert (index.stat().st_mtime_ns, index.stat().st_ino) == (written.st_mtime_ns, written.st_ino)
    documents = load_documents(path=root / "text", cache_dir=tmp_path / "cache")
    other = prepare_corpus(documents, train_tokenizer(TEXTS, 270, tmp_path / "tokenizer.json"), tmp_path)
    assert other != first
    assert all(Path(f"{prefix}.bin").is_file() for prefix in (first, other))


def test_a_failure_midway_leaves_no_file(root: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    documents = load_documents(path=root / "text", cache_dir=tmp_path / "cache")
    tokenizer.end_of_text = -1  # no unsigned number, so the first document cannot be written
    with pytest.raises(ValueError, match="holds int64 from -1"):
        prepare_corpus(documents, tokenizer, tmp_path / "tokens")
    assert list((tmp_path / "tokens").iterdir()) == []


def test_two_processes_that_prepare_at_once_end_with_one_complete_file(root: Path, tmp_path: Path) -> None:
    (path,) = set(run_on_ranks(2, prepare, root, tmp_path, init=False))
    assert sorted(file.name for file in tmp_path.iterdir() if file.name != "cache") == [
        f"{path.name}.bin",
        f"{path.name}.idx",
        f"{path.name}.json",
    ]
    assert MegatronCorpus(path).tokens.tolist() == MegatronCorpus(prepare(root, tmp_path / "alone")).tokens.tolist()


def test_what_has_no_tokens_is_named_by_its_location_whenever_the_files_are_used(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["a", "", "b" * 20, "c", "d" * 30, ""]
    # Of six the fourth is held out.
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def prefix() -> Path:
        documents = load_documents(path=tmp_path / "rows.jsonl", cache_dir=tmp_path / "cache")
        kept, _ = split_documents(part_of(documents, range(6)), 0.2)
        return prepare_corpus(kept, tokenizer, tmp_path, max_document_bytes=10)

    shown = (
        f"2 documents were left without tokens: document 2 has 20 bytes, above max_document_bytes (10)"
        f" ({tmp_path}/rows.jsonl, line 3); document 3 has 30 bytes, above max_document_bytes (10)"
        f" ({tmp_path}/rows.jsonl, line 5); 2 documents are empty"
    )
    written = prefix()
    assert caplog.messages == [f"{written}: {shown}"]
    assert left_out(prefix()) == shown, "and again of files that are there"
    good = prepare_corpus(load_documents(path=tmp_path / "rows.jsonl", cache_dir=tmp_path), tokenizer, tmp_path)
    assert left_out(good) == "2 documents are empty"
    assert left_out(tmp_path / "nothing is known of") == ""


def test_sentences_are_sequences_of_their_document_without_ends(tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = ["One. Two!\nThree", "", "Alone", " \n"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    documents = load_documents(path=tmp_path / "rows.jsonl", cache_dir=tmp_path / "cache")
    prefix = prepare_corpus(documents, tokenizer, tmp_path, has_ends=False, sentences=True)
    corpus = MegatronCorpus(prefix)
    found = [tokenizer.decode(corpus.sequence(i)) for i in range(corpus.num_sequences)]
    assert found == ["One.", " Two!\n", "Three", "Alone", " \n"]
    # The empty document is one without a sentence.
    assert corpus.document_bounds.tolist() == [0, 3, 3, 4, 5]
    assert prefix != prepare_corpus(documents, tokenizer, tmp_path), "documents and sentences are different files"
