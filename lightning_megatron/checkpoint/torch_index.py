"""The index by which torch's and Lightning's own tools read a checkpoint directory; nothing in this package reads it.

`torch.distributed.checkpoint` and Lightning's `consolidate_checkpoint` look for `.metadata`, a pickle. Its names are
those that Lightning gives: `model.{name}`, and `optimizer_{index}.state.{parameter name}.{key}`; a further set of
tensors under the module's names has its title, `{title}.{name}`. Plain data of the optimizers (groups, states that
are no tensors) are in a file of their own.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_megatron.checkpoint import safe_metadata
from lightning_megatron.checkpoint.chunk_file import ChunkLocation
from lightning_megatron.checkpoint.save_plan import chunk_metadata
from lightning_megatron.checkpoint.state import OTHER_STATES, other_state_of, split_optimizer_name
from lightning_megatron.checkpoint.tensor_entry import TensorEntry

INDEX_FILE = ".metadata"
REST_FILE = "__rest.distcp"
# Key of the metadata under which the optimizers' plain data are.
OPTIMIZERS = "optimizers"

Keys = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class IndexExtras:
    """Plain data and titles that the index needs besides the tensors."""

    rest: Mapping[Keys, bytes] = field(default_factory=dict)
    """Optimizer state and param groups that are no tensors, by their keys in Lightning's dictionary."""
    titles: tuple[str, ...] = ()
    """Titles of further sets of tensors under the module's names."""

    @staticmethod
    def of(meta: Mapping[str, Any]) -> "IndexExtras":
        """The extras of a checkpoint with this metadata."""
        return IndexExtras(rest=_rest_values(meta.get(OPTIMIZERS, ())), titles=tuple(meta.get(OTHER_STATES, ())))


def _rest_values(rests: Sequence[Mapping[str, Any]]) -> dict[Keys, bytes]:
    values: dict[Keys, Any] = {}
    for index, rest in enumerate(rests):
        values[(f"optimizer_{index}", "param_groups")] = rest["groups"]
        for name, states in rest["state"].items():
            for key, value in states.items():
                values[(f"optimizer_{index}", "state", name, key)] = value
    return {keys: safe_metadata.torch_bytes(value) for keys, value in values.items()}


def index_bytes(
    save_id: str, entries: Mapping[str, TensorEntry], rest: Mapping[Keys, ChunkLocation], titles: Sequence[str] = ()
) -> bytes:
    """The content of the index file."""
    found = Metadata(
        state_dict_metadata={},
        planner_data={},
        storage_data={},
        storage_meta=StorageMeta(save_id=save_id),
        version="1.0.0",
    )
    for name, entry in entries.items():
        keys = _keys(name, titles)
        flat = ".".join(keys)
        found.planner_data[flat] = keys
        found.state_dict_metadata[flat] = TensorStorageMetadata(
            properties=TensorProperties(dtype=entry.dtype),
            size=torch.Size(entry.shape),
            chunks=[chunk_metadata(chunk.box) for chunk in entry.chunks],
        )
        for chunk in entry.chunks:
            found.storage_data[MetadataIndex(flat, chunk.box.offsets)] = _info(chunk.location)
    for keys, location in rest.items():
        flat = ".".join(keys)
        found.planner_data[flat] = keys
        found.state_dict_metadata[flat] = BytesStorageMetadata()
        found.storage_data[MetadataIndex(flat)] = _info(location)
    return pickle.dumps(found)


def _keys(name: str, titles: Sequence[str]) -> Keys:
    parts = split_optimizer_name(name)
    if parts is None:
        title, own_name = other_state_of(name, titles)
        return (title or "model", own_name)
    index, parameter_name, key = parts
    return (f"optimizer_{index}", "state", parameter_name, key)


def _info(location: ChunkLocation) -> _StorageInfo:
    # torch's own reader asks for this class, which has no public name.
    return _StorageInfo(location.file, location.offset, location.num_bytes)
