"""Summary of one checkpoint."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_megatron.checkpoint.checkpoint_directory import EPOCH, STEP
from lightning_megatron.checkpoint.chunk_file import DamagedError
from lightning_megatron.checkpoint.folder import Address, Folder
from lightning_megatron.checkpoint.manifest import MANIFEST_FILE, read_manifest, read_meta
from lightning_megatron.checkpoint.state import OTHER_STATES, is_optimizer_name, other_state_of
from lightning_megatron.checkpoint.torch_index import OPTIMIZERS

# Keys of the metadata: sizes of the mesh at the save, and class and configuration of each model, by name in the module.
MESH, MODELS = "mesh", "models"
# All keys of the metadata that are not in Lightning's dictionary.
OWN_KEYS = (OPTIMIZERS, OTHER_STATES, MESH, MODELS)


@dataclass(frozen=True, kw_only=True)
class Amount:
    """Number and bytes of some tensors."""

    number: int
    """Number of tensors."""
    num_bytes: int
    """Bytes of the tensors in memory."""


@dataclass(frozen=True, kw_only=True)
class TensorLine:
    """Description of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_chunks: int
    num_bytes: int
    """Bytes of the tensor in memory."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Summary of one checkpoint."""

    path: str
    save_id: str
    saved_seconds: float
    """Time at which the manifest was written, in seconds since 1970; 0 where the file system does not tell."""
    package: str
    """Version of lightning_megatron that wrote it."""
    torch: str
    """Version of torch that wrote it."""
    layout_version: int
    """Version of the files' layout."""
    layout: Mapping[str, Any]
    """Sizes of the mesh at the save, as far as the metadata has them."""
    step: int
    """Optimizer steps before the save; -1 where the metadata has none."""
    epoch: int
    """Epoch of the save; -1 where the metadata has none."""
    models: Mapping[str, Mapping[str, Any]]
    """Class and configuration of each model, by name in the module."""
    tensors: Mapping[str, Amount]
    """Amounts of "weights", of "optimizer states", and of each further set of tensors under the module's names."""
    files: Mapping[str, int]
    """Bytes of each file."""


def summary_of(path: Address) -> Summary:
    """Summary of a checkpoint, without reading tensors. Raises ValueError where the path is no complete checkpoint."""
    manifest, meta = read_manifest(path), read_own_meta(path)
    titles = tuple(meta.get(OTHER_STATES, ()))
    amounts = {title: Amount(number=0, num_bytes=0) for title in ("weights", "optimizer states", *titles)}
    for name, entry in manifest.entries.items():
        title = "optimizer states" if is_optimizer_name(name) else other_state_of(name, titles)[0] or "weights"
        so_far = amounts[title]
        amounts[title] = Amount(number=so_far.number + 1, num_bytes=so_far.num_bytes + entry.num_bytes)
    return Summary(
        path=os.fspath(path),
        save_id=manifest.save_id,
        saved_seconds=Folder(path).changed_seconds(MANIFEST_FILE),
        package=manifest.package,
        torch=manifest.torch,
        layout_version=manifest.layout,
        layout=_sizes(meta.get(MESH, {})),
        step=meta.get(STEP, -1),
        epoch=meta.get(EPOCH, -1),
        models=meta.get(MODELS, {}),
        tensors=amounts,
        files=manifest.files,
    )


def read_own_meta(path: Address) -> dict[str, Any]:
    """Metadata as by `read_meta`; raises DamagedError where a value of ours is none that this package writes."""
    meta = read_meta(path)
    if strange := [
        f"{key} ({meta[key]!r:.100})" for key, fits in _KINDS.items() if key in meta and not fits(meta[key])
    ]:
        raise DamagedError(
            f"checkpoint {path}: its metadata has {', '.join(strange)}, which is not what this package writes; was it "
            "overwritten in on_save_checkpoint?"
        )
    return meta


def tensors_of(path: Address) -> list[TensorLine]:
    """Descriptions of all tensors of the checkpoint, sorted by name."""
    return [
        TensorLine(
            name=name,
            shape=entry.shape,
            dtype=str(entry.dtype).removeprefix("torch."),
            num_chunks=len(entry.chunks),
            num_bytes=entry.num_bytes,
        )
        for name, entry in sorted(read_manifest(path).entries.items())
    ]


def _sizes(mesh: Mapping[str, Any]) -> dict[str, Any]:
    """World size, and sizes that are not 1 or off."""
    found = {"world": mesh["world"]} if "world" in mesh else {}
    found |= {name: size for name, size in mesh.items() if type(size) is int and size > 1}
    if mesh.get("sequence_parallel"):
        found["sequence_parallel"] = True
    return found


def _are_models(models: Any) -> bool:
    return isinstance(models, Mapping) and all(
        isinstance(model, Mapping) and isinstance(model.get("class"), str) and isinstance(model.get("config"), Mapping)
        for model in models.values()
    )


def _are_titles(titles: Any) -> bool:
    return isinstance(titles, (list, tuple)) and all(isinstance(title, str) for title in titles)


def _are_optimizers(rests: Any) -> bool:
    return isinstance(rests, (list, tuple)) and all(isinstance(rest, Mapping) and _is_optimizer(rest) for rest in rests)


def _is_optimizer(rest: Mapping[str, Any]) -> bool:
    groups, states = rest.get("groups"), rest.get("state")
    return (
        isinstance(groups, (list, tuple))
        and all(isinstance(group, Mapping) and _are_titles(group.get("params")) for group in groups)
        and isinstance(states, Mapping)
        and all(isinstance(values, Mapping) for values in states.values())
    )


def _is_number(number: Any) -> bool:
    return isinstance(number, int)


# What reads the values of each key relies on.
_KINDS: dict[str, Callable[[Any], bool]] = {
    STEP: _is_number,
    EPOCH: _is_number,
    MESH: lambda mesh: isinstance(mesh, Mapping),
    MODELS: _are_models,
    OTHER_STATES: _are_titles,
    OPTIMIZERS: _are_optimizers,
}
