"""A model as a list of parts in order, each with its parameters and its matrix products.

GPT, BERT, T5 and LLaVA all become lists of `ModelPart`s, on which stages, memory and time are planned. Equal layers are
equal values, so that a stage is a few kinds of parts with their counts.

H hidden, V vocabulary; tokens are those of one sample.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeVar

from lightning_megatron.mesh import Sizes, StageLayout
from lightning_megatron.models import BertConfig, GPTConfig, LlavaConfig, T5Config
from lightning_megatron.pipeline.layout import assign
from lightning_megatron.transformer import cost
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.linears import CROSS_KEY_VALUE

Model = GPTConfig | BertConfig | T5Config
"""Configuration of a model; a LlavaConfig is a GPTConfig."""

_T = TypeVar("_T")


def hashed_once(cls: type[_T]) -> type[_T]:
    """Makes a frozen dataclass compute its hash once: instances are looked up often and have many nested fields."""
    compute = cls.__hash__

    def cached_hash(self: _T) -> int:
        known = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = compute(self)
        return known

    cls.__hash__ = cached_hash  # type: ignore[assignment]
    return cls


@dataclass(frozen=True, kw_only=True)
class SequenceLengths:
    """Lengths of the samples, in tokens."""

    sequence: int
    """Tokens of a text, or of T5's encoder."""
    decoder_sequence: int = 0
    """Tokens of T5's decoder; 0 for other models."""
    images: int = 0
    """Images in each sample of a LLaVA."""
    are_packed: bool = False
    """Whether a sample is packed with documents that do not attend to each other; it counts as one document."""
    documents: tuple[int, ...] = ()
    """Lengths of the documents in a packed sample; empty: the sample counts as one document."""


@hashed_once
@dataclass(frozen=True, kw_only=True)
class Layer:
    """One transformer layer on a sample's sequence."""

    config: TransformerConfig
    index: int = 0
    """Index of the first layer of this kind."""
    sequence: int
    """Tokens of its sequence."""
    is_causal: bool = True
    memory: int = 0
    """Tokens of the encoder's output that it attends to."""
    repeats: float = 1
    """Sequences in a sample: images, or a rank's share of them."""
    is_cut_by_context: bool = True
    """Whether ranks of cp share its sequence."""
    has_bounds: bool = False
    """Whether attention stays within documents."""
    documents: tuple[int, ...] = ()
    """Lengths of packed documents; empty: the sequence counts as one document."""

    @property
    def window(self) -> int:
        """Tokens of the sliding window; 0: all."""
        return self.config.window_of(self.index) if self.is_causal else 0

    @property
    def has_experts(self) -> bool:
        return self.config.has_experts(self.index)

    @property
    def has_relative_bias(self) -> bool:
        """Whether attention adds a bias by relative position."""
        return isinstance(self.config, T5Config) and self.config.position == "relative"

    def is_by_document(self, sizes: Sizes) -> bool:
        """Whether self-attention runs in this package's code for documents, cp and biases."""
        is_padded = isinstance(self.config, BertConfig) or self.has_bounds
        return is_padded or self.has_relative_bias or (sizes.cp > 1 and self.is_cut_by_context)

    def streams(self, batch: int) -> int:
        """Number of sequences in a batch of so many samples."""
        return round(batch * self.repeats)

    def tokens_on(self, sizes: Sizes) -> float:
        """Number of tokens of a sample that a rank holds."""
        return self.repeats * self.sequence / self._num_sharing(sizes)

    def memory_on(self, sizes: Sizes) -> float:
        """Number of encoder tokens of a sample that a rank holds."""
        return self.repeats * self.memory / self._num_sharing(sizes)

    def _num_sharing(self, sizes: Sizes) -> int:
        return sizes.cp if self.is_cut_by_context else 1


def sent_tokens(layer: Layer, sizes: Sizes, micro_batch: int, *, own: float | None = None) -> float:
    """Number of tokens that a rank dispatches to the experts of a layer for a microbatch, of its `own` tokens if their
    number is known. A rank's experts receive etp times as many."""
    assert layer.config.moe is not None
    streams = layer.streams(micro_batch)
    return cost.expert_rows(
        layer.config.moe,
        sizes,
        own=streams * layer.sequence / (sizes.tp * sizes.cp) if own is None else own,
        batch=streams,
        sequence=layer.sequence,
        is_packed=layer.has_bounds,
    )


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matrix product outside of layers, [tokens, inputs] by [inputs, outputs]."""

    tokens: float
    inputs: int
    outputs: int
    is_cut: bool = True
    """Whether tp shards it."""


@dataclass(frozen=True, kw_only=True)
class LoraAdapter:
    """A LoRA adapter of a frozen linear, as in `tensor.lora_adapter`."""

    name: str
    """Name of the linear."""
    rank: int
    """Features between its two matrices."""
    inputs: int
    """Input features of the linear."""
    outputs: int
    """Output features of the linear."""
    cuts_outputs: bool
    """Whether tp shards the linear's outputs; otherwise its inputs."""
    has_dropout: bool = False
    """Whether dropout applies to the adapter's input."""

    @property
    def reads_memory(self) -> bool:
        """Whether the adapter reads the encoder's output instead of the layer's own hidden state."""
        return self.name == CROSS_KEY_VALUE

    def tokens_on(self, layer: Layer, sizes: Sizes) -> float:
        """Number of tokens of a sample that the adapter reads on a rank."""
        return layer.memory_on(sizes) if self.reads_memory else layer.tokens_on(sizes)

    def features_on(self, tp: int, sp: int = 1) -> tuple[float, float]:
        """Input and output features on a rank; sp shards the input of a column-parallel one."""
        return (self.inputs / sp, self.outputs / tp) if self.cuts_outputs else (self.inputs / tp, self.outputs)

    def parameters(self, tp: int) -> int:
        """Number of the adapter's parameters on a rank."""
        inputs, outputs = (1, tp) if self.cuts_outputs else (tp, 1)
        return self.rank * (self.inputs // inputs + self.outputs // outputs)


@hashed_once
@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """A part of a model: a layer, or one of its ends."""

    symbol: Literal["E", "t", "L", ""]
    """Letter of the part in a layout text, as in `pipeline.layout`."""
    layer: Layer | None = None
    matrices: int = 0
    """Vocabulary matrices [V, H], sharded over tp."""
    shared_matrices: int = 0
    """Tied vocabulary matrices of another part, built here where the stage does not have that part."""
    sharded: int = 0
    """Other parameters that tp shards."""
    replicated: int = 0
    """Parameters that every rank has."""
    products: tuple[Product, ...] = ()
    """Matrix products beyond those of the layer."""
    embedded_tokens: int = 0
    """Tokens that the part embeds."""
    logit_tokens: int = 0
    """Tokens for which the part computes logits."""
    component: Literal["language", "vision", "projector"] = "language"
    """Component of a LLaVA."""
    is_joined: bool = False
    """Whether the part is of one module with the part before it."""
    is_trained: bool = True
    """Whether the part's own parameters are trained; adapters are trained in any case."""
    passes_gradient: bool = True
    """Whether a backward computes the gradient of the part's input."""
    needs_input: bool = True
    """Whether the stage needs the gradient of the part's input for something before it."""
    needs_memory: bool = True
    """Whether the stage needs the gradient of the encoder's output."""
    adapters: tuple[LoraAdapter, ...] = ()
    """LoRA adapters of the layer's linears."""

    @property
    def is_layer(self) -> bool:
        """Whether full recomputation covers the part: a layer of a stack, or one of a tower that runs at all."""
        return self.layer is not None and self.layer.repeats > 0 and not self.is_joined


def shared_over_context(part: ModelPart, images: int, micro_batch: int, cp: int) -> ModelPart:
    """A part as a rank of cp runs it: cp ranks share the images of a microbatch evenly."""
    if part.component == "language" or images == 0 or cp == 1:
        return part
    share = -(-micro_batch * images // cp) / (micro_batch * images)
    layer = None if part.layer is None else replace(part.layer, repeats=part.layer.repeats * share)
    products = tuple(replace(product, tokens=product.tokens * share) for product in part.products)
    return replace(part, layer=layer, products=products)


Stage = Mapping[ModelPart, int]
"""The parts of a stage with their counts."""


@hashed_once
@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """The parts of a model, in order."""

    config: Model
    lengths: SequenceLengths
    parts: tuple[ModelPart, ...]

    @property
    def num_layers(self) -> int:
        """Number of layers that are spread over stages."""
        return sum(part.symbol == "t" for part in self.parts)

    @property
    def tokens(self) -> int:
        """Number of tokens of a sample as tokens per second count them: a T5's are those of both stacks."""
        return self.lengths.sequence + self.lengths.decoder_sequence

    def parameters(self) -> int:
        """Number of parameters of the unsplit model, without the padding of its vocabulary."""
        config = self.config
        padded = cost.vocabulary_parameters(config)
        matrices = sum(part.matrices for part in self.parts)
        held = sum(sum(parameters_of(part, self, cost.ONE)) for part in self.parts)
        return held - matrices * (padded - config.vocab_size * config.hidden_size)


@lru_cache(maxsize=64)
def model_parts_of(model: Model, lengths: SequenceLengths) -> ModelParts:
    """The parts of a model on samples of these lengths."""
    if isinstance(model, T5Config):
        parts = _t5(model, lengths)
    elif isinstance(model, BertConfig):
        parts = _bert(model, lengths)
    elif isinstance(model, LlavaConfig):
        parts = (*_tower(model, lengths), *_gpt(model, lengths))
    else:
        parts = _gpt(model, lengths)
    return ModelParts(config=model, lengths=lengths, parts=parts)


@lru_cache(maxsize=1024)
def ordered_stages(model_parts: ModelParts, num_stages: int, layout: StageLayout) -> tuple[tuple[ModelPart, ...], ...]:
    """The parts of each stage, in order."""
    parts, costs = model_parts.parts, [1.0] * len(model_parts.parts)
    if layout.balance == "cost":
        # As the model itself cuts, whose stages are those of its longest samples.
        longest = model_parts_of(model_parts.config, _longest(model_parts))
        costs = [float(part_flops(part, model_parts.config, batch=1)) for part in longest.parts]
    ranges = assign([part.symbol for part in parts], costs, num_stages, layout)
    return tuple(parts[indices.start : indices.stop] for indices in ranges)


def _longest(model_parts: ModelParts) -> SequenceLengths:
    model, lengths = model_parts.config, model_parts.lengths
    return replace(
        lengths,
        sequence=model.max_sequence_length,
        decoder_sequence=model.max_decoder_sequence_length if isinstance(model, T5Config) else 0,
        images=min(lengths.images, 1),
        documents=(),
    )


@lru_cache(maxsize=65536)
def parameters_of(part: ModelPart, model_parts: ModelParts, sizes: Sizes) -> tuple[int, int]:
    """Number of a part's dense parameters on a rank (data parallel over dp x cp), and of its experts' (over edp).

    Tied matrices of another part do not count.
    """
    matrices = part.matrices * cost.vocabulary_parameters(model_parts.config, sizes)
    dense = matrices + part.sharded // sizes.tp + part.replicated + adapter_parameters(part, sizes)
    layer = part.layer
    if layer is None:
        return dense, 0
    experts = cost.layer_expert_parameters(layer.config, sizes, layer=layer.index)
    dense += cost.layer_parameters(layer.config, sizes, layer=layer.index) - experts
    return dense + (cost.cross_attention_parameters(layer.config, sizes) if layer.memory else 0), experts


def adapter_parameters(part: ModelPart, sizes: Sizes) -> int:
    """Number of parameters of a part's LoRA adapters on a rank."""
    return sum(adapter.parameters(sizes.tp) for adapter in part.adapters)


def part_flops(part: ModelPart, config: Model, *, batch: int, counts_all_pairs: bool = False) -> int:
    """Forward FLOPs of the unsplit part's matrix products; causal attention counts half of the pairs, or all."""
    flops = sum(2 * round(batch * product.tokens) * product.inputs * product.outputs for product in part.products)
    flops += cost.head_flops(config, num_tokens=batch * part.logit_tokens)
    layer = part.layer
    if layer is None:
        return flops
    streams, own = layer.streams(batch), layer.config
    tokens = streams * layer.sequence
    flops += cost.layer_linear_flops(own, num_tokens=tokens, layer=layer.index)
    flops += own_attention_flops(layer, streams, counts_all_pairs=counts_all_pairs)
    if layer.memory:
        flops += cost.cross_attention_flops(own, batch=streams, sequence=layer.sequence, memory=layer.memory)
    return flops


def own_attention_flops(layer: Layer, streams: int, *, counts_all_pairs: bool = False) -> int:
    """Forward FLOPs of a layer's self-attention, within documents."""
    return sum(
        number
        * cost.layer_attention_flops(
            layer.config,
            batch=streams,
            sequence=length,
            is_causal=layer.is_causal and not counts_all_pairs,
            window=layer.window,
        )
        for length, number in Counter(layer.documents or (layer.sequence,)).items()
    )


def _gpt(model: GPTConfig, lengths: SequenceLengths) -> tuple[ModelPart, ...]:
    hidden = model.hidden_size
    positions = model.max_sequence_length * hidden if model.position == "learned" else 0
    norm, sequence = cost.norm_parameters(model), lengths.sequence
    layers = _layers(model, sequence, is_causal=True, has_bounds=lengths.are_packed, documents=lengths.documents)
    # Further tokens are predicted from hidden states and the embedding's, by a layer like the last and the head.
    joint = Product(tokens=sequence, inputs=2 * hidden, outputs=hidden)
    further = (
        ModelPart(
            symbol="",
            shared_matrices=1,
            replicated=joint.inputs * joint.outputs + 3 * norm,
            products=(joint,),
            embedded_tokens=sequence,
        ),
        replace(layers[-1], symbol="", is_joined=True),
    )
    return (
        ModelPart(symbol="E", matrices=1, replicated=positions, embedded_tokens=sequence),
        *layers,
        *further * model.num_mtp_layers,
        ModelPart(symbol="", replicated=norm),
        _head(model, sequence * (1 + model.num_mtp_layers)),
    )


def _head(model: Model, tokens: int) -> ModelPart:
    return ModelPart(
        symbol="L",
        matrices=int(not model.tie_embeddings),
        shared_matrices=int(model.tie_embeddings),
        logit_tokens=tokens,
    )


def _layers(
    model: TransformerConfig,
    sequence: int,
    *,
    is_causal: bool,
    has_bounds: bool = False,
    documents: tuple[int, ...] = (),
) -> tuple[ModelPart, ...]:
    """Layers of a stack; layers of one kind are equal."""
    first: dict[tuple[bool, int], int] = {}
    kinds = [(model.has_experts(i), model.window_of(i)) for i in range(model.num_layers)]
    for index, kind in enumerate(kinds):
        first.setdefault(kind, index)
    return tuple(
        ModelPart(
            symbol="t",
            layer=Layer(
                config=model,
                index=first[kind],
                sequence=sequence,
                is_causal=is_causal,
                has_bounds=has_bounds,
                documents=documents,
            ),
        )
        for kind in kinds
    )


def _bert(model: BertConfig, lengths: SequenceLengths) -> tuple[ModelPart, ...]:
    hidden, sequence = model.hidden_size, lengths.sequence
    positions = model.max_sequence_length * hidden if model.position == "learned" else 0
    norm = cost.norm_parameters(model)
    square = hidden * hidden + hidden
    embedding = positions + model.num_token_types * hidden + norm * model.embedding_norm
    binary = square + 2 * hidden + 2 if model.add_binary_head else 0
    dense = Product(tokens=sequence, inputs=hidden, outputs=hidden, is_cut=False)
    return (
        ModelPart(symbol="E", matrices=1, replicated=embedding, embedded_tokens=sequence),
        *_layers(model, sequence, is_causal=False),
        *([ModelPart(symbol="", replicated=norm)] if model.norm_placement == "pre" else []),
        replace(_head(model, sequence), sharded=model.vocab_size, replicated=square + norm + binary, products=(dense,)),
    )


def _t5(model: T5Config, lengths: SequenceLengths) -> tuple[ModelPart, ...]:
    hidden, norm = model.hidden_size, cost.norm_parameters(model)
    is_learned, has_tables = model.position == "learned", model.position == "relative"
    table = model.relative_buckets * model.num_attention_heads if has_tables else 0
    has_bounds = lengths.are_packed
    encoder = Layer(config=model, sequence=lengths.sequence, is_causal=False, has_bounds=has_bounds)
    decoder = Layer(config=model, sequence=lengths.decoder_sequence, memory=lengths.sequence, has_bounds=has_bounds)
    own = int(not model.share_embeddings)
    return (
        ModelPart(
            symbol="E",
            matrices=1,
            replicated=model.max_sequence_length * hidden * is_learned,
            embedded_tokens=lengths.sequence,
        ),
        # A stack's first layer has its table of relative positions; other stages build their own.
        ModelPart(symbol="t", layer=encoder, sharded=table),
        *[ModelPart(symbol="t", layer=encoder)] * (model.num_layers - 1),
        ModelPart(symbol="", replicated=norm),
        ModelPart(
            symbol="",
            matrices=own,
            shared_matrices=1 - own,
            replicated=model.max_decoder_sequence_length * hidden * is_learned,
            embedded_tokens=lengths.decoder_sequence,
        ),
        ModelPart(symbol="t", layer=decoder, sharded=table),
        *[ModelPart(symbol="t", layer=decoder)] * (model.num_decoder_layers - 1),
        ModelPart(symbol="", replicated=norm),
        _head(model, lengths.decoder_sequence),
    )


def _tower(model: LlavaConfig, lengths: SequenceLengths) -> tuple[ModelPart, ...]:
    """The vision tower and the projector. Layers after the one whose output is read are held and not run."""
    vision, hidden = model.vision, model.hidden_size
    width, length, norm = vision.hidden_size, vision.max_sequence_length, cost.norm_parameters(vision)
    pixels = vision.num_channels * vision.patch_size**2
    embedding = pixels * width + width + length * width + norm * vision.has_input_norm
    # The projector reads all features.
    features = lengths.images * length
    used = Layer(config=vision, sequence=length, is_causal=False, repeats=lengths.images, is_cut_by_context=False)
    num_used = model.num_vision_layers
    return (
        ModelPart(
            symbol="",
            component="vision",
            replicated=embedding,
            products=(Product(tokens=lengths.images * vision.num_patches, inputs=pixels, outputs=width, is_cut=False),),
        ),
        *[ModelPart(symbol="", component="vision", layer=used)] * num_used,
        *[ModelPart(symbol="", component="vision", layer=replace(used, repeats=0))] * (vision.num_layers - num_used),
        ModelPart(symbol="", component="vision", replicated=norm),
        ModelPart(
            symbol="",
            component="projector",
            sharded=width * hidden + hidden * model.projector_bias,
            products=(Product(tokens=features, inputs=width, outputs=hidden),),
        ),
        ModelPart(
            symbol="",
            component="projector",
            is_joined=True,
            sharded=hidden * hidden,
            replicated=hidden * model.projector_bias,
            products=(Product(tokens=features, inputs=hidden, outputs=hidden),),
        ),
    )
