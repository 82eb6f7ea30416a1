"""What `lightning-megatron model-plan` answers: how a network that knows nothing of ranks is cut."""

import argparse
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
from torch import nn

from lightning_megatron.any_module.plan import ModelPlan
from lightning_megatron.any_module.report import report_of
from lightning_megatron.cli.model_plan import AXES
from lightning_megatron.cli.usage import UsageError, mistake_of
from lightning_megatron.hf.meta_model import meta_model
from lightning_megatron.hub import CONFIG_FILES, model_folder
from lightning_megatron.mesh import Sizes
from lightning_megatron.testing.defaults import LIMIT_SECONDS
from lightning_megatron.testing.maker_spec import absolute
from lightning_megatron.testing.processes import Task, run_processes
from lightning_megatron.testing.subject import SubjectError, require_module
from lightning_megatron.testing.telling import telling
from lightning_megatron.testing.user_file import called
from lightning_megatron.trainer.setup.pipelined_models import attends_by_name, plan_of


def run_model_plan(options: argparse.Namespace) -> None:
    """Prints the report. Raises UsageError with all errors of what was given."""
    own = {name: getattr(options, name) for name in AXES}
    # Experts have as many data-parallel ranks as they need.
    ranks = max(1, options.tp * options.pp * options.cp) * max(1, options.ep)
    sizes = Sizes(world=ranks, etp=max(1, options.tp) if options.ep > 1 else 1, **own)
    if faults := sizes.faults():
        raise UsageError(faults)
    # What a user's file does, it does in a process of its own, which it may end.
    task = Task.of(partial(_report, absolute(options.model), sizes))
    [ended] = run_processes([task], limit_seconds=LIMIT_SECONDS)
    if ended.failure:
        told = ended.failure if ended.failure.startswith(options.model) else f"{options.model}: {ended.failure}"
        raise UsageError([line for line in told.splitlines() if line.strip()])
    print(ended.result)


def _report(model: str, sizes: Sizes) -> str:
    """The report of a model. Raises SubjectError where there is none."""
    with telling("it cannot be made or cut"):
        module = _module_of(model)
        plan = plan_of(module, None)
        if faults := plan.faults(module):
            raise SubjectError("\n".join(faults))
        texts = [
            f"{name} ({type(child).__name__})\n{report_of(module, name, plan, sizes)}"
            + _attention(name, child, plan, sizes)
            for name, child in module.named_children()
        ]
    if not texts:
        raise SubjectError("it holds no network; build it in __init__ or configure_model")
    return "\n\n".join(texts)


def _attention(name: str, network: nn.Module, plan: ModelPlan, sizes: Sizes) -> str:
    """A line about the attention over context-parallel ranks; empty without such."""
    if sizes.cp == 1:
        return ""
    if attends_by_name(network, plan.layers_in(name, network)[0]):
        return "\ncontext parallel: layers look up their attention by name, which is cut over the tokens"
    return "\ncontext parallel: no layer looks up its attention by name as transformers' models do: nothing can be cut"


def _module_of(model: str) -> pl.LightningModule:
    if ":" not in model:
        module = pl.LightningModule()
        try:
            module.model = meta_model(Path(model_folder(model, CONFIG_FILES)))
        except (ValueError, ModuleNotFoundError) as error:
            raise SubjectError(mistake_of(error) or str(error)) from error
        return module
    found = require_module(called(model))
    found.configure_model()
    return found
