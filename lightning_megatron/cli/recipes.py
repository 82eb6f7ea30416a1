"""`lightning-megatron recipes`: lists the recipes of the package, and copies one to where a user can change it.

`toys` writes what toy recipes read that no user has at hand.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from lightning_megatron.cli.commands import add_command
from lightning_megatron.cli.shipped_recipes import ShippedRecipe, shipped_recipe, shipped_recipes
from lightning_megatron.cli.target import require_writable
from lightning_megatron.cli.usage import UsageError

_HEAD = ("name", "script", "configuration", "what it trains")


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command and its own commands `copy` and `toys`."""
    parser = add_command(
        commands,
        "recipes",
        "Lists the recipes of the package, one a line. `lightning-megatron train NAME` runs one.",
        run=_run_list,
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON, with the paths of the files")
    own = parser.add_subparsers(title="commands", metavar="COMMAND")
    # Whoever knows other programs types it.
    listed = add_command(
        own, "list", "Lists the recipes of the package.", run=_run_list, line="list the recipes, as without a command"
    )
    # A default would take the place of the option before the command.
    listed.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print everything as JSON")
    copy = add_command(
        own,
        "copy",
        "Copies the script and the configuration of a recipe to a folder, where you can change them. No file is "
        "overwritten.",
        run=_run_copy,
        line="copy a recipe's script and configuration to a folder",
    )
    copy.add_argument("name", metavar="NAME", help="name of a recipe, as lightning-megatron recipes lists it")
    copy.add_argument("folder", metavar="FOLDER", type=Path, help="where the files shall be; it is made if need be")
    toys = add_command(
        own,
        "toys",
        "Writes what the toy recipes of tuning read: tiny models of transformers with a tokenizer and a chat template, "
        "conversations, pairs of answers and text. No file is overwritten, and no network is needed.",
        run=_run_toys,
        line="write the tiny models and data that toy recipes of tuning read",
    )
    toys.add_argument("folder", metavar="FOLDER", type=Path, help="where the files shall be; it is made if need be")


def _run_list(options: argparse.Namespace) -> None:
    found = shipped_recipes()
    if options.json:
        print(json.dumps([_record_of(recipe) for recipe in found]))
        return
    rows = [_HEAD, *((one.name, one.script.name, one.config.name, one.trains) for one in found)]
    widths = [max(len(cell) for cell in column) for column in list(zip(*rows, strict=True))[:-1]]
    for *cells, last in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), last]))


def _record_of(recipe: ShippedRecipe) -> dict[str, str]:
    paths = {"script": str(recipe.script), "config": str(recipe.config)}
    return {"name": recipe.name, "trains": recipe.trains} | paths


def _run_toys(options: argparse.Namespace) -> None:
    # Transformers takes seconds to import.
    from lightning_megatron.cli.toy_files import write_toys

    require_writable(options.folder, f"FOLDER ({options.folder})")
    for path in write_toys(options.folder):
        print(path)
    print(f"in {options.folder} run: lightning-megatron train finetune_toy")


def _run_copy(options: argparse.Namespace) -> None:
    recipe, folder = shipped_recipe(options.name), options.folder
    require_writable(folder, f"FOLDER ({folder})")
    script, config = folder / recipe.script.name, folder / recipe.config.name
    # Recipes share scripts: one that is there unchanged serves this recipe, too.
    is_shared = script.is_file() and script.read_bytes() == recipe.script.read_bytes()
    missing = {config: recipe.config} if is_shared else {script: recipe.script, config: recipe.config}
    if taken := [str(path) for path in missing if path.exists() or path.is_symlink()]:
        verb = "exists" if len(taken) == 1 else "exist"
        raise UsageError([f"{' and '.join(taken)} {verb} already and would be overwritten; name another folder"])
    for target, source in missing.items():
        shutil.copyfile(source, target)
    kept = " (it was there already)" if is_shared else ""
    print(f"{script}{kept}\n{config}\nrun them by: python {script} fit --config {config}")
