"""Packing: documents become blocks of tokens whose labels are the next token."""

import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_megatron.data import (
    PackedTokens,
    Tokenizer,
    load_documents,
    load_tokenizer,
    pack_documents,
    prepare_tokens,
    train_tokenizer,
)

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
    """All that one process does before training; at the top of the file so that a new process can be told to."""
    documents = load_documents(path=root / "text", cache_dir=directory / "cache")
    return prepare_tokens(documents, load_tokenizer(root), directory)


def test_blocks_cover_every_token_once_as_a_target_and_share_one() -> None:
    blocks = pack_documents([[1, 2, 3], [4, 5], [6, 7, 8, 9]], sequence_length=4, end_of_text=0)
    assert [block.tolist() for block in (blocks[0], blocks[1])] == [[1, 2, 3, 0, 4], [4, 5, 0, 6, 7]]
    assert len(blocks) == 2
    with pytest.raises(IndexError):
        blocks[2]


@pytest.mark.parametrize(("num_tokens", "num_samples"), [(9, 2), (12, 2), (13, 3)])
def test_n_samples_need_n_times_s_plus_one_tokens(num_tokens: int, num_samples: int) -> None:
    assert len(pack_documents([range(num_tokens - 1)], sequence_length=4, end_of_text=0)) == num_samples


def test_too_little_text_for_one_sample_is_refused() -> None:
    with pytest.raises(ValueError, match=r"4 tokens are too few .* sequence_length \(4\), which takes 5.* at most 3"):
        pack_documents([[1, 2, 3]], sequence_length=4, end_of_text=0)
    with pytest.raises(ValueError, match=r"sequence_length \(0\) must be at least 1"):
        pack_documents([[1, 2, 3]], sequence_length=0, end_of_text=0)


def test_the_label_of_a_position_is_the_token_after_it(root: Path, tmp_path: Path) -> None:
    samples = PackedTokens(prepare(root, tmp_path), sequence_length=16)
    row = np.load(samples.path)
    for index in (0, 1, len(samples) - 1):
        sample = samples[index]
        assert sample["tokens"].tolist() == row[index * 16 : index * 16 + 16].tolist()
        assert sample["labels"].tolist() == row[index * 16 + 1 : index * 16 + 17].tolist()
        assert sample["tokens"].dtype == sample["labels"].dtype == torch.int64
        assert torch.equal(sample["loss_mask"], torch.ones(16, dtype=torch.float32))
    assert len(samples) == (len(row) - 1) // 16
    with pytest.raises(IndexError):
        samples[len(samples)]


def test_a_label_changed_in_place_changes_no_token(root: Path, tmp_path: Path) -> None:
    samples = PackedTokens(prepare(root, tmp_path), sequence_length=16)
    sample, untouched = samples[0], samples[0]["tokens"].clone()
    sample["labels"].fill_(-100)
    assert torch.equal(sample["tokens"], untouched)
    assert torch.equal(samples[0]["tokens"], untouched)


def test_prepared_tokens_are_the_documents_each_ended_once(root: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = np.load(prepare(root, tmp_path))
    assert row.dtype == np.uint16
    (ends,) = np.nonzero(row == tokenizer.end_of_text)
    assert len(ends) == len(TEXTS) and ends[-1] == len(row) - 1
    documents = np.split(row, ends + 1)[:-1]
    assert [tokenizer.decode(document[:-1]) for document in documents] == TEXTS


def test_a_batch_of_documents_at_a_time_gives_the_same_row(root: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    documents = load_documents(path=root / "text", cache_dir=tmp_path / "cache")
    at_once = prepare_tokens(documents, tokenizer, tmp_path / "a")
    one_by_one = prepare_tokens(documents, tokenizer, tmp_path / "b", batch_size=1)
    assert at_once.read_bytes() == one_by_one.read_bytes()
    assert at_once.name == one_by_one.name


def test_empty_documents_leave_no_end_of_text(root: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": ""}\n{"text": null}\n{"text": "b"}\n')
    documents = load_documents(path=tmp_path / "rows.jsonl", cache_dir=tmp_path / "cache")
    row = np.load(prepare_tokens(documents, tokenizer, tmp_path))
    assert tokenizer.decode(row) == "a<|endoftext|>b<|endoftext|>"


def test_a_large_vocabulary_takes_wider_tokens(root: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    documents = load_documents(path=root / "text", cache_dir=tmp_path / "cache")
    narrow = np.load(prepare_tokens(documents, tokenizer, tmp_path / "narrow"))
    tokenizer.vocab_size = 2**16 + 1
    wide = np.load(prepare_tokens(documents, tokenizer, tmp_path / "wide"))
    assert wide.dtype == np.int32
    assert np.array_equal(narrow, wide)


def test_tokens_are_written_once_and_anew_for_another_tokenizer(root: Path, tmp_path: Path) -> None:
    first = prepare(root, tmp_path)
    written = first.stat()
    assert prepare(root, tmp_path) == first
    assert (first.stat().st_mtime_ns, first.stat().st_ino) == (written.st_mtime_ns, written.st_ino)
    documents = load_documents(path=root / "text", cache_dir=tmp_path / "cache")
    other = prepare_tokens(documents, train_tokenizer(TEXTS, 270, tmp_path / "tokenizer.json"), tmp_path)
    assert other != first
    assert first.is_file() and other.is_file()


def test_a_failure_midway_leaves_no_file(root: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    documents = load_documents(path=root / "text", cache_dir=tmp_path / "cache")
    tokenizer.end_of_text = -1  # no unsigned number, so the first document cannot be written
    with pytest.raises(OverflowError):
        prepare_tokens(documents, tokenizer, tmp_path / "tokens")
    assert list((tmp_path / "tokens").iterdir()) == []


def test_two_processes_that_prepare_at_once_end_with_one_whole_file(root: Path, tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        paths = {work.result() for work in [pool.submit(prepare, root, tmp_path) for _ in range(2)]}
    (path,) = paths
    assert [file for file in tmp_path.iterdir() if file.name != "cache"] == [path]
    assert np.load(path).tolist() == np.load(prepare(root, tmp_path / "alone")).tolist()


def test_a_pickled_dataset_carries_its_path_and_not_its_tokens(root: Path, tmp_path: Path) -> None:
    samples = PackedTokens(prepare(root, tmp_path), sequence_length=16)
    content = pickle.dumps(samples)
    assert len(content) < 1000
    copy = pickle.loads(content)
    assert torch.equal(copy[1]["labels"], samples[1]["labels"]) and len(copy) == len(samples)
    assert isinstance(copy.blocks.tokens, np.memmap)


def test_a_token_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"token file \(.*none\.npy'\) does not exist; prepare_tokens writes it"):
        PackedTokens(tmp_path / "none.npy", sequence_length=4)
