"""A small state for each step of a run, and whether a checkpoint is all of the state of one step."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.checkpoint import load, read_meta
from lightning_megatron.mesh import Axis, Mesh

ALONE = Mesh.single().world


def state_of(step: int) -> dict[str, Tensor]:
    """Tensors that are others at every step; one is larger than the buffer of a file."""
    generator = torch.Generator().manual_seed(step)
    return {
        "w": torch.randn(5000, generator=generator),
        "optimizer.0.w.exp_avg": torch.randn(5000, generator=generator),
        "v": torch.full((7,), step),
    }


def meta_of(step: int) -> dict[str, Any]:
    """Metadata with optimizers, so that every kind of file is written."""
    return {"step": step, "optimizers": [{"groups": [{"params": ["w"], "lr": 1 / (1 + step)}], "state": {}}]}


def step_in(path: os.PathLike[str] | str, world: Axis = ALONE) -> int:
    """The step of which the checkpoint is all; raises what its readers raise, or AssertionError for a wrong value."""
    meta = read_meta(path)
    step = int(meta["step"])
    found = {name: torch.zeros_like(tensor) for name, tensor in state_of(step).items()}
    load(path, found, world=world)
    assert meta == meta_of(step)
    for name, tensor in state_of(step).items():
        assert torch.equal(found[name], tensor), f"{path}: {name} is not that of step {step}"
    return step


def visible(folder: Path) -> list[Path]:
    """What one sees who looks for checkpoints in the folder."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
