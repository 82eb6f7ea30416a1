"""A text that is cut has the tokens that it has whole, for tokenizers of which that holds."""

import itertools
import json
import random
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from lightning_megatron.data import tokenizer as tokenizer_module
from lightning_megatron.data.long_texts import _LETTERS, _MARKS, _PATTERNS, is_cuttable, parts_of
from lightning_megatron.data.tokenizer import END_OF_TEXT, FastTokenizer

ALPHABET = [
    "a",
    "Z",
    "é",
    "7",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    ".",
    "'s",
    "'ll",
    "…",
    "\u0301",
    "\u00a0",
    "日",
    "。",
    "，",  # noqa: RUF001
    "ก",
    "가",
    "ж",
    "क",
    "\u093e",
    "١",  # noqa: RUF001
    ",",
    ")",
    "'",
    "ab",
    "c ",
]


def text_of(seed: int, length: int = 4000) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice(ALPHABET) for _ in range(length))


def engine(pre_tokenizer: Any, normalizer: Any = None) -> Any:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        made.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator([text_of(seed) for seed in range(20)], trainer)
    return made


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
CUTTABLE = {
    "GPT-2": (BYTE_LEVEL, None),
    "Llama 3": (split(_PATTERNS[0]), None),
    "Qwen 2": (split(_PATTERNS[1]), normalizers.NFC()),
}
OTHERS = {
    "a space in front": (pre_tokenizers.ByteLevel(add_prefix_space=True), None),
    "no words": (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), None),
    "another pattern": (split(r"\w+\s*|\W+"), None),
    "metaspace": (pre_tokenizers.Metaspace(), None),
    "none": (None, None),
    "a normalizer": (BYTE_LEVEL, normalizers.Replace("a b", "b")),
}


@pytest.mark.parametrize("name", CUTTABLE)
def test_parts_have_the_tokens_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(*CUTTABLE[name])
    assert is_cuttable(json.loads(made.to_str()))
    monkeypatch.setattr(tokenizer_module, "PART_CHARACTERS", 10)
    monkeypatch.setattr(parts_of, "__defaults__", (10,))
    tokenizer = FastTokenizer(made, END_OF_TEXT)
    for seed in range(100, 140):
        text = text_of(seed)
        assert len(list(parts_of(text))) > 90
        whole = made.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode([text, "short", text]) == [whole, tokenizer.encode(["short"])[0], whole]


def test_a_cut_anywhere_else_would_be_seen() -> None:
    made = engine(BYTE_LEVEL)
    text = text_of(1)
    halves = ((text[:i], text[i:]) for i in range(1, 300))
    whole = made.encode(text, add_special_tokens=False).ids
    cut = ([i for part in both for i in made.encode(part, add_special_tokens=False).ids] for both in halves)
    assert sum(ids != whole for ids in cut) > 20


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_given_the_text_whole(name: str) -> None:
    pre_tokenizer, normalizer = OTHERS[name]
    made = tokenizers.Tokenizer(models.BPE())
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        made.normalizer = normalizer
    assert not is_cuttable(json.loads(made.to_str()))


def test_ordinary_tokens_that_were_added_forbid_a_cut() -> None:
    made = engine(BYTE_LEVEL)
    made.add_tokens(["b a"])
    assert not is_cuttable(json.loads(made.to_str()))


def test_parts_are_the_text_and_end_before_a_space_or_a_mark_after_a_letter_or_a_digit() -> None:
    text = "one two, three\nfour 5 six"
    assert list(parts_of(text, 3)) == ["one", " two", ", three", "\nfour", " 5 six"]
    assert list(parts_of("去年今日此门中。人面桃花相映红。", 3)) == ["去年今日此门中", "。人面桃花相映红", "。"]
    for size, seed in itertools.product((1, 5, 100), range(5)):
        assert "".join(parts_of(text_of(seed), size)) == text_of(seed)
    assert list(parts_of("it's - - ('no')", 1)) == ["it's", " - - ('no')"], "no other place is safe"


def test_letters_have_always_been_letters_and_marks_join_nothing() -> None:
    letters = [chr(i) for i in range(0x110000) if re.fullmatch(f"[{_LETTERS}]", chr(i))]
    assert len(letters) > 30_000
    # The oldest tables that there are: engines of regular expressions have newer ones.
    assert {unicodedata.ucd_3_2_0.category(letter)[0] for letter in letters} == {"L"}
    for mark in (*_MARKS, " ", "\n"):
        assert unicodedata.category(mark)[0] not in "LNM" and unicodedata.combining(mark) == 0
        assert all(unicodedata.is_normalized("NFC", letter + mark) for letter in letters)


@pytest.mark.parametrize("script", ["日本語。中文、", "ภาษาไทย ไม่มี ", "русский текст, ", "한국어 글. "])
@pytest.mark.parametrize("name", CUTTABLE)
def test_texts_without_ascii_words_are_cut(script: str, name: str) -> None:
    made = engine(*CUTTABLE[name])
    text = script * 40
    parts = list(parts_of(text, 20))
    assert len(parts) > 5 and "".join(parts) == text
    encoded = [i for part in parts for i in made.encode(part, add_special_tokens=False).ids]
    assert encoded == made.encode(text, add_special_tokens=False).ids


def test_an_empty_sequence_of_steps_is_no_step() -> None:
    settings = json.loads(engine(BYTE_LEVEL).to_str())
    assert is_cuttable({**settings, "normalizer": {"type": "Sequence", "normalizers": []}})
    assert not is_cuttable({**settings, "pre_tokenizer": {"type": "Sequence", "pretokenizers": []}})


def test_a_huge_text_is_read_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = FastTokenizer(engine(BYTE_LEVEL), END_OF_TEXT)
    seen: list[int] = []
    encode = FastTokenizer._encode
    monkeypatch.setattr(
        FastTokenizer, "_encode", lambda self, texts: seen.append(sum(map(len, texts))) or encode(self, texts)
    )
    text = "abc def\n" * 300_000
    assert len(tokenizer.encode([text])[0]) > 300_000
    assert max(seen) < 1 << 21 and sum(seen) == len(text)
