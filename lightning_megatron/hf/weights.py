"""A model on disk, a Hugging Face folder or a checkpoint directory, read box by box without building the model.

A checkpoint names its models in its metadata, under `models`: for each submodule of the LightningModule its class and
its configuration. The weights of submodule `model` are called `model.layers.0.attention.qkv.weight` and so on.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from lightning_megatron import checkpoint
from lightning_megatron.checkpoint import Piece, TensorEntry
from lightning_megatron.checkpoint.summary import read_own_meta
from lightning_megatron.hf.families import family_of_file
from lightning_megatron.hf.family import CONFIGS, Config, Model, Table, listed, model_of
from lightning_megatron.hf.folder import CONFIG, WeightFiles, on_disk, read_config
from lightning_megatron.hf.load import Source, upcycling
from lightning_megatron.hf.save import common_dtype
from lightning_megatron.host_memory import machine_memory_bytes
from lightning_megatron.hub import CONFIG_FILES, model_folder
from lightning_megatron.mesh import Mesh
from lightning_megatron.models.gpt import GPTConfig
from lightning_megatron.models.upcycle import Read
from lightning_megatron.moe.config import MoEConfig
from lightning_megatron.rules.limits import model_limit_faults
from lightning_megatron.sharding import Box, shard_of
from lightning_megatron.transformer.lora import LoraConfig

MODELS = "models"
"""Key of a checkpoint's metadata that says which submodule is which model."""
HYPER_PARAMETERS = "hyper_parameters"
"""Lightning's key of what `save_hyperparameters` saved."""
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of one model."""

    kind: str
    """A folder's model_type, or the class of the model."""
    config: Config
    dtype: torch.dtype
    """The narrowest dtype that holds all weights."""
    read: Read
    """Reader of tensors by our names."""
    buffers: frozenset[str] = frozenset()
    """Names of buffers, such as expert biases, that can be read."""

    def upcycled(self, moe: MoEConfig) -> "Weights":
        """Weights of a model with experts that computes the same. Raises ValueError with all errors, and where one of
        its tensors is larger than the memory of this machine."""
        way = upcycling(self.config, moe)
        sizes = {name: value.numel() * self.dtype.itemsize for name, value in on_meta(way.config).named_parameters()}
        largest = max(sizes, key=sizes.__getitem__)
        if sizes[largest] > (memory := machine_memory_bytes()):
            raise ValueError(
                f"upcycling: {largest} with num_experts ({moe.router.num_experts}) of ffn_hidden_size ({way.width}) "
                f"takes {sizes[largest] / _GIB:,.1f} GiB, and this machine has {memory / _GIB:,.1f} GiB; make one of "
                "them smaller"
            )
        return Weights(kind="GPTModel", config=way.config, dtype=self.dtype, read=partial(way.read, dense=self.read))


def in_folder(path: str | os.PathLike[str]) -> Weights:
    """The model in a Hugging Face folder. Raises ValueError for what cannot be read, or is not supported."""
    folder = on_disk(model_folder(path))
    raw = read_config(folder)
    family = family_of_file(raw, str(folder / "config.json"))
    config, files = family.config(raw), WeightFiles(folder)
    table = Table(family, config, files.shapes)
    source = Source(table, files)
    dtype = common_dtype(dtype for name, dtype in files.dtypes.items() if name not in table.wide)
    return Weights(kind=family.name, config=config, dtype=dtype, read=source.read, buffers=table.buffers)


def in_checkpoint(
    path: str | os.PathLike[str], submodule: str | None = None, config: Mapping[str, Any] | None = None
) -> Weights:
    """A model of a checkpoint directory.

    `submodule` is needed where it has several, `config` (the fields of a GPTConfig) where it names none. Raises
    ValueError for what cannot be read, and with all that does not fit the configuration.
    """
    meta, entries = read_own_meta(path), checkpoint.read_entries(path)
    submodule, found = _model_of(meta, submodule, config, path)
    prefix = f"{submodule}." if submodule else ""
    ours = {
        name.removeprefix(prefix): entry
        for name, entry in entries.items()
        if name.startswith(prefix) and checkpoint.is_module_name(name)
    }
    model = on_meta(found)
    shapes = {name: shard_of(parameter).global_shape for name, parameter in model.named_parameters()}
    known = dict(model.named_buffers())
    faults = misfits(shapes, ours, known.keys())
    if any(".lora." in name for name in ours):
        faults.append(
            "LoRA adapters are not converted; `recipes/finetune_hf.py fit --ckpt_path ... --export.path ...` "
            "merges them into the weights and writes the folder"
        )
    if faults:
        where = f"submodule {submodule!r} of checkpoint {path}"
        raise ValueError("\n  ".join([f"{where} does not fit its configuration:", *faults]))

    def read(name: str, box: Box, out: Tensor) -> None:
        piece = Piece(ours[name].shape, box, out)
        checkpoint.load(path, {prefix + name: piece}, world=Mesh.single().world, among=lambda other: False)

    dtype = common_dtype(ours[name].dtype for name in shapes)
    buffers = frozenset(known.keys() & ours.keys())
    return Weights(kind=type(model).__name__, config=found, dtype=dtype, read=read, buffers=buffers)


def folder_of_run(path: str | os.PathLike[str]) -> str:
    """The folder, or the name on the hub, of the model of transformers that a checkpoint's module was made of.

    A `CausalModule` saves it, `path` among its hyper-parameters. Empty where the checkpoint names no folder with a
    config.json, or models of this package.
    """
    meta = read_own_meta(path)
    named = "" if meta.get(MODELS) else _named_folder(meta)
    return named if named and Path(model_folder(named, CONFIG_FILES), CONFIG).is_file() else ""


def _named_folder(meta: Mapping[str, Any]) -> str:
    saved = meta.get(HYPER_PARAMETERS)
    named = saved.get("path") if isinstance(saved, Mapping) else None
    return named if isinstance(named, str) else ""


def _lost(meta: Mapping[str, Any]) -> str:
    named = _named_folder(meta)
    return f" (its hyper-parameters name {named}, where there is no {CONFIG})" if named else ""


def on_meta(config: Config) -> Model:
    """The unsplit model without memory."""
    with torch.device("meta"):
        return model_of(config, Mesh.single())


def gpt_config(saved: Mapping[str, Any]) -> GPTConfig:
    """The configuration with those fields, nested ones given as tables. Raises ValueError for what is wrong in them."""
    config: GPTConfig = _rebuilt(GPTConfig, saved)
    return config


def moe_config(saved: Mapping[str, Any]) -> MoEConfig:
    """MoEConfig with those fields, nested ones given as tables."""
    config: MoEConfig = _rebuilt(MoEConfig, saved)
    return config


def lora_config(saved: Mapping[str, Any]) -> LoraConfig:
    """LoraConfig with those fields."""
    config: LoraConfig = _rebuilt(LoraConfig, saved)
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
        if isinstance(inner, type):
            value = _rebuilt_within(inner, value)
            parts = value if isinstance(value, (list, tuple)) else [value]
            if not all(isinstance(part, inner) or (part is None and inner is not hints[name]) for part in parts):
                raise ValueError(f"{name} ({value!r}) of {kind.__name__} must be a table of fields of {inner.__name__}")
        values[name] = tuple(value) if isinstance(value, list) else value
    # YAML takes 1e-5, without a point, for text.
    values |= {name: float(value) for name, value in values.items() if hints[name] is float and isinstance(value, str)}
    try:
        made = kind(**values)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{kind.__name__} cannot be made of {', '.join(map(str, saved))}: {error}") from error
    if absurd := model_limit_faults(made):
        raise ValueError(f"{kind.__name__}: {'; '.join(absurd)}")
    return made


def _rebuilt_within(kind: type, value: Any) -> Any:
    """A table of fields, or each of several, as the dataclass of these fields."""
    if isinstance(value, (list, tuple)):
        return tuple(_rebuilt_within(kind, one) for one in value)
    return _rebuilt(kind, value) if isinstance(value, Mapping) else value


def _model_of(
    meta: Mapping[str, Any],
    submodule: str | None,
    config: Mapping[str, Any] | None,
    where: str | os.PathLike[str],
) -> tuple[str, Config]:
    """Name and configuration of the requested model."""
    models = meta.get(MODELS)
    if not models:
        if config is None:
            raise ValueError(
                f"checkpoint {where} does not say what its models are (no {MODELS!r} in its metadata). A GPTModel "
                "needs its configuration, a YAML or JSON file with the fields of its GPTConfig: --config model.yaml. A "
                f"model of transformers needs the folder with its config.json: --model-from FOLDER{_lost(meta)}"
            )
        return submodule if submodule is not None else "model", gpt_config(config)
    if config is not None:
        raise ValueError(f"checkpoint {where} says itself what its models are; leave the configuration out")
    if submodule is None and len(models) > 1:
        raise ValueError(f"checkpoint {where} has models {', '.join(map(repr, models))}; say which: --submodule")
    name = next(iter(models)) if submodule is None else submodule
    if name not in models:
        raise ValueError(f"submodule ({name!r}) must be one of {', '.join(map(repr, models))} in checkpoint {where}")
    if models[name]["class"] not in CONFIGS:
        raise ValueError(
            f"submodule {name!r} of checkpoint {where} is a {models[name]['class']}; converted are {', '.join(CONFIGS)}"
        )
    config_of: Config = _rebuilt(CONFIGS[models[name]["class"]], models[name]["config"])
    return name, config_of


def misfits(
    shapes: Mapping[str, tuple[int, ...]], ours: Mapping[str, TensorEntry], may_be_there: Iterable[str]
) -> list[str]:
    """Errors of tensors that do not fit the shapes of a model, a line for each kind."""
    misshapen = [
        f"{name} ({ours[name].shape} there, {shape} by the configuration)"
        for name, shape in shapes.items()
        if name in ours and ours[name].shape != shape
    ]
    return [
        *listed(shapes.keys() - ours.keys(), "needed and not in it"),
        *listed(ours.keys() - shapes.keys() - set(may_be_there), "in it and unknown to the configuration"),
        *listed(misshapen, "of another shape"),
    ]
