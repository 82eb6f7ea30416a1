"""T5: an encoder and a decoder that looks at it, as one list of parts that stages cut wherever they like.

    embedding | encoder.layers.0 ... | encoder.final_norm | decoder.embedding | decoder.layers.0 ...
        | decoder.final_norm | head

Between the parts of the encoder travels its residual stream [M/sp, H]; from `decoder.embedding` on a dict of the
decoder's, `hidden` [T/sp, H], and of the encoder's output, `memory` [M/sp, H], which rides along to every stage with
decoder layers: what each adds to its gradient is summed on the way back. What else a part needs (`Inputs`) every stage
makes from the caller's inputs by itself.

Relative positions are one table for a stack, born with its first layer; the layers of other stages share it.
Source: Raffel et al., arXiv 1910.10683; Shazeer, arXiv 2002.05202 (the gated one of T5 v1.1).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from lightning_megatron.comm.p2p import Payload
from lightning_megatron.context.documents import Documents, documents_of
from lightning_megatron.context.kernel import Bias
from lightning_megatron.context.layout import require_even
from lightning_megatron.context.other_stream import NOTHING, OtherStream
from lightning_megatron.mesh import Axis, Mesh, Sizes, ambient_mesh
from lightning_megatron.models.answer import Answer, kept_memory
from lightning_megatron.models.embedding import PositionEmbedding
from lightning_megatron.models.heads import LanguageModelHead, Targets, targets_of
from lightning_megatron.pipeline.layout import layout_faults as stage_faults
from lightning_megatron.pipeline.module import Part, PipelineModule
from lightning_megatron.sharding import Initial
from lightning_megatron.tensor.activation import Activation
from lightning_megatron.tensor.embedding import VocabParallelEmbedding
from lightning_megatron.transformer import cost
from lightning_megatron.transformer.config import (
    LanguageModelConfig,
    Normalization,
    Position,
    layout_faults,
)
from lightning_megatron.transformer.continuation import last_of_rows, stream_behind
from lightning_megatron.transformer.cross_attention import KeptMemory, Memory
from lightning_megatron.transformer.dropout import Dropout
from lightning_megatron.transformer.encoder_decoder import DecoderLayer
from lightning_megatron.transformer.init import initialise
from lightning_megatron.transformer.layer import TransformerLayer, build_norm
from lightning_megatron.transformer.relative import RelativeBias
from lightning_megatron.transformer.tokens import Tokens, stream_of


@dataclass(frozen=True, kw_only=True)
class T5Config(LanguageModelConfig):
    """The architecture of a T5, by default of the first kind.

    T5 v1.1 has `activation="geglu_tanh", tie_embeddings=False, scales_head=False`.
    """

    positions: ClassVar[tuple[Position, ...]] = ("relative", "learned", "none")
    scales_scores: ClassVar[bool] = False

    num_decoder_layers: int = 0
    # layers of the decoder, `num_layers` are the encoder's; 0: as many
    activation: Activation = "relu"
    normalization: Normalization = "rmsnorm"
    norm_epsilon: float = 1e-6
    add_bias_linear: bool = False
    position: Position = "relative"
    relative_buckets: int = 32
    # ranges of distances, each with a number for each head, where position is "relative"; those of the encoder are for
    # keys before a token by one half, for keys behind it by the other
    relative_max_distance: int = 128
    # tokens from which on all distances are alike
    max_sequence_length: int = 512
    # positions of the encoder's learned embedding, in tokens; and what stages are balanced for
    max_decoder_sequence_length: int = 0
    # the same of the decoder; 0: as many
    share_embeddings: bool = True
    # encoder and decoder have one token embedding; else the decoder has its own, which a tied head uses
    scales_head: bool = True
    # what the head multiplies is divided by sqrt(hidden_size), as it was trained where the embedding is tied
    embedding_std: float = 1.0
    # standard deviation of initial token embeddings

    def __post_init__(self) -> None:
        for name, size in (
            ("num_decoder_layers", self.num_layers),
            ("max_decoder_sequence_length", self.max_sequence_length),
        ):
            if getattr(self, name) == 0:
                object.__setattr__(self, name, size)
        super().__post_init__()

    def faults(self) -> list[str]:
        faults = super().faults()
        faults += [
            f"{name} ({getattr(self, name)}) must be at least 1"
            for name in ("num_decoder_layers", "max_decoder_sequence_length")
            if getattr(self, name) < 1
        ]
        faults += [
            f"{name} ({getattr(self, name)!r}) must be {usual!r}: a T5 has no such thing"
            for name, usual in (
                ("qk_norm", False),
                ("sliding_window", 0),
                ("full_attention_layers", ()),
                ("moe", None),
            )
            if getattr(self, name) != usual
        ]
        if not self.embedding_std >= 0:
            faults.append(f"embedding_std ({self.embedding_std}) must be at least 0")
        if self.position == "relative":
            if self.relative_buckets < 4 or self.relative_buckets % 2:
                faults.append(f"relative_buckets ({self.relative_buckets}) must be even and at least 4")
            elif self.relative_max_distance <= self.relative_buckets // 2:
                faults.append(
                    f"relative_max_distance ({self.relative_max_distance}) must be above half of relative_buckets "
                    f"({self.relative_buckets}): nearer distances have a bucket each"
                )
        return faults

    @property
    def num_staged_layers(self) -> int:
        return self.num_layers + self.num_decoder_layers

    @property
    def decoder_embedding(self) -> str:
        """The name of the module that embeds the decoder's tokens."""
        return "embedding.tokens" if self.share_embeddings else "decoder.embedding.tokens"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the parts of a call read beside hidden states."""

    encoder: Tokens | None
    # its stream; none: a call before this one ran it
    decoder: Tokens
    decoder_ids_T: Tensor
    source: OtherStream | None = None
    # what the decoder's documents see of the encoder's; none: keys and values are kept
    kept: KeptMemory | None = None
    targets: Targets | None = None
    # none: the caller wants logits
    answer: Answer | None = None
    # none: all logits, or the loss, are asked for


class StackEmbedding(nn.Module):
    """The way into a stack: token ids [T] to hidden states [T/sp, H], with learned positions where there are some.

    `tokens` is none where the stack uses another's; `name` names the dropout, `length` is how many positions there are.
    """

    def __init__(
        self, config: T5Config, *, tp: Axis, sp: Axis, name: str, length: int, has_tokens: bool = True
    ) -> None:
        super().__init__()
        if has_tokens:
            self.tokens = build_tokens(config, tp=tp, sp=sp)
        self.has_positions = config.position == "learned"
        if self.has_positions:
            self.positions = PositionEmbedding(replace(config, max_sequence_length=length), tp=tp, sp=sp)
        self.dropout = Dropout(config.hidden_dropout, name)

    def forward(self, embedded_TH: Tensor, tokens: Tokens) -> Tensor:
        """From what the token embedding gave."""
        hidden_TH = embedded_TH + self.positions(tokens) if self.has_positions else embedded_TH
        dropped_TH: Tensor = self.dropout(hidden_TH, tokens)
        return dropped_TH


class StackNorm(nn.Module):
    """The way out of a stack: a norm and a dropout of [T/sp, H]."""

    def __init__(self, config: T5Config, *, tp: Axis, sp: Axis, name: str) -> None:
        super().__init__()
        self.norm = build_norm(config, tp=tp, sp=sp)
        self.dropout = Dropout(config.hidden_dropout, name)

    def forward(self, hidden_TH: Tensor, tokens: Tokens) -> Tensor:
        dropped_TH: Tensor = self.dropout(self.norm(hidden_TH), tokens)
        return dropped_TH


class T5Model(PipelineModule):
    """A T5 of which this rank holds its stage, of both stacks, and its slice of each weight.

    Called with labels it returns the loss: the mean over the decoder's tokens that have a label and are not masked out;
    `loss_weight` then says over how many. Without labels it returns logits [batch, decoder sequence, vocab_size].
    Either is that of the whole call, on every rank of tp and cp: they take the same inputs, and cut them by themselves.
    Raises ValueError where the architecture does not fit the mesh.
    """

    cuts_sequences = True

    def __init__(self, config: T5Config, *, mesh: Mesh | None = None, seed: int | None = None) -> None:
        mesh = mesh if mesh is not None else ambient_mesh()
        if faults := t5_layout_faults(config, mesh.sizes):
            raise ValueError("\n".join(faults))
        super().__init__(t5_parts(config, mesh), mesh=mesh, seed=seed)
        self.config = config
        initialise(self, self.draws.seed)

    def forward(
        self,
        encoder_tokens: Tensor,
        decoder_tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        encoder_segments: Tensor | None = None,
        decoder_segments: Tensor | None = None,
        answer: Answer | None = None,
    ) -> Tensor:
        """The loss [] with labels, else logits; labels (-100: no target) and loss_mask are as decoder_tokens, [batch,
        decoder sequence]; the encoder's tokens, mask and segments are [batch, encoder sequence].

        The label of a position is the target of that position: nothing is shifted here, so decoder_tokens begin with
        the token that starts a text. `encoder_padding_mask` is 1 for tokens and 0 for padding at either end of a row,
        which nobody looks at. Padding at the end of the decoder's rows needs no mask, only no labels. Where documents
        are packed both `segments` give each token the number of its document in its row, from 0, and -1 where there is
        none: a token of the decoder sees the encoder's document of the same row and number, and one for which there is
        none sees nothing of it.

        With an `answer`, which goes without labels and segments, the logits are [batch, vocab_size], of what follows
        each row of decoder_tokens; `generate_t5` calls so.
        """
        asked = {} if answer is None else {"answer": answer}
        output: Tensor = super().forward(
            encoder_tokens,
            decoder_tokens,
            labels=labels,
            loss_mask=loss_mask,
            encoder_padding_mask=encoder_padding_mask,
            encoder_segments=encoder_segments,
            decoder_segments=decoder_segments,
            **asked,
        )
        return output

    def prepare(
        self,
        encoder_tokens: Tensor,
        decoder_tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        encoder_segments: Tensor | None = None,
        decoder_segments: Tensor | None = None,
        answer: Answer | None = None,
    ) -> tuple[Tensor, Inputs]:
        _check_shapes(
            encoder_tokens,
            decoder_tokens,
            {"encoder_padding_mask": encoder_padding_mask, "encoder_segments": encoder_segments},
            {"labels": labels, "loss_mask": loss_mask, "decoder_segments": decoder_segments},
        )
        if answer is not None:
            return self._prepare_answer(encoder_tokens, decoder_tokens, encoder_padding_mask, answer)
        if encoder_padding_mask is not None:
            # Padding is what is in no document of a row that has one.
            encoder_segments = encoder_padding_mask.bool().long() - 1
            decoder_segments = decoder_tokens.new_zeros(decoder_tokens.shape)
        documents = [None if s is None else documents_of(s) for s in (encoder_segments, decoder_segments)]
        encoder = self._stream(encoder_tokens, documents[0], is_causal=False)
        decoder = self._stream(decoder_tokens, documents[1], is_causal=True)
        source = OtherStream(encoder.layout, _seen_segments(*documents))
        targets = None if labels is None else targets_of(labels, loss_mask, decoder)
        self.loss_weight = None if targets is None else targets.sum_of_weights
        inputs = Inputs(
            encoder=encoder,
            decoder=decoder,
            decoder_ids_T=decoder.flat(decoder_tokens),
            source=source,
            targets=targets,
        )
        return encoder.flat(encoder_tokens), inputs

    def _prepare_answer(
        self, encoder_tokens: Tensor, decoder_tokens: Tensor, encoder_padding_mask: Tensor | None, answer: Answer
    ) -> tuple[Tensor, Inputs]:
        """The same for the decoder's new tokens, and in the first call for all of the encoder's."""
        device = decoder_tokens.device
        decoder = stream_behind(
            answer, decoder_tokens.shape[1], config=self.config, mesh=self.mesh, draws=self.draws, device=device
        )
        # What goes through the parts of an encoder that has run.
        ids, encoder, documents = torch.zeros(1, device=device), None, None
        if answer.memory.is_empty:
            is_token = torch.ones_like(encoder_tokens) if encoder_padding_mask is None else encoder_padding_mask
            documents = documents_of(is_token.bool().long() - 1)
            encoder = self._stream(encoder_tokens, documents, is_causal=False)
            ids = encoder.flat(encoder_tokens)
        self.loss_weight = None
        return ids, Inputs(
            encoder=encoder,
            decoder=decoder,
            decoder_ids_T=decoder.flat(decoder_tokens),
            kept=kept_memory(answer, decoder, encoder, documents),
            answer=answer,
        )

    def _stream(self, tokens: Tensor, documents: Documents | None, *, is_causal: bool) -> Tokens:
        """The stream of one stack. Raises ValueError for sequences that do not fit it."""
        lengths = (tokens.shape[1],) if documents is None else documents.lengths
        what = "decoder" if is_causal else "encoder"
        limit = self.config.max_decoder_sequence_length if is_causal else self.config.max_sequence_length
        longest = max(lengths, default=0)
        if self.config.position == "learned" and longest > limit:
            name = "max_decoder_sequence_length" if is_causal else "max_sequence_length"
            raise ValueError(
                f"a sequence of {longest} tokens of the {what} must not be longer than {name} ({limit}), because "
                "positions are learned; shorten it, or build the model with more positions"
            )
        # Documents are as long as they are, and what is generated grows token by token.
        if documents is None and self.training and not self.mesh.sizes.pads_uneven:
            axes = (self.mesh.axis(name).size for name in ("cp_outer", "cp_inner"))
            require_even(lengths, outer=next(axes), inner=next(axes), is_zigzag=is_causal)
        return stream_of(
            (tokens.shape[0], tokens.shape[1]),
            config=self.config,
            mesh=self.mesh,
            draws=self.draws,
            device=tokens.device,
            documents=documents,
            group=self.context_group,
            is_causal=is_causal,
        )

    def run_part(self, name: str, hidden: Payload, context: Inputs) -> Payload:
        module = self.get_submodule(name)
        if isinstance(hidden, dict):
            return self._decode(name, module, hidden, context)
        output: Tensor
        if context.encoder is None and name.startswith(("embedding", "encoder.")):
            # It has run.
            output = hidden
        elif name == "embedding":
            output = module(self.get_submodule("embedding.tokens")(hidden), context.encoder)
        elif name == "decoder.embedding":
            embedded = self.get_submodule(self.config.decoder_embedding)(context.decoder_ids_T)
            return {"hidden": module(embedded, context.decoder), "memory": hidden}
        elif isinstance(module, LanguageModelHead):
            output = self._finish(module, hidden, context)
        elif isinstance(module, StackNorm):
            output = module(hidden, context.encoder)
        else:
            output = module(hidden, context.encoder, self._bias("encoder"))
        return output

    def _decode(self, name: str, module: nn.Module, hidden: dict[str, Tensor], context: Inputs) -> Payload:
        """A part of the decoder; behind its last nobody needs the encoder."""
        if isinstance(module, StackNorm):
            normed: Tensor = module(hidden["hidden"], context.decoder)
            return normed
        memory = None if context.encoder is None else Memory(hidden["memory"], context.encoder, context.source)
        bias = self._bias("decoder")
        return {**hidden, "hidden": module(hidden["hidden"], context.decoder, bias, memory, context.kept)}

    def _bias(self, stack: str) -> Bias | None:
        """What is added to the scores of a stack's self-attention."""
        if self.config.position != "relative":
            return None
        bias: Bias = self.get_submodule(table_of(stack))()
        return bias

    def _finish(self, head: LanguageModelHead, hidden: Tensor, context: Inputs) -> Tensor:
        """The loss, or logits."""
        if self.config.scales_head:
            hidden = hidden * self.config.hidden_size**-0.5
        of_embedding = f"{self.config.decoder_embedding}.weight"
        weight = self.get_parameter(of_embedding if self.config.tie_embeddings else "head.weight")
        if context.answer is not None:
            lengths_B = context.answer.lengths_B
            picked = last_of_rows(hidden, context.decoder, lengths_B)
            return head.joined_logits(head(picked, weight))[: len(lengths_B)]
        logits = head(hidden, weight)
        if context.targets is None:
            return head.full_logits(logits, context.decoder)
        self.tallies = head.tallies(logits, context.targets, context.decoder)
        return head.loss(logits, context.targets, context.decoder)


def table_of(stack: str) -> str:
    """The name of the relative positions of a stack: its first layer has them."""
    return f"{stack}.layers.0.relative_bias"


def build_tokens(config: T5Config, *, tp: Axis, sp: Axis) -> VocabParallelEmbedding:
    """A token embedding, which other stages build for themselves under the same name."""
    return VocabParallelEmbedding(
        config.vocab_size,
        config.hidden_size,
        tp=tp,
        sp=sp,
        initial=Initial(std=config.embedding_std),
        multiple=config.vocab_multiple,
    )


def t5_layout_faults(config: T5Config, sizes: Sizes) -> list[str]:
    """Every rule that a T5 breaks on that many ranks, one sentence each."""
    faults = layout_faults(config, sizes)
    rows, tp = 2 * config.num_query_groups * config.head_dim, sizes.tp
    if rows % tp and (config.num_query_groups % tp == 0 or tp % config.num_query_groups == 0):
        faults.append(
            f"the rows of the key-value weight of cross attention ({rows} = num_query_groups * 2 * head_dim) must be a "
            f"multiple of tensor_model_parallel_size ({tp}); give head_dim accordingly"
        )
    return faults + stage_faults(config.num_staged_layers, True, True, sizes.num_stages, sizes.stage_layout)


def t5_parts(config: T5Config, mesh: Mesh) -> list[Part]:
    """The parts of a T5 in order; costs are the FLOPs of the forward of a full sequence of either stack."""
    tp, sp = mesh.tp, mesh.sp
    length, decoder_length = config.max_sequence_length, config.max_decoder_sequence_length
    tokens = partial(build_tokens, config, tp=tp, sp=sp)
    of_decoder = {config.decoder_embedding: tokens}
    embedding, norm = partial(StackEmbedding, config, tp=tp, sp=sp), partial(StackNorm, config, tp=tp, sp=sp)
    return [
        Part(name="embedding", build=partial(embedding, name="encoder.embedding", length=length), symbol="E", cost=0.0),
        *_layers(config, mesh, "encoder"),
        Part(name="encoder.final_norm", build=partial(norm, name="encoder.final_norm"), symbol="", cost=0.0),
        Part(
            name="decoder.embedding",
            build=partial(
                embedding,
                name="decoder.embedding",
                length=decoder_length,
                has_tokens=not config.share_embeddings,
            ),
            symbol="",
            cost=0.0,
            shares=of_decoder if config.share_embeddings else {},
        ),
        *_layers(config, mesh, "decoder"),
        Part(name="decoder.final_norm", build=partial(norm, name="decoder.final_norm"), symbol="", cost=0.0),
        Part(
            name="head",
            build=partial(LanguageModelHead, config, tp=tp, sp=sp),
            symbol="L",
            cost=cost.head_flops(config, num_tokens=decoder_length),
            shares=of_decoder if config.tie_embeddings else {},
        ),
    ]


def _layers(config: T5Config, mesh: Mesh, stack: str) -> list[Part]:
    table = partial(_build_table, config, mesh, stack)
    is_decoder = stack == "decoder"
    return [
        Part(
            name=f"{stack}.layers.{i}",
            build=partial(_build_layer, config, mesh, stack, i),
            cost=layer_flops(
                config, config.max_sequence_length, config.max_decoder_sequence_length, is_decoder=is_decoder
            ),
            shares={table_of(stack): table} if config.position == "relative" and i > 0 else {},
        )
        for i in range(config.num_decoder_layers if is_decoder else config.num_layers)
    ]


def _build_table(config: T5Config, mesh: Mesh, stack: str) -> RelativeBias:
    return RelativeBias(
        num_buckets=config.relative_buckets,
        max_distance=config.relative_max_distance,
        num_heads=config.num_attention_heads,
        is_causal=stack == "decoder",
        std=config.init_std,
        tp=mesh.tp,
    )


def _build_layer(config: T5Config, mesh: Mesh, stack: str, index: int) -> TransformerLayer:
    tp, sp, name = mesh.tp, mesh.sp, f"{stack}.layers.{index}"
    layer = (
        DecoderLayer(config, tp=tp, sp=sp, name=name)
        if stack == "decoder"
        else TransformerLayer(config, tp=tp, sp=sp, name=name, is_causal=False)
    )
    if config.position == "relative" and index == 0:
        layer.add_module("relative_bias", _build_table(config, mesh, stack))
    return layer


def layer_flops(config: T5Config, memory: int, length: int, *, is_decoder: bool) -> int:
    """Forward FLOPs of a layer of a stack for `memory` tokens of the encoder and `length` tokens of the decoder, matrix
    products alone."""
    own = length if is_decoder else memory
    flops = cost.layer_linear_flops(config, num_tokens=own)
    flops += cost.layer_attention_flops(config, batch=1, sequence=own, is_causal=is_decoder)
    if is_decoder:
        hidden, query = config.hidden_size, config.num_attention_heads * config.head_dim
        # Queries and projection, keys and values, scores and what they weigh.
        flops += 4 * length * hidden * query + 4 * memory * hidden * config.num_query_groups * config.head_dim
        flops += 4 * length * memory * query
    return flops


def _seen_segments(encoder: Documents | None, decoder: Documents | None) -> tuple[int, ...]:
    """For each segment of the decoder's stream the encoder's of the same row and number."""
    if encoder is None or decoder is None:
        return (0,)
    places = {name: place for place, name in enumerate(_names(encoder))}
    return tuple(places.get(name, NOTHING) for name in _names(decoder))


def _names(documents: Documents) -> list[tuple[int, int]]:
    """Of each document its row and its number there."""
    pairs = zip(documents.rows_X.tolist(), documents.numbers_X.tolist(), strict=True)
    return list(dict.fromkeys(pairs))


def _check_shapes(
    encoder_tokens: Tensor,
    decoder_tokens: Tensor,
    of_encoder: dict[str, Tensor | None],
    of_decoder: dict[str, Tensor | None],
) -> None:
    for what, tokens, others in (
        ("encoder_tokens", encoder_tokens, of_encoder),
        ("decoder_tokens", decoder_tokens, of_decoder),
    ):
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise ValueError(f"{what} ({tuple(tokens.shape)} of {tokens.dtype}) must be integers [batch, sequence]")
        for name, value in others.items():
            if value is not None and value.shape != tokens.shape:
                raise ValueError(
                    f"{name} {tuple(value.shape)} must have the shape of {what} {tuple(tokens.shape)}; labels are not "
                    "shifted here: give each position its own target"
                )
    if len(encoder_tokens) != len(decoder_tokens):
        raise ValueError(
            f"encoder_tokens and decoder_tokens must have as many rows, not {len(encoder_tokens)} and "
            f"{len(decoder_tokens)}: each row of one belongs to that of the other"
        )
    if of_decoder["labels"] is None and of_decoder["loss_mask"] is not None:
        raise ValueError("loss_mask needs labels: without labels there is no loss to mask")
    segments = of_encoder["encoder_segments"], of_decoder["decoder_segments"]
    if (segments[0] is None) != (segments[1] is None):
        raise ValueError("encoder_segments and decoder_segments go together: give both or neither")
    if segments[0] is not None and of_encoder["encoder_padding_mask"] is not None:
        raise ValueError("encoder_padding_mask says nothing beside segments, which are -1 at padding; leave it out")
