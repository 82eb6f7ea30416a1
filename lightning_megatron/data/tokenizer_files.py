"""Loading of tokenizers of all kinds, by path or name.

Over the files of tokenizers of each kind.

| given | tokenizer |
|---|---|
| `null:50000` | texts of numbers |
| `tiktoken:o200k_base` | an encoding that tiktoken knows |
| a `.tiktoken` file, or any whose lines are those of one | tiktoken |
| a `.model` file else | sentencepiece |
| another file | a tokenizer.json |
| a directory with a tokenizer.json | that |
| a directory with a tokenizer_config.json | what transformers makes of it |
| a directory with one file of the kinds above | that file's |
"""

import re
from pathlib import Path

from lightning_megatron.data.null_tokenizer import NullTokenizer
from lightning_megatron.data.sentencepiece_tokenizer import SentencePieceTokenizer
from lightning_megatron.data.tiktoken_tokenizer import named_encoding, read_ranks
from lightning_megatron.data.tokenizer import Tokenizer, read_fast_tokenizer
from lightning_megatron.data.transformers_tokenizer import read_directory
from lightning_megatron.hub import TOKENIZER_FILES, model_folder

_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s")


def load_tokenizer(path: str | Path, end_of_text: str | None = None) -> Tokenizer:
    """The tokenizer of a file, of a directory or of a name.

    `end_of_text` names the token that ends a document; None takes that of the files themselves (an `eos_token`, the
    end of a sentencepiece model), else the first well-known name in the vocabulary.
    """
    kind, _, name = str(path).partition(":")
    if kind == "null":
        return _null_tokenizer(name, end_of_text)
    if kind == "tiktoken":
        return named_encoding(name, end_of_text)
    given = Path(model_folder(path, TOKENIZER_FILES))
    if given.is_dir():
        if not (given / "tokenizer.json").is_file() and (given / "tokenizer_config.json").is_file():
            return read_directory(given, end_of_text)
        given = _only_file_of(given)
    if not given.is_file():
        raise ValueError(
            f"tokenizer ({str(path)!r}) does not exist; give a tokenizer.json, as train_tokenizer writes it and models"
            " of the hub bring it, a .model of sentencepiece, a .tiktoken, a directory with one of them, tiktoken:NAME"
            " or null:SIZE"
        )
    if given.suffix in (".model", ".tiktoken"):
        # Some models name their file of ranks tokenizer.model.
        with given.open("rb") as file:
            has_ranks = given.suffix == ".tiktoken" or _RANK_LINE.match(file.read(1024)) is not None
        return read_ranks(given, end_of_text) if has_ranks else SentencePieceTokenizer(given, end_of_text)
    return read_fast_tokenizer(given, end_of_text)


def _null_tokenizer(size: str, end_of_text: str | None) -> NullTokenizer:
    if not size.isdigit():
        raise ValueError(f"tokenizer ('null:{size}') must have its size as a whole number, as in null:50000")
    if end_of_text is not None:
        raise ValueError(f"end_of_text ({end_of_text!r}) is {size} in tokenizer ('null:{size}'); leave it out")
    return NullTokenizer(int(size))


def _only_file_of(directory: Path) -> Path:
    """The file of the directory that is a tokenizer, a tokenizer.json before others."""
    own = directory / "tokenizer.json"
    found = sorted(file for kind in ("*.model", "*.tiktoken") for file in directory.glob(kind))
    if own.is_file() or not found:
        return own
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"tokenizer ({str(directory)!r}) has several: {names}; give the path of one")
    return found[0]
