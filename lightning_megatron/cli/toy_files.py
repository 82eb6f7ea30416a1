"""The files that toy recipes of tuning read, made without a network: two tiny models with a tokenizer, and data.

| file | what it is |
|---|---|
| `tiny/`, `teacher/` | Llamas of transformers with new weights, a tokenizer and a chat template |
| `chats.jsonl` | questions about sums, and their answers, as conversations |
| `pairs.jsonl` | the same questions, with the right answer and a wrong one |
| `prose.txt`, `sums.txt` | small sentences, and the questions with their answers: two kinds of text |
"""

import json
from itertools import product
from pathlib import Path

from lightning_megatron.cli.usage import UsageError
from lightning_megatron.data import train_tokenizer
from lightning_megatron.hf.save import save_pretrained
from lightning_megatron.hf.unchanged import new_unchanged, read_config

Rows = list[dict[str, list[dict[str, str]]]]
"""Rows of a table: conversations by column."""

_TURNS = ("<|begin|>", "<|end|>")
_TEMPLATE = (
    "{% for m in messages %}{{ '<|begin|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"
)
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_ANIMALS, _DOES, _PLACES = ("cat", "dog", "hen"), ("sat", "slept", "looked at the moon"), ("mat", "wall", "roof")
_VOCABULARY = 512
_SIZES = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": _VOCABULARY,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
# By the model's folder.
_WIDTHS = {"tiny": 32, "teacher": 64}


def write_toys(folder: Path) -> list[Path]:
    """Writes all files into an existing folder, and returns them. Raises UsageError where one of them is there."""
    texts = {"chats.jsonl": _lines(_chats()), "pairs.jsonl": _lines(_pairs()), "prose.txt": _prose()}
    texts["sums.txt"] = "".join(f"{question} {right}\n" for question, right, _ in _questions()) * 10
    paths = [folder / name for name in (*_WIDTHS, *texts)]
    if taken := [str(path) for path in paths if path.exists() or path.is_symlink()]:
        raise UsageError([f"{', '.join(taken)} would be overwritten; name another folder"])
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    for seed, (name, width) in enumerate(_WIDTHS.items()):
        _write_model(folder / name, width, seed, [*texts.values()])
    return paths


def _write_model(folder: Path, width: int, seed: int, texts: list[str]) -> None:
    made = folder.with_name(f"{folder.name}.configuration")
    made.mkdir()
    try:
        tokenizer = train_tokenizer(texts, _VOCABULARY, made / "tokenizer.json", _TURNS)
        # As models of chats have it: a text ends where a turn does, for tokenizer and model alike.
        ids = {"bos_token_id": None, "eos_token_id": tokenizer.token_id(_TURNS[1])}
        config = _SIZES | ids | {"hidden_size": width, "intermediate_size": 3 * width}
        (made / "config.json").write_text(json.dumps(config))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _TURNS[1], "chat_template": _TEMPLATE}
        (made / "tokenizer_config.json").write_text(json.dumps(settings))
        save_pretrained(new_unchanged(read_config(made), seed=seed), folder, tokenizer_from=made)
    finally:
        for path in made.iterdir():
            path.unlink()
        made.rmdir()


def _questions() -> list[tuple[str, str, str]]:
    """Questions about sums of two digits, each with the right answer and a wrong one."""
    found = []
    for one, other in product(range(10), repeat=2):
        question = f"What is {_WORDS[one]} and {_WORDS[other]}?"
        found.append((question, f"It is {one + other}.", f"It is {(one + other + 3) % 19}."))
    return found


def _chats() -> Rows:
    return [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": right}]}
        for question, right, _ in _questions()
    ]


def _pairs() -> Rows:
    rows = []
    for question, right, wrong in _questions():
        asked = {"role": "user", "content": question}
        chosen, rejected = ([asked, {"role": "assistant", "content": text}] for text in (right, wrong))
        rows.append({"chosen": chosen, "rejected": rejected})
    return rows


def _prose() -> str:
    sentences = product(_ANIMALS, _DOES, _PLACES)
    return "".join(f"The {animal} {does} on the {place}.\n" for animal, does, place in sentences) * 40


def _lines(rows: Rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
