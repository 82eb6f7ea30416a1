"""A checkpoint of a run that trained a model of transformers as it is, into a folder that transformers loads.

Weights have transformers' own names in the checkpoint, behind the name of the submodule. The configuration comes from
the folder that the run began from. Weights go through files, as large as the model; what transformers writes in other
pieces, as experts one by one, is in host memory at once.
"""

import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron import checkpoint
from lightning_megatron.checkpoint import TensorEntry
from lightning_megatron.checkpoint.summary import read_own_meta
from lightning_megatron.hf.adapters import add_adapters
from lightning_megatron.hf.convert import Converted, Watch, unwatched
from lightning_megatron.hf.converted_weights import sources_of
from lightning_megatron.hf.folder import INDEX, SINGLE, WeightFiles, on_disk, read_config, safetensors
from lightning_megatron.hf.meta_model import meta_model
from lightning_megatron.hf.save import common_dtype
from lightning_megatron.hf.save_unchanged import has_adapters, of_adapters, write_folder
from lightning_megatron.hf.shards import MAX_SHARD_BYTES, has_tokenizer, require_target
from lightning_megatron.hf.unchanged import read_generation
from lightning_megatron.hf.weights import HYPER_PARAMETERS, MODELS, lora_config, misfits
from lightning_megatron.hub import TOKENIZER_FILES, model_folder
from lightning_megatron.mesh import Mesh

# What a module may make of a configuration, beside what the configuration itself names.
_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModel")
# Of the tensors, so that somebody who waits sees how many are read; each looks at the checkpoint's index anew.
_NUM_READS = 20
_IN_ADAPTERS = ".lora_A."


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """Weights of a submodule in a checkpoint."""

    path: str
    prefix: str
    """What stands in front of their names."""
    entries: Mapping[str, TensorEntry]
    """Their shapes and dtypes by their names in the submodule."""
    hyper_parameters: Mapping[str, Any]
    """What the LightningModule saved of its arguments."""

    @property
    def where(self) -> str:
        return f"submodule {self.prefix.removesuffix('.')!r} of checkpoint {self.path}"

    def read(
        self, names: Mapping[str, str], dtype: torch.dtype | None, scratch: str, watch: Watch
    ) -> dict[str, Tensor]:
        """Tensors by the names that are given for their names here, in memory that is mapped from files."""
        found = {}
        for number, (name, saved) in enumerate(names.items()):
            entry = self.entries[saved]
            own = dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype
            file, size = os.path.join(scratch, str(number)), math.prod(entry.shape)
            # No file of no bytes is mapped.
            empty = torch.empty(0, dtype=own, device="cpu")
            flat = torch.from_file(file, shared=True, size=size, dtype=own) if size else empty
            found[name] = flat.view(entry.shape)
        pieces = {self.prefix + names[name]: tensor for name, tensor in found.items()}
        size = -(-len(pieces) // _NUM_READS)
        for first in range(0, len(pieces), size):
            some = dict(islice(pieces.items(), first, first + size))
            checkpoint.load(self.path, some, world=Mesh.single().world, among=lambda other: False)
            watch(first + len(some), len(pieces))
        return found


@torch.no_grad()
def unchanged_to_folder(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    model_from: str | os.PathLike[str],
    submodule: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer_from: str | os.PathLike[str] | None = None,
    watch: Watch = unwatched,
) -> Converted:
    """Writes a model of transformers in a checkpoint as `hf.save_pretrained` would have done in the run.

    `model_from` is the folder with its configuration, or its name on the hub, and has the tokenizer unless
    `tokenizer_from` does. Of a `CausalModule` with LoRA adapters these alone are written, as peft writes them. Raises
    ValueError for what does not fit the configuration and for a target that is taken.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes ({max_shard_bytes}) must be at least 1")
    saved = _saved(os.fspath(path), submodule, model_from)
    folder, out = Path(model_folder(model_from, TOKENIZER_FILES)), on_disk(target)
    if tokenizer_from is None and has_tokenizer(folder):
        tokenizer_from = folder
    tokenizer = Path(tokenizer_from) if tokenizer_from is not None else None
    # Before all weights are read.
    require_target(out, tokenizer)
    model, names = _model_of(saved, folder)
    parent = os.path.dirname(os.path.abspath(out))
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=parent) as scratch:
        full = saved.read(names, dtype, scratch, watch)
        # For the model's dtype, and for its ties.
        model.load_state_dict(full, strict=False, assign=True)
        if not has_adapters(model):
            model.tie_weights()
        num_parameters = sum(full[name].numel() for name, _ in model.named_parameters() if name in full)
        dtypes = [one.dtype for one in full.values() if one.is_floating_point()]
        num_tensors = len(full)
        try:
            write_folder(model, full, out, tokenizer, max_shard_bytes, dtype)
        except safetensors().SafetensorError as error:
            raise OSError(f"{out} could not be written: {error}") from error
    return Converted(
        family=str(model.config.model_type),
        num_tensors=num_tensors if has_adapters(model) else len(WeightFiles(out).shapes),
        num_parameters=num_parameters,
        dtype=str(common_dtype(dtypes)).removeprefix("torch."),
    )


def _saved(path: str, submodule: str | None, model_from: str | os.PathLike[str]) -> _Saved:
    meta, entries = read_own_meta(path), checkpoint.read_entries(path)
    name = "model" if submodule is None else submodule
    models = meta.get(MODELS) or {}
    if name in models or (models and submodule is None):
        raise ValueError(
            f"model_from ({os.fspath(model_from)}) acts on a model of transformers alone, and checkpoint {path} has "
            f"models of this package ({', '.join(map(repr, models))}); leave it out"
        )
    prefix = f"{name}." if name else ""
    own = {one: entry for one, entry in entries.items() if checkpoint.is_module_name(one)}
    of_submodule = {one.removeprefix(prefix): entry for one, entry in own.items() if one.startswith(prefix)}
    if not of_submodule:
        heads = sorted({one.partition(".")[0] for one in own})
        raise ValueError(
            f"submodule ({name!r}) has no weights in checkpoint {path}, which has {', '.join(map(repr, heads[:20]))}; "
            "name the one that is the model"
        )
    given = meta.get(HYPER_PARAMETERS)
    return _Saved(
        path=path,
        prefix=prefix,
        entries=of_submodule,
        hyper_parameters=given if isinstance(given, Mapping) else {},
    )


def _model_of(saved: _Saved, folder: Path) -> tuple[Any, dict[str, str]]:
    """The model on the meta device, and names in the checkpoint, by those in the model, of what is to be written.

    Raises ValueError where the weights are those of no model of the configuration.
    """
    faults: list[ValueError] = []
    # Names and shapes say which class it was.
    for auto_class in ("", *_AUTO_CLASSES) if read_config(folder).get("architectures") else _AUTO_CLASSES:
        try:
            model: Any = meta_model(folder, auto_class)
            if any(_IN_ADAPTERS in name for name in saved.entries):
                model = _adapted(model, saved)
            return _named_as_files(model, folder, saved), _fitting(model, saved, folder)
        except ValueError as error:
            faults.append(error)
    raise faults[0]


def _adapted(model: Any, saved: _Saved) -> Any:
    lora = saved.hyper_parameters.get("lora")
    if not isinstance(lora, Mapping):
        raise ValueError(
            f"{saved.where} has adapters of peft, whose configuration is in no checkpoint but those of a CausalModule; "
            "read the module, and have peft write them: lightning_megatron.load_from_checkpoint(MyModule, "
            f"{saved.path!r}).model.save_pretrained(folder)"
        )
    return add_adapters(model, lora_config(lora))


def _named_as_files(model: Any, folder: Path, saved: _Saved) -> Any:
    """The model, which is written under the names that the folder's files have, if the run read these."""
    if not has_adapters(model):
        read_generation(model, os.fspath(folder))
        has_files = any((folder / name).is_file() for name in (SINGLE, INDEX))
        if has_files and not saved.hyper_parameters.get("from_scratch"):
            sources_of(model, WeightFiles(folder))
    return model


def _fitting(model: nn.Module, saved: _Saved, folder: Path) -> dict[str, str]:
    """Names in the checkpoint by those in the model. Raises ValueError with all that does not fit."""
    state = model.state_dict(keep_vars=True)
    aliases: dict[int, list[str]] = {}
    for name, tensor in state.items():
        aliases.setdefault(id(tensor), []).append(name)
    wanted = {name for name, _ in model.named_parameters()}
    wanted |= {name for name, _ in model.named_buffers() if name in state}
    if has_adapters(model):
        wanted = of_adapters(model, wanted)
    # A tied weight may be there under either name.
    names = {
        name: next((one for one in aliases[id(state[name])] if one in saved.entries), name) for name in sorted(wanted)
    }
    shapes = {there: tuple(state[name].shape) for name, there in names.items()}
    if faults := misfits(shapes, saved.entries, state):
        raise ValueError(
            "\n  ".join([f"{saved.where} does not fit a {_class_of(model)} of model_from ({folder}):", *faults])
            + "; give the folder with the configuration of the model that was trained"
        )
    return names


def _class_of(model: Any) -> str:
    return type(model.get_base_model() if has_adapters(model) else model).__name__
