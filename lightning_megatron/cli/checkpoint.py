"""`lightning-megatron checkpoint`: inspects, verifies, consolidates and prunes checkpoints.

Nothing here needs the layout that a checkpoint was saved on, nor more than one process.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from lightning_megatron.cli.commands import add_command
from lightning_megatron.cli.usage import UsageError


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command, its own commands and their options."""
    parser = add_command(commands, "checkpoint", "Reads checkpoint directories of any layout, in one process.")
    own = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="work")
    inspect = add_command(
        own,
        "inspect",
        "Shows the contents of a checkpoint: when and on which layout it was saved, its models, and the number and "
        "bytes of its tensors. For a folder of checkpoints, prints one line per checkpoint.",
        run=_run,
        line="show the contents of a checkpoint, or of a folder of checkpoints",
    )
    inspect.add_argument("path", metavar="PATH", help="a checkpoint directory, or a folder of checkpoints")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor: shape, dtype, chunks, bytes")
    verifier = add_command(
        own,
        "verify",
        "Reads every byte of a checkpoint, compares it with the checksums, and checks that the chunks make complete "
        "tensors. Exits with 1 if anything is wrong.",
        run=_run,
        line="read every byte and print every error",
    )
    verifier.add_argument("path", metavar="PATH", help="a checkpoint directory")
    consolidate = add_command(
        own,
        "consolidate",
        "Writes one file with the weights of the unsharded model, which Lightning loads on one device with "
        "Trainer.fit(ckpt_path=...) and load_from_checkpoint. Needs as much memory as the checkpoint has bytes.",
        run=_run,
        line="write one file that Lightning loads on one device",
    )
    consolidate.add_argument("path", metavar="PATH", help="a checkpoint directory")
    consolidate.add_argument("out", type=Path, metavar="OUT", help="the file to write; an existing one is not changed")
    consolidate.add_argument("--weights-only", action="store_true", help="leave out the optimizers' states")
    pruner = add_command(
        own,
        "prune",
        "Removes the leftovers of interrupted saves from a folder and, with --keep, old checkpoints. Never removes a "
        "checkpoint that a link (last.ckpt) points to, nor a damaged one.",
        run=_run,
        line="remove leftovers of interrupted saves, and old checkpoints",
    )
    pruner.add_argument("path", metavar="FOLDER", help="a folder of checkpoints")
    pruner.add_argument(
        "--keep",
        type=int,
        metavar="NUMBER",
        help="number of complete checkpoints to keep, the newest by step and then by time (default: all)",
    )
    pruner.add_argument("--all", action="store_true", help="also remove unfinished saves written to in the last hour")
    pruner.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")
    for command in (inspect, verifier, pruner):
        command.add_argument("--json", action="store_true", help="print everything as JSON")


def _run(options: argparse.Namespace) -> int | None:
    if faults := _faults(options):
        raise UsageError(faults)
    # Checkpoints hold tensors: torch takes a second to import, which a look at the help need not wait for.
    from lightning_megatron.cli.checkpoint_upkeep import WORKS

    return WORKS[options.work](options)


def _faults(options: argparse.Namespace) -> list[str]:
    """Errors that show before anything is read."""
    faults = []
    is_local = options.path and "://" not in options.path
    if options.work != "prune":
        if is_local and not os.path.lexists(options.path):
            faults.append(
                f"checkpoint {options.path} does not exist; give the directory of one, or a file that torch.save wrote"
            )
        return faults
    if options.keep is not None and options.keep < 1:
        faults.append(f"--keep ({options.keep}) must be at least 1; leave it out to remove no checkpoint")
    if is_local and not os.path.isdir(options.path):
        faults.append(no_directory(options.path))
    return faults


def no_directory(path: str) -> str:
    """The error of `prune` about a path that is no folder."""
    return f"FOLDER ({path}) is no directory; give a folder of checkpoints"
