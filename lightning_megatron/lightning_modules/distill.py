"""`DistillModule`: a causal model of transformers that learns the distributions of a frozen teacher.

    divergence  KL(teacher || student) of a token's distributions at a temperature, times its square
    loss        label_fraction * cross entropy + (1 - label_fraction) * divergence, in the mean over valid labels

Source: Hinton et al., arXiv 1503.02531, section 2.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from lightning_megatron.lightning_modules.adamw import AdamWConfig
from lightning_megatron.lightning_modules.conversation_data import ConversationDataModule
from lightning_megatron.lightning_modules.guided import GuidedModule
from lightning_megatron.lightning_modules.pretrain import Batch
from lightning_megatron.metrics.token_means import TokenMean
from lightning_megatron.models.sampling import GenerationConfig
from lightning_megatron.trainer import ConfigurationError
from lightning_megatron.transformer.lora import LoraConfig

_ADAMW = AdamWConfig(lr=1e-5, weight_decay=0.0, betas=(0.9, 0.999))
_GENERATION = GenerationConfig()
_NO_LABEL = -100


class DistillModule(GuidedModule):
    """Trains a student on what a frozen teacher of the same vocabulary says of each label's place.

    Batches are those of a ChatDataModule. Logs `train_loss` and `train_divergence`, and of validations `val_loss` and
    `val_divergence`, means over the valid labels. Prediction generates text by the student.

    Args:
        path: Folder of the student in the form of transformers.
        teacher: Folder of the teacher, which has the same tokenizer and vocabulary.
        optimizer: AdamW and its learning-rate curve.
        lora: LoRA adapters of peft, which alone are trained; None trains all weights.
        generation: Sampling of text in prediction.
        temperature: Divisor of the logits of both models in the divergence.
        label_fraction: Share of the cross entropy of the labels in the loss, from 0 to 1.
    """

    def __init__(
        self,
        path: str,
        teacher: str,
        optimizer: AdamWConfig = _ADAMW,
        lora: LoraConfig | None = None,
        generation: GenerationConfig = _GENERATION,
        temperature: float = 1.0,
        label_fraction: float = 0.5,
    ) -> None:
        super().__init__(path, optimizer=optimizer, lora=lora, generation=generation)
        faults = [] if 0 < temperature < float("inf") else [f"temperature ({temperature}) must be above 0, and finite"]
        if not 0 <= label_fraction <= 1:
            faults.append(f"label_fraction ({label_fraction}) must be from 0 to 1")
        if faults := faults + self._guide_faults(teacher):
            raise ValueError("\n".join(faults))
        self.teacher, self.temperature, self.label_fraction = teacher, temperature, label_fraction
        self.save_hyperparameters({"teacher": teacher, "temperature": temperature, "label_fraction": label_fraction})
        # Of validations.
        self._means = nn.ModuleDict({name: TokenMean() for name in ("loss", "divergence")})

    @property
    def guide_path(self) -> str:
        return self.teacher

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, ConversationDataModule) and data.config.packing == "documents":
            raise ConfigurationError(
                "packing ('documents') is not for distillation: nobody has looked at whether the teacher keeps "
                "documents of a row apart; use data.packing='none'"
            )

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        losses, num_valid = self._sums(batch)
        # A part of a batch without labels has nothing to say, and no weight.
        means = {name: value / num_valid.clamp(min=1) for name, value in losses.items()}
        self.log("train_loss", means["loss"], prog_bar=True)
        self.log("train_divergence", means["divergence"])
        return {"loss": means["loss"], "loss_weight": num_valid}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        losses, num_valid = self._sums(batch)
        for name, value in losses.items():
            mean = self._means[name]
            assert isinstance(mean, TokenMean)
            mean.update(value, num_valid)
            self.log(f"val_{name}", mean, prog_bar=name == "loss")

    def _sums(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Loss and divergence, summed over the valid labels, and the number of these [], by one call of each model."""
        tokens_BT = batch["tokens"]
        self._require_positions(tokens_BT.shape[1], "rows of a batch", "a smaller data.sequence_length")
        labels_N = batch["labels"].masked_fill(batch["loss_mask"] == 0, _NO_LABEL).flatten()
        is_valid_N = labels_N != _NO_LABEL
        student_NV = self.model(input_ids=tokens_BT, use_cache=False).logits.flatten(0, 1)[is_valid_N]
        teacher_NV = self.ask_guide(tokens_BT).logits.flatten(0, 1)[is_valid_N]
        likelihood = functional.cross_entropy(student_NV, labels_N[is_valid_N], reduction="sum")
        divergence = self.temperature**2 * functional.kl_div(
            functional.log_softmax(student_NV / self.temperature, dim=-1),
            functional.log_softmax(teacher_NV / self.temperature, dim=-1),
            reduction="sum",
            log_target=True,
        )
        loss = self.label_fraction * likelihood + (1 - self.label_fraction) * divergence
        return {"loss": loss, "divergence": divergence}, is_valid_N.sum()
