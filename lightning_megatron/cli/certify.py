"""`lightning-megatron certify`: a user's own module on one device, beside the same module under every layout.

Its processes run on this machine's CPU; nothing of a run is left behind.
"""

import argparse
import os
from typing import Any

from lightning_megatron.cli.commands import add_command
from lightning_megatron.cli.shipped_recipes import recipe_file
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.pipeline.registry import SCHEDULES
from lightning_megatron.testing.defaults import LIMIT_SECONDS, ROWS, STEPS
from lightning_megatron.testing.layout_name import DEFAULT, WORDS
from lightning_megatron.testing.maker_spec import spec_fault

_EPILOG = f"""\
MODULE is a class or a function in a file of yours, called without arguments, as in module.py:MyModule, or
package.module:MyModule; or a recipe's YAML file, or its name, which has data and options of the Trainer too.

A layout is a row of sizes and words: tp2, dp2pp2, pp2m4-collective, dp2-zero. m4 is 4 microbatches,
{", ".join(f"{word} {what}" for word, what in WORDS.items())};
{", ".join(SCHEDULES)} are schedules.

exit code: 0 where nothing differs, 1 where something does or no layout ran, 2 for a mistake

example:  lightning-megatron certify module.py:MyModule --data module.py:MyData
          lightning-megatron certify toy --tiny --layouts tp2,pp2
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command and its options."""
    parser = add_command(
        commands,
        "certify",
        "Trains your own module for a few steps on one device, and under every layout by processes on the CPU; "
        "compares losses, logged values, gradients, buffers and weights, and names what differs first, with "
        "the likely cause.",
        run=_run,
        epilog=_EPILOG,
    )
    parser.add_argument("module", metavar="MODULE", help="module.py:MyModule, or a recipe's YAML file or name")
    parser.add_argument(
        "--data",
        metavar="DATA",
        help="data module, or a function that makes a loader or a list of batches, as in module.py:MyData "
        "(default: the module's own train_dataloader)",
    )
    parser.add_argument(
        "--layouts",
        default="all",
        metavar="NAMES",
        help=f"layouts with commas between them (default: all: {','.join(DEFAULT)}, and ep2 where there are experts)",
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, metavar="NUMBER", help=f"steps of each run (default: {STEPS})"
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=ROWS,
        metavar="NUMBER",
        help=f"rows of a global batch, to which batches are joined or divided (default: {ROWS})",
    )
    parser.add_argument(
        "--gradient-clip-val",
        type=float,
        metavar="NORM",
        help="gradient_clip_val of the Trainer (default: the recipe's)",
    )
    parser.add_argument(
        "--accumulate-grad-batches",
        type=int,
        metavar="NUMBER",
        help="accumulate_grad_batches of the Trainer (default: the recipe's)",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="train the small twin of the model: few layers, small sizes, a small vocabulary; for a model that is "
        "built in configure_model from a configuration that is an attribute of the module",
    )
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=LIMIT_SECONDS,
        metavar="SECONDS",
        help=f"time that one layout may take (default: {LIMIT_SECONDS:g})",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def _run(options: argparse.Namespace) -> int:
    _require_sense(options)
    # What trains takes seconds to import, and a name that is wrong, or a look at the help, need not wait for it.
    from lightning_megatron.cli.certification import run_certify

    return run_certify(options)


def _require_sense(options: argparse.Namespace) -> None:
    """Puts the file of a recipe in the place of its name. Raises UsageError with what shows to be wrong by names."""
    options.module = recipe_file(options.module)
    if options.module.endswith((".yaml", ".yml")):
        faults = []
        if options.data is not None:
            faults.append(f"--data ({options.data}) is for a module of your own; {options.module} names its data")
        if not os.path.lexists(options.module):
            faults.append(f"{options.module} cannot be read: there is no such file")
    else:
        faults = [fault for spec in (options.module, options.data) if spec and (fault := spec_fault(spec))]
    if faults:
        raise UsageError(faults)
