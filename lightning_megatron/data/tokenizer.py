"""Text to token ids and back: the one door to `tokenizers`.

Second on the path from text to batches, between documents and packing. A tokenizer that is trained here is
byte-level byte-pair encoding: its alphabet is the 256 bytes, so every text comes back exactly as it was.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from lightning_megatron.data.atomic_file import written_whole

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
"""The special token that ends a document, in a tokenizer trained here."""

KNOWN_ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
"""What well-known tokenizers call the token of that role, tried in this order."""

SMALLEST_VOCABULARY = 257
"""The 256 bytes and the end of text."""


class Tokenizer:
    """Token ids of texts, texts of token ids, and the ids that have a role.

    A special token that is spelled out in a text is ordinary text: no document can end itself.
    """

    def __init__(self, engine: "tokenizers.Tokenizer", end_of_text: str) -> None:
        ids = engine.get_vocab(with_added_tokens=True)
        if end_of_text not in ids:
            raise ValueError(
                f"end_of_text ({end_of_text!r}) is not in the tokenizer's vocabulary of {len(ids)};"
                " name the token that ends a document there"
            )
        # A tokenizer saved for fine-tuning often brings its own truncation and padding along.
        engine.no_truncation()
        engine.no_padding()
        engine.encode_special_tokens = True
        self.engine = engine
        self.end_of_text: int = ids[end_of_text]
        # Ids may have gaps, and an embedding needs a row up to the greatest.
        self.vocab_size: int = max(ids.values()) + 1

    @property
    def fingerprint(self) -> str:
        """A short text that differs between any two tokenizers that encode differently."""
        return hashlib.sha256(f"{self.end_of_text} {self.engine.to_str()}".encode()).hexdigest()[:16]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, with no special token added."""
        return [encoding.ids for encoding in self.engine.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_spelled(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """The token ids of each text, and the characters [first, last + 1) that each token stands for.

        Special tokens that are spelled out count as such: for texts that a template made. None is added.
        """
        encodings = self._spelled_engine.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    @cached_property
    def opening(self) -> list[int]:
        """The special token, if any, that the tokenizer puts in front of a text."""
        ids = self.engine.encode("", add_special_tokens=True).ids
        return [i for i in ids[:1] if i != self.end_of_text]

    @cached_property
    def _spelled_engine(self) -> "tokenizers.Tokenizer":
        engine = type(self.engine).from_str(self.engine.to_str())
        engine.encode_special_tokens = False
        # It would take spaces out of what tokens stand for.
        engine.post_processor = None
        return engine

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the token ids, special tokens spelled out."""
        return self.engine.decode([int(i) for i in ids], skip_special_tokens=False)


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: str | Path) -> Tokenizer:
    """A byte-level tokenizer of at most `vocab_size` ids, learnt from the texts and written to `path`.

    The vocabulary is smaller where the texts do not hold that many pairs. Source: Sennrich et al. 2016, section 3.2,
    over the bytes as in Radford et al. 2019, section 2.2.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size ({vocab_size}) must be at least {SMALLEST_VOCABULARY}: the 256 bytes and the end of text"
        )
    tokenizers = _tokenizers()
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    with written_whole(Path(path)) as temporary:
        temporary.write_text(engine.to_str(), encoding="utf-8")
    return Tokenizer(engine, END_OF_TEXT)


def load_tokenizer(path: str | Path, end_of_text: str | None = None) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, or of the directory that holds one.

    `end_of_text` names the token that ends a document; None takes the `eos_token` of a `tokenizer_config.json` beside
    it, else the first well-known name in the vocabulary.
    """
    file = Path(path, "tokenizer.json") if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(
            f"tokenizer ({str(path)!r}) does not exist; give a tokenizer.json, or a directory with one,"
            " as train_tokenizer writes it and models of the hub bring it"
        )
    tokenizers = _tokenizers()
    try:
        engine = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # `tokenizers` raises nothing narrower for a file that it cannot parse
        raise ValueError(f"tokenizer ({str(file)!r}) is not a tokenizer.json: {error}; give one") from error
    return Tokenizer(engine, end_of_text if end_of_text is not None else _end_of_text(engine, file))


def _tokenizers() -> ModuleType:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "turning text into tokens needs the package 'tokenizers': pip install 'lightning_megatron[data]'"
        ) from error
    return tokenizers


def _end_of_text(engine: "tokenizers.Tokenizer", file: Path) -> str:
    config = file.with_name("tokenizer_config.json")
    if config.is_file():
        token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
        name = token["content"] if isinstance(token, dict) else token
        if name is not None:
            return str(name)
    for name in KNOWN_ENDS_OF_TEXT:
        if engine.token_to_id(name) is not None:
            return name
    raise ValueError(
        f"tokenizer ({str(file)!r}) has no token that is known to end a document"
        f" (looked for {' '.join(KNOWN_ENDS_OF_TEXT)}); name it by end_of_text"
    )
