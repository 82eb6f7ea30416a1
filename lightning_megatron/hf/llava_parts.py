"""A LLaVA from folders: that of a complete LLaVA, or those of a language model and a vision tower.

The configuration is the caller's, and the folders must fit it; each rank reads its slices. Weights of no folder get the
initial values of a new model: the projector, and rows of the vocabulary after those of a language model, such as that
of the image token.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_megatron.checkpoint.folder import Address
from lightning_megatron.hf import llava
from lightning_megatron.hf.blocks import fill_ours
from lightning_megatron.hf.config_reader import ConfigReader
from lightning_megatron.hf.family import Table, listed
from lightning_megatron.hf.folder import WeightFiles, read_config
from lightning_megatron.hf.weights import in_folder
from lightning_megatron.mesh import Mesh, ambient_mesh
from lightning_megatron.models.gpt import GPTConfig
from lightning_megatron.models.llava import PARTS, LlavaConfig, LlavaModel
from lightning_megatron.models.upcycle import Read
from lightning_megatron.models.vision import VisionConfig
from lightning_megatron.sharding import Box, Write, deferring, fill, is_deferring, materialize

_CLIP, _CLIP_VISION = "clip", "clip_vision_model"
_TOWER = "vision_tower."
_VISION_MODEL = "vision_model."
_VOCABULARY = ("embedding.tokens.weight", "head.weight")
# Fields of the user's own choice: they change training, or the size of a table of positions that is not read.
_FREE = frozenset(
    ("max_sequence_length", "init_std", "hidden_dropout", "attention_dropout", "label_smoothing", "vocab_multiple")
)


@dataclass(frozen=True, kw_only=True)
class _Given:
    """Weights of a folder."""

    has: Callable[[str], bool]
    """Whether the folder has the parameter with a name of ours."""
    num_rows: int
    """Number of rows of its vocabulary."""
    read: Read


def llava_from_folders(
    config: LlavaConfig,
    *,
    whole: Address | None = None,
    language: Address | None = None,
    vision: Address | None = None,
    mesh: Mesh | None = None,
) -> LlavaModel:
    """The model of the configuration with the weights that the folders have, this rank's part of it.

    `whole` is a LLaVA's folder, `language` a Llama's, `vision` that of a CLIP or of its vision tower. Without a mesh,
    that of the running strategy. Raises ValueError with all that does not fit the configuration.
    """
    mesh = mesh if mesh is not None else ambient_mesh()
    if whole is None and language is None and vision is None:
        return LlavaModel(config, mesh=mesh)
    faults: list[str] = []
    given = [
        opened(Path(folder), config, faults)
        for folder, opened in ((whole, _whole), (language, _language), (vision, _vision))
        if folder is not None
    ]
    if faults:
        raise ValueError("\n".join(faults))
    # Values that are drawn only to be overwritten take longer than reading.
    with deferring():
        model = LlavaModel(config, mesh=mesh)
    for name, parameter in model.named_parameters():
        source = next((source for source in given if source is not None and source.has(name)), None)
        if source is not None:
            # What no source has is drawn, as the model knows it.
            draw: Write = parameter.deferral.write  # type: ignore[attr-defined]
            fill(parameter, partial(_write, name, source, draw))
        if not is_deferring():
            materialize(parameter)
    return model


def _write(name: str, source: _Given, draw: Write, box: Box, out: Tensor) -> None:
    """Reads a box of a parameter; tokens that the source does not know are drawn."""
    if name in _VOCABULARY:
        draw(box, out)
        num_rows = max(0, min(source.num_rows - box.offsets[0], box.sizes[0]))
        box, out = Box(box.offsets, (num_rows, *box.sizes[1:])), out.narrow(0, 0, num_rows)
    if 0 not in box.sizes:
        source.read(name, box, out)


def _whole(folder: Path, config: LlavaConfig, faults: list[str]) -> _Given | None:
    found = in_folder(folder)
    if not isinstance(found.config, LlavaConfig):
        faults.append(f"{folder} is no LLaVA: its model_type is {found.kind!r}; a language model is given as language")
        return None
    faults += _differences(config, found.config, folder)
    return _Given(has=lambda name: True, num_rows=found.config.vocab_size, read=found.read)


def _language(folder: Path, config: LlavaConfig, faults: list[str]) -> _Given | None:
    found = in_folder(folder)
    if type(found.config) is not GPTConfig:
        faults.append(f"{folder} has no language model of a LLaVA: its model_type is {found.kind!r}")
        return None
    faults += _differences(config.language, found.config, folder)
    others = tuple(f"{part}." for part in PARTS if part != "language")
    return _Given(has=lambda name: not name.startswith(others), num_rows=found.config.vocab_size, read=found.read)


def _vision(folder: Path, config: LlavaConfig, faults: list[str]) -> _Given | None:
    raw = read_config(folder)
    kind = raw.get("model_type")
    if kind not in (_CLIP, _CLIP_VISION):
        faults.append(f"{folder} has no vision tower of a LLaVA: its model_type is {kind!r}, and must be {_CLIP!r}")
        return None
    own = raw.get("vision_config", {}) if kind == _CLIP else raw
    reader = ConfigReader({"vision_config": {"model_type": _CLIP_VISION, **own}}, llava.DEFAULTS)
    tower = llava.vision_config(reader)
    if reader.faults:
        faults += [f"{folder}: {fault}" for fault in reader.faults]
        return None
    faults += [f"vision: {fault}" for fault in _differences(config.vision, tower, folder)]
    if faults:
        return None
    files = WeightFiles(folder)
    links = {name: link for name, link in Table(llava.FAMILY, config).links.items() if name.startswith("vision.")}
    file_names = {}
    for link in links.values():
        for source in link.sources:
            name = source.removeprefix(_TOWER)
            bare = name.removeprefix(_VISION_MODEL)
            file_names[source] = name if name in files.shapes else bare
    if missing := listed((name for name in file_names.values() if name not in files.shapes), "needed and not in it"):
        faults += [f"the weights in {folder}: {line}" for line in missing]
        return None

    def read(name: str, box: Box, out: Tensor) -> None:
        link = links[name]
        fill_ours(out, box, link.blocks, lambda source, theirs: files.read(file_names[link.sources[source]], theirs))

    return _Given(has=links.__contains__, num_rows=0, read=read)


def _differences(ours: Any, theirs: Any, folder: Path) -> list[str]:
    """Fields of an architecture that differ from the folder's; our vocabulary may be larger."""
    faults = []
    for field in fields(theirs):
        one, other = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(other, VisionConfig):
            faults += [f"vision: {fault}" for fault in _differences(one, other, folder)]
        elif field.name == "vocab_size":
            if one < other:
                faults.append(f"vocab_size ({one}) must be at least that of {folder}, {other}")
        elif field.name not in _FREE and one != other:
            faults.append(f"{field.name} ({one!r}) is {other!r} in {folder}")
    return faults
