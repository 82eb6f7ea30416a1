"""`GenerativeModule`: what ready modules share whose models write text."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.lightning_modules.adamw import AdamWConfig
from lightning_megatron.lightning_modules.loaders import COPY
from lightning_megatron.lightning_modules.pretrain import Batch, PretrainModule
from lightning_megatron.lightning_modules.text_data import TextDataModule
from lightning_megatron.models.sampling import GenerationConfig
from lightning_megatron.trainer.checkpointing.loading import rebuilt
from lightning_megatron.trainer.setup.replica import Replica


class GenerativeModule(PretrainModule):
    """A model that writes in prediction, up to the end of the text. A subclass says how (`_write`)."""

    def __init__(self, optimizer: AdamWConfig, generation: GenerationConfig, **settings: Any) -> None:
        self.generation: GenerationConfig = rebuilt(GenerationConfig, generation)
        super().__init__(optimizer, generation=self.generation, **settings)
        # Rows of this replica in the running prediction.
        self._num_predicted = 0

    def _write(self, batch: Batch, generation: GenerationConfig, samples: Tensor) -> list[Tensor]:
        """What the model writes to each row of a batch, whose numbers among all are `samples` [batch]."""
        raise NotImplementedError

    def on_predict_epoch_start(self) -> None:
        self._num_predicted = 0

    def predict_step(self, batch: Batch, batch_idx: int) -> list[Tensor]:
        rows = len(batch["tokens"])
        samples = batch.get("samples")
        if samples is None:
            # As a distributed sampler deals them out.
            replica = Replica.under(self.trainer.strategy)
            samples = (self._num_predicted + torch.arange(rows)) * replica.size + replica.rank
        self._num_predicted += rows
        texts = self._write(batch, self._generation, samples)
        return [text for text, number in zip(texts, samples.tolist(), strict=True) if number != COPY]

    @property
    def _generation(self) -> GenerationConfig:
        """As asked for, with the end of text of the data's tokenizer."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        tokenizer = data.tokenizer if isinstance(data, TextDataModule) else None
        if tokenizer is None or not self.generation.stops_at_end_of_text:
            return self.generation
        return replace(self.generation, stop_tokens=(*self.generation.stop_tokens, tokenizer.end_of_text))
