"""Samples of chats: labels where something is to be learnt, cuts and drops counted, batches padded."""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.data import (
    ChatSamples,
    PackedChats,
    collate_padded,
    load_chat_template,
    load_rows,
    load_tokenizer,
    prepare_chats,
    train_tokenizer,
)
from tests.data.chats import HEADERS, TURNS, write_rows, write_tokenizer

LONG = [{"role": "user", "content": "word " * 60}, {"role": "assistant", "content": "Yes."}]
ROWS = [
    {"messages": TURNS},
    {"messages": TURNS[:1]},  # no answer
    {"messages": LONG},  # the answer comes too late
    {"messages": TURNS[2:]},
]


def prepared(folder: Path, rows: list[dict[str, Any]], sequence_length: int = 200) -> Path:
    write_tokenizer(folder, HEADERS)
    path = folder / f"{len(rows)}.jsonl"
    # A file that is written again counts as another one.
    table = load_rows(path=path if path.exists() else write_rows(path, rows), cache_dir=folder / "cache")
    return prepare_chats(
        table,
        load_tokenizer(folder),
        load_chat_template(folder),
        sequence_length=sequence_length,
        directory=folder / "made",
        batch_size=3,
    )


def test_a_label_is_the_next_token_where_that_is_an_answers(tmp_path: Path) -> None:
    samples = ChatSamples(prepared(tmp_path, ROWS, sequence_length=10_000))
    tokenizer = load_tokenizer(tmp_path)
    sample = samples[0]
    assert tokenizer.decode(sample["labels"][sample["labels"] != -100].tolist()) == "Four, é 🙂.<|end|>\nYes.<|end|>\n"
    assert torch.equal(sample["loss_mask"], (sample["labels"] != -100).float())
    follows = sample["labels"][:-1] == sample["tokens"][1:]
    assert torch.equal(follows, sample["labels"][:-1] != -100)
    # The last token of all is a label and never an input.
    assert sample["labels"][-1] != -100 and len(sample["labels"]) == len(sample["tokens"])


def test_what_is_cut_and_what_is_dropped_is_counted(tmp_path: Path) -> None:
    whole = ChatSamples(prepared(tmp_path, ROWS, sequence_length=10_000))
    assert (whole.counts.samples, whole.counts.cut, whole.counts.dropped) == (3, 0, 1)
    length = len(whole[0]["tokens"])
    assert len(whole[2]["tokens"]) < length < len(whole[1]["tokens"])
    exact = ChatSamples(prepared(tmp_path, ROWS, sequence_length=length))
    assert (exact.counts.samples, exact.counts.cut, exact.counts.dropped) == (2, 0, 2)
    cut = ChatSamples(prepared(tmp_path, ROWS, sequence_length=length - 1))
    assert (cut.counts.samples, cut.counts.cut, cut.counts.dropped) == (2, 1, 2)
    assert "2 samples; 1 of them were cut" in str(cut.counts) and "2 rows were dropped" in str(cut.counts)
    for name in ("tokens", "labels"):
        assert torch.equal(cut[0][name], whole[0][name][:-1])
        assert torch.equal(cut[1][name], whole[2][name])


def test_a_table_without_anything_to_learn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none of the 2 rows has anything to learn within sequence_length \(50\)"):
        prepared(tmp_path, ROWS[1:3], sequence_length=50)
    with pytest.raises(ValueError, match="at least 1"):
        prepared(tmp_path, ROWS, sequence_length=0)


def test_a_row_of_which_only_the_first_token_is_marked_is_dropped(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["Four"], 257, tmp_path / "tokenizer.json")
    rows = load_rows(path=write_rows(tmp_path / "rows.jsonl", [{"text": ""}, {"text": "a"}]), cache_dir=tmp_path / "c")
    samples = ChatSamples(prepare_chats(rows, tokenizer, None, sequence_length=8, directory=tmp_path / "made"))
    assert (samples.counts.samples, samples.counts.dropped) == (1, 1)
    assert samples[0]["labels"].tolist() == [tokenizer.end_of_text]


def test_the_file_is_made_once_and_another_length_makes_another(tmp_path: Path) -> None:
    path = prepared(tmp_path, ROWS)
    written = path.stat().st_mtime_ns
    assert prepared(tmp_path, ROWS) == path and path.stat().st_mtime_ns == written
    assert prepared(tmp_path, ROWS, sequence_length=199) != path
    assert prepared(tmp_path, ROWS[:1]) != path


def test_samples_travel_to_workers_by_their_path(tmp_path: Path) -> None:
    samples = ChatSamples(prepared(tmp_path, ROWS))
    packed = pickle.dumps(samples)
    assert len(packed) < 1000
    assert torch.equal(pickle.loads(packed)[1]["tokens"], samples[1]["tokens"])
    with pytest.raises(IndexError):
        samples[-1]


def test_a_batch_is_as_long_as_its_longest_sample_rounded_up(tmp_path: Path) -> None:
    samples = ChatSamples(prepared(tmp_path, ROWS))
    collate = partial(collate_padded, padding={"tokens": 7, "labels": -100, "loss_mask": 0}, multiple=8)
    short, long = samples[1], samples[0]
    batch = collate([short, long])
    length = len(long["tokens"])
    assert length % 8 and {name: tuple(x.shape) for name, x in batch.items()} == dict.fromkeys(
        ("tokens", "labels", "loss_mask"), (2, -(-length // 8) * 8)
    )
    for row, sample in enumerate((short, long)):
        kept = len(sample["tokens"])
        for name, fill in (("tokens", 7), ("labels", -100), ("loss_mask", 0)):
            assert torch.equal(batch[name][row, :kept], sample[name])
            assert (batch[name][row, kept:] == fill).all() and batch[name].dtype == sample[name].dtype
    assert collate([{name: x[:8] for name, x in long.items()}])["tokens"].shape == (1, 8)


def test_packed_rows_hold_each_sample_once_with_its_own_labels(tmp_path: Path) -> None:
    samples = ChatSamples(prepared(tmp_path, [*ROWS, *ROWS[3:] * 9]))
    rows = PackedChats(samples, 200, end_of_text=7, seed=2)
    assert samples.lengths.tolist() == [len(samples[i]["tokens"]) for i in range(len(samples))]
    assert 1 < len(rows) < len(samples) == 11
    found = []
    for row in (rows[i] for i in range(len(rows))):
        unused = row["segments"] == -1
        assert len(unused) == 200 and (row["tokens"][unused] == 7).all() and (row["labels"][unused] == -100).all()
        assert torch.equal(row["loss_mask"], (row["labels"] != -100).float())
        for number in range(int(row["segments"].max()) + 1):
            part = row["segments"] == number
            found.append([row[name][part].tolist() for name in ("tokens", "labels")])
    assert sorted(found) == sorted([samples[i][name].tolist() for name in ("tokens", "labels")] for i in range(11))
    assert "11 samples; 0 of them were cut to sequence_length; 2 rows were dropped" in str(rows)
    assert f"they lie in {len(rows)} rows of 200, " in str(rows)
    copy = pickle.loads(pickle.dumps(rows))
    assert torch.equal(copy[1]["labels"], rows[1]["labels"]) and len(copy) == len(rows)


def test_rows_come_from_one_kind_of_table(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ValueError, match="one of them must be given"):
        load_rows()
    with pytest.raises(ValueError, match="one of them must be given"):
        load_rows(path=tmp_path / "a.jsonl", dataset="name")
    (tmp_path / "b.txt").write_text("Hello")
    with pytest.raises(ValueError, match=r"kinds \.jsonl, \.txt"):
        load_rows(path=tmp_path, cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match=r"kinds \.txt"):
        load_rows(path=tmp_path / "b.txt", cache_dir=tmp_path / "cache")


def test_tables_of_parquet_are_read_too(tmp_path: Path) -> None:
    table = load_rows(path=write_rows(tmp_path / "rows.jsonl", ROWS), cache_dir=tmp_path / "cache")
    table.to_parquet(str(tmp_path / "rows.parquet"))
    again = load_rows(path=tmp_path / "rows.parquet", cache_dir=tmp_path / "cache")
    assert [row["messages"] for row in again] == [row["messages"] for row in table] == [r["messages"] for r in ROWS]
