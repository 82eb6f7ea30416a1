"""Real documents, which have a long tail, through static and through dynamic context parallelism in one run.

The text is the source files of Python's standard library, packed into rows of a token budget. Static cp: all ranks
share every document, as they must where no rank could hold a row alone. Static dp: each rank has rows of its own,
whole. Dynamic: each packed microbatch has its own ranks, planned and routed asynchronously, under the memory cap of
static cp. All train the same GPT on the same batches under a Trainer; a figure is shown only where their losses
agree. Each sample is a fresh set of processes; rounds are interleaved, the ratio is taken within a round. Where there
are more ranks than cores, a step takes the sum of all ranks' work, and what dynamic wins by balance does not show.

    python benchmarks/context_documents.py --worlds 2 4 --rounds 3
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.clock import StepClock
from benchmarks.machine import as_line, machine
from benchmarks.ranks import run_ranks

LAYERS, HIDDEN, HEADS, GROUPS, VOCABULARY = 2, 128, 4, 2, 2048
WARMUP_STEPS, TIMED_STEPS = 1, 3
MODES = ("static cp", "static dp", "dynamic")


def prepare(folder: Path) -> tuple[Path, int]:
    """The token files of the standard library, and the id of the end of text."""
    from lightning_megatron.data import load_documents, prepare_corpus, train_tokenizer

    documents = load_documents(cache_dir=folder / "documents")
    tokenizer = train_tokenizer(documents["text"][:300], VOCABULARY, folder / "tokenizer.json")
    return prepare_corpus(documents, tokenizer, folder), tokenizer.end_of_text


def run_rank(mode: str, file: str, end_of_text: int, sequence: int, rows: int) -> None:
    """Trains on this rank and prints the time of the steps as JSON."""
    import lightning as L
    import torch
    import torch.distributed as dist
    from torch import Tensor
    from torch.utils.data import DataLoader, Subset

    from lightning_megatron import DynamicContextConfig, MegatronStrategy
    from lightning_megatron.data import PackedDocuments, collate_tokens
    from lightning_megatron.models import GPTConfig, GPTModel

    torch.set_num_threads(1)
    torch.manual_seed(1)
    world = int(os.environ["WORLD_SIZE"])
    config = GPTConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        vocab_size=VOCABULARY,
        position="rotary",
        normalization="rmsnorm",
        activation="swiglu",
        add_bias_linear=False,
    )
    clock = StepClock(WARMUP_STEPS, TIMED_STEPS)
    losses: list[float] = []
    tokens: list[int] = []

    class Module(L.LightningModule):
        def configure_model(self) -> None:
            self.model = GPTModel(config, seed=1)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.model(**batch)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
            # A step is over when it is over on every rank.
            dist.barrier()
            clock.tick()
            losses.append(float(outputs["loss"]))
            tokens.append(int((batch["segments"] >= 0).sum()))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    dp = world if mode == "static dp" else 1
    options: dict[str, Any] = {"num_microbatches": rows // dp}
    if mode == "dynamic":
        options = {"dynamic_context": DynamicContextConfig(max_tokens_per_rank=sequence // world)}
    steps = WARMUP_STEPS + TIMED_STEPS
    packed = PackedDocuments(Path(file), sequence, end_of_text=end_of_text, seed=1, long_documents="split")
    own = rows // dp
    first = int(os.environ["RANK"]) % dp * own
    indices = [step * rows + first + row for step in range(steps) for row in range(own)]
    loader = DataLoader(Subset(packed, indices), batch_size=own, collate_fn=collate_tokens)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=MegatronStrategy(context_parallel_size=world // dp, **options),
        max_steps=steps,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader)
    timed = sum(tokens[WARMUP_STEPS:]) / TIMED_STEPS
    print(json.dumps({"wall": clock.wall_seconds, "cpu": clock.cpu_seconds, "tokens": timed, "losses": losses}))


def sample(mode: str, world: int, file: Path, end_of_text: int, sequence: int, rows: int) -> dict[str, Any]:
    """Tokens per second of a run, and the CPU seconds of a step over all ranks."""
    records = run_ranks([__file__, "--rank", mode, str(file), str(end_of_text), str(sequence), str(rows)], world)
    wall = max(rank["wall"] for rank in records)
    cpu = sum(rank["cpu"] for rank in records)
    tokens = sum(rank["tokens"] for rank in records) if mode == "static dp" else records[0]["tokens"]
    return {"speed": tokens / wall, "cpu": cpu, "losses": records[0]["losses"]}


def compare(worlds: list[int], sequence: int, rows: int, rounds: int) -> list[dict[str, Any]]:
    """Rows for each number of processes."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        file, end_of_text = prepare(Path(folder))
        for world in worlds:
            samples: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
            for _ in range(rounds):
                for mode in MODES:
                    samples[mode].append(sample(mode, world, file, end_of_text, sequence, rows))
                    print(f"{mode}, {world} processes: {samples[mode][-1]['speed']:.0f} tokens/s", file=sys.stderr)
            dynamic = samples["dynamic"]
            for mode, own in samples.items():
                # Times with a wrong loss would be worth nothing.
                assert all(abs(a - b) < 1e-4 for a, b in zip(own[0]["losses"], dynamic[0]["losses"], strict=True)), own
                pairs = list(zip(own, dynamic, strict=True))
                found.append(
                    {
                        "world": world,
                        "mode": mode,
                        "speed": statistics.median(s["speed"] for s in own),
                        "cpu": statistics.median(s["cpu"] for s in own),
                        "speed_up": statistics.median(b["speed"] / a["speed"] for a, b in pairs),
                    }
                )
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| processes | layout | tokens/s | CPU s of a step, all ranks | dynamic is faster by |",
        "|---:|---|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['world']} | {row['mode']} | {row['speed']:.0f} | {row['cpu']:.2f} | {row['speed_up']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sequence", type=int, default=16384, help="token budget of a packed row")
    parser.add_argument("--rows", type=int, default=4, help="packed rows of a global batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="a file to write the rows to")
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        mode, file, *numbers = arguments.rank
        run_rank(mode, file, *map(int, numbers))
        return
    facts = machine()
    rows = compare(arguments.worlds, arguments.sequence, arguments.rows, arguments.rounds)
    print(as_line(facts | {"load at the end": ", ".join(f"{load:.1f}" for load in os.getloadavg())}))
    print(f"\n{arguments.rows} rows of {arguments.sequence} tokens a step; {arguments.rounds} rounds\n\n{table(rows)}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"machine": facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
