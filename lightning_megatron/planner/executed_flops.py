"""FLOPs that this package's own code executes in a step: the count of a dry run of all ranks, by formula.

It differs from the conventions (`flops`) so:

    attention           pairs                                                       products of a backward
    one kernel          half of all where it is causal, as kernels skip the others  4
    in a window         full blocks: those of a window and of the one before it     4
    materialised        all; tiles of queries that see all keys before their end    4, 5 where weights are recomputed
    recomputed          all, of scores alone: no backward reads the output

    gradients           of a product's input, where something before it is trained
    recomputation       as executed, with LoRA adapters; never of attention that saves no weights
    several ranks       all that tp does not shard without sequence parallelism; equally many images on all ranks of cp
    padding             the vocabulary's, and tokens that fill up tp ranks, experts of a padded capacity, or FP8 tiles

Kernels that recompute scores in their backward count like those that save them. T tokens, H hidden, S sequence,
W window.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from lightning_megatron.context.context_layout import MaskSpec, cut
from lightning_megatron.context.unfused_attention import MOST_SCORES
from lightning_megatron.mesh import Sizes
from lightning_megatron.planner.layer_work import has_no_kernel
from lightning_megatron.planner.model_parts import Layer, LoraAdapter, ModelPart, sent_tokens, shared_over_context
from lightning_megatron.planner.peak_memory import of_group
from lightning_megatron.planner.requires_grad import stages_with_gradients
from lightning_megatron.planner.run import Run
from lightning_megatron.transformer import cost
from lightning_megatron.transformer import linears as names
from lightning_megatron.transformer.recompute import groups_of


def executed_flops(run: Run) -> float:
    """FLOPs of an optimizer step on all ranks together. The run must have no errors."""
    if run.balanced is not None:
        groups = (group for slot in run.balanced.plan.slots for group in slot)
        return run.num_accumulated * sum(_microbatch_flops(of_group(run, group)) for group in groups)
    return _microbatch_flops(run) * run.num_microbatches * run.sizes.dp * run.num_accumulated


def _microbatch_flops(run: Run) -> float:
    """FLOPs of a microbatch on all ranks of a data-parallel rank."""
    walk, flops, images = _Walk(run), 0.0, run.lengths.images
    for parts in stages_with_gradients(run.model_parts, run.sizes.num_stages, run.sizes.stage_layout):
        stage = [shared_over_context(part, images, run.micro_batch_size, run.sizes.cp) for part in parts]
        for indices, is_recomputed in groups_of(run.recompute, [part.is_layer for part in stage]):
            passed = [walk.through(stage[index]) for index in indices]
            flops += sum(part.forward + part.backward for part in passed)
            if is_recomputed and walk.is_needed:
                flops += sum(part.forward for part in passed)
    return flops


class _Passed(NamedTuple):
    """FLOPs of a microbatch, on all ranks of a data-parallel rank."""

    forward: float
    backward: float
    recomputed: float = 0.0
    """FLOPs of attention under selective recomputation."""


@dataclass(frozen=True, kw_only=True)
class _Linear:
    """Forward FLOPs of a linear, and of the two matrices of its LoRA adapter."""

    flops: float
    adapter_in: float = 0.0
    adapter_out: float = 0.0
    filled: float = 1.0
    """Tokens of the weight's gradient, padding included, as a multiple of the tokens."""

    @property
    def forward(self) -> float:
        return self.flops + self.adapter_in + self.adapter_out

    def backward(self, *, is_trained: bool, is_needed: bool) -> float:
        """Backward FLOPs; `is_needed`: the input requires a gradient."""
        linear = self.flops * (is_trained * self.filled + is_needed)
        return linear + 2 * self.adapter_out + self.adapter_in * (1 + is_needed)


class _Walk:
    """Walks through the linears of a part and knows whether their inputs require a gradient."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.is_needed = False

    def through(self, part: ModelPart) -> _Passed:
        self.is_needed = part.needs_input
        if part.layer is None:
            return self._chain(part, _end(self._run, part))
        if not part.layer.repeats:
            return _Passed(0.0, 0.0)
        return self._layer(part, part.layer)

    def _layer(self, part: ModelPart, layer: Layer) -> _Passed:
        run = self._run
        linears = _Linears(run, part, layer)
        query, keys = layer.config.num_attention_heads * layer.config.head_dim, linears.keys
        hidden = layer.config.hidden_size
        parts = [self._chain(part, [linears.of(names.QKV, linears.tokens, hidden, query + 2 * keys)])]
        core = _attention(run, layer)
        recomputed = core.recomputed * ("core_attention" in run.recompute.recomputed_parts)
        parts.append(_Passed(core.forward, self.is_needed * (core.backward + recomputed)))
        parts.append(self._chain(part, [linears.of(names.PROJECTION, linears.tokens, query, hidden)]))
        if layer.memory:
            parts += self._cross(part, layer, linears)
        products, is_read = _feed_forward(linears, layer), self.is_needed or part.is_trained
        inner = self._chain(part, products)
        if run.recomputes_feed_forward(layer) and self.is_needed:
            # A shared expert runs before the others. Where those save nothing, torch stops recomputing after it.
            idle = products[1].forward if layer.has_experts and not is_read else 0.0
            parts.append(_Passed(0.0, inner.forward - idle))
        parts.append(inner)
        return _Passed(sum(part.forward for part in parts), sum(part.backward for part in parts))

    def _cross(self, part: ModelPart, layer: Layer, linears: "_Linears") -> list[_Passed]:
        run, hidden = self._run, layer.config.hidden_size
        query = layer.config.num_attention_heads * layer.config.head_dim
        memory = _tokens(run, layer.streams(run.micro_batch_size), layer.memory)
        queries = self._chain(part, [linears.of(names.CROSS_QUERY, linears.tokens, hidden, query)])
        stream, self.is_needed = self.is_needed, part.needs_memory
        pairs = self._chain(part, [linears.of(names.CROSS_KEY_VALUE, memory, hidden, 2 * linears.keys)])
        self.is_needed |= stream
        core = _cross_attention(run, layer)
        projection = linears.of(names.CROSS_PROJECTION, linears.tokens, query, hidden)
        attended = _Passed(core.forward, self.is_needed * core.backward)
        return [queries, pairs, attended, self._chain(part, [projection])]

    def _chain(self, part: ModelPart, linears: list[_Linear]) -> _Passed:
        """FLOPs of linears that follow one another."""
        backward = 0.0
        for linear in linears:
            backward += linear.backward(is_trained=part.is_trained, is_needed=self.is_needed)
            self.is_needed |= linear.adapter_in > 0
        self.is_needed |= part.is_trained
        return _Passed(sum(linear.forward for linear in linears), backward)


def _tokens(run: Run, streams: int, sequence: int, *, is_cut: bool = True) -> int:
    """Number of tokens on all ranks of cp together, filled up for sequence parallelism. Each rank has all tokens of
    sequences that cp does not shard."""
    cp = run.sizes.cp
    own = streams * -(-sequence // (cp if is_cut else 1))
    return -(-own // run.sp) * run.sp * cp


def _num_alike(sizes: Sizes) -> int:
    """Number of tp ranks that do the same work outside of tensor-parallel regions."""
    return 1 if sizes.sequence_parallel else sizes.tp


# --- products ---------------------------------------------------------------------------------------------------------


def _end(run: Run, part: ModelPart) -> list[_Linear]:
    """Linears of a part without a layer."""
    micro, is_cut, linears = run.micro_batch_size, part.component == "language", []
    for product in part.products:
        streams, tokens = (micro, product.tokens) if is_cut else (1, micro * product.tokens)
        tokens = _tokens(run, streams, round(tokens), is_cut=is_cut)
        num_alike = 1 if product.is_cut else _num_alike(run.sizes)
        linears.append(_Linear(flops=2.0 * tokens * product.inputs * product.outputs * num_alike))
    if part.logit_tokens:
        padded = cost.vocabulary_parameters(run.model, run.sizes) * run.sizes.tp
        linears.append(_Linear(flops=2.0 * _tokens(run, micro, part.logit_tokens) * padded))
    return linears


class _Linears:
    """The linears of a layer."""

    def __init__(self, run: Run, part: ModelPart, layer: Layer) -> None:
        self.run = run
        self.tokens = _tokens(run, layer.streams(run.micro_batch_size), layer.sequence, is_cut=layer.is_cut_by_context)
        self.keys = layer.config.num_query_groups * layer.config.head_dim
        self._adapters = {adapter.name: adapter for adapter in part.adapters}

    def of(self, name: str, tokens: int, inputs: int, outputs: int) -> _Linear:
        flops, filled = 2.0 * tokens * inputs * outputs, _filled(self.run, tokens / self.run.sizes.cp)
        adapter = self._adapters.get(name)
        if adapter is None:
            return _Linear(flops=flops, filled=filled)
        adapter_in, adapter_out = _adapter(adapter, tokens, _num_alike(self.run.sizes))
        return _Linear(flops=flops, adapter_in=adapter_in, adapter_out=adapter_out, filled=filled)


def _filled(run: Run, tokens: float) -> float:
    """Tokens of an FP8 weight's gradient, filled up to tiles, as a multiple of the tokens."""
    if run.fp8 is None or not tokens:
        return 1.0
    return -(-tokens // run.fp8.tile) * run.fp8.tile / tokens


def _adapter(adapter: LoraAdapter, tokens: int, num_alike: int) -> tuple[float, float]:
    """FLOPs of an adapter's two matrices. Tp shards B of a column-parallel linear and A of a row-parallel one."""
    into, out = 2.0 * tokens * adapter.rank * adapter.inputs, 2.0 * tokens * adapter.rank * adapter.outputs
    return (into * num_alike, out) if adapter.cuts_outputs else (into, out * num_alike)


def _feed_forward(linears: _Linears, layer: Layer) -> list[_Linear]:
    config, tokens, hidden = layer.config, linears.tokens, layer.config.hidden_size
    gates = 2 if config.is_gated else 1
    if config.moe is None or not layer.has_experts:
        width = config.ffn_hidden_size
        return [linears.of(names.UP, tokens, hidden, gates * width), linears.of(names.DOWN, tokens, width, hidden)]
    moe = config.moe
    width, shared = moe.ffn_hidden_size or config.ffn_hidden_size, moe.shared_expert_intermediate_size
    gate = moe.shared_expert_gate * _num_alike(linears.run.sizes)
    sizes, num_ranks = linears.run.sizes, linears.run.sizes.tp * linears.run.sizes.cp
    sent = sent_tokens(layer, sizes, linears.run.micro_batch_size, own=tokens / num_ranks)
    chosen, of_expert = num_ranks * sent, sent * sizes.ep * sizes.etp / moe.router.num_experts
    products = [
        _Linear(flops=2.0 * tokens * hidden * (moe.router.num_experts + gate)),
        _Linear(flops=2.0 * chosen * hidden * (gates + 1) * width, filled=_filled(linears.run, of_expert)),
    ]
    if not shared:
        return products
    products.append(linears.of(names.SHARED_UP, tokens, hidden, gates * shared))
    return [*products, linears.of(names.SHARED_DOWN, tokens, shared, hidden)]


# --- attention --------------------------------------------------------------------------------------------------------


def _attention(run: Run, layer: Layer) -> _Passed:
    """FLOPs of a layer's self-attention."""
    config, sizes, sequence = layer.config, run.sizes, layer.sequence
    is_shared = sizes.cp > 1 and layer.is_cut_by_context
    each = _pair_flops(run, layer)
    drops, window = config.attention_dropout > 0, layer.window if layer.window < sequence else 0
    if layer.is_by_document(sizes):
        inner = sizes.cp_ulysses if is_shared else 1
        outer = sizes.cp // inner if is_shared else 1
        heads = config.num_attention_heads // sizes.tp // inner
        is_materialised = drops or layer.has_relative_bias or config.head_dim % 8 > 0
        lengths = layer.documents or (sequence,)
        if window:
            is_banded = run.is_half and config.head_dim <= 256 and not is_materialised
            pairs = _window_pairs(lengths, window, outer, inner, is_banded)
        elif layer.is_causal:
            pairs = sum(_causal_pairs(length, outer, heads if is_materialised else 0) for length in lengths)
        else:
            pairs = float(sum(length**2 for length in lengths))
        return _Passed(2 * each * pairs, (5 if is_materialised else 4) * each * pairs)
    if drops or has_no_kernel(layer, sizes, run.bytes_per_element):
        pairs = float(sequence**2)
        return _Passed(2 * each * pairs, 4 * each * pairs, each * pairs * drops)
    pairs = _block_window_pairs(sequence, window) if window else sequence**2 / (2 if layer.is_causal else 1)
    return _Passed(2 * each * pairs, 4 * each * pairs)


def _cross_attention(run: Run, layer: Layer) -> _Passed:
    is_materialised = layer.config.attention_dropout > 0 or layer.config.head_dim % 8 > 0
    product = _pair_flops(run, layer) * layer.sequence * layer.memory
    return _Passed(2 * product, (5 if is_materialised else 4) * product)


def _pair_flops(run: Run, layer: Layer) -> float:
    """FLOPs of one product of attention for each pair of tokens of a sequence, over all heads."""
    num_alike = 1 if layer.is_cut_by_context else run.sizes.cp
    streams = layer.streams(run.micro_batch_size) * num_alike
    return 2.0 * streams * layer.config.num_attention_heads * layer.config.head_dim


def _causal_pairs(sequence: int, outer: int, heads: int) -> float:
    """Pairs of causal attention over a ring of equal parts; `heads` of a rank where scores are materialised, else 0.

    Tiles are those of a rank's own part: it sees all of another part, or nothing.
    """
    own = sequence // outer
    half = own**2 / 2
    between = sequence**2 / 2 - outer * half
    if not heads:
        return between + outer * half
    tile = min(own, max(1, MOST_SCORES // (heads * own)))
    count, rest = divmod(own, tile)
    return between + outer * (tile**2 * count * (count + 1) / 2 + rest * own)


def _block_window_pairs(sequence: int, window: int) -> float:
    """Pairs of a window over an unsharded sequence: two windows under one mask, or blocks."""
    if sequence <= 2 * window:
        return float(sequence**2)
    return window**2 / 2 + (-(-sequence // window) - 1) * 2.0 * window**2


@lru_cache(maxsize=256)
def _window_pairs(lengths: tuple[int, ...], window: int, outer: int, inner: int, is_banded: bool) -> float:
    """Pairs of a window over cp or within documents, tile by tile; `is_banded`: the kernel takes windows, and the last
    query of a tile sees its last key."""
    layout, view = cut(lengths, ring_size=outer, ulysses_size=inner), MaskSpec(is_causal=True, window=window)
    positions = layout.group_positions.tolist()
    pairs = 0.0
    for group in range(outer):
        for source in range(outer):
            for block in layout.blocks(group, source, view):
                queries, keys, beyond = block.num_queries, block.num_keys, 0
                if block.kind == "masked" and is_banded:
                    distance = positions[group][block.query_row] - positions[source][block.key_row]
                    beyond = queries - min(max(keys - distance, 0), queries)
                    # Queries beyond the last key are under a mask.
                    pairs += _banded_pairs(queries - beyond, keys, window)
                    queries = beyond
                pairs += queries * keys
    return pairs


def _banded_pairs(queries: int, keys: int, window: int) -> float:
    """Pairs of causal attention to `keys`, without those before the first query and those outside of any window."""
    triangles = keys**2, max(keys - queries, 0) ** 2, max(keys - window, 0) ** 2, max(keys - queries - window, 0) ** 2
    return (triangles[0] - triangles[1] - triangles[2] + triangles[3]) / 2
