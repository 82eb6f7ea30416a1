"""What `lightning-megatron convert` does: between a folder with a Hugging Face model and a checkpoint directory.

The kind of the source decides the direction, and the target's name with --upcycle, which may keep the format. The work
is `hf.convert`'s, and of models of transformers `hf.convert_unchanged`'s; here are the errors and the messages.
"""

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.checkpoint import is_checkpoint
from lightning_megatron.checkpoint.folder import is_remote, store_errors_as_os_errors
from lightning_megatron.cli.source import no_source
from lightning_megatron.cli.target import require_writable
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.hf.convert import Converted, to_checkpoint, to_folder
from lightning_megatron.hf.folder import on_disk, read_config
from lightning_megatron.hf.shards import MAX_SHARD_BYTES
from lightning_megatron.hf.weights import folder_of_run, in_checkpoint, in_folder, moe_config
from lightning_megatron.hub import CONFIG_FILES, model_folder
from lightning_megatron.progress import progress_bar
from lightning_megatron.text_files import read_table

# Options for one kind of source, or of target, alone, and their defaults.
_FROM_CHECKPOINTS = {"submodule": None, "config": None, "model_from": None}
_TO_FOLDERS = {"family": None, "max_shard_bytes": MAX_SHARD_BYTES, "tokenizer_from": None}
_OF_OWN_MODELS = {"config": None, "family": None, "upcycle": None}


def run_convert(options: argparse.Namespace) -> None:
    """Converts, and prints a summary. Raises UsageError with every error."""
    try:
        with store_errors_as_os_errors(options.source, options.target):
            converted = _convert(options)
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        raise UsageError([_as_options(" ".join(line.strip() for line in str(error).splitlines()))]) from error
    if options.json:
        print(json.dumps({"source": options.source, "target": options.target, **asdict(converted)}))
    else:
        print(
            f"{options.target}: {converted.family}, {converted.num_parameters:,} parameters in "
            f"{converted.num_tensors} tensors of {converted.dtype}"
        )


def _as_options(message: str) -> str:
    """A message about arguments of a function, as one about the options of the command."""
    for name in (*_FROM_CHECKPOINTS, *_TO_FOLDERS):
        option = f"--{name.replace('_', '-')}"
        message = re.sub(rf"(?<![-\w]){name}='?([^' ;,]+)'?", rf"{option} \1", message)
        message = re.sub(rf"(?<![-\w]){name} \(", f"{option} (", message)
    return message


def _convert(options: argparse.Namespace) -> Converted:
    is_from_checkpoint, is_ckpt = is_checkpoint(options.source), options.target.rstrip("/").endswith(".ckpt")
    # Experts come into either format; else the other one is written.
    is_to_checkpoint = not is_from_checkpoint if options.upcycle is None else is_ckpt
    faults = []
    if not is_from_checkpoint:
        # An unreadable source is an error before options that do not apply to it.
        folder = on_disk(model_folder(options.source, CONFIG_FILES))
        if not folder.exists():
            raise UsageError([no_source(options.source, "SOURCE")])
        read_config(folder)
        faults += _unused(options, _FROM_CHECKPOINTS, f"a checkpoint as SOURCE alone, and {options.source} is none")
    if is_to_checkpoint:
        faults += _unused(options, _TO_FOLDERS, f"a folder as TARGET alone, and {options.target} is to be a checkpoint")
    if is_to_checkpoint and not is_ckpt:
        faults.append(f"TARGET ({options.target}) is to be a checkpoint, as {options.source} is none: end it in .ckpt")
    if is_ckpt and not is_to_checkpoint:
        faults.append(
            f"TARGET ({options.target}) becomes a folder, as {options.source} is a checkpoint: leave .ckpt out"
        )
    fields: dict[str, Mapping[str, Any]] = {}
    for option, file in (("config", options.config), ("upcycle", options.upcycle)):
        try:
            if file is not None:
                fields[option] = _fields(option, file)
        except ValueError as error:
            faults.append(" ".join(str(error).split()))
    model_from = options.model_from
    if is_from_checkpoint and model_from is None and options.config is None:
        model_from = folder_of_run(options.source)
    if is_from_checkpoint and model_from:
        told = f"a model of this package alone, and {options.source} has one of transformers (of {model_from})"
        faults += _unused(options, _OF_OWN_MODELS, told)
    if options.model_from is not None and "/" not in options.model_from and not Path(options.model_from).is_dir():
        faults.append(f"--model-from ({options.model_from}) is no folder; give the one of the model that was trained")
    if faults:
        raise UsageError(faults)
    if model_from:
        return _convert_unchanged(options, model_from)
    if is_from_checkpoint:
        weights = in_checkpoint(options.source, options.submodule, fields.get("config"))
    else:
        weights = in_folder(options.source)
    if "upcycle" in fields:
        weights = weights.upcycled(moe_config(fields["upcycle"]))
    _require_writable(options.target)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    with progress_bar("converting", "tensors") as watch:
        if is_to_checkpoint:
            return to_checkpoint(weights, options.target, dtype=dtype, watch=watch)
        return to_folder(
            weights,
            options.target,
            family=options.family,
            dtype=dtype,
            max_shard_bytes=options.max_shard_bytes,
            tokenizer_from=options.tokenizer_from,
            watch=watch,
        )


def _convert_unchanged(options: argparse.Namespace, model_from: str) -> Converted:
    """A model of transformers as it is, into a folder."""
    # It imports transformers, which takes seconds.
    from lightning_megatron.hf.convert_unchanged import unchanged_to_folder

    _require_writable(options.target)
    with progress_bar("converting", "tensors") as watch:
        return unchanged_to_folder(
            options.source,
            options.target,
            model_from=model_from,
            submodule=options.submodule,
            dtype=None if options.dtype is None else getattr(torch, options.dtype),
            max_shard_bytes=options.max_shard_bytes,
            tokenizer_from=options.tokenizer_from,
            watch=watch,
        )


def _require_writable(target: str) -> None:
    if not is_remote(target):
        require_writable(Path(target).parent, f"TARGET ({target})")


def _unused(options: argparse.Namespace, defaults: Mapping[str, Any], needed: str) -> list[str]:
    """A fault for each option that was given and acts on nothing."""
    return [
        f"--{name.replace('_', '-')} acts on {needed}; leave it out"
        for name, default in defaults.items()
        if getattr(options, name) != default
    ]


def _fields(option: str, file: Path) -> Mapping[str, Any]:
    """The fields in a YAML or JSON file."""
    example = "num_layers: 2" if option == "config" else "router: {num_experts: 8}"
    try:
        return read_table(file, name=f"--{option} ({file})")
    except ValueError as error:
        raise ValueError(f"{error}; give a file of YAML or JSON, as '{example}'") from error
