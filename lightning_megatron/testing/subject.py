"""What is certified: a user's module, the batches that it trains on, and how it is to be trained."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl


class SubjectError(Exception):
    """The module or its data cannot be made or cannot be used; the message is for the user."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A new module with its data, in the process that is to train it."""

    module: pl.LightningModule
    data: pl.LightningDataModule | Iterable[Any] | None = None
    """A data module, or batches; None: the module's own `train_dataloader`."""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Options of the Trainer that change the numbers, such as `gradient_clip_val`."""
    change_batch: Callable[[Any], Any] | None = None
    """What is done to each batch that is read; None: nothing."""
    notes: tuple[str, ...] = ()
    """What a reader of the certificate must know about the module, one sentence each."""


MakeSubject = Callable[[], Subject]
"""It is called in every process, several times, and must make the same each time."""


@dataclass(frozen=True, kw_only=True)
class FromFunctions:
    """The subject of two functions, which every process imports by their names."""

    make_module: Callable[[], pl.LightningModule]
    make_batches: Callable[[], pl.LightningDataModule | Iterable[Any]] | None
    trainer: Mapping[str, Any]

    def __call__(self) -> Subject:
        data = self.make_batches() if self.make_batches is not None else None
        return Subject(module=require_module(self.make_module()), data=data, trainer=self.trainer)


def require_module(module: Any) -> pl.LightningModule:
    """The module. Raises SubjectError for anything that is no LightningModule."""
    if not isinstance(module, pl.LightningModule):
        raise SubjectError(f"a LightningModule is needed, and what was made is a {type(module).__name__}")
    return module
