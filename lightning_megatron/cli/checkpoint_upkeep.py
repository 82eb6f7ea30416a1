"""What the commands of `lightning-megatron checkpoint` do: inspect, verify, consolidate and prune.

Nothing here needs the layout that a checkpoint was saved on, nor more than one process.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lightning_megatron.checkpoint.checkpoint_directory import (
    CheckpointDirectory,
    leads_to,
    scan_directory,
)
from lightning_megatron.checkpoint.consolidate import write_consolidated
from lightning_megatron.checkpoint.folder import Folder, is_remote, store_errors_as_os_errors
from lightning_megatron.checkpoint.manifest import is_checkpoint
from lightning_megatron.checkpoint.prune import plan_of, prune
from lightning_megatron.checkpoint.summary import Summary, summary_of, tensors_of
from lightning_megatron.checkpoint.verify import verify
from lightning_megatron.cli.amounts import byte_text, num_text
from lightning_megatron.cli.checkpoint import no_directory
from lightning_megatron.cli.target import require_writable
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.progress import progress_bar

_FAULTS_FOUND = 1


def run_inspect(options: argparse.Namespace) -> None:
    """Prints the contents of the path."""
    if _checked(options.path, lambda: Folder(options.path).kind() == "folder" and not is_checkpoint(options.path)):
        contents = _checked(options.path, lambda: scan_directory(options.path))
        if contents.checkpoints or contents.leftovers or contents.links:
            if options.tensors:
                raise UsageError([f"--tensors needs a checkpoint, and {options.path} is a folder of them; give one"])
            print(json.dumps(_record_of_folder(contents)) if options.json else _report_of_folder(contents))
            return
    summary = _checked(options.path, lambda: summary_of(options.path))
    tensors = _checked(options.path, lambda: tensors_of(options.path)) if options.tensors else []
    if options.json:
        record = asdict(summary) | ({"tensors": [asdict(tensor) for tensor in tensors]} if options.tensors else {})
        print(json.dumps(record))
        return
    print(_report(summary))
    if tensors:
        width = max(len(tensor.name) for tensor in tensors)
        print()
    for tensor in tensors:
        chunks = num_text(tensor.num_chunks, "chunk")
        print(f"{tensor.name:<{width}}  {list(tensor.shape)} {tensor.dtype}, {chunks}, {byte_text(tensor.num_bytes)}")


def run_verify(options: argparse.Namespace) -> int:
    """Prints every fault. Returns 1 where there is one."""
    started_seconds = time.monotonic()
    with progress_bar("verifying", "chunks") as watch:
        faults = _checked(options.path, lambda: verify(options.path, watch=watch))
    if options.json:
        print(json.dumps({"path": options.path, "is_sound": not faults, "faults": faults}))
    elif faults:
        print("\n".join([f"{options.path}: {num_text(len(faults), 'fault')}", *faults]))
    else:
        num_bytes = sum(_checked(options.path, lambda: Folder(options.path).sizes()).values())
        seconds = time.monotonic() - started_seconds
        print(f"{options.path} is sound: {byte_text(num_bytes)} read in {seconds:.1f} s")
    return _FAULTS_FOUND if faults else 0


def run_consolidate(options: argparse.Namespace) -> None:
    """Writes the consolidated file."""
    # A folder that is not there is not made for it.
    if options.out.absolute().parent.is_dir():
        require_writable(options.out.absolute().parent, f"OUT ({options.out})")
    _checked(options.path, lambda: write_consolidated(options.path, options.out, weights_only=options.weights_only))
    print(f"{options.out}: {byte_text(options.out.stat().st_size)}")


def run_prune(options: argparse.Namespace) -> None:
    """Removes leftovers and old checkpoints, and prints them."""
    if _checked(options.path, lambda: Folder(options.path).kind()) != "folder":
        raise UsageError([no_directory(options.path)])
    if _checked(options.path, lambda: is_checkpoint(options.path)):
        inner = options.path.rstrip("/") if is_remote(options.path) else os.path.abspath(options.path)
        parent = os.path.dirname(inner)
        raise UsageError([f"FOLDER ({options.path}) is a checkpoint; give the folder that holds it: {parent}"])
    planned = _checked(options.path, lambda: plan_of(options.path, keep=options.keep or 0, takes_young=options.all))
    if not options.dry_run:
        _checked(options.path, lambda: prune(planned))
    if options.json:
        removals = [asdict(removal) | {"path": str(removal.path)} for removal in planned]
        print(json.dumps({"is_done": not options.dry_run, "removals": removals}))
        return
    for removal in planned:
        what = "leaves" if removal.is_kept else "would remove" if options.dry_run else "removed"
        size = f" ({byte_text(removal.num_bytes)})" if removal.num_bytes else ""
        print(f"{what} {os.path.relpath(removal.path, options.path)}{size}: {removal.reason}")
    if all(removal.is_kept for removal in planned):
        print("nothing to remove")


WORKS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "inspect": run_inspect,
    "verify": run_verify,
    "consolidate": run_consolidate,
    "prune": run_prune,
}
"""What each command does, by its name."""


def _checked(path: str, ask: Callable[[], Any]) -> Any:
    """Returns the result of `ask`; errors about the user's files at the path become a usage error of one line."""
    try:
        with store_errors_as_os_errors(path):
            return ask()
    except (ValueError, RuntimeError, OSError) as error:
        raise UsageError([" ".join(str(error).split())]) from error


def _report(summary: Summary) -> str:
    layout = ", ".join(f"{name} {size}" for name, size in summary.layout.items())
    rows = [
        ("save", f"{summary.save_id}, {_moment(summary.saved_seconds)}"),
        ("written by", f"lightning_megatron {summary.package}, torch {summary.torch}, layout {summary.layout_version}"),
        ("saved on", layout or "not known"),
        ("step", f"{_or_not_known(summary.step)}, epoch {_or_not_known(summary.epoch)}"),
    ]
    for name, model in summary.models.items():
        config = ", ".join(f"{key} {value}" for key, value in model["config"].items())
        rows.append((f"model {name}", f"{model['class']}: {config}"))
    for title, amount in summary.tensors.items():
        rows.append((title, f"{num_text(amount.number, 'tensor')}, {byte_text(amount.num_bytes)}"))
    rows.append(("files", f"{len(summary.files)}, {byte_text(sum(summary.files.values()))}"))
    width = max(len(title) for title, _ in rows)
    return "\n".join([summary.path, *(f"  {title:<{width}}  {text}" for title, text in rows)])


def _report_of_folder(contents: CheckpointDirectory) -> str:
    lines = []
    newest = contents.complete[-1] if contents.complete else None
    for one in contents.checkpoints:
        state = f"damaged: {one.fault}"
        if one.is_complete:
            when = _moment(one.saved_seconds)
            state = f"complete, step {_or_not_known(one.step)}, epoch {_or_not_known(one.epoch)}, {when}"
            state += f", {byte_text(one.num_bytes)}" + (", the newest" if one is newest else "")
        lines.append(f"{one.name}: {state}")
    for link in contents.links:
        target = leads_to(link)
        lines.append(f"{link.name}: link to {target.name}" + ("" if is_checkpoint(target) else ", which is not there"))
    for leftover in contents.leftovers:
        state = "unfinished" if leftover.is_unfinished else "left over"
        lines.append(f"{leftover.name}: {state}, {byte_text(leftover.num_bytes)}, at {leftover.path}")
    return "\n".join(lines)


def _record_of_folder(contents: CheckpointDirectory) -> dict[str, Any]:
    newest = contents.complete[-1].name if contents.complete else None
    return {
        "newest": newest,
        "checkpoints": [
            asdict(one) | {"path": str(one.path), "is_complete": one.is_complete} for one in contents.checkpoints
        ],
        "links": {link.name: str(leads_to(link)) for link in contents.links},
        "leftovers": [
            {
                "name": leftover.name,
                "path": str(leftover.path),
                "is_unfinished": leftover.is_unfinished,
                "num_bytes": leftover.num_bytes,
                "touched_seconds": leftover.touched_seconds,
            }
            for leftover in contents.leftovers
        ],
    }


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "at a time not known"


def _or_not_known(number: int) -> str:
    return "not known" if number < 0 else str(number)
