"""A small corpus of sentences, and the options of a small BERT and its data."""

import random
from pathlib import Path
from typing import Any

from lightning_megatron.lightning_modules import BertDataConfig, BertDataModule
from lightning_megatron.models import BertConfig
from tests.lightning_modules.corpus import WORDS, held_out, write_texts

VOCABULARY = 300
SEQUENCE = 24


def write_sentences(folder: Path, num_documents: int = 12, num_sentences: int = 20) -> Path:
    """A directory of text files of sentences, always the same."""
    draw = random.Random(0)
    texts = []
    for _ in range(num_documents):
        sentences = [" ".join(draw.choice(WORDS) for _ in range(draw.randint(2, 7))) for _ in range(num_sentences)]
        texts.append(" ".join(f"{sentence.capitalize()}." for sentence in sentences))
    return write_texts(folder, texts)


def bert_config(**options: Any) -> BertConfig:
    defaults: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "max_sequence_length": SEQUENCE,
        "norm_epsilon": 1e-5,
        "init_std": 0.1,
    }
    return BertConfig(**(defaults | options))


def bert_data(folder: Path, **options: Any) -> BertDataModule:
    """A data module over the corpus in `folder`, which is written unless it is there."""
    corpus = folder / "corpus"
    if not corpus.exists():
        write_sentences(folder)
    defaults: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "sequence_length": SEQUENCE,
        "global_batch_size": 4,
        "path": str(corpus),
        **held_out(options, 0.2),
        "cache_directory": str(folder / "cache"),
    }
    return BertDataModule(BertDataConfig(**(defaults | options)))
