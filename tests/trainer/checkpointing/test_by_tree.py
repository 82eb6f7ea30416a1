"""Ranks that talk over host memory by a tree save, resume and train as ranks of one group do, to the last bit."""

from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint import CheckpointConfig, load, read_entries
from lightning_megatron.comm.tree_axis import TreeAxis
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim.config import OptimizerConfig
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data, Small
from tests.trainer.trees import talk_by_tree

Kind = Literal["directory", "file"]
LAYOUT = Layout(world=4, tp=2, optimizer=OptimizerConfig(kind="distributed", bucket_size=100))
ONE_GROUP = 8


def trained(folder: Path, kind: Kind, fan_out: int) -> bool:
    """Trains, saving in the background, and goes on from the first save; whether the ranks talked by a tree."""
    talk_by_tree(fan_out)

    def fit(max_steps: int, ckpt_path: Path | None) -> MegatronStrategy:
        strategy = cast(MegatronStrategy, LAYOUT.strategy())
        strategy.checkpoint = CheckpointConfig(kind=kind, asynchronous=kind == "directory")
        saves = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
        trainer = make_trainer(
            LAYOUT, strategy=strategy, callbacks=[saves], enable_checkpointing=True, max_steps=max_steps
        )
        trainer.fit(Small(), Data(), ckpt_path=ckpt_path)
        return strategy

    fit(2, None)
    world = fit(4, folder / "step=1.ckpt")._saver.world
    return isinstance(world, TreeAxis)


def tensors_of(path: Path, kind: Kind) -> dict[str, Tensor]:
    if kind == "file":
        flat: dict[str, Tensor] = {}
        _flatten(torch.load(path, weights_only=False), "", flat)
        return flat
    tensors = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in read_entries(path).items()}
    load(path, tensors, world=Mesh.single().world)
    return tensors


def _flatten(value: Any, name: str, flat: dict[str, Tensor]) -> None:
    if isinstance(value, Tensor):
        flat[name] = value
    elif isinstance(value, dict | list | tuple):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            _flatten(one, f"{name}.{key}", flat)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", every_nth(["directory", "file"], 2))
def test_a_run_by_tree_saves_and_goes_on_as_one_by_a_group(kind: Kind, tmp_path: Path) -> None:
    assert run_on_ranks(4, trained, tmp_path / "group", kind, ONE_GROUP, init=False) == [False] * 4
    # A chain of four.
    assert run_on_ranks(4, trained, tmp_path / "tree", kind, 1, init=False) == [True] * 4
    names = sorted(path.name for path in (tmp_path / "group").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "tree").iterdir()) and "step=4.ckpt" in names
    for name in names:
        by_group, by_tree = (tensors_of(tmp_path / folder / name, kind) for folder in ("group", "tree"))
        assert len(by_group) > 10 and list(by_group) == list(by_tree)
        assert all(torch.equal(tensor, by_tree[key]) for key, tensor in by_group.items())
