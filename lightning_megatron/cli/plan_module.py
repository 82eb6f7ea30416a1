"""What a plan reads and measures where a run trains a network that knows nothing of ranks."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from functools import cache as once

from lightning_megatron.any_module.cut_error import CutError
from lightning_megatron.cli.dry_module import quiet, telling_model
from lightning_megatron.cli.module_run import read_module_run
from lightning_megatron.cli.plan_request import PlanRequest
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.mesh import Sizes
from lightning_megatron.planner.held_tensors import HeldTensors
from lightning_megatron.planner.measured import (
    Measure,
    Measured,
    measured,
    measured_held,
    measured_levels,
    measured_modules,
)
from lightning_megatron.planner.model_size import ModelSize
from lightning_megatron.planner.plan_cache import PlanCache
from lightning_megatron.planner.run import RunSettings, UnmeasuredError
from lightning_megatron.planner.step_trace import Level, Passes


def read_unchanged(
    options: argparse.Namespace, cache: PlanCache
) -> tuple[PlanRequest[RunSettings], Measure, ModelSize]:
    """The run that CONFIG and the options ask for, what measures it on any layout, and the model's size. Raises
    UsageError with their errors."""
    asked = read_module_run(options)

    def made(run: RunSettings) -> Measured:
        with quiet():
            return measured(run, asked.module(run))

    # A file of the user's may import whatever changes.
    kept = (lambda run: cache.measured(run, asked.depends_on, made)) if asked.depends_on else once(made)

    def measure(run: RunSettings) -> Measured:
        try:
            with telling_model("does not run on tensors without numbers"):
                return kept(run)
        except (CutError, NotImplementedError, UsageError) as error:
            raise UnmeasuredError(str(error)) from error

    def levels_of(run: RunSettings, pp_rank: int) -> list[Level]:
        with quiet():
            return measured_levels(run, pp_rank, asked.module(run))

    def held_of(run: RunSettings, pp_rank: int) -> list[HeldTensors]:
        with quiet():
            return measured_held(run, pp_rank, asked.module(run))

    def modules_of(run: RunSettings, pp_rank: int) -> Mapping[str, Passes]:
        with quiet():
            return measured_modules(run, pp_rank, asked.module(run))

    size = asked.module(replace(asked.request.run, sizes=Sizes())).size()
    request = replace(asked.request, levels_of=levels_of, held_of=held_of, modules_of=modules_of)
    return request, measure, size
