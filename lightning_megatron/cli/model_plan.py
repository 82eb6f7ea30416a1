"""`lightning-megatron model-plan`: how a network that knows nothing of ranks would be cut."""

import argparse
from typing import Any

from lightning_megatron.cli.commands import add_command
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.rules.limits import MOST_OF_A_KIND, limit_faults
from lightning_megatron.testing.maker_spec import spec_fault

AXES = ("tp", "pp", "vp", "cp", "ep")
"""Names of the options of sizes."""
_EPILOG = """\
MODEL is a LightningModule of yours, as in module.py:MyModule, which is made without arguments and whose configure_model
is called; or the config.json of a model of transformers, or its folder, of which no weights are read.

example:  lightning-megatron model-plan module.py:MyModule --tp 2 --pp 2
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command and its options."""
    parser = add_command(
        commands,
        "model-plan",
        "Shows how a network is cut that knows nothing of ranks: which layers each stage gets, which linears are cut "
        "over tensor-parallel ranks, what stays whole and why, where experts are, whether attention can be cut over "
        "context-parallel ranks, and how many parameters a rank holds.",
        run=_run,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="module.py:MyModule, or a config.json, or its folder, or owner/model on the Hugging Face hub",
    )
    parser.add_argument("--tp", type=int, default=1, metavar="NUMBER", help="tensor-parallel size (default: 1)")
    parser.add_argument("--pp", type=int, default=1, metavar="NUMBER", help="pipeline-parallel size (default: 1)")
    parser.add_argument("--vp", type=int, default=1, metavar="NUMBER", help="stages of each pipeline rank (default: 1)")
    parser.add_argument("--cp", type=int, default=1, metavar="NUMBER", help="context-parallel size (default: 1)")
    parser.add_argument("--ep", type=int, default=1, metavar="NUMBER", help="expert-parallel size (default: 1)")


def _run(options: argparse.Namespace) -> None:
    faults = limit_faults({f"--{name}": getattr(options, name) for name in AXES}, MOST_OF_A_KIND)
    if ":" in options.model and (fault := spec_fault(options.model)):
        faults.append(fault)
    if faults:
        raise UsageError(faults)
    # What trains takes seconds to import, and a name that is wrong, or a look at the help, need not wait for it.
    from lightning_megatron.cli.cut_report import run_model_plan

    run_model_plan(options)
