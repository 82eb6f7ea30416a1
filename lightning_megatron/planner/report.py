"""Reports of an estimate and of a search, as text and as JSON."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from lightning_megatron.mesh import StageLayout
from lightning_megatron.pipeline.registry import default_name
from lightning_megatron.planner.balanced_batch import BalancedBatch
from lightning_megatron.planner.estimate import Estimate
from lightning_megatron.planner.flops import HARDWARE_ALL_PAIRS, MODEL, MODEL_ALL_PAIRS, step_flops
from lightning_megatron.planner.hardware import GIGA, TERA, Products
from lightning_megatron.planner.model_size import ModelSize
from lightning_megatron.planner.run import Run, RunSettings
from lightning_megatron.planner.search import Found, Rejected
from lightning_megatron.planner.step_time import ROUTING

EXECUTED = "executed by this package"
"""Name of the FLOPs that a dry run of all ranks counts, needed or not; no publication uses them."""

# A report of a longer pipeline shows its ends and its middle.
_MOST_STAGES = 6
_PRODUCTS: dict[Products, str] = {
    "double": "float64",
    "full": "float32 without tensor cores",
    "half": "16 bits",
    "fp8": "FP8",
}
# So many rejected layouts are shown that lack the least memory.
_NUM_NEAREST = 3


def model_text(run: RunSettings, size: ModelSize) -> str:
    """One line that describes the run: model, parameters, samples, precision."""
    parts = [f"{size.name} with {_counted(size.parameters)} parameters"]
    if size.active:
        parts.append(f"of which a token uses {_counted(size.active)}")
    if size.trained != size.parameters:
        parts.append(f"{_counted(size.trained)} of them trained")
    lengths = run.lengths
    length = f"{lengths.sequence:,}" + (f" + {lengths.decoder_sequence:,}" if lengths.decoder_sequence else "")
    parts.append(f"samples of {length} tokens" + (f" with {lengths.images} image" if lengths.images else ""))
    batches = f"{run.num_accumulated} x " if run.num_accumulated > 1 else ""
    parts.append(f"{batches}{run.global_batch_size:,} samples a step")
    return ", ".join([*parts, run.precision + (" and FP8" if run.fp8 is not None else "")])


def model_record(run: RunSettings, size: ModelSize) -> dict[str, Any]:
    """The run's model and batch as JSON."""
    return {
        "model": size.name,
        "parameters": size.parameters,
        "trained_parameters": size.trained,
        "sequence_length": run.lengths.sequence,
        "global_batch_size": run.global_batch_size,
        "accumulate_grad_batches": run.num_accumulated,
        "precision": run.precision,
        "fp8": run.fp8 is not None,
    }


def _counted(number: int) -> str:
    return f"{number / GIGA:,.4g} billion" if number >= GIGA else f"{number / 1e6:,.4g} million"


def _flops_by_convention(found: Estimate) -> dict[str, float]:
    """FLOPs of a step by the name of their convention; without causal attention all pairs always count. Of a model
    that is not the package's those alone are known that were measured."""
    run, executed = found.run, {} if found.executed_flops is None else {EXECUTED: found.executed_flops}
    if not isinstance(run, Run):
        return executed
    is_causal = any(part.layer is not None and part.layer.is_causal for part in run.model_parts.parts)
    conventions = (MODEL, MODEL_ALL_PAIRS, HARDWARE_ALL_PAIRS) if is_causal else (MODEL, HARDWARE_ALL_PAIRS)
    names = [one.name if is_causal else one.name.partition(",")[0] for one in conventions]
    flops = {name: step_flops(run, one) for name, one in zip(names, conventions, strict=True)}
    return flops | executed


def _utilisation(run: RunSettings) -> str:
    """Name of the share of the peak in a report: recomputation counts in what was measured."""
    return "MFU" if isinstance(run, Run) else "HFU"


def _peak_text(found: Estimate) -> str:
    """The peak that MFU divides by, in words."""
    return f"dense peak in {_PRODUCTS[found.timed_as]}, {found.gpu.peak_flops(found.timed_as) / TERA:,.4g} TFLOP/s"


def layout_text(run: RunSettings) -> str:
    """A layout in the notation of `--layout`."""
    sizes = run.sizes
    parts = [f"tp={sizes.tp}", f"pp={sizes.pp}"]
    parts += [f"{name}={sizes.of(name)}" for name in ("vp", "cp", "ep", "etp") if sizes.of(name) > 1]
    if run.balanced is None:
        parts.append(f"mbs={run.micro_batch_size}")
    if run.recompute.granularity != "none":
        parts.append(f"recompute={run.recompute.granularity}")
    if run.group_size or run.is_overlapped:
        parts.append("schedule=recipe")
    elif run.schedule_name not in (None, default_name(sizes.vp)):
        parts.append(f"schedule={run.schedule_name}")
    if sizes.stage_layout != StageLayout():
        parts.append(f"stages={'cost' if sizes.stage_layout == StageLayout(balance='cost') else 'recipe'}")
    return ",".join(parts)


def cut_text(run: RunSettings) -> str:
    """Microbatches of a step and the schedule, in words."""
    if run.balanced is None:
        text = f"data parallel {run.sizes.dp}: {run.num_microbatches} microbatches of {run.micro_batch_size} a rank"
    else:
        widths = "; ".join(f"{number} over {size} ranks" for size, number in _widths(run.balanced).items())
        text = f"{len(run.balanced.lengths):,} documents in {run.num_microbatches} microbatches a rank, packs: {widths}"
    more = f", {run.num_accumulated} batches a step" if run.num_accumulated > 1 else ""
    return f"{text}, schedule {schedule_text(run)}{more}"


def cut_record(run: RunSettings) -> dict[str, Any]:
    """Microbatches of a step as JSON."""
    if run.balanced is None:
        return {"micro_batch_size": run.micro_batch_size, "num_microbatches": run.num_microbatches}
    step = run.balanced
    return {
        "num_microbatches": run.num_microbatches,
        "num_documents": len(step.lengths),
        "num_tokens": step.num_tokens,
        "packs_by_group_size": {str(size): number for size, number in _widths(step).items()},
    }


def sizes_record(run: RunSettings) -> dict[str, int]:
    """Sizes of the axes as JSON."""
    return {name: run.sizes.of(name) for name in ("world", "tp", "pp", "vp", "cp", "dp", "ep", "etp", "edp")}


def _widths(step: BalancedBatch) -> dict[int, int]:
    """Number of packs of documents by the number of ranks that run them."""
    sizes = Counter(group.size for slot in step.plan.slots for group in slot if group.documents)
    return dict(sorted(sizes.items()))


def schedule_text(run: RunSettings) -> str:
    """Name of a schedule, and whether forwards overlap backwards, or one call has all microbatches."""
    more = ", forwards beside backwards" * run.is_overlapped + ", all microbatches in one call" * run.is_collective
    return run.schedule.name + more


def estimate_text(found: Estimate, *, num_tokens: float | None = None) -> str:
    """Report of one layout as text."""
    run = found.run
    sizes = run.sizes
    peak = found.gpu.memory_gb
    fits = "yes" if found.peak_bytes <= found.gpu.memory_bytes else "no"
    lines = [
        f"{layout_text(run)}  on {sizes.world} x {found.gpu.name}: {cut_text(run)}",
        "",
        f"step         {found.step_seconds:.4g} s, {found.tokens_per_second:,.0f} tokens/s, "
        f"{found.tokens_per_second / sizes.world:,.0f} on each GPU",
    ]
    for index, (name, flops) in enumerate(_flops_by_convention(found).items()):
        lines.append(
            f"{'' if index else _utilisation(run):<12} {found.share_of_peak(flops):.1%} of the peak, "
            f"{found.flops_per_second(flops) / TERA:.4g} TFLOP/s on each GPU ({name})"
        )
    lines.append(f"{'':<12} the peak: {_peak_text(found)}")
    if found.executed_flops is not None:
        each = found.executed_flops / sizes.world
        lines.append(f"{'FLOPs':<12} {each / TERA:,.4g} TFLOP a step on each GPU in the mean ({EXECUTED})")
    lines += ["", *_time_lines(found), *_range_lines(found), "", *_memory_lines(found)]
    lines += ["", f"fits         {fits}: {found.peak_bytes / GIGA:.1f} GB of {peak:g} GB"]
    lines.append(f"checkpoint   {found.checkpoint_bytes / GIGA:,.1f} GB, weights, and two moments of what is trained")
    if num_tokens:
        lines.append(
            f"to train     {found.days(num_tokens):,.1f} days for {num_tokens:.4g} tokens, without interruption"
        )
    return "\n".join(lines)


def _time_lines(found: Estimate) -> list[str]:
    time = found.time
    rows = [("compute", time.compute)]
    rows += [(exposed_text(axis), seconds) for axis, seconds in sorted(time.exposed.items()) if seconds > 0]
    rows += [("bubble", time.bubble), ("optimizer", time.optimizer), ("other", time.other)]
    return [f"{name:<12} {seconds:9.4g} s  {seconds / time.total:6.1%}" for name, seconds in rows]


def exposed_text(name: str) -> str:
    """Name of a part of the exposed time in a report."""
    return name if name == ROUTING else f"exposed {name}"


def _range_lines(found: Estimate) -> list[str]:
    ratios, seconds = found.ratios, found.step_seconds
    sure = "with the constants of the GPU's own file, of which no published run tells"
    if ratios is not None:
        sure = (
            f"{ratios.low * seconds:.4g} to {ratios.high * seconds:.4g} s: four of five of {ratios.of} took "
            f"{ratios.low:.2f} to {ratios.high:.2f} times their prediction"
        )
    effects = ", ".join(f"{effect.constant} {effect.ratio - 1:+.1%}" for effect in found.effects)
    return [
        f"{'how sure':<12} {sure}",
        f"{'hangs on':<12} {effects}: the step with that constant a tenth higher",
    ]


def _memory_lines(found: Estimate) -> list[str]:
    kinds = list(found.memory[0].by_kind())
    lines = ["GB on a rank of the pipeline, at the peak:", f"{'rank':>6} {'layers':>7} {'total':>8}"]
    lines[-1] += "".join(f" {kind.replace('_', ' '):>13}" for kind in kinds)
    last = len(found.memory) - 1
    shown = range(last + 1) if last < _MOST_STAGES else (0, 1, last // 2, last)
    for rank in shown:
        memory = found.memory[rank]
        by_kind = "".join(f" {value / GIGA:13.2f}" for value in memory.by_kind().values())
        lines.append(f"{rank:>6} {found.layers[rank]:>7} {memory.total / GIGA:8.2f}{by_kind}")
    if host := max(memory.host for memory in found.memory):
        lines.append(f"{'and on the host, at most':<25} {host / GIGA:8.2f} GB a rank")
    return lines


def found_text(found: Found, gpu_name: str) -> str:
    """Report of a search as text: the measured layouts that fit, best first, and why others do not."""
    total, shown = found.num_fitting + len(found.rejected), found.confirmed
    layouts = [layout_text(one.estimate.run) for one in shown]
    width, utilisation = max(len(text) for text in ["layout", *layouts]), _utilisation(shown[0].estimate.run)
    lines = [f"{found.num_fitting} of {total} layouts fit on {gpu_name}, fastest first:", ""]
    lines.append(
        f"{'layout':<{width}} {'step s':>9} {'tokens/s':>12} {'TFLOP/s':>8} {utilisation:>6} {'GB':>7} {'bubble':>7} "
        f"{'exposed':>8}"
    )
    for text, row in zip(layouts, shown, strict=True):
        one, time = row.estimate, row.estimate.time
        lines.append(
            f"{text:<{width}} {one.step_seconds:9.4g} {one.tokens_per_second:12,.0f} "
            f"{one.flops_per_second() / TERA:8.0f} {one.share_of_peak():6.1%} {one.peak_bytes / GIGA:7.1f} "
            f"{time.bubble / time.total:7.1%} {sum(time.exposed.values()) / time.total:8.1%}"
            + (f"  and {len(row.alike)} as fast" if row.alike else "")
        )
    name = next(iter(_flops_by_convention(shown[0].estimate)))
    lines += [
        "",
        f"{utilisation}: {name}, over the {_peak_text(shown[0].estimate)}. Memory is measured. Not shown, and only "
        f"estimated: {len(found.others)} that fit.",
    ]
    lines += [f"fell out: {number} layouts, {why}" for why, number in found.reasons().items()]
    lines += [f"nearest: {layout_text(one.run)} {one.why}" for one in found.nearest(_NUM_NEAREST)]
    return "\n".join(lines)


def rejected_record(rejected: Rejected) -> dict[str, Any]:
    """Reason why a layout was rejected, as JSON."""
    return {"layout": layout_text(rejected.run), "why": rejected.why, "needed_bytes": rejected.needed_bytes}


def record_of(found: Estimate, *, num_tokens: float | None = None) -> dict[str, Any]:
    """Report of one layout as JSON."""
    run, time = found.run, found.time
    record: dict[str, Any] = model_record(run, found.size) | {
        "layout": layout_text(run),
        "sizes": sizes_record(run),
        **cut_record(run),
        "recompute": run.recompute.granularity,
        "gpu": found.gpu.name,
        "peak_flops_per_second": found.gpu.peak_flops(found.timed_as),
        "peak_of": _PRODUCTS[found.timed_as],
        "step_seconds": found.step_seconds,
        "tokens_per_second": found.tokens_per_second,
        "flops": [
            {
                "convention": name,
                "step_flops": flops,
                "flops_per_second": found.flops_per_second(flops),
                "share_of_peak": found.share_of_peak(flops),
            }
            for name, flops in _flops_by_convention(found).items()
        ],
        "seconds": {
            "compute": time.compute,
            "exposed": dict(time.exposed),
            "bubble": time.bubble,
            "optimizer": time.optimizer,
            "other": time.other,
        },
        "published_over_predicted": None if found.ratios is None else asdict(found.ratios),
        "memory_bytes": [memory.by_kind() | {"total": memory.total} for memory in found.memory],
        "host_bytes": [memory.host for memory in found.memory],
        "layers": list(found.layers),
        "fits": found.peak_bytes <= found.gpu.memory_bytes,
        "checkpoint_bytes": found.checkpoint_bytes,
    }
    if num_tokens:
        record["days"] = found.days(num_tokens)
    return record
