"""Whose gradient a backward makes: pieces of stages in order, each told whether anybody needs that of what it reads.

A gradient is needed behind the first weight that is trained, and by every stage that gets its input by a message: it is
sent back whoever needs it. A decoder's stream is one of its own, beside what its encoder gave.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from lightning_megatron.mesh import StageLayout
from lightning_megatron.models import T5Config
from lightning_megatron.planner.anatomy import Anatomy, Piece, Stage, ordered_stages
from lightning_megatron.transformer.recompute import RecomputeConfig, groups_of


@lru_cache(maxsize=4096)
def needed_stages(anatomy: Anatomy, num_stages: int, layout: StageLayout) -> tuple[tuple[Piece, ...], ...]:
    """Of each stage its pieces in order, with what is needed of them there."""
    is_t5 = isinstance(anatomy.config, T5Config)
    stream = memory = False
    found = []
    for number, stage in enumerate(ordered_stages(anatomy, num_stages, layout)):
        stream, memory = stream or number > 0, memory or number > 0
        own = []
        for piece in stage:
            if piece.embedded_tokens and is_t5:
                stream, memory = False, stream
            told = _told(piece, stream, memory)
            own.append(told)
            layer = piece.layer
            if layer is None or layer.repeats:
                reads_memory = layer is not None and layer.memory > 0 and memory
                stream |= piece.is_trained or bool(piece.paths) or reads_memory
        found.append(tuple(own))
    return tuple(found)


@lru_cache(maxsize=4096)
def stages_of(anatomy: Anatomy, num_stages: int, layout: StageLayout) -> tuple[Stage, ...]:
    """Of each stage its pieces and how many there are of each; equal stages are one object."""
    stages = needed_stages(anatomy, num_stages, layout)
    numbers = {piece: number for number, piece in enumerate(dict.fromkeys(piece for own in stages for piece in own))}
    made: dict[tuple[int, ...], Stage] = {}
    keys = [tuple(numbers[piece] for piece in own) for own in stages]
    for key, own in zip(keys, stages, strict=True):
        made.setdefault(key, Counter(own))
    return tuple(made[key] for key in keys)


def run_again(stage: Sequence[Piece], recompute: RecomputeConfig) -> Counter[Piece]:
    """Of the pieces of a stage in order the layers that full recomputation runs again, and how many of each."""
    groups = groups_of(recompute, [piece.is_layer for piece in stage])
    return Counter(stage[place] for places, is_again in groups if is_again for place in places)


@lru_cache(maxsize=4096)
def again_of(anatomy: Anatomy, num_stages: int, layout: StageLayout, recompute: RecomputeConfig) -> tuple[Stage, ...]:
    """The same of each stage, of the pieces of `needed_stages`."""
    return tuple(run_again(stage, recompute) for stage in needed_stages(anatomy, num_stages, layout))


def _told(piece: Piece, stream: bool, memory: bool) -> Piece:
    layer = piece.layer
    # The norm before the first product of a layer has weights too.
    is_read = stream or (layer is not None and piece.is_trained)
    is_seen = layer is not None and layer.memory > 0 and memory
    passes = piece.passes_gradient
    if not piece.is_trained and not piece.embedded_tokens:
        passes = is_read or is_seen or bool(piece.paths)
    return replace(piece, needs_input=is_read, needs_memory=is_seen, passes_gradient=passes)
