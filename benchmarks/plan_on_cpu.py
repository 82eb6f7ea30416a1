"""The planner's clock beside real steps of a small GPT on this machine's processor.

The processor is described as a GPU would be, by what is measured here first: products of the model's own shapes, its
attention, an elementwise kernel, and messages between two processes of gloo. With two processes both measure at the
same time, because they share caches and memory. The constants of GPU kernels are set aside: shares are 1 of what was
measured, and what has no number here (hiding messages, straggling) is taken as none. Then the modes of
`benchmarks/step_time.py` run, and the table has predicted and measured wall seconds of a step.

    python benchmarks/plan_on_cpu.py --rounds 3
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.joined import joined_by_gloo
from benchmarks.machine import as_line, machine
from benchmarks.ranks import run_ranks
from benchmarks.step_time import (
    GLOBAL_BATCH,
    HEADS,
    HIDDEN,
    LAYERS,
    MICRO_BATCH,
    MODES,
    SEQUENCE,
    VOCABULARY,
    run_mode,
)

TOKENS = MICRO_BATCH * SEQUENCE
NAMES = ("one", "dp2", "tp2", "tp2+sp", "pp2")
_LARGE, _SMALL = 1 << 20, 16
# Numbers in the messages that tell bandwidth and latency.


def seconds_of(run: Callable[[], object], repeats: int = 20) -> float:
    """The median of so many calls, after one that warms up."""
    run()
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def measure_rank() -> dict[str, float]:
    """Rates of this process, in FLOP/s and bytes/s, and seconds of messages, in a world of one or two."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(1)
    x, up, down = torch.randn(TOKENS, HIDDEN), torch.randn(HIDDEN, 4 * HIDDEN), torch.randn(4 * HIDDEN, HIDDEN)
    wide = x @ up
    products = seconds_of(lambda: (torch.mm(x, up), torch.mm(wide, down)))
    heads = [torch.randn(MICRO_BATCH, HEADS, SEQUENCE, HIDDEN // HEADS) for _ in range(3)]
    attention = seconds_of(lambda: F.scaled_dot_product_attention(*heads, is_causal=True))
    moved = seconds_of(lambda: F.gelu(wide, approximate="tanh"))
    found = {
        "products": 2 * 2 * TOKENS * HIDDEN * 4 * HIDDEN / products,
        # Causal: half of the pairs, two products of them.
        "attention": 2 * MICRO_BATCH * SEQUENCE**2 * HIDDEN / attention,
        "memory": 2 * wide.numel() * 4 / moved,
    }
    if int(os.environ["WORLD_SIZE"]) > 1:
        found |= joined_by_gloo(measure_messages)()
    return found


def measure_messages() -> dict[str, float]:
    """Of an all-reduce between two processes: seconds of a small one, and bytes each way a second of a large one."""
    import torch
    import torch.distributed as dist

    large, small = torch.zeros(_LARGE), torch.zeros(_SMALL)
    latency = seconds_of(lambda: dist.all_reduce(small), 100)
    seconds = seconds_of(lambda: dist.all_reduce(large))
    # Two ranks: each sends half of the tensor, and half of the sums.
    return {"message_seconds": latency, "link": 4 * _LARGE / max(seconds - latency, 1e-9)}


def measured(world: int) -> dict[str, float]:
    """The rates of the slower process of so many that measure at once."""
    ranks = run_ranks([__file__, "--measure-rank"], world, timeout_seconds=120)
    worst = dict.fromkeys(("products", "attention", "memory", "link"), min)
    return {name: worst.get(name, max)(rank[name] for rank in ranks) for name in ranks[0]}


def predicted(mode: str, rates: dict[str, float]) -> float:
    """Seconds of a step of a mode, by the planner."""
    from lightning_megatron.mesh import Sizes
    from lightning_megatron.models import GPTConfig
    from lightning_megatron.planner.anatomy import Texts
    from lightning_megatron.planner.constants import Constants
    from lightning_megatron.planner.hardware import GIGA, TERA, Gpu
    from lightning_megatron.planner.run import Run, faults_of
    from lightning_megatron.planner.step_time import step_time

    world, options = MODES[mode]
    assert options is not None
    tp, pp = (options.get(f"{name}_model_parallel_size", 1) for name in ("tensor", "pipeline"))
    model = GPTConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        max_sequence_length=SEQUENCE,
        vocab_size=VOCABULARY,
        activation="gelu_tanh",
    )
    sizes = Sizes(world=world, tp=tp, pp=pp, sequence_parallel=options.get("sequence_parallel", False))
    run = Run(
        model=model,
        texts=Texts(sequence=SEQUENCE),
        sizes=sizes,
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=MICRO_BATCH,
        precision="32-true",
    )
    assert not faults_of(run)
    processor = Gpu(
        name="this processor",
        memory_gb=8,
        memory_tb_per_second=rates["memory"] / TERA,
        half_tflops=rates["products"] / TERA,
        half_matmul_tflops=rates["products"] / TERA,
        pcie_gb_per_second=rates.get("link", GIGA) / GIGA,
    )
    constants = Constants(
        blackwell_share=1.0,
        edge=0.0,
        second_flash_share=rates["attention"] / rates["products"],
        layer_seconds=0.0,
        link_share=1.0,
        link_seconds=rates.get("message_seconds", 0.0),
        hop_seconds=0.0,
        exposed_tensor=1.0,
        exposed_hop=1.0,
        exposed_gather=0.0,
        unfused_traffic=1.0,
        traffic=1.0,
        step_seconds=0.0,
        straggling=0.0,
    )
    return step_time(run, processor, constants).total


def table(rounds: list[dict[str, tuple[float, float]]]) -> str:
    """Medians of the rounds."""
    lines = ["| mode | predicted wall s/step | measured | predicted / measured |", "|---|---|---|---|"]
    for name in rounds[0]:
        told, found = (statistics.median(one[name][place] for one in rounds) for place in (0, 1))
        ratio = statistics.median(one[name][0] / one[name][1] for one in rounds)
        lines.append(f"| {name} | {told:.3f} | {found:.3f} | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured and run")
    parser.add_argument("--measure-rank", action="store_true", help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    if options.measure_rank:
        print(json.dumps(measure_rank()))
        return
    print(as_line(machine()), flush=True)
    rounds = []
    for number in range(options.rounds):
        rates = {world: measured(world) for world in (1, 2)}
        one: dict[str, tuple[float, float]] = {}
        for name in NAMES:
            one[name] = predicted(name, rates[MODES[name][0]]), run_mode(name)["wall_seconds"]
        rounds.append(one)
        print(f"round {number + 1}: {rates} {one}", file=sys.stderr, flush=True)
    print(f"\n{table(rounds)}")


if __name__ == "__main__":
    main()
