"""A model on any mesh from a folder with a Hugging Face model; each rank reads the slices that it holds."""

import os
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from lightning_megatron.hf.blocks import fill_ours
from lightning_megatron.hf.families import family_of_file
from lightning_megatron.hf.family import Config, Model, Table, model_of
from lightning_megatron.hf.folder import WeightFiles, on_disk, read_config
from lightning_megatron.hub import CONFIG_FILES, model_folder
from lightning_megatron.mesh import Mesh, ambient_mesh
from lightning_megatron.models.gpt import GPTConfig
from lightning_megatron.models.upcycle import Read, Upcycling
from lightning_megatron.moe.config import MoEConfig
from lightning_megatron.sharding import Box, deferring, fill, is_deferring, materialize


def from_pretrained(
    path: str | os.PathLike[str], mesh: Mesh | None = None, *, upcycle: MoEConfig | None = None
) -> Model:
    """The model in a folder, this rank's part of it, on torch's default device and in its default dtype.

    Its class is that of its family. Without a mesh, it is that of the running strategy. With `upcycle` a dense GPT
    becomes one with experts, which computes the same. Every rank reads for itself; none waits for another. Raises
    ValueError for what cannot be read or is not supported, with all faults of one kind at once.
    """
    folder = on_disk(model_folder(path))
    mesh = mesh if mesh is not None else ambient_mesh()
    raw = read_config(folder)
    family = family_of_file(raw, str(folder / "config.json"))
    config = family.config(raw)
    files = WeightFiles(folder)
    table = Table(family, config, files.shapes)
    read: Read = Source(table, files).read
    if upcycle is not None:
        way = upcycling(config, upcycle)
        config, read = way.config, partial(way.read, dense=read)
    # Values that are drawn only to be overwritten take longer than reading.
    with deferring():
        model = model_of(config, mesh)
    for name, parameter in model.named_parameters():
        fill(parameter, partial(read, name))
        if not is_deferring():
            materialize(parameter)
    for name, buffer in model.named_buffers():
        if name in table.buffers and not buffer.is_meta:
            read(name, Box((0,) * buffer.dim(), tuple(buffer.shape)), buffer)
    return model


def config_from_pretrained(path: str | os.PathLike[str], *, upcycle: MoEConfig | None = None) -> Config:
    """The architecture of the model in a folder, or of the upcycled one.

    Raises ValueError for what is not supported, all faults at once.
    """
    folder = on_disk(model_folder(path, CONFIG_FILES))
    raw = read_config(folder)
    config = family_of_file(raw, str(folder / "config.json")).config(raw)
    return config if upcycle is None else upcycling(config, upcycle).config


def upcycling(config: Config, moe: MoEConfig) -> Upcycling:
    """The upcycling to a model with experts. Raises ValueError where there is none."""
    # A LlavaConfig is one, too, and a vision tower has no experts.
    if type(config) is not GPTConfig:
        raise ValueError(f"upcycling takes a model with a GPTConfig, and this one has a {type(config).__name__}")
    return Upcycling(dense=config, moe=moe)


class Source:
    """Tensors of ours, read from theirs. Raises ValueError where the files do not fit the table."""

    def __init__(self, table: Table, files: WeightFiles) -> None:
        self._table, self._files = table, files
        self._file_names = table.compare(files.shapes, files.dtypes, str(files.folder))

    def read(self, name: str, box: Box, out: Tensor) -> None:
        """Writes a box of one of our tensors to `out`, in its dtype."""
        link = self._table.links[name]
        fill_ours(out, box, link.blocks, lambda source, theirs: self._read(link.sources[source], theirs))

    def _read(self, name: str, box: Box) -> Tensor:
        values = self._files.read(self._file_names[name], box)
        for copy in self._copies_of(name):
            if not torch.equal(values, self._files.read(self._file_names[copy], box)):
                raise ValueError(
                    f"{copy} and {name} in {self._files.folder} differ, and by tie_word_embeddings they are one; "
                    "set tie_word_embeddings to false in config.json, or save the model again"
                )
        return values

    def _copies_of(self, name: str) -> Iterable[str]:
        """Tensors of the files that repeat another."""
        table = self._table
        repeated = table.family.repeated(table.config)
        return [copy for copy, original in repeated.items() if original == name and copy in self._file_names]
