"""Weights and moments saved under any optimizer configuration come back on any other bit by bit."""

from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import CheckpointConfig, MegatronStrategy
from lightning_megatron.checkpoint import Piece, pieces_of_optimizer
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.trainer.checkpointing.contents import names_of
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.trainer.layouts import Layout, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before:UserWarning")

# A vocabulary that two ranks share unevenly: one of them has padding.
CONFIG = GPTConfig(
    num_layers=2, hidden_size=16, num_attention_heads=2, max_sequence_length=8, vocab_size=37, init_std=0.2
)
ZERO = OptimizerConfig(kind="distributed", bucket_size=700)
BF16 = OptimizerConfig(kind="distributed", bucket_size=700, grad_dtype="bfloat16")
LAYOUTS = {
    "distributed dp2": Layout(world=2, optimizer=ZERO),
    "distributed dp3": Layout(world=3, optimizer=ZERO),
    "distributed dp2 tp2": Layout(world=4, tp=2, sp=True, optimizer=ZERO),
    "distributed dp2 pp2": Layout(world=4, pp=2, microbatches=2, optimizer=BF16),
    "one": Layout(),
    "tp2": Layout(world=2, tp=2),
    "pp2": Layout(world=2, pp=2, microbatches=2),
}
Parts = list[tuple[str, tuple[int, ...], Tensor]]
"""Names in the unsplit model, where a part begins in it, and the part."""


class Language(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: GPTModel | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPTModel(CONFIG, seed=2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(batch[0], labels=batch[1])
        return loss

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest}], lr=0.01)


class Factored(Language):
    """Its optimizer keeps means of rows and of columns of a matrix, and takes whole matrices alone."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.01)


class State(L.Callback):
    """What this rank's optimizer steps and keeps, when training begins and when it has ended."""

    def __init__(self) -> None:
        self.at_start: Parts = []
        self.at_end: Parts = []

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.at_start = parts(trainer)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.at_end = parts(trainer)


def parts(trainer: L.Trainer) -> Parts:
    master_slots = cast(MegatronStrategy, trainer.strategy)._master_slots
    [optimizer] = trainer.optimizers
    names = names_of(trainer.lightning_module, master_slots)
    pieces: dict[str, list[Piece]] = pieces_of_optimizer(optimizer, names)[0]
    for group in optimizer.param_groups:
        for stepped in group["params"]:
            place = names[stepped]
            if isinstance(place, str):
                pieces[place] = Piece.all_like(stepped, stepped)
            else:
                pieces[place.name] = place.pieces(stepped)
    return [(name, p.box.offsets, p.tensor.detach().clone()) for name, held in pieces.items() for p in held]


def run(
    layout: Layout,
    precision: str,
    folder: Path,
    resumes: str,
    saves: str,
    is_after: bool,
    module: type[Language] = Language,
    kind: Literal["directory", "file"] = "directory",
) -> tuple[Parts, Parts]:
    # Three batches, an epoch: from its end a checkpoint resumes on any data-parallel size, whatever the loader.
    tokens = torch.randint(0, 37, (12, 9), generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=4)
    state = State()

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if saves and not is_after and trainer.global_step == 3:
                trainer.save_checkpoint(folder / saves)

    options = {"max_steps": 4 if resumes else 3, "max_epochs": -1}
    strategy = cast(MegatronStrategy, layout.strategy())
    strategy.checkpoint = CheckpointConfig(kind=kind)
    trainer = make_trainer(layout, strategy=strategy, precision=precision, callbacks=[state, Saves()], **options)
    trainer.fit(module(), loader, ckpt_path=folder / resumes if resumes else None)
    if saves and is_after:
        trainer.save_checkpoint(folder / saves)
    return state.at_start, state.at_end


def joined(by_rank: list[Parts]) -> dict[str, Tensor]:
    """The unsplit tensors; NaN where no rank had anything."""
    ends: dict[str, tuple[int, ...]] = {}
    for name, offsets, part in (found for held in by_rank for found in held):
        own = tuple(start + size for start, size in zip(offsets, part.shape, strict=True))
        ends[name] = tuple(map(max, ends.get(name, own), own))
    full = {name: torch.full(shape, float("nan")) for name, shape in ends.items()}
    for name, offsets, part in (found for held in by_rank for found in held):
        full[name][tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part.float()
    return full


def require_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert not tensor.isnan().any() and torch.equal(found[name], tensor), name


def go(layout: str, *args: Any) -> list[tuple[Parts, Parts]]:
    chosen = LAYOUTS[layout]
    return run_on_ranks(chosen.world, run, chosen, *args, init=False)


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize(
    "saving", [("distributed dp2", False), ("distributed dp2", True), ("distributed dp2 pp2", False)]
)
def test_shards_are_resumed_by_any_layout(saving: tuple[str, bool], precision: str, tmp_path: Path) -> None:
    """Saved while the fit ran, or after it had ended."""
    first, is_after = saving
    saved = joined([ended for _, ended in go(first, precision, tmp_path, "", "saved.ckpt", is_after)])
    # Weights, two moments of each, and its number of steps.
    names = {name for name in saved if not name.startswith("optimizer")}
    assert len(saved) == 4 * len(names)
    if precision == "bf16-mixed":
        assert any(not torch.equal(saved[name], saved[name].bfloat16().float()) for name in names)
    for layout in every_nth(("one", "distributed dp3", "distributed dp2 tp2", "tp2")[is_after:], 2):
        resumed = go(layout, precision, tmp_path, "saved.ckpt", "", False)
        require_same(joined([began for began, _ in resumed]), saved)
        assert any(not torch.equal(t, saved[n]) for n, t in joined([ended for _, ended in resumed]).items())


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize("first", ["one", "tp2"])
def test_full_states_are_resumed_in_shards(first: str, precision: str, tmp_path: Path) -> None:
    saved = joined([ended for _, ended in go(first, precision, tmp_path, "", "saved.ckpt", False)])
    for layout in ("distributed dp3", "distributed dp2 tp2"):
        require_same(joined([began for began, _ in go(layout, precision, tmp_path, "saved.ckpt", "", False)]), saved)


@pytest.mark.parametrize(("first", "second"), [("distributed dp2", "tp2"), ("tp2", "distributed dp3")])
def test_states_of_another_shape_than_their_weight_are_resumed(first: str, second: str, tmp_path: Path) -> None:
    saved = joined([ended for _, ended in go(first, "32-true", tmp_path, "", "saved.ckpt", False, Factored)])
    rows = {name.rpartition(".")[0] for name in saved if name.endswith("row_var")}
    assert len(rows) == sum(name.startswith("model.") and t.dim() > 1 for name, t in saved.items())
    resumed = go(second, "32-true", tmp_path, "saved.ckpt", "", False, Factored)
    require_same(joined([began for began, _ in resumed]), saved)


@pytest.mark.parametrize(
    ("first", "precision", "seconds"),
    [
        ("distributed dp2 pp2", "bf16-mixed", ("one", "tp2", "distributed dp2")),
        ("distributed dp2", "bf16-mixed", ("pp2",)),
        ("tp2", "32-true", ("distributed dp3", "pp2")),
        ("one", "32-true", ("distributed dp2 tp2",)),
    ],
)
def test_states_in_one_file_are_resumed_by_any_layout(
    first: str, precision: str, seconds: tuple[str, ...], tmp_path: Path
) -> None:
    saved = joined([ended for _, ended in go(first, precision, tmp_path, "", "saved.ckpt", False, Language, "file")])
    assert (tmp_path / "saved.ckpt").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["saved.ckpt"]
    for second in seconds:
        resumed = go(second, precision, tmp_path, "saved.ckpt", "", False, Language, "file")
        require_same(joined([began for began, _ in resumed]), saved)
