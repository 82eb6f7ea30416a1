"""`--layout`: one layout of a run, given by its sizes and by the parts of the recipe's own that it takes over."""

import argparse
from dataclasses import replace
from typing import Any

from lightning_megatron.cli.plan_options import OF_RECIPE
from lightning_megatron.cli.plan_request import PlanRequest, R
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.mesh import Sizes, StageLayout
from lightning_megatron.pipeline.registry import SCHEDULES, default_text, placement_of
from lightning_megatron.planner.report import schedule_text
from lightning_megatron.planner.run import RunSettings, context_fields, faults_of
from lightning_megatron.transformer.recompute import RecomputeConfig

_SIZES = ("tp", "pp", "vp", "cp", "ep", "etp")
_WORDS = {
    "recompute": ("none", "selective", "full"),
    "stages": ("layers", "cost", OF_RECIPE),
    "schedule": (*SCHEDULES, OF_RECIPE),
}
_KEYS = (*_SIZES, "mbs", *_WORDS)
_EXAMPLE = "tp=8,pp=4"
# Of a size.
_MOST_DIGITS = 6


def alike_fault(option: str) -> str:
    """Error about an option that asks for code where microbatches differ."""
    return f"{option} takes microbatches that are alike, and those of dynamic_context differ; leave it out"


def explained(request: PlanRequest[R], options: argparse.Namespace) -> R:
    """The run on the layout of --layout, and on its own where that is not given.

    Raises UsageError with all errors that keep it from running.
    """
    if options.layout in (None, OF_RECIPE):
        if not request.has_layout:
            raise UsageError([f"{options.config} has no layout of its own; write one, as in --layout {_EXAMPLE}"])
        run, faults = request.run, [*request.faults, *faults_of(request.run)]
        if request.faults:
            # Rows of a microbatch follow from the batch, whatever the file has.
            faults = [fault for fault in faults if fault in request.faults or not fault.startswith("global_batch_size")]
    else:
        run = with_layout(request.run, options.layout)
        faults = faults_of(run)
        if not request.has_layout:
            faults += [
                f"--layout {key}={OF_RECIPE}: {options.config} is no recipe and has none; name one, or leave it out"
                for key, value in _values_of(options.layout).items()
                if value == OF_RECIPE
            ]
        if options.recompute not in (None, run.recompute.granularity):
            own = run.recompute.granularity
            faults.append(
                f"--recompute ({options.recompute}) and recompute={own} in --layout do not agree; leave one of them out"
            )
    if faults:
        raise UsageError(faults)
    return run


def with_layout(run: R, text: str) -> R:
    """The run on the layout that `text` gives. Raises UsageError with every part of it that is invalid."""
    values = _values_of(text)
    sizes: dict[str, Any] = {key: int(values.get(key, 1)) for key in _SIZES}
    stages, name, group_size = values.get("stages", "layers"), values.get("schedule"), 0
    is_overlapped = is_collective = False
    if name == OF_RECIPE:
        name, group_size, is_overlapped = run.schedule_name, run.group_size, run.is_overlapped
        is_collective = run.is_collective and sizes["pp"] > 1
    own = Sizes(
        world=run.sizes.world,
        **sizes,
        **context_fields(run.context, sizes["cp"]),
        sequence_parallel=sizes["tp"] > 1,
        placement=placement_of(name) if name is not None else "loop",
        stage_layout=run.sizes.stage_layout if stages == OF_RECIPE else StageLayout(balance=stages),  # type: ignore[arg-type]
    )
    granularity = values.get("recompute", run.recompute.granularity)
    return replace(
        run,
        sizes=own,
        micro_batch_size=int(values.get("mbs", 1)),
        # Its parts, where it is the recipe's own.
        recompute=run.recompute
        if granularity == run.recompute.granularity
        else RecomputeConfig(granularity=granularity),  # type: ignore[arg-type]
        schedule_name=name,
        group_size=group_size,
        is_overlapped=is_overlapped,
        is_collective=is_collective,
    )


def notes_on_layout(request: PlanRequest[R], text: str | None) -> list[str]:
    """Notes on the parts of the recipe's own layout that a layout, or a search where there is none, leaves out."""
    notes = _notes_on_schedule(request.run, text)
    if request.dynamic is not None:
        notes.append("without the recipe's dynamic_context, which is planned on its own layout: --layout recipe")
    return notes


def _notes_on_schedule(run: RunSettings, text: str | None) -> list[str]:
    """A note where a layout, or a search where there is none, leaves out the recipe's own schedule."""
    is_usual = run.schedule_name is None and not (run.group_size or run.is_overlapped or run.is_collective)
    if is_usual or (text is not None and "schedule" in _values_of(text)):
        return []
    own = default_text("vp")
    name = schedule_text(run) + (f" in groups of {run.group_size}" if run.group_size else "")
    if text is None:
        return [f"not the recipe's schedule {name}: a search tries {own}; --layout explains one with schedule=recipe"]
    return [f"not the recipe's schedule {name} but {own}; schedule=recipe in the layout keeps it"]


def _values_of(text: str) -> dict[str, str]:
    values: dict[str, str] = {}
    faults = []
    for part in (part.strip() for part in text.split(",")):
        key, _, value = part.partition("=")
        if key not in _KEYS or not value or (key not in _WORDS and not value.isdecimal()):
            faults.append(f"--layout part {part!r} must be one of {', '.join(_KEYS)}, = and a number, as in {_EXAMPLE}")
        elif key not in _WORDS and len(value) > _MOST_DIGITS:
            short = value if len(value) <= 2 * _MOST_DIGITS else f"{value[: 2 * _MOST_DIGITS]}..."
            faults.append(f"--layout {key} ({short}) must be below {10**_MOST_DIGITS:,}")
        elif value not in _WORDS.get(key, (value,)):
            faults.append(f"--layout {key} ({value!r}) must be one of {', '.join(_WORDS[key])}")
        if key in values:
            faults.append(f"--layout names {key} twice; leave one of them out")
        values[key] = value
    if faults:
        raise UsageError(faults)
    return values
