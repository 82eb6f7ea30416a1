"""Context parallelism on CPU: each exchange over 2 and 4 processes against one process, at growing sequence lengths.

A GPT of the engine, without Lightning, goes forward and backward over one sequence. Each sample is a fresh set of
processes, so that memory is theirs alone: the growth of the resident peak from before the first step, of the rank where
it is largest. Rounds are interleaved, ratios are taken within a round, medians shown. One process is the same model
with torch's own attention.

    python benchmarks/context.py --rounds 3
    python benchmarks/context.py --sequences 2048 4096 --worlds 2
"""

import argparse
import json
import os
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import as_line, machine
from benchmarks.ranks import run_ranks

# Kind: exchange of the outer groups, and whether all ranks are inner ones.
LAYERS, HIDDEN, HEADS, GROUPS, VOCABULARY = 2, 512, 8, 4, 2048
WARMUP_STEPS, TIMED_STEPS = 1, 1
KINDS = {"ring": ("ring", False), "all-gather": ("all_gather", False), "all-to-all": ("ring", True)}


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    kind: str
    world: int
    sequence: int

    @property
    def name(self) -> str:
        return "one process" if self.world == 1 else f"{self.kind}, {self.world} processes"


def run_rank(kind: str, sequence: int) -> None:
    """Runs the steps on this rank and prints their time and memory as JSON."""
    import torch
    import torch.distributed as dist

    from lightning_megatron.mesh import Mesh, Sizes
    from lightning_megatron.models import GPTConfig, GPTModel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    exchange, is_inner = KINDS[kind]
    sizes = Sizes(world=world, cp=world, cp_ulysses=world if is_inner else 1, cp_exchange=exchange)  # type: ignore[arg-type]

    def new_group(ranks: tuple[int, ...]) -> Any:
        return dist.new_group(list(ranks), use_local_synchronization=True)

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
    model = GPTModel(config, mesh=Mesh.build(sizes, dist.get_rank(), new_group), seed=1)
    tokens = torch.randint(VOCABULARY, (1, sequence), generator=torch.Generator().manual_seed(1))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu_seconds = wall_seconds = 0.0
    for step in range(WARMUP_STEPS + TIMED_STEPS):
        if step == WARMUP_STEPS:
            dist.barrier()
            cpu_seconds, wall_seconds = time.process_time(), time.perf_counter()
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(tokens, labels=tokens)
        loss.backward()
    cpu_seconds = (time.process_time() - cpu_seconds) / TIMED_STEPS
    dist.barrier()
    wall_seconds = (time.perf_counter() - wall_seconds) / TIMED_STEPS
    peak_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) * 1024 / 1e6
    print(json.dumps({"cpu": cpu_seconds, "wall": wall_seconds, "memory": peak_mb, "loss": loss.item()}))
    dist.destroy_process_group()


def sample(case: Case) -> dict[str, float]:
    """One run of a case: wall seconds of a step, CPU seconds of the busiest rank, megabytes of the largest."""
    records = run_ranks([__file__, "--rank", case.kind, str(case.sequence)], case.world)
    most = {name: max(rank[name] for rank in records) for name in ("cpu", "wall", "memory")}
    return {**most, "loss": records[0]["loss"]}


def compare(sequences: list[int], worlds: list[int], rounds: int) -> list[dict[str, Any]]:
    """One row for each case, with medians over the rounds and ratios to one process of the same round."""
    rows = []
    for sequence in sequences:
        alone = Case("ring", 1, sequence)
        cases = [alone, *(Case(kind, world, sequence) for world in worlds for kind in KINDS)]
        samples: dict[Case, list[dict[str, float]]] = {case: [] for case in cases}
        for _ in range(rounds):
            for case in cases:
                samples[case].append(sample(case))
                print(f"{case.name}, {sequence}: {samples[case][-1]['wall']:.2f} s", file=sys.stderr)
        for case in cases:
            own, base = samples[case], samples[alone]
            # Times with a wrong loss would be worth nothing.
            assert all(abs(s["loss"] - base[0]["loss"]) < 1e-4 for s in own), (case, own, base)
            rows.append(
                {
                    "row": case.name,
                    "sequence": sequence,
                    **{f"{name}_{unit}": statistics.median(s[name] for s in own) for name, unit in _UNITS.items()},
                    **{
                        f"{name}_ratio": statistics.median(s[name] / b[name] for s, b in zip(own, base, strict=True))
                        for name in _UNITS
                    },
                }
            )
    return rows


_UNITS = {"wall": "seconds", "cpu": "seconds", "memory": "mb"}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| sequence | row | wall s | of one | CPU s of a rank | of one | memory MB | of one |",
        "|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['sequence']} | {row['row']} | {row['wall_seconds']:.2f} | {row['wall_ratio']:.2f} | "
            f"{row['cpu_seconds']:.2f} | {row['cpu_ratio']:.2f} | {row['memory_mb']:.0f} | {row['memory_ratio']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="a file to write the rows to")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        run_rank(arguments.rank[0], int(arguments.rank[1]))
        return
    facts = machine()
    rows = compare(arguments.sequences, arguments.worlds, arguments.rounds)
    print(as_line(facts | {"load at the end": ", ".join(f"{load:.1f}" for load in os.getloadavg())}))
    print(f"\nmedians of {arguments.rounds} rounds\n\n{table(rows)}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"machine": facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
