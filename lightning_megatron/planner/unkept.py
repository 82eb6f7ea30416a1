"""What a layer with frozen weights keeps for its backward, against one whose weights are trained.

The gradient of a weight alone needs what goes into its product. Beside a low-rank path that is kept for the path, or
in its place what dropout leaves of it and a mask of one byte; and the path's own numbers between its matrices.

T tokens of a microbatch on this rank, H hidden, F feed-forward, R rank.
"""

from lightning_megatron.mesh import Sizes
from lightning_megatron.planner.activations import is_shared, lays_scores_out
from lightning_megatron.planner.anatomy import Layer, Piece, Stage
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.working_set import inner_sizes

_FP8 = {"attention.qkv", "mlp.up", "mlp.down", "experts", "shared.up", "shared.down"} | {
    f"cross_attention.{name}" for name in ("query", "projection")
}
# what multiplies in FP8, where anything does


def unkept_bytes(run: Run, stage: Stage) -> float:
    """Bytes of a microbatch that a stage keeps less than if all its layers were trained; below 0 it keeps more."""
    if run.recompute.granularity == "full":
        return 0.0
    return sum(count * unkept_of(run, piece) for piece, count in stage.items()) + _unread_bytes(run, stage)


def _unread_bytes(run: Run, stage: Stage) -> float:
    """What norms right behind frozen embeddings do not keep: nobody needs the gradient of what they read."""
    lora = run.trained.lora
    again = run.recompute.parts if run.recompute.granularity == "selective" else ()
    if lora is None or ("norm" in again and "attention.qkv" in lora.targets):
        return 0.0
    sizes, streams = run.sizes, run.micro_batch_size * run.model.hidden_size
    sp = sizes.tp if sizes.sequence_parallel else 1
    tokens = sum(piece.embedded_tokens for piece in stage)
    return streams * tokens / sizes.cp / sp * (4 if run.is_mixed else run.bytes_per_element)


def unkept_of(run: Run, piece: Piece) -> float:
    """The same of a layer where nothing is recomputed whole; 0 of what is none."""
    layer = piece.layer
    if layer is None or piece.is_trained or not piece.passes_gradient:
        return 0.0
    sizes, config, width = run.sizes, layer.config, run.bytes_per_element
    sp = sizes.tp if sizes.sequence_parallel else 1
    tokens = run.micro_batch_size * layer.repeats * layer.sequence / (sizes.cp if layer.is_cut_by_context else 1)
    stream = tokens / sp * config.hidden_size * width
    attended = tokens * config.num_attention_heads * config.head_dim / sizes.tp * width
    again = run.recompute.parts if run.recompute.granularity == "selective" else ()
    normed = 0.0 if "norm" in again else stream
    inputs = {
        "attention.qkv": normed,
        "attention.projection": 0.0 if _is_kept_by_kernel(layer, sizes, width) else attended,
    }
    if layer.memory:
        # What goes into its keys and values is one tensor for all layers.
        inputs |= {"cross_attention.query": normed, "cross_attention.projection": attended}
    if layer.has_experts:
        inputs |= _expert_inputs(run, layer, tokens, stream, again)
    else:
        # ReLU keeps what it gives, and the linear behind it the same.
        is_down_kept = config.activation == "relu" or {"mlp", "activation"} & set(again)
        features = tokens * config.ffn_hidden_size / sizes.tp * width
        inputs |= {"mlp.up": 0.0 if "mlp" in again else normed, "mlp.down": 0.0 if is_down_kept else features}
    beside = sum(inputs.get(path.name, 0.0) for path in piece.paths)
    if run.fp8 is not None:
        inputs |= {name: size / width for name, size in inputs.items() if name in _FP8}
        # Linears keep their own casts of what kernels keep.
        inputs["attention.projection"] = attended / width
    return sum(inputs.values()) - beside - _kept_by_paths(run, piece, tokens)


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
        "shared.up": stream if moe.shared_ffn_hidden_size else 0.0,
        "shared.down": tokens * moe.shared_ffn_hidden_size / tp * width,
        "shared.gate": stream * wide if moe.has_shared_gate and wide > 1 else 0.0,
    }


def _kept_by_paths(run: Run, piece: Piece, tokens: float) -> float:
    tp = run.sizes.tp
    sp = tp if run.sizes.sequence_parallel else 1
    kept = 0.0
    for path in piece.paths:
        inputs = path.inputs / sp if path.cuts_outputs else path.inputs / tp
        own = tokens
        if path.name == "cross_attention.key_value":
            assert piece.layer is not None
            own = run.micro_batch_size * piece.layer.memory / run.sizes.cp
            # Each layer's path casts what the encoder gave by itself.
            kept += own * inputs * 2 * run.is_mixed
        kept += own * (path.rank * run.bytes_per_element + path.has_dropout * inputs)
    return kept
