"""A run saved on one layout goes on, on another or on one device, to the weights of a run without a break."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_megatron.checkpoint import is_checkpoint
from lightning_megatron.models import GPTConfig, GPTModel
from tests.harness.ranks import run_on_ranks
from tests.trainer.fits import Parts, parts_apart, weights
from tests.trainer.layouts import Layout, make_trainer, replica_of

# Dropout, because its masks must go on too; a vocabulary that two ranks share unevenly.
CONFIG = GPTConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=2,
    max_sequence_length=8,
    vocab_size=37,
    init_std=0.2,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(world=2, tp=2, sp=True),
    "pp2": Layout(world=2, pp=2, microbatches=2),
    "dp2": Layout(world=2),
    "pp2 vp2": Layout(world=2, pp=2, vp=2, microbatches=2),
    "pp2 zb_v": Layout(world=2, pp=2, vp=2, schedule="zb_v", microbatches=2),
}
# Adam divides by the root of a square: what differs by rounding at first is some orders larger after eight steps.
TOLERANCE = 1e-8
BATCH, NUM_BATCHES = 4, 4


@dataclass(frozen=True)
class Note:
    """A hyper-parameter that is not a number."""

    text: str
    sizes: tuple[int, ...]


class Language(L.LightningModule):
    def __init__(self, rate: float = 0.01, note: Note = Note("said", (1, 2))) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model: GPTModel | None = None
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.loaded: dict[str, Any] = {}

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPTModel(CONFIG, seed=2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(batch[0], labels=batch[1])
        self.log("loss", loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        assert self.model is not None
        self.log("test_loss", self.model(batch[0], labels=batch[1]))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen += 1

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=self.hparams["rate"]
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["of the user"] = {"a list": [1, 2.5, "three"]}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")}


class Resumable:
    """A loader that goes on where its state says, as one must for a save within an epoch."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        self.batches = batches
        self.next = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # A reader that knows the length does not ask for the end.
        self.next %= len(self.batches)
        while self.next < len(self.batches):
            self.next += 1
            yield self.batches[self.next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next % len(self.batches)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Texts(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        rank, size = replica_of(self.trainer)
        tokens = torch.randint(0, 37, (BATCH * NUM_BATCHES, 8), generator=torch.Generator().manual_seed(0))
        share = BATCH // size
        indices = [b * BATCH + rank * share + i for b in range(NUM_BATCHES) for i in range(share)]
        own = tokens[indices]
        return Resumable([(own[i : i + share, :-1], own[i : i + share, 1:]) for i in range(0, len(own), share)])

    def test_dataloader(self) -> Any:
        return self.train_dataloader()


def saver(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{epoch}-{step}", save_top_k=-1, every_n_train_steps=3)


def uninterrupted(layout: Layout, folder: Path) -> dict[str, Any]:
    """Eight steps in two epochs; saves after the third, within the first epoch, and after the sixth."""
    module = Language()
    trainer = make_trainer(layout, callbacks=[saver(folder)], enable_checkpointing=True)
    trainer.fit(module, Texts())
    # What is saved by hand, with weights alone.
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    return {"weights": weights(module), "loss": float(trainer.callback_metrics["loss"])}


def resumed(layout: Layout, path: Path) -> dict[str, Any]:
    module = Language()
    trainer = make_trainer(layout, callbacks=[saver(path.parent / "again")], enable_checkpointing=True)
    trainer.fit(module, Texts(), ckpt_path=path)
    return {
        "weights": weights(module),
        "loss": float(trainer.callback_metrics["loss"]),
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "steps": trainer.global_step,
        "seen": int(module.seen),
        "loaded": module.loaded,
        "again": sorted(p.name for p in path.parent.glob("again/*")),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run under every layout; each saved in a folder of its name."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def full(saved: Path) -> dict[str, Any]:
    """The run without a break on one device."""
    [found] = run_on_ranks(1, uninterrupted, LAYOUTS["one"], saved / "one", init=False)
    return found


@pytest.fixture(scope="module")
def under_tp2(saved: Path, full: dict[str, Any]) -> Path:
    for found in run_on_ranks(2, uninterrupted, LAYOUTS["tp2"], saved / "tp2", init=False):
        assert parts_apart(found["weights"], full["weights"]) < TOLERANCE
    names = sorted(path.name for path in (saved / "tp2").iterdir())
    assert names == ["epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt", "weights.ckpt"]
    assert all(is_checkpoint(saved / "tp2" / name) for name in names)
    return saved / "tp2"


@pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning")
@pytest.mark.matrix
@pytest.mark.parametrize("step", [3, 6])
@pytest.mark.parametrize("layout", ["pp2", "dp2", "one", "pp2 vp2", "pp2 zb_v"])
def test_a_run_goes_on_under_another_layout(
    layout: str, step: int, under_tp2: Path, full: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "copy.ckpt"
    path.symlink_to(under_tp2 / f"epoch={step // 4}-step={step}.ckpt")
    for found in run_on_ranks(LAYOUTS[layout].world, resumed, LAYOUTS[layout], path, init=False):
        assert parts_apart(found["weights"], full["weights"]) < TOLERANCE
        assert found["loss"] == pytest.approx(full["loss"], abs=TOLERANCE)
        assert found["steps"] == found["seen"] == 8
        assert found["rate"] == pytest.approx(0.01 * (1 + torch.cos(torch.tensor(torch.pi * 0.8)).item()) / 2, rel=1e-6)
        assert found["loaded"]["of the user"] == {"a list": [1, 2.5, "three"]}
        assert found["loaded"]["hyper_parameters"] == {"rate": 0.01, "note": {"text": "said", "sizes": (1, 2)}}
        assert ("epoch=1-step=6.ckpt" in found["again"]) == (step == 3)


def test_a_break_would_be_noticed(full: dict[str, Any], under_tp2: Path) -> None:
    """Resuming with fresh moments ends elsewhere, by far more than the tolerance."""
    for found in run_on_ranks(2, fitted_from_weights, LAYOUTS["pp2"], under_tp2 / "weights.ckpt", init=False):
        assert parts_apart(found["start"], full["weights"]) < TOLERANCE
        assert parts_apart(found["after"], full["weights"]) > 1e4 * TOLERANCE


def fitted_from_weights(layout: Layout, path: Path) -> dict[str, Any]:
    module = Language()
    trainer = make_trainer(layout, max_epochs=1)
    [tested] = trainer.test(module, Texts(), ckpt_path=path, verbose=False)
    start = weights(module)
    trainer.fit(module, Texts())
    return {"start": start, "after": weights(module), "tested": tested}


class Renamed(Language):
    """Reads checkpoints of an older version of itself, and scales a weight on the way."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        if "model.final_norm.weight" in state:  # a stage has its own names
            state["model.final_norm.weight"] = state["model.final_norm.weight"] * 3
        super().on_load_checkpoint(checkpoint)


class Grown(Language):
    """Has a layer that the checkpoint lacks."""

    def __init__(self, strict: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.new = torch.nn.Linear(2, 2)
        self.strict_loading = strict


def loads(layout: Layout, path: Path) -> dict[str, Any]:
    """Ways to load a checkpoint other than to go on with it."""
    renamed, grown = Renamed(), Grown(strict=False)
    fresh = grown.new.weight.detach().double().clone()
    make_trainer(layout).test(renamed, Texts(), ckpt_path=path, verbose=False)
    make_trainer(layout).test(grown, Texts(), ckpt_path=path, verbose=False)
    refused = ""
    try:
        make_trainer(layout).test(Grown(strict=True), Texts(), ckpt_path=path, verbose=False)
    except (RuntimeError, ValueError) as error:
        refused = str(error)
    kept = bool(torch.equal(grown.new.weight.detach(), fresh))
    grown_weights = {n: part for n, part in weights(grown).items() if not n.startswith("new.")}
    return {"renamed": weights(renamed), "grown": grown_weights, "kept": kept, "refused": refused}


@pytest.mark.filterwarnings("ignore:checkpoint .* loaded with strict_loading=False:UserWarning")
@pytest.mark.parametrize("layout", ["pp2", "one"])
def test_hooks_and_strictness_are_honoured(layout: str, under_tp2: Path, full: dict[str, Any]) -> None:
    path = under_tp2 / "weights.ckpt"
    wanted = dict(full["weights"])
    for found in run_on_ranks(LAYOUTS[layout].world, loads, LAYOUTS[layout], path, init=False):
        assert found["kept"] and parts_apart(found["grown"], wanted) < TOLERANCE
        assert "new.weight" in found["refused"] and "new.bias" in found["refused"]
        norm = wanted["model.final_norm.weight"]
        scaled = {**wanted, "model.final_norm.weight": (norm[0], norm[1] * 3)}
        assert parts_apart(found["renamed"], scaled) < TOLERANCE


def saved_on_one_device(path: Path, weights_only: bool) -> Parts:
    """As Lightning's own strategy writes it: one file."""
    module = Language()
    trainer = make_trainer(Layout(is_plain=True), max_epochs=1)
    trainer.fit(module, Texts())
    trainer.save_checkpoint(path, weights_only=weights_only)
    assert path.is_file()
    return weights(module)


def weights_of_file(layout: Layout, path: Path) -> Parts:
    module = Language()
    # The file holds a dataclass among its hyper-parameters, and torch reads nothing but plain data by default.
    make_trainer(layout).test(module, Texts(), ckpt_path=path, verbose=False, weights_only=False)
    return weights(module)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_weights_of_a_single_file_load_on_every_layout(layout: str, tmp_path: Path) -> None:
    [wanted] = run_on_ranks(1, saved_on_one_device, tmp_path / "file.ckpt", True, init=False)
    for parts in run_on_ranks(2, weights_of_file, LAYOUTS[layout], tmp_path / "file.ckpt", init=False):
        assert parts_apart(parts, wanted) == 0


def resumed_message(layout: Layout, path: Path) -> str:
    try:
        make_trainer(layout).fit(Language(), Texts(), ckpt_path=path, weights_only=False)
    except ValueError as error:
        return str(error)
    return "not refused"


def test_what_cannot_be_resumed_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "empty.ckpt").mkdir()
    (tmp_path / "many" / "step=4.ckpt").mkdir(parents=True)
    (tmp_path / "text.ckpt").write_text("hello")
    for name, what in (
        ("empty.ckpt", "is an empty directory"),
        ("none.ckpt", "does not exist"),
        ("many", "is a folder with step=4.ckpt in it"),
        ("text.ckpt", "text.ckpt cannot be read as a checkpoint: it is no file that torch.save wrote"),
    ):
        [shown] = run_on_ranks(1, resumed_message, LAYOUTS["one"], tmp_path / name, init=False)
        assert what in shown
