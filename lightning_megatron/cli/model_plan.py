"""`lightning-megatron model-plan`: how a network that knows nothing of ranks would be cut."""

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_megatron.any_module.report import report_of
from lightning_megatron.cli.commands import add_command
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.hf.meta_model import meta_model
from lightning_megatron.mesh import Sizes
from lightning_megatron.testing.subject import SubjectError, require_module
from lightning_megatron.testing.user_file import called
from lightning_megatron.trainer.setup.pipelined_models import plan_of

_EPILOG = """\
MODEL is a LightningModule of yours, as in module.py:MyModule, which is made without arguments and whose configure_model
is called; or a folder with the config.json of a model of transformers, of which no weights are read.

example:  lightning-megatron model-plan module.py:MyModule --tp 2 --pp 2
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command and its options."""
    parser = add_command(
        commands,
        "model-plan",
        "Shows how a network is cut that knows nothing of ranks: which layers each stage gets, which linears are cut "
        "over tensor-parallel ranks, what stays whole and why, and how many parameters a rank holds.",
        run=run_model_plan,
        epilog=_EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", help="module.py:MyModule, or a folder with a config.json")
    parser.add_argument("--tp", type=int, default=1, metavar="NUMBER", help="tensor-parallel size (default: 1)")
    parser.add_argument("--pp", type=int, default=1, metavar="NUMBER", help="pipeline-parallel size (default: 1)")
    parser.add_argument("--vp", type=int, default=1, metavar="NUMBER", help="stages of each pipeline rank (default: 1)")


def run_model_plan(options: argparse.Namespace) -> None:
    """Prints the report. Raises UsageError with all errors of what was given."""
    sizes = Sizes(world=max(1, options.tp * options.pp), tp=options.tp, pp=options.pp, vp=options.vp)
    if faults := sizes.faults():
        raise UsageError(faults)
    try:
        module = _module_of(options.model)
        plan = plan_of(module, None)
        if faults := plan.faults(module):
            raise UsageError(faults)
        networks = dict(module.named_children())
        texts = [
            f"{name} ({type(child).__name__})\n{report_of(name, child, plan, sizes)}"
            for name, child in networks.items()
        ]
    except (SubjectError, ValueError) as error:
        raise UsageError(str(error).splitlines()) from error
    if not texts:
        raise UsageError([f"{options.model} holds no network; build it in __init__ or configure_model"])
    print("\n\n".join(texts))


def _module_of(model: str) -> pl.LightningModule:
    if ":" not in model:
        module = pl.LightningModule()
        module.model = meta_model(Path(model))
        return module
    found = require_module(called(model))
    found.configure_model()
    return found
