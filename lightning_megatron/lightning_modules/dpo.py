"""`DpoModule`: preference tuning of any causal model of transformers (DPO), with a frozen reference model or without.

    margin  log-ratio of the chosen answer minus that of the rejected one; a log-ratio is an answer's log-probability
            under the policy, minus that under the reference
    loss    -log sigmoid(beta * margin), in the mean over pairs

Source: Rafailov et al., arXiv 2305.18290, equation 7.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_megatron.data.preference_samples import ANSWERS
from lightning_megatron.lightning_modules.adamw import AdamWConfig
from lightning_megatron.lightning_modules.guided import GuidedModule
from lightning_megatron.lightning_modules.preference_data import PreferenceDataModule
from lightning_megatron.metrics.token_means import TokenMean
from lightning_megatron.trainer import ConfigurationError
from lightning_megatron.transformer.lora import LoraConfig

ReferenceSource = Literal["model", "data"]
"""Where log-probabilities of the reference come from."""
_ADAMW = AdamWConfig(lr=1e-6, weight_decay=0.0, betas=(0.9, 0.999))


class DpoModule(GuidedModule):
    """Trains a policy to prefer chosen answers to rejected ones, beside the frozen model that it starts from.

    Batches are those of a PreferenceDataModule. Logs `train_loss`, `train_margin` (the mean margin times beta) and
    `train_accuracy` (the share of pairs with a positive margin), and of validations the same with `val_`. Prediction
    returns the log-probabilities of both answers under the policy [batch, 2], which `WriteReferences` writes.

    Args:
        path: Folder of the model in the form of transformers.
        optimizer: AdamW and its learning-rate curve.
        lora: LoRA adapters of peft, which alone are trained; None trains all weights.
        beta: Factor of the margin: how far the policy may leave the reference.
        reference: Source of the reference's log-probabilities. model: a second, frozen model with the weights in
            `path`, whole on every pipeline stage; data: the columns reference_chosen and reference_rejected.
    """

    def __init__(
        self,
        path: str,
        optimizer: AdamWConfig = _ADAMW,
        lora: LoraConfig | None = None,
        beta: float = 0.1,
        reference: ReferenceSource = "model",
    ) -> None:
        super().__init__(path, optimizer=optimizer, lora=lora)
        faults = [] if 0 < beta < float("inf") else [f"beta ({beta}) must be above 0, and finite"]
        if reference not in get_args(ReferenceSource):
            faults.append(f"reference ({reference!r}) must be one of {', '.join(get_args(ReferenceSource))}")
        if faults:
            raise ValueError("\n".join(faults))
        self.beta = beta
        self.reference: ReferenceSource = reference
        # Of validations.
        self._means = nn.ModuleDict({name: TokenMean() for name in ("loss", "margin", "accuracy")})
        self.save_hyperparameters({"beta": beta, "reference": reference})

    @property
    def guide_path(self) -> str | None:
        return self.path if self.reference == "model" else None

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, PreferenceDataModule) or stage == "predict":
            return
        if self.reference == "data" and not data.has_references:
            raise ConfigurationError(
                "reference ('data') needs rows with reference_chosen and reference_rejected; compute them by predict "
                "with --references.path=FILE and give that file as data.path, or use reference='model'"
            )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        loss_B, margin_B = self._losses(batch)
        loss = loss_B.mean()
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_margin", margin_B.mean())
        self.log("train_accuracy", (margin_B > 0).to(margin_B).mean(), prog_bar=True)
        # Of pairs, which all count alike.
        return {"loss": loss, "loss_reduction": "mean"}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss_B, margin_B = self._losses(batch)
        mask_B = batch["loss_mask"].to(loss_B)
        for name, value_B in (("loss", loss_B), ("margin", margin_B), ("accuracy", (margin_B > 0).to(margin_B))):
            mean = self._means[name]
            assert isinstance(mean, TokenMean)
            mean.update((value_B * mask_B).sum(), mask_B.sum())
            self.log(f"val_{name}", mean, prog_bar=name == "loss")

    def _losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The loss and the margin times beta of each pair [batch]."""
        policy_B2 = self._log_probabilities(self._policy, batch)
        reference_B2 = (
            batch["references"].to(policy_B2) if self.guide is None else self._log_probabilities(self.ask_guide, batch)
        )
        chosen_B, rejected_B = (policy_B2 - reference_B2).unbind(dim=1)
        margin_B = self.beta * (chosen_B - rejected_B)
        return -functional.logsigmoid(margin_B), margin_B

    def _policy(self, tokens_RT: Tensor) -> Any:
        return self.model(input_ids=tokens_RT, use_cache=False)

    def _log_probabilities(self, model: Callable[[Tensor], Any], batch: dict[str, Tensor]) -> Tensor:
        """The log-probability of each answer of a pair under a model [batch, 2]."""
        # One call for both answers: a schedule runs a model once in a step. What pads a row is behind its labels.
        tokens_RT = torch.cat([batch[f"{name}_tokens"] for name in ANSWERS])
        labels_RT = torch.cat([batch[f"{name}_labels"] for name in ANSWERS])
        self._require_positions(tokens_RT.shape[1], "rows of a batch", "a smaller data.sequence_length")
        logits_RTV = model(tokens_RT).logits
        # Ranks of tp keep their parts of the vocabulary.
        losses = functional.cross_entropy(logits_RTV.flatten(0, 1), labels_RT.flatten(), reduction="none")
        return -losses.view(labels_RT.shape).sum(dim=1).view(len(ANSWERS), -1).t()

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        return self._log_probabilities(self._policy, batch)

    def batch_tokens(self, batch: dict[str, Tensor]) -> int:
        """Tokens of a batch of pairs, padding included."""
        return sum(int(batch[f"{name}_tokens"].numel()) for name in ANSWERS)
