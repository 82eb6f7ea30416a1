"""Memory of a forward and a backward that overlap: they take turns whenever one waits for the dispatch or combine of
its tokens, so both have passed about as many expert layers.

As the backward frees a layer, the forward saves one: together they hold what one microbatch saves, and what the forward
has made of its first expert layer when it first yields. When the backward comes to an embedding the forward is through.
"""

from collections.abc import Sequence

from lightning_megatron.planner.activations import stage_bytes
from lightning_megatron.planner.model_parts import ModelPart, Stage
from lightning_megatron.planner.pipeline_load import has_pairs
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.transient_memory import inner_sizes


def unmade_bytes(run: Run, rank: int, saved: Sequence[float]) -> float:
    """Bytes that an overlapped forward has yet to save while its backward holds all of its own; 0 without overlap.

    Each stage of the rank saves `saved` bytes of a microbatch; of several stages the smallest counts.
    """
    if not has_pairs(run.schedule, rank) or run.sizes.ep * run.sizes.etp == 1:
        return 0.0
    begun = (_begun_bytes(run, stage) for stage in run.stages[rank])
    return max(min(size - first for size, first in zip(saved, begun, strict=True)), 0.0)


def _begun_bytes(run: Run, stage: Stage) -> float:
    """Bytes that a forward has saved of a stage when it first yields, with its expert layers spread evenly."""
    layers = [part for part in stage if part.layer is not None]
    of_experts = [part for part in layers if part.layer is not None and part.layer.has_experts]
    if not of_experts:
        return stage_bytes(run, stage)
    others = {part: stage[part] for part in layers if part not in of_experts and layers[0] not in of_experts}
    before = stage_bytes(run, others) / sum(stage[part] for part in of_experts)
    return before + max(_dispatched_bytes(run, part) for part in of_experts)


def _dispatched_bytes(run: Run, part: ModelPart) -> float:
    """Bytes that an expert layer holds during the dispatch of its tokens: all but the experts' activations, and the
    tokens to be received on top of those sent."""
    layer = part.layer
    assert layer is not None
    config, tokens = layer.config, run.micro_batch_size * layer.sequence / run.sizes.cp
    sent, features, _ = inner_sizes(run, layer, tokens)
    num_activated = 1 if config.is_gated or config.activation == "relu" else 2
    made = sent * features * (1 + config.is_gated + num_activated)
    return stage_bytes(run, {part: 1}) + (sent * config.hidden_size - made) * run.bytes_per_element
