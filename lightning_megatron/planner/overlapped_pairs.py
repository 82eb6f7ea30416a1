"""What a forward and a backward hold that run side by side: they take turns whenever one of them waits for tokens on
their way to experts or home, so both are about as many layers of experts on their way.

As the backward lets a layer go, the forward makes one: both keep what one microbatch does, and what the forward has
made of its first layer of experts when it gives way. When the backward comes to an embedding the forward is through.
"""

from collections.abc import Sequence

from lightning_megatron.planner.activations import stage_bytes
from lightning_megatron.planner.model_parts import ModelPart, Stage
from lightning_megatron.planner.pipeline_load import has_pairs
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.transient_memory import inner_sizes


def unmade_bytes(run: Run, rank: int, kept: Sequence[float]) -> float:
    """What the forward of a pair has yet to make while its backward still keeps all; 0 where a rank runs no pair.

    `kept` is what each of its stages keeps of a microbatch; of several stages the smallest counts.
    """
    if not has_pairs(run.schedule, rank) or run.sizes.ep * run.sizes.etp == 1:
        return 0.0
    begun = (_begun_bytes(run, stage) for stage in run.stages[rank])
    return max(min(size - first for size, first in zip(kept, begun, strict=True)), 0.0)


def _begun_bytes(run: Run, stage: Stage) -> float:
    """What a forward keeps of a stage when it first gives way, where layers of experts are as far from each other as
    from its start."""
    layers = [part for part in stage if part.layer is not None]
    of_experts = [part for part in layers if part.layer is not None and part.layer.has_experts]
    if not of_experts:
        return stage_bytes(run, stage)
    others = {part: stage[part] for part in layers if part not in of_experts and layers[0] not in of_experts}
    before = stage_bytes(run, others) / sum(stage[part] for part in of_experts)
    return before + max(_departed_bytes(run, part) for part in of_experts)


def _departed_bytes(run: Run, part: ModelPart) -> float:
    """What a layer of experts keeps while its tokens are on their way there: all but what experts make, and the rows
    that are to come beside those that it gave."""
    layer = part.layer
    assert layer is not None
    config, tokens = layer.config, run.micro_batch_size * layer.sequence / run.sizes.cp
    rows, features, _ = inner_sizes(run, layer, tokens)
    num_activated = 1 if config.is_gated or config.activation == "relu" else 2
    made = rows * features * (1 + config.is_gated + num_activated)
    return stage_bytes(run, {part: 1}) + (rows * config.hidden_size - made) * run.bytes_per_element
