"""What the pipeline's runtime costs a microbatch, beside megatron-core's, at a shape so tiny that little else is left.

Two processes run 1F1B over a chain of linears, and in turn, in the same processes, megatron-core's schedule over as
many of torch's; each first in every other round. Wall time is that of the slower rank, CPU time that of both.

    python benchmarks/pipeline_runtime.py --rounds 9
    python benchmarks/pipeline_runtime.py --megatron-python PYTHON    # one with megatron-core and this package
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MICROBATCHES, STEPS = 16, 8
AIM = "at most 1.3 of megatron-core's time a microbatch"
OURS, PEER = "lightning_megatron", "megatron-core"


def run_rank(rounds: int) -> None:
    """Runs both in turn on this rank, and prints seconds a microbatch of each round as JSON."""
    import torch
    import torch.distributed as dist

    from benchmarks.megatron_run import lead_to_cpu
    from benchmarks.pipeline import Run, Shape

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = Shape(layers=2, hidden=32, tokens=16, microbatches=MICROBATCHES)
    steps: dict[str, Callable[[], None]] = {OURS: Run("1f1b", 1, shape).step}
    lead_to_cpu()
    steps[PEER] = megatron_step(shape)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(-1, rounds):
        for name in sorted(steps, reverse=bool(number % 2)):
            gc.collect()
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                steps[name]()
            spent = time.perf_counter() - wall, time.process_time() - cpu
            # The first round warms up.
            if number >= 0:
                found[name].append((spent[0] / STEPS / MICROBATCHES, spent[1] / STEPS / MICROBATCHES))
    dist.barrier()
    print(json.dumps(found))
    dist.destroy_process_group()


def megatron_step(shape: Any) -> Callable[[], None]:
    """A step of megatron-core's schedule over this rank's part of the chain."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig
    from torch import Tensor, nn

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=1,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        use_cpu_initialization=True,
        batch_p2p_comm=False,
    )
    inputs = torch.randn(shape.microbatches, shape.tokens, 1, shape.hidden)
    is_first = parallel_state.is_pipeline_first_stage()

    class Chain(nn.Module):
        model_type = ModelType.encoder_or_decoder

        def __init__(self) -> None:
            super().__init__()
            self.config = config
            own = [(nn.Linear(shape.hidden, shape.hidden, bias=False), nn.Tanh()) for _ in range(shape.layers // 2)]
            self.layers = nn.Sequential(*(one for pair in own for one in pair))
            self.received: Tensor | None = None

        def set_input_tensor(self, received: list[Tensor | None]) -> None:
            self.received = received[0]

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.layers(x if is_first else self.received)
            return output

    model, run = Chain(), get_forward_backward_func()

    def forward_step(batches: Any, chain: Any) -> Any:
        def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return output.square().mean(), {}

        return chain(next(batches)), loss_of

    def step() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        run(
            forward_step_func=forward_step,
            data_iterator=iter(inputs),
            model=[model],
            num_microbatches=shape.microbatches,
            seq_length=shape.tokens,
            micro_batch_size=1,
            forward_only=False,
        )
        assert all(parameter.grad is not None for parameter in model.parameters())

    return step


def report(ranks: list[dict[str, Any]]) -> str:
    """The table: medians over rounds, and the median of the ratios of each round."""
    rounds = {
        name: [
            (max(wall for wall, _ in pair), sum(cpu for _, cpu in pair))
            for pair in zip(*(rank[name] for rank in ranks), strict=True)
        ]
        for name in (OURS, PEER)
    }
    lines = [
        "| runtime | wall ms a microbatch | CPU ms a microbatch | wall, to megatron-core | CPU, to megatron-core |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, found in rounds.items():
        milliseconds = [1000 * statistics.median(column) for column in zip(*found, strict=True)]
        ratios = [
            statistics.median(ours[kind] / theirs[kind] for ours, theirs in zip(found, rounds[PEER], strict=True))
            for kind in (0, 1)
        ]
        lines.append(f"| {name} | {milliseconds[0]:.3f} | {milliseconds[1]:.3f} | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    return "\n".join([*lines, "", f"Aim: {AIM}."])


def main() -> None:
    from benchmarks.machine import machine
    from benchmarks.ranks import run_ranks

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help=f"how often both run {STEPS} steps, in turn")
    parser.add_argument("--json", type=Path, help="where to save the records of both ranks")
    parser.add_argument("--megatron-python", default=sys.executable, help="an interpreter with megatron-core")
    parser.add_argument("--run-rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run_rank:
        run_rank(arguments.rounds)
        return
    command = [__file__, "--run-rank", "--rounds", str(arguments.rounds)]
    try:
        ranks = run_ranks(command, 2, python=arguments.megatron_python)
    except RuntimeError as error:
        raise SystemExit(f"a rank failed; it needs megatron-core:\n{error}") from None
    print(", ".join(machine().values()), f"{MICROBATCHES} microbatches a step, {arguments.rounds} rounds", sep="; ")
    print(report(ranks))
    if arguments.json:
        arguments.json.write_text(json.dumps(ranks, indent=1))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
