"""Cost of a training step: this package's layouts, plain torch and torch DDP, in one interleaved run.

GPT-2 style, 8 layers, hidden 256, 8 heads, sequence 256, vocabulary 8192, global batch 8 in micro-batches of 2, AdamW,
gradients clipped to norm 1, float32, one thread a rank. Each sample is a fresh set of processes: warm-up steps, then
timed ones. CPU seconds are summed over ranks: on a machine with few cores they are the steadier number. Peak memory is
that of the largest rank (VmHWM). Printed as a table of medians with ratios to plain torch in one process; `--json FILE`
saves every sample.

    python benchmarks/step_time.py --rounds 5
"""

import argparse
import json
import os
import platform
import statistics
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


def run_rank(mode: str) -> None:
    """Trains on this rank and prints its figures as JSON."""
    import torch

    from benchmarks.joined import joined_by_gloo

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    strategy = MODES[mode][1]
    if strategy is not None:
        clock = train_ours(strategy)
    elif mode == "torch DDP":
        clock = joined_by_gloo(train_plain)(is_distributed=True)
    else:
        clock = train_plain(is_distributed=False)
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"cpu_seconds": clock.cpu_seconds, "wall_seconds": clock.wall_seconds, "peak_mb": peak / 1024}))


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


def run_mode(mode: str) -> dict[str, float]:
    """One sample of a mode: CPU seconds a step over all ranks, wall seconds, memory of the largest rank."""
    from benchmarks.ranks import run_ranks

    try:
        figures = run_ranks([__file__, "--run-rank", mode], MODES[mode][0], timeout_seconds=600)
    except RuntimeError as error:
        raise SystemExit(f"{mode} failed:\n{error}") from None
    return {
        "cpu_seconds": sum(figure["cpu_seconds"] for figure in figures),
        "wall_seconds": max(figure["wall_seconds"] for figure in figures),
        "peak_mb": max(figure["peak_mb"] for figure in figures),
    }


def report(samples: dict[str, list[dict[str, float]]]) -> str:
    """A table of medians."""
    import lightning
    import torch

    def median(mode: str, figure: str) -> float:
        return statistics.median(sample[figure] for sample in samples[mode])

    def ratio(mode: str) -> float:
        """The median over rounds of the ratio to plain torch in the same round."""
        pairs = zip(samples[mode], samples["plain torch"], strict=True)
        return statistics.median(own["cpu_seconds"] / plain["cpu_seconds"] for own, plain in pairs)

    rounds = len(samples["plain torch"])
    lines = [
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, lightning {lightning.__version__}; "
        f"{rounds} rounds of {TIMED_STEPS} steps, medians",
        "",
        "| mode | CPU s/step, all ranks | to plain torch | aim | wall s/step | peak MB, largest rank |",
        "|---|---|---|---|---|---|",
    ]
    for mode in samples:
        aim = f"{AIMS[mode]:.2f}" if mode in AIMS else ""
        lines.append(
            f"| {mode} | {median(mode, 'cpu_seconds'):.3f} | {ratio(mode):.3f} | {aim} | "
            f"{median(mode, 'wall_seconds'):.3f} | {median(mode, 'peak_mb'):.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="how often each mode runs, interleaved")
    parser.add_argument("--modes", nargs="*", default=list(MODES), help="a choice of modes; plain torch always runs")
    parser.add_argument("--json", type=Path, help="where to save every sample")
    parser.add_argument("--run-rank", choices=list(MODES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run_rank:
        run_rank(arguments.run_rank)
        return
    if unknown := sorted(set(arguments.modes) - set(MODES)):
        parser.error(f"unknown modes {unknown}; there are {list(MODES)}")
    chosen = list(dict.fromkeys(["plain torch", *arguments.modes]))
    samples: dict[str, list[dict[str, float]]] = {mode: [] for mode in chosen}
    for round_number in range(arguments.rounds):
        for mode in chosen:
            samples[mode].append(run_mode(mode))
            print(f"round {round_number + 1}: {mode}: {samples[mode][-1]}", file=sys.stderr, flush=True)
    print(report(samples))
    if arguments.json:
        arguments.json.write_text(json.dumps(samples, indent=1))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
