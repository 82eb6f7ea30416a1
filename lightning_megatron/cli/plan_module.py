"""What a plan reads and measures where a recipe trains a causal model of transformers, as it is."""

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version

from lightning_megatron.any_module.cut_error import CutError
from lightning_megatron.cli.dry_module import causal_module, read_causal_run, telling_model
from lightning_megatron.cli.plan_request import PlanRequest
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.hf.unchanged import read_config
from lightning_megatron.mesh import Sizes
from lightning_megatron.planner.measured import Measure, Measured, UnmeasuredError, measured
from lightning_megatron.planner.model_size import ModelSize
from lightning_megatron.planner.plan_cache import PlanCache
from lightning_megatron.planner.run import RunSettings


def read_unchanged(
    options: argparse.Namespace, cache: PlanCache
) -> tuple[PlanRequest[RunSettings], Measure, ModelSize]:
    """The run that a recipe of `CausalModule` and the options ask for, what measures it on any layout, and the model's
    size. Raises UsageError with their errors."""
    request, arguments = read_causal_run(options)
    trained = repr(arguments), repr(request.plan), version("transformers")

    def made(run: RunSettings) -> Measured:
        with _quiet():
            return measured(run, causal_module(arguments, run, request.plan))

    def measure(run: RunSettings) -> Measured:
        try:
            with telling_model("does not run on tensors without numbers"):
                return cache.measured(run, "\n".join((*trained, config)), made)
        except (CutError, NotImplementedError, UsageError) as error:
            raise UnmeasuredError(str(error)) from error

    alone = replace(request.run, sizes=Sizes())
    size = causal_module(arguments, alone, request.plan).size()
    config = read_config(arguments["path"]).to_json_string()
    return request, measure, size


@contextmanager
def _quiet() -> Iterator[None]:
    """A block without notes on how a model is cut, which every rank of every layout would write."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)
