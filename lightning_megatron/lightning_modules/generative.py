"""`GenerativeModule`: the base of ready modules whose models generate text."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.lightning_modules.adamw import AdamWConfig
from lightning_megatron.lightning_modules.loaders import COPY
from lightning_megatron.lightning_modules.pretrain import Batch, PretrainModule
from lightning_megatron.lightning_modules.text_data import TextDataModule
from lightning_megatron.models.sampling import GenerationConfig
from lightning_megatron.trainer.checkpointing.hyper_parameters import rebuilt
from lightning_megatron.trainer.setup.replica import Replica


class GenerativeModule(PretrainModule):
    """A model that generates text in prediction, up to the end of the text. A subclass says how (`_generate`)."""

    def __init__(self, optimizer: AdamWConfig, generation: GenerationConfig, **settings: Any) -> None:
        self.generation: GenerationConfig = rebuilt(GenerationConfig, generation)
        super().__init__(optimizer, generation=self.generation, **settings)
        # Rows of this data-parallel rank in the running prediction.
        self._num_predicted = 0

    def _generate(self, batch: Batch, generation: GenerationConfig, samples: Tensor) -> list[Tensor]:
        """The text generated for each row of a batch; `samples` [batch] are the rows' numbers among all."""
        raise NotImplementedError

    def on_predict_epoch_start(self) -> None:
        self._num_predicted = 0

    def predict_step(self, batch: Batch, batch_idx: int) -> list[Tensor]:
        rows = len(batch["tokens"])
        samples = batch.get("samples")
        if samples is None:
            # A distributed sampler interleaves the rows of data-parallel ranks.
            replica = Replica.under(self.trainer.strategy)
            samples = (self._num_predicted + torch.arange(rows)) * replica.size + replica.rank
        self._num_predicted += rows
        texts = self._generate(batch, self._generation, samples)
        return [text for text, number in zip(texts, samples.tolist(), strict=True) if number != COPY]

    @property
    def _generation(self) -> GenerationConfig:
        """The configured generation, which also stops at the end of text of the data's tokenizer."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        tokenizer = data.tokenizer if isinstance(data, TextDataModule) else None
        if tokenizer is None or not self.generation.stops_at_end_of_text:
            return self.generation
        return replace(self.generation, stop_tokens=(*self.generation.stop_tokens, tokenizer.end_of_text))
