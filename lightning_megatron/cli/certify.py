"""`lightning-megatron certify`: a user's own module on one device, beside the same module under every layout.

Its processes run on this machine's CPU; nothing of a run is left behind.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lightning_megatron.cli.commands import add_command
from lightning_megatron.cli.shipped_recipes import recipe_file
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.pipeline.registry import SCHEDULES
from lightning_megatron.testing.layout_name import DEFAULT, WORDS
from lightning_megatron.testing.proof import LIMIT_SECONDS, ROWS, STEPS, CertifyError, NotTrainedError, certified
from lightning_megatron.testing.subject import MakeSubject
from lightning_megatron.testing.tiny import TinyTwin
from lightning_megatron.testing.user_file import FromFiles, absolute, spec_fault

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
        run=run_certify,
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
        help=f"rows of a global batch, to which batches are joined or cut (default: {ROWS})",
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


def run_certify(options: argparse.Namespace) -> int:
    """Prints the certificate; 1 where something differs. Raises UsageError with all errors of what was given."""
    names = [name.strip() for name in options.layouts.split(",") if name.strip()]
    try:
        certificate = certified(
            TinyTwin(make=_subject(options)) if options.tiny else _subject(options),
            layouts="all" if names == ["all"] else names,
            steps=options.steps,
            rows=options.rows,
            limit_seconds=options.limit_seconds,
            progress=lambda what: print(f"{what} ...", file=sys.stderr, flush=True),
        )
    except NotTrainedError as error:
        is_named = Path(options.module.rpartition(":")[0] or options.module).name in str(error)
        told = str(error) if is_named else f"{options.module}: {error}"
        raise UsageError(told.splitlines()) from error
    except CertifyError as error:
        raise UsageError(str(error).splitlines()) from error
    print(json.dumps(certificate.record, indent=1) if options.json else certificate.text)
    return 0 if certificate else 1


def _subject(options: argparse.Namespace) -> MakeSubject:
    trainer = {
        name: value
        for name in ("gradient_clip_val", "accumulate_grad_batches")
        if (value := getattr(options, name)) is not None
    }
    options.module = recipe_file(options.module)
    if options.module.endswith((".yaml", ".yml")):
        from lightning_megatron.cli.certify_recipe import FromRecipe

        if options.data is not None:
            raise UsageError([f"--data ({options.data}) is for a module of your own; {options.module} names its data"])
        return FromRecipe(path=Path(options.module).resolve(), trainer=trainer)
    if faults := [fault for spec in (options.module, options.data) if spec and (fault := spec_fault(spec))]:
        raise UsageError(faults)
    return FromFiles(module=absolute(options.module), data=options.data and absolute(options.data), trainer=trainer)
