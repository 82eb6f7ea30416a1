"""What any layout saves, every other loads, saves again bit for bit, and goes on from to the same losses.

Each layout saves once; then the ranks of each layout are started once and load what others have saved, one after
another: what all have saved under `pytest --whole`, else what the next one of the list has.
"""

import os
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron.checkpoint import load, read_entries, read_meta
from lightning_megatron.mesh import Mesh
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.optim.config import OptimizerConfig
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import WHOLE, every_nth
from tests.trainer.layouts import Layout, make_trainer, replica_of

# Small buckets, so that a rank's share begins and ends within parameters.
ZERO = OptimizerConfig(kind="distributed", bucket_size=700)
ZERO_3 = OptimizerConfig(kind="distributed_parameters", bucket_size=700, gather_for_hooks=False)
LAYOUTS = {
    "one": Layout(),
    "dp2": Layout(world=2),
    "tp2 sp": Layout(world=2, tp=2, sp=True),
    "pp2": Layout(world=2, pp=2, microbatches=2),
    "pp2 vp2": Layout(world=2, pp=2, vp=2, microbatches=2),
    "pp2 zb_v": Layout(world=2, pp=2, vp=2, schedule="zb_v", microbatches=2),
    "tp2 pp2": Layout(world=4, tp=2, pp=2, microbatches=2),
    "zero dp2": Layout(world=2, optimizer=ZERO),
    "zero dp2 tp2": Layout(world=4, tp=2, sp=True, optimizer=ZERO),
    "zero dp2 pp2": Layout(world=4, pp=2, microbatches=2, optimizer=ZERO),
    "zero 3 dp2 pp2": Layout(world=4, pp=2, microbatches=2, optimizer=ZERO_3),
    "host dp2": Layout(world=2, optimizer=OptimizerConfig(cpu_offload=True, bucket_size=700, offload_fraction=0.5)),
    "host zero 3 dp2": Layout(world=2, optimizer=replace(ZERO_3, cpu_offload=True)),
}
# Dropout, because its masks must go on too; a vocabulary that two ranks pad and one does not.
CONFIG = GPTConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=2,
    max_sequence_length=8,
    vocab_size=37,
    init_std=0.2,
    hidden_dropout=0.1,
    tie_embeddings=True,
)
BATCH, SAVED_AFTER, GO_ON = 4, 2, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, by which layouts, and how far losses may be apart."""

    precision: str
    config: GPTConfig
    layouts: tuple[str, ...]
    tolerance: float
    """By which the losses of the steps after the break may differ: sums in other orders."""
    itemsize: int
    """Bytes of a number of the weights that are saved: of the master weights where there are any."""

    def sources_of(self, target: str) -> tuple[str, ...]:
        """The layouts of which `target` loads what they saved: all of them, or the next one in a sample."""
        if WHOLE in os.environ:
            return self.layouts
        return (self.layouts[(self.layouts.index(target) + 1) % len(self.layouts)],)


CASES = {
    "float64, tied": Case(
        precision="64-true", config=CONFIG, layouts=tuple(every_nth(LAYOUTS, 2)), tolerance=1e-10, itemsize=8
    ),
    # Products are rounded to 8 bits; the weights, in float32, are not.
    "bf16-mixed, untied": Case(
        precision="bf16-mixed",
        config=replace(CONFIG, tie_embeddings=False),
        layouts=("dp2", "pp2", "pp2 zb_v", "zero 3 dp2 pp2", "zero dp2 pp2", "host dp2", "host zero 3 dp2"),
        tolerance=0.05,
        itemsize=4,
    ),
    "float32, untied": Case(
        precision="32-true",
        config=replace(CONFIG, tie_embeddings=False),
        layouts=("dp2", "tp2 pp2", "zero dp2 tp2"),
        tolerance=1e-4,
        itemsize=4,
    ),
}


class Language(L.LightningModule):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.model: GPTModel | None = None
        self.losses: list[float] = []
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPTModel(self.config, seed=2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(batch[0], labels=batch[1])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += 1
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Texts(L.LightningDataModule):
    """The same batch at every step, so that it does not matter where a loader is; each dp rank has its rows."""

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        rank, size = replica_of(self.trainer)
        tokens = torch.randint(0, 37, (BATCH, 9), generator=torch.Generator().manual_seed(0))
        own = tokens[rank * BATCH // size : (rank + 1) * BATCH // size]
        # An epoch ends at the save: within one, loaders cut by hand cannot be recut for other dp sizes.
        rows = own.repeat(SAVED_AFTER, 1)
        return DataLoader(TensorDataset(rows[:, :-1], rows[:, 1:]), batch_size=len(own))


class Saves(L.Callback):
    """Saves when the fit begins, or after a step."""

    def __init__(self, path: Path, after: int | None) -> None:
        self.path, self.after = path, after

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.after is None:
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.after:
            trainer.save_checkpoint(self.path)


def fit(layout: Layout, case: Case, saves: Saves, path: Path | None) -> list[float]:
    """The loss of each step."""
    module, num_steps = Language(case.config), SAVED_AFTER + GO_ON
    trainer = make_trainer(layout, precision=case.precision, callbacks=[saves], max_steps=num_steps, max_epochs=-1)
    trainer.fit(module, Texts(), ckpt_path=path)
    return module.losses


def saved_once(name: str, case: Case, folder: Path) -> list[float]:
    return fit(LAYOUTS[name], case, Saves(folder / f"{name}.ckpt", SAVED_AFTER), None)


def loaded_each(name: str, case: Case, folder: Path) -> dict[str, list[float]]:
    """The losses of the steps after the break, by which layout had saved; each saved again at once."""
    losses = {}
    for source in case.sources_of(name):
        saves = Saves(folder / name / f"{source}.ckpt", None)
        losses[source] = fit(LAYOUTS[name], case, saves, folder / f"{source}.ckpt")
    return losses


@dataclass
class Content:
    """A checkpoint as plain tensors, and what else must come back."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)


def content_of(path: Path) -> Content:
    tensors = {name: torch.zeros(entry.shape, dtype=entry.dtype) for name, entry in read_entries(path).items()}
    load(path, tensors, world=Mesh.single().world)
    found = read_meta(path)
    # Ranks meet names in another order: those of a stage first.
    groups = [{**group, "params": set(group["params"])} for group in found["optimizers"][0]["groups"]]
    meta = {key: found[key] for key in ("global_step", "lr_schedulers")}
    return Content(tensors, meta | {"groups": groups, "state": found["optimizers"][0]["state"]})


def differences(one: Content, other: Content) -> list[str]:
    """What is not the same in both, bit by bit."""
    found = sorted(one.tensors.keys() ^ other.tensors.keys())
    for name in one.tensors.keys() & other.tensors.keys():
        mine, theirs = one.tensors[name], other.tensors[name]
        if mine.dtype != theirs.dtype or not torch.equal(mine, theirs):
            found.append(name)
    return found + [key for key in one.meta if one.meta[key] != other.meta[key]]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before:UserWarning")
# The layouts of the first two are all that there are.
@pytest.mark.parametrize("title", list(CASES) if WHOLE in os.environ else list(CASES)[:2])
def test_every_layout_goes_on_with_what_every_other_saved(title: str, tmp_path: Path) -> None:
    case = CASES[title]
    full: dict[str, list[float]] = {}
    for name in case.layouts:
        by_rank = run_on_ranks(LAYOUTS[name].world, saved_once, name, case, tmp_path, init=False, timeout=240)
        full[name] = by_rank[0]
    contents = {name: content_of(tmp_path / f"{name}.ckpt") for name in case.layouts}
    require_bite(case, contents, full)
    faults = []
    for target in case.layouts:
        world = LAYOUTS[target].world
        for losses in run_on_ranks(world, loaded_each, target, case, tmp_path, init=False, timeout=600):
            for source in case.sources_of(target):
                apart = [abs(a - b) for a, b in zip(losses[source], full[source][SAVED_AFTER:], strict=True)]
                if not max(apart) <= case.tolerance:
                    faults.append(f"{source} to {target}: losses are {apart} apart")
        for source in case.sources_of(target):
            again = content_of(tmp_path / target / f"{source}.ckpt")
            if differs := differences(contents[source], again):
                faults.append(f"{source} to {target}: not the same: {differs[:5]}")
    assert not faults, "\n".join(faults)


def require_bite(case: Case, contents: dict[str, Content], full: dict[str, list[float]]) -> None:
    """There is much to compare, and what is wrong would show."""
    first = contents[case.layouts[0]]
    weights = {name: tensor for name, tensor in first.tensors.items() if name.startswith("model.")}
    # Each with two moments and its number of steps, and the buffer.
    assert len(first.tensors) == 4 * len(weights) + 1 > 100
    assert all(tensor.itemsize == case.itemsize and tensor.any() for tensor in weights.values())
    assert first.tensors["model.embedding.tokens.weight"].shape == (37, 16)
    assert ("model.head.weight" in weights) != case.config.tie_embeddings
    assert [group["lr"] for group in first.meta["groups"]] == [0.01 * 0.9**SAVED_AFTER] * 2
    for name, content in contents.items():
        assert content.tensors.keys() == first.tensors.keys(), name
    for losses in full.values():
        assert len(losses) == SAVED_AFTER + GO_ON
        assert all(abs(a - b) > 4 * case.tolerance for a, b in pairwise(losses))
