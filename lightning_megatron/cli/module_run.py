"""The run of a LightningModule whose network knows nothing of ranks, which `dry-run` and `plan` take as CONFIG.

CONFIG                                    module                          its settings
a recipe of `CausalModule`, or one that
fine-tunes a type without a family here   `CausalModule`                  the recipe's
module.py:MyModule                        the user's own, with its data   the options
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_megatron import hf
from lightning_megatron.any_module.plan import ModelPlan
from lightning_megatron.cli.dry_module import META, DryModule, WholeModule, quiet
from lightning_megatron.cli.plan_recipe import run_of_causal_recipe
from lightning_megatron.cli.plan_request import PlanRequest
from lightning_megatron.cli.plan_run import require_no_module, with_run_options
from lightning_megatron.cli.planned_optimizer import ConfiguredOptimizer, step_fault
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.hf.adapters import add_adapters
from lightning_megatron.lightning_modules import CausalModule
from lightning_megatron.mesh import Sizes
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.planner.dry_rank import Batch
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.run import RunSettings
from lightning_megatron.testing.batches import first_row, join
from lightning_megatron.testing.maker_spec import spec_fault
from lightning_megatron.testing.subject import Subject, SubjectError, require_module
from lightning_megatron.testing.telling import telling
from lightning_megatron.testing.user_file import called
from lightning_megatron.text_files import read_table

_ASSUMED = (
    "the strategy's optimizer is OptimizerConfig(kind='distributed', overlap_grad_reduce=True, "
    "overlap_param_gather=True)"
)


@dataclass(frozen=True, kw_only=True)
class ModuleRun:
    """A run to plan, and the module that it trains."""

    request: PlanRequest[RunSettings]
    module: Callable[[RunSettings], DryModule]
    """Makes the module for the run on a layout; raises UsageError with all errors of the two."""
    depends_on: str
    """What a measurement depends on beside the run's settings; empty where nobody can tell."""


def read_module_run(options: argparse.Namespace) -> ModuleRun:
    """The run that CONFIG and the options ask for. Raises UsageError with their errors."""
    return _of_file(options) if ":" in options.config else _of_recipe(options)


def _of_recipe(options: argparse.Namespace) -> ModuleRun:
    require_no_module(options)
    path = Path(options.config)
    try:
        asked, arguments = run_of_causal_recipe(path, read_table(path), options)
        config = hf.read_config(arguments["path"]).to_json_string()
    except ValueError as error:
        raise UsageError(str(error).splitlines()) from error
    request = with_run_options(asked, options)
    run, faults = request.run, _faults_of_fp8(request.run)
    if options.decoder_sequence_length is not None:
        faults.append("--decoder-sequence-length is that of a T5, and the model is causal; leave it out")
    if request.dynamic is not None or options.document_lengths is not None:
        faults.append("documents are balanced over ranks for the package's GPT alone; leave out dynamic_context")
    if run.lengths.are_packed:
        faults.append(
            "the masks of rows of several documents follow from their numbers, which tensors without numbers have not; "
            "use data.packing='stream' without separates_documents, and for conversations data.packing='none'"
        )
    if faults:
        raise UsageError(faults)
    whole = causal_whole(arguments, request.plan)
    return ModuleRun(
        request=request,
        module=lambda run: causal_module(whole, run),
        depends_on="\n".join((repr(arguments), repr(request.plan), version("transformers"), config)),
    )


def _faults_of_fp8(run: RunSettings) -> list[str]:
    if run.fp8 is None or run.fp8.engine == "torch":
        return []
    return [
        f"fp8 engine {run.fp8.engine!r} runs layers of this package's models, and this network is none; take engine "
        "'torch'"
    ]


def causal_whole(arguments: Mapping[str, Any], plan: ModelPlan | None = None) -> WholeModule:
    """The model of transformers that a `CausalModule` of these arguments trains, before it is cut."""

    def make() -> CausalModule:
        module = CausalModule(**arguments)
        # `configure_model` would read its weights, or draw them.
        model = hf.on_meta(module.config, {"dtype": torch.float32}, module.path)
        module.model = model if module.lora is None else add_adapters(model, module.lora)
        return module

    return WholeModule(make, plan)


def causal_module(whole: WholeModule, run: RunSettings) -> DryModule:
    """A model of transformers on the ranks of a run. Raises UsageError with all errors."""

    def batch(num_samples: int, device: torch.device) -> Batch:
        tokens, labels = torch.zeros((2, num_samples, run.lengths.sequence), dtype=torch.int64, device=device)
        return {"tokens": tokens, "labels": labels, "loss_mask": torch.ones(labels.shape, device=device)}

    return _checked(DryModule(whole, batch, run))


def _checked(module: DryModule) -> DryModule:
    if faults := module.faults():
        raise UsageError(faults)
    return module


def _of_file(options: argparse.Namespace) -> ModuleRun:
    """The run of a class, or function, in a file of the user's, and of the first row of its data."""
    names = ("model", "model_kind", "sequence_length", "decoder_sequence_length", "document_lengths")
    faults = [
        f"--{name.replace('_', '-')} ({value}) is for a recipe or a model, and {options.config} is a module of yours, "
        "whose data says it; leave it out"
        for name in names
        if (value := getattr(options, name)) is not None
    ]
    needed = {"--global-batch-size": options.global_batch_size, options.world_option: options.num_gpus}
    faults += [
        f"{name} is needed: {options.config} does not say how many" for name, value in needed.items() if value is None
    ]
    faults += [fault for spec in (options.config, options.data) if spec and (fault := spec_fault(spec))]
    if faults:
        raise UsageError(faults)
    try:
        with telling(f"{options.config} cannot be made, or its data be read"):
            row = _row(options.config, options.data)
    except SubjectError as error:
        raise UsageError(str(error).splitlines()) from error
    settings = RunSettings(
        lengths=SequenceLengths(sequence=_num_tokens(row)),
        sizes=Sizes(world=options.num_gpus),
        global_batch_size=options.global_batch_size,
        precision=options.precision or "32-true",
        optimizer=OptimizerConfig(kind="distributed", overlap_grad_reduce=True, overlap_param_gather=True),
    )
    request = with_run_options(PlanRequest(run=settings, has_layout=False, notes=(_ASSUMED,)), options)
    if faults := _faults_of_fp8(request.run):
        raise UsageError(faults)
    whole = _user_whole(options.config)
    made = partial(_user_module, whole, row)
    with quiet():
        fault = step_fault(ConfiguredOptimizer(), whole.on(META))
    if fault:
        does = f"does not step tensors without numbers ({fault}): states are those of AdamW"
        request = replace(request, unplanned={"configure_optimizers": does})
    else:
        request = replace(request, run=replace(request.run, make_optimizer=ConfiguredOptimizer()))
    return ModuleRun(request=request, module=cache(made), depends_on="")


def _row(module: str, data: str | None) -> Any:
    """The first row of the module's data, as a batch."""
    with quiet():
        with META:
            made = require_module(called(module))
        subject = Subject(module=made, data=called(data) if data is not None else None)
        return first_row(subject, pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False))


def _user_whole(spec: str) -> WholeModule:
    def make() -> pl.LightningModule:
        with telling(spec):
            return require_module(called(spec))

    return WholeModule(make, None)


def _user_module(whole: WholeModule, row: Any, run: RunSettings) -> DryModule:
    def batch(num_samples: int, device: torch.device) -> Any:
        return move_data_to_device(join([row] * num_samples), device)

    return _checked(DryModule(whole, batch, run))


def _num_tokens(row: Any) -> int:
    """Tokens of a row: elements of the longest of its tensors of numbers of tokens [1, T]; 1 without such."""
    tensors = (leaf for leaf in tree_leaves(row) if isinstance(leaf, Tensor) and leaf.dim() == 2)
    return max((leaf.shape[1] for leaf in tensors if not leaf.is_floating_point()), default=1)
