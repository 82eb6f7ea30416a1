"""`GPTModule`: a GPT that pre-trains, validates and generates under any strategy."""

from collections import Counter
from typing import ClassVar

import lightning as L
from torch import Tensor

from lightning_megatron.context.documents import NO_DOCUMENT, documents_of
from lightning_megatron.lightning_modules.adamw import AdamWConfig
from lightning_megatron.lightning_modules.generative import GenerativeModule
from lightning_megatron.lightning_modules.pretrain import Batch
from lightning_megatron.models.generation import generate
from lightning_megatron.models.gpt import GPTConfig, GPTModel
from lightning_megatron.models.sampling import GenerationConfig
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.trainer.callbacks import ExpertMonitor
from lightning_megatron.trainer.checkpointing.hyper_parameters import rebuilt
from lightning_megatron.transformer import cost

_ADAMW = AdamWConfig()
_GENERATION = GenerationConfig()


class GPTModule(GenerativeModule):
    """Next-token prediction: a batch holds `tokens`, `labels` and `loss_mask`, each [batch, sequence], and `segments`
    where its rows hold several documents.

    Where layers have experts, an `ExpertMonitor` logs their load, unless the Trainer has one already. Prediction takes
    batches of `tokens` and returns each row with the generated tokens, up to the end of the text. A batch of prompts
    that are padded to one length has their `lengths` [batch]; `samples` [batch] are their numbers
    among all, which seed the sampling. Each data-parallel rank returns the texts of its own batches.

    Args:
        config: Architecture of the model.
        optimizer: AdamW and its learning-rate curve.
        generation: Sampling of text in prediction.
    """

    model: GPTModel | None
    optional_inputs: ClassVar[tuple[str, ...]] = ("segments",)
    prompt_inputs: ClassVar[tuple[str, ...]] = ()
    """Entries of a batch of prompts that generation takes in addition to their tokens and lengths."""

    def __init__(
        self, config: GPTConfig, optimizer: AdamWConfig = _ADAMW, generation: GenerationConfig = _GENERATION
    ) -> None:
        self.config: GPTConfig = rebuilt(GPTConfig, config)
        super().__init__(optimizer, generation, config=self.config)

    def _build(self) -> GPTModel:
        return GPTModel(self.config)

    def _generate(self, batch: Batch, generation: GenerationConfig, samples: Tensor) -> list[Tensor]:
        given = {name: batch[name] for name in ("lengths", *self.prompt_inputs) if name in batch}
        return generate(self._built, batch["tokens"], generation, samples=samples, **given)

    def configure_callbacks(self) -> list[L.Callback]:
        # Lightning would replace the user's callback by the module's.
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        has_monitor = any(isinstance(callback, ExpertMonitor) for callback in callbacks)
        return [] if has_monitor or self.config.moe is None else [ExpertMonitor()]

    def batch_tokens(self, batch: Batch) -> int:
        """Tokens of a batch that are trained on; unused ends of packed rows left out."""
        return batch["tokens"].numel() if "segments" not in batch else int((batch["segments"] != NO_DOCUMENT).sum())

    def _lengths(self, batch: Batch) -> Counter[SequenceLengths]:
        rows, sequence = batch["tokens"].shape
        lengths = documents_of(batch["segments"]).lengths if "segments" in batch else (sequence,) * rows
        return Counter(SequenceLengths(sequence=length) for length in lengths)

    def _training_flops(self, lengths: SequenceLengths, number: int) -> float:
        return cost.training_flops(self.config, batch=number, sequence=lengths.sequence)
