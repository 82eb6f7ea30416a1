"""`CausalModule`: any causal model of transformers, as it is, trained on text or on conversations."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import cached_property
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_megatron import hf
from lightning_megatron.hf.adapters import adapter_faults, add_adapters
from lightning_megatron.lightning_modules.adamw import AdamWConfig, adamw_with_warmup
from lightning_megatron.lightning_modules.conversation_data import ConversationDataModule
from lightning_megatron.lightning_modules.generative import PredictedTexts
from lightning_megatron.lightning_modules.gpt_data import GPTDataModule
from lightning_megatron.lightning_modules.pretrain import Batch
from lightning_megatron.lightning_modules.text_data import require_fitting_tokenizer
from lightning_megatron.mesh import ambient_mesh
from lightning_megatron.metrics.token_means import TokenMean
from lightning_megatron.models.generation import generate_rows
from lightning_megatron.models.ragged_rows import row_lengths
from lightning_megatron.models.sampling import GenerationConfig
from lightning_megatron.trainer import ConfigurationError, MegatronStrategy
from lightning_megatron.trainer.checkpointing.hyper_parameters import rebuilt
from lightning_megatron.trainer.checkpointing.loading import load_from_checkpoint
from lightning_megatron.transformer.lora import LoraConfig

_ADAMW = AdamWConfig()
_GENERATION = GenerationConfig()
# The label that losses of transformers leave out.
_NO_LABEL = -100
WEIGHT_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
"""Dtype of weights by the precision of the Trainer; others keep weights in 32 bits."""
_WITHOUT_DOCUMENTS = "use data.packing='stream' without separates_documents, and for conversations data.packing='none'"


class CausalModule(L.LightningModule):
    """Next-token prediction by a causal model of transformers, on the model's own loss: more than a hundred types.

    A batch holds `tokens`, `labels` and `loss_mask`, each [batch, sequence]; a label is the token behind the one in
    its place. With `segments` [batch, sequence] a row has several documents, which transformers keeps apart by
    positions that begin anew; a model that computes other logits for a document in such a row than for it alone is
    refused by ConfigurationError before the first batch. Logs `train_loss`, and of validations `val_loss`, the mean
    over the valid labels. Prediction takes batches of `tokens` and `lengths` [batch], as those of `GPTModule`, and
    returns each row with the generated tokens; all tokens are computed anew for each. A model whose tokens see
    those behind them is refused: by ValueError where its configuration says so (RoBERTa), and else (XLNet) by
    ConfigurationError before the first step of training, where other tokens behind a token move its logits by more
    than rounding explains.

    Args:
        path: Folder with the model's config.json, and with its weights where training begins from them.
        from_scratch: Begin from new weights; the folder needs the configuration alone.
        optimizer: AdamW and its learning-rate curve.
        lora: LoRA adapters of peft, which alone are trained; None trains all weights.
        generation: Sampling of text in prediction.
    """

    # Reads the weights alone, and on a mesh this rank's part of them.
    load_from_checkpoint: Any = classmethod(load_from_checkpoint)

    def __init__(
        self,
        path: str,
        from_scratch: bool = False,
        optimizer: AdamWConfig = _ADAMW,
        lora: LoraConfig | None = None,
        generation: GenerationConfig = _GENERATION,
    ) -> None:
        super().__init__()
        self.optimizer: AdamWConfig = rebuilt(AdamWConfig, optimizer)
        self.generation: GenerationConfig = rebuilt(GenerationConfig, generation)
        self.lora: LoraConfig | None = None if lora is None else rebuilt(LoraConfig, lora)
        self.path = path
        self.from_scratch = from_scratch
        self.save_hyperparameters(
            {
                "path": path,
                "optimizer": asdict(self.optimizer),
                "lora": None if self.lora is None else asdict(self.lora),
                "generation": asdict(self.generation),
            }
            # Fine-tuning has no such option.
            | ({"from_scratch": True} if from_scratch else {})
        )
        self.config = hf.read_config(path)
        if hf.sees_later_tokens(self.config):
            raise ValueError(
                f"the model in {path} ({self.config.model_type}) lets a token see those behind it, which it is to "
                "predict; train a causal model, or set is_decoder to true in its config.json"
            )
        if self.lora is not None and (faults := adapter_faults(self.lora, from_scratch)):
            raise ValueError("\n".join(faults))
        # The model, from `configure_model` on.
        self.model: Any = None
        # Whether documents of a row were found to be kept apart.
        self._keeps_documents_apart = False
        self._val_loss = TokenMean()
        self._texts = PredictedTexts(self.generation)

    @property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary."""
        return int(self.config.get_text_config().vocab_size)

    def setup(self, stage: str) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        require_fitting_tokenizer(data, self.path, self.vocab_size)
        is_text = isinstance(data, GPTDataModule | ConversationDataModule)
        is_padded = is_text and (
            data.config.packing == "documents" or (isinstance(data, ConversationDataModule) and data.hides_padding)
        )
        if is_padded and getattr(self.config.get_text_config(), "output_router_logits", False):
            raise ConfigurationError(
                f"{type(data).__name__} pads rows without telling the model, and its auxiliary loss would count the "
                "padding as tokens; set output_router_logits to false in the model's config.json"
            )

    def configure_model(self) -> None:
        if self.model is None:
            # Other precisions keep weights in 32 bits, whatever the files have.
            dtype = WEIGHT_DTYPES.get(str(self.trainer.precision) if self._trainer is not None else "", torch.float32)
            try:
                if self.from_scratch:
                    self.model = hf.new_unchanged(self.config, dtype)
                else:
                    # Transformers returns a model that is evaluated.
                    self.model = hf.load_unchanged(self.path, dtype).train()
                if dtype == torch.float64:
                    # The grouped products of experts know no float64.
                    self.model.set_experts_implementation("eager")
                if self.lora is not None:
                    self.model = add_adapters(self.model, self.lora)
            except ValueError as error:
                raise ConfigurationError(str(error)) from error

    def on_fit_start(self) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        # Rows of conversations are as long as what is in them.
        if isinstance(data, GPTDataModule):
            self._require_positions(data.sequence_length, "rows of data.sequence_length", "a smaller sequence_length")

    def on_validation_start(self) -> None:
        # Of training the sanity check comes first.
        self._require_documents_apart()

    def on_train_start(self) -> None:
        self._require_documents_apart()
        with self._between_steps():
            deviation = hf.deviation_by_later_tokens(self.model)
        if deviation:
            raise ConfigurationError(
                f"the model in {self.path} ({self.config.model_type}) lets a token see those behind it, which it is to "
                f"predict: with others behind it its logits are {deviation}; train a causal model, or, where its type "
                "has is_decoder, set that to true in its config.json"
            )

    def _require_documents_apart(self) -> None:
        """Looks at how the model computes several documents of a row, where the data has such rows."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        packs = isinstance(data, GPTDataModule | ConversationDataModule) and data.config.packing == "documents"
        packs |= isinstance(data, GPTDataModule) and data.config.separates_documents
        if not packs or self._keeps_documents_apart:
            return
        try:
            with self._between_steps():
                deviation = hf.deviation_by_other_documents(self.model)
        except ValueError as error:
            raise ConfigurationError(f"{error}; {_WITHOUT_DOCUMENTS}") from error
        if deviation:
            raise ConfigurationError(
                f"the model in {self.path} ({self.config.model_type}) does not keep documents of a row apart: behind "
                f"another one a document's logits are {deviation}; {_WITHOUT_DOCUMENTS}"
            )
        self._keeps_documents_apart = True

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Inside the block the model runs as in a step, which lies before or behind."""
        strategy = self.trainer.strategy
        # Under mixed precision weights and hidden states have dtypes of their own.
        with (
            strategy.whole_weights() if isinstance(strategy, MegatronStrategy) else nullcontext(),
            self.trainer.precision_plugin.forward_context(),
        ):
            yield

    @cached_property
    def _num_positions(self) -> int | None:
        return hf.num_positions(self.model)

    def _require_positions(self, num_tokens: int, what: str, way_out: str) -> None:
        """Raises ConfigurationError for rows that are longer than the model's table of positions."""
        if self._num_positions is not None and num_tokens > self._num_positions:
            raise ConfigurationError(
                f"{what} ({num_tokens} tokens) are longer than the {self._num_positions} positions that the model in "
                f"{self.path} has; give {way_out}, or a model with more positions"
            )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | dict[str, Any]:
        loss, _ = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss, num_valid = self._loss(batch)
        # The mean over no label at all is NaN.
        self._val_loss.update((loss * num_valid).masked_fill(num_valid == 0, 0), num_valid)
        self.log("val_loss", self._val_loss, prog_bar=True)

    def _loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The model's loss [], and the number of labels that it is a mean over []."""
        documents: dict[str, Any] = {}
        if "segments" in batch:
            if not self._keeps_documents_apart:
                raise RuntimeError(
                    "a batch has segments, and nobody has looked at whether the model keeps documents of a row apart, "
                    "as is done for data modules of this package; have one of them pack the rows, or leave segments out"
                )
            # Segments are on the host. With a cache the model would look for no documents.
            positions_BT = hf.document_positions(batch["segments"]).to(batch["tokens"].device)
            documents = {"position_ids": positions_BT, "use_cache": False}
        self._require_positions(batch["tokens"].shape[1], "rows of a batch", "shorter rows")
        labels = batch["labels"].masked_fill(batch["loss_mask"] == 0, _NO_LABEL)
        # A model that shifts its labels would drop a row's last one, and takes those that stand in their places too.
        loss: Tensor = self.model(input_ids=batch["tokens"], labels=labels, shift_labels=labels, **documents).loss
        return loss, (labels != _NO_LABEL).sum()

    def on_predict_epoch_start(self) -> None:
        self._texts.restart()

    def predict_step(self, batch: Batch, batch_idx: int) -> list[Tensor]:
        # What the folder of new weights calls the end need not be a token of this data's tokenizer.
        folder = None if self.from_scratch else self.path
        return self._texts.of_batch(self.trainer, batch, self._generate, folder)

    def _generate(self, batch: Batch, generation: GenerationConfig, samples: Tensor) -> list[Tensor]:
        def next_logits(text_BL: Tensor, lengths_B: Tensor) -> Tensor:
            # What stands behind the end of a row is seen by no token of it.
            logits = self.model(input_ids=text_BL[:, : int(lengths_B.max())]).logits
            logits_BV: Tensor = logits[torch.arange(len(logits)), lengths_B - 1]
            return logits_BV

        mesh, lengths_B = ambient_mesh(), row_lengths(batch["tokens"], batch.get("lengths"))
        # The last new token is not read.
        longest = int(lengths_B.max()) + generation.max_new_tokens - 1
        self._require_positions(longest, "prompts with what is generated", "shorter prompts or fewer max_new_tokens")
        return generate_rows(
            next_logits,
            batch["tokens"],
            lengths_B,
            generation,
            samples_B=samples,
            sharing=(mesh.tp, mesh.cp),
            # Tokens travel to the experts of all these ranks in each call.
            together=(mesh.axis("ep"),),
        )

    def batch_tokens(self, batch: Batch) -> int:
        """Tokens of a batch, padding included."""
        return int(batch["tokens"].numel())

    def configure_optimizers(self) -> Any:
        return adamw_with_warmup(self, self.optimizer)
