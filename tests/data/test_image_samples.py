"""Samples with images: whole images, labels on answers alone, and what cannot be read is left out or refused."""

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from lightning_megatron.data import (
    ImageConfig,
    ImageSamples,
    PackedImageSamples,
    Tokenizer,
    image_samples,
    image_template,
    load_image,
    load_rows,
    prepare_image_chats,
    train_tokenizer,
)
from lightning_megatron.data.image_chats import IMAGE, conversation_of, encode_conversations
from lightning_megatron.data.image_samples import Unreadable
from lightning_megatron.data.images import UnreadableImage, write_image
from lightning_megatron.data.sources import plain_rows

FEATURES, SIZE = 4, 8
CONFIG = ImageConfig(size=SIZE)
# How many images each row has.
COUNTS = (1, 0, 2, 3, 1, 0)


def folder_with_rows(folder: Path) -> Path:
    """A table, and images of one colour each."""
    rows = []
    for number, count in enumerate(COUNTS):
        names = [f"{number}-{position}.png" for position in range(count)]
        for position, name in enumerate(names):
            write_image(np.full((SIZE, SIZE, 3), 40 * number + 10 * position, dtype=np.uint8), folder / name)
        # Of one row the last image is asked for after the first answer.
        later = int(number == 2)
        turns = [("human", "<image>" * (count - later) + "what?"), ("gpt", f"it is {number}")]
        turns += [("human", "<image>" * later + "more"), ("gpt", "no")]
        turns = turns[: 2 if number % 2 else 4]
        rows.append({"images": names, "conversations": [{"from": who, "value": said} for who, said in turns]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_with_rows(tmp_path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return train_tokenizer(["it is 1 what? no more"] * 9, 290, path, (IMAGE,))


def prepared(
    folder: Path, tokenizer: Tokenizer, length: int = 100, unreadable: Unreadable = "refuse", batch_size: int = 4
) -> ImageSamples:
    rows = load_rows(path=folder / "rows.jsonl", cache_dir=folder / "cache")
    path = prepare_image_chats(
        rows,
        tokenizer,
        image_template("plain", tokenizer, ""),
        images=folder,
        features_per_image=FEATURES,
        sequence_length=length,
        unreadable=unreadable,
        directory=folder / "cache",
        batch_size=batch_size,
    )
    return ImageSamples(path, rows, folder, CONFIG, unreadable)


def test_a_sample_is_what_its_row_says(folder: Path, tokenizer: Tokenizer) -> None:
    samples = prepared(folder, tokenizer)
    assert len(samples) == len(COUNTS)
    template, image = image_template("plain", tokenizer, ""), tokenizer.token_id(IMAGE)
    for index, line in enumerate((folder / "rows.jsonl").read_text().splitlines()):
        conversation = conversation_of(json.loads(line))
        [encoded] = encode_conversations([conversation], tokenizer, template, FEATURES)
        sample = samples[index]
        assert sample["tokens"].tolist() == encoded.ids[:-1]
        wanted = [i if m else -100 for i, m in zip(encoded.ids[1:], encoded.is_marked[1:], strict=True)]
        assert sample["labels"].tolist() == wanted
        assert torch.equal(sample["loss_mask"], (sample["labels"] != -100).float())
        assert int((sample["tokens"] == image).sum()) == COUNTS[index] * FEATURES
        expected = [load_image(folder / name, CONFIG) for name in conversation.images]
        assert sample["images"].shape == (COUNTS[index], 3, SIZE, SIZE)
        assert all(torch.equal(one, other) for one, other in zip(sample["images"], expected, strict=True))
        learnt = sample["labels"][sample["labels"] != -100]
        # What a text begins with has nothing that it could be predicted from.
        answer = f"it is {index}\n" if COUNTS[index] else f" is {index}\n"
        assert image not in learnt and tokenizer.decode(learnt.tolist()).startswith(answer)
    assert samples.lengths.tolist() == [len(samples[i]["tokens"]) for i in range(len(samples))]


@pytest.mark.parametrize("length", range(5, 34))
def test_at_every_length_an_image_is_complete_or_not_there(folder: Path, tokenizer: Tokenizer, length: int) -> None:
    whole, image = prepared(folder, tokenizer), tokenizer.token_id(IMAGE)
    samples = prepared(folder, tokenizer, length)
    kept = samples.counts
    assert kept.samples + kept.dropped == len(COUNTS) and kept.samples == len(samples)
    fits = [i for i in range(len(COUNTS)) if bool((whole[i]["labels"][:length] != -100).any())]
    assert len(samples) == len(fits)
    num_cut = 0
    for index, number in enumerate(fits):
        sample, all_of_it = samples[index], whole[number]
        size = len(sample["tokens"])
        assert size <= length and sample["labels"][-1] != -100
        for name in ("tokens", "labels", "loss_mask"):
            assert torch.equal(sample[name], all_of_it[name][:size])
        # Nothing that could be learnt within the length is lost.
        assert (sample["labels"] != -100).sum() == (all_of_it["labels"][:length] != -100).sum()
        assert (sample["tokens"] == image).sum() == FEATURES * len(sample["images"])
        num_cut += bool((all_of_it["labels"][size:] != -100).any())
    assert kept.cut == num_cut


def test_packed_rows_hold_each_sample_once_with_its_images(folder: Path, tokenizer: Tokenizer) -> None:
    samples, image = prepared(folder, tokenizer), tokenizer.token_id(IMAGE)
    packed = PackedImageSamples(samples, 48, end_of_text=tokenizer.end_of_text, seed=3)
    wanted = {tuple(samples[i]["tokens"].tolist()): samples[i] for i in range(len(samples))}
    assert len(packed) < len(samples) == len(wanted)
    for index in range(len(packed)):
        row, first = packed[index], 0
        assert len(row["tokens"]) == 48
        for number in range(int(row["segments"].max()) + 1):
            own = row["tokens"][row["segments"] == number]
            sample = wanted.pop(tuple(own.tolist()))
            count = int((own == image).sum()) // FEATURES
            assert torch.equal(row["images"][first : first + count], sample["images"])
            assert torch.equal(row["labels"][row["segments"] == number], sample["labels"])
            first += count
        assert first == len(row["images"])
    assert not wanted


def test_rows_whose_images_cannot_be_opened_are_named_and_left_out_or_refused(
    folder: Path, tokenizer: Tokenizer
) -> None:
    whole = prepared(folder, tokenizer)
    rest = [whole[i]["tokens"].tolist() for i in (0, 1, 4, 5)]
    (folder / "2-1.png").unlink()
    (folder / "3-0.png").write_text("no image")
    (folder / "cache" / whole.path.name).unlink()
    with pytest.raises(ValueError, match=r"images of 2 rows cannot be read: row 2, 2-1.png: .*; row 3, 3-0.png"):
        prepared(folder, tokenizer, batch_size=100)
    left = prepared(folder, tokenizer, unreadable="skip")
    assert [left[i]["tokens"].tolist() for i in range(len(left))] == rest
    assert [fault.partition(":")[0] for fault in left.counts.unreadable] == ["row 2, 2-1.png", "row 3, 3-0.png"]
    assert "4 samples" in str(left.counts) and "2 were left out" in str(left.counts) and "2-1.png" in str(left.counts)
    for name in ("0-0.png", "4-0.png"):
        (folder / name).unlink()
    (folder / "rows.jsonl").write_text((folder / "rows.jsonl").read_text().splitlines()[0] + "\n")
    with pytest.raises(ValueError, match="none of the 1 rows is left"):
        prepared(folder, tokenizer, unreadable="skip")


def test_a_sample_whose_image_breaks_later_counts_nothing_or_is_refused(
    folder: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    samples = prepared(folder, tokenizer, unreadable="skip")
    good = samples[2]
    data = (folder / "2-1.png").read_bytes()
    (folder / "2-1.png").write_bytes(data[:45])
    with caplog.at_level(logging.WARNING):
        broken = samples[2]
    assert "2-1.png" in caplog.text
    assert torch.equal(broken["tokens"], good["tokens"]) and broken["images"].shape == good["images"].shape
    assert not broken["loss_mask"].any() and good["loss_mask"].any() and not broken["images"].any()
    with pytest.raises(UnreadableImage, match=r"2-1\.png"):
        ImageSamples(samples.path, samples.rows, folder, CONFIG, "refuse")[2]


def test_a_row_that_is_no_conversation_is_reported_by_its_number(folder: Path, tokenizer: Tokenizer) -> None:
    lines = (folder / "rows.jsonl").read_text().splitlines()
    lines[3] = json.dumps({"images": ["only.png"], "conversations": json.loads(lines[3])["conversations"]})
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"row 3 of the table: its text has 3 <image>, and its images are 1"):
        prepared(folder, tokenizer)


def test_a_worker_reads_the_same_samples(folder: Path, tokenizer: Tokenizer) -> None:
    samples = prepared(folder, tokenizer)
    again: Any = pickle.loads(pickle.dumps(samples))
    assert all(torch.equal(again[3][name], value) for name, value in samples[3].items())
    with pytest.raises(IndexError):
        samples[len(samples)]


def test_a_table_is_tokenized_once(folder: Path, tokenizer: Tokenizer) -> None:
    samples = prepared(folder, tokenizer)
    written = samples.path.stat().st_mtime_ns
    assert prepared(folder, tokenizer).path.stat().st_mtime_ns == written
    assert prepared(folder, tokenizer, 50).path != samples.path


# --- images in tables -------------------------------------------------------------------------------------------------


def test_images_in_a_table_are_those_of_files(folder: Path, tokenizer: Tokenizer) -> None:
    wanted = prepared(folder, tokenizer)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    held = [{**row, "images": [read_in(folder / name) for name in row["images"]]} for row in rows]
    plain = datasets.Dataset.from_list(held)
    images = datasets.Sequence(datasets.Image())
    pictures = plain.cast(datasets.Features({**plain.features, "images": images}))
    plain.to_parquet(str(folder / "plain.parquet"))
    pictures.to_parquet(str(folder / "pictures.parquet"))
    pictures.save_to_disk(str(folder / "saved"))
    for source in (
        {"path": folder / "plain.parquet"},
        {"path": folder / "pictures.parquet"},
        {"dataset": str(folder / "saved")},
    ):
        samples = of_table(load_rows(**source, cache_dir=folder / "cache"), folder / "cache", folder, tokenizer)  # type: ignore[arg-type]
        assert len(samples) == len(wanted)
        again: Any = pickle.loads(pickle.dumps(samples))
        for i in range(len(wanted)):
            assert all(torch.equal(samples[i][name], value) for name, value in wanted[i].items())
            assert all(torch.equal(again[i][name], value) for name, value in wanted[i].items())


def test_one_image_of_a_row_and_images_in_parts_are_found_too(folder: Path, tokenizer: Tokenizer) -> None:
    one, other = read_in(folder / "0-0.png"), read_in(folder / "4-0.png")
    turns = [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "it is 1"}]
    table = datasets.Dataset.from_list(
        [{"image": one, "conversations": turns}, {"image": other, "conversations": turns}]
    )
    table = table.cast_column("image", datasets.Image())
    samples = of_table(table, folder / "cache", None, tokenizer)
    asked = [{"type": "image", "image": one, "text": None}, {"type": "text", "image": None, "text": "what?"}]
    shown = [{"type": "text", "image": None, "text": "it is 1"}]
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": shown}]
    parts = of_table(datasets.Dataset.from_list([{"messages": messages}]), folder / "cache", None, tokenizer)
    for found, name in ((samples[0], "0-0.png"), (samples[1], "4-0.png"), (parts[0], "0-0.png")):
        assert torch.equal(found["images"][0], load_image(folder / name, CONFIG))


def test_broken_images_of_a_table_are_named_and_left_out_or_refused(
    folder: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    turns = [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "it is 1"}]
    good = read_in(folder / "0-0.png")
    late = {"bytes": good["bytes"][:45], "path": "late.png"}
    images = [good, {"bytes": b"no image", "path": "bad.png"}, late]
    table = datasets.Dataset.from_list([{"image": image, "conversations": turns} for image in images])
    with pytest.raises(ValueError, match=r"images of 1 rows cannot be read: row 1, image 0 \(bad\.png\): "):
        of_table(table, folder / "cache", None, tokenizer)
    samples = of_table(table, folder / "cache", None, tokenizer, "skip")
    assert len(samples) == 2 and "row 1, image 0 (bad.png)" in str(samples.counts)
    assert samples[0]["loss_mask"].any() and not samples[1]["loss_mask"].any()
    assert "row 2, image 0 (late.png)" in caplog.text
    named = datasets.Dataset.from_list([{"image": {"bytes": None, "path": "0-0.png"}, "conversations": turns}])
    with pytest.raises(ValueError, match=r"images are files \(row 0, 0-0\.png\).*give image_folder"):
        of_table(named, folder / "cache", None, tokenizer)
    assert torch.equal(of_table(named, folder / "cache", folder, tokenizer)[0]["images"], samples[0]["images"])


def test_a_row_of_a_table_is_read_once_for_all_of_its_images(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    for row in rows:
        row["images"] = [{"bytes": (folder / name).read_bytes(), "path": None} for name in row["images"]]
    read: list[tuple[int, int]] = []

    def counted(table: Any, first: int, last: int) -> Any:
        read.append((first, last))
        return plain_rows(table, first, last)

    samples = samples_of(datasets.Dataset.from_list(rows), None, tokenizer, folder)
    monkeypatch.setattr(image_samples, "plain_rows", counted)
    for index, count in enumerate(COUNTS):
        read.clear()
        assert len(samples[index]["images"]) == count
        assert read == ([(index, index + 1)] if count else [])


def test_images_of_full_paths_need_no_folder(folder: Path, tokenizer: Tokenizer) -> None:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    expected = prepared(folder, tokenizer)
    for number, row in enumerate(rows):
        whole = [str(folder.resolve() / name) for name in row["images"]]
        # As `datasets` represents an image that is not in the table, or by the path alone.
        row["images"] = [{"bytes": None, "path": path} for path in whole] if number % 2 == 0 else whole
    for kind in (0, 1):
        some = [row for number, row in enumerate(rows) if number % 2 == kind]
        # A folder that is given besides changes nothing.
        for given in (None, folder / "elsewhere"):
            samples = samples_of(datasets.Dataset.from_list(some), given, tokenizer, folder)
            for index in range(len(some)):
                assert torch.equal(samples[index]["images"], expected[2 * index + kind]["images"])
    with pytest.raises(ValueError, match=r"images are files \(row 0, 0-0.png.*give\s+image_folder"):
        samples_of(datasets.Dataset.from_list([{**rows[0], "images": ["0-0.png"]}]), None, tokenizer, folder)


def samples_of(rows: Any, images: Path | None, tokenizer: Tokenizer, folder: Path) -> ImageSamples:
    path = prepare_image_chats(
        rows,
        tokenizer,
        image_template("plain", tokenizer, ""),
        images=images,
        features_per_image=FEATURES,
        sequence_length=100,
        unreadable="refuse",
        directory=folder / "cache",
    )
    return ImageSamples(path, rows, images, CONFIG, "refuse")


def test_rows_without_answers_are_not_blamed_on_images(folder: Path, tokenizer: Tokenizer) -> None:
    (folder / "rows.jsonl").write_text((folder / "rows.jsonl").read_text().splitlines()[0] + "\n")
    with pytest.raises(ValueError, match="none of the 1 rows is left: 1 have no answer within sequence_length") as info:
        prepared(folder, tokenizer, 3)
    assert "cannot be read" not in str(info.value) and "image_folder" not in str(info.value)


def read_in(path: Path) -> dict[str, Any]:
    return {"bytes": path.read_bytes(), "path": path.name}


def of_table(
    table: Any, cache: Path, folder: Path | None, tokenizer: Tokenizer, unreadable: Unreadable = "refuse"
) -> ImageSamples:
    path = prepare_image_chats(
        table,
        tokenizer,
        image_template("plain", tokenizer, ""),
        images=folder,
        features_per_image=FEATURES,
        sequence_length=100,
        unreadable=unreadable,
        directory=cache,
    )
    return ImageSamples(path, table, folder, CONFIG, unreadable)
