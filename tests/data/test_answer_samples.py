"""What is asked goes to the encoder and the answer to the decoder, whole, cut or dropped, and counted."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.data import (
    AnswerSamples,
    ChatTemplate,
    PackedAnswers,
    Tokenizer,
    load_rows,
    load_tokenizer,
    prepare_answers,
)
from tests.data.chats import HEADERS, TURNS, write_rows, write_tokenizer

PAIRS = [{"prompt": f"What is {i}?", "completion": f"It is {'x' * i}."} for i in range(6)]
START = 7


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), HEADERS))


def samples_of(
    folder: Path, tokenizer: Tokenizer, rows: list[dict[str, Any]], template: Any = None, **lengths: int
) -> AnswerSamples:
    table = load_rows(path=write_rows(folder / "rows.jsonl", rows), cache_dir=folder / "cache")
    lengths = {"encoder_length": 100, "decoder_length": 100} | lengths
    path = prepare_answers(table, tokenizer, template, directory=folder / "cache", **lengths)
    return AnswerSamples(path, start_token=START)


def texts(tokenizer: Tokenizer, samples: AnswerSamples) -> list[tuple[str, str]]:
    return [
        (tokenizer.decode(one["encoder_tokens"].tolist()), tokenizer.decode(one["labels"].tolist()))
        for one in (samples[i] for i in range(len(samples)))
    ]


END = "<|endoftext|>"


def test_a_prompt_is_read_and_its_completion_learnt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    samples = samples_of(tmp_path, tokenizer, PAIRS)
    wanted = [(row["prompt"] + END, row["completion"] + END) for row in PAIRS]
    assert texts(tokenizer, samples) == wanted
    assert str(samples.counts).startswith("6 samples; 0 answers were cut")
    for i in range(len(samples)):
        one = samples[i]
        # Each label is predicted from what is before it, the first from the start alone.
        assert one["decoder_tokens"].tolist() == [START, *one["labels"][:-1].tolist()]
        assert one["loss_mask"].tolist() == [1.0] * len(one["labels"])
        assert not one["encoder_segments"].any() and len(one["encoder_segments"]) == len(one["encoder_tokens"])
        assert not one["decoder_segments"].any() and len(one["decoder_segments"]) == len(one["labels"])
    again: Any = pickle.loads(pickle.dumps(samples))
    assert all(torch.equal(again[3][name], value) for name, value in samples[3].items())
    with pytest.raises(IndexError):
        samples[6]


def test_the_prompt_of_each_answer_is_all_before_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    template = ChatTemplate(HEADERS, names={})
    samples = samples_of(tmp_path, tokenizer, [{"messages": TURNS}], template)
    first = "<|begin|>user\n\nWhat is  two and two?<|end|>\n<|begin|>assistant\n\n"
    second = f"{first}Four, é 🙂.<|end|>\n<|begin|>user\n\nFour, é?<|end|>\n<|begin|>assistant\n\n"
    assert texts(tokenizer, samples) == [
        (first + END, "Four, é 🙂.<|end|>\n" + END),
        (second + END, "Yes.<|end|>\n" + END),
    ]


def test_long_answers_are_cut_and_long_questions_dropped(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [*PAIRS, {"prompt": "why " * 50, "completion": "so"}, {"prompt": "empty", "completion": ""}]
    whole = samples_of(tmp_path, tokenizer, PAIRS)
    lengths = [len(whole[i]["labels"]) for i in range(6)]
    most = sorted(lengths)[3]
    found = samples_of(tmp_path, tokenizer, rows, decoder_length=most, encoder_length=60)
    assert (found.counts.samples, found.counts.dropped) == (6, 2)
    assert found.counts.cut == sum(length > most for length in lengths) > 0
    for i in range(6):
        assert found[i]["labels"].tolist() == whole[i]["labels"][:most].tolist()


def test_packed_rows_hold_the_samples_and_keep_them_apart(tmp_path: Path, tokenizer: Tokenizer) -> None:
    samples = samples_of(tmp_path, tokenizer, PAIRS)
    packed = PackedAnswers(samples, encoder_length=60, decoder_length=40, padding=3, seed=1)
    found = []
    for row in (packed[i] for i in range(len(packed))):
        assert {name: len(value) for name, value in row.items()} == {
            **dict.fromkeys(("encoder_tokens", "encoder_segments"), 60),
            **dict.fromkeys(("decoder_tokens", "decoder_segments", "labels", "loss_mask"), 40),
        }
        for number in range(int(row["encoder_segments"].max()) + 1):
            read, shown = row["encoder_segments"] == number, row["decoder_segments"] == number
            parts = {name: row[name][read if name.startswith("encoder") else shown] for name in row}
            found.append([parts[name].tolist() for name in ("encoder_tokens", "decoder_tokens", "labels", "loss_mask")])
        assert int(row["decoder_segments"].max()) == int(row["encoder_segments"].max())
        assert set(row["encoder_tokens"][row["encoder_segments"] < 0].tolist()) <= {3}
        unused = row["decoder_segments"] < 0
        assert not row["loss_mask"][unused].any() and set(row["labels"][unused].tolist()) <= {-100}
    names = ("encoder_tokens", "decoder_tokens", "labels", "loss_mask")
    assert sorted(found) == sorted([samples[i][name].tolist() for name in names] for i in range(len(samples)))
    assert 1 < len(packed) < len(samples), "some rows hold several"
    assert f"they lie in {len(packed)} rows of 60 and 40, " in str(packed)


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        ([{"text": "alone"}], "a text alone asks nothing; give rows of 'prompt' and 'completion'"),
        ([{"messages": TURNS}], "no chat template"),
        ([{"prompt": "x" * 300, "completion": "y"}], r"none of the 1 rows has an answer .* sequence_length \(100\)"),
        ([{"prompt": "x", "completion": 5}], "must be text"),
    ],
)
def test_rows_without_an_answer_to_a_question_are_refused(
    tmp_path: Path, tokenizer: Tokenizer, rows: list[dict[str, Any]], shown: str
) -> None:
    with pytest.raises(ValueError, match=shown):
        samples_of(tmp_path, tokenizer, rows)
