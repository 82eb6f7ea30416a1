"""`GPTModule`: a GPT that pre-trains, validates and generates under any strategy."""

from collections import Counter
from dataclasses import asdict
from typing import Any

import lightning as L
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_megatron.context.documents import NO_DOCUMENT, documents_of
from lightning_megatron.lightning_modules.adamw import AdamWConfig, adamw_with_warmup
from lightning_megatron.lightning_modules.generate import GenerationConfig, generate
from lightning_megatron.models.gpt import GPTConfig, GPTModel
from lightning_megatron.trainer.callbacks import ExpertMonitor
from lightning_megatron.trainer.loading import rebuilt
from lightning_megatron.transformer import cost

Batch = dict[str, Tensor]
_ADAMW = AdamWConfig()
_GENERATION = GenerationConfig()


class GPTModule(L.LightningModule):
    """Next-token prediction. A batch holds `tokens`, `labels` and `loss_mask`, each [batch, sequence], and `segments`
    where its rows hold several documents.

    Logs `train_loss`, `val_loss` and `test_loss`: means over the valid tokens, of a global batch or of all batches.
    Where layers have experts an `ExpertMonitor` logs how busy they are; one that the Trainer has takes its place.
    Prediction takes batches of `tokens` and returns them with what the model adds.
    """

    def __init__(
        self, config: GPTConfig, optimizer: AdamWConfig = _ADAMW, generation: GenerationConfig = _GENERATION
    ) -> None:
        super().__init__()
        # Lightning's load_from_checkpoint hands over what was saved: plain data, so that reading it runs no code.
        self.config: GPTConfig = rebuilt(GPTConfig, config)
        self.optimizer: AdamWConfig = rebuilt(AdamWConfig, optimizer)
        self.generation: GenerationConfig = rebuilt(GenerationConfig, generation)
        self.save_hyperparameters(
            {"config": asdict(self.config), "optimizer": asdict(self.optimizer), "generation": asdict(self.generation)}
        )
        self.model: GPTModel | None = None
        # Sums of losses and of tokens: a mean of the batches' means would weigh a token by how full its batch is.
        self.val_loss = MeanMetric()
        self.test_loss = MeanMetric()

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPTModel(self.config)

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

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch["tokens"], batch["labels"], batch["loss_mask"], batch.get("segments"))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val_loss", self.val_loss, batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test_loss", self.test_loss, batch)

    def _evaluate(self, name: str, mean: MeanMetric, batch: Batch) -> None:
        loss = self(batch["tokens"], batch["labels"], batch["loss_mask"], batch.get("segments"))
        assert self.model is not None and self.model.loss_weight is not None
        mean.update(loss, weight=self.model.loss_weight)
        self.log(name, mean, prog_bar=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        assert self.model is not None, "configure_model builds the model; Trainer calls it"
        return generate(
            self.model,
            batch["tokens"],
            max_new_tokens=self.generation.max_new_tokens,
            temperature=self.generation.temperature,
            seed=self.generation.seed,
        )

    def configure_optimizers(self) -> Any:
        return adamw_with_warmup(self, self.optimizer)

    def configure_callbacks(self) -> list[L.Callback]:
        # Lightning would put the module's in the place of the user's.
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        has_monitor = any(isinstance(callback, ExpertMonitor) for callback in callbacks)
        return [] if has_monitor or self.config.moe is None else [ExpertMonitor()]

    def batch_tokens(self, batch: Batch) -> int:
        """Tokens that a training step on the batch goes through; of packed rows those of documents."""
        return batch["tokens"].numel() if "segments" not in batch else int((batch["segments"] != NO_DOCUMENT).sum())

    def batch_flops(self, batch: Batch) -> float:
        """Model FLOPs of a training step on the batch; `transformer.cost` says by which convention."""
        rows, sequence = batch["tokens"].shape
        if "segments" not in batch:
            return cost.training_flops(self.config, batch=rows, sequence=sequence)
        lengths = Counter(documents_of(batch["segments"]).lengths)
        return sum(cost.training_flops(self.config, batch=n, sequence=length) for length, n in lengths.items())
