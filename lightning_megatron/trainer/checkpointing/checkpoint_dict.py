"""Between Lightning's checkpoint dictionary and the checkpoint directory.

Lightning asks every rank for a dictionary and hands it to the strategy. Tensors under the module's names go into the
directory slice by slice, each under its name in the unsplit model; optimizer states come from the optimizers
themselves; the rest is the first rank's plain data.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron import checkpoint as directory
from lightning_megatron.checkpoint import Piece, Slot
from lightning_megatron.checkpoint.state import OTHER_STATES
from lightning_megatron.checkpoint.summary import MESH, MODELS, OWN_KEYS
from lightning_megatron.checkpoint.torch_index import OPTIMIZERS
from lightning_megatron.comm.raise_on_all_ranks import read_on_first_rank
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.optim.data_parallel_comm import DataParallelComm
from lightning_megatron.sharding import shard_of
from lightning_megatron.trainer.checkpointing.checkpoint_saver import CheckpointSaver
from lightning_megatron.trainer.checkpointing.parameter_order import in_module_order
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.trainer.setup import pipelined_models

# Keys of Lightning's dictionary.
WEIGHTS = "state_dict"
OPTIMIZER_STATES = "optimizer_states"


@dataclass(frozen=True)
class SavedOptimizers:
    """Stands for the optimizer states in a loaded dictionary; they are read once the optimizers exist."""

    path: str
    rests: list[dict[str, Any]]


@dataclass(frozen=True)
class MasterSlots:
    """Master weights that optimizers step in place of parameters, as slices of those; none without master weights."""

    slots: Mapping[Tensor, Slot] = field(default_factory=dict)
    """Slice of a parameter that each master weight is."""
    lowered: frozenset[str] = frozenset()
    """Names of the parameters that are narrower than their master weights, wherever those are."""

    @staticmethod
    def of(dp_comm: DataParallelComm) -> "MasterSlots":
        """Master weights of a fit that runs or has ended."""
        if dp_comm.master_weights is None:
            return MasterSlots()
        slots: dict[Tensor, Slot] = {
            shard.tensor: Slot(shard.param.name, shard.param.parameter, shard.range.start, shard.range.end)
            for shard in dp_comm.gradients.param_shards
        }
        return MasterSlots(slots, frozenset(dp_comm.master_weights.lowered_names()))


def save(
    path: str,
    checkpoint: Mapping[str, Any],
    module: pl.LightningModule,
    optimizers: Iterable[Optimizer],
    master_slots: MasterSlots,
    mesh: Mesh,
    saver: CheckpointSaver,
) -> None:
    """Writes Lightning's dictionary as a checkpoint directory. Collective over the world.

    Weights that have master weights are saved as those.
    """
    live = live_of(module)
    lowered = {s.name: (master, s) for master, s in master_slots.slots.items() if s.name in master_slots.lowered}
    # A weight whose master weights are all on other data-parallel ranks is written by those.
    elsewhere = master_slots.lowered - lowered.keys()
    pieces: dict[str, Piece | list[Piece]] = {}
    meta: dict[str, Any] = {MESH: plain(mesh.sizes, MESH), MODELS: _models(module)}
    for key, value in checkpoint.items():
        if key == OPTIMIZER_STATES:
            continue
        if key == WEIGHTS or is_state_of(value, live):
            prefix = "" if key == WEIGHTS else f"{key}."
            tensors = {name: tensor for name, tensor in value.items() if isinstance(tensor, Tensor)}
            for name, tensor in tensors.items():
                is_live = name in live and tensor.data_ptr() == live[name].data_ptr()
                if is_live and name in lowered:
                    master, slot = lowered[name]
                    pieces[prefix + name] = slot.pieces(master)
                elif not (is_live and name in elsewhere):
                    pieces[prefix + name] = Piece.like(live.get(name, tensor), tensor)
            if key != WEIGHTS:
                meta.setdefault(OTHER_STATES, []).append(key)
            continue
        meta[key] = plain(value, key)
    if OPTIMIZER_STATES in checkpoint:
        names = names_of(module, master_slots)
        meta[OPTIMIZERS] = []
        for index, optimizer in enumerate(optimizers):
            moments, rest = directory.pieces_of_optimizer(optimizer, names, index)
            pieces |= moments
            rest = directory.merge_rest(rest, saver.world)
            if mesh.pp.size > 1:
                # Each rank gave the names of its own stages.
                for group in rest["groups"]:
                    group["params"] = in_module_order(group["params"], module)
            meta[OPTIMIZERS].append(rest)
    saver.save_state(path, pieces, meta, module.trainer)


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

    With `strict`, the weights of a directory must be those of the module. Of a single-file checkpoint, written on one
    device, each rank takes its slices of the weights.
    """
    if os.path.isfile(path):
        return _load_file(path, module, mesh, checkpoint_io, weights_only)
    meta = read_on_first_rank(partial(directory.read_meta, path), world)
    live = live_of(module)
    # Copies: with strict_loading off, what the checkpoint lacks must come back as it is. As wide as master weights.
    state = {
        name: tensor.detach().to(torch.float32 if name in master_slots.lowered else tensor.dtype, copy=True)
        for name, tensor in live.items()
    }
    pieces = {name: Piece.like(live[name], tensor) for name, tensor in state.items()}
    checkpoint = {key: value for key, value in meta.items() if key not in OWN_KEYS}
    checkpoint[WEIGHTS] = state
    others = tuple(f"{key}." for key in meta.get(OTHER_STATES, ()))
    report = directory.load(
        path,
        pieces,
        world=world,
        strict=strict,
        among=lambda name: directory.is_module_name(name) and not (bool(others) and name.startswith(others)),
    )
    for line in report.faults():
        rank_zero_warn(f"checkpoint {path}, loaded with strict_loading=False: {line}")
    for key in meta.get(OTHER_STATES, ()):
        extra = {name: tensor.detach().clone() for name, tensor in live.items()}
        more = {f"{key}.{name}": Piece.like(live[name], tensor) for name, tensor in extra.items()}
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
    world: Axis,
) -> None:
    """Fills the optimizers from a dictionary that `load` made. Collective over the world."""
    saved = checkpoint[OPTIMIZER_STATES]
    if not isinstance(saved, SavedOptimizers):
        if any(slot.end - slot.start < slot.parameter.numel() for slot in master_slots.slots.values()):
            raise ValueError(
                "the checkpoint is a single file with the state of whole parameters, and the optimizer of kind "
                "'distributed' has parts of them; resume it with kind 'replicated' and save, any kind resumes the "
                "directory that makes"
            )
        for optimizer, state in zip(optimizers, saved, strict=True):
            optimizer.load_state_dict(state)
        return
    names = names_of(module, master_slots)
    entries = read_on_first_rank(partial(directory.read_entries, saved.path), world)
    optimizers = list(optimizers)
    if len(optimizers) != len(saved.rests):
        raise ValueError(
            f"the checkpoint has {len(saved.rests)} optimizers, the module has {len(optimizers)}; "
            "return the optimizers that it was saved with"
        )
    for index, (optimizer, rest) in enumerate(zip(optimizers, saved.rests, strict=True)):
        moments = directory.rebuild_optimizer(optimizer, names, rest, entries, index)
        prefix = f"optimizer.{index}."
        directory.load(saved.path, moments, world=world, among=partial(_begins_with, prefix))


def _begins_with(prefix: str, name: str) -> bool:
    return name.startswith(prefix)


def _load_file(
    path: str, module: pl.LightningModule, mesh: Mesh, checkpoint_io: CheckpointIO, weights_only: bool | None
) -> dict[str, Any]:
    checkpoint: dict[str, Any] = checkpoint_io.load_checkpoint(path, weights_only=weights_only)
    live = live_of(module)
    if mesh.axis("pp+tp").size == 1 and not any(shard_of(tensor).is_cut for tensor in live.values()):
        return checkpoint
    if checkpoint.get(OPTIMIZER_STATES):
        raise ValueError(
            f"checkpoint {path} is a single file with optimizer states; those can be resumed on one model-parallel "
            "rank only. Resume it there under MegatronStrategy and save; any layout resumes the directory that makes; "
            "or keep its weights alone"
        )
    full, local = checkpoint[WEIGHTS], {}
    for name, tensor in live.items():
        if name not in full:
            continue
        shard = shard_of(tensor)
        part = full[name]
        for dim, (offset, size) in enumerate(zip(shard.box.offsets, shard.box.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        local[name] = torch.zeros_like(tensor)
        shard.valid(local[name]).copy_(part)
    checkpoint[WEIGHTS] = local
    return checkpoint


def live_of(module: pl.LightningModule) -> dict[str, Tensor]:
    """Parameters (that carry their shard) and persistent buffers, by name."""
    state = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def names_of(module: pl.LightningModule, master_slots: MasterSlots) -> dict[Tensor, str | Slot]:
    """Name, or slice of a named parameter, of each tensor that an optimizer may step."""
    names: dict[Tensor, str | Slot] = {parameter: name for name, parameter in module.named_parameters()}
    return names | dict(master_slots.slots)


def _models(module: pl.LightningModule) -> dict[str, Any]:
    """Class and configuration by which each model can be built again."""
    found = {}
    for name, model in pipelined_models.pipelined_modules(module).items():
        config = getattr(model, "config", None)
        if is_dataclass(config):
            found[name] = {"class": type(model).__name__, "config": plain(config, f"{MODELS}.{name}")}
    return found


def is_state_of(value: Any, live: Mapping[str, Tensor]) -> bool:
    """Whether a value is tensors under the module's names, as the weights that an averaging callback saves."""
    return (
        isinstance(value, dict) and bool(value) and all(n in live and isinstance(t, Tensor) for n, t in value.items())
    )


def plain(value: Any, path: str) -> Any:
    """The value as plain data; what has no plain form is saved as its text, with a warning."""
    if isinstance(value, Tensor) or value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value), path)
    if isinstance(value, Mapping):
        return {plain(key, path): plain(entry, f"{path}.{key}") for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [plain(entry, f"{path}[{i}]") for i, entry in enumerate(value)]
        return tuple(entries) if isinstance(value, tuple) else entries
    rank_zero_warn(f"{path} is a {type(value).__name__}, which a checkpoint keeps as text only; keep plain data in it")
    return str(value)
