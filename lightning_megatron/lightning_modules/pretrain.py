"""`PretrainModule`: the base of the ready LightningModules: loss, evaluation and optimizer."""

from collections import Counter
from dataclasses import asdict
from typing import Any, ClassVar, Literal

import lightning as L
from torch import Tensor, nn

from lightning_megatron.lightning_modules.adamw import AdamWConfig, adamw_with_warmup
from lightning_megatron.mesh import Sizes
from lightning_megatron.metrics.token_means import Perplexity, TokenMean
from lightning_megatron.pipeline.module import PipelineModule
from lightning_megatron.planner.flops import recomputed_flops
from lightning_megatron.planner.model_parts import SequenceLengths, model_parts_of
from lightning_megatron.trainer.checkpointing.hyper_parameters import rebuilt
from lightning_megatron.trainer.checkpointing.loading import load_from_checkpoint
from lightning_megatron.transformer.recompute import RecomputeConfig

Batch = dict[str, Any]


class PretrainModule(L.LightningModule):
    """A model that is trained on its own loss by AdamW, and evaluated.

    Logs `train_loss`, the mean over the valid tokens of a global batch. Of all batches of a validation it logs
    `val_loss`, `val_perplexity` (of the labels, without label smoothing and what else the loss has) and `val_accuracy`
    (the share of labels that are the likeliest token); a test logs the same metrics as `test_`. Each is one mean over
    all valid tokens.
    A subclass defines how its model is built (`_build`), with which entries of a batch it is called (`inputs`,
    `optional_inputs`), and for `ThroughputMonitor` the tokens of a batch that are trained on (`batch_tokens`), the
    lengths of its documents (`_lengths`) and their cost (`_training_flops`).
    """

    inputs: ClassVar[tuple[str, ...]] = ("tokens", "labels", "loss_mask")
    """Entries of a batch that the model is called with."""
    optional_inputs: ClassVar[tuple[str, ...]] = ()
    """Entries that the model is called with where a batch has them."""

    # Reads the weights alone, and on a mesh this rank's part of them.
    load_from_checkpoint: Any = classmethod(load_from_checkpoint)

    config: Any
    means: ClassVar[dict[str, type[TokenMean]]] = {"loss": TokenMean, "perplexity": Perplexity, "accuracy": TokenMean}
    """Metrics that evaluation logs."""

    def __init__(self, optimizer: AdamWConfig, **settings: Any) -> None:
        """`settings` are the subclass's other configurations, dataclasses all, which its checkpoints hold too."""
        super().__init__()
        # Lightning's load_from_checkpoint hands over what was saved: plain data, so that reading it runs no code.
        self.optimizer: AdamWConfig = rebuilt(AdamWConfig, optimizer)
        self.save_hyperparameters(
            {"optimizer": asdict(self.optimizer)} | {name: asdict(value) for name, value in settings.items()}
        )
        # The model, from `configure_model` on.
        self.model: Any = None
        self._means = nn.ModuleDict(
            {f"{stage}_{name}": kind() for stage in ("val", "test") for name, kind in self.means.items()}
        )

    def _build(self) -> PipelineModule:
        """This rank's part of the model."""
        raise NotImplementedError

    def _lengths(self, batch: Batch) -> Counter[SequenceLengths]:
        """Number of documents of a batch by their lengths, without padding."""
        raise NotImplementedError(f"{type(self).__name__} must define _lengths, by which throughput counts FLOPs")

    def _training_flops(self, lengths: SequenceLengths, number: int) -> float:
        """Model FLOPs of a training step on so many documents of these lengths."""
        raise NotImplementedError(
            f"{type(self).__name__} must define _training_flops, by which throughput counts FLOPs"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model for its own arguments: with labels the loss, else logits."""
        return self._built(*args, **kwargs)

    @property
    def _built(self) -> Any:
        assert self.model is not None, "configure_model builds the model; Trainer calls it"
        return self.model

    def _loss(self, batch: Batch) -> Tensor:
        """The loss of a batch [], by a call of the model."""
        optional = {name: batch[name] for name in self.optional_inputs if name in batch}
        loss: Tensor = self(**{name: batch[name] for name in self.inputs}, **optional)
        return loss

    def batch_flops(self, batch: Batch) -> float:
        """Model FLOPs of a training step on the batch, without padding; `transformer.cost` says by which convention."""
        return sum(self._training_flops(lengths, n) for lengths, n in self._lengths(batch).items())

    def batch_recomputed_flops(self, batch: Batch, recompute: RecomputeConfig, sizes: Sizes) -> float:
        """FLOPs that a training step on the batch recomputes in its backward, without padding."""
        return sum(
            recomputed_flops(model_parts_of(self.config, lengths), n, recompute, sizes)
            for lengths, n in self._lengths(batch).items()
        )

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self._build()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, stage: Literal["val", "test"], batch: Batch) -> None:
        loss = self._loss(batch)
        assert self.model is not None and self.model.loss_weight is not None
        weight, tallies = self.model.loss_weight, self.model.tallies
        self._log_mean(stage, "loss", loss * weight, weight)
        self._log_mean(stage, "perplexity", tallies["negative_log_likelihood"], weight)
        self._log_mean(stage, "accuracy", tallies["correct"], weight)

    def _log_mean(self, stage: Literal["val", "test"], name: str, total: Tensor, weight: Tensor) -> None:
        """Adds a batch's sum and weight to the metric, and logs the mean over all batches."""
        mean = self._means[f"{stage}_{name}"]
        assert isinstance(mean, TokenMean)
        mean.update(total, weight)
        self.log(f"{stage}_{name}", mean, prog_bar=name == "loss")

    def configure_optimizers(self) -> Any:
        return adamw_with_warmup(self, self.optimizer)
