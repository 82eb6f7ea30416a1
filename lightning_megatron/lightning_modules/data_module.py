"""`ParallelDataModule`: prepared samples as global batches that every data-parallel rank shares and a run resumes.

One process prepares; all processes then map the same files. Each data-parallel rank takes its part of every global
batch, whose samples depend on the seed and the global batch size alone, and a resumed run goes on after the last sample
that was trained on, on any layout.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.data import BatchRamp, ShuffledEpochs, collate_tokens
from lightning_megatron.data.collate import Sample
from lightning_megatron.lightning_modules.loaders import (
    Collate,
    ResumableLoader,
    evaluation_loader,
    infinite_loader,
    training_loader,
)
from lightning_megatron.lightning_modules.stream_loader import StreamLoader
from lightning_megatron.rules.limits import MOST_PROCESSES, limit_faults
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.trainer.setup.replica import Replica

HOST_ENTRIES = ("segments", "encoder_segments", "decoder_segments", "padding_mask", "encoder_padding_mask")
"""Entries of a batch that models read on the host: they stay there, or the host would wait for the device."""


@config_dataclass
class LoaderConfig:
    """Batches of a data module: their size, their order and who loads them."""

    global_batch_size: int
    """Samples of one optimizer step, over all data-parallel ranks and microbatches."""
    num_workers: int = 0
    """Worker processes of each rank's training loader; 0: the rank itself loads."""
    seed: int = 0
    """Seed of the order of samples, and of what is random in them."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """A data set and how many samples it has."""

    dataset: Dataset[Sample]
    count: int
    """Samples of one epoch."""
    summary: str = ""
    """What became of the source's documents, for the log."""
    is_ordered: bool = False
    """Whether the samples stay in their own order and are not shuffled."""
    is_new_each_epoch: bool = False
    """Whether sample i differs from epoch to epoch; in epoch e its index is e * count + i."""
    is_infinite: bool = False
    """Whether every number is a sample."""

    def part(self, first: int, last: int) -> "Samples":
        """The samples from `first` to before `last`."""
        dataset: Dataset[Sample] = Subset(self.dataset, range(first, last))
        if self.is_new_each_epoch:
            dataset = _EpochSubset(self.dataset, self.count, first, last - first)
        return replace(self, dataset=dataset, count=last - first, summary="")

    def split(self, held_out_fraction: float) -> "tuple[Samples, Samples | None]":
        """The samples without their last part, and that part."""
        num_held_out = min(round(self.count * held_out_fraction), self.count - 1)
        if num_held_out == 0:
            return self, None
        return self.part(0, self.count - num_held_out), self.part(self.count - num_held_out, self.count)

    def epochs(self, seed: int) -> ShuffledEpochs:
        """The samples repeated without an end, each epoch in its own order."""
        return ShuffledEpochs(
            self.dataset, self.count, seed=seed, is_ordered=self.is_ordered, is_new_each_epoch=self.is_new_each_epoch
        )


class _EpochSubset(Dataset[Sample]):
    """`count` samples an epoch, from number `first` on, of a data set that has `full_count` new ones in each epoch."""

    def __init__(self, dataset: Dataset[Sample], full_count: int, first: int, count: int) -> None:
        self._dataset, self._full_count, self._first, self._count = dataset, full_count, first, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Sample:
        epoch, place = divmod(number, self._count)
        return self._dataset[epoch * self._full_count + self._first + place]


class ParallelDataModule(L.LightningDataModule):
    """Global batches of samples that a subclass prepares.

    A subclass says what is wrong with its options (`faults`), how samples are made (`_prepare`, called by every process
    after one has called it), and how they become a batch (`_collate`).
    """

    config: LoaderConfig

    def __init__(self, config: LoaderConfig) -> None:
        super().__init__()
        self.config = config
        self._training: Samples | None = None
        self._held_out: Samples | None = None
        self._loader: ResumableLoader | StreamLoader | None = None
        # The error of `prepare_data`, on the process that prepared.
        self._failure: Exception | None = None
        # A checkpoint's state waits here until the loader that it is for exists.
        self._resumed: dict[str, Any] | None = None

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step over all data-parallel ranks."""
        return self.config.global_batch_size

    @property
    def batch_ramp(self) -> BatchRamp | None:
        """Ramp of the batch size at the start of the run; None where all batches have one size."""
        return None

    def faults(self) -> list[str]:
        """One sentence for each option that keeps samples from being made, as far as it shows without reading any."""
        faults = [
            f"{name} ({value}) must be at least {least}"
            for name, value, least in (
                ("global_batch_size", self.global_batch_size, 1),
                ("num_workers", self.config.num_workers, 0),
            )
            if value < least
        ]
        faults += limit_faults({"num_workers": self.config.num_workers}, MOST_PROCESSES)
        if self.batch_ramp is not None and self.batch_ramp.last_size != self.global_batch_size:
            faults.append(
                f"batch_ramp ends with last_size ({self.batch_ramp.last_size}), which must be global_batch_size"
                f" ({self.global_batch_size}): the size of the batches after the ramp"
            )
        return faults

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """The batch on the device, but for the `HOST_ENTRIES`."""
        if not isinstance(batch, dict):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        kept = {name: batch[name] for name in HOST_ENTRIES if name in batch}
        others = {name: value for name, value in batch.items() if name not in kept}
        return super().transfer_batch_to_device(others, device, dataloader_idx) | kept

    def _prepare(self) -> tuple[Samples | None, Samples | None]:
        """Samples to train on and samples held out; makes what is not in the cache yet. A ValueError counts as a
        mistake in the user's options."""
        raise NotImplementedError

    @property
    def _collate(self) -> Collate:
        """The function that makes a batch of samples."""
        return collate_tokens

    # --- preparing --------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        try:
            self._prepare_checked()
        except Exception as error:
            if not _has_others():
                raise
            # Only some processes come here, and the others wait for them: all end together, in `setup`.
            self._failure = error

    def setup(self, stage: str) -> None:
        self._end_together()
        self._training, self._held_out = self._prepare_checked()
        for what, samples in self._parts.items():
            if samples is not None and samples.summary:
                rank_zero_info(f"{what}: {samples.summary}")

    @property
    def _parts(self) -> dict[str, Samples | None]:
        """The samples, by what they are for."""
        return {"training": self._training, "validation": self._held_out}

    def teardown(self, stage: str) -> None:
        self._loader = None
        self._resumed = None

    def _prepare_checked(self) -> tuple[Samples | None, Samples | None]:
        if faults := self.faults():
            raise ConfigurationError(faults)
        with as_configuration_error():
            return self._prepare()

    def _end_together(self) -> None:
        """Raises the error of the process that prepared on all processes. Collective over all of them."""
        if not _has_others():
            return
        own, self._failure = self._failure, None
        reports: list[_ErrorReport | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(reports, None if own is None else _report(own))
        failures = {rank: failure for rank, failure in enumerate(reports) if failure is not None}
        if faults := [fault for failure in failures.values() for fault in failure[0]]:
            raise ConfigurationError(list(dict.fromkeys(faults))) from own
        if own is not None:
            raise own
        for rank, (_, text) in failures.items():
            raise RuntimeError(f"rank {rank} could not prepare the data: {text}")

    @property
    def _only_predicts(self) -> bool:
        return self.trainer is not None and self.trainer.state.fn == TrainerFn.PREDICTING

    # --- loaders ----------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> ResumableLoader | StreamLoader:
        with as_configuration_error():
            loader = self._training_loader()
        if self._resumed is not None:
            loader.load_state_dict(self._resumed)
            self._resumed = None
        self._loader = loader
        return loader

    def _training_loader(self) -> ResumableLoader | StreamLoader:
        assert self._training is not None, "setup comes first; Trainer calls it"
        samples = self._training
        if self.batch_ramp is None and not samples.is_infinite:
            return training_loader(
                samples.dataset,
                samples.count,
                global_batch_size=self.global_batch_size,
                replica=self._replica,
                seed=self.config.seed,
                num_workers=self.config.num_workers,
                collate=self._collate,
                shuffle=not samples.is_ordered,
                is_new_each_epoch=samples.is_new_each_epoch,
            )
        self._refuse_overfitting()
        return infinite_loader(
            samples.dataset if samples.is_infinite else samples.epochs(self.config.seed),
            samples.count,
            ramp=self._ramp,
            replica=self._replica,
            num_workers=self.config.num_workers,
            collate=self._collate,
        )

    @property
    def _ramp(self) -> BatchRamp:
        return self.batch_ramp if self.batch_ramp is not None else BatchRamp.constant(self.global_batch_size)

    def _refuse_overfitting(self) -> None:
        """Raises ValueError under `overfit_batches`: Lightning would replace the sampler that orders the samples."""
        if self.trainer is None:
            # Without a Trainer the batches are only looked at.
            return
        if batches := self.trainer.overfit_batches:  # type: ignore[attr-defined]
            raise ValueError(
                f"overfit_batches ({batches}) takes the samples of a data set in their order, and those of a blend, a"
                " stream or a batch ramp have none but their own; set limit_train_batches, or leave these out"
            )

    def val_dataloader(self) -> list[DataLoader[Sample]]:
        """One loader; an empty list where nothing is held out."""
        return self._evaluation_loaders(self._held_out)

    def _evaluation_loaders(self, samples: Samples | None) -> list[DataLoader[Sample]]:
        if samples is None:
            return []
        with as_configuration_error():
            return [
                evaluation_loader(
                    samples.dataset,
                    samples.count,
                    global_batch_size=self.global_batch_size,
                    replica=self._replica,
                    num_workers=self.config.num_workers,
                    collate=self._collate,
                )
            ]

    def test_dataloader(self) -> list[DataLoader[Sample]]:
        return self.val_dataloader()

    @property
    def _replica(self) -> Replica:
        # Without a Trainer the batches are only looked at.
        return Replica(0, 1) if self.trainer is None else Replica.under(self.trainer.strategy)

    # --- resuming ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {} if self._loader is None else self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Lightning may ask for the loader before it reads the checkpoint, or after.
        if self._loader is None:
            self._resumed = state_dict
        else:
            self._loader.load_state_dict(state_dict)


def config_of(data: type[L.LightningDataModule]) -> type | None:
    """The configuration dataclass that a data module is made of; None where it takes options of its own."""
    parameters = inspect.signature(data).parameters
    annotation = parameters["config"].annotation if list(parameters) == ["config"] else None
    return annotation if is_dataclass(annotation) and isinstance(annotation, type) else None


_ErrorReport = tuple[list[str], str]
"""The faults of a ConfigurationError, none of another error; and the error's type and message."""


def _report(error: Exception) -> _ErrorReport:
    faults = error.faults if isinstance(error, ConfigurationError) else []
    return faults, f"{type(error).__name__}: {error}"


def _has_others() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


@contextmanager
def as_configuration_error() -> Iterator[None]:
    """Turns errors about what the user gave into a ConfigurationError: a ValueError of `lightning_megatron.data`, and a
    file or folder that is not to be had."""
    try:
        yield
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    except OSError as error:
        # One without a name is no mistake in an option.
        if error.filename is None:
            raise
        raise ConfigurationError(
            f"{error.filename} cannot be read or written: {error.strerror or error}; name another path, in data.path "
            "for the text or in data.cache_directory for what is made of it"
        ) from error
