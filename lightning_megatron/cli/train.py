"""`lightning-megatron train`: runs a recipe of the package, in this process, as `python SCRIPT fit --config ...` would.

Lightning's launcher starts further processes by the command line of this one: while the script runs, `sys.argv` and
`__main__` are those of the script, so each of them runs the script, too.
"""

import argparse
import runpy
import sys
from typing import Any

from lightning_megatron.cli.commands import add_command
from lightning_megatron.cli.shipped_recipes import shipped_recipe

_EPILOG = """\
Options after NAME are those of the recipe's script: of the Trainer, the strategy, the module and the data. They win
over the configuration. `lightning-megatron train NAME --help` prints them.

example:  lightning-megatron train toy
          lightning-megatron train gpt2_124m --trainer.devices 4 --data.path texts/
          torchrun --nproc-per-node 8 -m lightning_megatron train gpt2_124m --data.path texts/
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command, which leaves all options after the name to the recipe's script."""
    parser = add_command(commands, "train", "Runs a recipe of the package.", run=_run, epilog=_EPILOG)
    parser.add_argument("name", metavar="NAME", help="name of a recipe, as lightning-megatron recipes lists it")
    rest = parser.add_argument("options", metavar="OPTIONS", nargs=argparse.REMAINDER, help="options of its script")
    # It may be empty: else argparse would call it missing where NAME is.
    rest.required = False


def _run(options: argparse.Namespace) -> None:
    recipe = shipped_recipe(options.name)
    sys.argv = [str(recipe.script), "fit", "--config", str(recipe.config), *options.options]
    runpy.run_path(sys.argv[0], run_name="__main__")
