"""Reports of dry runs, as text and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lightning_megatron.planner.dry_run import DryRun
from lightning_megatron.planner.hardware import GIGA, TERA
from lightning_megatron.planner.held_tensors import HeldTensors
from lightning_megatron.planner.memory_tracker import OTHERS
from lightning_megatron.planner.report import EXECUTED, cut_record, cut_text, layout_text, sizes_record

Held = Mapping[int, Sequence[HeldTensors]]
"""What ranks hold at their peaks, by global rank."""

# Lines of code of a rank in a text.
_MOST_LINES = 20


def dry_text(found: Sequence[DryRun], notes: Sequence[str] = (), held: Held | None = None) -> str:
    """Report of dry runs of a run's ranks as text."""
    run = found[0].run
    lines = [f"{layout_text(run)}  on {run.sizes.world} ranks: {cut_text(run)}", *notes]
    for one in found:
        lines += ["", *_rank_lines(one)]
        if held is not None:
            lines += held_lines(held[one.rank])
    return "\n".join(lines)


def held_lines(held: Sequence[HeldTensors]) -> list[str]:
    """The tensors at the peak that no kind of memory names, with the lines that made them; JSON has all."""
    others = [one for one in held if one.kind == OTHERS]
    lines = [f"  {OTHERS} at the peak, by module and line"]
    for one in others[:_MOST_LINES]:
        shape = " x ".join(map(str, one.shape))
        lines.append(f"    {one.num_bytes / GIGA:9.3f} GB  {one.num_tensors:,} of [{shape}] {one.dtype}")
        lines.append(f"    {'':9}     {f'{one.module}, ' if one.module else ''}{one.line}")
    if rest := others[_MOST_LINES:]:
        lines.append(f"    {sum(one.num_bytes for one in rest) / GIGA:9.3f} GB  in {len(rest):,} more lines")
    return lines


def _rank_lines(one: DryRun) -> list[str]:
    stages = ", ".join(map(str, one.stages))
    lines = [f"rank {one.rank}, stage {stages}: {one.parameters:,} parameters"]
    lines.append(f"  peak memory      {one.peak_bytes / GIGA:10.3f} GB, in {one.peak_action}")
    lines += [f"    {kind:<22} {size / GIGA:8.3f} GB" for kind, size in one.peak_by_kind.items()]
    if one.host_bytes:
        lines.append(f"  host memory      {one.host_bytes / GIGA:10.3f} GB")
    total = sum(one.flops.values())
    lines.append(f"  FLOPs of a step  {total / TERA:10.1f} TFLOP ({EXECUTED})")
    lines += [f"    {kind:<22} {flops / TERA:8.1f} TFLOP" for kind, flops in one.flops.items()]
    if one.messages:
        lines.append(f"  {'messages':<16} {'':<16} {'number':>9} {'GB in all':>12} {'GB sent':>12}")
    for (axis, kind), messages in sorted(one.messages.items()):
        lines.append(
            f"    {axis:<14} {kind:<16} {messages.number:9,} {messages.tensor_bytes / GIGA:12.3f} "
            f"{messages.sent_bytes / GIGA:12.3f}"
        )
    return lines


def dry_record(found: Sequence[DryRun], notes: Sequence[str] = (), held: Held | None = None) -> dict[str, Any]:
    """Report of dry runs of a run's ranks as JSON."""
    run = found[0].run
    return {
        "layout": layout_text(run),
        "sizes": sizes_record(run),
        **cut_record(run),
        "accumulate_grad_batches": run.num_accumulated,
        "schedule": run.schedule.name,
        "flops_convention": EXECUTED,
        "is_overlapped": run.is_overlapped,
        "ranks": [
            {
                "rank": one.rank,
                "stages": list(one.stages),
                "parameters": one.parameters,
                "peak_bytes": one.peak_bytes,
                "peak_by_kind": dict(one.peak_by_kind),
                "peak_place": one.peak_action,
                "host_bytes": one.host_bytes,
                "flops": dict(one.flops),
                "messages": [
                    {"axis": axis, "kind": kind, **asdict(messages)}
                    for (axis, kind), messages in sorted(one.messages.items())
                ],
                "microbatches_run": one.num_run,
                **({} if held is None else {"held_at_peak": [asdict(tensors) for tensors in held[one.rank]]}),
            }
            for one in found
        ],
        "notes": list(notes),
    }
