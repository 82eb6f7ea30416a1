"""Runs that stop and runs that go on from their checkpoints: all that they did, batch by batch."""

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from lightning_megatron.trainer.resume import rng_state
from lightning_megatron.trainer.step.batch_checks import batch_digest
from tests.harness.ranks import run_on_ranks
from tests.trainer.fits import Parts, weights
from tests.trainer.layouts import Layout, make_trainer

NUM_ROWS, WIDTH = 26, 6


class Rows(Dataset[tuple[int, Tensor]]):
    """Rows that say which they are."""

    def __init__(self, num_rows: int = NUM_ROWS, first: int = 0) -> None:
        self.inputs = torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        self.first = first
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        self.loaded.append(index)
        return self.first + index, self.inputs[index]


class NoisyRows(Rows):
    """Adds noise of the default generators where the row is loaded."""

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        which, row = super().__getitem__(index)
        return which, row + torch.rand(()) + random.random() + np.random.rand()


class Stream(IterableDataset[tuple[int, Tensor]]):
    """Rows one after the other, without a length; every worker takes its part."""

    def __init__(self, num_rows: int = NUM_ROWS) -> None:
        self.rows = Rows(num_rows)

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        step, first = (1, 0) if worker is None else (worker.num_workers, worker.id)
        for index in range(first, len(self.rows), step):
            which, row = self.rows[index]
            yield which, row + torch.rand(())


class StatefulStream(Stream):
    """The same; it can tell where it is."""

    def __init__(self, num_rows: int = NUM_ROWS) -> None:
        super().__init__(num_rows)
        self.next = 0

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        while self.next < len(self.rows):
            self.next += 1
            which, row = self.rows[self.next - 1]
            yield which, row + torch.rand(())
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Pairs(BatchSampler):
    """A batch sampler of a user's: batches of neighbours, in an order by Python's generator."""

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(0, len(self.sampler) - 1, 2))  # type: ignore[arg-type]
        random.shuffle(order)
        for first in order:
            yield [first, first + 1]

    def __len__(self) -> int:
        return len(self.sampler) // 2  # type: ignore[arg-type]


class StatefulLoader:
    """A loader of a user's that knows its position; `rank` is part of its state."""

    def __init__(self, batch_size: int, rank: int | None) -> None:
        self.rows = Rows(24)
        self.batch_size = batch_size
        self.rank = rank
        self.next = 0

    def __len__(self) -> int:
        return 24 // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        self.next %= len(self)
        while self.next < len(self):
            self.next += 1
            chosen = range((self.next - 1) * self.batch_size, self.next * self.batch_size)
            yield torch.tensor(chosen), torch.stack([self.rows[i][1] for i in chosen])

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "rank": self.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == self.rank
        self.next = state["next"]


Loaders = Callable[[int], Any]
"""Training loaders for a number of samples in a dp rank's batch."""

LOADERS: dict[str, Loaders] = {
    "shuffled": lambda share: DataLoader(Rows(), share, shuffle=True),
    "in order": lambda share: DataLoader(Rows(), share),
    "noisy": lambda share: DataLoader(NoisyRows(), share, shuffle=True),
    "workers": lambda share: DataLoader(Rows(), share, shuffle=True, num_workers=2, multiprocessing_context="fork"),
    "noisy workers": lambda share: DataLoader(
        NoisyRows(), share, shuffle=True, num_workers=2, multiprocessing_context="fork"
    ),
    "persistent workers": lambda share: DataLoader(
        Rows(), share, shuffle=True, num_workers=1, multiprocessing_context="fork", persistent_workers=True
    ),
    "own generator": lambda share: DataLoader(
        Rows(),
        share,
        shuffle=True,
        generator=torch.Generator().manual_seed(8),
        num_workers=1,
        multiprocessing_context="fork",
    ),
    "own generator, no workers": lambda share: DataLoader(
        Rows(), share, shuffle=True, generator=torch.Generator().manual_seed(8)
    ),
    "batch sampler": lambda share: DataLoader(Rows(12), batch_sampler=Pairs(range(12), 2, False)),
    "no batches": lambda share: DataLoader(Rows(8), batch_size=None, shuffle=True),
    "several": lambda share: {
        "long": DataLoader(Rows(), share, shuffle=True),
        "short": DataLoader(Rows(11, first=100), 2, shuffle=True, num_workers=1, multiprocessing_context="fork"),
    },
    "combined": lambda share: CombinedLoader(
        [DataLoader(Rows(), share, shuffle=True), DataLoader(Rows(9, first=100), 2, shuffle=True)], "max_size"
    ),
    "even": lambda share: DataLoader(Rows(24), share, shuffle=True),
    "even, in order": lambda share: DataLoader(Rows(24), share),
    "own state": lambda share: StatefulLoader(share, None),
    "own states": lambda share: StatefulLoader(share, int(os.environ.get("RANK", 0))),
    "stream": lambda share: DataLoader(Stream(), share),
    "stream of workers": lambda share: DataLoader(Stream(), share, num_workers=2, multiprocessing_context="fork"),
    "stateful stream": lambda share: DataLoader(StatefulStream(), share),
}


class Learner(L.LightningModule):
    """Draws from every default generator, and asks for the number of steps before its loader has its state."""

    def __init__(self, *, draws: bool = True, asks_for_steps: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.draws, self.asks_for_steps = draws, asks_for_steps
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 8), nn.Dropout(0.3 * draws), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        parts = [part for part in parts if part is not None] if isinstance(parts[0], (list, tuple)) else [parts]
        rows = torch.cat([part[1].reshape(-1, WIDTH) for part in parts])
        noise = torch.rand(()) + random.random() + np.random.rand() if self.draws else 0.0
        loss = functional.mse_loss(self.net(rows).squeeze(1), rows.sum(1)) * (1 + 0.1 * noise)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[1]).mean() + torch.rand(()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.03)
        steps = int(self.trainer.estimated_stepping_batches) if self.asks_for_steps else 12
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@dataclass
class Record:
    """What a run did on one rank."""

    batches: dict[int, tuple[list[int], float]] = field(default_factory=dict)
    """By their number in the whole run: samples and loss."""
    rates: dict[int, float] = field(default_factory=dict)
    weights: Parts = field(default_factory=dict)
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    drawn: str = ""
    """Where the generators ended."""
    steps: int = 0
    logged: int = 0
    """Steps as loggers count them."""
    loaded: list[int] = field(default_factory=list)
    """Rows that were read from the dataset, where this process read them."""


class Recorder(L.Callback):
    """Writes a Record, and saves at the given points."""

    def __init__(self, folder: Path | None = None, points: frozenset[str] = frozenset()) -> None:
        self.record = Record()
        self.folder, self.points = folder, points

    def _save(self, trainer: L.Trainer, point: str) -> None:
        if self.folder is not None and point in self.points:
            trainer.save_checkpoint(self.folder / f"{point}.ckpt")

    def on_sanity_check_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._save(trainer, "sanity")

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._save(trainer, "start")

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._save(trainer, f"begin {trainer.current_epoch}")

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self._save(trainer, f"taken {trainer.fit_loop.total_batch_idx}")

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        number = trainer.fit_loop.total_batch_idx
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        parts = parts if isinstance(parts[0], (list, tuple)) else [parts]
        rows = [int(row) for part in parts if part is not None for row in torch.as_tensor(part[0]).flatten()]
        self.record.batches[number] = (rows, float(outputs["loss"]))
        self.record.rates[number] = trainer.optimizers[0].param_groups[0]["lr"]
        self._save(trainer, f"batch {number}")

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._save(trainer, f"validation {trainer.fit_loop.total_batch_idx}")

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._save(trainer, f"epoch {trainer.current_epoch}")

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        record = self.record
        record.weights = weights(module)
        state = trainer.optimizers[0].state_dict()["state"]
        record.optimizer = {f"{i} {key}": state[i][key].clone() for i in sorted(state) for key in sorted(state[i])}
        record.drawn = batch_digest(rng_state.states())
        record.steps = trainer.global_step
        record.logged = trainer.fit_loop.epoch_loop._batches_that_stepped


def run(
    layout: Layout,
    data: str,
    folder: Path | None = None,
    points: frozenset[str] = frozenset(),
    *,
    resumed_from: Path | None = None,
    seed: int = 1,
    batch: int = 4,
    draws: bool = True,
    asks_for_steps: bool = True,
    validates: bool = False,
    **options: Any,
) -> Record:
    """Two epochs of training, from a checkpoint where there is one."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    recorder = Recorder(folder, points)
    options = {"use_distributed_sampler": True, "limit_val_batches": 1.0 if validates else 0} | options
    trainer = make_trainer(layout, callbacks=[recorder], **options)
    loaders: list[Any] = []

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            loaders.append(LOADERS[data](batch // layout.dp))
            return loaders[-1]

        def val_dataloader(self) -> Any:
            return DataLoader(Rows(6), 1) if validates else []

    trainer.fit(Learner(draws=draws, asks_for_steps=asks_for_steps), datamodule=Data(), ckpt_path=resumed_from)
    if isinstance(loaders[-1], DataLoader) and isinstance(loaders[-1].dataset, Rows):
        recorder.record.loaded = loaders[-1].dataset.loaded
    return recorder.record


def runs(layout: Layout, data: str, **options: Any) -> list[Record]:
    """The records of all ranks of a run."""
    return run_on_ranks(layout.world, run_with, layout, data, options, init=False)


def run_with(layout: Layout, data: str, options: dict[str, Any]) -> Record:
    return run(layout, data, **options)


def difference(resumed: Record, full: Record) -> str:
    """In which way a resumed run differs from the rest of the run that was not interrupted; empty where in none."""
    if not resumed.batches:
        return "" if resumed.steps == full.steps else "it trained on nothing"
    rest = {number: batch for number, batch in full.batches.items() if number >= min(resumed.batches)}
    if resumed.batches.keys() != rest.keys():
        return f"batches {sorted(resumed.batches)} and not {sorted(rest)}"
    for number, (rows, loss) in rest.items():
        if resumed.batches[number][0] != rows:
            return f"batch {number}: samples {resumed.batches[number][0]} and not {rows}"
        if resumed.batches[number][1] != loss:
            return f"batch {number}: loss {resumed.batches[number][1]} and not {loss}"
        if resumed.rates[number] != full.rates[number]:
            return f"batch {number}: learning rate"
    if any(not torch.equal(resumed.weights[name][1], part) for name, (_, part) in full.weights.items()):
        return "weights"
    if resumed.optimizer.keys() != full.optimizer.keys():
        return f"optimizer has {list(resumed.optimizer)} and not {list(full.optimizer)}"
    if apart := [key for key, value in full.optimizer.items() if not torch.equal(resumed.optimizer[key], value)]:
        return f"optimizer: {apart}"
    if (resumed.steps, resumed.logged) != (full.steps, full.logged):
        return f"{resumed.steps} steps, {resumed.logged} for loggers, and not {full.steps}, {full.logged}"
    return "" if resumed.drawn == full.drawn else "generators"
