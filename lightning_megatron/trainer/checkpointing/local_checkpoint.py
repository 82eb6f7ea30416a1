"""Local checkpoints: every n steps each rank saves what it holds on its own machine; a fit begins with the newest.

    {local_folder}/rank-{global rank}/step={N}.ckpt     a checkpoint of one rank; the newest two stay

No tensor is gathered and no shared disk is waited for. It serves a run that resumes at the same layout on the same
machines; for everything else there are the shared checkpoints. A local one is taken where every rank has a complete
one of the same save, made by a run that goes on from the shared one of `ckpt_path`.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_megatron.checkpoint import CheckpointConfig, Saver, read_meta
from lightning_megatron.checkpoint.checkpoint_directory import STEP, scan_directory
from lightning_megatron.checkpoint.manifest import SUFFIX
from lightning_megatron.checkpoint.prune import plan_of, prune
from lightning_megatron.checkpoint.repair import bring_back
from lightning_megatron.comm.collectives import gather_objects
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.trainer.checkpointing.checkpoint_saver import GRACE_SECONDS
from lightning_megatron.trainer.checkpointing.local_state import LocalState
from lightning_megatron.trainer.checkpointing.run_history import FitHistory, fits_of, goes_on_from

# Key of the metadata: what must be alike for a rank's part to be the same part.
_LAYOUT = "local_layout"
_SHOWN = 20

# Steps, and the fit that saved: the same for what all ranks saved together.
_Save = tuple[int, str]


@dataclass
class _Offers:
    """Local checkpoints that a rank could resume from, newer than that of `ckpt_path`."""

    paths: dict[_Save, Path] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    """Local checkpoints that cannot be taken, with the reason."""


class LocalCheckpoint(Checkpoint):
    """Saves during a fit, as a callback of the strategy's own; finds the newest when one begins."""

    def __init__(self, config: CheckpointConfig, mesh: Mesh, world: Axis, layout: Mapping[str, Any]) -> None:
        """`world` is that of `mesh`, over host memory; `layout` all that a rank's part of the state depends on."""
        self._folder = Path(config.local_folder).absolute() / f"rank-{mesh.world.rank}"
        self._every = config.local_every_n_steps
        self._asynchronous = config.asynchronous
        self._world = world
        self._layout = dict(layout)
        self._saver = Saver(Mesh.single().world)
        self._last_step = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A copy of the Trainer's callbacks is of the same run, which has one of it.
        return self

    # --- saving -----------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_step = trainer.global_step
        # Leftovers are of a run that was killed: nobody else writes here.
        prune(plan_of(self._folder, takes_young=True))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, last = trainer.global_step, self._last_step
        self._last_step = step
        # One batch may be several steps, under manual optimization.
        if step // self._every > last // self._every:
            trainer.save_checkpoint(self._folder / f"step={step}{SUFFIX}")

    def is_own(self, path: str | Path) -> bool:
        """Whether a checkpoint at the path is a local one of this rank."""
        return Path(path).parent == self._folder

    def save(self, path: str | Path, state: LocalState) -> None:
        """Writes this rank's checkpoint, in the background if saves are asynchronous. Errors are warnings."""
        path = Path(path)
        meta = {**state.meta, _LAYOUT: self._layout}
        try:
            self._saver.wait()
        except RuntimeError as error:
            self._warn(error)
        try:
            self._saver.save(path, state.tensors, meta, wait=not self._asynchronous)
        except (RuntimeError, ValueError, OSError) as error:
            self._warn(error)
            return
        others = [one for one in scan_directory(self._folder).checkpoints if one.path != path]
        # Time decides: after a step back, what is newer by step is of the run that was left.
        others.sort(key=lambda one: (one.is_complete, one.saved_seconds))
        for outdated in others[:-1]:
            self._saver.remove(outdated.path)

    def wait(self) -> None:
        """Returns when none is being written any more."""
        try:
            self._saver.wait()
        except RuntimeError as error:
            self._warn(error)

    def end(self, *, is_failed: bool) -> None:
        """Waits for the save in flight, for seconds only after a failure, and frees the buffers."""
        try:
            if not self._saver.close(GRACE_SECONDS if is_failed else None):
                self._warn("the run failed while it was being written")
        except RuntimeError as error:
            self._warn(error)

    def _warn(self, fault: object) -> None:
        # The rank that cannot save warns, not the first rank alone.
        warnings.warn(f"a local checkpoint of rank {self._world.rank} was not written: {fault}", stacklevel=2)

    # --- going on ---------------------------------------------------------------------------------------------------

    def newest(
        self, path: str, shared: Mapping[str, Any], current: FitHistory, module: pl.LightningModule
    ) -> dict[str, Any] | None:
        """Lightning's dictionary of the newest local checkpoint; None where the shared one is to be taken.

        `shared` is the metadata of the shared one at `path`, `current` the fits of this run, whose own are left out.
        Collective over the world. Warns of all that is not taken.
        """
        self.wait()
        offers = self._offers(shared, current)
        by_rank = gather_objects((list(offers.paths), offers.refused), self._world)
        refused = [f"rank {rank}: {line}" for rank, (_, lines) in enumerate(by_rank) for line in lines]
        every = {save for saves, _ in by_rank for save in saves}
        taken: LocalState | None = None
        for save in sorted(every, reverse=True):
            if lacking := [rank for rank, (saves, _) in enumerate(by_rank) if save not in saves]:
                refused.append(f"step {save[0]}: not on {_ranks(lacking)}")
                continue
            state, fault = _read(offers.paths[save], module)
            faults = gather_objects(fault, self._world)
            if not any(faults):
                taken = state
                break
            refused += [f"rank {rank}: {line}" for rank, line in enumerate(faults) if line]
        if refused:
            more = f"\nand {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
            rank_zero_warn("local checkpoints that were not taken:\n" + "\n".join(refused[:_SHOWN]) + more)
        if taken is None:
            return None
        rank_zero_info(
            f"The local checkpoints of step {taken.meta[STEP]} are newer than {path} of step {shared[STEP]}: "
            "the run goes on from those"
        )
        return taken.dictionary(module)

    def _offers(self, shared: Mapping[str, Any], current: FitHistory) -> _Offers:
        offers, step = _Offers(), int(shared.get(STEP, 0))
        for line in bring_back(self._folder):
            warnings.warn(line, stacklevel=2)
        for one in scan_directory(self._folder).checkpoints:
            if not one.is_complete:
                offers.refused.append(one.fault)
                continue
            if one.step <= step:
                continue
            meta = read_meta(one.path)
            fits = fits_of(meta)
            if fits and fits[-1] in current:
                continue
            if not goes_on_from(fits, fits_of(shared), step):
                offers.refused.append(f"{one.path} is of a run that does not go on from the checkpoint asked for")
            elif meta.get(_LAYOUT) != self._layout:
                offers.refused.append(f"{one.path} is of {_difference(meta.get(_LAYOUT), self._layout)}")
            else:
                offers.paths[(one.step, fits[-1][0])] = Path(one.path)
        return offers


def _read(path: Path, module: pl.LightningModule) -> tuple[LocalState | None, str]:
    """Local checkpoint at the path, or the reason why it cannot be taken."""
    try:
        state = LocalState.read(path)
    except (ValueError, OSError, RuntimeError) as error:
        return None, str(error)
    if names := state.misfits(module):
        return None, f"{path} is of another module: {', '.join(names[:_SHOWN])}"
    return state, ""


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_SHOWN]))}{more}"


def _difference(saved: Any, now: Mapping[str, Any]) -> str:
    """Difference of two layouts, in words."""
    if not isinstance(saved, dict):
        return "no layout that is known"
    apart = [key for key in now if saved.get(key) != now[key]]
    return "; ".join(f"another {key}: {saved.get(key)}, and now {now[key]}" for key in apart)
