"""`GPTModule`: a GPT that pre-trains, validates and generates under any strategy."""

from collections import Counter

import lightning as L
from torch import Tensor

from lightning_megatron.context.documents import NO_DOCUMENT, documents_of
from lightning_megatron.lightning_modules.adamw import AdamWConfig
from lightning_megatron.lightning_modules.generative import GenerativeModule
from lightning_megatron.lightning_modules.pretrain import Batch
from lightning_megatron.mesh import Sizes
from lightning_megatron.models.generation import generate
from lightning_megatron.models.gpt import GPTConfig, GPTModel
from lightning_megatron.models.sampling import GenerationConfig
from lightning_megatron.planner.flops import recomputed_flops
from lightning_megatron.planner.model_parts import SequenceLengths, model_parts_of
from lightning_megatron.trainer.callbacks import ExpertMonitor
from lightning_megatron.trainer.checkpointing.loading import rebuilt
from lightning_megatron.transformer import cost
from lightning_megatron.transformer.recompute import RecomputeConfig

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

    def __init__(
        self, config: GPTConfig, optimizer: AdamWConfig = _ADAMW, generation: GenerationConfig = _GENERATION
    ) -> None:
        self.config: GPTConfig = rebuilt(GPTConfig, config)
        super().__init__(optimizer, generation, config=self.config)

    def _build(self) -> GPTModel:
        return GPTModel(self.config)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """The loss with labels, else logits [batch, sequence, vocab_size]."""
        assert self.model is not None, "configure_model builds the model; Trainer calls it"
        documents = {} if segments is None else {"segments": segments}
        output: Tensor = self.model(tokens, labels=labels, loss_mask=loss_mask, **documents)
        return output

    def _loss(self, batch: Batch) -> Tensor:
        loss: Tensor = self(batch["tokens"], batch["labels"], batch["loss_mask"], batch.get("segments"))
        return loss

    def _generate(self, batch: Batch, generation: GenerationConfig, samples: Tensor) -> list[Tensor]:
        assert self.model is not None, "configure_model builds the model; Trainer calls it"
        return generate(self.model, batch["tokens"], generation, lengths=batch.get("lengths"), samples=samples)

    def configure_callbacks(self) -> list[L.Callback]:
        # Lightning would put the module's in the place of the user's.
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        has_monitor = any(isinstance(callback, ExpertMonitor) for callback in callbacks)
        return [] if has_monitor or self.config.moe is None else [ExpertMonitor()]

    def batch_tokens(self, batch: Batch) -> int:
        """Tokens of a batch that are trained on; unused ends of packed rows left out."""
        return batch["tokens"].numel() if "segments" not in batch else int((batch["segments"] != NO_DOCUMENT).sum())

    def batch_flops(self, batch: Batch) -> float:
        """Model FLOPs of a training step on the batch; `transformer.cost` says by which convention."""
        return sum(
            cost.training_flops(self.config, batch=n, sequence=length) for length, n in document_lengths(batch).items()
        )

    def batch_recomputed_flops(self, batch: Batch, recompute: RecomputeConfig, sizes: Sizes) -> float:
        """FLOPs that a training step on the batch recomputes in its backward."""
        return sum(
            recomputed_flops(model_parts_of(self.config, SequenceLengths(sequence=length)), n, recompute, sizes)
            for length, n in document_lengths(batch).items()
        )


def document_lengths(batch: Batch) -> Counter[int]:
    """Number of documents of a batch by their tokens."""
    rows, sequence = batch["tokens"].shape
    return Counter(documents_of(batch["segments"]).lengths) if "segments" in batch else Counter({sequence: rows})
