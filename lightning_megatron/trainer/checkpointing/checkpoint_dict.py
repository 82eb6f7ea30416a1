"""Between Lightning's checkpoint dictionary and the checkpoint directory, or the file that is read in place of one.

Tensors go into the directory slice by slice; the rest is the first rank's plain data.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron import checkpoint as directory
from lightning_megatron.any_module.pipelined_modules import pipelined_modules
from lightning_megatron.checkpoint import Piece
from lightning_megatron.checkpoint.state import OTHER_STATES
from lightning_megatron.checkpoint.summary import MESH, MODELS, OWN_KEYS
from lightning_megatron.checkpoint.torch_index import OPTIMIZERS
from lightning_megatron.comm.raise_on_all_ranks import read_on_first_rank
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.trainer.checkpointing import single_file
from lightning_megatron.trainer.checkpointing.checkpoint_saver import CheckpointSaver
from lightning_megatron.trainer.checkpointing.contents import (
    OPTIMIZER_STATES,
    WEIGHTS,
    Contents,
    MasterSlots,
    copies_of,
    live_of,
    names_of,
    require_as_many,
    warn_of_misfits,
)
from lightning_megatron.trainer.checkpointing.hook_dictionary import SavedOptimizers, has_load_hook, show_misfits
from lightning_megatron.trainer.checkpointing.hyper_parameters import plain, plain_hyper_parameters
from lightning_megatron.trainer.config import ConfigurationError


def save(
    path: str,
    checkpoint: Mapping[str, Any],
    module: pl.LightningModule,
    optimizers: Iterable[Optimizer],
    master_slots: MasterSlots,
    mesh: Mesh,
    saver: CheckpointSaver,
) -> None:
    """Writes Lightning's dictionary as a checkpoint directory. Collective over the world."""
    contents = Contents.of(checkpoint, module, optimizers, master_slots, saver.world)
    meta = plain_hyper_parameters(contents.meta) | {MESH: plain(mesh.sizes), MODELS: _models(module)}
    saver.save_state(path, contents.pieces, meta, module._trainer)


def load(
    path: str,
    module: pl.LightningModule,
    master_slots: MasterSlots,
    mesh: Mesh,
    world: Axis,
    checkpoint_io: CheckpointIO,
    weights_only: bool | None,
    *,
    strict: bool,
) -> dict[str, Any]:
    """Lightning's dictionary for this rank's slices. Collective over the world.

    With `strict`, the weights must be those of the module; where it has a hook, once that has run (`fitted`).
    """
    if single_file.is_file(path, world):
        return single_file.load(path, module, master_slots, mesh, world, checkpoint_io, weights_only, strict=strict)
    meta = read_on_first_rank(partial(directory.read_meta, path), world)
    live = live_of(module)
    state = copies_of(live, master_slots)
    pieces = {name: Piece.all_like(live[name], tensor) for name, tensor in state.items()}
    checkpoint = {key: value for key, value in meta.items() if key not in OWN_KEYS}
    checkpoint[WEIGHTS] = state
    others = tuple(f"{key}." for key in meta.get(OTHER_STATES, ()))
    has_hook = has_load_hook(module)
    report = directory.load(
        path,
        pieces,
        world=world,
        strict=strict and not has_hook,
        among=lambda name: directory.is_module_name(name) and not (bool(others) and name.startswith(others)),
    )
    if strict and has_hook:
        show_misfits(state, report, partial(_read_unsharded, path, world))
    else:
        warn_of_misfits(report, path)
    for key in meta.get(OTHER_STATES, ()):
        extra = {name: tensor.detach().clone() for name, tensor in live.items()}
        more = {f"{key}.{name}": Piece.all_like(live[name], tensor) for name, tensor in extra.items()}
        directory.load(path, more, world=world, strict=False, among=lambda name: False)
        checkpoint[key] = extra
    if OPTIMIZERS in meta:
        checkpoint[OPTIMIZER_STATES] = SavedOptimizers(path, meta[OPTIMIZERS])
    return checkpoint


def require_optimizers(checkpoint: Mapping[str, Any], path: str) -> None:
    """Raises ConfigurationError where a loaded dictionary has weights alone, which a fit cannot go on from."""
    if OPTIMIZER_STATES not in checkpoint:
        raise ConfigurationError(
            f"ckpt_path ({path}) has weights alone (it was converted, or saved with save_weights_only), and a fit "
            "goes on from a whole state. To begin from its weights leave ckpt_path out: build the model in "
            "configure_model with lightning_megatron.hf.from_pretrained, or the module with "
            "lightning_megatron.load_from_checkpoint"
        )


def load_optimizers(
    checkpoint: Mapping[str, Any],
    module: pl.LightningModule,
    optimizers: Iterable[Optimizer],
    master_slots: MasterSlots,
    mesh: Mesh,
    world: Axis,
) -> None:
    """Fills the optimizers from a dictionary that `load` made. Collective over the world."""
    saved = checkpoint[OPTIMIZER_STATES]
    if not isinstance(saved, SavedOptimizers):
        single_file.load_optimizers(saved, module, optimizers, master_slots, mesh, world)
        return
    names = names_of(module, master_slots)
    path, rests = saved.source, saved.rests
    entries = read_on_first_rank(partial(directory.read_entries, path), world)
    optimizers = list(optimizers)
    require_as_many(rests, optimizers)
    for index, (optimizer, rest) in enumerate(zip(optimizers, rests, strict=True)):
        moments = directory.rebuild_optimizer(optimizer, names, rest, entries, index)
        prefix = f"optimizer.{index}."
        directory.load(path, moments, world=world, among=partial(_begins_with, prefix))


def _read_unsharded(path: str, world: Axis, names: Collection[str]) -> dict[str, Tensor]:
    entries = read_on_first_rank(partial(directory.read_entries, path), world)
    tensors = {name: torch.empty(entries[name].shape, dtype=entries[name].dtype) for name in names}
    directory.load(path, tensors, world=world, among=lambda name: False)
    return tensors


def _begins_with(prefix: str, name: str) -> bool:
    return name.startswith(prefix)


def _models(module: pl.LightningModule) -> dict[str, Any]:
    """Class and configuration by which each model can be built again."""
    found = {}
    for name, model in pipelined_modules(module).items():
        config = getattr(model, "config", None)
        if is_dataclass(config):
            found[name] = {"class": type(model).__name__, "config": plain(config)}
    return found
