"""A checkpoint of kind "file" is what Lightning writes on one device, whatever layout saves it."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import CheckpointConfig, MegatronStrategy
from lightning_megatron.models import GPTModel
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.trainer.checkpointing import run_history
from lightning_megatron.trainer.checkpointing.single_file import FileIO
from lightning_megatron.trainer.resume import run_state
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.trainer.checkpointing.test_checkpoint_dict import CONFIG, TOLERANCE, Language, Texts
from tests.trainer.fits import parts_apart, weights
from tests.trainer.layouts import PLAIN, Layout, make_trainer
from tests.trainer.modules import WIDTH, Data, Small

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning")
ZERO = OptimizerConfig(kind="distributed", bucket_size=700)
LAYOUTS = {
    "one": Layout(),
    "pp2 vp2": Layout(world=2, pp=2, vp=2, microbatches=2),
    "zero dp2 tp2": Layout(world=4, tp=2, sp=True, optimizer=ZERO),
}
# Keys by which a run goes on exactly, besides those of Lightning.
OWN_KEYS = {run_state.KEY, run_history.KEY}


class Plain(Language):
    """Without dropout, because plain Lightning tells no model its step; with plain data as hyper-parameters."""

    def __init__(self, rate: float = 0.01, sizes: tuple[int, ...] = (1, 2)) -> None:
        super().__init__(rate, cast(Any, None))
        self.save_hyperparameters(ignore=["note"])

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPTModel(replace(CONFIG, hidden_dropout=0.0, attention_dropout=0.0), seed=2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Tensors under the module's names, as callbacks that average weights save them.
        checkpoint["averages"] = {name: tensor * 2 for name, tensor in self.state_dict().items()}


def fitted(layout: Layout, folder: Path, resumes: str = "") -> dict[str, Any]:
    """Eight steps in two epochs, or what is left of them, with saves after the third and the sixth."""
    strategy = layout.strategy()
    if isinstance(strategy, MegatronStrategy):
        strategy.checkpoint = CheckpointConfig(kind="file")
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=3)
    trainer = make_trainer(layout, strategy=strategy, callbacks=[saving], enable_checkpointing=True)
    module = Plain()
    trainer.fit(module, Texts(), ckpt_path=resumes or None)
    return {"weights": weights(module), "best": saving.best_model_path, "seen": int(module.seen)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What Lightning itself writes, and where it ends without a break."""
    folder = tmp_path_factory.mktemp("plain")
    [found] = run_on_ranks(1, fitted, PLAIN, folder, init=False)
    return folder / "step=3.ckpt", found


def same(ours: Any, theirs: Any, where: str) -> list[str]:
    """Places in two checkpoints that differ in type, order, shape, or by more than rounding."""
    if type(ours) is not type(theirs) and not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return [f"{where}: {type(ours).__name__} and {type(theirs).__name__}"]
    if isinstance(ours, dict):
        # An optimizer's state has its keys in any order; weights are shown in that of the module.
        if set(ours) != set(theirs) or (where == "state_dict" and list(ours) != list(theirs)):
            return [f"{where}: {list(ours)} and {list(theirs)}"]
        return [line for key in ours for line in same(ours[key], theirs[key], f"{where}[{key!r}]")]
    if isinstance(ours, torch.Tensor):
        is_near = ours.shape == theirs.shape and torch.allclose(ours.double(), theirs.double(), rtol=0, atol=TOLERANCE)
        return [] if is_near and ours.dtype == theirs.dtype else [f"{where}: {ours} and {theirs}"]
    if isinstance(ours, (list, tuple)):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [line for place, pair in pairs for line in same(*pair, f"{where}[{place}]")]
    return [] if ours == pytest.approx(theirs, abs=TOLERANCE) else [f"{where}: {ours} and {theirs}"]


@pytest.mark.parametrize("layout", every_nth(LAYOUTS, 2))
def test_every_layout_writes_the_file_that_lightning_writes_and_any_goes_on_from_it(
    layout: str, plain: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    expected, path = torch.load(plain[0], weights_only=True), tmp_path / "step=3.ckpt"
    for found in run_on_ranks(LAYOUTS[layout].world, fitted, LAYOUTS[layout], tmp_path, init=False):
        assert os.path.isfile(found["best"])
    saved = torch.load(path, weights_only=True)
    assert saved.keys() - expected.keys() == OWN_KEYS and expected.keys() <= saved.keys()
    # Paths, the loader's position (which is among the package's own keys), and the class of the precision.
    for checkpoint in (saved, expected):
        [(_, state)] = checkpoint["callbacks"].items()
        for key in ("dirpath", "best_model_path", "last_model_path", "kth_best_model_path", "best_k_models"):
            state.pop(key)
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader")
    assert [line for key in expected for line in same(saved[key], expected[key], key)] == []
    # It would be noticed: after six steps almost all of it is another number.
    later = torch.load(plain[0].with_name("step=6.ckpt"), weights_only=True)
    assert len(same(saved["optimizer_states"], later["optimizer_states"], "")) > 50
    # Another layout goes on from it, and plain Lightning too where it needs no masks of dropout.
    other = LAYOUTS["pp2 vp2" if layout != "pp2 vp2" else "zero dp2 tp2"]
    for found in run_on_ranks(other.world, fitted, other, tmp_path / "again", str(path), init=False):
        assert parts_apart(found["weights"], plain[1]["weights"]) < TOLERANCE and found["seen"] == 8
    module = Plain.load_from_checkpoint(path, map_location="cpu")
    assert module.hparams["sizes"] == (1, 2) and torch.equal(module.seen, torch.tensor(3))


class Sandwich(nn.Module):
    """A network that knows nothing of stages, whose linears are all of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scale * self.first(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.last(x)
        return out


class TrainsSandwich(L.LightningModule):
    """Its optimizer has a state for each weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = Sandwich()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def sandwiched(layout: Layout, path: Path) -> None:
    """A step of a network that is not the package's, saved."""
    strategy = layout.strategy()
    if isinstance(strategy, MegatronStrategy):
        strategy.checkpoint = CheckpointConfig(kind="file")
    trainer = make_trainer(layout, strategy=strategy, max_epochs=1)
    torch.manual_seed(3)
    trainer.fit(TrainsSandwich(), DataLoader(TensorDataset(torch.randn(16, WIDTH, dtype=torch.float64)), 8))
    trainer.save_checkpoint(path)


def test_states_of_an_optimizer_are_numbered_as_those_of_an_unchanged_network(tmp_path: Path) -> None:
    run_on_ranks(1, sandwiched, PLAIN, tmp_path / "one.ckpt", init=False)
    run_on_ranks(2, sandwiched, Layout(world=2, pp=2, microbatches=2), tmp_path / "two.ckpt", init=False)
    one, two = (torch.load(tmp_path / name, weights_only=True) for name in ("one.ckpt", "two.ckpt"))
    for key in ("state_dict", "optimizer_states"):
        assert same(two[key], one[key], key) == []


class Counting(FileIO):
    """A plugin of the user's that counts what it writes and removes."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.removed: list[str] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self.written.append(Path(path).name)
        super().save_checkpoint(checkpoint, path, storage_options)

    def remove_checkpoint(self, path: Any) -> None:
        self.removed.append(Path(path).name)
        super().remove_checkpoint(path)


def test_the_plugin_that_writes_a_file_removes_it(tmp_path: Path) -> None:
    io = Counting()
    strategy = MegatronStrategy(checkpoint=CheckpointConfig(kind="file"), checkpoint_io=io)
    best = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=1, monitor="epoch", mode="max")
    options: dict[str, Any] = {"strategy": strategy, "callbacks": [best], "enable_checkpointing": True}
    make_trainer(Layout(), max_epochs=2, limit_val_batches=0, **options).fit(Small(), Data())
    assert io.written == ["epoch=0.ckpt", "epoch=1.ckpt"] and io.removed == ["epoch=0.ckpt"]
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=1.ckpt"]
