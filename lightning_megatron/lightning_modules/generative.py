"""`GenerativeModule`: the base of ready modules whose models generate text, and `PredictedTexts`, which draws it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_megatron.hf.stop_tokens import stop_tokens
from lightning_megatron.lightning_modules.adamw import AdamWConfig
from lightning_megatron.lightning_modules.loaders import COPY
from lightning_megatron.lightning_modules.pretrain import Batch, PretrainModule
from lightning_megatron.lightning_modules.text_data import TextDataModule
from lightning_megatron.models.sampling import GenerationConfig
from lightning_megatron.trainer.checkpointing.hyper_parameters import rebuilt
from lightning_megatron.trainer.setup.replica import Replica

Generate = Callable[[Batch, GenerationConfig, Tensor], list[Tensor]]
"""The text generated for each row of a batch; the tensor [batch] has the rows' numbers among all."""


class PredictedTexts:
    """The texts that a run of prediction generates, each row drawn by its number among all."""

    def __init__(self, generation: GenerationConfig) -> None:
        self._generation = generation
        # Rows of this data-parallel rank in the running prediction.
        self._num_predicted = 0

    def restart(self) -> None:
        """Counts rows from the first one again."""
        self._num_predicted = 0

    def of_batch(self, trainer: L.Trainer, batch: Batch, generate: Generate, folder: str | None) -> list[Tensor]:
        """The tokens [length] of each row, prompt and text, but for rows that only fill up the batch.

        `folder` is that of the Hugging Face model whose weights the module began from, which names tokens that end a
        text.
        """
        rows = len(batch["tokens"])
        samples = batch.get("samples")
        if samples is None:
            # A distributed sampler interleaves the rows of data-parallel ranks.
            replica = Replica.under(trainer.strategy)
            samples = (self._num_predicted + torch.arange(rows)) * replica.size + replica.rank
        self._num_predicted += rows
        texts = generate(batch, self._with_ends(trainer, folder), samples)
        return [text for text, number in zip(texts, samples.tolist(), strict=True) if number != COPY]

    def _with_ends(self, trainer: L.Trainer, folder: str | None) -> GenerationConfig:
        """The configured generation, which also stops where the data's tokenizer and the model's folder end a text."""
        if not self._generation.stops_at_end_of_text:
            return self._generation
        data = trainer.datamodule  # type: ignore[attr-defined]
        tokenizer = data.tokenizer if isinstance(data, TextDataModule) else None
        ends = [] if tokenizer is None else [tokenizer.end_of_text]
        if folder is not None:
            ends += stop_tokens(folder)
        return replace(self._generation, stop_tokens=(*self._generation.stop_tokens, *ends))


class GenerativeModule(PretrainModule):
    """A model that generates text in prediction, up to the end of the text. A subclass says how (`_generate`)."""

    def __init__(self, optimizer: AdamWConfig, generation: GenerationConfig, **settings: Any) -> None:
        self.generation: GenerationConfig = rebuilt(GenerationConfig, generation)
        super().__init__(optimizer, generation=self.generation, **settings)
        self._texts = PredictedTexts(self.generation)

    def _generate(self, batch: Batch, generation: GenerationConfig, samples: Tensor) -> list[Tensor]:
        """The text generated for each row of a batch; `samples` [batch] are the rows' numbers among all."""
        raise NotImplementedError

    @property
    def _folder(self) -> str | None:
        """Folder of the Hugging Face model whose weights training began from, where it did."""
        return None

    def on_predict_epoch_start(self) -> None:
        self._texts.restart()

    def predict_step(self, batch: Batch, batch_idx: int) -> list[Tensor]:
        return self._texts.of_batch(self.trainer, batch, self._generate, self._folder)
