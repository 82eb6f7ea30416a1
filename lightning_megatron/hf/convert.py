"""Conversion between folders with a Hugging Face model and checkpoint directories, tensor by tensor, without a model.

Weights may become those of a model with experts on the way (`Weights.upcycled`).
"""

import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from lightning_megatron import checkpoint
from lightning_megatron.checkpoint import Piece
from lightning_megatron.checkpoint.folder import Folder, is_remote, name_at
from lightning_megatron.hf.blocks import empty_source, fill_theirs
from lightning_megatron.hf.families import family_of_config
from lightning_megatron.hf.family import Table
from lightning_megatron.hf.folder import on_disk
from lightning_megatron.hf.save import hf_config
from lightning_megatron.hf.shards import MAX_SHARD_BYTES, ShardPlan, finish_draft, start_draft
from lightning_megatron.hf.weights import MODELS, Weights, on_meta
from lightning_megatron.mesh import Mesh
from lightning_megatron.sharding import Box


@dataclass(frozen=True, kw_only=True)
class Converted:
    """Summary of a conversion."""

    family: str
    """The model_type, or the class of a model that has none."""
    num_tensors: int
    """Number of tensors that were written."""
    num_parameters: int
    """Number of parameters of the unsplit model."""
    dtype: str
    """Dtype of the tensors that were written, as torch calls it."""


Watch = Callable[[int, int], None]
"""What is called during a conversion: with how many tensors are read, and of how many."""


def unwatched(num_done: int, num_all: int) -> None:
    """Does nothing; nobody waits for the conversion."""


def to_checkpoint(
    weights: Weights,
    target: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    watch: Watch = unwatched,
) -> Converted:
    """Writes a model as checkpoint `target`, for a LightningModule that calls it `model`.

    Values keep their dtype, or get `dtype`. Weights go through files next to the target, as large as the model, so that
    memory holds one tensor; for a remote target, through the system's folder for temporary files. Raises ValueError for
    a target that exists.
    """
    target = os.fspath(target)
    if Folder(target).kind() != "nothing":
        raise ValueError(f"{target} exists; give a path where nothing is, or remove it")
    model, dtype = on_meta(weights.config), dtype if dtype is not None else weights.dtype
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    meta = {
        MODELS: {"model": {"class": type(model).__name__, "config": asdict(weights.config)}},
        "epoch": 0,
        "global_step": 0,
        # Lightning looks for it to know what it reads.
        "pytorch-lightning_version": metadata.version("lightning"),
    }
    pieces = {
        f"model.{name}": Piece.unsharded(_buffer(weights, name, value))
        for name, value in model.state_dict().items()
        if name not in parameters
    }
    parent = None if is_remote(target) else os.path.dirname(os.path.abspath(target))
    if parent is not None:
        os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name_at(target)}.", dir=parent) as scratch:
        for number, (name, shape) in enumerate(parameters.items()):
            # Pages of a file leave memory when others need it; torch's save wants all tensors at once.
            values = torch.from_file(
                os.path.join(scratch, str(number)), shared=True, size=math.prod(shape), dtype=dtype
            ).view(shape)
            weights.read(name, Box((0,) * len(shape), shape), values)
            pieces[f"model.{name}"] = Piece.unsharded(values)
            watch(number + 1, len(parameters))
        checkpoint.save(target, pieces, meta, world=Mesh.single().world)
    return Converted(
        family=weights.kind,
        num_tensors=len(pieces),
        num_parameters=sum(map(math.prod, parameters.values())),
        dtype=str(dtype).removeprefix("torch."),
    )


def _buffer(weights: Weights, name: str, like: Tensor) -> Tensor:
    """A buffer, such as the expert biases of a router, which start at zero where the source has none."""
    values = torch.zeros(like.shape, dtype=like.dtype, device="cpu")
    if name in weights.buffers:
        weights.read(name, Box((0,) * values.dim(), tuple(values.shape)), values)
    return values


def to_folder(
    weights: Weights,
    target: str | os.PathLike[str],
    *,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer_from: str | os.PathLike[str] | None = None,
    watch: Watch = unwatched,
) -> Converted:
    """Writes a model as folder `target`, which transformers loads.

    `family` is needed where several fit. Raises ValueError for what no family can say and for a target that is taken.
    """
    table = Table(family_of_config(weights.config, family), weights.config)
    dtype = dtype if dtype is not None else weights.dtype
    plan = ShardPlan.of(table.theirs, dtype, max_shard_bytes, table.wide)
    target, tokenizer = on_disk(target), Path(tokenizer_from) if tokenizer_from is not None else None
    draft = start_draft(target, tokenizer)
    try:
        plan.begin(draft)
        for number, (name, link) in enumerate(table.links.items()):
            own = torch.promote_types(weights.dtype, torch.float32) if name in table.buffers else weights.dtype
            values = empty_source(link.shape, own)
            weights.read(name, Box((0,) * len(link.shape), link.shape), values)
            for index, their_name in enumerate(link.sources):
                theirs = empty_source(table.theirs[their_name], values.dtype)
                fill_theirs(theirs, index, link.blocks, values)
                plan.put(draft, their_name, theirs)
            watch(number + 1, len(table.links))
        finish_draft(draft, target, hf_config(table, dtype), tokenizer)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Converted(
        family=table.family.name,
        num_tensors=len(table.theirs),
        num_parameters=sum(math.prod(link.shape) for name, link in table.links.items() if name not in table.buffers),
        dtype=str(dtype).removeprefix("torch."),
    )
