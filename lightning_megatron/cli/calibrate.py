"""`lightning-megatron calibrate`: a GPU's file whose constants fit steps that were measured on the user's own cluster.

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

from lightning_megatron.cli.commands import add_command
from lightning_megatron.cli.plan_layout import OF_RECIPE
from lightning_megatron.cli.planning import announce, cache_folder, estimated, gpu_of_options, read_request
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
# Options of a plan that a recipe which was trained does not need.
_OF_PLAN = (
    *("model", "model_kind", "data", "precision", "global_batch_size", "sequence_length"),
    *("decoder_sequence_length", "document_lengths", "recompute", "num_gpus", "memory_gb"),
)
_EPILOG = """\
CONFIG is the recipe that was trained, on its own layout: the config.yaml that Lightning writes where it logs. TIMELINE
is the step_N.json of lightning_megatron.trainer.callbacks.StepTimeline. More pairs of both, of other models and
layouts, tell more of the constants.

example:  lightning-megatron calibrate logs/config.yaml logs/step_20.json --gpu h100 --out ours.yaml
          lightning-megatron plan llama3_70b --gpu ours.yaml --num-gpus 64
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command and its options."""
    parser = add_command(
        commands,
        "calibrate",
        "Fits the constants of the planner's time model to steps that StepTimeline measured on your GPUs, and writes "
        "them into a GPU's file, which plan takes by --gpu.",
        run=run_calibrate,
        epilog=_EPILOG,
    )
    parser.add_argument("runs", nargs="+", metavar="CONFIG TIMELINE", help="a recipe and a measured step of its run")
    parser.add_argument("--gpu", required=True, metavar="NAME", help="a known GPU, or a YAML file that describes one")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the GPU's file to write: FILE.yaml")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--cache", type=Path, metavar="FOLDER", help="of measurements (default: ~/.cache/lightning_megatron/plans)"
    )
    parser.set_defaults(**dict.fromkeys(_OF_PLAN), fp8=False, layout=OF_RECIPE, world_option="the recipe's devices")


def run_calibrate(options: argparse.Namespace) -> None:
    """Writes the file and prints what changed. Raises UsageError with all errors of the options."""
    faults = []
    if len(options.runs) % 2:
        faults.append(f"CONFIG TIMELINE must come in pairs, and {options.runs[-1]} is alone; give its other half")
    if options.out.suffix not in (".yaml", ".yml"):
        faults.append(f"--out ({options.out}) must end in .yaml or .yml, by which --gpu knows a file; use another name")
    faults += [
        f"TIMELINE ({timeline}) does not exist; give a step_N.json that StepTimeline wrote"
        for timeline in options.runs[1::2]
        if not Path(timeline).exists()
    ]
    if any(options.out.resolve() == Path(one).resolve() for one in options.runs):
        faults.append(f"--out ({options.out}) is a file that is read, and would be lost; use another name")
    gpu = gpu_of_options(options, faults)
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
