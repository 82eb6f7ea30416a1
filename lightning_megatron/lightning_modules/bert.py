"""`BertModule`: a BERT that pre-trains, validates and fills gaps under any strategy."""

from collections import Counter
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightning_megatron.data import special_tokens
from lightning_megatron.data.token_roles import Role
from lightning_megatron.lightning_modules.adamw import AdamWConfig
from lightning_megatron.lightning_modules.batch_checks import require_within
from lightning_megatron.lightning_modules.loaders import COPY
from lightning_megatron.lightning_modules.pretrain import Batch, PretrainModule
from lightning_megatron.lightning_modules.text_data import TextDataModule
from lightning_megatron.metrics.token_means import TokenMean
from lightning_megatron.models.bert import BertConfig, BertLogits, BertModel
from lightning_megatron.models.bert_cost import bert_training_flops
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.trainer.checkpointing.hyper_parameters import rebuilt

_ORDER = "sentence_order_accuracy"
_ADAMW = AdamWConfig(lr=1e-4, weight_decay=0.01, betas=(0.9, 0.999), epsilon=1e-6)


class BertModule(PretrainModule):
    """Masked language modelling and, where the model has a head for it, sentence order.

    A batch holds `tokens`, `labels`, `loss_mask` and `padding_mask`, each [batch, sequence], `token_types` as well, of
    which a model without an embedding of types sees nothing, and `sentence_order_labels` [batch], which a model without
    a head for them refuses. Losses are those of `BertModel`: of tokens and of order together. Evaluation also logs
    `val_sentence_order_accuracy`, the share of samples whose order is predicted right, where batches have its labels.

    Prediction takes batches of `tokens`, padded to one length after their `lengths` [batch], and returns the text of
    each row with the likeliest token at each mask token, without class and separator tokens, which the tokenizer of
    the data module defines.

    Args:
        config: Architecture of the model.
        optimizer: AdamW and its learning-rate curve.
    """

    model: BertModel | None
    optional_inputs = ("token_types", "padding_mask", "sentence_order_labels")
    means: ClassVar[dict[str, type[TokenMean]]] = {**PretrainModule.means, _ORDER: TokenMean}

    def __init__(self, config: BertConfig, optimizer: AdamWConfig = _ADAMW) -> None:
        self.config: BertConfig = rebuilt(BertConfig, config)
        super().__init__(optimizer, config=self.config)

    def _build(self) -> BertModel:
        return BertModel(self.config)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        token_types: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The loss with labels, else logits."""
        known_types = token_types if self.config.num_token_types else None
        return super().forward(tokens, labels, loss_mask, known_types, *args, **kwargs)

    def _loss(self, batch: Batch) -> Tensor:
        self._require_known_kinds(batch)
        return super()._loss(batch)

    def _require_known_kinds(self, batch: Batch) -> None:
        if (kinds := self.config.num_token_types) and "token_types" in batch:
            way_out = f"num_token_types ({kinds}) is how many the model tells apart"
            require_within("token_types", batch["token_types"], kinds, way_out)
        if "sentence_order_labels" in batch:
            way_out = "1 says that the two parts of a sample are swapped, 0 that they are not"
            require_within("sentence_order_labels", batch["sentence_order_labels"], 2, way_out, may_be_none=True)

    def _evaluate(self, stage: Literal["val", "test"], batch: Batch) -> None:
        super()._evaluate(stage, batch)
        if self.config.add_binary_head and "sentence_order_labels" in batch:
            assert self.model is not None
            tallies = self.model.tallies
            self._log_mean(stage, _ORDER, tallies["sentence_order_correct"], tallies["sentence_order_samples"])

    def predict_step(self, batch: Batch, batch_idx: int) -> list[Tensor]:
        tokens, lengths = batch["tokens"], batch["lengths"]
        is_token = torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(1)
        logits = self(tokens, padding_mask=is_token)
        assert isinstance(logits, BertLogits), "without labels they are logits"
        roles = self._roles
        filled = torch.where(tokens == roles["mask"], logits.tokens.argmax(dim=-1), tokens)
        # By the input tokens: whatever fills a gap is text.
        is_text = is_token & (tokens != roles["class"]) & (tokens != roles["separator"])
        samples = batch["samples"].tolist() if "samples" in batch else range(len(tokens))
        rows = zip(filled, is_text, samples, strict=True)
        return [row[is_own] for row, is_own, number in rows if number != COPY]

    @property
    def _roles(self) -> dict[Role, int]:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, TextDataModule) or data.tokenizer is None:
            raise ValueError("prediction fills mask tokens and needs a data module with a tokenizer: a BertDataModule")
        return special_tokens(data.tokenizer, ("mask", "class", "separator"))

    def batch_tokens(self, batch: Batch) -> int:
        """Tokens of a batch that are trained on, without padding."""
        return sum(lengths.sequence * n for lengths, n in self._lengths(batch).items())

    def _lengths(self, batch: Batch) -> Counter[SequenceLengths]:
        is_token = batch.get("padding_mask")
        lengths = torch.ones_like(batch["tokens"]) if is_token is None else is_token != 0
        return Counter(SequenceLengths(sequence=length) for length in lengths.sum(dim=1).tolist())

    def _training_flops(self, lengths: SequenceLengths, number: int) -> float:
        return bert_training_flops(self.config, batch=number, sequence=lengths.sequence)
