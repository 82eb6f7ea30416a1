"""Work of a part of a model on one microbatch and one rank: FLOPs, bytes and messages, to be timed by `step_time`.

All numbers are of a forward; `step_time` derives the backward. FLOPs are executed ones: half for causal attention.
T tokens of the microbatch on this rank, H hidden, M x K by K x N a product.
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
from lightning_megatron.transformer.linears import PROJECTION, REPLICATED, latent_linear_sizes


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """The forward of one microbatch through a part, on one rank."""

    product_flops: float = 0.0
    """FLOPs of matrix products in layers, which FP8 makes faster."""
    edge_flops: float = 0.0
    """FLOPs of dense products in layers, each product's times 1/M + 1/N + 1/K."""
    grouped_edge_flops: float = 0.0
    """FLOPs of the experts' grouped products, each product's times 1/M + 1/N + 1/K."""
    head_flops: float = 0.0
    """FLOPs of products that are never in FP8."""
    logit_flops: float = 0.0
    """FLOPs of logits within `head_flops`."""
    flash_flops: float = 0.0
    """FLOPs of attention in one fused kernel."""
    flash_edge_flops: float = 0.0
    """FLOPs of fused causal attention over the keys that a query sees in one call."""
    both_ways_edge_flops: float = 0.0
    """FLOPs of fused bidirectional attention over the keys that a query sees in one call."""
    materialised_flops: float = 0.0
    """FLOPs of attention that materialises its weights."""
    moved_bytes: float = 0.0
    """Least bytes that elementwise kernels read and write."""
    bounded_bytes: float = 0.0
    """Further bytes where inputs of the experts' gates are clamped and biases are added expert by expert."""
    num_pairs: float = 0.0
    """Pairs of tokens, for each head, whose attention weights are materialised for dropout."""
    num_grouped_pairs: float = 0.0
    """Pairs of tokens, for each head, whose weights are materialised as no kernel takes grouped queries."""
    cast_bytes: float = 0.0
    """Bytes that casts of product inputs to FP8 read and write."""
    tensor_bytes: float = 0.0
    """Bytes of tensors that tp gathers and scatters."""
    num_tensor_messages: int = 0
    """Number of messages of tp."""
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
    """FLOPs of every second product, with queries, keys, values, gate and up as one product each."""
    adapter_flops: float = 0.0
    """FLOPs of LoRA adapters, which are never in FP8."""
    adapter_edge_flops: float = 0.0
    """FLOPs of LoRA adapters, each product's times 1/M + 1/N + 1/K."""
    adapter_bytes: float = 0.0
    """Bytes that the adapters' dropout reads and writes."""
    num_frozen: int = 0
    """Elements of frozen weights of products."""
    num_layers: int = 0
    """Layers that the host launches."""
    num_expert_layers: int = 0
    """Layers with experts that the host launches."""
    num_experts: float = 0.0
    """Experts of the rank in these layers."""


@lru_cache(maxsize=65536)
def layer_work_of(part: ModelPart, model_parts: ModelParts, sizes: Sizes, micro_batch: int, width: int) -> LayerWork:
    """Work of a part; `width`: bytes of an activation element."""
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
    return _with_adapters(replace(work, num_frozen=num_frozen), part, sizes, micro_batch, width)


def has_no_kernel(layer: Layer, sizes: Sizes, width: int) -> bool:
    """Whether self-attention on elements of so many bytes has no kernel, so that torch materialises scores.

    There is none in float64. The float32 kernel takes a key for each query head; over cp, within documents and in
    windows this package repeats keys for it.
    """
    config = layer.config
    is_grouped = config.num_attention_heads // sizes.tp > max(config.num_query_groups // sizes.tp, 1)
    is_windowed = 0 < layer.window < layer.sequence
    return width == 8 or (width == 4 and is_grouped and not (layer.is_by_document(sizes) or is_windowed))


def _end(part: ModelPart, model_parts: ModelParts, sizes: Sizes, micro_batch: int, width: int) -> LayerWork:
    hidden, tp = model_parts.config.hidden_size, sizes.tp
    # Cp ranks share images, not their tokens.
    cp = sizes.cp if part.component == "language" else 1
    flops = sum(
        2.0 * micro_batch * p.tokens / cp * p.inputs * p.outputs / (tp if p.is_cut else 1) for p in part.products
    )
    tokens = micro_batch * part.logit_tokens / sizes.cp
    columns = cost.vocabulary_parameters(model_parts.config, sizes) // hidden
    logits = 2 * tokens * hidden * columns
    moved, gathered = 0.0, 0.0
    if part.logit_tokens:
        # Logits are written and read for their maximum; exponentials in float32 are written, modified in place and
        # summed. The backward moves twice as much, its casts included.
        moved = tokens * columns * (2 * width + 10)
        gathered = tokens * hidden * width
    elif part.embedded_tokens:
        tokens = micro_batch * part.embedded_tokens / sizes.cp
        moved, gathered = 3 * tokens * hidden * width, tokens * hidden * width
    return LayerWork(
        head_flops=flops + logits,
        logit_flops=logits,
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
    values, outputs, narrow, gathered = keys, query, 0, hidden
    products = [(tokens, hidden, (query + 2 * keys) / tp), (tokens, query / tp, hidden)]
    if config.latent is not None:
        latent, heads = config.latent, config.num_attention_heads
        linears = latent_linear_sizes(config, latent)
        query, keys, values = (heads * size for size in (latent.qk_head_dim, latent.qk_head_dim, latent.v_head_dim))
        # Latents are made of a rank's own tokens, by linears that every rank has.
        outputs, narrow = values, sum(features for name, (_, features) in linears.items() if name in REPLICATED)
        gathered = narrow
        products = [
            (tokens / sp, inputs, features)
            if name in REPLICATED
            else ((tokens, inputs / tp, features) if name == PROJECTION else (tokens, inputs, features / tp))
            for name, (inputs, features) in linears.items()
        ]
    if layer.memory:
        memory = micro_batch * layer.memory_on(sizes)
        products += [(tokens, hidden, query / tp), (memory, hidden, 2 * keys / tp), (tokens, query / tp, hidden)]
    # Norms read and write, sums read twice and write; rotary embeddings and norms of queries and keys read and write.
    norms = 3 if layer.memory else 2
    moved = tokens / sp * hidden * width * (5 + (config.hidden_dropout > 0)) * norms
    moved += ((config.position == "rotary") + config.qk_norm) * 2 * tokens * (query + keys) / tp * width
    moved += 2 * tokens / sp * narrow * width
    own_flops, memory_flops = _attention(layer, streams, cp, tp)
    drops = config.attention_dropout > 0
    # Cross-attention has a kernel up to float32.
    has_kernel_across = not drops and width < 8
    is_materialised = drops or has_no_kernel(layer, sizes, width)
    pairs = grouped_pairs = 0.0
    if drops:
        pairs = streams * layer.sequence / cp * (layer.sequence + layer.memory) * config.num_attention_heads / tp
    elif is_materialised:
        grouped_pairs = streams * layer.sequence**2 * config.num_attention_heads / tp
    num_attention_products = len(products)
    # Inputs are cast before tp gathers them.
    casts = tokens / sp * (hidden + narrow) + tokens * outputs / tp
    if layer.memory:
        casts += (tokens + memory) / sp * hidden + tokens * query / tp
    grouped: list[tuple[float, float, float]] = []
    expert_bytes = expert_tensor_bytes = bounded = 0.0
    own, dense = 1.0, config.ffn_hidden_size
    gates = 2 if config.is_gated else 1
    num_gathers = 2 + 2 + (2 if layer.memory else 0)
    if config.moe is not None and layer.has_experts:
        moe = config.moe
        features = (moe.ffn_hidden_size or config.ffn_hidden_size) / sizes.etp
        own = moe.router.num_experts / sizes.ep
        sent = sent_tokens(layer, sizes, micro_batch)
        received = sent * sizes.etp
        grouped = [(received / own, hidden, gates * features), (received / own, features, hidden)]
        moved += received * (hidden * 6 + features * (gates + 2)) * width
        # Grouped products leave biases to another kernel.
        moved += config.add_bias_linear * 2 * received * (hidden + gates * features) * width
        # Both halves of a gate's input are clamped (2 read, 2 written) and concatenated (2 read, 2 written). A bias is
        # scaled (1 written), added (2 read, 1 written) and concatenated (1 read, 1 written), of which 2 are counted.
        # A backward is 10 and 8, of which 2.8 are counted: about as much more as other elementwise kernels.
        # Source: Megatron Core, fused_bias_geglu.py (weighted_bias_quick_geglu_impl), experts.py (_apply_bias).
        bounded = received * (8 * features + 4 * hidden * config.add_bias_linear) * width
        casts += received * (hidden + features)
        expert_bytes = 2 * sent * hidden * width
        expert_tensor_bytes = 2 * received * hidden * width if sizes.etp > 1 else 0.0
        products.append((tokens / tp, hidden, moe.router.num_experts))
        dense = moe.shared_expert_intermediate_size
    if dense:
        wide = dense / tp
        products += [(tokens, hidden, gates * wide), (tokens, wide, hidden)]
        moved += tokens * wide * (gates + 1) * width
        casts += tokens * (hidden / sp + wide)
    else:
        num_gathers -= 2
    flops = [2 * m * n * k for m, k, n in products]
    grouped_flops = own * sum(2 * m * n * k for m, k, n in grouped)
    edges, grouped_edges = (sum(2 * (m * n + n * k + k * m) for m, k, n in some) for some in (products, grouped))
    # Queries, keys, values, output, gate, up, down.
    features = 0 if grouped else config.ffn_hidden_size
    singles = [query, keys, keys, query, *[features] * gates, features]
    # A query sees the keys of one call.
    num_calls = sizes.cp // sizes.cp_ulysses if cp > 1 else 1
    lengths = layer.documents or (layer.sequence,)
    # A token has so many keys on average.
    keys_of_document = sum(length**2 for length in lengths) / sum(lengths)
    own_edge = own_flops * num_calls / min(layer.window or keys_of_document, keys_of_document)
    memory_edge = memory_flops * num_calls / max(layer.memory, 1)
    return LayerWork(
        product_flops=sum(flops) + grouped_flops,
        edge_flops=edges,
        grouped_edge_flops=own * grouped_edges,
        flash_flops=(not is_materialised) * own_flops + has_kernel_across * memory_flops,
        flash_edge_flops=(not is_materialised) * layer.is_causal * own_edge,
        both_ways_edge_flops=has_kernel_across * memory_edge + (not is_materialised) * (not layer.is_causal) * own_edge,
        # Masked pairs are computed too.
        materialised_flops=is_materialised * own_flops * (1 + layer.is_causal) + (not has_kernel_across) * memory_flops,
        moved_bytes=moved,
        bounded_bytes=bounded,
        num_pairs=pairs,
        num_grouped_pairs=grouped_pairs,
        cast_bytes=3 * casts,
        tensor_bytes=((num_gathers - 1) * hidden + gathered) * tokens * width if tp > 1 else 0.0,
        num_tensor_messages=num_gathers if tp > 1 else 0,
        key_bytes=tokens * (keys + values) / min(tp, config.num_query_groups) * width if cp > 1 else 0.0,
        query_bytes=tokens * query / tp * width if cp > 1 else 0.0,
        expert_bytes=expert_bytes,
        expert_tensor_bytes=expert_tensor_bytes,
        mlp_flops=sum(flops[num_attention_products:]) + grouped_flops,
        second_flops=2 * tokens * hidden * sum(singles[1::2]) / tp,
        num_layers=1,
        num_expert_layers=int(layer.has_experts),
        num_experts=own if layer.has_experts else 0.0,
    )


def _with_adapters(work: LayerWork, part: ModelPart, sizes: Sizes, micro_batch: int, width: int) -> LayerWork:
    """Adds the work of LoRA adapters to that of a layer."""
    assert part.layer is not None
    tp, flops, edges, moved = sizes.tp, 0.0, 0.0, 0.0
    for adapter in part.adapters:
        tokens = micro_batch * adapter.tokens_on(part.layer, sizes)
        inputs, outputs = adapter.features_on(tp)
        for wide in (inputs, outputs):
            flops += 2 * tokens * wide * adapter.rank
            edges += 2 * (tokens * wide + tokens * adapter.rank + wide * adapter.rank)
        # Dropout reads the input and writes its output and a mask.
        moved += adapter.has_dropout * tokens * inputs * (2 * width + 1)
    return replace(work, adapter_flops=flops, adapter_edge_flops=edges, adapter_bytes=moved)


def _attention(layer: Layer, streams: int, cp: int, tp: int) -> tuple[float, float]:
    """FLOPs of self-attention and of cross-attention."""
    config: TransformerConfig = layer.config
    own = own_attention_flops(layer, streams)
    memory = 4 * streams * layer.sequence * layer.memory * config.num_attention_heads * config.head_dim
    return own / cp / tp, memory / cp / tp
