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
from lightning_megatron.planner.model_parts import ModelPart, ModelParts, Stage, ordered_stages
from lightning_megatron.transformer.recompute import RecomputeConfig, groups_of


@lru_cache(maxsize=4096)
def stages_with_gradients(
    model_parts: ModelParts, num_stages: int, layout: StageLayout
) -> tuple[tuple[ModelPart, ...], ...]:
    """Of each stage its pieces in order, with what is needed of them there."""
    is_t5 = isinstance(model_parts.config, T5Config)
    stream = memory = False
    found = []
    for number, stage in enumerate(ordered_stages(model_parts, num_stages, layout)):
        stream, memory = stream or number > 0, memory or number > 0
        own = []
        for part in stage:
            if part.embedded_tokens and is_t5:
                stream, memory = False, stream
            told = _told(part, stream, memory)
            own.append(told)
            layer = part.layer
            if layer is None or layer.repeats:
                reads_memory = layer is not None and layer.memory > 0 and memory
                stream |= part.is_trained or bool(part.adapters) or reads_memory
        found.append(tuple(own))
    return tuple(found)


@lru_cache(maxsize=4096)
def stages_of(model_parts: ModelParts, num_stages: int, layout: StageLayout) -> tuple[Stage, ...]:
    """Of each stage its pieces and how many there are of each; equal stages are one object."""
    stages = stages_with_gradients(model_parts, num_stages, layout)
    numbers = {part: number for number, part in enumerate(dict.fromkeys(part for own in stages for part in own))}
    made: dict[tuple[int, ...], Stage] = {}
    keys = [tuple(numbers[part] for part in own) for own in stages]
    for key, own in zip(keys, stages, strict=True):
        made.setdefault(key, Counter(own))
    return tuple(made[key] for key in keys)


def recomputed_parts(stage: Sequence[ModelPart], recompute: RecomputeConfig) -> Counter[ModelPart]:
    """Of the pieces of a stage in order the layers that full recomputation runs again, and how many of each."""
    groups = groups_of(recompute, [part.is_layer for part in stage])
    return Counter(stage[place] for places, is_again in groups if is_again for place in places)


@lru_cache(maxsize=4096)
def recomputed_stages(
    model_parts: ModelParts, num_stages: int, layout: StageLayout, recompute: RecomputeConfig
) -> tuple[Stage, ...]:
    """The same of each stage, of the pieces of `needed_stages`."""
    return tuple(recomputed_parts(stage, recompute) for stage in stages_with_gradients(model_parts, num_stages, layout))


def _told(part: ModelPart, stream: bool, memory: bool) -> ModelPart:
    layer = part.layer
    # The norm before the first product of a layer has weights too.
    is_read = stream or (layer is not None and part.is_trained)
    is_seen = layer is not None and layer.memory > 0 and memory
    passes = part.passes_gradient
    if not part.is_trained and not part.embedded_tokens:
        passes = is_read or is_seen or bool(part.adapters)
    return replace(part, needs_input=is_read, needs_memory=is_seen, passes_gradient=passes)
