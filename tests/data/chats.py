"""Tokenizers in the form of Hugging Face directories, with chat templates of well-known kinds, and small chats."""

import json
from pathlib import Path
from typing import Any

from lightning_megatron.data.tokenizer import END_OF_TEXT

# Written after the published forms: a header for each turn; [INST] around the user's; thoughts kept in the last alone.
HEADERS = (
    "{% for m in messages %}{{ '<|begin|>' + m['role'] + '\n\n' + m['content'] | trim + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant\n\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)
THOUGHTS = (
    "{% for m in messages %}{{ '<|begin|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|end|>\n' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"
)
TEMPLATES = {"headers": HEADERS, "inst": INST, "thoughts": THOUGHTS}
SPECIAL = ["<|begin|>", "<|end|>", "<s>"]

TURNS = [
    {"role": "user", "content": "What is  two and two?"},
    {"role": "assistant", "content": " Four, é 🙂."},
    {"role": "user", "content": "Four, é?"},
    {"role": "assistant", "content": "Yes."},
]


def write_tokenizer(folder: Path, template: str | None, vocab_size: int = 300, **config: Any) -> Path:
    """A byte-level tokenizer with a few special tokens; it begins every text with `<s>`, as Llama's does."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors, trainers

    folder.mkdir(parents=True, exist_ok=True)
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator([" ".join(turn["content"] for turn in TURNS)] * 3, trainer)
    begin = engine.token_to_id("<s>")
    # Offsets are trimmed, as most published tokenizers have it.
    engine.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)]),
        ]
    )
    engine.save(str(folder / "tokenizer.json"))
    shown = {"bos_token": "<s>", "eos_token": END_OF_TEXT, "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        shown["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(shown | config))
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
