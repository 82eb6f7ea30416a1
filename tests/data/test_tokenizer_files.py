"""Tokenizers of every kind encode as the library that they come from, and are distinguished by their files."""

import base64
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tiktoken
import transformers

from lightning_megatron.data import FastTokenizer, Tokenizer, WordStarts, load_tokenizer, train_tokenizer
from lightning_megatron.data.null_tokenizer import NullTokenizer
from lightning_megatron.data.sentencepiece_tokenizer import SentencePieceTokenizer
from lightning_megatron.data.tiktoken_tokenizer import PATTERN, TiktokenTokenizer
from lightning_megatron.data.transformers_tokenizer import SlowTokenizer

TEXTS = [
    "the cat sat on the mat and the hat. " * 20,
    "def f(x):\n    return x + 1\n" * 20,
    "Äpfel für 3 € zählen\n" * 5,
]
UNSEEN = "qzx 語🙂\t\n\r \x00 </s> <|endoftext|> 12345"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of each kind, each in a directory of its own."""
    folder = tmp_path_factory.mktemp("tokenizers")
    train_tokenizer(TEXTS, 300, folder / "fast" / "tokenizer.json")
    (folder / "text.txt").write_text("\n".join(TEXTS))
    (folder / "pieces").mkdir()
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "pieces" / "spiece"),
        vocab_size=330,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    write_ranks(folder / "ranks" / "small.tiktoken")
    transformers.ByT5Tokenizer(extra_ids=3).save_pretrained(folder / "slow")
    return folder


def write_ranks(file: Path, first: int = 0) -> dict[bytes, int]:
    """A file of ranks: the bytes, and a few merges in the order in which they are made."""
    file.parent.mkdir()
    pieces = [bytes([i]) for i in range(256)]
    pieces += [b" t", b"he", b" the", b"at", b" c", b" cat", b"12", b"123", "für".encode()]
    ranks = {piece: first + i for i, piece in enumerate(pieces)}
    file.write_text("".join(f"{base64.b64encode(piece).decode()} {i}\n" for piece, i in ranks.items()))
    return ranks


def library_ids(folder: Path, kind: str, text: str) -> list[int]:
    """What the library itself makes of a text in which nothing special is spelled out."""
    if kind == "pieces":
        return list(sentencepiece.SentencePieceProcessor(model_file=str(folder / kind / "spiece.model")).encode(text))
    if kind == "slow":
        return list(transformers.ByT5Tokenizer.from_pretrained(folder / kind)(text, add_special_tokens=False).input_ids)
    lines = (folder / kind / "small.tiktoken").read_text().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, lines)}
    engine = tiktoken.Encoding("small", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    return list(engine.encode_ordinary(text))


@pytest.mark.parametrize(
    ("kind", "of_class", "vocab_size", "end"),
    [
        ("pieces", SentencePieceTokenizer, None, "</s>"),
        ("ranks", TiktokenTokenizer, 266, "<|endoftext|>"),
        ("slow", SlowTokenizer, 262, "</s>"),
        ("fast", FastTokenizer, 300, "<|endoftext|>"),
    ],
)
def test_a_directory_leads_to_its_kind_which_encodes_as_the_library(
    folder: Path, kind: str, of_class: type[Tokenizer], vocab_size: int | None, end: str
) -> None:
    tokenizer = load_tokenizer(folder / kind)
    assert type(tokenizer) is of_class
    assert tokenizer.end_of_text == tokenizer.token_id(end)
    assert tokenizer.end_of_text in tokenizer.special_ids()
    assert vocab_size is None or tokenizer.vocab_size == vocab_size
    assert max(tokenizer.pieces()) == tokenizer.vocab_size - 1
    assert tokenizer.pieces()[tokenizer.end_of_text] == end
    assert tokenizer.token_id("no such token") is None
    if kind != "fast":
        assert tokenizer.encode(TEXTS) == [library_ids(folder, kind, text) for text in TEXTS]
    for ids in tokenizer.encode([*TEXTS, UNSEEN]):
        assert not set(ids) & set(tokenizer.special_ids()), "what is spelled out is text"
        assert max(ids) < tokenizer.vocab_size
    assert tokenizer.encode([""]) == [[]]
    assert tokenizer.decode([*tokenizer.encode(["the cat"])[0], tokenizer.end_of_text]).endswith(f"cat{end}")
    # As a worker gets it.
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode([UNSEEN]) == tokenizer.encode([UNSEEN])
    assert copy.fingerprint == tokenizer.fingerprint == load_tokenizer(folder / kind).fingerprint


@pytest.mark.parametrize("kind", ["ranks", "slow"])
def test_every_text_comes_back(folder: Path, kind: str) -> None:
    tokenizer = load_tokenizer(folder / kind)
    for text in (*TEXTS, UNSEEN):
        assert tokenizer.decode(tokenizer.encode([text])[0]) == text


def test_words_start_where_pieces_say(folder: Path) -> None:
    for kind, text in (("pieces", "the cat sat on the mat"), ("ranks", "the cat für the")):
        tokenizer = load_tokenizer(folder / kind)
        (ids,) = tokenizer.encode([text])
        assert WordStarts(tokenizer)(np.array(ids)).sum() == len(text.split())


def test_numbers_are_tokens_of_the_null_tokenizer() -> None:
    tokenizer = load_tokenizer("null:50000")
    assert isinstance(tokenizer, NullTokenizer)
    assert tokenizer.encode(["12 7 49999", ""]) == [[12, 7, 49999], []]
    assert (tokenizer.end_of_text, tokenizer.vocab_size) == (50000, 50001)
    assert tokenizer.decode([12, 7, 50000]) == "12 7 <|endoftext|>"
    assert tokenizer.token_id("7") == 7
    assert tokenizer.fingerprint != load_tokenizer("null:50001").fingerprint
    for text, shown in (("1 x", "word 1 \\('x'\\)"), ("50000", "word 0"), ("-1", "word 0"), ("²", "word 0")):
        with pytest.raises(ValueError, match=f"{shown}.*must be a number from 0 to 49999"):
            tokenizer.encode([text])


def test_pattern_and_special_tokens_are_next_to_the_ranks(tmp_path: Path) -> None:
    file = tmp_path / "a" / "tokenizer.model"
    ranks = write_ranks(file)
    plain = load_tokenizer(file)
    assert isinstance(plain, TiktokenTokenizer), "a file of ranks, whatever its name"
    special = {"<|begin_of_text|>": 300, "<|end_of_text|>": 301}
    Path(f"{file}.json").write_text(json.dumps({"pattern": r"\d|\D+", "special_tokens": special}))
    shown = load_tokenizer(file)
    assert (shown.end_of_text, shown.vocab_size) == (301, 302)
    assert shown.encode(["123"]) == [[ranks[b"1"], ranks[b"2"], ranks[b"3"]]]
    assert plain.encode(["123"]) == [[ranks[b"123"]]]
    assert load_tokenizer(file, "<|begin_of_text|>").end_of_text == 300
    Path(f"{file}.json").write_text('{"patern": ""}')
    with pytest.raises(ValueError, match="has patern; it may have pattern and special_tokens"):
        load_tokenizer(file)


def test_a_directory_without_tokenizer_json_is_read_as_transformers_reads_it(folder: Path, tmp_path: Path) -> None:
    # T5 has its sentinels in the configuration alone: the model of sentencepiece does not know them.
    (tmp_path / "spiece.model").write_bytes((folder / "pieces" / "spiece.model").read_bytes())
    shown = {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "extra_ids": 5}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(shown))
    tokenizer = load_tokenizer(tmp_path)
    expected: Any = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(tokenizer, FastTokenizer)
    assert tokenizer.token_id("<extra_id_4>") is not None
    assert tokenizer.encode(TEXTS) == expected(TEXTS, add_special_tokens=False).input_ids
    assert tokenizer.end_of_text == expected.eos_token_id


def test_the_end_of_text_may_be_named_and_must_be_there(folder: Path) -> None:
    for kind, other in (("pieces", "<s>"), ("slow", "<pad>")):
        assert load_tokenizer(folder / kind, other).end_of_text == load_tokenizer(folder / kind).token_id(other)
        assert load_tokenizer(folder / kind, other).fingerprint != load_tokenizer(folder / kind).fingerprint
    for kind in ("pieces", "slow", "ranks", "fast"):
        with pytest.raises(ValueError, match=r"end_of_text \('<stop>'\) is not in the tokenizer's vocabulary"):
            load_tokenizer(folder / kind, "<stop>")


def test_only_a_tokenizer_json_has_offsets(folder: Path) -> None:
    [(ids, spans)] = load_tokenizer(folder / "fast").encode_spelled(["a<|endoftext|>"])
    assert spans == [(0, 1), (1, 14)] and len(ids) == 2
    for path in (folder / "pieces", folder / "ranks", folder / "slow", "null:10"):
        with pytest.raises(ValueError, match=r"take the tokenizer\.json"):
            load_tokenizer(path).encode_spelled(["a"])


def test_what_is_no_tokenizer_is_refused_by_what_is_wrong(tmp_path: Path) -> None:
    write_ranks(tmp_path / "cut" / "a.tiktoken")
    cut = tmp_path / "cut" / "a.tiktoken"
    cut.write_text("".join(cut.read_text().splitlines(keepends=True)[:100]))
    (tmp_path / "b.tiktoken").write_text("no ranks\n")
    (tmp_path / "c.model").write_bytes(b"\x00\x01")
    (tmp_path / "two").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "tokenizer_config.json").write_text('{"tokenizer_class": "NoSuchTokenizer"}')
    for name in ("a.model", "b.model"):
        (tmp_path / "two" / name).write_bytes(b"")
    for path, shown in (
        (tmp_path / "none", "does not exist; give a tokenizer.json"),
        (cut, "no token for 156 of the 256 bytes, the first 100"),
        (tmp_path / "b.tiktoken", "is not a file of ranks"),
        (tmp_path / "c.model", "is not a model of sentencepiece"),
        (tmp_path / "two", "has several: a.model, b.model; give the path of one"),
        (tmp_path / "odd", "cannot be made by transformers"),
        ("null:many", "must have its size as a whole number"),
        ("null:0", "give it at least 1"),
        ("tiktoken:no_such", "tiktoken knows .*cl100k_base"),
    ):
        with pytest.raises(ValueError, match=shown):
            load_tokenizer(path)
    with pytest.raises(ValueError, match="leave it out"):
        load_tokenizer("null:5", "<stop>")


@pytest.mark.parametrize(
    ("package", "kind", "extra"),
    [("sentencepiece", "pieces", "data"), ("tiktoken", "ranks", "data"), ("transformers", "slow", "hf")],
)
def test_an_absent_package_is_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, folder: Path, package: str, kind: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"'{package}': pip install 'lightning_megatron\[{extra}\]'"):
        load_tokenizer(folder / kind)
