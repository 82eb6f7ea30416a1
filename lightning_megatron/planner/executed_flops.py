"""FLOPs that this package's own code multiplies in a step: what a dry run of all ranks counts, by formula.

Beside what conventions count (`flops`), and in its place:

    attention           pairs                                                       products of a backward
    one kernel          half of all where it is causal, as kernels skip the others  4
    in a window         whole blocks: of a window with the one before it            4
    laid out            all; tiles of queries that see what is before their end     4, 5 where weights are made anew
    recomputed          all, of scores alone: nobody reads what the weights sum up

    gradients           of what goes into a product, where something before it is trained
    run again           as it ran, with low-rank paths; an attention that keeps no weights never
    on several ranks    what tp does not cut without sequence parallelism; as many of a tower's images on all of cp
    padding             the vocabulary's, and rows that fill up tp ranks, experts of a padded capacity, or tiles of FP8

Kernels that make scores again in their backward count as those that keep them. T tokens, H hidden, S sequence,
W window.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from lightning_megatron.context.context_layout import MaskSpec, cut
from lightning_megatron.context.unfused_attention import MOST_SCORES
from lightning_megatron.mesh import Sizes
from lightning_megatron.models import BertConfig, T5Config
from lightning_megatron.planner.layer_work import has_no_kernel
from lightning_megatron.planner.model_parts import Layer, LoraAdapter, ModelPart, sent_tokens, shared_over_context
from lightning_megatron.planner.peak_memory import of_group
from lightning_megatron.planner.requires_grad import stages_with_gradients
from lightning_megatron.planner.run import Run
from lightning_megatron.precision.gemm import TILE
from lightning_megatron.transformer import cost
from lightning_megatron.transformer.linears import (
    CROSS_KEY_VALUE,
    CROSS_PROJECTION,
    CROSS_QUERY,
    DOWN,
    PROJECTION,
    QKV,
    SHARED_DOWN,
    SHARED_UP,
    UP,
)
from lightning_megatron.transformer.recompute import groups_of


def executed_flops(run: Run) -> float:
    """Of an optimizer step, on all ranks together. The run must have no faults."""
    if run.balanced is not None:
        groups = (group for slot in run.balanced.plan.slots for group in slot)
        return run.num_accumulated * sum(_microbatch_flops(of_group(run, group)) for group in groups)
    return _microbatch_flops(run) * run.num_microbatches * run.sizes.dp * run.num_accumulated


def _microbatch_flops(run: Run) -> float:
    """On all ranks of a replica."""
    walk, flops = _Walk(run), 0.0
    for stage in _stages(run):
        for places, is_again in groups_of(run.recompute, [part.is_layer for part in stage]):
            passed = [walk.through(stage[place]) for place in places]
            flops += sum(part.forward + part.backward for part in passed)
            if is_again and walk.is_needed:
                flops += sum(part.forward for part in passed)
    return flops


def _stages(run: Run) -> Iterator[list[ModelPart]]:
    """In order, as each rank of cp runs them."""
    images, micro, cp = run.lengths.images, run.micro_batch_size, run.sizes.cp
    for stage in stages_with_gradients(run.model_parts, run.sizes.num_stages, run.sizes.stage_layout):
        yield [shared_over_context(part, images, micro, cp) for part in stage]


class _Passed(NamedTuple):
    """FLOPs of a microbatch, on all ranks of a replica."""

    forward: float
    backward: float


class _Attended(NamedTuple):
    """The same of scores and of what they weigh, and what selective recomputation does of it again."""

    forward: float
    backward: float
    again: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Linear:
    """Forward FLOPs of a product, and of the two of the path beside it."""

    flops: float
    path_in: float = 0.0
    path_out: float = 0.0
    filled: float = 1.0
    """Times the tokens there are, those that the gradient of the weight is made of."""

    @property
    def forward(self) -> float:
        return self.flops + self.path_in + self.path_out

    def backward(self, *, is_trained: bool, is_needed: bool) -> float:
        """`is_needed` is the gradient of what goes in."""
        return self.flops * (is_trained * self.filled + is_needed) + 2 * self.path_out + self.path_in * (1 + is_needed)


class _Walk:
    """Goes through a piece product by product and knows whether anybody needs the gradient of what has come so far."""

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
        again = run.recompute.recomputed_parts
        linears = _Linears(run, part, layer)
        query, keys = layer.config.num_attention_heads * layer.config.head_dim, linears.keys
        hidden = layer.config.hidden_size
        parts = [self._chain(part, [linears.of(QKV, linears.rows, hidden, query + 2 * keys)])]
        core = _attention(run, layer)
        parts.append(_Passed(core.forward, self.is_needed * (core.backward + core.again * ("core_attention" in again))))
        parts.append(self._chain(part, [linears.of(PROJECTION, linears.rows, query, hidden)]))
        if layer.memory:
            parts += self._cross(part, layer, linears)
        products, is_read = _feed_forward(linears, layer), self.is_needed or part.is_trained
        inner = self._chain(part, products)
        if ("moe" if layer.has_experts else "mlp") in again and self.is_needed:
            # A shared expert goes before the others. Where those keep nothing, torch ends with it.
            idle = products[1].forward if layer.has_experts and not is_read else 0.0
            parts.append(_Passed(0.0, inner.forward - idle))
        return _sum([*parts, inner])

    def _cross(self, part: ModelPart, layer: Layer, linears: "_Linears") -> list[_Passed]:
        run, hidden = self._run, layer.config.hidden_size
        query = layer.config.num_attention_heads * layer.config.head_dim
        memory = _rows(run, layer.streams(run.micro_batch_size), layer.memory)
        queries = self._chain(part, [linears.of(CROSS_QUERY, linears.rows, hidden, query)])
        stream, self.is_needed = self.is_needed, part.needs_memory
        pairs = self._chain(part, [linears.of(CROSS_KEY_VALUE, memory, hidden, 2 * linears.keys)])
        self.is_needed |= stream
        core = _cross_attention(run, layer)
        projection = linears.of(CROSS_PROJECTION, linears.rows, query, hidden)
        attended = _Passed(core.forward, self.is_needed * core.backward)
        return [queries, pairs, attended, self._chain(part, [projection])]

    def _chain(self, part: ModelPart, linears: list[_Linear]) -> _Passed:
        """Products, each behind the one before it."""
        backward = 0.0
        for linear in linears:
            backward += linear.backward(is_trained=part.is_trained, is_needed=self.is_needed)
            self.is_needed |= linear.path_in > 0
        self.is_needed |= part.is_trained
        return _Passed(sum(linear.forward for linear in linears), backward)


def _sum(parts: list[_Passed]) -> _Passed:
    return _Passed(sum(part.forward for part in parts), sum(part.backward for part in parts))


def _rows(run: Run, streams: int, sequence: int, *, is_cut: bool = True) -> int:
    """Tokens that all ranks of cp multiply, as sequence parallelism fills them up; of streams that cp does not cut each
    of them has so many."""
    cp, sp = run.sizes.cp, run.sizes.tp if run.sizes.sequence_parallel else 1
    own = streams * -(-sequence // (cp if is_cut else 1))
    return -(-own // sp) * sp * cp


def _num_alike(sizes: Sizes) -> int:
    """Ranks of tp that do the same where it cuts nothing."""
    return 1 if sizes.sequence_parallel else sizes.tp


# --- products ---------------------------------------------------------------------------------------------------------


def _end(run: Run, part: ModelPart) -> list[_Linear]:
    """Products of a piece that is no layer."""
    micro, is_cut, linears = run.micro_batch_size, part.component == "language", []
    for product in part.products:
        streams, tokens = (micro, product.tokens) if is_cut else (1, micro * product.tokens)
        rows = _rows(run, streams, round(tokens), is_cut=is_cut)
        num_alike = 1 if product.is_cut else _num_alike(run.sizes)
        linears.append(_Linear(flops=2.0 * rows * product.inputs * product.outputs * num_alike))
    if part.logit_tokens:
        padded = cost.vocabulary_parameters(run.model, run.sizes) * run.sizes.tp
        linears.append(_Linear(flops=2.0 * _rows(run, micro, part.logit_tokens) * padded))
    return linears


class _Linears:
    """The linears of a layer."""

    def __init__(self, run: Run, part: ModelPart, layer: Layer) -> None:
        self.run = run
        self.rows = _rows(run, layer.streams(run.micro_batch_size), layer.sequence, is_cut=layer.is_cut_by_context)
        self.keys = layer.config.num_query_groups * layer.config.head_dim
        self._adapters = {path.name: path for path in part.adapters}

    def of(self, name: str, rows: int, inputs: int, outputs: int) -> _Linear:
        flops, filled = 2.0 * rows * inputs * outputs, _filled(self.run, rows / self.run.sizes.cp)
        path = self._adapters.get(name)
        if path is None:
            return _Linear(flops=flops, filled=filled)
        path_in, path_out = _path(path, rows, _num_alike(self.run.sizes))
        return _Linear(flops=flops, path_in=path_in, path_out=path_out, filled=filled)


def _filled(run: Run, rows: float) -> float:
    """Of a product of so many rows in FP8: how many more the gradient of its weight takes, filled up to tiles."""
    return -(-rows // TILE) * TILE / rows if run.fp8 is not None and rows else 1.0


def _path(path: LoraAdapter, rows: int, num_alike: int) -> tuple[float, float]:
    """FLOPs of either product. The one that tp does not cut is A beside a column, B beside a row."""
    into, out = 2.0 * rows * path.rank * path.inputs, 2.0 * rows * path.rank * path.outputs
    return (into * num_alike, out) if path.cuts_outputs else (into, out * num_alike)


def _feed_forward(linears: _Linears, layer: Layer) -> list[_Linear]:
    config, rows, hidden = layer.config, linears.rows, layer.config.hidden_size
    gates = 2 if config.is_gated else 1
    if config.moe is None or not layer.has_experts:
        width = config.ffn_hidden_size
        return [linears.of(UP, rows, hidden, gates * width), linears.of(DOWN, rows, width, hidden)]
    moe = config.moe
    width, shared = moe.ffn_hidden_size or config.ffn_hidden_size, moe.shared_expert_intermediate_size
    gate = moe.shared_expert_gate * _num_alike(linears.run.sizes)
    sizes, num_ranks = linears.run.sizes, linears.run.sizes.tp * linears.run.sizes.cp
    sent = sent_tokens(layer, sizes, linears.run.micro_batch_size, own=rows / num_ranks)
    chosen, of_expert = num_ranks * sent, sent * sizes.ep * sizes.etp / moe.router.num_experts
    products = [
        _Linear(flops=2.0 * rows * hidden * (moe.router.num_experts + gate)),
        _Linear(flops=2.0 * chosen * hidden * (gates + 1) * width, filled=_filled(linears.run, of_expert)),
    ]
    if not shared:
        return products
    up, down = (
        linears.of(SHARED_UP, rows, hidden, gates * shared),
        linears.of(SHARED_DOWN, rows, shared, hidden),
    )
    return [*products, up, down]


# --- attention --------------------------------------------------------------------------------------------------------


def _attention(run: Run, layer: Layer) -> _Attended:
    """Of a layer's own sequence."""
    config, sizes, sequence = layer.config, run.sizes, layer.sequence
    has_bias = isinstance(config, T5Config) and config.position == "relative"
    is_shared = sizes.cp > 1 and layer.is_cut_by_context
    in_context = is_shared or has_bias or layer.has_bounds or isinstance(config, BertConfig)
    each = _pair_flops(run, layer)
    drops, window = config.attention_dropout > 0, layer.window if layer.window < sequence else 0
    if in_context:
        inner = sizes.cp_ulysses if is_shared else 1
        outer = sizes.cp // inner if is_shared else 1
        heads = config.num_attention_heads // sizes.tp // inner
        lays_out = drops or has_bias or config.head_dim % 8 > 0
        lengths = layer.documents or (sequence,)
        if window:
            is_banded = run.is_half and config.head_dim <= 256 and not lays_out
            pairs = _window_pairs(lengths, window, outer, inner, is_banded)
        elif layer.is_causal:
            pairs = sum(_causal_pairs(length, outer, heads if lays_out else 0) for length in lengths)
        else:
            pairs = float(sum(length**2 for length in lengths))
        return _Attended(2 * each * pairs, (5 if lays_out else 4) * each * pairs)
    if drops or has_no_kernel(layer, sizes, run.bytes_per_element):
        pairs = float(sequence**2)
        return _Attended(2 * each * pairs, 4 * each * pairs, each * pairs * drops)
    pairs = _whole_window_pairs(sequence, window) if window else sequence**2 / (2 if layer.is_causal else 1)
    return _Attended(2 * each * pairs, 4 * each * pairs)


def _cross_attention(run: Run, layer: Layer) -> _Attended:
    lays_out = layer.config.attention_dropout > 0 or layer.config.head_dim % 8 > 0
    product = _pair_flops(run, layer) * layer.sequence * layer.memory
    return _Attended(2 * product, (5 if lays_out else 4) * product)


def _pair_flops(run: Run, layer: Layer) -> float:
    """Of one product, for each pair of tokens of a stream, all heads."""
    num_alike = 1 if layer.is_cut_by_context else run.sizes.cp
    streams = layer.streams(run.micro_batch_size) * num_alike
    return 2.0 * streams * layer.config.num_attention_heads * layer.config.head_dim


def _causal_pairs(sequence: int, outer: int, heads: int) -> float:
    """Of causal attention over groups that have equal parts; `heads` of a rank where it is laid out, else 0.

    Tiles are of a group's own part: of others it sees all of a part, or none.
    """
    own = sequence // outer
    half = own**2 / 2
    between = sequence**2 / 2 - outer * half
    if not heads:
        return between + outer * half
    tile = min(own, max(1, MOST_SCORES // (heads * own)))
    count, rest = divmod(own, tile)
    return between + outer * (tile**2 * count * (count + 1) / 2 + rest * own)


def _whole_window_pairs(sequence: int, window: int) -> float:
    """Of sequences that a rank has whole: two windows under one mask, or blocks."""
    if sequence <= 2 * window:
        return float(sequence**2)
    return window**2 / 2 + (-(-sequence // window) - 1) * 2.0 * window**2


@lru_cache(maxsize=256)
def _window_pairs(lengths: tuple[int, ...], window: int, outer: int, inner: int, is_banded: bool) -> float:
    """Of sequences that groups share, or of documents, tile by tile; `is_banded` where the kernel knows windows, and
    the last query of a tile sees its last key."""
    layout, view = cut(lengths, ring_size=outer, ulysses_size=inner), MaskSpec(is_causal=True, window=window)
    positions = layout.group_positions.tolist()
    pairs = 0.0
    for group in range(outer):
        for source in range(outer):
            for block in layout.blocks(group, source, view):
                queries, keys, behind = block.num_queries, block.num_keys, 0
                if block.kind == "masked" and is_banded:
                    distance = positions[group][block.query_row] - positions[source][block.key_row]
                    behind = queries - min(max(keys - distance, 0), queries)
                    # Queries beyond the last key are under a mask.
                    pairs += _banded_pairs(queries - behind, keys, window)
                    queries = behind
                pairs += queries * keys
    return pairs


def _banded_pairs(queries: int, keys: int, window: int) -> float:
    """The triangle of causal attention to `keys`, less what comes before the first query, and less what no window
    reaches."""
    triangles = keys**2, max(keys - queries, 0) ** 2, max(keys - window, 0) ** 2, max(keys - queries - window, 0) ** 2
    return (triangles[0] - triangles[1] - triangles[2] + triangles[3]) / 2
