"""Cost of a training step: this package's layouts, plain torch and torch DDP, in one interleaved run.

GPT-2 style, 8 layers, hidden 256, 8 heads, sequence 256, vocabulary 8192, global batch 8 in micro-batches of 2, AdamW,
gradients clipped to norm 1, float32, one thread a rank. Each sample is a fresh set of processes: warm-up steps, then
timed ones. Printed as a table of medians (`step_samples.py`); `--json FILE` saves every sample.

    python benchmarks/step_time.py --rounds 5
"""

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.clock import StepClock

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY = 8, 256, 8, 256, 8192
GLOBAL_BATCH, MICRO_BATCH = 8, 2
WARMUP_STEPS, TIMED_STEPS = 2, 6

# Name: (processes, strategy arguments; None runs without a Trainer).
MODES: dict[str, tuple[int, dict[str, Any] | None]] = {
    "plain torch": (1, None),
    "torch DDP": (2, None),
    "one": (1, {"num_microbatches": 4}),
    "dp2": (2, {"num_microbatches": 2}),
    "tp2": (2, {"tensor_model_parallel_size": 2, "num_microbatches": 4}),
    "tp2+sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "num_microbatches": 4}),
    "pp2": (2, {"pipeline_model_parallel_size": 2, "num_microbatches": 4}),
}
# Upper bounds on CPU seconds over plain torch's, which are the project's aims.
AIMS = {"one": 1.03, "dp2": 1.05, "pp2": 1.05, "tp2": 1.30, "tp2+sp": 1.50}


def train(mode: str) -> "StepClock":
    """Trains on this rank."""
    import torch

    from benchmarks.joined import joined_by_gloo

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    strategy = MODES[mode][1]
    if strategy is not None:
        return train_ours(strategy)
    if mode == "torch DDP":
        clock: StepClock = joined_by_gloo(train_plain)(is_distributed=True)
        return clock
    return train_plain(is_distributed=False)


def make_batches(rows: int) -> Any:
    """The loader's rows, the same for every mode: random tokens, each with the next as its label."""
    import torch

    generator = torch.Generator().manual_seed(0)
    count = rows * (WARMUP_STEPS + TIMED_STEPS)
    tokens = torch.randint(0, VOCABULARY, (count, SEQUENCE + 1), generator=generator)
    return torch.utils.data.TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def train_ours(strategy: dict[str, Any]) -> "StepClock":
    """An ordinary module under the Trainer and MegatronStrategy."""
    import torch

    from benchmarks.clock import StepClock
    from benchmarks.fit import fit
    from lightning_megatron.models import GPTConfig, GPTModel

    config = GPTConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        max_sequence_length=SEQUENCE,
        vocab_size=VOCABULARY,
        activation="gelu_tanh",
    )

    def make_loader(dp: int) -> Any:
        rows = GLOBAL_BATCH // dp
        return torch.utils.data.DataLoader(make_batches(rows), batch_size=rows)

    clock = StepClock(WARMUP_STEPS, TIMED_STEPS)
    fit(
        lambda: GPTModel(config),
        make_loader,
        strategy,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        lambda loss: clock.tick(),
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
    )
    return clock


def train_plain(is_distributed: bool) -> "StepClock":
    """Trains the same architecture in plain torch modules, by a hand-written loop; with DDP over two processes."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.clock import StepClock
    from benchmarks.plain_gpt import PlainGPT

    model: Any = PlainGPT(LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY)
    rows = GLOBAL_BATCH
    if is_distributed:
        model, rows = DistributedDataParallel(model), GLOBAL_BATCH // 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    count, clock = rows // MICRO_BATCH, StepClock(WARMUP_STEPS, TIMED_STEPS)
    for tokens, labels in torch.utils.data.DataLoader(make_batches(rows), batch_size=rows):
        optimizer.zero_grad()
        pairs = zip(tokens.split(MICRO_BATCH), labels.split(MICRO_BATCH), strict=True)
        for i, (token_rows, label_rows) in enumerate(pairs):
            if is_distributed:
                model.require_backward_grad_sync = i == count - 1
            (model(token_rows, label_rows) / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        clock.tick()
    return clock


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.step_samples import run

    modes = {mode: num_ranks for mode, (num_ranks, _) in MODES.items()}
    run(
        __file__, __doc__.splitlines()[0], modes, train, aims={mode: ("plain torch", aim) for mode, aim in AIMS.items()}
    )
