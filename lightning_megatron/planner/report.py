"""An estimate, and what a search found, as text for a reader and as plain data for a program."""

from typing import Any

from lightning_megatron.planner.estimate import Estimate
from lightning_megatron.planner.flops import HARDWARE_ALL_PAIRS, MODEL, MODEL_ALL_PAIRS, step_flops
from lightning_megatron.planner.hardware import GIGA, TERA
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.search import Found

_CONVENTIONS = (MODEL, MODEL_ALL_PAIRS, HARDWARE_ALL_PAIRS)
# Of a longer pipeline its ends and its middle are shown.
_MOST_STAGES = 6


def layout_text(run: Run) -> str:
    """As `--layout` reads it."""
    sizes = run.sizes
    parts = [f"tp={sizes.tp}", f"pp={sizes.pp}"]
    parts += [f"{name}={sizes.of(name)}" for name in ("vp", "cp", "ep", "etp") if sizes.of(name) > 1]
    parts.append(f"mbs={run.micro_batch_size}")
    if run.recompute.granularity != "none":
        parts.append(f"recompute={run.recompute.granularity}")
    return ",".join(parts)


def estimate_text(found: Estimate, *, num_tokens: float = 0.0) -> str:
    """One layout, explained."""
    run = found.run
    sizes = run.sizes
    peak = found.gpu.memory_gb
    fits = "yes" if found.peak_bytes <= found.gpu.memory_bytes else "no"
    lines = [
        f"{layout_text(run)}  on {sizes.world} x {found.gpu.name}: {sizes.dp} replicas of {run.num_microbatches} "
        f"microbatches of {run.micro_batch_size}, schedule {run.schedule.name}",
        "",
        f"step         {found.step_seconds:.4g} s, {found.tokens_per_second:,.0f} tokens/s, "
        f"{found.tokens_per_second / sizes.world:,.0f} on each GPU",
    ]
    for convention in _CONVENTIONS:
        lines.append(
            f"FLOP/s       {found.flops_per_second(convention) / TERA:.0f} TFLOP/s on each GPU, "
            f"{found.share_of_peak(convention):.1%} of the dense peak ({convention.name})"
        )
    lines += ["", *_time_lines(found), "", *_memory_lines(found)]
    lines += [
        "",
        f"fits         {fits}: {found.peak_bytes / GIGA:.1f} GB of {peak:g} GB",
    ]
    lines.append(f"checkpoint   {found.checkpoint_bytes / GIGA:,.1f} GB, weights and two moments")
    if num_tokens:
        lines.append(
            f"to train     {found.days(num_tokens):,.1f} days for {num_tokens:.4g} tokens, without interruption"
        )
    return "\n".join(lines)


def _time_lines(found: Estimate) -> list[str]:
    time = found.time
    rows = [("compute", time.compute)]
    rows += [(f"exposed {axis}", seconds) for axis, seconds in sorted(time.exposed.items()) if seconds > 0]
    rows += [("bubble", time.bubble), ("optimizer", time.optimizer), ("other", time.other)]
    return [f"{name:<12} {seconds:9.4g} s  {seconds / time.total:6.1%}" for name, seconds in rows]


def _memory_lines(found: Estimate) -> list[str]:
    kinds = list(found.memory[0].by_kind())
    lines = ["GB on a rank of the pipeline, at the peak:", f"{'rank':>6} {'total':>8}"]
    lines[-1] += "".join(f" {kind.replace('_', ' '):>13}" for kind in kinds)
    last = len(found.memory) - 1
    shown = range(last + 1) if last < _MOST_STAGES else (0, 1, last // 2, last)
    for rank in shown:
        memory = found.memory[rank]
        by_kind = "".join(f" {value / GIGA:13.2f}" for value in memory.by_kind().values())
        lines.append(f"{rank:>6} {memory.total / GIGA:8.2f}{by_kind}")
    return lines


def found_text(found: Found, gpu_name: str, best: list[Estimate], *, num_shown: int) -> str:
    """The layouts that a search found, best first, and why the others fell out."""
    total = len(found.fitting) + len(found.rejected)
    lines = [f"{len(found.fitting)} of {total} layouts fit on {gpu_name}, fastest first:", ""]
    lines.append(
        f"{'layout':<44} {'step s':>9} {'tokens/s':>12} {'TFLOP/s':>8} {'MFU':>6} {'GB':>7} {'bubble':>7} "
        f"{'exposed':>8}"
    )
    for one in best[:num_shown]:
        time = one.time
        lines.append(
            f"{layout_text(one.run):<44} {one.step_seconds:9.4g} {one.tokens_per_second:12,.0f} "
            f"{one.flops_per_second() / TERA:8.0f} {one.share_of_peak():6.1%} {one.peak_bytes / GIGA:7.1f} "
            f"{time.bubble / time.total:7.1%} {sum(time.exposed.values()) / time.total:8.1%}"
        )
    lines += ["", f"MFU: {MODEL.name}. Not shown: {max(len(found.fitting) - num_shown, 0)} that fit."]
    for why, number in found.reasons().items():
        lines.append(f"fell out: {number} layouts, {why}")
    return "\n".join(lines)


def record_of(found: Estimate, *, num_tokens: float = 0.0) -> dict[str, Any]:
    """Everything that is known of one layout, as JSON."""
    run, time = found.run, found.time
    sizes = run.sizes
    record: dict[str, Any] = {
        "layout": layout_text(run),
        "sizes": {name: sizes.of(name) for name in ("world", "tp", "pp", "vp", "cp", "dp", "ep", "etp", "edp")},
        "micro_batch_size": run.micro_batch_size,
        "num_microbatches": run.num_microbatches,
        "recompute": run.recompute.granularity,
        "gpu": found.gpu.name,
        "parameters": run.anatomy.parameters(),
        "step_seconds": found.step_seconds,
        "tokens_per_second": found.tokens_per_second,
        "flops": [
            {
                "convention": convention.name,
                "step_flops": step_flops(run, convention),
                "flops_per_second": found.flops_per_second(convention),
                "share_of_peak": found.share_of_peak(convention),
            }
            for convention in _CONVENTIONS
        ],
        "seconds": {
            "compute": time.compute,
            "exposed": dict(time.exposed),
            "bubble": time.bubble,
            "optimizer": time.optimizer,
            "other": time.other,
        },
        "memory_bytes": [memory.by_kind() | {"total": memory.total} for memory in found.memory],
        "fits": found.peak_bytes <= found.gpu.memory_bytes,
        "checkpoint_bytes": found.checkpoint_bytes,
    }
    if num_tokens:
        record["days"] = found.days(num_tokens)
    return record
