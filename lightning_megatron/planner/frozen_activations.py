"""What a layer with frozen weights keeps for its backward, against one whose weights are trained.

The gradient of a weight alone needs what goes into its product. Beside a low-rank path that is kept for the path, or
in its place what dropout leaves of it and a mask of one byte; and the path's own numbers between its matrices.

T tokens of a microbatch on this rank, H hidden, F feed-forward, R rank.
"""

from lightning_megatron.mesh import Sizes
from lightning_megatron.models import BertConfig
from lightning_megatron.planner.activations import attention_bytes, is_shared, lays_scores_out
from lightning_megatron.planner.model_parts import Layer, LoraAdapter, ModelPart, Stage
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.transient_memory import inner_sizes
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

# What multiplies in FP8, where anything does.
_FP8: set[str] = {QKV, UP, DOWN, "experts", SHARED_UP, SHARED_DOWN, CROSS_QUERY, CROSS_PROJECTION}


def frozen_activation_bytes(run: Run, stage: Stage) -> float:
    """Bytes of a microbatch that a stage keeps less than if all its layers were trained; below 0 it keeps more."""
    if run.recompute.granularity == "full":
        return 0.0
    return sum(
        count * (frozen_activations_of(run, part) + _unreached_bytes(run, part)) for part, count in stage.items()
    )


def _unreached_bytes(run: Run, part: ModelPart) -> float:
    """What a layer does not keep before its first path, where nobody needs the gradient of what it reads."""
    layer = part.layer
    if layer is None or part.needs_input or not part.adapters:
        return 0.0
    again = run.recompute.recomputed_parts
    names = {path.name for path in part.adapters}
    config, sizes, width = layer.config, run.sizes, run.bytes_per_element
    sp = sizes.tp if sizes.sequence_parallel else 1
    tokens = run.micro_batch_size * layer.tokens_on(sizes)
    shard = tokens / sp * config.hidden_size
    is_post = isinstance(config, BertConfig) and config.norm_placement == "post"
    norm = shard * (4 if run.is_mixed else width)
    between = norm + shard * (config.hidden_dropout > 0)
    first = 0.0 if is_post or ("norm" in again and QKV in names) else norm
    attended = tokens * config.num_attention_heads * config.head_dim / sizes.tp * width
    own, cross = attention_bytes(run, part)
    # What goes into projections is told of by `unkept_of`, or kept by a path.
    is_beside = any(path.name == PROJECTION and not path.has_dropout for path in part.adapters)
    is_told = is_beside or not _is_kept_by_kernel(layer, sizes, width)
    steps = [({QKV}, first), ({PROJECTION}, own - attended * is_told)]
    if layer.memory:
        steps += [
            ({CROSS_QUERY, CROSS_KEY_VALUE}, between),
            ({CROSS_PROJECTION}, cross - attended),
        ]
    steps.append(({UP, SHARED_UP}, between))
    if not layer.has_experts and config.activation != "relu" and "mlp" not in again:
        gates = 2 if config.is_gated else 1
        steps.append(({DOWN}, tokens * gates * config.ffn_hidden_size / sizes.tp * width))
    unreached = 0.0
    for linears, size in steps:
        if part.needs_memory and CROSS_PROJECTION in linears:
            break
        unreached += size
        if linears & names:
            break
    return unreached


def frozen_activations_of(run: Run, part: ModelPart) -> float:
    """The same of a layer where nothing is recomputed whole; 0 of what is none."""
    layer = part.layer
    if layer is None or part.is_trained or not part.passes_gradient:
        return 0.0
    sizes, config, width = run.sizes, layer.config, run.bytes_per_element
    sp = sizes.tp if sizes.sequence_parallel else 1
    tokens = run.micro_batch_size * layer.tokens_on(sizes)
    stream = tokens / sp * config.hidden_size * width
    attended = tokens * config.num_attention_heads * config.head_dim / sizes.tp * width
    again = run.recompute.recomputed_parts
    normed = 0.0 if "norm" in again else stream
    inputs: dict[str, float] = {
        QKV: normed,
        PROJECTION: 0.0 if _is_kept_by_kernel(layer, sizes, width) else attended,
    }
    if layer.memory:
        # What goes into its keys and values is one tensor for all layers.
        inputs |= {CROSS_QUERY: normed, CROSS_PROJECTION: attended}
    if layer.has_experts:
        inputs |= _expert_inputs(run, layer, tokens, stream, again)
    else:
        # ReLU keeps what it gives, and the linear behind it the same.
        is_down_kept = config.activation == "relu" or {"mlp", "activation"} & set(again)
        features = tokens * config.ffn_hidden_size / sizes.tp * width
        inputs |= {UP: 0.0 if "mlp" in again else normed, DOWN: 0.0 if is_down_kept else features}
    beside = sum(_kept_beside(run, part, path, tokens, inputs.get(path.name)) for path in part.adapters)
    if run.fp8 is not None:
        inputs |= {name: size / width for name, size in inputs.items() if name in _FP8}
        # Linears keep their own casts of what kernels keep.
        inputs[PROJECTION] = attended / width
    return sum(inputs.values()) - beside - _kept_by_adapters(run, part)


def _kept_beside(run: Run, part: ModelPart, path: LoraAdapter, tokens: float, size: float | None) -> float:
    """What goes into a path beside a linear of a piece that keeps `size` for it: what dropout leaves is the path's own,
    whatever else keeps the linear's."""
    assert part.layer is not None
    again = run.recompute.recomputed_parts
    is_remade = path.name.startswith(("mlp.", "shared.")) and ("moe" if part.layer.has_experts else "mlp") in again
    if size is None or not path.has_dropout or is_remade:
        return size or 0.0
    return tokens * _adapter_inputs(run, path) * run.bytes_per_element


def _adapter_inputs(run: Run, path: LoraAdapter) -> float:
    """Features of what goes into a path, for each token of the microbatch on this rank."""
    tp = run.sizes.tp
    return path.inputs / ((tp if run.sizes.sequence_parallel else 1) if path.cuts_outputs else tp)


def _is_kept_by_kernel(layer: Layer, sizes: Sizes, width: int) -> bool:
    """Whether attention keeps for itself what it gives, as the projection reads it."""
    is_laid_out = layer.config.attention_dropout > 0 or lays_scores_out(layer, sizes, width)
    return not is_laid_out and not is_shared(layer, sizes)


def _expert_inputs(run: Run, layer: Layer, tokens: float, stream: float, again: tuple[str, ...]) -> dict[str, float]:
    """What goes into the products of a layer of experts, and is kept for the gradients of their weights alone."""
    moe, tp, width = layer.config.moe, run.sizes.tp, run.bytes_per_element
    assert moe is not None
    # Routers and gates read it wider.
    wide = max(width, 4) / width
    if "moe" in again:
        # Behind frozen embeddings, which are in float32, what is kept instead is so too.
        return {"layer": stream * (1 - wide) if run.is_mixed and "norm" not in again else 0.0}
    rows, features, _ = inner_sizes(run, layer, tokens)
    return {
        "router": tokens / tp * layer.config.hidden_size * width * wide,
        "experts": rows * (layer.config.hidden_size + features) * width,
        SHARED_UP: stream if moe.shared_expert_intermediate_size else 0.0,
        SHARED_DOWN: tokens * moe.shared_expert_intermediate_size / tp * width,
        "shared.gate": stream * wide if moe.shared_expert_gate and wide > 1 else 0.0,
    }


def _kept_by_adapters(run: Run, part: ModelPart) -> float:
    assert part.layer is not None
    kept = 0.0
    for path in part.adapters:
        inputs = _adapter_inputs(run, path)
        own = run.micro_batch_size * path.tokens_on(part.layer, run.sizes)
        if path.reads_memory:
            # Each layer's path casts what the encoder gave by itself, or drops of it.
            kept += own * inputs * run.bytes_per_element * (run.is_mixed or path.has_dropout)
        kept += own * (path.rank * run.bytes_per_element + path.has_dropout * inputs)
    return kept
