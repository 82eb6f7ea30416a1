"""Removal of leftovers of interrupted saves, and of all checkpoints but the newest."""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_megatron.checkpoint.atomic_directory import REPLACED, UNFINISHED, remove, remove_files, tidy
from lightning_megatron.checkpoint.checkpoint_directory import CheckpointDirectory, Leftover, leads_to, scan_directory
from lightning_megatron.checkpoint.folder import Address, is_remote, name_at
from lightning_megatron.checkpoint.manifest import is_checkpoint

# A save that has written nothing for so long has ended.
YOUNG_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Removal:
    """A path to remove, or to keep for a reason that is not obvious."""

    path: Address
    num_bytes: int
    reason: str
    is_checkpoint: bool = False
    """Whether it is a complete checkpoint at its final path."""
    is_kept: bool = False
    files: tuple[str, ...] = ()
    """Files to remove of an unfinished save at an address; newer ones stay."""

    @property
    def name(self) -> str:
        return name_at(self.path)


def plan_of(folder: Address, *, keep: int = 0, takes_young: bool = False) -> list[Removal]:
    """The removals that `prune` would make, and what it would keep for a reason that is not obvious.

    Of the complete checkpoints the newest `keep` stay, by step and then by time (0: all of them). Unfinished saves that
    were written to within the last hour are left, a run may be at them, unless `takes_young`.
    """
    contents = scan_directory(folder)
    planned = [_of_leftover(leftover, takes_young) for leftover in contents.leftovers]
    planned += [
        Removal(
            path=one.path, num_bytes=0, reason=f"damaged, which is not for prune to judge: {one.fault}", is_kept=True
        )
        for one in contents.checkpoints
        if not one.is_complete
    ]
    return planned + (_beyond(contents, keep) if keep else [])


def prune(planned: Sequence[Removal]) -> None:
    """Carries the plan out. A checkpoint is gone from its path in one step, before its files are removed.

    Raises RuntimeError at the first that cannot be removed, or that has become a checkpoint meanwhile.
    """
    for removal in planned:
        if removal.is_kept:
            continue
        if removal.is_checkpoint:
            remove(removal.path)
            continue
        if is_remote(removal.path):
            if is_checkpoint(removal.path):
                raise RuntimeError(
                    f"{removal.path} is a complete checkpoint by now and stays; prune again for the rest"
                )
            remove_files(removal.path, removal.files)
            continue
        path = Path(removal.path)
        if path.is_symlink() or path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)
        if os.path.lexists(path):
            raise RuntimeError(f"{path} could not be removed; who may write to it?")
        tidy(path)


def _of_leftover(leftover: Leftover, takes_young: bool) -> Removal:
    age_seconds = time.time() - leftover.touched_seconds if leftover.touched_seconds else 0.0
    reason, is_kept = "left over", False
    if leftover.what == REPLACED and not os.path.exists(leftover.final_path):
        reason, is_kept = f"{leftover.name} is not at its place: the next run brings this one back", True
    elif leftover.what == UNFINISHED and age_seconds < YOUNG_SECONDS and not takes_young:
        when = f"{max(round(age_seconds / 60), 0)} minutes ago" if leftover.touched_seconds else "at a time not told"
        reason, is_kept = f"written to {when}: a run may be at it (--all removes it)", True
    elif leftover.is_unfinished:
        reason = "its save ended before it was complete"
    return Removal(
        path=leftover.path, num_bytes=leftover.num_bytes, reason=reason, is_kept=is_kept, files=leftover.files
    )


def _beyond(contents: CheckpointDirectory, keep: int) -> list[Removal]:
    """Removals of all complete checkpoints but the newest; one that a link leads to is kept."""
    names = {leads_to(link): link.name for link in contents.links}
    removals = []
    for one in contents.complete[: -keep or None]:
        link = names.get(leads_to(one.path))
        reason = f"older than the newest {keep}" if link is None else f"{link} leads to it"
        removals.append(
            Removal(path=one.path, num_bytes=one.num_bytes, reason=reason, is_checkpoint=True, is_kept=link is not None)
        )
    return removals
