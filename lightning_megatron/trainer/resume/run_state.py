"""State of a run besides weights and optimizers, by which a resumed run goes on as if it had never stopped.

    what                                 saved of          on another layout
    position in the training data        each dp rank      the samples not consumed yet, redistributed
    default generators                   each rank         the first rank's, on every rank
    seeds of the models' dropout         the first rank    the same

All else follows from the step, which Lightning restores: dropout masks and what users draw in a step are functions of
(seed, step, sample).
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils._pytree import tree_leaves

from lightning_megatron.any_module.pipelined_modules import pipelined_modules
from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.trainer.dynamic_context.prefetch import DynamicContext
from lightning_megatron.trainer.resume import rng_state
from lightning_megatron.trainer.resume.data_position import (
    LoaderPosition,
    MergesStates,
    PositionedIterable,
    Reader,
    positioned,
)
from lightning_megatron.trainer.step.batch_checks import batch_digest
from lightning_megatron.trainer.step.global_batches import is_stream
from lightning_megatron.trainer.step.uneven_inputs import Watch, training_watch, unwatched

KEY = "lightning_megatron_resume"
"""Key under which Lightning's dictionary holds all of it."""


def save_into(
    checkpoint: dict[str, Any],
    trainer: pl.Trainer,
    mesh: Mesh,
    world: Axis,
    resume_state: "ResumeState | None" = None,
) -> None:
    """Adds to Lightning's dictionary what `ResumeState` goes on from. Collective over the world, in host memory."""
    if resume_state is not None and not resume_state.has_started:
        # What was loaded holds still. Counters, loaders and generators are on their way there.
        checkpoint[KEY], checkpoint["loops"]["fit_loop"] = resume_state.saved, resume_state.loops
        return
    checkpoint[KEY] = snapshot(trainer, mesh, world)
    if not checkpoint[KEY]["is_at_end"]:
        # In on_train_epoch_end of an epoch that max_steps cuts short Lightning has counted it as trained on.
        epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]
        for counter in (epochs["total"], epochs["current"]):
            counter["processed"] = counter["completed"]
    loop_state = checkpoint["loops"]["fit_loop"]["state_dict"]
    # Plain Lightning counts the states of loaders that have one of their own, and writes no key where none has.
    if states := [state for state in loop_state.pop("combined_loader", []) if state]:
        loop_state["combined_loader"] = states


def snapshot(trainer: pl.Trainer, mesh: Mesh, world: Axis) -> dict[str, Any]:
    """State that a `ResumeState` goes on from, as plain data and copies. Collective over the world, in host memory."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    trained = progress.current.processed
    # A batch has been read and not been trained on: a hook before its step saves, or the step failed.
    is_taken = progress.current.ready > trained
    is_at_end = not is_taken and (progress.is_last_batch or trained >= trainer.num_training_batches)
    # The save comes in on_train_batch_end; a validation or the end of the epoch may come next.
    is_within_batch = progress.current.completed < trained
    is_due = is_within_batch and is_validation_due(trainer, trained, is_at_end=is_at_end)
    epochs: Any = trainer.fit_loop.epoch_progress.current
    if not is_at_end and trained % trainer.accumulate_grad_batches:
        rank_zero_warn(
            f"this checkpoint is saved after {trained} batches of an epoch, within the "
            f"{trainer.accumulate_grad_batches} of an optimizer step (accumulate_grad_batches); the gradients so far "
            "are not in it, and a run resumed from it makes that step without them. Save and validate after a multiple "
            "of them"
        )
    positions = [one.position_at_end() if is_at_end else one.position_after(trained) for one in _readers(trainer)]
    models = pipelined_modules(trainer.lightning_module)
    return {
        "layout": _layout(mesh),
        "places": _distinct(positions, mesh.dp.rank, world),
        "trained": 0 if is_at_end else trained,
        "is_validation_due": is_due,
        "is_taken": is_taken,
        "is_at_end": is_at_end,
        "ends_epoch_first": is_at_end and (is_due or (not is_within_batch and epochs.processed < epochs.started)),
        "is_within_batch": is_within_batch,
        "generators": _distinct(rng_state.states(), world.rank, world),
        "seeds": {name: model.draws.seed for name, model in models.items()},
    }


@dataclass
class ResumeState:
    """A run on its way from a checkpoint to its first batch."""

    saved: Mapping[str, Any]
    loops: Mapping[str, Any]
    """Lightning's counters of the fit, as they were saved."""
    mesh: Mesh
    has_started: bool = False
    """Whether counters are this run's already."""
    is_restored: bool = False
    """Whether the default generators are those of the checkpoint already."""
    states: rng_state.States = field(default_factory=dict)
    """Generator states with which training starts."""
    readers: list[Reader] = field(default_factory=list)
    """Readers of the training loaders."""
    num_restored: int = 0
    is_over: bool = False
    """Whether training has resumed."""

    def __post_init__(self) -> None:
        rank = self.mesh.world.rank if self.saved["layout"] == _layout(self.mesh) else 0
        self.states = _value_of(self.saved["generators"], rank)

    @staticmethod
    def from_checkpoint(checkpoint: dict[str, Any], trainer: pl.Trainer, mesh: Mesh) -> "ResumeState | None":
        """ResumeState from a checkpoint that this package wrote, where a fit loads it."""
        if KEY not in checkpoint or trainer.state.fn != TrainerFn.FITTING:
            return None
        loops = checkpoint["loops"]["fit_loop"]
        before = copy.deepcopy(loops)
        # Lightning would give every rank the first one's.
        loops["state_dict"].pop("combined_loader", None)
        if checkpoint[KEY]["is_validation_due"]:
            _have_validation_made_up(loops)
        elif checkpoint[KEY]["is_at_end"] and not checkpoint[KEY]["ends_epoch_first"]:
            _have_next_epoch_begun(loops, is_within_batch=checkpoint[KEY]["is_within_batch"])
        elif checkpoint[KEY].get("is_taken", False):
            _have_batch_repeated(loops)
        return ResumeState(checkpoint[KEY], before, mesh)

    def restore_position(self, reader: Reader) -> None:
        """Restores a loader's position; loaders come in the order in which they were saved.

        Not once all is restored: Lightning may ask for the loaders before that (`estimated_stepping_batches` in
        `configure_optimizers` does), and would then not restore their positions.
        """
        all_positions = self.saved["places"]["values"]
        if not all_positions or not all_positions[0]:
            return
        index = self.num_restored % len(all_positions[0])
        self.num_restored += 1
        if index == 0:
            self.readers.clear()
        self.readers.append(reader)
        is_same_dp = self.saved["layout"]["dp"] == self.mesh.dp.size
        own = _value_of(self.saved["places"], self.mesh.dp.rank if is_same_dp else 0)
        position = own[index]
        states = [positions[index]["own"] for positions in all_positions]
        is_equal = len({batch_digest(state) for state in states}) == 1
        if isinstance(reader.loader, MergesStates) and all(states):
            position, is_equal = position | {"own": reader.loader.merged_state(states)}, True
        reader.go_on_from(position, is_equal_everywhere=is_equal)

    @contextmanager
    def as_saved(self) -> Iterator[None]:
        """Sets the default generators to those of the checkpoint; training starts with what they become inside.

        Lightning reads the first batch of a loader without a length before training starts.
        """
        if self.is_restored:
            yield
            return
        with rng_state.forked():
            rng_state.set_states(self.states)
            yield
            if not self.saved["ends_epoch_first"]:
                # Else Lightning throws away what it has read by now.
                self.states = rng_state.states()

    def start_validation(self, trainer: pl.Trainer) -> None:
        """Sets Lightning's counts, once the validation that is made up has begun, to those of any other."""
        if self.saved["is_validation_due"] and not trainer.sanity_checking:
            total: Any = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
            total.ready = total.started = total.processed

    def start_training(self, trainer: pl.Trainer) -> None:
        """Restores what the first batch needs, as the last thing before it."""
        readers = _readers(trainer)
        positions = _value_of(self.saved["places"], 0)
        if self.saved["trained"] and len(positions) != len(readers):
            raise ConfigurationError(
                f"the checkpoint was saved within an epoch of {len(positions)} training loaders, and this run has "
                f"{len(readers)}; resume with the loaders that it was saved with"
            )
        if self.saved["trained"]:
            _recount(trainer, self.saved["trained"], readers, positions)
            epoch_loop = trainer.fit_loop.epoch_loop
            if self.saved.get("is_taken", False) and not epoch_loop._should_accumulate():
                # Lightning counts a step once more by the batch that it takes for the last one, in this run's batches.
                epoch_loop._batches_that_stepped -= 1
        elif not self.saved["ends_epoch_first"]:
            # Else Lightning takes the epoch for one that it goes on with, and counts a step that it does not make.
            trainer.fit_loop.epoch_loop.restarting = False
        for name, model in pipelined_modules(trainer.lightning_module).items():
            seed = self.saved["seeds"].get(name, model.draws.seed)
            if seed != model.draws.seed:
                rank_zero_info(f"dropout of {name} goes on with the seed of the checkpoint ({seed})")
                model.draws.seed = seed
        if not self.is_restored:
            rng_state.set_states(self.states)
            self.is_restored = True
        self.has_started = True


def is_validation_due(trainer: pl.Trainer, trained: int, *, is_at_end: bool) -> bool:
    """Whether validation comes after so many batches of the epoch, by its interval in batches."""
    every_epochs, every = trainer.check_val_every_n_epoch, trainer.val_check_batch
    is_epoch = every_epochs is None or (trainer.current_epoch + 1) % every_epochs == 0
    if not trainer.enable_validation or not is_epoch or not every:
        return False
    if every == float("inf"):
        return is_at_end
    return (trained if every_epochs is not None else trainer.fit_loop.total_batch_idx + 1) % every == 0


def _have_validation_made_up(loops: dict[str, Any]) -> None:
    """Makes Lightning run the validation that was due when the checkpoint was saved.

    By itself it leaves it out, and with it what depends on it: schedulers on plateaus, early stopping, random draws.
    It resumes a validation that was interrupted; so one that had not begun is recorded as one that had just begun,
    until it has (`ResumeState.start_validation`): else it would be made up by each run that goes on from a later
    checkpoint of the epoch. The keys are Lightning's own, of its saved counters.
    """
    batches, validation = loops["epoch_loop.batch_progress"], loops["epoch_loop.val_loop.batch_progress"]
    for counter in (batches["total"], batches["current"]):
        counter["completed"] = counter["processed"]
    validation["is_last_batch"] = False
    done = validation["total"]["processed"]
    validation["total"] = {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}
    validation["current"] = {"ready": 0, "started": 0, "processed": 0, "completed": 0}


def _have_next_epoch_begun(loops: dict[str, Any], *, is_within_batch: bool) -> None:
    """Makes Lightning begin the epoch after one whose last batch was trained on.

    By itself it trains on a batch more, or begins to count where the last epoch ended, under `max_steps` and with
    loaders that have no length.
    """
    epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    for counter in (epochs["total"], epochs["current"]):
        counter["ready"] = counter["processed"] = counter["completed"] = counter["started"]
    batches["total"]["completed"] = batches["total"]["processed"]
    batches["current"] = dict.fromkeys(batches["current"], 0)
    batches["is_last_batch"] = False
    if is_within_batch:
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] += 1


def _have_batch_repeated(loops: dict[str, Any]) -> None:
    """Makes Lightning count a batch that was read and not trained on as one to come.

    By itself it counts it twice: numbers of batches, by which models draw and loggers write, are one too high from then
    on. So its counters say that the batch before it has just ended, and nothing is due after that.
    """
    batches = loops["epoch_loop.batch_progress"]
    trained = batches["current"]["processed"]
    for counter in (batches["total"], batches["current"]):
        counter["ready"] = counter["started"] = counter["processed"]
        counter["completed"] = counter["processed"] - int(trained > 0)
    batches["is_last_batch"] = False


def _recount(trainer: pl.Trainer, trained: int, readers: list[Reader], positions: list[LoaderPosition]) -> None:
    """Lets Lightning count the batches of this run's size that were trained on, where the checkpoint's had another."""
    counted = {reader.batches_of(position, trained) for reader, position in zip(readers, positions, strict=True)}
    if len(counted) > 1:
        raise ConfigurationError(
            "the batch sizes of the training loaders changed by different factors since the checkpoint was saved, "
            "within an epoch; change all by one factor, or resume a checkpoint from the end of an epoch"
        )
    if (now := counted.pop() if counted else trained) == trained:
        return
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    before = round((progress.total.processed - progress.current.processed) * now / trained)
    # Lightning takes a batch whose end was not reached (it saved on the way) for what it is by these differences.
    late = progress.current.processed - progress.current.completed
    for counter, first in ((progress.current, 0), (progress.total, before)):
        counter.ready = counter.started = counter.processed = first + now
        counter.completed = first + now - late


def wrap(
    loader: object,
    trainer: pl.Trainer,
    mesh: Mesh,
    resume_state: ResumeState | None,
    ahead: DynamicContext | None = None,
) -> object:
    """A training loader that knows its position, restored where a run resumes; `ahead` sees its batches early.

    Of a resumed run a loader for validation too: before the first batch Lightning begins to read it, which draws a
    seed, and reads nothing, to count a validation that lies before the checkpoint.
    """
    if not trainer.training and resume_state is None:
        return loader

    watch: Watch = unwatched
    if trainer.training and mesh.dp.size > 1 and is_stream(loader):
        watch = training_watch(loader, mesh.dp, trainer.strategy.root_device, trainer.limit_train_batches)
    ahead = ahead if trainer.training else None
    wrapped = positioned(loader, mesh.dp, partial(_current_epoch, trainer), resume_state, ahead, watch)
    if trainer.training and resume_state is not None:
        resume_state.restore_position(wrapped.reader)
    return wrapped


def _current_epoch(trainer: pl.Trainer) -> int:
    progress: Any = trainer.fit_loop.epoch_progress.current
    # Not those that are processed: in on_train_epoch_end of one that max_steps cuts short, the rest is yet to come.
    return int(progress.completed)


def _readers(trainer: pl.Trainer) -> list[Reader]:
    loaders = tree_leaves(trainer.train_dataloader)
    return [loader.reader for loader in loaders if isinstance(loader, PositionedIterable)]


def _layout(mesh: Mesh) -> dict[str, int]:
    return {"world": mesh.world.size, "dp": mesh.dp.size, "pp": mesh.pp.size, "tp": mesh.tp.size}


# A value, and the ranks that have it as ranges from a first one to a last: most often one, of all ranks.
_Held = tuple[Any, list[tuple[int, int]]]


def _distinct(value: Any, rank: int, world: Axis) -> dict[str, Any]:
    """The values of all ranks of some axis, each once, and the index of each rank's; `rank` is that on the axis."""
    own: dict[str, _Held] = {batch_digest(value): (value, [(rank, rank)])}
    held = sorted(collectives.merge_objects(own, world, _joined).values(), key=lambda one: one[1][0])
    of_rank = {rank: i for i, (_, ranges) in enumerate(held) for a, b in ranges for rank in range(a, b + 1)}
    return {"values": [one for one, _ in held], "of_rank": [of_rank[rank] for rank in range(len(of_rank))]}


def _joined(found: list[dict[str, _Held]]) -> dict[str, _Held]:
    """The values of several ranks, by digest, each once."""
    joined: dict[str, _Held] = {}
    for digest, (value, ranges) in (item for one in found for item in one.items()):
        known = joined.get(digest, (value, []))[1]
        merged: list[tuple[int, int]] = []
        for first, last in sorted(known + ranges):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = merged[-1][0], max(last, merged[-1][1])
            else:
                merged.append((first, last))
        joined[digest] = value, merged
    return joined


def _value_of(distinct: Mapping[str, Any], rank: int) -> Any:
    return distinct["values"][distinct["of_rank"][rank]]
