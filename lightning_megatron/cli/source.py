"""The source of a command that reads a model: whether there is one, before what reads it is imported."""

import os

from lightning_megatron.hub import is_name_on_hub


def source_faults(path: str, told: str) -> list[str]:
    """An error about the argument, called `told`, where its path leads to nothing that could be a model."""
    is_there = not path or "://" in path or os.path.lexists(path) or is_name_on_hub(path)
    return [] if is_there else [no_source(path, told)]


def no_source(path: str, told: str) -> str:
    """The error about an argument that is to be a model and is none."""
    return f"{told} ({path}) does not exist; give a checkpoint, or a folder with a Hugging Face model"
