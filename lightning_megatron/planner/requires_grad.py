"""Parts of stages in order, each with whether its input requires a gradient.

A gradient is needed after the first trained weight, and by every stage that receives its input from another: it is sent
back in any case. A decoder's hidden state is separate from its encoder's output.
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
    """The parts of each stage in order, with the gradients that are needed of them there."""
    is_t5 = isinstance(model_parts.config, T5Config)
    stream = memory = False
    found = []
    for number, stage in enumerate(ordered_stages(model_parts, num_stages, layout)):
        stream, memory = stream or number > 0, memory or number > 0
        own = []
        for part in stage:
            if part.embedded_tokens and is_t5:
                stream, memory = False, stream
            own.append(_with_gradients(part, stream, memory))
            layer = part.layer
            if layer is None or layer.repeats:
                reads_memory = layer is not None and layer.memory > 0 and memory
                stream |= part.is_trained or bool(part.adapters) or reads_memory
        found.append(tuple(own))
    return tuple(found)


@lru_cache(maxsize=4096)
def stages_of(model_parts: ModelParts, num_stages: int, layout: StageLayout) -> tuple[Stage, ...]:
    """The parts of each stage with their counts; equal stages are one object."""
    stages = stages_with_gradients(model_parts, num_stages, layout)
    counted = {stage: Counter(stage) for stage in dict.fromkeys(stages)}
    return tuple(counted[stage] for stage in stages)


def recomputed_parts(stage: Sequence[ModelPart], recompute: RecomputeConfig) -> Counter[ModelPart]:
    """The layers of a stage that full recomputation covers, with their counts; the stage's parts are in order."""
    groups = groups_of(recompute, [part.is_layer for part in stage])
    return Counter(stage[index] for indices, is_recomputed in groups if is_recomputed for index in indices)


def _with_gradients(part: ModelPart, stream: bool, memory: bool) -> ModelPart:
    layer = part.layer
    # The norm before a layer's first linear has weights too.
    is_read = stream or (layer is not None and part.is_trained)
    is_seen = layer is not None and layer.memory > 0 and memory
    is_frozen = not part.is_trained and not part.embedded_tokens
    passes = is_read or is_seen or bool(part.adapters) if is_frozen else part.passes_gradient
    return replace(part, needs_input=is_read, needs_memory=is_seen, passes_gradient=passes)
