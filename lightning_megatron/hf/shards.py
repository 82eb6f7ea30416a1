"""Files of weights in a folder that transformers loads: which file holds which tensor, and at which offset.

The plan follows from names, shapes and dtype alone, so every rank makes the same, and the files do not depend on the
mesh. Any process may write any tensor: a writer needs memory for one tensor.

A file: 8 bytes with the length of the header, the header (JSON: dtype, shape and offsets of each tensor), the tensors.
"""

import json
import math
import os
import shutil
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.hf.blocks import Shape
from lightning_megatron.hf.folder import CONFIG, DTYPES, GENERATION, INDEX, SINGLE
from lightning_megatron.text_files import read_json_table

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# A header is padded to a multiple of this, so that tensors begin aligned.
_ALIGNMENT_BYTES = 8
MAX_SHARD_BYTES = 5 * 2**30

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
# In addition to `chat_template.*`.
_ALONG = (*_TOKENIZER_FILES, GENERATION)

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of a `config.json` that a tokenizer knows and a model does not."""

START_ID = "decoder_start_token_id"
"""Another such field, of models with an encoder: the token that the decoder's texts start with."""


@dataclass(frozen=True)
class TensorLocation:
    """File of a tensor, and its first byte there."""

    file: str
    offset_bytes: int


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """All files of a model's weights."""

    headers: Mapping[str, bytes]
    """First bytes of each file."""
    lengths_bytes: Mapping[str, int]
    """Length of each file."""
    locations: Mapping[str, TensorLocation]
    """Location of each tensor."""
    dtypes: Mapping[str, torch.dtype]
    """Dtype of each tensor."""

    @staticmethod
    def of(
        shapes: Mapping[str, Shape], dtype: torch.dtype, max_shard_bytes: int, wide: Collection[str] = ()
    ) -> "ShardPlan":
        """Tensors in their order, a new file where the next would make one longer than `max_shard_bytes`.

        Those of `wide` names have float32, or the dtype if that is wider. A larger tensor is a file of its own. Raises
        ValueError for a dtype that files do not hold.
        """
        if dtype not in _NAMES:
            raise ValueError(f"dtype ({dtype}) must be one of {', '.join(map(str, _NAMES))}")
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes ({max_shard_bytes}) must be at least 1")
        dtypes = {name: torch.promote_types(dtype, torch.float32) if name in wide else dtype for name in shapes}
        groups: list[list[str]] = [[]]
        num_bytes = 0
        for name, shape in shapes.items():
            length = math.prod(shape) * dtypes[name].itemsize
            if groups[-1] and num_bytes + length > max_shard_bytes:
                groups.append([])
                num_bytes = 0
            groups[-1].append(name)
            num_bytes += length
        headers, lengths, locations = {}, {}, {}
        for number, names in enumerate(groups, start=1):
            file = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            header, end = _header({name: shapes[name] for name in names}, dtypes)
            headers[file], lengths[file] = header, len(header) + end
            offset = len(header)
            for name in names:
                locations[name] = TensorLocation(file, offset)
                offset += math.prod(shapes[name]) * dtypes[name].itemsize
        return ShardPlan(headers=headers, lengths_bytes=lengths, locations=locations, dtypes=dtypes)

    def begin(self, folder: Path) -> None:
        """Makes every file, with its header and at its full length."""
        for file, header in self.headers.items():
            with (folder / file).open("wb") as stream:
                stream.write(header)
                stream.truncate(self.lengths_bytes[file])
        if len(self.headers) > 1:
            total = sum(length - len(self.headers[file]) for file, length in self.lengths_bytes.items())
            weight_map = {name: location.file for name, location in sorted(self.locations.items())}
            write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})

    def put(self, folder: Path, name: str, tensor: Tensor) -> None:
        """Writes a tensor at its location."""
        location = self.locations[name]
        values = tensor.detach().to(device="cpu", dtype=self.dtypes[name]).contiguous()
        with (folder / location.file).open("r+b") as stream:
            stream.seek(location.offset_bytes)
            stream.write(values.view(-1).view(torch.uint8).numpy().data)


def _header(shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]) -> tuple[bytes, int]:
    """The first bytes of a file, and how many bytes of tensors follow."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtypes[name].itemsize
        entries[name] = {"dtype": _NAMES[dtypes[name]], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text, end


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Writes the value as indented JSON."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def require_target(path: Path, tokenizer_from: Path | None) -> None:
    """Raises ValueError where `path` is taken, and for a folder that has no tokenizer."""
    if path.exists() and not _is_empty_folder(path):
        raise ValueError(f"{path} exists and is not empty; give a path where nothing is, or remove it")
    if tokenizer_from is not None and not tokenizer_from.is_dir():
        raise ValueError(f"tokenizer_from ({tokenizer_from}) is no folder; give the folder that the tokenizer is in")
    if tokenizer_from is not None and not has_tokenizer(tokenizer_from):
        raise ValueError(
            f"tokenizer_from ({tokenizer_from}) has none of the files of a tokenizer ({', '.join(_TOKENIZER_FILES)}); "
            "give the folder that the tokenizer is in, or leave it out"
        )


def start_draft(path: Path, tokenizer_from: Path | None) -> Path:
    """A new folder next to `path`, to be renamed to it. Raises ValueError as `require_target` does."""
    require_target(path, tokenizer_from)
    if path.exists():
        path.rmdir()
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.draft")
    draft.mkdir(parents=True)
    return draft


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def has_tokenizer(folder: Path) -> bool:
    """Whether a file of a tokenizer is in the folder."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def finish_draft(draft: Path, path: Path, config: Mapping[str, Any] | None, tokenizer_from: Path | None) -> None:
    """Adds the configuration, if there is one, and the tokenizer's files, and renames the draft to `path`."""
    known = {**dict.fromkeys(TOKEN_IDS), **(config or {})}
    if tokenizer_from is not None:
        for name in _ALONG:
            if (tokenizer_from / name).is_file():
                shutil.copyfile(tokenizer_from / name, draft / name)
        for file in tokenizer_from.glob("chat_template.*"):
            shutil.copyfile(file, draft / file.name)
        if (tokenizer_from / CONFIG).is_file():
            theirs = read_json_table(tokenizer_from / CONFIG)
            known |= {name: theirs[name] for name in (*TOKEN_IDS, START_ID) if name in theirs}
    if config is not None:
        write_json(draft / CONFIG, known)
    os.rename(draft, path)
