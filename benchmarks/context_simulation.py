"""Dynamic context parallelism on paper: the published setting, the distance to the lower bound, and the time to solve.

No device is needed: a cost model times every microbatch, and the 1F1B schedule is played action by action on all ranks.

    python benchmarks/context_simulation.py --steps 5

1. Llama-13B, 2,048 documents a step, pp 8, cp 8, full recomputation, packing alone against packing with dynamic context
   parallelism. Published: 195.88 -> 289.32 TFLOP/s per GPU (1.48) on GitHub, 139.17 -> 174.39 (1.25) on CommonCrawl.
   Neither the number of GPUs, their kind, the context length nor the lengths of the documents are published. Assumed:
   the values of `Setting` and of `document_lengths`; the tables after the first show what each assumption is worth.
2. The slowest rank over the lower bound on random steps, against rounds of needed-size groups with a barrier between.
3. CPU seconds to solve a step of 2,048 documents on 64 ranks.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

LAYERS, HIDDEN, FEED_FORWARD, VOCABULARY = 40, 5120, 13824, 32000
LINEAR_FLOPS = 2 * (4 * HIDDEN**2 + 3 * HIDDEN * FEED_FORWARD)  # forward, per token and layer
SQUARE_FLOPS = 2 * HIDDEN  # forward, causal, per squared token and layer


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The published setting, and what is assumed of it."""

    pp: int = 8
    chunks: int = 1
    cp: int = 8
    documents: int = 2048
    """Published; what follows is assumed."""
    dp: int = 4
    max_tokens_per_rank: int = 4096
    """Packs and documents of up to 32,768 tokens at cp 8."""
    tflops: float = 400.0
    attention_tflops: float = 300.0
    """Reached in linear layers and in attention: of an H100."""
    near_gigabytes: float = 300.0
    far_gigabytes: float = 50.0
    """Per second and GPU, within a node of 8 and between nodes."""
    fixed_seconds: float = 2e-3
    """Of a microbatch on a stage."""
    latency_seconds: float = 100e-6
    """Of a step of the ring on a stage."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="steps per row of the first tables")
    parser.add_argument("--sets", type=int, default=100, help="random steps per row of the lower bound's table")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    arguments = parser.parse_args()

    from benchmarks.document_lengths import COMMON_CRAWL, GITHUB, LOG_NORMAL
    from benchmarks.machine import as_line, machine

    facts = machine()
    print(as_line(facts))
    usual = Setting()
    data = {"GitHub": (GITHUB, 289.32 / 195.88), "CommonCrawl": (COMMON_CRAWL, 174.39 / 139.17)}
    cases: dict[str, list[tuple[str, Any, Setting, float]]] = {"the published setting": []}
    for name, (lengths, published) in data.items():
        cases["the published setting"].append((name, lengths, usual, published))
        cases[f"{name}: assumptions changed one by one"] = [
            (f"{label}", replace(lengths, **own), replace(usual, **setting), 0.0)
            for label, own, setting in changes(lengths)
        ]
    figures: dict[str, Any] = {"machine": facts, "setting": asdict(usual)}
    for title, rows in cases.items():
        print(f"\n{title}\n{HEAD}\n{'|---' * 9}|")
        figures[title] = []
        for label, lengths, setting, published in rows:
            row = compared(lengths, setting, arguments.steps)
            figures[title].append({"case": label, "published": published or None, **row})
            print(as_row(label, row, published), flush=True)
    figures["lower bound"] = lower_bound_table({"log-normal": LOG_NORMAL, "GitHub-like": GITHUB}, arguments.sets)
    figures["solve"] = solve_table({"log-normal": LOG_NORMAL, "GitHub-like": GITHUB, "CommonCrawl-like": COMMON_CRAWL})
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


HEAD = (
    "| case | GPUs | M static | M dynamic | static s | dynamic s | TFLOP/s static -> dynamic | speed-up | published |"
)


def changes(lengths: Any) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Changes of each row: its label, fields of the lengths, fields of the setting."""
    return [
        *((f"dp {dp}", {}, {"dp": dp}) for dp in (1, 2, 8)),
        *((f"sigma {s:.1f}", {"sigma": s}, {}) for s in (lengths.sigma - 0.3, lengths.sigma + 0.3)),
        *((f"median {m:g}", {"median": m}, {}) for m in (lengths.median / 2, lengths.median * 2)),
        ("up to 65,536 tokens", {}, {"max_tokens_per_rank": 8192}),
        ("up to 131,072 tokens", {}, {"max_tokens_per_rank": 16384}),
        ("ring at 150 GB/s", {}, {"near_gigabytes": 150.0}),
        ("ring hidden", {}, {"near_gigabytes": 1e6, "far_gigabytes": 1e6, "latency_seconds": 0.0}),
        ("vp 5", {}, {"chunks": 5}),
    ]


def cost_of(setting: Setting) -> Any:
    """Cost model of one pipeline rank's layers under full recomputation: FLOPs and messages of four forwards."""
    from lightning_megatron.context.balance import CostModel

    layers = LAYERS // setting.pp
    sent_bytes = 4 * layers * 2 * 2 * HIDDEN
    return CostModel(
        seconds_per_token=4 * layers * LINEAR_FLOPS / (setting.tflops * 1e12),
        seconds_per_square=4 * layers * SQUARE_FLOPS / (setting.attention_tflops * 1e12),
        seconds_per_sent_token=sent_bytes / (setting.near_gigabytes * 1e9),
        seconds_per_far_token=sent_bytes / (setting.far_gigabytes * 1e9),
        fixed_seconds=setting.fixed_seconds,
        latency_seconds=setting.latency_seconds,
        ranks_per_node=8,
    )


def compared(lengths_like: Any, setting: Setting, steps: int) -> dict[str, float]:
    """Static against dynamic, means over steps."""
    from benchmarks.context_schedulers import pipeline_seconds, static_slots
    from lightning_megatron.context.balance import DynamicContextConfig, plan
    from lightning_megatron.pipeline.registry import order_of
    from lightning_megatron.pipeline.schedule_spec import Schedule

    cost, ranks = cost_of(setting), setting.dp * setting.cp
    # An interleaved schedule takes its microbatches in groups of pp.
    multiple = setting.pp if setting.chunks > 1 else 1
    config = DynamicContextConfig(max_tokens_per_rank=setting.max_tokens_per_rank, microbatch_multiple=multiple)
    lengths_like = replace(lengths_like, longest=setting.cp * setting.max_tokens_per_rank)
    rng = np.random.default_rng(0)
    found: dict[str, list[float]] = {
        name: [] for name in ("static", "dynamic", "static_m", "dynamic_m", "flops", "solve")
    }
    for _ in range(steps):
        lengths = lengths_like.draw(rng, setting.documents)
        began = time.process_time()
        made = plan(lengths, ranks, cost, config, pp=setting.pp)
        found["solve"].append(time.process_time() - began)
        fixed = static_slots(lengths, ranks, setting.cp, setting.max_tokens_per_rank)
        for name, slots in (("static", fixed), ("dynamic", made.slots)):
            kind = "1f1b" if setting.chunks == 1 else "interleaved"
            order = order_of(Schedule(name=kind, pp=setting.pp, chunks=setting.chunks, microbatches=len(slots)))
            found[name].append(pipeline_seconds(order, slots, lengths, cost, chunks=setting.chunks, is_recomputed=True))
            found[f"{name}_m"].append(len(slots))
        found["flops"].append(model_flops(lengths))
    means = {name: statistics.mean(values) for name, values in found.items()}
    gpus = setting.pp * ranks
    return {
        "gpus": gpus,
        **means,
        "static_tflops": means["flops"] / means["static"] / gpus / 1e12,
        "dynamic_tflops": means["flops"] / means["dynamic"] / gpus / 1e12,
        "speed_up": means["static"] / means["dynamic"],
    }


def model_flops(lengths: Sequence[int]) -> float:
    """Forward and backward without recomputation, with the head: what a throughput counts."""
    squares = sum(length * length for length in lengths)
    per_token = LAYERS * LINEAR_FLOPS + 2 * HIDDEN * VOCABULARY
    return 3.0 * (sum(lengths) * per_token + LAYERS * SQUARE_FLOPS * squares)


def as_row(label: str, row: dict[str, float], published: float) -> str:
    rates = f"{row['static_tflops']:.0f} -> {row['dynamic_tflops']:.0f}"
    return (
        f"| {label} | {row['gpus']} | {row['static_m']:.0f} | {row['dynamic_m']:.0f} | {row['static']:.2f} "
        f"| {row['dynamic']:.2f} | {rates} | {row['speed_up']:.2f} | {f'{published:.2f}' if published else ''} |"
    )


def lower_bound_table(kinds: dict[str, Any], num_sets: int) -> list[dict[str, Any]]:
    """Time over lower bound without a pipeline, 4 to 32 documents a rank, caps of 4,096 to 16,384 tokens."""
    from benchmarks.context_schedulers import rounds_seconds
    from lightning_megatron.context.balance import DynamicContextConfig, plan

    print(f"\nslowest rank over the lower bound, {num_sets} random steps a row")
    print(f"| lengths | ranks | dynamic median | p90 | worst | rounds median | p90 |\n{'|---' * 7}|")
    rows = []
    cost = cost_of(Setting(pp=1))
    for name, kind in kinds.items():
        for ranks in (8, 16, 64):
            rng = np.random.default_rng(ranks)
            ours, rounds = [], []
            for _ in range(num_sets):
                cap = int(rng.choice([4096, 8192, 16384]))
                own = replace(kind, longest=min(kind.longest, cap * ranks))
                lengths = own.draw(rng, ranks * int(rng.integers(4, 33)))
                made = plan(lengths, ranks, cost, DynamicContextConfig(max_tokens_per_rank=cap))
                ours.append(made.seconds / made.lower_bound)
                rounds.append(rounds_seconds(lengths, ranks, cap, cost) / made.lower_bound)
            row = {"lengths": name, "ranks": ranks, "dynamic": quantiles(ours), "rounds": quantiles(rounds)}
            rows.append(row)
            cells = [f"{value:.3f}" for value in (*quantiles(ours), *quantiles(rounds)[:2])]
            print(f"| {name} | {ranks} | {' | '.join(cells)} |", flush=True)
    return rows


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, 90th percentile, largest."""
    return float(np.median(values)), float(np.quantile(values, 0.9)), max(values)


def solve_table(kinds: dict[str, Any]) -> list[dict[str, Any]]:
    """CPU seconds of 20 steps with 2,048 documents on 64 ranks."""
    from lightning_megatron.context.balance import DynamicContextConfig, plan

    print(f"\nCPU ms to solve 2,048 documents on 64 ranks\n| lengths | pp | median | worst |\n{'|---' * 4}|")
    rows = []
    # Objects that exist already are no garbage of the solver.
    gc.collect()
    gc.freeze()
    for name, kind in kinds.items():
        for pp in (1, 8):
            cost, rng, spent = cost_of(Setting(pp=pp)), np.random.default_rng(0), []
            for _ in range(20):
                lengths = kind.draw(rng, 2048)
                began = time.process_time()
                plan(lengths, 64, cost, DynamicContextConfig(max_tokens_per_rank=8192), pp=pp)
                spent.append(1e3 * (time.process_time() - began))
            rows.append({"lengths": name, "pp": pp, "median_ms": statistics.median(spent), "worst_ms": max(spent)})
            print(f"| {name} | {pp} | {statistics.median(spent):.1f} | {max(spent):.1f} |", flush=True)
    return rows


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
