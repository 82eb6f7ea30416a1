"""The tokenizer gives back every byte, and is written whole or not at all."""

import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data import Tokenizer, load_tokenizer, train_tokenizer

TEXTS = ["the cat sat on the mat. " * 20, "def f(x):\n    return x + 1\n" * 20, "Äpfel für 3 € zählen\n" * 5]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer(TEXTS, 300, tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_comes_back_exactly(tokenizer: Tokenizer, text: str) -> None:
    (ids,) = tokenizer.encode([text])
    assert tokenizer.decode(ids) == text


def test_every_byte_has_a_token_though_training_never_saw_it(tokenizer: Tokenizer) -> None:
    text = "".join(map(chr, range(256))) + "語🙂" + " \t\n\r\x00  "
    (ids,) = tokenizer.encode([text])
    assert tokenizer.decode(ids) == text
    assert max(ids) < tokenizer.vocab_size == 300


def test_training_shortens_what_it_has_seen(tokenizer: Tokenizer) -> None:
    (seen,), (unseen,) = tokenizer.encode(["the cat sat"]), tokenizer.encode(["qzx vkw jyq"])
    assert len(seen) < len(unseen) == 11


def test_a_document_that_spells_out_the_end_of_text_does_not_end(tokenizer: Tokenizer) -> None:
    (ids,) = tokenizer.encode(["a<|endoftext|>b"])
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"
    assert tokenizer.decode([tokenizer.end_of_text]) == "<|endoftext|>"


def test_a_loaded_tokenizer_encodes_like_the_trained_one(tmp_path: Path) -> None:
    trained = train_tokenizer(TEXTS, 300, tmp_path / "deep" / "tokenizer.json")
    for path in (tmp_path / "deep", tmp_path / "deep" / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert loaded.encode(TEXTS) == trained.encode(TEXTS)
        assert (loaded.vocab_size, loaded.end_of_text) == (trained.vocab_size, trained.end_of_text)
        assert loaded.fingerprint == trained.fingerprint
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["tokenizer.json"]


def test_the_same_texts_train_the_same_tokenizer_and_others_another(tmp_path: Path) -> None:
    words = random.Random(1).choices(["alpha", "beta", "gamma", "delta"], k=500)
    first = train_tokenizer([" ".join(words)], 280, tmp_path / "1.json")
    again = train_tokenizer([" ".join(words)], 280, tmp_path / "2.json")
    other = train_tokenizer(TEXTS, 280, tmp_path / "3.json")
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_the_truncation_and_padding_saved_in_a_file_are_not_applied(tmp_path: Path) -> None:
    trained = train_tokenizer(TEXTS, 300, tmp_path / "tokenizer.json")
    expected = trained.encode(["a", TEXTS[0]])
    trained.engine.enable_truncation(5)
    trained.engine.enable_padding(length=8)
    (tmp_path / "tokenizer.json").write_text(trained.engine.to_str())
    assert trained.encode(["a", TEXTS[0]]) != expected
    assert load_tokenizer(tmp_path).encode(["a", TEXTS[0]]) == expected


def test_the_end_of_text_is_what_the_config_next_to_the_file_says(tmp_path: Path) -> None:
    trained = train_tokenizer(TEXTS, 300, tmp_path / "tokenizer.json")
    (end,) = trained.encode(["\n"])[0]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "Ċ"}}))
    assert load_tokenizer(tmp_path).end_of_text == end != trained.end_of_text
    assert load_tokenizer(tmp_path, "<|endoftext|>").end_of_text == trained.end_of_text
    with pytest.raises(ValueError, match=r"end_of_text \('<stop>'\) is not in the tokenizer's vocabulary"):
        load_tokenizer(tmp_path, "<stop>")


def test_a_vocabulary_without_room_for_the_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"vocab_size \(256\) must be at least 257"):
        train_tokenizer(TEXTS, 256, tmp_path / "tokenizer.json")
    assert train_tokenizer(TEXTS, 257, tmp_path / "tokenizer.json").vocab_size == 257


def test_a_tokenizer_that_is_missing_or_broken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"does not exist; give a tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_an_absent_package_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"'tokenizers': pip install 'lightning_megatron\[data\]'"):
        train_tokenizer(TEXTS, 300, tmp_path / "tokenizer.json")


def test_a_tokenizer_learns_from_the_texts_that_there_are(tmp_path: Path) -> None:
    with_none = train_tokenizer(["the cat", None, "the cat"], 262, tmp_path / "a.json")
    assert with_none.fingerprint == train_tokenizer(["the cat"] * 2, 262, tmp_path / "b.json").fingerprint
    assert with_none.vocab_size > 257
