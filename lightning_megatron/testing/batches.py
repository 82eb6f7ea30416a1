"""Global batches of a user's data, and the share of a data-parallel rank.

Each is made once, in one process, and read by all: data that is shuffled or augmented at random is the same then.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_megatron.pipeline import microbatches
from lightning_megatron.pipeline.ragged import Ragged
from lightning_megatron.testing.subject import Subject, SubjectError


class _Listed(Dataset[Any]):
    """Whole batches, in order."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]


def _as_it_is(batch: Any) -> Any:
    return batch


def loader_of(batches: Sequence[Any], *, rank: int = 0, size: int = 1) -> DataLoader[Any]:
    """A loader of one data-parallel rank's share of each global batch."""
    shares = [microbatches.split(batch, size)[rank] for batch in batches]
    return DataLoader(_Listed(shares), batch_size=None, collate_fn=_as_it_is)


def read_global_batches(
    subject: Subject, trainer: pl.Trainer, *, number: int, num_validated: int, rows: int
) -> tuple[list[Any], list[list[Any]]]:
    """The first global batches of the training data and of each loader of the validation data.

    Each has `rows` rows or, where it has no rows, is as it is: small batches are joined and large ones divided. A
    subject without validation data is validated on its training data, and one without a `validation_step` on none.
    Raises SubjectError where there are too few of the training.
    """
    batches = _first_batches(_loader(subject, trainer), subject, number=number, rows=rows)
    if len(batches) < number:
        raise SubjectError(
            f"the data ends after {len(batches)} global batches of {rows} rows, and {number} are needed; give more "
            "data, or ask for fewer steps (steps, --steps) or rows (rows, --rows)"
        )
    if not is_overridden("validation_step", subject.module):
        return batches, []
    found = [
        _first_batches(one, subject, number=num_validated, rows=rows) for one in _validation_loaders(subject, trainer)
    ]
    return batches, found if found and all(found) else [batches[:num_validated]]


def first_row(subject: Subject, trainer: pl.Trainer) -> Any:
    """The first row of the subject's data as a batch; its first batch where that has no rows.

    Raises SubjectError where there is none.
    """
    found = _first_batches(_loader(subject, trainer), subject, number=1, rows=1)
    if not found:
        raise SubjectError("the data has no batch; give some (--data)")
    return found[0]


def _first_batches(loader: Iterable[Any], subject: Subject, *, number: int, rows: int) -> list[Any]:
    """The first global batches of a loader, at most so many."""
    loader = iter(loader)
    batches: list[Any] = []
    while len(batches) < number:
        joined: list[Any] = []
        while not joined or ((joined_rows := _rows(joined)) is not None and joined_rows < rows):
            following = next(loader, None)
            if following is None:
                break
            joined.append(following if subject.change_batch is None else subject.change_batch(following))
        if not joined or (_rows(joined) or rows) < rows:
            break
        batches += _divided(join(joined), rows)
    return batches[:number]


def _loader(subject: Subject, trainer: pl.Trainer) -> Iterable[Any]:
    """The loader that Lightning would train from."""
    module, data = subject.module, subject.data
    module.trainer = trainer
    if data is None and not is_overridden("train_dataloader", module):
        raise SubjectError(
            f"{type(module).__name__} has no train_dataloader, and no data is given; name some "
            "(--data module.py:MyData, make_batches=...)"
        )
    if data is None or isinstance(data, pl.LightningDataModule):
        loader: Any = _set_up(module if data is None else data, trainer).train_dataloader()
    else:
        loader = data
    if isinstance(loader, Mapping) or not isinstance(loader, Iterable):
        raise SubjectError(f"the training data must be one loader of batches, and is a {type(loader).__name__}")
    return loader


def _validation_loaders(subject: Subject, trainer: pl.Trainer) -> list[Any]:
    """The loaders that Lightning would validate with."""
    module, data = subject.module, subject.data
    owners: list[Any] = [data] if isinstance(data, pl.LightningDataModule) else []
    for owner in (*owners, module):
        if is_overridden("val_dataloader", owner):
            is_set_up = owner is data or data is None
            return CombinedLoader((owner if is_set_up else _set_up(owner, trainer)).val_dataloader()).flattened
    return []


def _set_up(hooks: Any, trainer: pl.Trainer) -> Any:
    """A module or data module, ready to give its loaders."""
    hooks.trainer = trainer
    hooks.prepare_data()
    hooks.setup("fit")
    return hooks


def _rows(batches: Sequence[Any]) -> int | None:
    """Rows of several batches; None where they have none."""
    try:
        counts = [microbatches.num_rows(batch) for batch in batches]
    except ValueError:
        return None
    return sum(counts) or None


def _divided(batch: Any, rows: int) -> list[Any]:
    """Batches of so many rows from a larger one, without what is left over; a batch without rows as it is."""
    there = _rows([batch])
    if there is None or there <= rows:
        return [batch]
    return [microbatches.narrowed(batch, first, rows) for first in range(0, there - rows + 1, rows)]


def join(batches: Sequence[Any]) -> Any:
    """One batch of the rows of several: tensors are joined along dim 0, lists and Raggeds likewise.

    Raises SubjectError where shapes differ.
    """
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    try:
        if isinstance(first, Tensor):
            return torch.cat(list(batches)) if first.dim() else first
        if isinstance(first, Ragged):
            return Ragged(
                torch.cat([one.values for one in batches]), [count for one in batches for count in one.counts]
            )
        if isinstance(first, Mapping):
            return type(first)({key: join([one[key] for one in batches]) for key in first})  # type: ignore[call-arg]
        if isinstance(first, tuple):
            parts = [join(list(values)) for values in zip(*batches, strict=True)]
            return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
        if isinstance(first, list) and any(isinstance(value, Tensor) for value in first):
            return [join(list(values)) for values in zip(*batches, strict=True)]
        if isinstance(first, list):
            return [value for one in batches for value in one]
        if is_dataclass(first) and not isinstance(first, type):
            joined = {field.name: join([getattr(one, field.name) for one in batches]) for field in fields(first)}
            return type(first)(**joined)
    except (RuntimeError, ValueError, TypeError) as error:
        raise SubjectError(
            f"batches of the data cannot be joined to one of more rows ({error}); give a loader with a larger "
            "batch_size, or fewer rows (rows, --rows)"
        ) from error
    return first
