"""Bytes of activations that a pipeline stage saves of a microbatch for backward, by the formulas of `transformer.cost`.

To those of layers come the ids and the dropout mask of an embedding, and the inputs of the final norm and of the head.
Under full recomputation a stage saves the inputs of groups of layers instead.
T tokens of a microbatch on this rank, H hidden.
"""

from dataclasses import replace
from functools import lru_cache

from lightning_megatron.models import BertConfig
from lightning_megatron.planner.layer_work import has_no_kernel
from lightning_megatron.planner.model_parts import Layer, ModelPart, Stage, sent_tokens
from lightning_megatron.planner.run import Run
from lightning_megatron.transformer import cost
from lightning_megatron.transformer.linears import DOWN, UP
from lightning_megatron.transformer.recompute import RecomputeConfig, RecomputePart, groups_of

NO_RECOMPUTE = RecomputeConfig()
# Dropout that is drawn in tiles saves a random key (int64) for each query and head.
_KEY_BYTES = 8


def stage_bytes(run: Run, stage: Stage) -> float:
    """Bytes that a stage saves of one microbatch for backward."""
    ends = sum(_end_bytes(run, part) for part in stage if part.layer is None)
    layers = 0.0
    for group, is_recomputed in layer_groups(run.recompute, stage):
        if is_recomputed:
            layers += layer_bytes(run, group[0], run.recompute)
        else:
            layers += sum(layer_bytes(run, part, within_layers(run.recompute)) for part in group)
    return ends + layers


def parts_after_layers(stage: Stage) -> Stage:
    """The parts after the last layer of a stage that has any: a backward frees them before it comes to the layers."""
    parts = list(stage.items())
    last = max((index for index, (part, _) in enumerate(parts) if part.layer is not None), default=len(parts))
    return dict(parts[last + 1 :])


def bytes_after_layers(run: Run, stage: Stage) -> float:
    """Bytes that `parts_after_layers` save, as `stage_bytes` counts them."""
    return sum(count * _end_bytes(run, part) for part, count in parts_after_layers(stage).items())


def logit_bytes(run: Run, stage: Stage) -> float:
    """Bytes of one microbatch's logits and of what the loss computes from them."""
    tokens = max((part.logit_tokens for part in stage), default=0)
    if not tokens:
        return 0.0
    columns = cost.vocabulary_parameters(run.model, run.sizes) // run.model.hidden_size
    return run.micro_batch_size * tokens / run.sizes.cp * columns * _bytes_per_logit(run)


def logit_share(run: Run, width: int) -> float:
    """Share of `logit_bytes` that a tensor of that many bytes a logit takes."""
    return width / _bytes_per_logit(run)


def _bytes_per_logit(run: Run) -> int:
    # In float32 the exponentials overwrite the logits.
    return run.framework.logit_bytes if run.is_half else 4


def layer_groups(recompute: RecomputeConfig, stage: Stage) -> list[tuple[list[ModelPart], bool]]:
    """Groups of a stage's layers, each with whether it is recomputed from its first input."""
    layers = [part for part, count in stage.items() if part.layer is not None for _ in range(count)]
    if recompute.granularity != "full":
        return [(layers, False)]
    ranges = groups_of(recompute, [part.is_layer for part in layers])
    return [([layers[index] for index in indices], is_recomputed) for indices, is_recomputed in ranges]


def within_layers(recompute: RecomputeConfig) -> RecomputeConfig:
    """The recomputation inside layers that are not recomputed in full."""
    return recompute if recompute.granularity == "selective" else NO_RECOMPUTE


def _end_bytes(run: Run, part: ModelPart) -> float:
    """Bytes that a part without a layer saves for backward."""
    hidden, width = run.model.hidden_size, run.bytes_per_element
    tokens = run.micro_batch_size * (run.lengths.decoder_sequence or run.lengths.sequence) / run.sizes.cp
    if part.embedded_tokens:
        # Ids, the dropout mask, and the input of a BERT's norm.
        tokens = run.micro_batch_size * part.embedded_tokens / run.sizes.cp
        is_normed = isinstance(run.model, BertConfig) and run.model.embedding_norm
        return tokens * (8 + hidden / run.sp * ((run.model.hidden_dropout > 0) + is_normed * norm_input_width(run)))
    if part.products:
        return sum(
            run.micro_batch_size * product.tokens * (product.inputs + product.outputs) * width
            for product in part.products
        )
    if part.component == "vision":
        # The rank holds the tower's last norm and does not run it.
        return 0.0
    is_norm = part.symbol != "L" and part.replicated == cost.norm_parameters(run.model)
    # Sequence parallelism saves a shard of the head's input and regathers it.
    return tokens * hidden * (norm_input_width(run) if is_norm else width) / run.sp


def feed_forward_bytes(run: Run, part: ModelPart) -> float:
    """Bytes that a layer's feed-forward network saves, which a backward frees before it comes to attention."""
    assert part.layer is not None
    recompute_part: RecomputePart = "moe" if part.layer.has_experts else "mlp"
    others = tuple(name for name in run.recompute.recomputed_parts if name not in ("activation", "mlp", "moe"))
    without = RecomputeConfig(granularity="selective", parts=(*others, recompute_part))
    saved = layer_bytes(run, part, within_layers(run.recompute)) - layer_bytes(run, part, without)
    return saved - (0.0 if part.is_trained or part.layer.has_experts else _unsaved_features(run, part))


def _unsaved_features(run: Run, part: ModelPart) -> float:
    """Bytes of inputs that the linears of a frozen feed-forward network do not save, as they have no LoRA adapter."""
    layer, names = part.layer, {adapter.name for adapter in part.adapters}
    assert layer is not None
    recomputed, config = run.recompute.recomputed_parts, layer.config
    tokens = run.tokens_of(layer)
    unsaved = 0.0
    if not {"norm", "mlp"} & set(recomputed) and UP not in names:
        unsaved += tokens / run.sp * config.hidden_size
    if not {"activation", "mlp"} & set(recomputed) and config.activation != "relu" and DOWN not in names:
        unsaved += tokens * config.ffn_hidden_size / run.sizes.tp
    return unsaved * run.bytes_per_element


def attention_bytes(run: Run, part: ModelPart) -> tuple[float, float]:
    """Bytes that a layer's attention saves between its linears: self-attention's, and cross-attention's."""
    layer = part.layer
    assert layer is not None
    recomputed: tuple[RecomputePart, ...] = ("norm", "moe" if layer.has_experts else "mlp")
    if "core_attention" in run.recompute.recomputed_parts:
        recomputed = ("core_attention", *recomputed)
    attention_alone, plain = RecomputeConfig(granularity="selective", parts=recomputed), replace(run, fp8=None)
    # A decoder's self-attention runs document by document.
    alone = replace(part, layer=replace(layer, memory=0, has_bounds=layer.has_bounds or layer.memory > 0))
    own, both = (layer_bytes(plain, one, attention_alone) for one in (alone, part))
    config = layer.config
    tokens = round(run.tokens_of(layer))
    shard = tokens / run.sp
    norm = 2 * shard * config.hidden_size * run.bytes_per_element
    norm += shard * 4 * (2 if config.normalization == "layernorm" else 1)
    mask = shard * config.hidden_size * (config.hidden_dropout > 0)
    wider, wider_with_memory = (_wider_norms(run, one, tokens, attention_alone) for one in (alone, part))
    others = norm + 2 * mask + wider
    return own - others, both - own - (norm + mask + wider_with_memory - wider) * (layer.memory > 0)


def is_shared(run: Run, layer: Layer) -> bool:
    """Whether attention runs by documents or over cp, so that its output is saved by head and by token."""
    return layer.is_by_document(run.sizes) or bool(layer.memory)


def materialises_scores(run: Run, layer: Layer) -> bool:
    """Whether attention without dropout materialises a weight for each pair of tokens."""
    return layer.config.attention_dropout == 0 and has_no_kernel(layer, run.sizes, run.bytes_per_element)


def stream_width(run: Run, part: ModelPart) -> int:
    """Bytes of each element between layers: under mixed precision frozen embeddings, and with them the residual stream
    of their component, stay in float32."""
    return 4 if run.is_mixed and part.component in run.model_parts.wide_components else run.bytes_per_element


def pair_bytes(run: Run) -> int:
    """Bytes saved for each pair of tokens and head where attention materialises its weights; the dropped weights are as
    wide as activations."""
    return run.framework.pair_bytes + (run.bytes_per_element - 2) * run.framework.counts_work


def norm_input_width(run: Run) -> int:
    """Bytes of each element of the input that a norm saves."""
    return 4 if run.framework.widens_norms and run.is_mixed else run.bytes_per_element


@lru_cache(maxsize=4096)
def layer_bytes(run: Run, part: ModelPart, recompute: RecomputeConfig) -> float:
    """Bytes that a layer saves of one microbatch for backward under a recomputation."""
    layer, sizes, width, framework = part.layer, run.sizes, run.bytes_per_element, run.framework
    assert layer is not None
    config, tp, streams = layer.config, sizes.tp, layer.streams(run.micro_batch_size)
    sequence = -(-layer.sequence // (sizes.cp if layer.is_cut_by_context else 1))
    if streams == 0:
        return 0.0
    num_attentions = 2 if layer.memory else 1
    query_tokens = streams * sequence * config.num_attention_heads / tp
    drops_in_tiles = framework.counts_work and config.attention_dropout > 0 and is_shared(run, layer)
    if drops_in_tiles:
        config = replace(config, attention_dropout=0.0)
    saved = float(
        cost.layer_activation_bytes(
            config,
            sizes,
            batch=streams,
            sequence=sequence,
            bytes_per_element=width,
            recompute=recompute,
            window=layer.window,
            layer=layer.index,
            is_packed=layer.has_bounds,
        )
    )
    if recompute.granularity == "full":
        return saved * stream_width(run, part) / width
    saved += _wider_norms(run, part, streams * sequence, recompute)
    if config.activation == "relu" and not layer.has_experts:
        # A squared ReLU saves its input; one that is recomputed saves its input for that, and its output as ever.
        parts = recompute.recomputed_parts
        is_twice = framework.counts_work and "activation" in parts and "mlp" not in parts
        saved += (framework.squares_relu + is_twice) * streams * sequence * config.ffn_hidden_size / tp * width
    # Where a float32 ring adds up the output, the projections read that sum itself.
    is_added_up = width == 4 and layer.is_cut_by_context and sizes.cp > sizes.cp_ulysses
    is_copied = framework.counts_work and is_shared(run, layer) and not is_added_up
    if is_copied:
        saved += num_attentions * query_tokens * config.head_dim * width
    if drops_in_tiles:
        saved += num_attentions * query_tokens * _KEY_BYTES
    if framework.counts_work and materialises_scores(run, layer):
        # Weights instead of their sums, and a key and a value repeated for each query head.
        groups = max(config.num_query_groups // tp, 1)
        repeated = 2 * streams * sequence * (config.num_attention_heads // tp - groups) * config.head_dim
        saved += query_tokens * (layer.sequence - 1) * width + repeated * width
    if config.attention_dropout > 0 and "core_attention" not in recompute.recomputed_parts:
        # The formula is that of this package's attention, with as many queries as keys.
        pairs = streams * sequence * layer.sequence * config.num_attention_heads / tp
        saved += pairs * pair_bytes(run) - streams * sequence**2 * config.num_attention_heads // tp * (5 + width)
    if layer.memory:
        saved += cost.cross_attention_activation_bytes(
            config, sizes, batch=streams, sequence=sequence, memory=layer.memory // sizes.cp, bytes_per_element=width
        )
        if config.attention_dropout > 0:
            pairs = streams * sequence * layer.memory / sizes.cp * config.num_attention_heads / tp
            saved += pairs * (pair_bytes(run) - 5 - width)
    return saved - (_fp8_saving(run, layer, recompute, is_copied) if run.saves_float8 else 0.0)


def _wider_norms(run: Run, part: ModelPart, tokens: int, recompute: RecomputeConfig) -> float:
    """Bytes beyond the formula where norms save their input wider than activations are."""
    layer, width, norm_width = part.layer, run.bytes_per_element, norm_input_width(run)
    assert layer is not None
    if norm_width == width:
        return 0.0
    config, recomputed = layer.config, recompute.recomputed_parts
    shard = tokens / run.sp
    num_norms = 3 if layer.memory else 2
    is_wide = stream_width(run, part) == norm_width
    if is_wide:
        # A norm saves the very tensor that it reads.
        each = norm_width - width
    else:
        # Else the input is saved twice where the norm's output is recomputed from it.
        each = norm_width - (0 if "norm" in recomputed else width)
        if "norm" in recomputed and {"mlp", "moe"} & set(recomputed):
            # This norm lies inside a recomputed part.
            num_norms -= 1
    more: float = num_norms * shard * config.hidden_size * each
    if not is_wide and layer.has_experts and "norm" in recomputed and "moe" not in recomputed:
        # The norm before the experts is not recomputed.
        more -= shard * config.hidden_size * width
    if config.qk_norm:
        heads = config.num_attention_heads + config.num_query_groups
        more += tokens * heads / run.sizes.tp * config.head_dim * (norm_width - width)
    return more


def _fp8_saving(run: Run, layer: Layer, recompute: RecomputeConfig, is_copied: bool) -> float:
    """Bytes that FP8 spares: inputs of linears take one byte an element; attention's output is saved a second time,
    unless the projection reads a copy of it."""
    config, sizes, width = layer.config, run.sizes, run.bytes_per_element
    recomputed, tp = recompute.recomputed_parts, sizes.tp
    streams = layer.streams(run.micro_batch_size)
    tokens = streams * -(-layer.sequence // (sizes.cp if layer.is_cut_by_context else 1))
    num_norms = 0 if "norm" in recomputed else 1 + (not layer.has_experts)
    spared = tokens / run.sp * config.hidden_size * (width - 1) * num_norms
    spared += tokens * config.num_attention_heads * config.head_dim / tp * (is_copied * width - 1)
    if not layer.has_experts and not {"activation", "mlp"} & set(recomputed):
        # ReLU saves its own output in the activations' precision.
        spared += tokens * config.ffn_hidden_size / tp * (width * (config.activation != "relu") - 1)
    if config.moe is not None and layer.has_experts and "moe" not in recomputed:
        sent = sent_tokens(layer, sizes, run.micro_batch_size) * sizes.etp
        features = (config.moe.ffn_hidden_size or config.ffn_hidden_size) / sizes.etp
        spared += sent * (config.hidden_size + features) * (width - 1)
        spared += tokens * config.moe.shared_expert_intermediate_size / tp * (width - 1)
    return spared
