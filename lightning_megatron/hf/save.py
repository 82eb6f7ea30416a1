"""A model on any mesh into a folder that transformers loads.

Tensor by tensor: the ranks that share a weight gather it, and the first of each stage writes it to its offset in the
files, which all stages share. No rank has more than one unsharded weight, and one tensor of theirs, besides its own.
"""

import os
import shutil
from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.comm import collectives
from lightning_megatron.hf.blocks import empty_source, fill_theirs
from lightning_megatron.hf.families import family_of_config
from lightning_megatron.hf.family import Model, Table, is_of_training_alone, listed
from lightning_megatron.hf.folder import on_disk
from lightning_megatron.hf.shards import MAX_SHARD_BYTES, ShardPlan, finish_draft, start_draft
from lightning_megatron.sharding import shard_of


def save_pretrained(
    model: Model | nn.Module,
    path: str | os.PathLike[str],
    *,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer_from: str | os.PathLike[str] | None = None,
) -> None:
    """Writes `config.json` and safetensors files of at most `max_shard_bytes`; every rank of the mesh calls it.

    `model` is one of this package, or one of transformers that a run trains as it is; of a `PeftModel` the adapters are
    written, as peft writes them.

    `family` is needed where several fit. `dtype` is that of the files, by default the narrowest that holds all weights.
    The tokenizer's files are copied from `tokenizer_from`. Nothing may be at the path, which all ranks see; the folder
    appears there complete, by a rename. Waits for all ranks. Raises ValueError for what no family can express.
    """
    if not isinstance(model, Model):
        _save_unchanged(model, path, family, dtype, max_shard_bytes, tokenizer_from)
        return
    table = Table(family_of_config(model.config, family), model.config)
    parameters = dict(model.named_parameters())
    unknown = {name for name in parameters.keys() - table.links.keys() if not is_of_training_alone(name)}
    unmapped = listed(unknown, "parameters for which the family has no place")
    if unmapped:
        raise ValueError(f"{unmapped[0]}; save LoRA adapters within `merged_lora(model)`, or after `merge_lora(model)`")
    world = model.mesh.world
    if dtype is None:
        # Stages may hold different ones.
        own = {parameter.dtype for parameter in parameters.values()}
        dtype = common_dtype(found for rank in collectives.gather_objects(own, world) for found in rank)
    config, plan = hf_config(table, dtype), ShardPlan.of(table.theirs, dtype, max_shard_bytes, table.wide)
    target, tokenizer = on_disk(path), Path(tokenizer_from) if tokenizer_from is not None else None
    draft, fault = collectives.broadcast_object(_start(target, tokenizer, plan) if world.is_first else None, world)
    if fault is not None:
        raise fault
    # An optimizer may still be sending its weights, or this rank hold shards of them.
    with model.with_weights():
        fault = _write(model, {**dict(model.named_buffers()), **parameters}, table, plan, draft)
    faults = [found for found in collectives.gather_objects(fault, world) if found is not None]
    if world.is_first:
        if faults:
            shutil.rmtree(draft, ignore_errors=True)
        else:
            fault = _finish(draft, target, config, tokenizer)
            faults = [fault] if fault is not None else []
    faults = collectives.broadcast_object(faults, world)
    if faults:
        raise OSError(f"{target} could not be written: {faults[0]}")


def _save_unchanged(model: nn.Module, path: Any, family: str | None, dtype: Any, most: int, tokenizer: Any) -> None:
    # Whoever has a model of transformers has imported it, which takes seconds.
    from lightning_megatron.hf.save_unchanged import is_saved_by_itself, save_unchanged

    if not is_saved_by_itself(model) or family is not None:
        raise ValueError(
            f"model ({type(model).__name__}) with family ({family!r}) must be a model of this package, or without a "
            "family one of transformers, or a PeftModel"
        )
    save_unchanged(model, path, dtype=dtype, max_shard_bytes=most, tokenizer_from=tokenizer)


def hf_config(table: Table, dtype: torch.dtype) -> dict[str, Any]:
    """The `config.json` of a model."""
    family = table.family
    named = {"architectures": [family.architecture], "model_type": family.name}
    return {**named, **family.config_to_hf(table.config), "torch_dtype": str(dtype).removeprefix("torch.")}


def common_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The narrowest dtype that holds all of them."""
    return reduce(torch.promote_types, dtypes)


def _start(target: Path, tokenizer: Path | None, plan: ShardPlan) -> tuple[Path | None, Exception | None]:
    try:
        draft = start_draft(target, tokenizer)
        plan.begin(draft)
    except (ValueError, OSError) as fault:
        return None, fault
    return draft, None


def _finish(draft: Path, target: Path, config: dict[str, Any], tokenizer: Path | None) -> Exception | None:
    try:
        finish_draft(draft, target, config, tokenizer)
    except (ValueError, OSError) as fault:
        shutil.rmtree(draft, ignore_errors=True)
        return fault
    return None


@torch.no_grad()
def _write(model: Model, tensors: Mapping[str, Tensor], table: Table, plan: ShardPlan, draft: Path) -> Exception | None:
    """Writes this rank's tensors; an error ends its writing, and not its part in gathering."""
    mesh, fault = model.mesh, None
    is_writer = all(axis.is_first for axis in (mesh.dp, mesh.cp, mesh.tp))
    for name, link in table.links.items():
        if _stage_of(model, name) not in mesh.own_stages:
            continue
        ours = tensors[name] if name in table.buffers else _gathered(tensors[name])
        if not is_writer or fault is not None:
            continue
        try:
            for index, source in enumerate(link.sources):
                theirs = empty_source(table.theirs[source], ours.dtype)
                fill_theirs(theirs, index, link.blocks, ours)
                plan.put(draft, source, theirs)
        except OSError as error:
            fault = error
    return fault


def _stage_of(model: Model, name: str) -> int:
    """The stage of the part that a tensor belongs to; others may hold it too, tied."""
    return next(
        stage
        for stage in range(model.mesh.sizes.num_stages)
        if any(name.startswith(f"{part}.") for part in model.parts_of(stage))
    )


def _gathered(parameter: Tensor) -> Tensor:
    """The unsplit weight, on every rank that has a part of it."""
    shard = shard_of(parameter)
    assert shard.blocks == 1, "weights of this package's models have none"
    full = parameter.detach()
    if shard.dim is not None and shard.axis is not None:
        full = collectives.all_gather(full, shard.axis, dim=shard.dim)
        full = full.narrow(shard.dim, 0, shard.global_shape[shard.dim])
    return full if shard.leading is None else collectives.all_gather(full, shard.leading)
