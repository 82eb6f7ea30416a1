"""Models of transformers as they are resume on any layout from a checkpoint of any other, and overlap their sums."""

import functools
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron.checkpoint import read_entries
from lightning_megatron.optim.config import OptimizerConfig
from tests.any_module import networks
from tests.any_module.model_families import Causal, batches
from tests.any_module.test_around_layers import TrainsTowered
from tests.harness.ranks import run_on_ranks
from tests.lightning_modules.losses import Losses
from tests.trainer.layouts import QUIET, Layout, make_trainer

pytestmark = [
    pytest.mark.filterwarnings(QUIET),
    # A run that goes on here saves nothing itself.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used:UserWarning"),
]

ZERO = OptimizerConfig(kind="distributed")
LAYOUTS = {
    "one device": Layout(),
    "tp 2, sp": Layout(world=2, tp=2, sp=True),
    "pp 2": Layout(world=2, pp=2, microbatches=2),
    "dp 2, distributed optimizer": Layout(world=2, optimizer=ZERO),
}


def rows() -> list[dict[str, Tensor]]:
    """The rows of the batches, so that ranks share a batch."""
    return [{key: one[row] for key, one in batch.items()} for batch in batches() for row in range(8)]


class Logged(Causal):
    """Logs its loss."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss


class LoggedPacked(networks.TrainsPacked):
    """Logs its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss


def fitted_own(kind: type[networks.Trains], layout: Layout, folder: str, ckpt_path: str | None) -> list[float]:
    """The losses of a network of one's own; a checkpoint of its first step is kept."""
    losses = Losses()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    options: dict[str, Any] = {"max_steps": 3, "max_epochs": -1, "enable_checkpointing": ckpt_path is None}
    options["use_distributed_sampler"] = True
    trainer = make_trainer(layout, callbacks=[losses, *([saver] if ckpt_path is None else [])], **options)
    trainer.fit(kind(), networks.loader(networks.ROWS // layout.dp), ckpt_path=ckpt_path)
    return losses.losses


def fitted(layout: Layout, folder: str, ckpt_path: str | None, max_steps: int) -> tuple[list[float], dict[str, float]]:
    """The losses of the steps, and the sums of squares of the weights here; a checkpoint of each step is kept."""
    losses = Losses()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(
        layout,
        callbacks=[losses, *([saver] if ckpt_path is None else [])],
        max_steps=max_steps,
        max_epochs=-1,
        enable_checkpointing=ckpt_path is None,
        use_distributed_sampler=True,
    )
    module = Logged("qwen3")
    trainer.fit(module, DataLoader(rows(), batch_size=8 // layout.dp), ckpt_path=ckpt_path)
    held = {name: float(one.detach().square().sum()) for name, one in module.named_parameters() if not one.is_meta}
    return losses.losses, held


@functools.cache
def begun(folder: Path) -> tuple[list[float], str]:
    """The losses of three steps on four ranks, and the checkpoint of the first."""
    layout = Layout(world=4, tp=2, pp=2, microbatches=2)
    (losses, _), *_ = run_on_ranks(4, fitted, layout, str(folder), None, 3, init=False)
    return losses, str(folder / "step=1.ckpt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("resumed"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_goes_on_from_tp_2_pp_2(folder: Path, name: str) -> None:
    wanted, ckpt_path = begun(folder)
    assert len(set(wanted)) == 3
    layout = LAYOUTS[name]
    for losses, _ in run_on_ranks(layout.world, fitted, layout, str(folder), ckpt_path, 3, init=False):
        # What transformers computes in float32.
        assert losses == pytest.approx(wanted[1:], rel=1e-6)


@pytest.mark.parametrize("layout", [Layout(), Layout(world=4, tp=2, optimizer=ZERO)], ids=["one device", "zero"])
def test_blocks_of_a_linear_are_saved_as_one_weight(tmp_path: Path, layout: Layout) -> None:
    begin = Layout(world=2, tp=2, optimizer=ZERO)
    wanted, _ = run_on_ranks(2, fitted_own, LoggedPacked, begin, str(tmp_path), None, init=False)
    ckpt_path = str(tmp_path / "step=1.ckpt")
    assert read_entries(ckpt_path)["net.blocks.0.attention.qkv.weight"].shape == (48, 16)
    for losses in run_on_ranks(layout.world, fitted_own, LoggedPacked, layout, str(tmp_path), ckpt_path, init=False):
        assert losses == pytest.approx(wanted[1:], rel=1e-6) and len(losses) == 2


class LoggedTowered(TrainsTowered):
    """Logs its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss


@pytest.mark.parametrize(
    ("begin", "layout"),
    [
        (Layout(world=4, tp=2, pp=2, microbatches=2), Layout()),
        (Layout(), Layout(world=4, tp=2, pp=2, microbatches=2)),
    ],
    ids=["from tp2 pp2", "to tp2 pp2"],
)
def test_linears_before_the_layers_are_saved_by_the_stage_that_has_them(
    tmp_path: Path, begin: Layout, layout: Layout
) -> None:
    wanted, *_ = run_on_ranks(begin.world, fitted_own, LoggedTowered, begin, str(tmp_path), None, init=False)
    ckpt_path = str(tmp_path / "step=1.ckpt")
    assert read_entries(ckpt_path)["net.tokens.1.weight"].shape == (2 * networks.WIDTH, networks.WIDTH)
    for losses in run_on_ranks(layout.world, fitted_own, LoggedTowered, layout, str(tmp_path), ckpt_path, init=False):
        assert losses == pytest.approx(wanted[1:], rel=1e-6) and len(losses) == 2


def test_overlapped_sums_and_gathers_change_nothing(folder: Path) -> None:
    def run(optimizer: OptimizerConfig, name: str) -> list[Any]:
        layout = Layout(world=4, pp=2, microbatches=2, optimizer=optimizer)
        return run_on_ranks(4, fitted, layout, str(folder / name), None, 3, init=False)

    overlapped = OptimizerConfig(kind="distributed", overlap_grad_reduce=True, overlap_param_gather=True)
    assert run(overlapped, "overlapped") == run(ZERO, "plain")
