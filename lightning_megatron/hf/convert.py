"""Between a folder with a Hugging Face model and a checkpoint directory, tensor by tensor and with no model built.

A checkpoint names its models in its metadata, under `models`: for each submodule of the LightningModule its class and
its configuration. The weights of submodule `model` are called `model.layers.0.attention.qkv.weight` and so on.
"""

import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from lightning_megatron import checkpoint
from lightning_megatron.checkpoint import Entry, Piece
from lightning_megatron.hf.blocks import empty_source, fill_theirs
from lightning_megatron.hf.families import family_of_config, family_of_file
from lightning_megatron.hf.family import Table, listed
from lightning_megatron.hf.folder import WeightFiles, read_config
from lightning_megatron.hf.load import Source
from lightning_megatron.hf.save import common_dtype, hf_config
from lightning_megatron.hf.shards import MAX_SHARD_BYTES, ShardPlan, finish_draft, start_draft
from lightning_megatron.mesh import Mesh
from lightning_megatron.models.gpt import GPTConfig
from lightning_megatron.sharding import Box

MODELS = "models"
"""Key of a checkpoint's metadata that says which submodule is which model."""

_CLASSES = {"GPTModel": GPTConfig}


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What was converted."""

    family: str
    # the model_type
    num_tensors: int
    # that were written
    num_parameters: int
    # of the unsplit model
    dtype: str
    # of what was written, as torch calls it


def to_checkpoint(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> Converted:
    """Writes the model in the folder `source` as checkpoint `target`, for a LightningModule that calls it `model`.

    Values keep the dtype of the folder, or get `dtype`. Weights go through files beside the target, as large as the
    model, so that memory holds one tensor. Raises ValueError for what cannot be read and for a target that exists.
    """
    folder, target = Path(source), Path(target)
    if target.exists():
        raise ValueError(f"{target} exists; give a path where nothing is, or remove it")
    raw = read_config(folder)
    family = family_of_file(raw, str(folder / "config.json"))
    table, files = Table(family, family.config(raw)), WeightFiles(folder)
    reader = Source(table, files)
    dtype = dtype if dtype is not None else common_dtype(files.dtypes.values())
    meta = {
        MODELS: {"model": {"class": "GPTModel", "config": asdict(table.config)}},
        "epoch": 0,
        "global_step": 0,
        # Lightning looks for it to know what it reads.
        "pytorch-lightning_version": metadata.version("lightning"),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        pieces: dict[str, Piece] = {}
        for number, (name, link) in enumerate(table.links.items()):
            # Pages of a file leave memory when others need it; torch's save wants all tensors at once.
            values = torch.from_file(
                os.path.join(scratch, str(number)), shared=True, size=math.prod(link.shape), dtype=dtype
            ).view(link.shape)
            reader.read(name, Box((0,) * len(link.shape), link.shape), values)
            pieces[f"model.{name}"] = Piece.whole(values)
        checkpoint.save(target, pieces, meta, world=Mesh.single().world)
    return _told(table, dtype, len(pieces))


def from_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    submodule: str | None = None,
    config: Mapping[str, Any] | None = None,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer_from: str | os.PathLike[str] | None = None,
) -> Converted:
    """Writes a model of the checkpoint `source` as folder `target`, which transformers loads.

    `submodule` is needed where the checkpoint has several models, `config` (the fields of a GPTConfig) where it names
    none, `family` where several fit. Raises ValueError for what cannot be read and for a target that is taken.
    """
    meta, entries = checkpoint.read_meta(source), checkpoint.read_entries(source)
    submodule, found = _model_of(meta, submodule, config, source)
    table = Table(family_of_config(found, family), found)
    prefix = f"{submodule}." if submodule else ""
    ours = {name.removeprefix(prefix): entry for name, entry in entries.items() if _is_under(name, prefix)}
    _compare(table, ours, f"submodule {submodule!r} of checkpoint {source}")
    dtype = dtype if dtype is not None else common_dtype(ours[name].dtype for name in table.links)
    plan = ShardPlan.of(table.theirs, dtype, max_shard_bytes)
    target, tokenizer = Path(target), Path(tokenizer_from) if tokenizer_from is not None else None
    draft = start_draft(target, tokenizer)
    try:
        plan.begin(draft)
        for name, link in table.links.items():
            values = _load(source, prefix + name, ours[name])
            for place, their_name in enumerate(link.sources):
                theirs = empty_source(table.theirs[their_name], values.dtype)
                fill_theirs(theirs, place, link.blocks, values)
                plan.put(draft, their_name, theirs)
        finish_draft(draft, target, hf_config(table, dtype), tokenizer)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return _told(table, dtype, len(table.theirs))


def gpt_config(saved: Mapping[str, Any]) -> GPTConfig:
    """The configuration with those fields, nested ones given as tables. Raises ValueError for what is wrong in them."""
    config: GPTConfig = _rebuilt(GPTConfig, saved)
    return config


def _rebuilt(kind: type, saved: Mapping[str, Any]) -> Any:
    hints, values = get_type_hints(kind), {}
    names = {field.name for field in fields(kind)}
    if unknown := sorted(map(str, saved.keys() - names)):
        raise ValueError(
            f"{kind.__name__} has no field {', '.join(unknown)}; its fields are {', '.join(sorted(names))}"
        )
    for name, value in saved.items():
        inner = next((option for option in (hints[name], *get_args(hints[name])) if is_dataclass(option)), None)
        if isinstance(value, Mapping) and isinstance(inner, type):
            value = _rebuilt(inner, value)
        values[name] = tuple(value) if isinstance(value, list) else value
    try:
        # YAML takes 1e-5, without a point, for text.
        numbers = {n: float(v) for n, v in values.items() if hints[n] is float and isinstance(v, str)}
        return kind(**(values | numbers))
    except TypeError as error:
        raise ValueError(f"{kind.__name__} cannot be made of {', '.join(map(str, saved))}: {error}") from error


def _model_of(
    meta: Mapping[str, Any],
    submodule: str | None,
    config: Mapping[str, Any] | None,
    where: str | os.PathLike[str],
) -> tuple[str, GPTConfig]:
    """Name and configuration of the model that is asked for."""
    models = meta.get(MODELS)
    if not models:
        if config is None:
            raise ValueError(
                f"checkpoint {where} does not say what its models are (no {MODELS!r} in its metadata); give the "
                "configuration, a YAML or JSON file with the fields of its GPTConfig: --config model.yaml"
            )
        return submodule if submodule is not None else "model", gpt_config(config)
    if config is not None:
        raise ValueError(f"checkpoint {where} says itself what its models are; leave the configuration out")
    if submodule is None and len(models) > 1:
        raise ValueError(f"checkpoint {where} has models {', '.join(map(repr, models))}; say which: --submodule")
    name = next(iter(models)) if submodule is None else submodule
    if name not in models:
        raise ValueError(f"submodule ({name!r}) must be one of {', '.join(map(repr, models))} in checkpoint {where}")
    if models[name]["class"] not in _CLASSES:
        raise ValueError(
            f"submodule {name!r} of checkpoint {where} is a {models[name]['class']}; converted are "
            f"{', '.join(_CLASSES)}"
        )
    return name, gpt_config(models[name]["config"])


def _is_under(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and checkpoint.is_module_name(name)


def _compare(table: Table, ours: Mapping[str, Entry], where: str) -> None:
    """Raises ValueError with every tensor that does not fit."""
    misshapen = [
        f"{name} ({ours[name].shape} there, {link.shape} by the configuration)"
        for name, link in table.links.items()
        if name in ours and ours[name].shape != link.shape
    ]
    faults = [
        *listed((name for name in table.links if name not in ours), "needed and not in it"),
        *listed((name for name in ours if name not in table.links), "in it and unknown to the configuration"),
        *listed(misshapen, "of another shape"),
    ]
    if any(".lora." in name for name in ours):
        faults.append(
            "low-rank paths (lora) are not converted; `recipes/finetune_hf.py fit --ckpt_path ... --export.path ...` "
            "merges them into the weights and writes the folder"
        )
    if faults:
        raise ValueError("\n  ".join([f"{where} does not fit its configuration:", *faults]))


def _load(path: str | os.PathLike[str], name: str, entry: Entry) -> Tensor:
    values = torch.empty(entry.shape, dtype=entry.dtype)
    checkpoint.load(path, {name: values}, world=Mesh.single().world, among=lambda other: False)
    return values


def _told(table: Table, dtype: torch.dtype, num_tensors: int) -> Converted:
    return Converted(
        family=table.family.name,
        num_tensors=num_tensors,
        num_parameters=sum(math.prod(link.shape) for link in table.links.values()),
        dtype=str(dtype).removeprefix("torch."),
    )
