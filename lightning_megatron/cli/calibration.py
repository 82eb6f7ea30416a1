"""What `lightning-megatron calibrate` writes: the constants of a GPU that fit measured steps.

Each step is a file of the callback `StepTimeline`, beside the recipe that was trained.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from lightning_megatron.cli.planning import announce, cache_folder, estimated, read_request
from lightning_megatron.cli.target import require_writable
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.metrics.recorded_step import RecordedStep, recorded_step
from lightning_megatron.planner.calibration import MeasuredStep, Parts, calibrated, parts_of
from lightning_megatron.planner.constants import Constants, fitted
from lightning_megatron.planner.estimate import Estimate
from lightning_megatron.planner.hardware import Gpu
from lightning_megatron.planner.plan_cache import PlanCache
from lightning_megatron.planner.run import RunSettings, UnmeasuredError

# A constant that moved by less is left to the fitted ones.
_LEAST_CHANGE = 1e-3
_DIGITS = 4


def run_calibrate(options: argparse.Namespace, gpu: Gpu) -> None:
    """Writes the file for that GPU and prints what changed. Raises UsageError with all errors of the runs."""
    require_writable(options.out.parent, f"--out ({options.out})")
    cache = PlanCache(cache_folder(options), announce)
    steps = [
        _measured(config, Path(timeline), options, gpu, cache)
        for config, timeline in zip(options.runs[::2], options.runs[1::2], strict=True)
    ]
    constants = calibrated(gpu.constants, steps)
    options.out.write_text(_file_text(gpu, constants, steps), encoding="utf-8")
    found = _record(gpu, constants, steps) | {"file": str(options.out)}
    print(json.dumps(found) if options.json else _text(found))


def _measured(config: str, timeline: Path, options: argparse.Namespace, gpu: Gpu, cache: PlanCache) -> MeasuredStep:
    try:
        step = recorded_step(timeline)
        own = argparse.Namespace(**vars(options) | {"config": config})
        request, measure, size = read_request(own, gpu, cache)
        if not request.has_layout:
            raise UsageError([f"{config} has no layout of its own; give the recipe that was trained"])
        found, _ = estimated(own, gpu, request, measure, size)
    except UnmeasuredError as error:
        raise UsageError([f"{config}: {line}" for line in str(error).splitlines()]) from error
    except ValueError as error:
        raise UsageError(str(error).splitlines()) from error
    if faults := _faults(step, found.run):
        raise UsageError([f"{timeline} {fault}" for fault in faults])
    return MeasuredStep(name=str(timeline), measured=_by_rank(step, found.run), predict=_prediction(found))


def _prediction(found: Estimate) -> Callable[[Constants], Parts]:
    return lambda constants: parts_of(found.time_of(constants), found.run)


def _faults(step: RecordedStep, run: RunSettings) -> list[str]:
    """Reasons why a measured step is not that of a run, or cannot be compared with it."""
    if run.balanced is not None or run.is_overlapped:
        what = "microbatches that differ (dynamic_context)" if run.balanced is not None else "overlap_expert_exchange"
        return [f"is of a run with {what}, whose forwards and backwards have no times of their own; record one without"]
    num_microbatches = run.schedule.microbatches
    if len(step.forwards) == step.num_microbatches == run.sizes.num_stages == 1:
        # Without a schedule a batch is not cut.
        num_microbatches = 1
    pairs = (
        ("stages", len(step.forwards), run.sizes.num_stages),
        ("microbatches", step.num_microbatches, num_microbatches),
        ("batches a step", step.num_batches, run.num_accumulated),
    )
    return [
        f"has {found} {what}, and the recipe has {wanted}; give the recipe that was trained"
        for what, found, wanted in pairs
        if found != wanted
    ]


def _by_rank(step: RecordedStep, run: RunSettings) -> Parts:
    number = step.num_batches * step.num_microbatches

    def of_ranks(of_stages: tuple[float, ...]) -> tuple[float, ...]:
        sums = [0.0] * run.sizes.pp
        for stage, seconds in enumerate(of_stages):
            sums[run.sizes.pp_rank_of(stage)] += number * seconds
        return tuple(sums)

    return Parts(
        forwards=of_ranks(step.forwards),
        backwards=of_ranks(step.backwards),
        optimizer=step.optimizer,
        step=step.seconds,
    )


def _file_text(gpu: Gpu, constants: Constants, steps: list[MeasuredStep]) -> str:
    """The GPU's file with the constants."""
    plain = {one.name: getattr(gpu, one.name) for one in fields(gpu) if getattr(gpu, one.name) != one.default}
    own = {name: value for name, value in plain.items() if name not in ("name", "aliases", "constants", "source")}
    source = f"{gpu.name}, calibrated on {', '.join(step.name for step in steps)}"
    table = {name: float(f"{value:.{_DIGITS}g}") for name, (_, value) in _changed(fitted(), constants).items()}
    return str(yaml.safe_dump(own | {"source": source, "constants": table}, sort_keys=False))


def _changed(before: Constants, after: Constants) -> dict[str, tuple[float, float]]:
    """Constants that moved, before and after."""
    pairs = {name: (value, asdict(after)[name]) for name, value in asdict(before).items()}
    return {name: pair for name, pair in pairs.items() if abs(math.log(pair[1] / pair[0])) > _LEAST_CHANGE}


def _record(gpu: Gpu, constants: Constants, steps: list[MeasuredStep]) -> dict[str, Any]:
    return {
        "gpu": gpu.name,
        "steps": [
            {
                "timeline": step.name,
                "measured": asdict(step.measured),
                "predicted_before": asdict(step.predict(gpu.constants)),
                "predicted_after": asdict(step.predict(constants)),
            }
            for step in steps
        ],
        "constants": {
            name: {"before": before, "after": after}
            for name, (before, after) in _changed(gpu.constants, constants).items()
        },
    }


def _text(found: dict[str, Any]) -> str:
    lines = []
    for step in found["steps"]:
        lines += [step["timeline"], f"  {'seconds':<24} {'measured':>9} {'before':>9} {'after':>9}"]
        columns = [step[name] for name in ("measured", "predicted_before", "predicted_after")]
        for part in ("forwards", "backwards"):
            numbers = [max(column[part]) for column in columns]
            lines.append(f"  {f'{part}, fullest rank':<24}" + "".join(f" {number:9.4g}" for number in numbers))
        for part in ("optimizer", "step"):
            lines.append(f"  {part:<24}" + "".join(f" {column[part]:9.4g}" for column in columns))
    lines += ["", f"{'constants that moved':<26} {'before':>9} {'after':>9}"]
    for name, pair in found["constants"].items():
        lines.append(f"  {name:<24} {pair['before']:9.4g} {pair['after']:9.4g}")
    return "\n".join([*lines, "", f"written: {found['file']}; plan takes it by --gpu {found['file']}"])
