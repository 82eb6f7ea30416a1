"""Repair of a directory of checkpoints after a run was killed, before the next one starts.

All ranks may do it at once: each step is one rename, and a rank that comes second finds nothing to do.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from lightning_megatron.checkpoint.atomic_directory import REPLACED, new_id, tidy
from lightning_megatron.checkpoint.checkpoint_directory import (
    hidden_in,
    leads_to,
    leftovers_of,
    links_of,
    scan_directory,
)
from lightning_megatron.checkpoint.folder import Address, is_remote
from lightning_megatron.checkpoint.manifest import is_checkpoint


@dataclass(frozen=True, kw_only=True)
class Repairs:
    """Findings and changes of a repair."""

    unfinished: tuple[Address, ...] = ()
    """Final paths of interrupted saves; they are left as they are."""
    done: tuple[str, ...] = ()
    """One sentence for each change of this process."""


def repair(folder: Address) -> Repairs:
    """Restores checkpoints that were set aside, and sets dangling links to a checkpoint.

    A link that leads to no complete checkpoint (a save makes one before it is in place) is set to the newest that is;
    where there is none it is left. At an address there is nothing to repair.
    """
    done = [] if is_remote(folder) else bring_back(Path(folder))
    for link in links_of(folder):
        target = leads_to(link)
        # A save makes no link into another directory.
        if is_checkpoint(link) or target.parent != leads_to(folder):
            continue
        complete = scan_directory(folder).complete
        if complete and _relink(link, complete[-1].name):
            done.append(f"{link} led to {target.name}, which is not complete; it leads to {complete[-1].name} now")
    unfinished = {leftover.final_path for leftover in leftovers_of(folder) if leftover.is_unfinished}
    return Repairs(unfinished=tuple(sorted(unfinished, key=os.fspath)), done=tuple(done))


def bring_back(folder: Path) -> list[str]:
    """Restores checkpoints that were set aside for others that never came; returns a sentence for each."""
    done = []
    for aside in hidden_in(folder, REPLACED):
        path = folder / aside.name
        if os.path.lexists(path):
            continue
        # Another rank may be first, or a run that still goes on may put its checkpoint there.
        with contextlib.suppress(OSError):
            os.rename(aside, path)
            done.append(f"{path} had been set aside while another was to take its place; it is back")
            tidy(aside)
    return done


def _relink(link: Path, target: str) -> bool:
    """Sets the link to its neighbour of that name, in one step; False where it leads to a checkpoint by now."""
    new = link.with_name(f".{link.name}.{new_id()}")
    os.symlink(target, new)
    try:
        if is_checkpoint(link):
            return False
        os.replace(new, link)
    finally:
        new.unlink(missing_ok=True)
    return True
