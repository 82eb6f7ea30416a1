"""Tokenizers of tiktoken, by the name of an encoding or from a file of ranks: the one door to `tiktoken`.

A file of ranks has a line for each token, its bytes in base 64 and its number, but neither the split pattern nor the
special tokens. A JSON of the same name and `.json` after it has them:

| key of `NAME.tiktoken.json` | where it is absent |
|---|---|
| `pattern`: the regular expression that splits text | that of GPT-4 and Llama 3 |
| `special_tokens`: their numbers | the end of text alone, `<|endoftext|>`, after the last rank |
"""

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_megatron.data.optional_packages import optional_package
from lightning_megatron.data.tokenizer import END_OF_TEXT, Tokenizer, known_end_of_text, named_end_of_text
from lightning_megatron.text_files import read_json_table

# Ids have 32 bits.
_MOST_IDS = 2**32

PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)
"""Split pattern of GPT-4 (cl100k_base) and Llama 3."""


class TiktokenTokenizer(Tokenizer):
    """An encoding of tiktoken, with the end of text that is named, or the first well-known one."""

    def __init__(self, engine: Any, source: str, end_of_text: str | None = None) -> None:
        self._engine = engine
        self._ids: dict[str, int] = dict(engine._special_tokens)
        name = end_of_text if end_of_text is not None else known_end_of_text(self._ids, source)
        self.end_of_text = named_end_of_text(name, self._ids)
        self.vocab_size = int(engine.max_token_value) + 1

    @property
    def fingerprint(self) -> str:
        engine = self._engine
        parts = engine._pat_str, sorted(self._ids.items()), sorted(engine._mergeable_ranks.items()), self.end_of_text
        return hashlib.sha256(f"tiktoken {parts}".encode()).hexdigest()[:16]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._engine.encode_ordinary(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._engine.decode([int(i) for i in ids])
        return text

    def token_id(self, name: str) -> int | None:
        found: int | None = self._ids.get(name, self._engine._mergeable_ranks.get(name.encode()))
        return found

    def pieces(self) -> dict[int, str]:
        written = {rank: token.decode(errors="replace") for token, rank in self._engine._mergeable_ranks.items()}
        return written | {i: name for name, i in self._ids.items()}

    def special_ids(self) -> list[int]:
        return sorted(self._ids.values())


def named_encoding(name: str, end_of_text: str | None = None) -> TiktokenTokenizer:
    """An encoding that tiktoken knows by name. It fetches its ranks unless they are in its cache."""
    tiktoken = optional_package("tiktoken", "a tokenizer of this kind")
    try:
        engine = tiktoken.get_encoding(name)
    except (ValueError, OSError) as error:
        known = ", ".join(tiktoken.list_encoding_names())
        raise ValueError(
            f"tokenizer ('tiktoken:{name}') cannot be had: {' '.join(str(error).split())}; tiktoken knows {known},"
            " fetches their ranks once, and keeps them where TIKTOKEN_CACHE_DIR says"
        ) from error
    return TiktokenTokenizer(engine, f"tiktoken:{name}", end_of_text)


def read_ranks(file: Path, end_of_text: str | None = None) -> TiktokenTokenizer:
    """The tokenizer of a file of ranks and of its JSON, if there is one."""
    tiktoken = optional_package("tiktoken", "a tokenizer of this kind")
    try:
        lines = [line.split() for line in file.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (ValueError, binascii.Error) as error:
        raise ValueError(
            f"tokenizer ({str(file)!r}) is not a file of ranks: {error}; each line has a token in base 64 and a number"
        ) from error
    # Without a token for every byte tiktoken ends the process where a text has that byte.
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(
            f"tokenizer ({str(file)!r}) has no token for {len(missing)} of the 256 bytes, the first {missing[0]}:"
            " it was cut off, or is no file of ranks"
        )
    # The package ends the process where two tokens have one number.
    if len(set(ranks.values())) < len(ranks) or not 0 <= min(ranks.values()) <= max(ranks.values()) < _MOST_IDS:
        raise ValueError(f"tokenizer ({str(file)!r}) must number each token once, from 0 to below 2^32; fetch it again")
    settings = _settings_of(file)
    special = settings.get("special_tokens", {END_OF_TEXT: max(ranks.values()) + 1})
    engine = tiktoken.Encoding(
        file.name, pat_str=settings.get("pattern", PATTERN), mergeable_ranks=ranks, special_tokens=dict(special)
    )
    return TiktokenTokenizer(engine, str(file), end_of_text)


def _settings_of(file: Path) -> Mapping[str, Any]:
    path = Path(f"{file}.json")
    if not path.is_file():
        return {}
    settings = read_json_table(path)
    if unknown := sorted(set(settings) - {"pattern", "special_tokens"}):
        raise ValueError(f"{path} has {', '.join(unknown)}; it may have pattern and special_tokens")
    pattern, special = settings.get("pattern", ""), settings.get("special_tokens", {})
    if (
        not isinstance(pattern, str)
        or not isinstance(special, dict)
        or not all(_is_id(one) for one in special.values())
    ):
        raise ValueError(f"{path} must have its pattern as text, and its special_tokens as a table of names and ids")
    return settings


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_IDS
