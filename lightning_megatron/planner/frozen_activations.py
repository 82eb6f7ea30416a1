"""Activations that a layer with frozen weights does not save for backward, and what full recomputation leaves of them.

Only the gradient of a weight needs the input of its linear. A LoRA adapter saves that input for itself, or under
dropout what dropout leaves of it and a mask of one byte an element; and the activation between its two matrices.

T tokens of a microbatch on this rank, H hidden, F feed-forward, R rank.
"""

from lightning_megatron.models import BertConfig
from lightning_megatron.planner.activations import (
    NO_RECOMPUTE,
    attention_bytes,
    is_shared,
    layer_bytes,
    layer_groups,
    materialises_scores,
    within_layers,
)
from lightning_megatron.planner.model_parts import Layer, LoraAdapter, ModelPart, Stage
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.transient_memory import inner_sizes
from lightning_megatron.transformer import linears

# Linears whose products are in FP8, where any are.
_FP8: set[str] = {"experts", *linears.LINEAR_NAMES} - {linears.PROJECTION, linears.CROSS_KEY_VALUE}


def frozen_activation_bytes(run: Run, stage: Stage) -> float:
    """Bytes of a microbatch that a stage saves less than if all its layers were trained; negative: it saves more."""
    if run.recompute.granularity == "full":
        return 0.0
    return sum(count * (_frozen_bytes(run, part) + _unreached_bytes(run, part)) for part, count in stage.items())


def recompute_groups(run: Run, stage: Stage) -> list[tuple[float, list[float]]]:
    """Bytes that a backward first recomputes of each group of a stage's layers, and those that each of its layers holds
    from then on."""
    found = []
    for group, is_recomputed in layer_groups(run.recompute, stage):
        inside = NO_RECOMPUTE if is_recomputed else within_layers(run.recompute)
        each = [layer_bytes(run, part, inside) - _frozen_bytes(run, part) for part in group]
        found.append((sum(each) - layer_bytes(run, group[0], run.recompute) if is_recomputed else 0.0, each))
    return found


def recompute_bytes(run: Run, stage: Stage) -> float:
    """The most that a backward holds of recomputed activations, beyond those that it has freed of the layers after."""
    most = freed = 0.0
    for recomputed, each in reversed(recompute_groups(run, stage)):
        most = max(most, recomputed - freed)
        freed += sum(each) - recomputed
    return most


def _unreached_bytes(run: Run, part: ModelPart) -> float:
    """Bytes that a layer does not save before its first adapter, where nothing needs the gradient of its input."""
    layer = part.layer
    if layer is None or part.needs_input or not part.adapters:
        return 0.0
    recomputed = run.recompute.recomputed_parts
    names = {adapter.name for adapter in part.adapters}
    config, width = layer.config, run.bytes_per_element
    tokens = run.tokens_of(layer)
    shard = tokens / run.sp * config.hidden_size
    is_post = isinstance(config, BertConfig) and config.norm_placement == "post"
    norm = shard * (4 if run.is_mixed else width)
    between = norm + shard * (config.hidden_dropout > 0)
    first = 0.0 if is_post or ("norm" in recomputed and linears.QKV in names) else norm
    attended = tokens * config.num_attention_heads * config.head_dim / run.sizes.tp * width
    own, cross = attention_bytes(run, part)
    # `_frozen_bytes` already counts the input of the projections, or an adapter saves it.
    has_adapter = any(adapter.name == linears.PROJECTION and not adapter.has_dropout for adapter in part.adapters)
    is_counted = has_adapter or not _is_saved_by_kernel(run, layer)
    steps = [({linears.QKV}, first), ({linears.PROJECTION}, own - attended * is_counted)]
    if layer.memory:
        steps.append(({linears.CROSS_QUERY, linears.CROSS_KEY_VALUE}, between))
        steps.append(({linears.CROSS_PROJECTION}, cross - attended))
    steps.append(({linears.UP, linears.SHARED_UP}, between))
    if not layer.has_experts and config.activation != "relu" and "mlp" not in recomputed:
        gates = 2 if config.is_gated else 1
        steps.append(({linears.DOWN}, tokens * gates * config.ffn_hidden_size / run.sizes.tp * width))
    unreached = 0.0
    for step, size in steps:
        if part.needs_memory and linears.CROSS_PROJECTION in step:
            break
        unreached += size
        if step & names:
            break
    return unreached


def _frozen_bytes(run: Run, part: ModelPart) -> float:
    """Bytes that a frozen layer saves less than a trained one, where it is not recomputed in full; 0 of other parts."""
    layer = part.layer
    if layer is None or part.is_trained or not part.passes_gradient:
        return 0.0
    config, width = layer.config, run.bytes_per_element
    tokens = run.tokens_of(layer)
    stream = tokens / run.sp * config.hidden_size * width
    attended = tokens * config.num_attention_heads * config.head_dim / run.sizes.tp * width
    recomputed = run.recompute.recomputed_parts
    normed = 0.0 if "norm" in recomputed else stream
    inputs: dict[str, float] = {
        linears.QKV: normed,
        linears.PROJECTION: 0.0 if _is_saved_by_kernel(run, layer) else attended,
    }
    if layer.memory:
        # All layers read keys and values from one tensor.
        inputs |= {linears.CROSS_QUERY: normed, linears.CROSS_PROJECTION: attended}
    if layer.has_experts:
        inputs |= _expert_inputs(run, layer, tokens, stream, recomputed)
    else:
        # ReLU saves its output, which the next linear reads.
        is_down_saved = config.activation == "relu" or {"mlp", "activation"} & set(recomputed)
        features = tokens * config.ffn_hidden_size / run.sizes.tp * width
        inputs[linears.UP] = 0.0 if "mlp" in recomputed else normed
        inputs[linears.DOWN] = 0.0 if is_down_saved else features
    of_adapters = sum(
        _adapter_input_bytes(run, layer, adapter, tokens, inputs.get(adapter.name)) for adapter in part.adapters
    )
    if run.saves_float8:
        inputs |= {name: size / width for name, size in inputs.items() if name in _FP8}
        # Linears save their own casts of tensors that kernels save.
        inputs[linears.PROJECTION] = attended / width
    return sum(inputs.values()) - of_adapters - _adapter_bytes(run, part, layer)


def _adapter_input_bytes(run: Run, layer: Layer, adapter: LoraAdapter, tokens: float, size: float | None) -> float:
    """Bytes of the input that an adapter saves, of which its linear saves `size`; dropout makes it another tensor."""
    is_remade = adapter.name.startswith(("mlp.", "shared.")) and run.recomputes_feed_forward(layer)
    if size is None or not adapter.has_dropout or is_remade:
        return size or 0.0
    return tokens * adapter.features_on(run.sizes.tp, run.sp)[0] * run.bytes_per_element


def _is_saved_by_kernel(run: Run, layer: Layer) -> bool:
    """Whether the attention kernel itself saves the output that the projection reads."""
    is_materialised = layer.config.attention_dropout > 0 or materialises_scores(run, layer)
    return not is_materialised and not is_shared(run, layer)


def _expert_inputs(
    run: Run, layer: Layer, tokens: float, stream: float, recomputed: tuple[str, ...]
) -> dict[str, float]:
    """Bytes of the inputs of an expert layer's linears that only the gradients of their weights need."""
    moe, tp, width = layer.config.moe, run.sizes.tp, run.bytes_per_element
    assert moe is not None
    # Routers and gates read a wider input.
    wide = max(width, 4) / width
    if "moe" in recomputed:
        # After frozen embeddings in float32 the input saved instead is in float32 too.
        return {"layer": stream * (1 - wide) if run.is_mixed and "norm" not in recomputed else 0.0}
    sent, features, _ = inner_sizes(run, layer, tokens)
    return {
        "router": tokens / tp * layer.config.hidden_size * width * wide,
        "experts": sent * (layer.config.hidden_size + features) * width,
        linears.SHARED_UP: stream if moe.shared_expert_intermediate_size else 0.0,
        linears.SHARED_DOWN: tokens * moe.shared_expert_intermediate_size / tp * width,
        "shared.gate": stream * wide if moe.shared_expert_gate and wide > 1 else 0.0,
    }


def _adapter_bytes(run: Run, part: ModelPart, layer: Layer) -> float:
    """Bytes that a layer's adapters save: the activations between their matrices, masks, and casts."""
    saved = 0.0
    for adapter in part.adapters:
        inputs, _ = adapter.features_on(run.sizes.tp, run.sp)
        own = run.micro_batch_size * adapter.tokens_on(layer, run.sizes)
        if adapter.reads_memory:
            # The adapter of each layer casts the encoder's output for itself, or drops elements of it.
            saved += own * inputs * run.bytes_per_element * (run.is_mixed or adapter.has_dropout)
        saved += own * (adapter.rank * run.bytes_per_element + adapter.has_dropout * inputs)
    return saved
