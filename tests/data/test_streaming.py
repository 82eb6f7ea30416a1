"""Streamed samples: every document once a pass, the same batches whoever makes them, and places to go on from."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_megatron.data import BatchRamp, Tokenizer, train_tokenizer
from lightning_megatron.data import streaming as module
from lightning_megatron.data.sources import TextStream
from lightning_megatron.data.stream_options import StreamOptions
from lightning_megatron.data.streaming import DocumentAssigner, StreamReader
from lightning_megatron.data.token_packers import DocumentPacker, StretchPacker, TokenPacker
from tests.data.ramps import batches_of

LENGTH = 6
END = 0


class Texts:
    """A stream in memory: the state is the number of texts read."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.all = list(texts)
        self.position = 0

    def texts(self, number: int, state: Any) -> Iterator[str | None]:
        self.position = state or 0
        while self.position < len(self.all):
            self.position += 1
            yield self.all[self.position - 1]

    def state_dict(self) -> int:
        return self.position


TEXTS = [f"{'abcdefghij'[i % 10]}{'x' * (7 * i % 23)}{i}" for i in range(60)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer(TEXTS, 260, tmp_path_factory.mktemp("streaming") / "tokenizer.json")


def assigner(num_packers: int = 4, window: int = 8, texts: Sequence[str] = TEXTS, seed: int = 1) -> DocumentAssigner:
    return DocumentAssigner(Texts(texts), num_packers=num_packers, window=window, seed=seed)  # type: ignore[arg-type]


def reader(
    tokenizer: Tokenizer, packers: Sequence[int], kind: str, ramp: BatchRamp | None = None, window: int = 8
) -> StreamReader:
    make: Callable[[], TokenPacker] = partial(StretchPacker, LENGTH, StreamOptions())
    if kind == "rows":
        make = partial(DocumentPacker, LENGTH, end_of_text=tokenizer.end_of_text, long_documents="split", seed=2)
    ramp = ramp or BatchRamp.constant(4)
    return StreamReader(assigner(ramp.unit, window), tokenizer, make, packers, ramp)


def tokens(samples: Sequence[dict[str, torch.Tensor]]) -> list[list[int]]:
    return [sample["tokens"].tolist() for sample in samples]


def test_an_epoch_assigns_every_document_once_in_windows_that_are_shuffled() -> None:
    found = assigner()
    first = [next(found) for _ in range(60)]
    assert [one.number for one in first] == list(range(60))
    for start in range(0, 60, 8):
        window = [one.text for one in first[start : start + 8]]
        assert sorted(window) == sorted(TEXTS[start : start + 8])
    assert [one.text for one in first] != TEXTS
    second = [next(found) for _ in range(60)]
    assert sorted(one.text for one in second) == sorted(TEXTS)
    assert [one.text for one in second] != [one.text for one in first]


def test_a_window_of_one_keeps_the_order() -> None:
    found = assigner(window=1)
    assert [next(found).text for _ in range(120)] == TEXTS * 2


def test_packers_get_equally_many_characters() -> None:
    found, characters = assigner(), [0] * 4
    for _ in range(600):
        one = next(found)
        assert characters[one.packer] == min(characters)
        characters[one.packer] += len(one.text) + 1


def test_empty_documents_are_left_out_and_huge_ones_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_CHARACTERS", 4)
    texts: list[Any] = ["", "abcdefghij", None, "kl"]
    found = assigner(window=1, texts=texts)
    assert [next(found).text for _ in range(5)] == ["abcd", "efgh", "ij", "kl", "abcd"]


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_a_stream_without_a_document_is_refused_and_not_read_for_ever(texts: list[str]) -> None:
    with pytest.raises(ValueError, match="no document"):
        next(assigner(texts=texts))


@pytest.mark.parametrize("num_before", [0, 1, 7, 8, 9, 59, 60, 61, 75])
def test_dealing_goes_on_from_any_position(num_before: int) -> None:
    whole = assigner()
    for _ in range(num_before):
        next(whole)
    resumed = assigner()
    resumed.load_state_dict(whole.state_dict())
    assert resumed.state_dict() == whole.state_dict()
    assert [next(resumed) for _ in range(90)] == [next(whole) for _ in range(90)]


def test_stretches_hold_each_packers_documents_one_after_the_other(tokenizer: Tokenizer) -> None:
    [packer_1] = [
        np.concatenate([[*tokenizer.encode([one.text])[0], tokenizer.end_of_text] for one in found])
        for found in [[one for one in (lambda d: [next(d) for _ in range(100)])(assigner()) if one.packer == 1]]
    ]
    whole = reader(tokenizer, [1], "stretches")
    for number in range(9):
        [sample] = whole.batch()
        ids = packer_1[number * LENGTH : number * LENGTH + LENGTH + 1]
        assert sample["tokens"].tolist() == ids[:-1].tolist()
        assert sample["labels"].tolist() == ids[1:].tolist()


def test_rows_hold_each_packers_documents_whole(tokenizer: Tokenizer) -> None:
    packer = DocumentPacker(12, end_of_text=END, long_documents="split", seed=0)
    documents = [np.array([*range(1, 2 + i % 9), END]) for i in range(200)]
    for document in documents:
        packer.add(document)
    rows = [packer.take(0) for _ in range(packer.num_ready)]
    assert len(rows) > 32 and packer.num_ready == 0
    found = []
    for row in rows:
        for number in range(int(row["segments"].max()) + 1):
            part = row["segments"] == number
            found.append([*row["tokens"][part].tolist(), int(row["labels"][part][-1])])
    assert sum(len(document) for document in found) > 0.9 * 12 * len(rows)
    assert sorted(found) == sorted(document.tolist() for document in documents[: len(found)])


def test_documents_that_are_too_long_for_a_row_are_split_or_dropped() -> None:
    counts = {}
    for choice in ("split", "drop"):
        packer = DocumentPacker(4, end_of_text=END, long_documents=choice, seed=0)  # type: ignore[arg-type]
        for _ in range(100):
            packer.add(np.array([1, 2, 3, 4, 5, 6, END]))
            packer.add(np.array([7, 8, END]))
            packer.add(np.array([END]))
        rows = [packer.take(0) for _ in range(packer.num_ready)]
        counts[choice] = sum(int((row["tokens"] == 5).sum()) for row in rows)
        assert any(7 in row["tokens"] for row in rows)
    assert counts["drop"] == 0 < counts["split"]


RAMP = BatchRamp(first_size=4, last_size=12, step_size=4, ramp_samples=24)


@pytest.mark.parametrize("ramp", [None, RAMP])
@pytest.mark.parametrize("kind", ["stretches", "rows"])
def test_a_batch_is_the_same_whoever_makes_it(tokenizer: Tokenizer, kind: str, ramp: BatchRamp | None) -> None:
    whole = reader(tokenizer, range(4), kind, ramp)
    halves = [reader(tokenizer, packers, kind, ramp) for packers in ([0, 1], [2, 3])]
    sizes = []
    for _ in range(30):
        batch = tokens(whole.batch())
        assert tokens(halves[0].batch()) + tokens(halves[1].batch()) == batch
        sizes.append(len(batch))
    assert sizes == [size for _, size in batches_of(ramp or BatchRamp.constant(4), 10**4)][:30]
    assert len({tuple(row) for row in batch}) > 1


@pytest.mark.parametrize("kind", ["stretches", "rows"])
@pytest.mark.parametrize("num_before", [1, 5, 14])
def test_readers_of_other_packers_resume_from_all_states(tokenizer: Tokenizer, kind: str, num_before: int) -> None:
    whole = reader(tokenizer, range(4), kind)
    parts = [reader(tokenizer, packers, kind) for packers in ([0], [1, 2, 3])]
    for _ in range(num_before):
        whole.batch()
        for part in parts:
            part.batch()
    states = [part.state_dict() for part in parts]
    # They have read differently far: what one has had already comes again before another has it.
    others = [reader(tokenizer, packers, kind) for packers in ([0, 1], [2, 3], range(4))]
    for other in others:
        other.load_state_dicts(4 * num_before, states)
    for _ in range(25):
        batch = tokens(whole.batch())
        left, right, all_of_it = [tokens(other.batch()) for other in others]
        assert left + right == batch == all_of_it


def test_a_state_without_all_packers_is_refused(tokenizer: Tokenizer) -> None:
    half = reader(tokenizer, [0, 1], "stretches").state_dict()
    with pytest.raises(ValueError, match=r"has the packers \[0, 1\] of 4"):
        reader(tokenizer, [0, 1], "stretches").load_state_dicts(4, [half])
    more = reader(tokenizer, range(4), "stretches").state_dict()
    with pytest.raises(ValueError, match="was split over 4 packers, and this run has 2"):
        reader(tokenizer, range(2), "stretches", BatchRamp.constant(2)).load_state_dicts(4, [more])


# --- files ------------------------------------------------------------------------------------------------------------


def write_files(folder: Path) -> list[str | None]:
    """Text files, of which one is none, and rows; the texts in order."""
    (folder / "a.txt").write_text("one")
    (folder / "b.txt").write_bytes(b"\xff\xfe\xfa")
    (folder / "c.txt").write_text("two")
    rows = [f"row {i}" for i in range(9)]
    (folder / "d.jsonl").write_text("".join(f'{{"text": "{row}", "other": 1}}\n' for row in rows))
    return ["one", None, "two", *rows]


def test_files_stream_in_their_order_from_any_position(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = write_files(tmp_path)
    stream = TextStream(path=tmp_path)
    found = list(stream.texts(0, None))
    assert found == wanted
    assert any("b.txt" in record.message and "not UTF-8" in record.message for record in caplog.records)
    for position in range(1, len(wanted)):
        begun = stream.texts(0, None)
        assert [next(begun) for _ in range(position)] == wanted[:position]
        resumed = TextStream(path=tmp_path)
        assert list(resumed.texts(0, stream.state_dict())) == wanted[position:]
    assert sorted(map(str, stream.texts(1, None))) == sorted(map(str, wanted))


def test_a_stream_of_no_column_or_no_source_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path)
    with pytest.raises(ValueError, match=r"text_column \('body'\) is not a column of .*d\.jsonl.*text, other"):
        TextStream(path=tmp_path / "d.jsonl", text_column="body")
    with pytest.raises(ValueError, match="one of them must be given"):
        TextStream()
    with pytest.raises(ValueError, match="does not exist"):
        TextStream(path=tmp_path / "none")
