"""`CausalModule`: any causal model of transformers, as it is, trained on text."""

from dataclasses import asdict
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_megatron.hf import unchanged
from lightning_megatron.lightning_modules.adamw import AdamWConfig, adamw_with_warmup
from lightning_megatron.lightning_modules.finetune import require_fitting_tokenizer
from lightning_megatron.lightning_modules.gpt_data import GPTDataModule
from lightning_megatron.metrics.token_means import TokenMean
from lightning_megatron.trainer import ConfigurationError
from lightning_megatron.trainer.checkpointing.hyper_parameters import rebuilt
from lightning_megatron.trainer.checkpointing.loading import load_from_checkpoint

_ADAMW = AdamWConfig()
# The label that losses of transformers leave out.
_NO_LABEL = -100
_HALF = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
_ONE_DOCUMENT = (
    "documents that do not attend to each other need masks of their own, and a model of transformers as it is makes "
    "none for them; use data.packing='stream' without separates_documents"
)


class CausalModule(L.LightningModule):
    """Next-token prediction by a causal model of transformers, on the model's own loss: more than a hundred types.

    A batch holds `tokens`, `labels` and `loss_mask`, each [batch, sequence]. The model shifts labels itself, so that
    the last token of a row is learnt from nothing. Logs `train_loss`, and of validations `val_loss`, the mean over the
    valid tokens.

    Args:
        path: Folder with the model's config.json, and with its weights where training begins from them.
        from_scratch: Begin from new weights; the folder needs the configuration alone.
        optimizer: AdamW and its learning-rate curve.
    """

    # Lightning's own reads files alone.
    load_from_checkpoint: Any = classmethod(load_from_checkpoint)

    def __init__(self, path: str, from_scratch: bool = False, optimizer: AdamWConfig = _ADAMW) -> None:
        super().__init__()
        self.optimizer: AdamWConfig = rebuilt(AdamWConfig, optimizer)
        self.path = path
        self.from_scratch = from_scratch
        self.save_hyperparameters({"path": path, "from_scratch": from_scratch, "optimizer": asdict(self.optimizer)})
        self.config = unchanged.read_config(path)
        # The model, from `configure_model` on.
        self.model: Any = None
        self._val_loss = TokenMean()

    @property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary."""
        return int(self.config.get_text_config().vocab_size)

    def setup(self, stage: str) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        require_fitting_tokenizer(data, self.path, self.vocab_size)
        if isinstance(data, GPTDataModule) and (data.config.packing == "documents" or data.config.separates_documents):
            raise ConfigurationError(_ONE_DOCUMENT)

    def configure_model(self) -> None:
        if self.model is None:
            # Other precisions keep weights in 32 bits, whatever the files have.
            dtype = _HALF.get(str(self.trainer.precision) if self._trainer is not None else "", torch.float32)
            try:
                if self.from_scratch:
                    self.model = unchanged.new_unchanged(self.config, dtype)
                else:
                    # Transformers returns a model that is evaluated.
                    self.model = unchanged.load_unchanged(self.path, dtype).train()
            except ValueError as error:
                raise ConfigurationError(str(error)) from error

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss, _ = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss, num_valid = self._loss(batch)
        self._val_loss.update(loss * num_valid, num_valid)
        self.log("val_loss", self._val_loss, prog_bar=True)

    def _loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The model's loss [], and the number of labels that it is a mean over []."""
        if "segments" in batch:
            raise RuntimeError(_ONE_DOCUMENT)
        labels = torch.full_like(batch["tokens"], _NO_LABEL)
        # The model compares what it says at a token with the label of the next one.
        labels[:, 1:] = batch["labels"].masked_fill(batch["loss_mask"] == 0, _NO_LABEL)[:, :-1]
        loss: Tensor = self.model(input_ids=batch["tokens"], labels=labels).loss
        return loss, (labels != _NO_LABEL).sum()

    def configure_optimizers(self) -> Any:
        return adamw_with_warmup(self, self.optimizer)
