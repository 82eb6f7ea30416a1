"""Cost of a training step of a Llama of transformers: as it is, under layouts, and beside this package's own model.

4 layers, hidden 512, 16 heads, feed-forward 1376, sequence 256, vocabulary 8192, global batch 8 in micro-batches of 2,
AdamW, gradients clipped to norm 1, float32, one thread a rank. "plain" is the model in a loop written by hand;
"unchanged" the same model under the Trainer and MegatronStrategy; "own" this package's GPTModel of the same sizes;
"narrow" is 8 layers, hidden 256, 8 heads, feed-forward 688. Printed as a table of medians (`step_samples.py`);
`--json FILE` saves every sample.

    python benchmarks/any_module.py --rounds 5
"""

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.clock import StepClock

SEQUENCE, VOCABULARY = 256, 8192
# Layers, hidden size, heads and feed-forward size.
SIZES, NARROW = (4, 512, 16, 1376), (8, 256, 8, 688)
GLOBAL_BATCH, MICRO_BATCH = 8, 2
WARMUP_STEPS, TIMED_STEPS = 2, 6

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2+sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "tp2 narrow": (2, {"tensor_model_parallel_size": 2}),
    "tp2+sp narrow": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}
MODES = {
    "plain": 1,
    **{f"{kind} {name}": ranks for name, (ranks, _) in LAYOUTS.items() for kind in ("own", "unchanged")},
}
AIMS = {
    "unchanged one": ("plain", 1.03),
    **{f"unchanged {name}": (f"own {name}", 1.05) for name in LAYOUTS if name != "one"},
}


def train(mode: str) -> "StepClock":
    """Trains on this rank."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if mode == "plain":
        return train_plain()
    kind, _, layout = mode.partition(" ")
    build, sizes = build_llama if kind == "unchanged" else build_own, NARROW if layout.endswith("narrow") else SIZES
    return train_under(lambda: build(sizes), LAYOUTS[layout][1])


def build_llama(sizes: tuple[int, int, int, int] = SIZES) -> Any:
    """The model of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, hidden, heads, ffn = sizes
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=SEQUENCE,
            use_cache=False,
            # Token 0 is one of the data's, too.
            pad_token_id=None,
        )
    )


def build_own(sizes: tuple[int, int, int, int]) -> Any:
    """This package's model of the same sizes."""
    from lightning_megatron.models import GPTConfig, GPTModel

    layers, hidden, heads, ffn = sizes
    return GPTModel(
        GPTConfig(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            ffn_hidden_size=ffn,
            max_sequence_length=SEQUENCE,
            vocab_size=VOCABULARY,
            activation="swiglu",
            normalization="rmsnorm",
            position="rotary",
            add_bias_linear=False,
            tie_embeddings=False,
        )
    )


def make_loader(rows: int) -> Any:
    """Batches that are the same for every mode: random tokens, which are their own labels."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (rows * (WARMUP_STEPS + TIMED_STEPS), SEQUENCE), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens, tokens), batch_size=rows)


def train_plain() -> "StepClock":
    """A loop over micro-batches, as one writes it for one device."""
    import torch

    from benchmarks.clock import StepClock

    model, clock = build_llama(), StepClock(WARMUP_STEPS, TIMED_STEPS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for tokens, labels in make_loader(GLOBAL_BATCH):
        optimizer.zero_grad()
        for token_rows, label_rows in zip(tokens.split(MICRO_BATCH), labels.split(MICRO_BATCH), strict=True):
            (model(token_rows, labels=label_rows).loss * MICRO_BATCH / GLOBAL_BATCH).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        clock.tick()
    return clock


def train_under(build: Any, strategy: dict[str, Any]) -> "StepClock":
    """An ordinary module under the Trainer and MegatronStrategy."""
    import torch

    from benchmarks.clock import StepClock
    from benchmarks.fit import fit

    clock = StepClock(WARMUP_STEPS, TIMED_STEPS)
    fit(
        build,
        lambda dp: make_loader(GLOBAL_BATCH // dp),
        {"num_microbatches": GLOBAL_BATCH // MICRO_BATCH, **strategy},
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        lambda loss: clock.tick(),
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
    )
    return clock


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.step_samples import run

    run(__file__, __doc__.splitlines()[0], MODES, train, aims=AIMS)
