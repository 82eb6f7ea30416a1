"""The interface of all tokenizers, and the one door to `tokenizers`.

Second on the path from text to batches, between documents and packing. A tokenizer that is trained here is
byte-level byte-pair encoding: its alphabet is the 256 bytes, so every text comes back exactly as it was. Other kinds
are files of their own; `tokenizer_files.py` chooses among them.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_megatron.data.atomic_file import atomic_write
from lightning_megatron.data.long_texts import PART_CHARACTERS, is_cuttable, parts_of
from lightning_megatron.data.optional_packages import optional_package
from lightning_megatron.text_files import read_json_table, read_text

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
"""The special token that ends a document, in a tokenizer trained here."""

KNOWN_ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
"""Names of the end of text in well-known tokenizers, tried in this order."""

# Longest tokenizer.json; those of models have up to some 40 MB.
_MOST_BYTES = 2**29

SMALLEST_VOCABULARY = 257
"""Fewest tokens of a trained tokenizer: the 256 bytes and the end of text."""


class Tokenizer(ABC):
    """Token ids of texts, texts of token ids, and the ids that have a role.

    A special token that is spelled out in a text is ordinary text: no document can end itself.
    """

    end_of_text: int
    """The token that ends a document."""

    vocab_size: int
    """One more than the greatest id: ids may have gaps, and an embedding needs a row up to it."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A short text that differs between any two tokenizers that encode differently."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, with no special token added."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of the token ids, special tokens spelled out."""

    def token_id(self, name: str) -> int | None:
        """The id of the token that is written so, or None."""
        return next((i for i, piece in self.pieces().items() if piece == name), None)

    @abstractmethod
    def pieces(self) -> dict[int, str]:
        """Spelling of each token in the vocabulary."""

    @abstractmethod
    def special_ids(self) -> list[int]:
        """The ids of special tokens, in order."""

    @property
    def opening(self) -> list[int]:
        """The special token, if any, that the tokenizer puts in front of a text."""
        return []

    def encode_spelled(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """The token ids of each text, and the characters [first, last + 1) that each token stands for.

        Special tokens that are spelled out count as such: for texts that a template made. None is added. Raises
        ValueError where a tokenizer has no offsets.
        """
        raise ValueError(
            f"a {type(self).__name__} does not tell which characters a token stands for, as conversations need;"
            " take the tokenizer.json of the same model"
        )

    def with_special_token(self, name: str) -> "Tokenizer":
        """This tokenizer, with one special token more where it does not have that one."""
        if self.token_id(name) is not None:
            return self
        raise ValueError(
            f"a {type(self).__name__} takes no new token, and it has none that is written {name!r}; take the"
            " tokenizer.json of the same model"
        )


class FastTokenizer(Tokenizer):
    """A tokenizer of the package `tokenizers`, as a tokenizer.json describes it."""

    def __init__(self, engine: "tokenizers.Tokenizer", end_of_text: str) -> None:
        ids = engine.get_vocab(with_added_tokens=True)
        # A tokenizer saved for fine-tuning often brings its own truncation and padding along.
        engine.no_truncation()
        engine.no_padding()
        engine.encode_special_tokens = True
        self.engine = engine
        self.end_of_text = named_end_of_text(end_of_text, ids)
        self.vocab_size = max(ids.values()) + 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A setting that `tokenizers` does not pickle.
        self.engine.encode_special_tokens = True

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.end_of_text} {self.engine.to_str()}".encode()).hexdigest()[:16]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        is_long = [len(text) > PART_CHARACTERS and self._is_cuttable for text in texts]
        short = iter(self._encode([text for text, long in zip(texts, is_long, strict=True) if not long]))
        # Part by part, which bounds the memory of a long text.
        return [
            [i for part in parts_of(text) for i in self._encode([part])[0]] if long else next(short)
            for text, long in zip(texts, is_long, strict=True)
        ]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.engine.encode_batch_fast(texts, add_special_tokens=False)]

    @cached_property
    def _is_cuttable(self) -> bool:
        return is_cuttable(json.loads(self.engine.to_str()))

    def encode_spelled(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        encodings = self._spelled_engine.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def token_id(self, name: str) -> int | None:
        found: int | None = self.engine.token_to_id(name)
        return found

    def with_special_token(self, name: str) -> Tokenizer:
        if self.token_id(name) is not None:
            return self
        engine = type(self.engine).from_str(self.engine.to_str())
        engine.add_special_tokens([name])
        return FastTokenizer(engine, self.pieces()[self.end_of_text])

    def pieces(self) -> dict[int, str]:
        return {i: piece for piece, i in self.engine.get_vocab(with_added_tokens=True).items()}

    def special_ids(self) -> list[int]:
        return sorted(i for i, token in self.engine.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def opening(self) -> list[int]:
        ids = self.engine.encode("", add_special_tokens=True).ids
        return [i for i in ids[:1] if i != self.end_of_text]

    @cached_property
    def _spelled_engine(self) -> "tokenizers.Tokenizer":
        engine = type(self.engine).from_str(self.engine.to_str())
        engine.encode_special_tokens = False
        # It would remove spaces from the offsets of tokens.
        engine.post_processor = None
        return engine

    def decode(self, ids: Iterable[int]) -> str:
        return self.engine.decode([int(i) for i in ids], skip_special_tokens=False)


def train_tokenizer(
    texts: Iterable[str | None], vocab_size: int, path: str | Path, special_tokens: Sequence[str] = ()
) -> FastTokenizer:
    """A byte-level tokenizer of at most `vocab_size` ids, learnt from all texts but None, written to `path`.

    `special_tokens` are added to the end of text, within `vocab_size`. The vocabulary is smaller where the texts do not
    hold that many pairs. Source: Sennrich et al. 2016, section 3.2, over the bytes as in Radford et al. 2019,
    section 2.2.
    """
    smallest = SMALLEST_VOCABULARY + len(special_tokens)
    if vocab_size < smallest:
        others = f" and {len(special_tokens)} special tokens" if special_tokens else ""
        raise ValueError(
            f"vocab_size ({vocab_size}) must be at least {smallest}: the 256 bytes, the end of text{others}"
        )
    tokenizers = optional_package("tokenizers", "turning text into tokens")
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *special_tokens],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator((text for text in texts if text is not None), trainer)
    with atomic_write(Path(path)) as temporary:
        temporary.write_text(engine.to_str(), encoding="utf-8")
    return FastTokenizer(engine, END_OF_TEXT)


def read_fast_tokenizer(file: Path, end_of_text: str | None = None) -> FastTokenizer:
    """The tokenizer of a tokenizer.json; the end of text is as in `tokenizer_files.load_tokenizer`."""
    tokenizers = optional_package("tokenizers", "turning text into tokens")
    try:
        engine = tokenizers.Tokenizer.from_str(read_text(file, _MOST_BYTES))
    except Exception as error:  # `tokenizers` raises nothing narrower for a file that it cannot parse
        raise ValueError(f"tokenizer ({str(file)!r}) is not a tokenizer.json: {error}; give one") from error
    name = end_of_text if end_of_text is not None else configured_end_of_text(file.parent)
    return FastTokenizer(engine, name if name is not None else known_end_of_text(engine.get_vocab(), str(file)))


def named_end_of_text(name: str, ids: Mapping[str, int]) -> int:
    """The id of the end of text. Raises ValueError where the vocabulary does not have it."""
    if name not in ids:
        raise ValueError(
            f"end_of_text ({name!r}) is not in the tokenizer's vocabulary of {len(ids)};"
            " name the token that ends a document there"
        )
    return ids[name]


def known_end_of_text(names: Container[str], source: str) -> str:
    """The first well-known name of the end of text that is among `names`."""
    for name in KNOWN_ENDS_OF_TEXT:
        if name in names:
            return name
    raise ValueError(
        f"tokenizer ({source!r}) has no token that is known to end a document"
        f" (looked for {' '.join(KNOWN_ENDS_OF_TEXT)}); name it by end_of_text"
    )


def configured_end_of_text(directory: Path) -> str | None:
    """The `eos_token` of the directory's `tokenizer_config.json`, if there is one."""
    config = directory / "tokenizer_config.json"
    if not config.is_file():
        return None
    token = read_json_table(config).get("eos_token")
    name = token.get("content") if isinstance(token, dict) else token
    return None if name is None else str(name)
