"""BERT: an encoder that sees both ways, as parts `embedding`, `layers.0` and on, `head`; pre-norm layers have a
`final_norm` before the head.

Between parts, and between stages, travels the residual stream [T/sp, H]; what else a part needs (`BertInputs`) every
stage makes from the caller's inputs by itself. Padding after the tokens of a row is left out: each row is a document.

Source: Devlin et al., arXiv 1810.04805; sentence order: Lan et al., arXiv 1909.11942, section 3.1.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_megatron.comm.p2p import Payload
from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.context.documents import NO_DOCUMENT, Documents, documents_of
from lightning_megatron.mesh import Mesh
from lightning_megatron.models.bert_embedding import BertEmbedding
from lightning_megatron.models.bert_heads import BertHead, SampleTargets
from lightning_megatron.models.embedding import build_token_embedding
from lightning_megatron.models.heads import Targets, targets_of
from lightning_megatron.models.inputs import require_labels, require_shapes
from lightning_megatron.models.language_model import LanguageModel
from lightning_megatron.pipeline.module import Part
from lightning_megatron.tensor.cross_entropy import IGNORED
from lightning_megatron.transformer import cost
from lightning_megatron.transformer.attention import BIDIRECTIONAL
from lightning_megatron.transformer.build import build_norm
from lightning_megatron.transformer.config import LanguageModelConfig, NormPlacement
from lightning_megatron.transformer.layer import TransformerLayer
from lightning_megatron.transformer.post_norm_layer import PostNormLayer
from lightning_megatron.transformer.tokens import Tokens


@config_dataclass
class BertConfig(LanguageModelConfig):
    """Architecture of a BERT: Google's by default; Megatron's with pre-norm layers and no norm of the embedding."""

    sees_both_ways: ClassVar[bool] = True
    norm_placements: ClassVar[tuple[NormPlacement, ...]] = ("post", "pre")

    norm_epsilon: float = 1e-12
    """Number added to the variance (RMSNorm: to the mean square) under the root of a norm."""
    max_sequence_length: int = 512
    """Longest sequence in tokens: positions of the learned embedding."""
    norm_placement: NormPlacement = "post"
    """Placement of norms: after each residual addition (post), or before attention and MLP and after the last layer
    (pre)."""
    embedding_norm: bool = True
    """Whether the sum of the embeddings is normed."""
    num_token_types: int = 2
    """Number of token types (segments); 0: there is no token type embedding."""
    add_binary_head: bool = True
    """Whether there is a second head, for sentence order, besides that for masked tokens."""

    def faults(self) -> list[str]:
        faults = super().faults()
        if self.num_token_types < 0:
            faults.append(f"num_token_types ({self.num_token_types}) must be at least 0; 0 is no embedding of types")
        if self.is_gated:
            faults.append(f"activation ({self.activation!r}) must be 'gelu' or 'gelu_tanh': BERT's head has no gate")
        if self.moe is not None:
            faults.append(f"moe ({self.moe.router.num_experts} experts) must be None: BERT's layers are dense")
        if self.scales_embedding:
            faults.append("scales_embedding (True) must be False: BERT adds its embeddings as they are")
        if self.sliding_window:
            faults.append(f"sliding_window ({self.sliding_window}) must be 0: a window is one of causal attention")
        return faults


class BertLogits(NamedTuple):
    """Logits of both of BERT's heads."""

    tokens: Tensor
    """Logits of tokens, 0 at padding: [batch, sequence, vocab_size]."""
    sentence_order: Tensor | None
    """Logits of sentence order, 0 for a sample without tokens: [batch, 2]; None without a binary head."""


@dataclass(frozen=True, kw_only=True)
class BertInputs:
    """Inputs of a call's parts besides the hidden states."""

    tokens: Tokens
    types_T: Tensor
    """Token types of the stream, int64."""
    targets: Targets | None
    """Targets of masked tokens; none: the caller wants logits."""
    samples: SampleTargets | None
    """Targets of the binary head; none: nothing is asked of it."""


class BertModel(LanguageModel):
    """A BERT: with labels the loss, without them `BertLogits`; see `LanguageModel`.

    With sentence_order_labels the loss has on top a mean over samples, in which each weighs as its labels do (see
    `bert_heads`, Note: a sample weighs its targets).
    """

    config: BertConfig

    def __init__(self, config: BertConfig, *, mesh: Mesh | None = None, seed: int | None = None) -> None:
        super().__init__(config, bert_parts, mesh=mesh, seed=seed)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        token_types: Tensor | None = None,
        padding_mask: Tensor | None = None,
        sentence_order_labels: Tensor | None = None,
    ) -> Tensor | BertLogits:
        """The loss [] with labels, else logits.

        tokens, labels (-100: no target), loss_mask, token_types (0 where not given) and padding_mask are [batch,
        sequence]. padding_mask is 1 where there is a token and 0 for the padding after the tokens of a row, which
        nothing sees and which counts nothing. sentence_order_labels [batch] are 0 or 1, -100 where there is no target.
        """
        output: Tensor | BertLogits = super().forward(
            tokens,
            labels=labels,
            loss_mask=loss_mask,
            token_types=token_types,
            padding_mask=padding_mask,
            sentence_order_labels=sentence_order_labels,
        )
        return output

    def prepare(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        token_types: Tensor | None = None,
        padding_mask: Tensor | None = None,
        sentence_order_labels: Tensor | None = None,
    ) -> tuple[Tensor, BertInputs]:
        of_tokens = {"labels": labels, "loss_mask": loss_mask, "token_types": token_types, "padding_mask": padding_mask}
        require_shapes("tokens", tokens, of_tokens)
        require_labels(labels, {"sentence_order_labels": sentence_order_labels, "loss_mask": loss_mask})
        _require_one_for_each_row(tokens, sentence_order_labels)
        self._require_known(token_types, sentence_order_labels)
        is_token_BS = None if padding_mask is None else padding_mask != 0
        documents = None if is_token_BS is None else _rows_of(is_token_BS.cpu(), tokens.device)
        stream = self._stream(tokens, documents, is_causal=False)
        targets = samples = None
        if labels is not None:
            labels = (
                labels
                if is_token_BS is None
                else labels.masked_fill(~is_token_BS.to(labels.device, non_blocking=True), IGNORED)
            )
            targets = targets_of(labels, loss_mask, stream)
            if sentence_order_labels is not None:
                weights_B = targets.weights_BS.sum(dim=1, dtype=torch.float64)
                samples = SampleTargets(labels_B=sentence_order_labels.long(), weights_B=weights_B)
        self.loss_weight = None if targets is None else targets.sum_of_weights
        types = torch.zeros_like(tokens) if token_types is None else token_types
        return stream.flat(tokens), BertInputs(
            tokens=stream, types_T=stream.flat(types), targets=targets, samples=samples
        )

    def run_part(self, name: str, hidden: Payload, context: BertInputs) -> Tensor | BertLogits:
        assert isinstance(hidden, Tensor)
        module = self.get_submodule(name)
        if isinstance(module, BertHead):
            return self._finish(module, hidden, context)
        if isinstance(module, BertEmbedding):
            embedded: Tensor = module(hidden, context.types_T, context.tokens)
            return embedded
        output: Tensor = module(hidden) if name == "final_norm" else module(hidden, context.tokens)
        return output

    def _finish(self, head: BertHead, hidden: Tensor, context: BertInputs) -> Tensor | BertLogits:
        """The loss, or logits."""
        tied, own = "embedding.tokens.weight", "head.masked_tokens.weight"
        weight = self.get_parameter(tied if self.config.tie_embeddings else own)
        of_tokens, of_samples, stream = head.masked_tokens, head.sentence_order, context.tokens
        if context.targets is None:
            logits = of_tokens.full_logits(of_tokens(hidden, weight), stream)
            order = None if of_samples is None else of_samples.full_logits(hidden, stream)
            return BertLogits(logits, order)
        losses, of_words = of_tokens.losses(hidden, weight, context.targets, stream)
        added, of_order = None, {}
        if of_samples is not None and context.samples is None:
            losses = of_samples.beside(losses)
        elif of_samples is not None and context.samples is not None:
            added = of_samples.loss_sum(hidden, context.samples, stream)
            of_order = of_samples.tallies(hidden, context.samples, stream)
        self.tallies = of_words | of_order
        return of_tokens.loss(losses, context.targets, stream, of_samples=added)

    def _require_known(self, token_types: Tensor | None, sentence_order_labels: Tensor | None) -> None:
        """Raises ValueError for inputs that this architecture has no use for."""
        if token_types is not None and not self.config.num_token_types:
            raise ValueError("token_types are given, and num_token_types (0) says that there are none; leave them out")
        if sentence_order_labels is not None and not self.config.add_binary_head:
            raise ValueError(
                "sentence_order_labels are given, and the model has no binary head to learn them; leave them out, or "
                "build it with BertConfig(add_binary_head=True)"
            )


def _require_one_for_each_row(tokens: Tensor, of_samples: Tensor | None) -> None:
    if of_samples is not None and of_samples.shape != tokens.shape[:1]:
        raise ValueError(
            f"sentence_order_labels {tuple(of_samples.shape)} must be one for each row of tokens: [{tokens.shape[0]}]"
        )


def _rows_of(is_token_BS: Tensor, device: torch.device) -> Documents:
    """Each row as a document, of tokens on the device. Raises ValueError where padding stands before a token."""
    torn_B = (is_token_BS[:, 1:] & ~is_token_BS[:, :-1]).any(dim=1)
    if torn_B.any():
        row = int(torn_B.nonzero()[0])
        raise ValueError(
            f"padding_mask of row {row} has padding before a token; it must be 1 for the tokens of a row and 0 for the "
            "padding behind them: put the padding at the end"
        )
    return documents_of(torch.where(is_token_BS, 0, NO_DOCUMENT), device)


def bert_parts(config: BertConfig, mesh: Mesh) -> list[Part]:
    """The parts of a BERT in order; costs are the FLOPs of a full sequence's forward."""
    tp, sp = mesh.tp, mesh.sp
    is_pre, sequence = config.norm_placement == "pre", config.max_sequence_length
    kind = TransformerLayer if is_pre else PostNormLayer
    flops = cost.layer_linear_flops(config, num_tokens=sequence) + cost.layer_attention_flops(
        config, batch=1, sequence=sequence, is_causal=False
    )
    embedding = partial(
        BertEmbedding,
        config,
        num_token_types=config.num_token_types,
        has_norm=config.embedding_norm,
        tp=tp,
        sp=sp,
    )
    layers = [f"layers.{i}" for i in range(config.num_layers)]
    norm = Part(name="final_norm", build=partial(build_norm, config, tp=tp, sp=sp), symbol="", cost=0.0)
    token_embedding = partial(build_token_embedding, config, tp=tp, sp=sp)
    return [
        Part(name="embedding", build=embedding, symbol="E", cost=0.0),
        *(
            Part(name=name, build=partial(kind, config, tp=tp, sp=sp, name=name, mask_spec=BIDIRECTIONAL), cost=flops)
            for name in layers
        ),
        *([norm] if is_pre else []),
        Part(
            name="head",
            build=partial(BertHead, config, has_sentence_order=config.add_binary_head, tp=tp, sp=sp),
            symbol="L",
            # The dense layer before the logits is a matrix of hidden by hidden.
            cost=cost.head_flops(config, num_tokens=sequence) + 2 * sequence * config.hidden_size**2,
            shares={"embedding.tokens": token_embedding} if config.tie_embeddings else {},
        ),
    ]
