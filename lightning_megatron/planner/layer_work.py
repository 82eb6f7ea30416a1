"""What a layer, or an end of a model, does with one microbatch on one rank, in numbers that a clock is put to later.

Everything is of a forward; `step_time` says what a backward is. FLOPs are those that are done: causal attention half.
T tokens of the microbatch here, H hidden, M x K by K x N a product.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from lightning_megatron.mesh import Sizes
from lightning_megatron.planner.model_parts import (
    Layer,
    ModelPart,
    ModelParts,
    adapter_parameters,
    own_attention_flops,
    parameters_of,
    sent_tokens,
)
from lightning_megatron.transformer import cost
from lightning_megatron.transformer.config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """The forward of one microbatch through a piece, on one rank."""

    product_flops: float = 0.0
    """Of matrix products in layers, which FP8 makes faster."""
    edge_flops: float = 0.0
    """The same, each times 1/M + 1/N + 1/K."""
    grouped_edge_flops: float = 0.0
    """The same of products of experts."""
    head_flops: float = 0.0
    """Of products that are never in FP8."""
    flash_flops: float = 0.0
    """Of attention in one kernel."""
    flash_edge_flops: float = 0.0
    """The same of causal attention, over the keys that a query sees in one call."""
    both_ways_edge_flops: float = 0.0
    """The same of attention whose queries see all keys."""
    laid_out_flops: float = 0.0
    """Of attention that lays its weights out."""
    moved_bytes: float = 0.0
    """That elementwise kernels read and write at least."""
    bounded_bytes: float = 0.0
    """The same, beyond them, where what gates of experts read is held within bounds and biases are added by expert."""
    num_pairs: float = 0.0
    """Of tokens and heads, of which attention lays weights out to drop of them."""
    num_grouped_pairs: float = 0.0
    """The same where no kernel takes grouped queries, and nothing is dropped."""
    cast_bytes: float = 0.0
    """Elements that are inputs of products, which FP8 casts."""
    tensor_bytes: float = 0.0
    """Bytes of tensors that tp gathers and scatters."""
    num_tensor_messages: int = 0
    """Bytes that tp reduces."""
    key_bytes: float = 0.0
    """Bytes of keys and values of the rank's own tokens, where cp shares sequences."""
    query_bytes: float = 0.0
    """Bytes of queries of the rank's own tokens, where cp shares sequences."""
    expert_bytes: float = 0.0
    """Bytes that a rank sends to experts and back."""
    expert_tensor_bytes: float = 0.0
    """Bytes that etp gathers and scatters."""
    mlp_flops: float = 0.0
    """FLOPs of the feed-forward network within `product_flops`."""
    second_flops: float = 0.0
    """Of them every second product, where queries, keys, values, gate and up are one each."""
    path_flops: float = 0.0
    """FLOPs of LoRA adapters, which are never in FP8."""
    path_edge_flops: float = 0.0
    """FLOPs of LoRA adapters, each product's times 1/M + 1/N + 1/K."""
    path_bytes: float = 0.0
    """Bytes that the adapters' dropout reads and writes."""
    num_frozen: int = 0
    """Weights of products that are frozen."""
    num_layers: int = 0
    """Layers that the host launches."""
    num_expert_layers: int = 0
    """Layers with experts that the host launches."""


@lru_cache(maxsize=65536)
def layer_work_of(part: ModelPart, model_parts: ModelParts, sizes: Sizes, micro_batch: int, width: int) -> LayerWork:
    """The work of a piece; `width` is the bytes of an activation."""
    if part.layer is None:
        matrix = (
            cost.vocabulary_parameters(model_parts.config, sizes) if part.logit_tokens and not part.is_trained else 0
        )
        return replace(_end(part, model_parts, sizes, micro_batch, width), num_frozen=matrix)
    work = _layer(part.layer, sizes, micro_batch, width)
    if not work.num_layers:
        return work
    num_frozen = (
        0 if part.is_trained else sum(parameters_of(part, model_parts, sizes)) - adapter_parameters(part, sizes)
    )
    return _with_paths(replace(work, num_frozen=num_frozen), part, sizes, micro_batch, width)


def has_no_kernel(layer: Layer, sizes: Sizes, width: int) -> bool:
    """Whether no kernel attends to the own stream, in activations of so many bytes, and torch lays scores out.

    The kernel of float32 takes a key for each query head; where ranks or documents share a stream, and in windows, our
    code repeats keys before it.
    """
    config = layer.config
    is_grouped = config.num_attention_heads // sizes.tp > max(config.num_query_groups // sizes.tp, 1)
    is_windowed = 0 < layer.window < layer.sequence
    return width == 4 and is_grouped and not (layer.is_by_document(sizes) or is_windowed)


def _end(part: ModelPart, model_parts: ModelParts, sizes: Sizes, micro_batch: int, width: int) -> LayerWork:
    hidden, tp = model_parts.config.hidden_size, sizes.tp
    # Images are shared out whole.
    cp = sizes.cp if part.component == "language" else 1
    flops = sum(
        2.0 * micro_batch * p.tokens / cp * p.inputs * p.outputs / (tp if p.is_cut else 1) for p in part.products
    )
    tokens = micro_batch * part.logit_tokens / sizes.cp
    columns = cost.vocabulary_parameters(model_parts.config, sizes) // hidden
    moved, gathered = 0.0, 0.0
    if part.logit_tokens:
        flops += 2 * tokens * hidden * columns
        # Logits written and read for their maximum; exponentials, in float32, written, changed in place and summed.
        # A backward that counts twice that counts its casts.
        moved = tokens * columns * (2 * width + 10)
        gathered = tokens * hidden * width
    elif part.embedded_tokens:
        rows = micro_batch * part.embedded_tokens / sizes.cp
        moved, gathered = 3 * rows * hidden * width, rows * hidden * width
    return LayerWork(
        head_flops=flops,
        moved_bytes=moved,
        tensor_bytes=gathered if tp > 1 else 0.0,
        num_tensor_messages=int(tp > 1 and gathered > 0),
    )


def _layer(layer: Layer, sizes: Sizes, micro_batch: int, width: int) -> LayerWork:
    config, tp = layer.config, sizes.tp
    sp = tp if sizes.sequence_parallel else 1
    cp = sizes.cp if layer.is_cut_by_context else 1
    streams = layer.streams(micro_batch)
    tokens = micro_batch * layer.tokens_on(sizes)
    if not tokens:
        return LayerWork()
    hidden, query = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_query_groups * config.head_dim
    products = [(tokens, hidden, (query + 2 * keys) / tp), (tokens, query / tp, hidden)]
    if layer.memory:
        memory = micro_batch * layer.memory_on(sizes)
        products += [
            (tokens, hidden, query / tp),
            (memory, hidden, 2 * keys / tp),
            (tokens, query / tp, hidden),
        ]
    # Two norms read and write, two sums read twice and write; what rotates queries and keys.
    norms = 3 if layer.memory else 2
    moved = tokens / sp * hidden * width * (5 + (config.hidden_dropout > 0)) * norms
    if config.position == "rotary":
        moved += 2 * tokens * (query + keys) / tp * width
    if config.qk_norm:
        moved += 2 * tokens * (query + keys) / tp * width
    own_flops, memory_flops = _attention(layer, streams, cp, tp)
    lays_out = config.attention_dropout > 0
    # Attention to an encoder's stream has a kernel.
    lays_own_out = lays_out or has_no_kernel(layer, sizes, width)
    pairs = grouped_pairs = 0.0
    if lays_out:
        pairs = streams * layer.sequence / cp * (layer.sequence + layer.memory) * config.num_attention_heads / tp
    elif lays_own_out:
        grouped_pairs = streams * layer.sequence**2 * config.num_attention_heads / tp
    num_attention_products = len(products)
    # What tp gathers is cast before it travels.
    casts = tokens / sp * hidden + tokens * query / tp
    if layer.memory:
        casts += (tokens + memory) / sp * hidden + tokens * query / tp
    grouped: list[tuple[float, float, float]] = []
    expert_bytes = expert_tensor_bytes = bounded = 0.0
    gates = 2 if config.is_gated else 1
    num_gathers = 2 + 2 + (2 if layer.memory else 0)
    if config.moe is not None and layer.has_experts:
        moe = config.moe
        features = (moe.ffn_hidden_size or config.ffn_hidden_size) / sizes.etp
        own = moe.router.num_experts / sizes.ep
        sent = sent_tokens(layer, sizes, micro_batch)
        rows = sent * sizes.etp
        grouped = [(rows / own, hidden, gates * features), (rows / own, features, hidden)]
        moved += rows * (hidden * 6 + features * (gates + 2)) * width
        # A product of groups leaves biases to another kernel.
        moved += config.add_bias_linear * 2 * rows * (hidden + gates * features) * width
        # Both halves that a gate reads are bounded (2 read, 2 written) and joined again (the same). A bias is weighed
        # (1 written), added (2 read, 1 written) and joined (1 read, 1 written), of which 2 are counted. A backward is
        # 10 and 8, of which 2.8 are counted: about as much more as other elementwise kernels.
        # Source: Megatron Core, fused_bias_geglu.py (weighted_bias_quick_geglu_impl), experts.py (_apply_bias).
        bounded = rows * (8 * features + 4 * hidden * config.add_bias_linear) * width
        casts += rows * (hidden + features)
        expert_bytes = 2 * sent * hidden * width
        expert_tensor_bytes = 2 * rows * hidden * width if sizes.etp > 1 else 0.0
        products.append((tokens / tp, hidden, moe.router.num_experts))
        if moe.shared_expert_intermediate_size:
            wide = moe.shared_expert_intermediate_size / tp
            products += [(tokens, hidden, gates * wide), (tokens, wide, hidden)]
            moved += tokens * wide * (gates + 1) * width
            casts += tokens * (hidden / sp + wide)
        else:
            num_gathers -= 2
    else:
        own = 1.0
        wide = config.ffn_hidden_size / tp
        products += [(tokens, hidden, gates * wide), (tokens, wide, hidden)]
        moved += tokens * wide * (gates + 1) * width
        casts += tokens * (hidden / sp + wide)
    flops = [2 * m * n * k for m, k, n in products]
    grouped_flops = own * sum(2 * m * n * k for m, k, n in grouped)
    edges, grouped_edges = (sum(2 * (m * n + n * k + k * m) for m, k, n in some) for some in (products, grouped))
    # Queries, keys, values, output, gate, up, down.
    features = 0 if grouped else config.ffn_hidden_size
    singles = [query, keys, keys, query, *[features] * gates, features]
    # Keys that a query sees are those of one call.
    num_calls = sizes.cp // sizes.cp_ulysses if cp > 1 else 1
    lengths = layer.documents or (layer.sequence,)
    # Of a token on average.
    keys_of_document = sum(length**2 for length in lengths) / sum(lengths)
    own_edge = own_flops * num_calls / min(layer.window or keys_of_document, keys_of_document)
    memory_edge = memory_flops * num_calls / max(layer.memory, 1)
    return LayerWork(
        product_flops=sum(flops) + grouped_flops,
        edge_flops=edges,
        grouped_edge_flops=own * grouped_edges,
        flash_flops=(not lays_own_out) * own_flops + (not lays_out) * memory_flops,
        flash_edge_flops=(not lays_own_out) * layer.is_causal * own_edge,
        both_ways_edge_flops=(not lays_out) * memory_edge + (not lays_own_out) * (not layer.is_causal) * own_edge,
        # Masked pairs are computed too.
        laid_out_flops=lays_own_out * own_flops * (1 + layer.is_causal) + lays_out * memory_flops,
        moved_bytes=moved,
        bounded_bytes=bounded,
        num_pairs=pairs,
        num_grouped_pairs=grouped_pairs,
        cast_bytes=3 * casts,
        tensor_bytes=num_gathers * tokens * hidden * width if tp > 1 else 0.0,
        num_tensor_messages=num_gathers if tp > 1 else 0,
        key_bytes=2 * tokens * keys / min(tp, config.num_query_groups) * width if cp > 1 else 0.0,
        query_bytes=tokens * query / tp * width if cp > 1 else 0.0,
        expert_bytes=expert_bytes,
        expert_tensor_bytes=expert_tensor_bytes,
        mlp_flops=sum(flops[num_attention_products:]) + grouped_flops,
        second_flops=2 * tokens * hidden * sum(singles[1::2]) / tp,
        num_layers=1,
        num_expert_layers=int(layer.has_experts),
    )


def _with_paths(work: LayerWork, part: ModelPart, sizes: Sizes, micro_batch: int, width: int) -> LayerWork:
    """Adds the work of LoRA adapters to that of a layer."""
    assert part.layer is not None
    tp, flops, edges, moved = sizes.tp, 0.0, 0.0, 0.0
    for path in part.adapters:
        tokens = micro_batch * path.tokens_on(part.layer, sizes)
        inputs, outputs = (path.inputs, path.outputs / tp) if path.cuts_outputs else (path.inputs / tp, path.outputs)
        for wide in (inputs, outputs):
            flops += 2 * tokens * wide * path.rank
            edges += 2 * (tokens * wide + tokens * path.rank + wide * path.rank)
        # What goes in is read, dropped of and written, with its mask.
        moved += path.has_dropout * tokens * inputs * (2 * width + 1)
    return replace(work, path_flops=flops, path_edge_flops=edges, path_bytes=moved)


def _attention(layer: Layer, streams: int, cp: int, tp: int) -> tuple[float, float]:
    """FLOPs of attention to its own stream, and to an encoder's."""
    config: TransformerConfig = layer.config
    own = own_attention_flops(layer, streams)
    memory = 4 * streams * layer.sequence * layer.memory * config.num_attention_heads * config.head_dim
    return own / cp / tp, memory / cp / tp
