"""A small corpus, and the options of a small GPT and its data."""

import os
import random
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_megatron.lightning_modules import GPTDataConfig, GPTDataModule
from lightning_megatron.models import GPTConfig

VOCABULARY = 300
SEQUENCE = 16
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "ran", "home", "to", "eat", "some", "fish"]


def write_texts(folder: Path, texts: Iterable[str]) -> Path:
    """`folder/corpus`, a file for each text. Ranks that write it at once all end with one whole corpus."""
    path = folder / "corpus"
    own = Path(tempfile.mkdtemp(dir=folder))
    for i, text in enumerate(texts):
        (own / f"{i}.txt").write_text(text)
    try:
        os.rename(own, path)  # fails where another rank has put its files
    except OSError:
        shutil.rmtree(own)
    return path


def write_corpus(folder: Path, num_documents: int = 12, num_words: int = 150) -> Path:
    """A directory of text files, always the same."""
    draw = random.Random(0)
    return write_texts(folder, (" ".join(draw.choice(WORDS) for _ in range(num_words)) for _ in range(num_documents)))


def config(**options: Any) -> GPTConfig:
    defaults: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "max_sequence_length": SEQUENCE,
    }
    return GPTConfig(**(defaults | options))


def held_out(options: dict[str, Any], fraction: float) -> dict[str, Any]:
    """A share of the documents, unless the options say something else."""
    others = {"validation_path", "document_split", "streaming"}
    return {} if others & options.keys() else {"validation_fraction": fraction}


def data(folder: Path, **options: Any) -> GPTDataModule:
    """A data module over the corpus in `folder`, which is written unless it is there."""
    corpus = folder / "corpus"
    if not corpus.exists():
        write_corpus(folder)
    defaults: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "sequence_length": SEQUENCE,
        "global_batch_size": 4,
        "path": str(corpus),
        **held_out(options, 0.2),
        "cache_directory": str(folder / "cache"),
    }
    return GPTDataModule(GPTDataConfig(**(defaults | options)))
