"""What `lightning-megatron plan` answers: which layouts of a model fit, how fast each is, and why others do not.

Memory is measured on tensors without numbers: a trillion parameters on 3,072 GPUs are planned on a laptop.
"""

import argparse
import json
import math
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_megatron.cli.picture import write_picture
from lightning_megatron.cli.plan_dynamic import with_balanced_batch
from lightning_megatron.cli.plan_layout import alike_fault, explained, notes_on_layout
from lightning_megatron.cli.plan_options import OF_RECIPE, SHOWN
from lightning_megatron.cli.plan_picture import can_be_drawn, plan_panels
from lightning_megatron.cli.plan_request import PlanRequest
from lightning_megatron.cli.plan_run import asks_for_unchanged, read_run
from lightning_megatron.cli.target import require_writable
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.planner.comparison import comparison_text
from lightning_megatron.planner.dry_report import held_lines
from lightning_megatron.planner.estimate import Estimate, estimate
from lightning_megatron.planner.hardware import GIGA, Gpu
from lightning_megatron.planner.measured import Measure
from lightning_megatron.planner.model_size import ModelSize
from lightning_megatron.planner.module_times import module_lines, module_records, module_times
from lightning_megatron.planner.plan_cache import PlanCache
from lightning_megatron.planner.report import (
    estimate_text,
    found_text,
    layout_text,
    model_record,
    model_text,
    record_of,
    rejected_record,
)
from lightning_megatron.planner.run import Run, RunSettings, UnmeasuredError
from lightning_megatron.planner.search import Found, fewest_gpus, search

_SHARED_SEQUENCES = "whether the model computes the same where ranks of cp share a sequence, only a run of it finds out"
# Options that some configurations take and others do not.
_OF_SOME = ("data", "precision", "model", "model_kind", "decoder_sequence_length", "document_lengths")
# Families with units for float8 that read no scales of blocks.
_WITHOUT_BLOCK_SCALES = ("ada", "hopper")


def run_plan(options: argparse.Namespace, gpu: Gpu) -> None:
    """Prints the plan for GPUs of that kind. Raises UsageError with all errors of the run, and where nothing fits."""
    cache = PlanCache(cache_folder(options), announce)
    try:
        if options.compare is not None:
            _compare(options, gpu, cache)
        else:
            (_search if options.layout is None else _explain)(options, gpu, *read_request(options, gpu, cache))
    except UnmeasuredError as error:
        raise UsageError(str(error).splitlines()) from error


def announce(run: RunSettings) -> None:
    """Tells whoever waits at a terminal which layout is measured."""
    if sys.stderr.isatty():
        print(f"measuring {layout_text(run)}", file=sys.stderr)


def read_request(
    options: argparse.Namespace, gpu: Gpu, cache: PlanCache
) -> tuple[PlanRequest[Any], Measure, ModelSize | None]:
    """The run to plan, what measures it, and the model's size where it is not one of the package's.

    Raises UsageError where the GPU has no units for its precision.
    """
    request, measure, size = _read_request(options, cache)
    if request.run.fp8 is not None and not gpu.fp8_tflops:
        raise UsageError([f"GPU {options.gpu!r} has no units for FP8; leave FP8 out, or plan for another"])
    if request.run.fp8 is not None and request.run.fp8.scaling == "mxfp8" and gpu.family in _WITHOUT_BLOCK_SCALES:
        raise UsageError([f"GPU {options.gpu!r} has no units for MXFP8; use scaling 'current', or plan for another"])
    return request, measure, size


def _read_request(options: argparse.Namespace, cache: PlanCache) -> tuple[PlanRequest[Any], Measure, ModelSize | None]:
    if not asks_for_unchanged(options):
        return read_run(options), cache.measured, None
    # What trains takes seconds to import.
    from lightning_megatron.cli.plan_module import read_unchanged

    return read_unchanged(options, cache)


def cache_folder(options: argparse.Namespace) -> Path:
    """The folder of measurements, which is there and can be written."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder: Path = options.cache or home / "lightning_megatron" / "plans"
    require_writable(folder, f"--cache ({folder})")
    return folder


def estimated(
    options: argparse.Namespace, gpu: Gpu, request: PlanRequest[Any], measure: Measure, size: ModelSize | None
) -> tuple[Estimate, list[str]]:
    """The estimate of one layout, and notes for a reader of its numbers."""
    if size is None:
        request = with_balanced_batch(request, options.document_lengths, gpu, is_own=options.layout == OF_RECIPE)
    run, notes = explained(request, options), _notes(request, gpu, options.layout)
    return estimate(run, gpu, measure=measure, size=size), notes


def _explain(
    options: argparse.Namespace, gpu: Gpu, request: PlanRequest[Any], measure: Measure, size: ModelSize | None
) -> None:
    if request.dynamic is not None and options.layout == OF_RECIPE:
        given = {"--explain": options.explain, "--explain-time": options.explain_time}
        if faults := [alike_fault(option) for option, is_given in given.items() if is_given]:
            raise UsageError(faults)
    found, notes = estimated(options, gpu, request, measure, size)
    if options.out is not None:
        _draw(found, request, options.out)
    more_text, more_record = _explanations(found, request, options)
    if options.json:
        print(json.dumps(_record(found, notes, options) | more_record))
    else:
        text = [estimate_text(found, num_tokens=options.tokens), *more_text]
        print("\n".join([model_text(found.run, found.size), *notes, "", *text]))


def _record(found: Estimate, notes: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """The estimate of one layout as JSON, with what its time hangs on."""
    effects = {effect.constant: effect.ratio for effect in found.effects}
    more = {"step_with_constant_a_tenth_higher": effects, "notes": notes}
    return record_of(found, num_tokens=options.tokens) | more


def _fitting(options: argparse.Namespace, gpu: Gpu, cache: PlanCache) -> tuple[Estimate, list[str], dict[str, str]]:
    """The estimate of one of two runs, notes on it, and the options that it refused and goes without, with its words.

    Raises UsageError with all other errors.
    """
    refusals: dict[str, str] = {}
    while True:
        try:
            return *estimated(options, gpu, *read_request(options, gpu, cache)), refusals
        except (UsageError, UnmeasuredError) as error:
            faults = [f"{options.config}: {line}" for line in str(error).splitlines()]
            given = {name: f"--{name.replace('_', '-')}" for name in _OF_SOME if getattr(options, name) is not None}
            refused = {n: option for n, option in given.items() if re.search(rf"{option}(?![\w-])", str(error))}
            if not refused:
                raise UsageError(faults) from error
        for name, option in refused.items():
            refusals[option] = "; ".join(faults)
            setattr(options, name, None)


def _compare(options: argparse.Namespace, gpu: Gpu, cache: PlanCache) -> None:
    names, found, records, lines = (options.compare, options.config), [], [], []
    left_out: dict[str, str] = {}
    for name in names:
        own = argparse.Namespace(**vars(options) | {"config": name, "layout": options.layout or OF_RECIPE})
        one, notes, refusals = _fitting(own, gpu, cache)
        if neither := [refusal for option, refusal in left_out.items() if option in refusals]:
            raise UsageError(neither)
        left_out |= refusals
        notes += [f"without {option}, which is for the other run" for option in refusals]
        found.append(one)
        records.append({"config": name} | _record(one, notes, options))
        lines += [f"{name}: {line}" for line in (model_text(one.run, one.size), *notes)]
        if options.tokens:
            lines.append(f"{name}: {one.days(options.tokens):,.1f} days for {options.tokens:.4g} tokens")
    print(json.dumps(records) if options.json else "\n".join([*lines, "", comparison_text(names, found)]))


def _search(
    options: argparse.Namespace, gpu: Gpu, request: PlanRequest[Any], measure: Measure, size: ModelSize | None
) -> None:
    if size is None:
        request = with_balanced_batch(request, options.document_lengths, gpu, is_own=False)
    run, notes, is_free = request.run, _notes(request, gpu, None), options.recompute is None
    number = SHOWN if options.top is None else options.top
    found = search(
        run,
        gpu,
        memory_bytes=gpu.memory_bytes,
        free_recompute=is_free,
        num_confirmed=number,
        measure=measure,
        size=size,
    )
    if not found.confirmed:
        raise UsageError([_nothing_fits(run, gpu, found, is_free, measure)])
    best = found.confirmed[0].estimate
    if size is not None and any(one.estimate.run.sizes.cp > 1 for one in found.confirmed):
        notes.append(_SHARED_SEQUENCES)
    if options.out is not None:
        _draw(best, request, options.out)
    more_text, more_record = _explanations(best, request, options)
    if options.json:
        record = model_record(run, best.size) | {
            "layouts": [
                record_of(one.estimate, num_tokens=options.tokens) | {"alike": [layout_text(run) for run in one.alike]}
                for one in found.confirmed
            ],
            "num_fitting": found.num_fitting,
            "fell_out": found.reasons(),
            "rejected": [rejected_record(one) for one in found.rejected],
            "notes": notes,
            **more_record,
        }
        print(json.dumps(record))
    else:
        text = [found_text(found, gpu.name), "", estimate_text(best, num_tokens=options.tokens)]
        print("\n".join([model_text(run, best.size), *notes, "", *text, *more_text]))


def _notes(request: PlanRequest[Any], gpu: Gpu, layout: str | None) -> list[str]:
    """Notes for a reader of the numbers, with that layout or, without one, of a search."""
    notes = request.all_notes
    wanted = request.run.plain_products
    if (timed := gpu.timed_as(wanted)) != wanted:
        field, peak = ("double_tflops", "float64") if wanted == "double" else ("full_tflops", "float32")
        rates = "16 bits" if timed == "half" else "float32"
        notes.append(
            f"times are those of products in {rates}, and in {request.run.precision} they are several times longer: "
            f"GPU {gpu.name!r} has no {field}, its peak in {peak}; give it in its file"
        )
    if gpu.family == "volta" and request.run.precision.startswith("bf16"):
        notes.append(
            f"GPU {gpu.name!r} has no units for bfloat16, and products in it are slower there; times are those of "
            "16-mixed"
        )
    return notes if layout == OF_RECIPE else notes + notes_on_layout(request, layout)


def _explanations(
    found: Estimate, request: PlanRequest[Any], options: argparse.Namespace
) -> tuple[list[str], dict[str, Any]]:
    """Finds what holds the memory of the fullest rank and takes the time of the slowest one, as text and as JSON.

    Nothing of either where it is not asked for.
    """
    text: list[str] = []
    record: dict[str, Any] = {}
    if options.explain:
        held = request.held_of(found.run, found.fullest)
        text += ["", f"on rank {found.fullest} of the pipeline:", *held_lines(held)]
        record["held_at_peak"] = [asdict(one) for one in held]
    if options.explain_time:
        times = module_times(found, request.modules_of(found.run, found.time.slowest))
        text += ["", *module_lines(found, times)]
        record["seconds_by_module"] = module_records(times)
    return text, record


def _draw(found: Estimate, request: PlanRequest[Any], path: Path) -> None:
    run = found.run
    levels = request.levels_of(run, found.fullest) if can_be_drawn(run) else []
    title = f"{layout_text(run)} on {run.sizes.world} x {found.gpu.name}: {found.step_seconds:.3g} s a step"
    write_picture(path, plan_panels(found, levels), title=title)


def _nothing_fits(run: RunSettings, gpu: Gpu, found: Found, free_recompute: bool, measure: Measure) -> str:
    world, batch = run.sizes.world, run.global_batch_size
    if not found.rejected:
        return (
            f"no data-parallel size that {world} GPUs allow divides global_batch_size ({batch}); give "
            f"--global-batch-size {-(-batch // world) * world}, or another --num-gpus"
        )
    least_bytes = found.least_bytes(measure)
    if not least_bytes:
        return f"no layout on {world} GPUs can run: {found.rejected[0].why}"
    more = 0
    if isinstance(run, Run):
        more = fewest_gpus(run, gpu, memory_bytes=gpu.memory_bytes, free_recompute=free_recompute, measure=measure)
    # Rounded up: the printed size must be enough.
    least_gb = math.ceil(least_bytes / GIGA * 10) / 10
    ways = f"{least_gb:.1f} GB a GPU would do" + (f", or {more} GPUs of this kind" if more else "")
    return f"no layout on {world} x {gpu.name} fits in {gpu.memory_gb:g} GB; {ways}"
