"""Tokenizers that only transformers can read: the one door to its tokenizers.

From most directories transformers makes a tokenizer of the package `tokenizers`, which is then used without it; the
rest are written in Python, and slow.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_megatron.data.optional_packages import optional_package
from lightning_megatron.data.tokenizer import FastTokenizer, Tokenizer, known_end_of_text, named_end_of_text


class SlowTokenizer(Tokenizer):
    """A tokenizer of transformers that is written in Python."""

    def __init__(self, engine: Any, end_of_text: str) -> None:
        self._engine = engine
        ids: dict[str, int] = engine.get_vocab()
        self.end_of_text = named_end_of_text(end_of_text, ids)
        self.vocab_size = max(ids.values()) + 1

    @property
    def fingerprint(self) -> str:
        engine = self._engine
        parts = type(engine).__name__, repr(engine), sorted(engine.get_vocab().items()), self.end_of_text
        return hashlib.sha256(f"transformers {parts}".encode()).hexdigest()[:16]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._ids(text) for text in texts]

    def _ids(self, text: str) -> list[int]:
        tokens = self._engine.tokenize(text, split_special_tokens=True)
        ids: list[int] = self._engine.convert_tokens_to_ids(tokens)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._engine.decode([int(i) for i in ids], clean_up_tokenization_spaces=False)
        return text

    def token_id(self, name: str) -> int | None:
        found: int | None = self._engine.get_vocab().get(name)
        return found

    def pieces(self) -> dict[int, str]:
        return {i: piece for piece, i in self._engine.get_vocab().items()}

    def special_ids(self) -> list[int]:
        return sorted(set(self._engine.all_special_ids))


def read_directory(directory: Path, end_of_text: str | None = None) -> Tokenizer:
    """The tokenizer that transformers makes of a directory; its end of text is its `eos_token`, unless it is named."""
    transformers = optional_package("transformers", "a tokenizer of this kind", extra="hf")
    try:
        engine = transformers.AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # any, from files that do not belong together
        raise ValueError(
            f"tokenizer ({str(directory)!r}) cannot be made by transformers: {' '.join(str(error).split())}"
        ) from error
    name = end_of_text if end_of_text is not None else engine.eos_token
    if name is None:
        name = known_end_of_text(engine.get_vocab(), str(directory))
    if engine.is_fast:
        return FastTokenizer(engine.backend_tokenizer, name)
    return SlowTokenizer(engine, name)
