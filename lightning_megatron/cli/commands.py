"""The commands of `lightning-megatron`, each with its line in `--help`. A new command is a new file and a line here.

`--help` of all commands is printed without importing any of them.
"""

import argparse
from collections.abc import Callable
from typing import Any

COMMANDS = {
    "recipes": "list the recipes of the package, and copy one to where you can change it",
    "train": "run a recipe of the package",
    "curves": "what runs logged, beside each other as a table and as a picture",
    "plan": "which layouts fit on so many GPUs, and how fast each would be",
    "calibrate": "fit the time model to measured steps of your own cluster, for plan to take",
    "dry-run": "memory, FLOPs and messages of a rank, by running its step on tensors without numbers",
    "schedule": "show a pipeline schedule: its order, its bubble, its activations",
    "checkpoint": "inspect, verify, consolidate and prune checkpoints",
    "convert": "convert between a Hugging Face folder and a checkpoint directory",
    "evaluate": "the perplexity of a text under a model, on any layout, and tasks of lm-eval",
    "certify": "your own module on one device, beside itself under every layout: what differs first, and why",
    "model-plan": "how a network that knows nothing of ranks is cut, and what each rank holds",
    "doctor": "what of this machine, its environment and its network would spoil a run, and how to mend it",
    "prepare-data": "turn text into the token files that training reads",
    "completion": "print a script by which bash or zsh complete commands and options",
}


def add_command(
    commands: "argparse._SubParsersAction[Any]",
    name: str,
    description: str,
    *,
    run: Callable[[argparse.Namespace], int | None] | None = None,
    line: str = "",
    epilog: str = "",
) -> argparse.ArgumentParser:
    """Adds the parser of a command; `line` is its line of help, and without `run` it has commands of its own."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=line or COMMANDS[name],
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter if epilog else argparse.HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser
