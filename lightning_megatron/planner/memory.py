"""Bytes that each pipeline rank holds, by kind, at the peak of a step: as measured, or in closed form.

The closed form serves a search, which measures what it shows, and runs of other frameworks:

    weights, gradients, master weights, moments   bytes a parameter as in `optim.master_weights`; data-parallel ranks of
                                                  dense weights are dp x cp, of experts edp
    activations                                   those that a stage saves of a microbatch, times the microbatches that
                                                  the schedule holds; under full recomputation one group of layers more;
                                                  the logits of the last stage
    buffers                                       workspaces, the largest weight's gradient before it is accumulated,
                                                  FP8 weights, weights that are gathered for a layer
    overhead                                      memory that no allocator counts: context, communicators, workspaces

Sources: Korthikanti et al., arXiv 2205.05198, section 4; Rajbhandari et al., arXiv 1910.02054, section 3.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from lightning_megatron.planner.activations import (
    largest_layer_bytes,
    layers_bytes,
    logit_bytes,
    recompute_bytes,
    stage_bytes,
)
from lightning_megatron.planner.expected_step import expected_step
from lightning_megatron.planner.model_parts import ModelPart, adapter_parameters, parameters_of
from lightning_megatron.planner.pipeline_load import saved_by_chunk
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.trainable import backward_part
from lightning_megatron.precision.mx import BLOCK
from lightning_megatron.transformer import cost
from lightning_megatron.transformer.config import TransformerConfig

OVERHEAD_BYTES = 1.5e9
"""Bytes of the context (0.5 GB), cuBLAS workspaces, and NCCL's buffers of a handful of communicators: `nvidia-smi` less
torch's reserved memory is between 1 and 2 GB in such runs. Source: reference notes on Megatron, "NCCL 1-2 GB"."""

WORKSPACE_BYTES = 0.13e9
"""Bytes that torch counts as allocated for cuBLAS and the step's own small tensors. Source: the smallest of Megatron
Core's functional tests, whose weights and optimizer states are 0.08 to 0.15 GB less than the measured memory."""

FRAGMENTATION = 0.03
"""Share of allocated memory that the allocator reserves and cannot use, with expandable segments."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank by kind."""

    weights: float = 0.0
    gradients: float = 0.0
    master_weights: float = 0.0
    moments: float = 0.0
    activations: float = 0.0
    buffers: float = 0.0
    overhead: float = 0.0
    host: float = 0.0
    """In host memory, beside those of the device: what an optimizer steps there, and offloaded activations."""

    @property
    def static(self) -> float:
        """Bytes held from step to step."""
        return self.weights + self.gradients + self.master_weights + self.moments

    @property
    def allocated(self) -> float:
        """Bytes at the peak, as torch counts them."""
        return self.static + self.activations + self.buffers

    @property
    def total(self) -> float:
        """Bytes at the peak, as the device counts them."""
        return self.allocated + self.overhead

    def __add__(self, other: "Memory") -> "Memory":
        own = self.by_kind()
        return Memory(**{kind: own[kind] + size for kind, size in other.by_kind().items()})

    def times(self, share: float) -> "Memory":
        """So many times the bytes of every kind."""
        return Memory(**{kind: share * size for kind, size in self.by_kind().items()})

    def by_kind(self) -> dict[str, float]:
        """Bytes of the device by the names of the fields."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "host"}


def memory_of(run: Run) -> tuple[Memory, ...]:
    """Memory of each pipeline rank in closed form, first stage first. The run must have no errors."""
    return tuple(rank_memory(run, rank) for rank in range(run.sizes.pp))


def rank_memory(run: Run, rank: int) -> Memory:
    """Memory of one pipeline rank in closed form; microbatches must be equal."""
    stages = run.stages[rank]
    passed = [backward_part(stage) for stage in stages]
    saved = list(zip(saved_by_chunk(run.schedule, rank), passed, strict=True))
    activations = sum(count * stage_bytes(run, passing) for count, passing in saved)
    offloaded = 0.0
    if run.recompute.offload:
        offloaded = sum(count * layers_bytes(run, passing) for count, passing in saved)
        # Those of a layer are there in its forward, and again in its backward.
        activations += max(largest_layer_bytes(run, passing) for passing in passed) - offloaded
    activations += max(recompute_bytes(run, passing) for passing in passed)
    logits = max(logit_bytes(run, stage) for stage in stages)
    layers = [part.layer for stage in stages for part in stage if part.layer is not None]
    largest = max((_up_weight(run, layer.config) for layer in layers), default=0)
    # Logits that are left while the head's weight has its gradient; a layer's comes after they are freed.
    matrix = cost.vocabulary_parameters(run.model, run.sizes)
    at_head = logits / 3 + matrix * run.bytes_per_element if logits else 0.0
    buffers = max(at_head - logits, largest * run.bytes_per_element - logits, 0.0) + _buffers(run, rank)
    states = _states(run, parameters_of_rank(run, rank), trained_of_rank(run, rank))
    states["host"] += offloaded
    return with_overhead(Memory(**states, activations=activations + logits, buffers=buffers))


def with_overhead(memory: Memory) -> Memory:
    """The memory with what no allocator counts."""
    return replace(memory, overhead=OVERHEAD_BYTES + FRAGMENTATION * memory.allocated)


def _up_weight(run: Run, config: TransformerConfig) -> int:
    """Elements of the weight of a dense feed-forward network's first linear on this rank."""
    return config.ffn_hidden_size // run.sizes.tp * (2 if config.is_gated else 1) * config.hidden_size


def _states(run: Run, held_by_kind: tuple[int, int], trained_by_kind: tuple[int, int]) -> dict[str, float]:
    """Bytes that a rank holds from step to step, by kind, for its dense and its expert parameters, all and trained; the
    host's are a kind of their own."""
    master, moments = run.stepped_bytes * run.is_mixed, expected_step(run).states * run.stepped_bytes
    sharding = "always" if run.optimizer.shards_parameters else run.framework.shards_weights
    offloaded = run.optimizer.offload_fraction if run.optimizer.cpu_offload else 0.0
    # Sharded weights are the master weights; low-precision ones are gathered for one layer at a time.
    low = run.bytes_per_element * (offloaded if sharding == "always" and master else 1)
    # The host has main weights, what they are cast to, moments and gradients.
    on_host = run.stepped_bytes + run.bytes_per_element * run.is_mixed + moments + run.gradient_bytes
    held = {"weights": 0.0, "gradients": 0.0, "master_weights": 0.0, "moments": 0.0, "host": 0.0}
    for every, number, ranks in zip(held_by_kind, trained_by_kind, (run.dp_cp, run.sizes.edp), strict=True):
        ranks = min(ranks, run.optimizer.shard_size or ranks)
        own = number / ranks
        # Frozen weights keep the precision that they are loaded in.
        frozen = run.stepped_bytes * ((every - number) / (ranks if sharding == "always" else 1))
        stepped = own if run.optimizer.shards_states or sharding != "none" else number
        held["weights"] += low * (own if sharding == "always" else number) + frozen
        are_sharded = run.optimizer.shards_gradients or sharding != "none"
        held["gradients"] += run.gradient_bytes * (own if are_sharded else number)
        held["master_weights"] += master * stepped * (1 - offloaded)
        held["moments"] += moments * stepped * (1 - offloaded)
        held["host"] += on_host * stepped * offloaded
    return held


def _buffers(run: Run, rank: int) -> float:
    """Bytes of workspaces, FP8 weights, and weights that are gathered for a layer."""
    stages = run.stages[rank]
    parts = [(part, count) for stage in stages for part, count in stage.items()]
    held = {part: sum(parameters_of(part, run.model_parts, run.sizes)) for part, _ in parts}
    buffers = WORKSPACE_BYTES
    if run.fp8 is not None:
        # Weights are cast once a step, and transposed.
        with_scales = 1.0 if run.saves_float8 else 1 + 1 / BLOCK
        buffers += 2 * with_scales * sum(held[part] * count for part, count in parts if part.layer is not None)
    if run.optimizer.shards_gradients:
        # A bucket whose reduction is in flight, and the one that fills.
        # Buckets of sharded weights have those of one part.
        of_bucket = max(held.values())
        if not run.optimizer.shards_parameters:
            of_bucket = max(run.optimizer.bucket_size, of_bucket)
        buffers += run.gradient_bytes * min(2 * of_bucket, sum(held[part] * count for part, count in parts))
    if run.optimizer.shards_parameters:
        # Weights of the current part and of the next one, or of all parts where a step keeps them.
        whole = 2 * max(held.values()) if run.optimizer.reshard_after_forward else sum(parameters_of_rank(run, rank))
        buffers += run.bytes_per_element * whole
    if run.framework.shards_weights == "always":
        # The current layer, the next one in flight, and the layer's gradients before they are scattered.
        buffers += 3 * run.bytes_per_element * max(held.values())
    return buffers


def parameters_of_rank(run: Run, rank: int) -> tuple[int, int]:
    """Number of dense and of expert parameters that a pipeline rank holds."""
    return _counted(run, rank, lambda part: True)


def trained_of_rank(run: Run, rank: int) -> tuple[int, int]:
    """Number of dense and of expert parameters that a pipeline rank trains."""
    return _counted(run, rank, lambda part: part.is_trained)


def _counted(run: Run, rank: int, is_counted: Callable[[ModelPart], bool]) -> tuple[int, int]:
    """Number of a rank's dense and expert parameters in the parts that count; of other parts adapters alone count."""
    dense, experts = 0, 0
    has_matrix, needs_matrix = False, False
    for stage in run.stages[rank]:
        for part, count in stage.items():
            has_matrix |= part.matrices > 0 and part.embedded_tokens > 0
            needs_matrix |= part.shared_matrices > 0 and is_counted(part)
            own = adapter_parameters(part, run.sizes), 0
            if is_counted(part):
                own = parameters_of(part, run.model_parts, run.sizes)
            dense, experts = dense + count * own[0], experts + count * own[1]
    if needs_matrix and not has_matrix:
        dense += cost.vocabulary_parameters(run.model, run.sizes)
    return dense, experts
