"""Speed of one GPT or Mixtral shape on the GPUs of a machine: every axis, schedule and overlap, in one table.

Each row trains the same rows of the same weights on another layout, under the Trainer: a step is eight microbatches, of
which data-parallel ranks have their share. The losses of every row must be those of the first within bf16's rounding;
one that strays shows no time, and the exit status is 1. Seconds are those of the slowest rank, medians of the timed
steps; memory is that of the fullest rank. TFLOP/s are model FLOPs of a GPU, as in `benchmarks/gpu.py`.

    python benchmarks/multi_gpu.py --json multi_gpu.json          # all GPUs of this machine, over NCCL
    python benchmarks/multi_gpu.py --device cpu --ranks 2 --size smoke --rows "tp, sp" "pp, ZB-H1"
"""

import argparse
import json
import os
import statistics
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_megatron.models import GPTConfig

MICROBATCHES = 8
# Ranks add up in another order, and products of slices round otherwise.
TOLERANCE = 5e-3
FIRST = "dp"


def rows(ranks: int, has_experts: bool) -> dict[str, dict[str, Any]]:
    """Arguments of MegatronStrategy for each row, by its name; rows that such a number of ranks cannot have are out."""
    from lightning_megatron import ContextConfig, OptimizerConfig, PipelineConfig

    def stages(schedule: str, vp: int = 1, pp: int = ranks, **rest: Any) -> dict[str, Any]:
        config = PipelineConfig(schedule=schedule, **rest)  # type: ignore[arg-type]
        sizes = {"pipeline_model_parallel_size": pp, "virtual_pipeline_model_parallel_size": vp}
        return sizes | {"pipeline": config, "num_microbatches": MICROBATCHES}

    zero = OptimizerConfig(kind="distributed")
    hidden = OptimizerConfig(kind="distributed", overlap_grad_reduce=True, overlap_param_gather=True)
    tp = {"tensor_model_parallel_size": ranks}
    found: dict[str, dict[str, Any]] = {
        FIRST: {},
        "dp, overlap": {"optimizer": OptimizerConfig(overlap_grad_reduce=True)},
        "dp, distributed optimizer": {"optimizer": zero},
        "dp, distributed optimizer, overlap": {"optimizer": hidden},
        "tp": tp,
        "tp, sp": tp | {"sequence_parallel": True},
        "pp, GPipe": stages("gpipe"),
        "pp, 1F1B": stages("1f1b"),
        "pp, ZB-H1": stages("zb_h1"),
        "pp, vp 2, interleaved": stages("interleaved", 2),
        "pp, vp 2, ZB-V": stages("zb_v", 2),
        "pp, vp 2, DualPipeV": stages("dualpipe_v", 2),
        "cp, ring": {"context_parallel_size": ranks},
        "cp, all-gather": {"context_parallel_size": ranks, "context": ContextConfig(comm_type="all_gather")},
        "cp, all-to-all": {"context_parallel_size": ranks, "context": ContextConfig(comm_type="all_to_all")},
    }
    if ranks % 4 == 0:
        both = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
        found["tp 2, sp, pp 2, dp"] = both | stages("1f1b", pp=2) | {"optimizer": hidden}
        found["tp 2, sp, cp 2, dp"] = both | {"context_parallel_size": 2, "optimizer": hidden}
    if has_experts:
        ep = {"expert_model_parallel_size": ranks}
        found["ep, dp"] = ep | {"optimizer": hidden}
        found["ep, tp, sp"] = ep | tp | {"sequence_parallel": True}
        if ranks % 4 == 0:
            joint = stages("dualpipe_v", 2, pp=2, overlap_expert_exchange=True)
            found["ep 2, pp 2, vp 2, DualPipeV, overlapped exchange"] = joint | {"expert_model_parallel_size": 2}
    for options in found.values():
        cut = 1
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
            cut *= options.get(name, 1)
        # A data-parallel rank has its share of the step's microbatches.
        options["num_microbatches"] = max(1, MICROBATCHES * cut // ranks)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# In each rank


def train(row: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds, losses and memory of this rank on the row's layout, or why it could not."""
    import torch

    from benchmarks.device_runs import Plan, Recorder, make_optimizer
    from benchmarks.fit import fit
    from benchmarks.shapes import SHAPES
    from lightning_megatron import ConfigurationError
    from lightning_megatron.models import GPTModel

    warnings.simplefilter("ignore")
    is_cuda, rank = arguments.device == "cuda", int(os.environ["RANK"])
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    plan = Plan(
        config=config_of(arguments),
        sequence=arguments.sequence,
        microbatch_rows=SHAPES[arguments.size].microbatch_rows(arguments.sequence),
        microbatches=MICROBATCHES,
        warmup_steps=arguments.warmup,
        timed_steps=arguments.steps,
        device=device,
    )
    recorder = Recorder(plan)
    torch.manual_seed(0)
    try:
        fit(
            lambda: GPTModel(plan.config),
            lambda dp: plan.make_loader(dp),
            rows(arguments.ranks, plan.config.moe is not None)[row],
            make_optimizer,
            recorder.add,
            use_distributed_sampler=True,
            accelerator="gpu" if is_cuda else "cpu",
            devices=arguments.ranks,
            precision="bf16-mixed",
        )
    except ConfigurationError as error:
        return {"not_here": " ".join(str(error).split())}
    except torch.OutOfMemoryError as error:
        return {"not_here": f"out of memory: {str(error).splitlines()[0]}"}
    return recorder.figures()


def config_of(arguments: argparse.Namespace) -> "GPTConfig":
    """The model of the shape, with as many layers as asked for or as it has."""
    from benchmarks.shapes import SHAPES

    shape = SHAPES[arguments.size]
    return shape.config(arguments.layers or shape.layers, arguments.sequence)


# ----------------------------------------------------------------------------------------------------------------------
# In the process that starts the others


def ask(row: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of a row over all ranks, or in `fault` why there are none."""
    from benchmarks.ranks import RankFailed, RanksTooSlow, run_ranks

    names = ("device", "size", "ranks", "sequence", "layers", "warmup", "steps")
    settings = [word for name in names for word in (f"--{name}", str(getattr(arguments, name)))]
    try:
        answers = run_ranks(
            [__file__, "--run-row", row, *settings], arguments.ranks, timeout_seconds=arguments.row_seconds
        )
    except (RankFailed, RanksTooSlow) as error:
        print(error, file=sys.stderr)
        return {"fault": f"failed: {str(error).strip().splitlines()[-1]}", "is_broken": True}
    if reason := next((answer["not_here"] for answer in answers if "not_here" in answer), ""):
        return {"fault": reason, "is_broken": False}
    return combined(answers)


def combined(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the ranks' figures: the slowest rank's seconds, the mean of their losses, the largest memory."""
    return {
        "seconds": [max(times) for times in zip(*(answer["seconds"] for answer in answers), strict=True)],
        # Ranks that share a replica have one loss, and replicas have equally many tokens.
        "losses": [statistics.mean(losses) for losses in zip(*(one["losses"] for one in answers), strict=True)],
        "peak_bytes": max(answer["peak_bytes"] for answer in answers),
        "fault": "",
        "is_broken": False,
    }


def require_same(found: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """The figures, or a fault where their losses are not those of the first row."""
    for step, (loss, wanted) in enumerate(zip(found["losses"], first["losses"], strict=True), start=1):
        # Written so that NaN is an error.
        if not abs(loss - wanted) <= TOLERANCE * abs(wanted):
            text = f"wrong: the loss of step {step} is {loss:.4f}, that of the first row is {wanted:.4f}"
            return found | {"fault": text, "is_broken": True}
    return found


def line(row: str, found: dict[str, Any], first: dict[str, Any], arguments: argparse.Namespace) -> str:
    """A row of the table."""
    from benchmarks.shapes import SHAPES
    from lightning_megatron.transformer import cost

    if found["fault"]:
        return f"| {row} | {found['fault']} |" + "  |" * 4
    seconds = statistics.median(found["seconds"])
    step_rows = SHAPES[arguments.size].microbatch_rows(arguments.sequence) * MICROBATCHES
    flops = cost.training_flops(config_of(arguments), batch=step_rows, sequence=arguments.sequence)
    ratio = "" if first["fault"] else f"{statistics.median(first['seconds']) / seconds:.3f}"
    return (
        f"| {row} | {step_rows * arguments.sequence / seconds:,.0f} | {flops / seconds / arguments.ranks / 1e12:.4g} "
        f"| {found['peak_bytes'] / 2**30:.2f} | {ratio} | {found['losses'][-1]:.4f} |"
    )


HEAD = f"| row | tokens/s | TFLOP/s a rank | peak GiB | speed to {FIRST} | last loss |\n" + "|---" * 6 + "|"


def compare(arguments: argparse.Namespace) -> bool:
    """Runs the rows, prints the table as it grows, saves the figures; whether all that ran was right."""
    from benchmarks.machine import as_line, machine
    from benchmarks.shapes import SHAPES

    facts = machine()
    print(f"{as_line(facts)}\n{arguments.ranks} ranks, {arguments.size} at {arguments.sequence}\n\n{HEAD}", flush=True)
    record: dict[str, Any] = {"machine": facts, "settings": vars(arguments) | {"json": None}, "rows": {}}
    for row in rows(arguments.ranks, bool(SHAPES[arguments.size].experts)):
        # The first row is the yardstick.
        if arguments.rows and row not in arguments.rows and row != FIRST:
            continue
        found = ask(row, arguments)
        first = record["rows"].get(FIRST, found)
        if not found["fault"] and not first["fault"]:
            found = require_same(found, first)
        record["rows"][row] = found
        print(line(row, found, first, arguments), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(record, indent=1))
    return not any(found["is_broken"] for found in record["rows"].values())


def main() -> None:
    import torch

    from benchmarks.shapes import SHAPES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()), help="2, 4 or 8")
    parser.add_argument("--size", default="1.3b", choices=list(SHAPES))
    parser.add_argument("--sequence", type=int, default=0, help="instead of the shape's first")
    parser.add_argument("--layers", type=int, default=0, help="instead of the shape's")
    parser.add_argument("--rows", nargs="+", default=[], help="some rows of the table, beside the first")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones, at least 1")
    parser.add_argument("--steps", type=int, default=5, help="timed steps; their median counts")
    parser.add_argument("--row-seconds", type=float, default=300.0, help="after this long a row is given up")
    parser.add_argument("--json", type=Path, help="where to save all figures; written after every row")
    parser.add_argument("--run-row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.sequence = arguments.sequence or SHAPES[arguments.size].sequences[0]
    if arguments.ranks not in (2, 4, 8):
        parser.error("--ranks must be 2, 4 or 8")
    if min(arguments.warmup, arguments.steps) < 1:
        parser.error("--warmup and --steps must be at least 1")
    known = rows(arguments.ranks, bool(SHAPES[arguments.size].experts))
    if unknown := [row for row in arguments.rows if row not in known]:
        parser.error(f"--rows {', '.join(unknown)} must be of {', '.join(known)}")
    if arguments.run_row:
        print(json.dumps(train(arguments.run_row, arguments)))
    else:
        sys.exit(0 if compare(arguments) else 1)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
