"""`PreferenceDataModule`: pairs of a chosen and a rejected answer; `WriteReferences` adds columns to them."""

import json
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.data import (
    PreferenceSamples,
    Tokenizer,
    collate_padded,
    load_chat_template,
    load_tokenizer,
    prepare_preferences,
)
from lightning_megatron.data.collate import Sample
from lightning_megatron.data.packed_rows import IGNORE_INDEX
from lightning_megatron.data.preference_samples import ANSWERS, REFERENCES
from lightning_megatron.lightning_modules.conversation_data import (
    ConversationDataConfig,
    ConversationDataModule,
    tokenizer_faults,
)
from lightning_megatron.lightning_modules.data_module import ParallelDataModule, Samples
from lightning_megatron.lightning_modules.loaders import Collate
from lightning_megatron.trainer.config import ConfigurationError


@config_dataclass
class PreferenceDataConfig(ConversationDataConfig):
    """Pairs of answers for preference tuning."""

    tokenizer: str
    """Directory of the Hugging Face model: its tokenizer, and its chat template for conversations."""


class PreferenceDataModule(ConversationDataModule):
    """Batches of `chosen_tokens`, `chosen_labels`, `rejected_tokens` and `rejected_labels`, each
    [global_batch_size / dp, s], s the longest answer of the batch with what is asked, rounded up to `pad_to_multiple`;
    `row` and `loss_mask` [global_batch_size / dp], 0 for pairs that only fill up a batch; and `references` [.., 2],
    where the table has them.

    Rows have `prompt`, `chosen` and `rejected`, or `chosen` and `rejected` that are conversations. Prediction takes all
    rows of the table.
    """

    config: PreferenceDataConfig
    default_fraction = 0.05

    def __init__(self, config: PreferenceDataConfig) -> None:
        super().__init__(config)

    @property
    def has_references(self) -> bool:
        """Whether the table has the log-probabilities of a reference model; known from `setup` on."""
        assert self._training is not None, "setup comes first; Trainer calls it"
        return "references" in self._training.dataset[0]

    def faults(self) -> list[str]:
        faults = super().faults()
        if self.config.packing == "documents":
            faults.append("packing ('documents') is not for pairs of answers, of which each is a row; use 'none'")
        if self.config.prompts:
            faults.append(
                "prompts are not for pairs of answers: prediction takes all rows of the table; leave them out"
            )
        return faults

    def _tokenizer_faults(self) -> list[str]:
        return tokenizer_faults(self.config.tokenizer)

    def setup(self, stage: str) -> None:
        # Not by prompts, as text is predicted from.
        ParallelDataModule.setup(self, stage)

    def _prepare(self) -> tuple[Samples | None, Samples | None]:
        self.tokenizer = load_tokenizer(self.config.tokenizer)
        if self._only_predicts:
            return self._samples(self._rows(), self.tokenizer), None
        training, held_out = self._split_rows(self._rows())
        own = self.tokenizer
        return self._samples(training, own), None if held_out is None else self._samples(held_out, own)

    def _samples(self, rows: Any, tokenizer: Tokenizer) -> Samples:
        template = load_chat_template(self.config.tokenizer)
        path = prepare_preferences(
            rows, tokenizer, template, sequence_length=self.sequence_length, directory=self._cache
        )
        samples = PreferenceSamples(path)
        return Samples(dataset=samples, count=len(samples), summary=str(samples.counts))

    @property
    def _collate(self) -> Collate:
        padding = {"tokens": self._ready_tokenizer.end_of_text, "labels": IGNORE_INDEX}
        both = {f"{name}_{entry}": value for name in ANSWERS for entry, value in padding.items()}
        return partial(_collate_pairs, padding=both, multiple=self.config.pad_to_multiple)

    def predict_dataloader(self) -> DataLoader[Sample]:
        [loader] = self._evaluation_loaders(self._training)
        return loader


def _collate_pairs(samples: list[Sample], *, padding: dict[str, int], multiple: int) -> Sample:
    """A batch of the samples, all answers of one width: both of a pair go through the model in one call."""
    answers = [{name: sample[name] for name in padding} for sample in samples]
    # In one order on every rank, which a set of names has not.
    others = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0] if name not in padding}
    return collate_padded(answers, padding=padding, multiple=multiple) | others


class WriteReferences(L.Callback):
    """Writes the rows that `predict` has seen, with `reference_chosen` and `reference_rejected`, as JSON lines.

    Rows that were dropped are left out.

    Args:
        path: File to write, which must not exist yet; None writes nothing.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self._found: dict[int, list[float]] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # MegatronStrategy has checked before it started a process; other strategies do not check.
        if faults := self.faults(trainer):
            raise ConfigurationError(faults)

    def faults(self, trainer: L.Trainer) -> list[str]:
        """One sentence for each thing that would keep the file from being written when prediction is over."""
        if self.path is None or trainer.state.fn != TrainerFn.PREDICTING:
            return []
        if Path(self.path).exists():
            return [f"references path ({self.path}) exists; give one where nothing is, or remove it"]
        if not Path(self.path).absolute().parent.is_dir():
            return [f"references path ({self.path}) lies in no directory; make it, or use another"]
        return []

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self.path is None:
            return
        numbers = trainer.strategy.all_gather(batch["row"]).flatten().tolist()
        found = trainer.strategy.all_gather(outputs).reshape(-1, 2).tolist()
        self._found |= dict(zip(numbers, found, strict=True))

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.path is None or not trainer.is_global_zero:
            return
        rows = cast(PreferenceDataModule, trainer.datamodule)._rows()  # type: ignore[attr-defined]
        with open(self.path, "x", encoding="utf-8") as file:
            for number in sorted(self._found):
                row = rows[number] | dict(zip(REFERENCES, self._found[number], strict=True))
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
