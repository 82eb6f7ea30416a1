"""Bytes that each pipeline rank holds, by kind, at the peak of a step.

    weights, gradients, master weights, moments     bytes a parameter as in `optim.master_weights`; d replicas of dense
                                                  weights are dp x cp, of experts edp
    activations                                   what a stage keeps of a microbatch, times the microbatches that the
                                                  schedule keeps; under full recomputation one group of layers on top
    logits                                        of the last stage, where most of its peak comes from
    buffers                                       workspaces, the largest weight's gradient before it is added, FP8
                                                  weights, weights that are gathered for a layer
    overhead                                      what no allocator counts: context, communicators, workspaces

Sources: Korthikanti et al., arXiv 2205.05198, section 4; Rajbhandari et al., arXiv 1910.02054, section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from lightning_megatron.planner.activations import logit_bytes, recompute_bytes, stage_bytes
from lightning_megatron.planner.frozen_activations import frozen_activation_bytes, frozen_activations_of
from lightning_megatron.planner.model_parts import Stage, parameters_of
from lightning_megatron.planner.overlapped_pairs import unmade_bytes
from lightning_megatron.planner.peak_memory import moments_of
from lightning_megatron.planner.pipeline_load import kept_by_chunk, splits_backward
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.split_backward import SplitBackwardStep, split_backward_bytes, split_backward_steps
from lightning_megatron.planner.trainable import backward_part, trained_of_stages
from lightning_megatron.planner.transient_memory import work_bytes
from lightning_megatron.transformer import cost

OVERHEAD_BYTES = 1.5e9
"""Context 0.5 GB, cuBLAS workspaces, and NCCL's buffers of a handful of communicators: `nvidia-smi` less what torch has
reserved is between 1 and 2 GB in runs of this kind. Source: reference notes on Megatron, "NCCL 1-2 GB"."""

WORKSPACE_BYTES = 0.13e9
"""What torch counts as allocated for cuBLAS and the step's own small tensors. Source: the smallest of Megatron Core's
functional tests, whose weights and optimizer states are 0.08 to 0.15 GB less than what was measured."""

FRAGMENTATION = 0.03
"""Share of what is allocated that the allocator reserves and cannot use, with expandable segments."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank by kind."""

    weights: float = 0.0
    gradients: float = 0.0
    master_weights: float = 0.0
    moments: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0
    overhead: float = 0.0

    @property
    def static(self) -> float:
        """Bytes held from step to step."""
        return self.weights + self.gradients + self.master_weights + self.moments

    @property
    def allocated(self) -> float:
        """At the peak, as torch counts it."""
        return self.static + self.activations + self.logits + self.buffers

    @property
    def total(self) -> float:
        """At the peak, as the device counts it."""
        return self.allocated + self.overhead

    def by_kind(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def memory_of(run: Run) -> tuple[Memory, ...]:
    """Memory of each pipeline rank, first stage first. The run must have no errors."""
    return tuple(rank_memory(run, rank) for rank in range(run.sizes.pp))


def rank_memory(run: Run, rank: int) -> Memory:
    """Memory of one pipeline rank: the fullest of the ranks that share its stages."""
    if run.balanced is None:
        split_steps = split_backward_steps(run.schedule, rank) if splits_backward(run.schedule) else ()
        return _memory_at(run, rank, kept_by_chunk(run.schedule, rank), split_steps)
    return fullest(run, rank)[1]


def fullest(run: Run, rank: int, line: int | None = None) -> tuple[int, Memory]:
    """Where microbatches differ: of the ranks that share a pipeline rank's stages the place of the one that holds the
    most, or of the one at that place, and what it holds."""
    found = [
        (moment.line, _memory_at(moment.run, rank, moment.kept, moment.split_steps))
        for moment in moments_of(run, rank, line)
    ]
    return max(found, key=lambda one: one[1].total)


def _memory_at(run: Run, rank: int, kept: tuple[float, ...], split_steps: Sequence[SplitBackwardStep] = ()) -> Memory:
    """Of a rank that keeps so many microbatches of each chunk; where halves are put off, over these moments."""
    dense, experts, largest, matrix = parameters_of_rank(run, rank)
    stages = run.stages[rank]
    trained = trained_of_stages(stages, run.model_parts, run.sizes)
    passed = [backward_part(stage) for stage in stages]
    by_stage = [
        stage_bytes(run, passing) - frozen_activation_bytes(run, stage)
        for passing, stage in zip(passed, stages, strict=True)
    ]
    unmade = unmade_bytes(run, rank, by_stage)
    activations = sum(count * size for count, size in zip(kept, by_stage, strict=True)) - unmade
    again = max(recompute_bytes(run, stage, partial(frozen_activations_of, run)) for stage in passed)
    logits = max(logit_bytes(run, stage) for stage in stages)
    if run.framework.counts_work:
        if split_steps:
            work = split_backward_bytes(run, rank, split_steps, trained)
        else:
            work = work_bytes(run, rank, kept, by_stage, again, trained, unmade)
        work += _buffers(run, stages)
        activations, logits = min(activations, work), min(logits, max(work - activations, 0.0))
        memory = Memory(
            **_states(run, (dense, experts), trained),
            activations=activations,
            logits=logits,
            buffers=work - activations - logits,
        )
        return replace(memory, overhead=OVERHEAD_BYTES + FRAGMENTATION * memory.allocated)
    activations += again
    # What is left of the logits while their weight's gradient is made; a layer's is made when they are gone.
    at_head = logits / 3 + matrix * run.bytes_per_element if logits else 0.0
    memory = Memory(
        **_states(run, (dense, experts), trained),
        activations=activations,
        logits=logits,
        buffers=max(at_head - logits, largest * run.bytes_per_element - logits, 0.0) + _buffers(run, stages),
    )
    return replace(memory, overhead=OVERHEAD_BYTES + FRAGMENTATION * memory.allocated)


def _states(run: Run, held_by_kind: tuple[int, int], trained_by_kind: tuple[int, int]) -> dict[str, float]:
    """Bytes that a rank holds from step to step, by kind: of dense and of expert parameters, all and trained."""
    weights, gradients, main, moments = _bytes_per_parameter(run)
    sharding = run.framework.shards_weights
    # Where weights are cut, those are the master weights; low ones are gathered for a layer at a time.
    low = 0 if sharding == "always" and main else weights
    held = {"weights": 0.0, "gradients": 0.0, "master_weights": 0.0, "moments": 0.0}
    # Frozen weights stay in their own numbers.
    still = run.stepped_bytes
    replicas_by_kind = (run.sizes.dp * run.sizes.cp, run.sizes.edp)
    for every, number, replicas in zip(held_by_kind, trained_by_kind, replicas_by_kind, strict=True):
        own = number / replicas
        idle = (every - number) / (replicas if sharding == "always" else 1)
        stepped = own if run.optimizer.kind == "distributed" or sharding != "none" else number
        held["weights"] += low * (own if sharding == "always" else number) + still * idle
        held["gradients"] += gradients * (own if sharding != "none" else number)
        held["master_weights"] += main * stepped
        held["moments"] += moments * stepped
    return held


def _buffers(run: Run, stages: tuple[Stage, ...]) -> float:
    """Workspaces, weights in FP8, and weights that are gathered for a layer."""
    parts = [(part, count) for stage in stages for part, count in stage.items()]
    held = {part: sum(parameters_of(part, run.model_parts, run.sizes)) for part, _ in parts}
    buffers = WORKSPACE_BYTES
    if run.fp8 is not None:
        # The cast weights of a step, and their transposes.
        buffers += 2 * sum(held[part] * count for part, count in parts if part.layer is not None)
    if run.framework.shards_weights == "always":
        # The layer at work, and the next one on its way; its gradients before they are scattered.
        buffers += 3 * run.bytes_per_element * max(held.values())
    return buffers


def parameters_of_rank(run: Run, rank: int) -> tuple[int, int, int, int]:
    """Parameters that a rank holds: dense ones, and those of experts; of its largest matrix in a layer, and of one over
    the vocabulary."""
    sizes = run.sizes
    dense, experts, largest = 0, 0, 0
    has_matrix, needs_matrix = False, False
    for stage in run.stages[rank]:
        for part, count in stage.items():
            own_dense, own_experts = parameters_of(part, run.model_parts, sizes)
            dense, experts = dense + count * own_dense, experts + count * own_experts
            has_matrix |= part.matrices > 0
            needs_matrix |= part.shared_matrices > 0
            if part.layer is not None:
                config = part.layer.config
                width = config.ffn_hidden_size // sizes.tp * (2 if config.is_gated else 1)
                largest = max(largest, width * config.hidden_size)
    matrix = cost.vocabulary_parameters(run.model, sizes)
    if needs_matrix and not has_matrix:
        dense += matrix
    return dense, experts, largest, matrix if has_matrix or needs_matrix else 0


def _bytes_per_parameter(run: Run) -> tuple[int, int, int, int]:
    """Weights, gradients, master weights and two moments, as AdamW has them, where nothing is cut over replicas."""
    return run.bytes_per_element, run.gradient_bytes, run.stepped_bytes * run.is_mixed, 2 * run.stepped_bytes
