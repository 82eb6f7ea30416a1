"""Cost of a model by formula: parameters, FLOPs and saved activations, before anything is built.

Stage balancing, the planner and MFU read it. Everything is per layer or per model, on one rank where `sizes` is given.

    parameters    layer = H (A + 2 G) D + A D H + c F H + biases + norms        c = 3 gated, else 2
                  with experts E (c F H + H) + c S H in the place of c F H
    FLOPs         training = 3 * forward; a multiply-add counts 2; matrix products alone count
                  with experts those of the K that a token chooses, and of the router and the shared expert
    activations   what a layer saves for backward, with attention that never materialises its weights

Functions of one layer take its place in the stack, `layer`: layers of experts are alike, and so are dense ones.

H hidden, A heads, G key-value groups, D head size, F feed-forward, S of the shared expert, E experts, K chosen,
V vocabulary.
"""

import math
from dataclasses import replace

from lightning_megatron.mesh import Sizes
from lightning_megatron.moe.config import MoEConfig
from lightning_megatron.transformer.config import LanguageModelConfig, TransformerConfig
from lightning_megatron.transformer.latent_config import LatentConfig
from lightning_megatron.transformer.linears import REPLICATED, latent_linear_sizes
from lightning_megatron.transformer.recompute import RecomputeConfig

ONE = Sizes()
KEEP_ALL = RecomputeConfig()


def norm_parameters(config: TransformerConfig) -> int:
    """Parameters of one norm; every rank has all of them."""
    return config.hidden_size * (2 if config.normalization == "layernorm" else 1)


def layer_parameters(config: TransformerConfig, sizes: Sizes = ONE, *, layer: int = 0) -> int:
    """Parameters of one layer that a rank holds; those of the unsplit layer by default."""
    hidden, tp = config.hidden_size, sizes.tp
    query = config.num_attention_heads * config.head_dim
    qkv = query + 2 * config.num_query_groups * config.head_dim
    cut = qkv * hidden + query * hidden + qkv * config.has_qkv_bias
    num_norms = 4 if config.norm_placement == "sandwich" else 2
    replicated = hidden * config.add_bias_linear + num_norms * norm_parameters(config)
    cut += config.num_attention_heads * config.attention_sinks
    if config.qk_norm_across_heads:
        cut += query + config.num_query_groups * config.head_dim
    elif config.qk_norm:
        replicated += 2 * config.head_dim
    if config.latent is not None:
        sizes_of = latent_linear_sizes(config, config.latent)
        cut = sum(inputs * outputs for name, (inputs, outputs) in sizes_of.items() if name not in REPLICATED)
        replicated += sum(sizes_of[name][0] * sizes_of[name][1] for name in REPLICATED & sizes_of.keys())
        replicated += config.latent.q_lora_rank + config.latent.kv_lora_rank
    attention = cut // tp + replicated
    if config.moe is None or not config.has_experts(layer):
        return attention + _mlp_parameters(config, config.ffn_hidden_size, tp)
    num_experts, shared = config.moe.router.num_experts, config.moe.shared_expert_intermediate_size
    own = num_experts // sizes.ep * _mlp_parameters(config, _expert_width(config, config.moe), sizes.etp)
    of_shared = _mlp_parameters(config, shared, tp) + hidden * config.moe.shared_expert_gate if shared else 0
    return attention + num_experts * (hidden + config.moe.router.logit_bias) + own + of_shared


def layer_expert_parameters(config: TransformerConfig, sizes: Sizes = ONE, *, layer: int = 0) -> int:
    """Parameters of a layer's routed experts that a rank holds, a part of `layer_parameters` that is replicated over
    edp; 0 where the layer has none."""
    if config.moe is None or not config.has_experts(layer):
        return 0
    num_own = config.moe.router.num_experts // sizes.ep
    return num_own * _mlp_parameters(config, _expert_width(config, config.moe), sizes.etp)


def cross_attention_parameters(config: TransformerConfig, sizes: Sizes = ONE) -> int:
    """Parameters of a decoder layer beyond `layer_parameters`: its attention to an encoder, and the norm before it."""
    hidden, query = config.hidden_size, config.num_attention_heads * config.head_dim
    rows = query + 2 * config.num_query_groups * config.head_dim
    cut = rows * hidden + query * hidden + rows * config.has_qkv_bias
    return cut // sizes.tp + hidden * config.add_bias_linear + norm_parameters(config)


def _mlp_parameters(config: TransformerConfig, width: int, ranks: int) -> int:
    """Parameters of a feed-forward network of so many features, of which each rank holds its part."""
    hidden, up = config.hidden_size, width * (2 if config.is_gated else 1)
    return (up * hidden + width * hidden + up * config.add_bias_linear) // ranks + hidden * config.add_bias_linear


def _expert_width(config: TransformerConfig, moe: MoEConfig) -> int:
    return moe.ffn_hidden_size or config.ffn_hidden_size


def vocabulary_parameters(config: LanguageModelConfig, sizes: Sizes = ONE) -> int:
    """Parameters of one matrix over the vocabulary that a rank holds, padded rows included."""
    rows = -(-config.vocab_size // sizes.tp)
    return -(-rows // config.vocab_multiple) * config.vocab_multiple * config.hidden_size


def model_parameters(config: LanguageModelConfig) -> int:
    """Parameters of the unsplit model; a tied matrix counts once and padded rows do not count."""
    matrices = 1 if config.tie_embeddings else 2
    positions = config.max_sequence_length * config.hidden_size if config.position == "learned" else 0
    vocabulary = matrices * config.vocab_size * config.hidden_size + positions
    layers = sum(layer_parameters(config, layer=layer) for layer in range(config.num_layers))
    if config.num_mtp_layers:
        square = 2 * config.hidden_size**2
        layers += config.num_mtp_layers * (
            layer_parameters(config, layer=config.num_layers - 1) + square + 3 * norm_parameters(config)
        )
    return layers + norm_parameters(config) + vocabulary


def active_parameters(config: LanguageModelConfig) -> int:
    """Parameters of the unsplit model that one token uses: of the experts of a layer, the chosen ones, and none of the
    layers that predict further tokens in training alone."""
    config = replace(config, num_mtp_layers=0)
    if config.moe is None:
        return model_parameters(config)
    num_idle = config.moe.router.num_experts - config.moe.router.top_k
    idle = num_idle * _mlp_parameters(config, _expert_width(config, config.moe), 1)
    return model_parameters(config) - idle * sum(config.has_experts(layer) for layer in range(config.num_layers))


def layer_linear_flops(config: TransformerConfig, *, num_tokens: int, layer: int = 0) -> int:
    """Forward FLOPs of the linears of one layer. Of experts those of `top_k` choices a token: what a capacity drops
    counts as if it were computed, and what it pads counts nothing."""
    hidden, query = config.hidden_size, config.num_attention_heads * config.head_dim
    qkv = query + 2 * config.num_query_groups * config.head_dim
    of_attention = hidden * (qkv + query)
    if config.latent is not None:
        of_attention = sum(inputs * outputs for inputs, outputs in latent_linear_sizes(config, config.latent).values())
    return 2 * num_tokens * of_attention + layer_mlp_flops(config, num_tokens=num_tokens, layer=layer)


def layer_mlp_flops(config: TransformerConfig, *, num_tokens: int, layer: int = 0) -> int:
    """Forward FLOPs of a layer's feed-forward network, dense or router and experts: a part of `layer_linear_flops`."""
    num_matrices = 3 if config.is_gated else 2
    if config.moe is None or not config.has_experts(layer):
        return 2 * num_tokens * config.hidden_size * num_matrices * config.ffn_hidden_size
    router = config.moe.router
    width = router.top_k * _expert_width(config, config.moe) + config.moe.shared_expert_intermediate_size
    scores = router.num_experts + config.moe.shared_expert_gate
    return 2 * num_tokens * config.hidden_size * (num_matrices * width + scores)


def layer_attention_flops(
    config: TransformerConfig, *, batch: int, sequence: int, is_causal: bool, window: int = 0
) -> int:
    """Forward FLOPs of queries times keys and weights times values in one layer.

    Causal attention counts half: each token needs the keys before it only, and kernels skip the others. An
    implementation that computes all and masks spends twice this. With a window w < S half of S^2 becomes what is
    needed, w S - w^2 / 2.
    """
    num_pairs = 2 * sequence * sequence
    if is_causal:
        num_pairs = window * (2 * sequence - window) if 0 < window < sequence else sequence * sequence
    # Of values and of queries and keys; attention to latents costs as if keys and values were made of them.
    value_dim = config.head_dim if config.latent is None else config.latent.v_head_dim
    return batch * num_pairs * config.num_attention_heads * (config.head_dim + value_dim)


def cross_attention_flops(config: TransformerConfig, *, batch: int, sequence: int, memory: int) -> int:
    """Forward FLOPs of a decoder layer's attention to `memory` tokens of an encoder: linears, scores and their sum."""
    hidden, query = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_query_groups * config.head_dim
    linears = 2 * sequence * hidden * 2 * query + 2 * memory * hidden * 2 * keys
    return batch * (linears + 4 * sequence * memory * query)


def head_flops(config: LanguageModelConfig, *, num_tokens: int) -> int:
    """Forward FLOPs of the logits of the real vocabulary; looking up the embedding counts nothing."""
    return 2 * num_tokens * config.hidden_size * config.vocab_size


def training_flops(config: LanguageModelConfig, *, batch: int, sequence: int, is_causal: bool = True) -> int:
    """Model FLOPs of forward and backward of a batch, with nothing recomputed: what MFU divides by.

    Convention: matrix products alone, a multiply-add is 2, the backward is twice the forward, causal attention counts
    half. Without that half it is 72 B S L H^2 (1 + S / 6H + V / 12LH) for F = 4H and one head of keys for each of
    queries. Source: Narayanan et al., arXiv 2104.04473, section 5.1 and appendix, less their recomputation (a factor
    of 4/3 on the layers), which counts attention in full; the half as in Dao, arXiv 2307.08691, section 4.1.
    """
    num_tokens = batch * sequence
    layers = sum(
        layer_linear_flops(config, num_tokens=num_tokens, layer=layer)
        + layer_attention_flops(
            config, batch=batch, sequence=sequence, is_causal=is_causal, window=config.window_of(layer)
        )
        for layer in range(config.num_layers)
    )
    layers += config.num_mtp_layers * (
        mtp_layer_flops(config, batch=batch, sequence=sequence, is_causal=is_causal)
        + head_flops(config, num_tokens=num_tokens)
    )
    return 3 * (layers + head_flops(config, num_tokens=num_tokens))


def mtp_layer_flops(config: LanguageModelConfig, *, batch: int, sequence: int, is_causal: bool = True) -> int:
    """Forward FLOPs of a layer that predicts further tokens, but for the head: its projection and its layer, which is
    as the model's last."""
    last, num_tokens = config.num_layers - 1, batch * sequence
    return (
        4 * num_tokens * config.hidden_size**2
        + layer_linear_flops(config, num_tokens=num_tokens, layer=last)
        + layer_attention_flops(
            config, batch=batch, sequence=sequence, is_causal=is_causal, window=config.window_of(last)
        )
    )


def layer_activation_bytes(
    config: TransformerConfig,
    sizes: Sizes = ONE,
    *,
    batch: int,
    sequence: int,
    bytes_per_element: int,
    recompute: RecomputeConfig = KEEP_ALL,
    window: int = 0,
    layer: int = 0,
    is_packed: bool = False,
) -> int:
    """Bytes that one layer saves of a microbatch for its backward, on one rank, its input included and its output not.

    With sequence parallelism and D = H/A, F = 4H, bf16, no dropout it is 32 batch * sequence * H / tp bytes and the
    statistics of norms and softmax (float32); each residual dropout adds a mask of one byte. Attention dropout
    materialises weights: 5 + bytes_per_element bytes for each pair of tokens and head. Under full recomputation it is
    what a recomputed layer saves, the first of its group; the others of the group save nothing.
    A `window` below the sequence saves keys and values for each query head, past two windows those of the block before
    besides a block's own; its mask is one for all layers and not counted.
    With `is_packed` sequences are documents, which differ between data-parallel ranks.
    Experts save 2 K batch * sequence (H + 3 F) / tp bytes more where they are gated, and the router 4 batch * sequence
    * H / tp: as if each expert got equally many tokens. The indices of their ways are counted, masks are not.
    Source: Korthikanti et al., arXiv 2205.05198, sections 4 and 5.
    """
    tp, sp = sizes.tp, sizes.tp if sizes.sequence_parallel else 1
    real = batch * sequence
    padded = -(-real // sp) * sp
    shard, statistics = padded // sp, 4 * max(bytes_per_element // 4, 1)
    heads, head_dim = config.num_attention_heads // tp, config.head_dim
    keys = max(config.num_query_groups // tp, 1)
    if recompute.granularity == "full":
        num_ranks = tp if recompute.shard_saved_inputs and sp == 1 else 1
        return -(-shard * config.hidden_size // num_ranks) * bytes_per_element
    recomputed = recompute.recomputed_parts
    has_experts = config.has_experts(layer)
    is_recomputed = ("moe" if has_experts else "mlp") in recomputed
    # Residual stream and norm output, before attention and before the MLP; or, where that is normed, their output.
    drops_norms = "norm" in recomputed and config.norm_placement != "output"
    num_saved = (2 if drops_norms else 4) + (2 if config.norm_placement == "sandwich" else 0)
    saved = num_saved * shard * config.hidden_size * bytes_per_element
    num_norms = (1 if drops_norms and is_recomputed else 2) + (2 if config.norm_placement == "sandwich" else 0)
    saved += num_norms * shard * statistics * (2 if config.normalization == "layernorm" else 1)
    materialises = config.attention_dropout > 0 and "core_attention" not in recomputed
    if config.qk_norm:
        # What the norms of queries and keys read, and of all heads at once what they scale.
        features = head_dim * (2 if config.qk_norm_across_heads else 1)
        saved += real * (heads + keys) * (features * bytes_per_element + statistics)
    is_windowed = 0 < window < sequence and config.attention_dropout == 0
    is_blocked = is_windowed and sequence > 2 * window
    if materialises or is_blocked or (is_windowed and keys > 1):
        # One key and value for each query head; those of a single group are one to a mask, too.
        keys = heads
    if config.latent is not None:
        head_dim = max(head_dim, config.latent.v_head_dim)
        saved += _latent_bytes(config.latent, shard, bytes_per_element, statistics)
        if head_dim > config.latent.v_head_dim:
            # Of what the kernel gives, the projection reads a part: a copy.
            saved += padded * heads * config.latent.v_head_dim * bytes_per_element
    # Queries, keys and values; what attention gives to the projection; the MLP around its activation.
    saved += real * (heads + 2 * keys) * head_dim * bytes_per_element
    if is_blocked:
        past = -(-sequence // window) * window - window
        # The blocks past the first, at full length: keys and values once more, and what attention gives.
        padding = past - (sequence - window)
        saved += batch * (2 * past + 3 * padding) * heads * head_dim * bytes_per_element
        saved += batch * (past + window) * heads * head_dim * bytes_per_element
    # Padding copies what attention gives, which the kernel saves too; weights that are materialised have no use for it.
    num_attended = padded if padded == real or config.attention_dropout > 0 else real + padded
    saved += num_attended * heads * head_dim * bytes_per_element
    num_inputs = 2 if config.is_gated else 1
    if config.moe is not None and has_experts:
        own, full = -(-padded // tp), sequence * sizes.cp
        sent = math.ceil(expert_rows(config.moe, sizes, own=own, batch=batch, sequence=full, is_packed=is_packed))
        rows = sent * sizes.etp
        # Where rows come from and go to, before they leave and, from other ranks, when they have come: as if blocks of
        # several experts came from several ranks.
        saved += 8 * (own * config.moe.router.top_k + 2 * sent + 2 * rows * (sizes.ep * sizes.etp > 1))
        if not is_recomputed:
            saved += _router_bytes(config, config.moe, sizes, padded, bytes_per_element)
            saved += _expert_bytes(config, config.moe, sizes, padded, rows, bytes_per_element)
            # The shared expert alone reads the norm's output, which is never recomputed where experts are not.
            reads_norm = config.moe.shared_expert_intermediate_size > 0
            saved += (reads_norm - ("norm" not in recomputed)) * shard * config.hidden_size * bytes_per_element
    elif not is_recomputed:
        # ReLU saves its output, as the linear after it does; others save their input.
        widths = 1 if config.activation == "relu" else num_inputs + (0 if "activation" in recomputed else 1)
        saved += padded * widths * (config.ffn_hidden_size // tp) * bytes_per_element
        if config.ffn_dropout > 0:
            saved += padded * (config.ffn_hidden_size // tp)
    if config.hidden_dropout > 0:
        saved += 2 * shard * config.hidden_size
    if materialises:
        saved += real * sequence * heads * (statistics + 1 + bytes_per_element)
    elif config.attention_dropout == 0:
        saved += real * heads * statistics
    return saved


def _latent_bytes(latent: LatentConfig, shard: int, bytes_per_element: int, statistics: int) -> int:
    """Bytes of latents that a layer saves of its part of the tokens: what their norms read and give."""
    features = 2 * latent.q_lora_rank + 2 * latent.kv_lora_rank + latent.qk_rope_head_dim
    return shard * (features * bytes_per_element + statistics * (1 + (latent.q_lora_rank > 0)))


def cross_attention_activation_bytes(
    config: TransformerConfig, sizes: Sizes = ONE, *, batch: int, sequence: int, memory: int, bytes_per_element: int
) -> int:
    """Bytes that a decoder layer saves for its attention to an encoder beyond `layer_activation_bytes`, on one rank.

    What the encoder gives is one tensor for all layers and not counted.
    """
    tp, sp = sizes.tp, sizes.tp if sizes.sequence_parallel else 1
    shard, statistics = -(-batch * sequence // sp), 4 * max(bytes_per_element // 4, 1)
    heads, keys = config.num_attention_heads // tp, max(config.num_query_groups // tp, 1)
    pairs = batch * sequence * memory * heads
    saved = 2 * shard * config.hidden_size * bytes_per_element
    saved += shard * statistics * (2 if config.normalization == "layernorm" else 1)
    # Queries and what attention gives; keys and values.
    saved += batch * (2 * sequence * heads + 2 * memory * keys) * config.head_dim * bytes_per_element
    if config.attention_dropout > 0:
        saved += pairs * (statistics + 1 + bytes_per_element)
    else:
        saved += batch * sequence * heads * statistics
    return saved + shard * config.hidden_size * (config.hidden_dropout > 0)


def expert_rows(
    moe: MoEConfig, sizes: Sizes, *, own: float, batch: float, sequence: int, is_packed: bool = False
) -> float:
    """Rows that a rank sends to experts for `own` tokens of its part of `batch` sequences of `sequence` tokens, which
    its ranks of tp and cp share: as if all experts were equally busy. Each expert's rows are then on all of its etp.

    A capacity drops what is above it, and one that pads fills up to it; `is_packed` says that data-parallel ranks may
    have sequences of different lengths, and then those that share experts do not pad.
    """
    top_k, num_experts = moe.router.top_k, moe.router.num_experts
    if moe.capacity is None:
        return own * top_k
    most, num_ranks = batch * moe.capacity.num_rows(sequence, top_k, num_experts), sizes.tp * sizes.cp
    if moe.capacity.pad_to_capacity and not (is_packed and num_ranks % (sizes.ep * sizes.etp)):
        # All tokens of a rank may be of one expert.
        return num_experts * min(most, math.ceil(own))
    return min(num_experts * most / num_ranks, own * top_k)


def _router_bytes(config: TransformerConfig, moe: MoEConfig, sizes: Sizes, padded: int, bytes_per_element: int) -> int:
    """Bytes that a router saves of its part of the tokens, in float32 or wider."""
    router, wide = moe.router, max(bytes_per_element, 4)
    num_experts, own = router.num_experts, -(-padded // sizes.tp)
    weighs_logits = router.score_function == "softmax" and router.norm_topk_prob
    # Logits, scores, and how busy the experts of each token's sequence are.
    num_scores = (
        (weighs_logits or router.z_loss > 0)
        + (not weighs_logits or bool(router.aux_losses))
        + any(loss.scope == "sequence" for loss in router.aux_losses)
    )
    saved = own * (config.hidden_size + num_experts * num_scores + router.top_k) * wide + 8 * own * router.top_k
    # In half precision its weight too, made wider.
    return saved + num_experts * config.hidden_size * wide * (bytes_per_element < wide)


def _expert_bytes(
    config: TransformerConfig, moe: MoEConfig, sizes: Sizes, padded: int, rows: int, bytes_per_element: int
) -> int:
    """Bytes that the experts of a rank save of their rows, and the shared expert of the tokens of its tp ranks."""
    tp, wide, hidden = sizes.tp, max(bytes_per_element, 4), config.hidden_size
    num_inputs = 2 if config.is_gated else 1
    width = _expert_width(config, moe) // sizes.etp
    # Rows, what the activation reads, for gated ones twice as much, and what it gives, for gated ones recomputed, times
    # the router probability.
    num_activated = 1 if config.is_gated or config.activation == "relu" else 2
    saved = rows * ((hidden + (num_inputs + num_activated) * width) * bytes_per_element + wide)
    saved += padded * (num_inputs + 1) * (moe.shared_expert_intermediate_size // tp) * bytes_per_element
    if moe.shared_expert_gate:
        shard = padded // tp if sizes.sequence_parallel else padded
        # What is gated, what the gate reads if that is made wider, and the gates.
        saved += shard * (hidden * (bytes_per_element + wide * (bytes_per_element < wide)) + wide)
    return saved
