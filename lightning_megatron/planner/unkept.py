"""What a layer with frozen weights keeps for its backward, against one whose weights are trained.

The gradient of a weight alone needs what goes into its product. Beside a low-rank path that is kept for the path, or
in its place what dropout leaves of it and a mask of one byte; and the path's own numbers between its matrices.

T tokens of a microbatch on this rank, H hidden, F feed-forward, R rank.
"""

from lightning_megatron.planner.anatomy import Layer, Piece, Stage
from lightning_megatron.planner.run import Run


def unkept_bytes(run: Run, stage: Stage) -> float:
    """Bytes of a microbatch that a stage keeps less than if all its layers were trained; below 0 where it keeps more.

    Counted are dense layers in 16 bits and wider; layers of experts and FP8 count as if they were trained.
    """
    if run.recompute.granularity == "full" or run.fp8 is not None:
        return 0.0
    return sum(count * _unkept(run, piece, piece.layer) for piece, count in stage.items() if piece.layer is not None)


def _unkept(run: Run, piece: Piece, layer: Layer) -> float:
    if piece.is_trained or not piece.passes_gradient or layer.has_experts:
        return 0.0
    sizes, config, width = run.sizes, layer.config, run.bytes_per_element
    sp = sizes.tp if sizes.sequence_parallel else 1
    tokens = run.micro_batch_size * layer.repeats * layer.sequence / (sizes.cp if layer.is_cut_by_context else 1)
    stream, features = tokens / sp * config.hidden_size * width, tokens * config.ffn_hidden_size / sizes.tp * width
    again = run.recompute.parts if run.recompute.granularity == "selective" else ()
    normed = 0.0 if "norm" in again else stream
    inputs = {
        "attention.qkv": normed,
        "mlp.up": 0.0 if "mlp" in again else normed,
        "mlp.down": 0.0 if {"mlp", "activation"} & set(again) else features,
    }
    beside = {path.name for path in piece.paths}
    return sum(size for name, size in inputs.items() if name not in beside) - _kept_by_paths(run, piece, tokens)


def _kept_by_paths(run: Run, piece: Piece, tokens: float) -> float:
    tp = run.sizes.tp
    sp = tp if run.sizes.sequence_parallel else 1
    kept = 0.0
    for path in piece.paths:
        inputs = path.inputs / sp if path.cuts_outputs else path.inputs / tp
        kept += tokens * (path.rank * run.bytes_per_element + path.has_dropout * inputs)
    return kept
