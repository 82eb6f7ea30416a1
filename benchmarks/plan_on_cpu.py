"""Predicted and real steps of a small GPT on this machine's processor.

The processor is described as a GPU would be, by what is measured here first, forward and backward: products of the
model's own shapes, its attention, the elementwise kernels of a layer and of the loss, and messages between two
processes of gloo. With two processes both measure at the same time, because they share caches and memory. The constants
of GPU kernels are not used: shares are 1 of what was measured, and what is not measured here (hiding messages,
straggling) is taken as none. Then the modes of `benchmarks/step_time.py` run, and the table has predicted and measured
wall seconds of a step.

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
from benchmarks.step_samples import sample_of
from benchmarks.step_time import (
    GLOBAL_BATCH,
    HEADS,
    HIDDEN,
    LAYERS,
    MICRO_BATCH,
    MODES,
    SEQUENCE,
    VOCABULARY,
)

TOKENS = MICRO_BATCH * SEQUENCE
_SCRIPT = Path(__file__).with_name("step_time.py")
NAMES = ("one", "dp2", "tp2", "tp2+sp", "pp2")
_SMALL = 16
# Elements of the message that measures latency.


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
    up, down = (torch.randn(*shape, requires_grad=True) for shape in ((4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN)))
    x, wide = (torch.randn(TOKENS, width, requires_grad=True) for width in (HIDDEN, 4 * HIDDEN))
    products = seconds_of(trained(lambda: F.linear(x, up).sum() + F.linear(wide, down).sum()))
    heads = torch.randn(3, MICRO_BATCH, HEADS, SEQUENCE, HIDDEN // HEADS, requires_grad=True)
    attention = seconds_of(
        trained(lambda: F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True).sum())
    )
    norm = torch.nn.LayerNorm(HIDDEN)

    def rest_of_a_layer() -> Any:
        middle = x + norm(x)
        return (middle + norm(middle)).sum() + F.gelu(wide, approximate="tanh").sum()

    logits = torch.randn(TOKENS, VOCABULARY, requires_grad=True)
    targets = torch.randint(VOCABULARY, (TOKENS,))
    moved = LAYERS * seconds_of(trained(rest_of_a_layer)) + seconds_of(
        trained(lambda: F.cross_entropy(logits, targets))
    )
    found = {
        # A backward has two products for one of the forward.
        "products": 3 * 2 * 2 * TOKENS * HIDDEN * 4 * HIDDEN / products,
        # Causal: half of the pairs, two products of them; the backward has five, as the planner counts.
        "attention": 3.5 * 2 * MICRO_BATCH * SEQUENCE**2 * HIDDEN / attention,
        "memory": 3 * moved_bytes() / moved,
    }
    if int(os.environ["WORLD_SIZE"]) > 1:
        found |= joined_by_gloo(measure_tensor_parallel)()
    return found


def trained(forward: Callable[[], Any]) -> Callable[[], None]:
    """A forward and its backward."""
    return lambda: forward().backward()


def moved_bytes() -> float:
    """Bytes that elementwise kernels of one forward of a microbatch move, as the planner counts them."""
    from lightning_megatron.mesh import Sizes
    from lightning_megatron.planner.layer_work import layer_work_of
    from lightning_megatron.planner.model_parts import SequenceLengths, model_parts_of

    model_parts = model_parts_of(toy_model(), SequenceLengths(sequence=SEQUENCE))
    return sum(
        layer_work_of(part, model_parts, Sizes(world=1), MICRO_BATCH, 4).moved_bytes for part in model_parts.parts
    )


def measure_tensor_parallel() -> dict[str, float]:
    """Rates of halved products, seconds of a small message, and bytes a second each way, between two processes.

    Messages are sent between products, as a layer does: what two processes wait for each other counts. `link` is of
    sums over all, `sequence_link` of what sequence parallelism sends, gathers and scattered sums.
    """
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from lightning_megatron.comm import collectives
    from lightning_megatron.mesh import Mesh, Sizes

    tp = Mesh.build(Sizes(world=2, tp=2), dist.get_rank(), lambda ranks: dist.new_group(list(ranks))).tp
    layer, half, small = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS // 2, HIDDEN), torch.zeros(_SMALL)
    up, down = torch.randn(2 * HIDDEN, HIDDEN), torch.randn(HIDDEN, 2 * HIDDEN)

    def products() -> torch.Tensor:
        return F.linear(F.linear(layer, up), down)

    alone = seconds_of(products)

    def sent_by(send: Callable[[], object]) -> float:
        return max(seconds_of(lambda: (products(), send()), 100) - alone, 1e-9)

    latency = sent_by(lambda: collectives.all_reduce_(small, tp))
    reduced = sent_by(lambda: collectives.all_reduce_(layer.clone(), tp))
    gathered = sent_by(lambda: collectives.all_gather(half, tp))
    scattered = sent_by(lambda: collectives.reduce_scatter(layer, tp))
    # Each of two ranks sends half of the tensor to gather or to scatter it, and twice that to sum it.
    num_bytes = 4 * layer.numel()
    return {
        "tensor_products": 2 * 2 * layer.numel() * 2 * HIDDEN / alone,
        "message_seconds": latency,
        "link": num_bytes / max(reduced - latency, 1e-9),
        "sequence_link": num_bytes / max(gathered + scattered - 2 * latency, 1e-9),
    }


def measured(world: int) -> dict[str, float]:
    """The rates of the slower process of so many that measure at once."""
    ranks = run_ranks([__file__, "--measure-rank"], world, timeout_seconds=120)
    return {name: (max if name == "message_seconds" else min)(rank[name] for rank in ranks) for name in ranks[0]}


def toy_model() -> Any:
    """The model of `benchmarks/step_time.py`."""
    from lightning_megatron.models import GPTConfig

    return GPTConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        max_sequence_length=SEQUENCE,
        vocab_size=VOCABULARY,
        activation="gelu_tanh",
    )


def predicted(mode: str, rates: dict[str, float]) -> float:
    """Seconds of a step of a mode, by the planner."""
    from lightning_megatron.mesh import Sizes
    from lightning_megatron.planner.constants import Constants
    from lightning_megatron.planner.hardware import GIGA, TERA, Gpu
    from lightning_megatron.planner.model_parts import SequenceLengths
    from lightning_megatron.planner.run import Run, faults_of
    from lightning_megatron.planner.step_time import step_time

    world, options = MODES[mode]
    assert options is not None
    tp, pp = (options.get(f"{name}_model_parallel_size", 1) for name in ("tensor", "pipeline"))
    sizes = Sizes(world=world, tp=tp, pp=pp, sequence_parallel=options.get("sequence_parallel", False))
    run = Run(
        model=toy_model(),
        lengths=SequenceLengths(sequence=SEQUENCE),
        sizes=sizes,
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=MICRO_BATCH,
        precision="32-true",
    )
    assert not faults_of(run)
    products = rates["tensor_products" if tp > 1 else "products"]
    processor = Gpu(
        name="this processor",
        # A family whose constants do not scale the measured rates.
        family="ampere",
        memory_gb=8,
        memory_tb_per_second=rates["memory"] / TERA,
        half_tflops=products / TERA,
        half_matmul_tflops=products / TERA,
        pcie_gb_per_second=rates.get("sequence_link" if sizes.sequence_parallel else "link", GIGA) / GIGA,
    )
    constants = Constants(
        ampere_share=1.0,
        flash_edge=0.0,
        both_ways_edge=0.0,
        moved_backward=2.0,
        edge=0.0,
        second_flash_share=rates["attention"] / products,
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
        planned, found = (statistics.median(one[name][index] for one in rounds) for index in (0, 1))
        ratio = statistics.median(one[name][0] / one[name][1] for one in rounds)
        lines.append(f"| {name} | {planned:.3f} | {found:.3f} | {ratio:.2f} |")
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
            one[name] = (
                predicted(name, rates[MODES[name][0]]),
                sample_of(str(_SCRIPT), name, MODES[name][0])["wall_seconds"],
            )
        rounds.append(one)
        print(f"round {number + 1}: {rates} {one}", file=sys.stderr, flush=True)
    print(f"\n{table(rounds)}")


if __name__ == "__main__":
    main()
