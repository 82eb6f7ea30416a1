"""A checkpoint that is one file, as Lightning writes on one device: for models that fit one host.

Saving gathers all tensors on the first rank, under the names of the unsplit model; an optimizer's states are numbered
as on one device. Loading reads the file on every rank, which takes its slices, whatever the layout.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron import checkpoint as directory
from lightning_megatron.checkpoint import Piece, TensorEntry, is_checkpoint
from lightning_megatron.checkpoint.checkpoint_directory import STEP
from lightning_megatron.checkpoint.consolidate import consolidate, lightning_dictionary, write_file
from lightning_megatron.checkpoint.folder import Folder, is_remote, is_torch_file
from lightning_megatron.checkpoint.gather import gather_on_first_rank
from lightning_megatron.checkpoint.load import fill
from lightning_megatron.checkpoint.safe_metadata import faults_of
from lightning_megatron.comm.collectives import all_reduce
from lightning_megatron.comm.raise_on_all_ranks import read_on_first_rank
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.sharding import shard_of
from lightning_megatron.trainer.checkpointing import run_history
from lightning_megatron.trainer.checkpointing.contents import (
    OPTIMIZER_STATES,
    WEIGHTS,
    Contents,
    MasterSlots,
    copies_of,
    is_state_of,
    live_of,
    merged_rest,
    names_of,
    require_as_many,
    warn_of_misfits,
)
from lightning_megatron.trainer.checkpointing.hook_dictionary import has_load_hook, show_misfits
from lightning_megatron.trainer.checkpointing.parameter_order import in_module_order, names_on_ranks

_SHOWN = 20
# Beginning of torch's own reason in its message.
_UNPICKLER = "WeightsUnpickler error:"


class FileIO(TorchCheckpointIO):
    """Lightning's reader and writer of files, which puts a file of a mounted file system in place in one step."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        if storage_options is not None or is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            write_file(path, checkpoint)


def save(
    path: str,
    checkpoint: dict[str, Any],
    module: pl.LightningModule,
    optimizers: Iterable[Optimizer],
    master_slots: MasterSlots,
    mesh: Mesh,
    world: Axis,
    io: CheckpointIO,
    storage_options: Any,
) -> None:
    """Writes Lightning's dictionary as one file. Collective over the world; raises on all ranks, or the file is there.

    Weights that have master weights are saved as those.
    """
    if holds_all(module, mesh, world, master_slots):
        if OPTIMIZER_STATES in checkpoint:
            checkpoint[OPTIMIZER_STATES] = [optimizer.state_dict() for optimizer in optimizers]
    else:
        contents = Contents.of(checkpoint, module, optimizers, master_slots, world)
        tensors, on_ranks = gather_on_first_rank(contents.pieces, world), names_on_ranks(module, world)
        checkpoint = lightning_dictionary(contents.meta, tensors)
        weights = checkpoint[WEIGHTS]
        checkpoint[WEIGHTS] = {name: weights[name] for name in in_module_order(weights, module, on_ranks)}
    _warn_of_code(checkpoint)
    read_on_first_rank(lambda: io.save_checkpoint(checkpoint, path, storage_options), world)


def _warn_of_code(checkpoint: Mapping[str, Any]) -> None:
    """Warns of values that torch loads only by running code, as Lightning's defaults do not."""
    rest = {key: value for key, value in checkpoint.items() if key not in (WEIGHTS, OPTIMIZER_STATES)}
    if lines := faults_of(rest, "checkpoint", is_tagged=False):
        more = f", and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        rank_zero_warn(
            f"{'; '.join(lines[:_SHOWN])}{more}: a checkpoint that is a file holds it as a pickle, and loads only with "
            "weights_only=False. Keep plain data in it, or save directories, which keep numpy and paths too"
        )


def holds_all(module: pl.LightningModule, mesh: Mesh, world: Axis, master_slots: MasterSlots | None = None) -> bool:
    """Whether every rank holds all tensors as they are on one device, and steps them. Collective over the world."""
    is_cut = any(shard_of(tensor).is_cut for tensor in live_of(module).values())
    is_apart = is_cut or bool(master_slots and master_slots.slots) or mesh.axis("pp+tp").size > 1
    return not int(all_reduce(torch.tensor(int(is_apart)), world, "max"))


def load(
    path: str,
    module: pl.LightningModule,
    master_slots: MasterSlots,
    mesh: Mesh,
    world: Axis,
    io: CheckpointIO,
    weights_only: bool | None,
    *,
    strict: bool,
) -> dict[str, Any]:
    """Lightning's dictionary for this rank's slices of the file. Collective over the world."""
    checkpoint = read(path, io, weights_only)
    if holds_all(module, mesh, world):
        return checkpoint
    live = live_of(module)
    full = checkpoint[WEIGHTS]
    for key, value in checkpoint.items():
        if key == WEIGHTS or is_state_of(value, full):
            tensors = {name: tensor for name, tensor in value.items() if isinstance(tensor, Tensor)}
            own = copies_of(live, master_slots)
            pieces = {name: Piece.all_like(live[name], tensor) for name, tensor in own.items()}
            is_shown = strict and key == WEIGHTS and has_load_hook(module)
            report = fill(path, tensors, pieces, world=world, strict=strict and key == WEIGHTS and not is_shown)
            if is_shown:
                show_misfits(own, report, lambda names: {name: full[name] for name in names})
            elif key == WEIGHTS:
                warn_of_misfits(report, path)
            checkpoint[key] = own | {name: other for name, other in value.items() if name not in tensors}
    return checkpoint


def is_file(path: str, world: Axis) -> bool:
    """Whether a file, and not a directory, is at the path or the address. Collective over the world."""
    return read_on_first_rank(lambda: Folder(path).kind() == "file", world)


def read_progress(path: str, io: CheckpointIO, weights_only: bool | None, world: Axis) -> dict[str, Any]:
    """Steps and fits that led to a file. Collective over the world."""

    def progress() -> dict[str, Any]:
        checkpoint = read(path, io, weights_only)
        return {key: checkpoint[key] for key in (STEP, run_history.KEY) if key in checkpoint}

    return read_on_first_rank(progress, world)


def load_alone(path: str, io: CheckpointIO, weights_only: bool | None) -> dict[str, Any]:
    """Lightning's dictionary of a checkpoint, a file or a directory, unsharded, for a process with no module."""
    if is_checkpoint(path):
        return consolidate(path)
    return read(path, io, weights_only)


def read(path: str, io: CheckpointIO, weights_only: bool | None) -> dict[str, Any]:
    """Lightning's dictionary of a file. Raises ValueError where the file is no checkpoint of Lightning's."""
    try:
        checkpoint: Any = io.load_checkpoint(path, weights_only=weights_only)
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{path} cannot be read as a checkpoint: {why_unread(path, error)}") from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(WEIGHTS), Mapping):
        raise ValueError(
            f"{path} is no checkpoint of Lightning's, which is a dictionary with {WEIGHTS!r}; load weights alone by "
            "module.load_state_dict"
        )
    return checkpoint


def why_unread(path: str, error: Exception) -> str:
    """Reason for which torch did not read a file, in one line, without torch's advice to trust the file."""
    if not is_torch_file(path):
        return "it is no file that torch.save wrote"
    return str(error).rpartition(_UNPICKLER)[2].strip().partition("\n")[0] or type(error).__name__


def load_optimizers(
    states: Sequence[Mapping[str, Any]],
    module: pl.LightningModule,
    optimizers: Iterable[Optimizer],
    master_slots: MasterSlots,
    mesh: Mesh,
    world: Axis,
) -> None:
    """Fills the optimizers from the states of whole optimizers, by the numbers of their parameters. Collective."""
    optimizers, names = list(optimizers), names_of(module, master_slots)
    require_as_many(states, optimizers)
    if holds_all(module, mesh, world, master_slots):
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(dict(state))
        return
    for index, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
        known = merged_rest(directory.pieces_of_optimizer(optimizer, names, index)[1], module, world)
        named = _numbered(state["param_groups"], known["groups"], index)
        groups = [{**group, "params": [named[number] for number in group["params"]]} for group in state["param_groups"]]
        tensors: dict[str, Tensor] = {}
        others: dict[str, dict[str, Any]] = {}
        for number, values in state["state"].items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{index}.{named[number]}.{key}"] = value
                else:
                    others.setdefault(named[number], {})[key] = value
        entries = {name: TensorEntry(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        moments = directory.rebuild_optimizer(optimizer, names, {"groups": groups, "state": others}, entries, index)
        fill("file", tensors, moments, world=world)


def _numbered(saved: Sequence[Mapping[str, Any]], known: Sequence[Mapping[str, Any]], index: int) -> dict[int, str]:
    """Name of each parameter that the optimizer of the file numbers. Raises ValueError where groups do not fit."""
    counts, wanted = ([len(group["params"]) for group in groups] for groups in (saved, known))
    if counts != wanted:
        raise ValueError(
            f"optimizer {index} of the checkpoint has param groups of {counts} parameters, and that of the module of "
            f"{wanted}; make the groups that it was saved with"
        )
    pairs = zip(saved, known, strict=True)
    return {number: name for own, now in pairs for number, name in zip(own["params"], now["params"], strict=True)}
