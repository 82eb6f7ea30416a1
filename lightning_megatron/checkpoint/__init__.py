"""Checkpoints: a directory that any mesh writes and any other reads, under the names of the unsplit model.

pieces = pieces_of_module(module.state_dict(keep_vars=True))              # this rank's part of every tensor
moments, rest = pieces_of_optimizer(optimizer, names)
save("last.ckpt", {**pieces, **moments}, {"optimizers": [merge_rest(rest, world)]}, world=world)

load("last.ckpt", pieces, world=world, among=is_module_name)              # on another mesh
moments = rebuild_optimizer(optimizer, names, read_meta("last.ckpt")["optimizers"][0], read_entries("last.ckpt"))
load("last.ckpt", moments, world=world, among=is_optimizer_name)
"""

from lightning_megatron.checkpoint.chunk_file import DamagedError
from lightning_megatron.checkpoint.config import CheckpointConfig
from lightning_megatron.checkpoint.load import LoadReport, load
from lightning_megatron.checkpoint.manifest import is_checkpoint, read_entries, read_meta
from lightning_megatron.checkpoint.optimizer import merge_rest, pieces_of_optimizer, rebuild_optimizer
from lightning_megatron.checkpoint.saver import Saver, save
from lightning_megatron.checkpoint.state import (
    Piece,
    Slot,
    StatesPlace,
    is_module_name,
    is_optimizer_name,
    pieces_of_module,
)
from lightning_megatron.checkpoint.tensor_entry import TensorEntry

__all__ = [
    "CheckpointConfig",
    "DamagedError",
    "LoadReport",
    "Piece",
    "Saver",
    "Slot",
    "StatesPlace",
    "TensorEntry",
    "is_checkpoint",
    "is_module_name",
    "is_optimizer_name",
    "load",
    "merge_rest",
    "pieces_of_module",
    "pieces_of_optimizer",
    "read_entries",
    "read_meta",
    "rebuild_optimizer",
    "save",
]
