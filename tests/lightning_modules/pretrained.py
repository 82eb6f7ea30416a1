"""A small Llama as transformers writes it, and conversations to fine-tune it on."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.lightning_modules import ChatDataConfig, ChatDataModule
from tests.data.chats import HEADERS, write_rows, write_tokenizer

ANSWERS = {"What is two and two?": "Four.", "Who is there?": "It is me.", "Where is the cat?": "On the mat."}


SIZES: dict[str, Any] = {
    "vocab_size": 304,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}


def write_model(folder: Path, vocab_size: int = 304, **options: Any) -> Path:
    """A Llama of transformers with two layers, and a tokenizer with a chat template."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": vocab_size, "tie_word_embeddings": False} | options
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.save_pretrained(str(folder))
    return write_tokenizer(folder, HEADERS)


def write_chats(path: Path, copies: int = 20) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in ANSWERS.items()
    ]
    return write_rows(path, rows * copies)


def chat_data(folder: Path, **options: Any) -> ChatDataModule:
    """Batches of four of the conversations in `chats.jsonl` of a folder, with the tokenizer in its folder `tiny`."""
    defaults: dict[str, Any] = {
        "tokenizer": str(folder / "tiny"),
        "path": str(folder / "chats.jsonl"),
        "sequence_length": 64,
        "global_batch_size": 4,
        "cache_directory": str(folder / "cache"),
    }
    return ChatDataModule(ChatDataConfig(**(defaults | options)))
