"""Seconds of a step, from the compute and the messages of every rank, and the exposed share of them.

    step = (batches x pipeline + exposed gradient reduction and parameter gather + optimizer)
           x (1 + straggling log2 of the GPUs) + the rest

A layer's products take FLOPs over a measured ceiling; attention, elementwise kernels, messages and the host have rates
of their own. A backward executes the products twice and attention in one kernel two and a half times, since it
recomputes the weights. The pipeline is simulated, or in closed form where there is one (`pipeline_load`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from lightning_megatron.planner.collective_time import Group, exchange_seconds, gather_seconds, groups_of, hop_seconds
from lightning_megatron.planner.constants import Constants
from lightning_megatron.planner.context_time import context_seconds
from lightning_megatron.planner.expected_step import expected_step
from lightning_megatron.planner.framework_profile import Sharding
from lightning_megatron.planner.hardware import GIGA, Gpu
from lightning_megatron.planner.kernel_counts import FLASH_BACKWARD
from lightning_megatron.planner.layer_work import LayerWork, layer_work_of
from lightning_megatron.planner.memory import parameters_of_rank, trained_of_rank
from lightning_megatron.planner.model_parts import ModelPart
from lightning_megatron.planner.pipeline_load import num_pairs, step_seconds
from lightning_megatron.planner.run import Run, RunSettings
from lightning_megatron.planner.step_work import StepWork

ROUTING = "routing"
"""Name of the time for the routing of experts, which passes without compute, beside the axes of messages."""

# A product in 16 bits reads and writes so many bytes of each element of a frozen weight to cast it.
_CAST_BYTES = 6
# Elements read and written for a pair of tokens and a head where attention weights are materialised; a mask adds one
# byte. Forward: scores are written, softmax reads and writes, its dropout reads and writes, and a product reads.
# Backward: a gradient is written, dropout reads it and writes, softmax reads that and its output and writes, and three
# products read.
_PAIR_NUMBERS, _PAIR_BACKWARD_NUMBERS = 6, 9
# Torch materialises them so where it has no kernel, without dropout. Forward: scores are written, a mask is added,
# softmax reads and writes, queries without a key are searched for (a byte is written and read) and set to 0, and a
# product reads. Backward: a gradient is written, softmax reads it and its output and writes, and three products read.
# Source: PyTorch, _scaled_dot_product_attention_math and _safe_softmax.
_GROUPED_PAIR_NUMBERS, _GROUPED_PAIR_BACKWARD_NUMBERS = 9.5, 7
# A head's elementwise kernels move so much in a backward, over a forward: casts of logits are written and read too.
_HEAD_BACKWARD = 2.0
# An optimizer step reads a gradient, and reads and writes its weight and states. Master weights add a write of 16 bits.
_STEP_NUMBERS, _NUMBERS_OF_STATE, _LOW_BYTES = 3, 2, 2


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Seconds of one microbatch through a rank, forward or backward."""

    compute: float = 0.0
    exposed: Mapping[str, float] = field(default_factory=dict)
    """Exposed communication by axis, and `ROUTING`."""

    @property
    def total(self) -> float:
        return self.compute + sum(self.exposed.values())

    @property
    def own(self) -> float:
        """Seconds without those that a rank waits for other stages."""
        return self.total - self.exposed.get("pp", 0.0)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Parts of a step's time on the slowest pipeline rank."""

    compute: float
    exposed: Mapping[str, float]
    """Exposed communication by axis, and `ROUTING`; dp stands for gradients and weights."""
    bubble: float
    """Waiting for other stages."""
    optimizer: float
    other: float
    """Data, logging, the slowest of many GPUs."""
    passes: tuple[tuple[Pass, Pass], ...]
    """Forward and backward of a microbatch, by pipeline rank."""
    slowest: int
    """The slowest pipeline rank."""

    @property
    def forwards(self) -> tuple[float, ...]:
        """Seconds of a forward, by pipeline rank."""
        return tuple(forward.total for forward, _ in self.passes)

    @property
    def backwards(self) -> tuple[float, ...]:
        """Seconds of a backward, by pipeline rank."""
        return tuple(backward.total for _, backward in self.passes)

    @property
    def total(self) -> float:
        return self.compute + sum(self.exposed.values()) + self.bubble + self.optimizer + self.other


def step_time(run: Run, gpu: Gpu, constants: Constants) -> StepTime:
    """Time of a step. The run must have no errors."""
    # Ranks of equal stages, which are one object, are timed once.
    seen: dict[tuple[int, ...], tuple[Pass, Pass]] = {}
    passes = []
    for rank in range(run.sizes.pp):
        key = tuple(map(id, run.stages[rank]))
        if key not in seen:
            seen[key] = _passes(run, rank, gpu, constants)
        passes.append(seen[key])
    hidden = [_hidden_seconds(run, rank, *pair, gpu, constants) for rank, pair in enumerate(passes)]
    trained, steps = partial(trained_of_rank, run), [expected_step(run)] * run.sizes.pp
    return composed(run, passes, trained, steps, gpu, constants, hidden=hidden, sharding=run.framework.shards_weights)


def composed(
    run: RunSettings,
    passes: Sequence[tuple[Pass, Pass]],
    trained: Callable[[int], tuple[int, int]],
    steps: Sequence[StepWork],
    gpu: Gpu,
    constants: Constants,
    *,
    hidden: Sequence[float] = (),
    sharding: Sharding = "none",
) -> StepTime:
    """Time of a step whose pipeline ranks take so long for a forward and a backward of a microbatch.

    `trained` gives the dense and the expert parameters that a pipeline rank trains, `steps` what the optimizer takes of
    each rank. Overlap hides `hidden` seconds of a
    forward and a backward on each rank.
    """
    hidden = hidden or [0.0] * len(passes)
    forwards = tuple(forward.total for forward, _ in passes)
    backwards = tuple(backward.total for _, backward in passes)
    pipeline = run.num_accumulated * step_seconds(run.schedule, forwards, backwards, hidden)
    slowest = max(range(run.sizes.pp), key=lambda rank: forwards[rank] + backwards[rank] - hidden[rank])
    m = run.num_accumulated * run.schedule.microbatches
    exposed: dict[str, float] = {}
    for part in passes[slowest]:
        for axis, seconds in part.exposed.items():
            exposed[axis] = exposed.get(axis, 0.0) + m * seconds
    if run.schedule.is_overlapped:
        exposed["ep"] = exposed.get("ep", 0.0) - run.num_accumulated * num_pairs(run.schedule) * hidden[slowest]
    waited = sum(exposed.values())
    data_parallel, optimizer = 0.0, 0.0
    for rank in {0, slowest, run.sizes.pp - 1}:
        ends = run, trained(rank), steps[rank], sharding, forwards[rank], backwards[rank]
        sums, stepping = _data_parallel_seconds(*ends, gpu, constants)
        data_parallel, optimizer = max(data_parallel, sums), max(optimizer, stepping)
    exposed["dp"] = exposed.get("dp", 0.0) + data_parallel
    busy = pipeline + data_parallel + optimizer
    straggling = busy * constants.straggling * (run.sizes.world.bit_length() - 1)
    return StepTime(
        compute=m * sum(part.compute for part in passes[slowest]),
        exposed=exposed,
        bubble=pipeline - m * sum(part.compute for part in passes[slowest]) - waited if run.sizes.pp > 1 else 0.0,
        optimizer=optimizer,
        other=constants.step_seconds + straggling,
        passes=tuple(passes),
        slowest=slowest,
    )


def _passes(run: Run, rank: int, gpu: Gpu, constants: Constants) -> tuple[Pass, Pass]:
    """The forward and the backward of one microbatch through a rank."""
    compute = [0.0, 0.0]
    exposed: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for part, is_recomputed, count in _timed_parts(run, rank):
        work = layer_work_of(part, run.model_parts, run.sizes, run.micro_batch_size, run.bytes_per_element)
        for index, one in enumerate(_part_passes(run, part, work, gpu, constants, is_recomputed=is_recomputed)):
            compute[index] += count * one.compute
            for axis, seconds in one.exposed.items():
                exposed[index][axis] = exposed[index].get(axis, 0.0) + count * seconds
    if run.sizes.pp > 1:
        tokens = run.micro_batch_size * run.model_parts.tokens / run.sizes.cp
        num_bytes, groups = tokens * run.model.hidden_size * run.bytes_per_element, groups_of(run.sizes)
        hop = hop_seconds(
            num_bytes / (run.sizes.tp if run.framework.splits_hops else run.sp), groups["pp"], gpu, constants
        )
        if run.framework.splits_hops and run.sp < run.sizes.tp:
            hop += gather_seconds(num_bytes, groups["tp"], gpu, constants)
        for waited in exposed:
            waited["pp"] = (constants.exposed_hop * hop + constants.hop_seconds) * run.sizes.vp
    if run.framework.shards_weights != "none":
        totals = [seconds + sum(waited.values()) for seconds, waited in zip(compute, exposed, strict=True)]
        for waited, seconds in zip(exposed, _gathered_seconds(run, rank, totals, gpu, constants), strict=True):
            waited["dp"] = seconds
    return Pass(compute=compute[0], exposed=exposed[0]), Pass(compute=compute[1], exposed=exposed[1])


def _timed_parts(run: Run, rank: int) -> Iterator[tuple[ModelPart, bool, int]]:
    """The parts of a rank, each with whether a backward recomputes it in full, and with its count."""
    for stage, recomputed in zip(run.stages[rank], run.recomputed[rank], strict=True):
        for part, count in stage.items():
            number = recomputed.get(part, 0)
            yield from ((part, is_recomputed, n) for is_recomputed, n in ((False, count - number), (True, number)) if n)


def _part_passes(
    run: Run, part: ModelPart, work: LayerWork, gpu: Gpu, constants: Constants, *, is_recomputed: bool
) -> tuple[Pass, Pass]:
    is_fp8 = run.fp8 is not None
    plain = gpu.timed_as(run.plain_products)
    ceiling = gpu.matmul_flops(plain)
    plain_rate = ceiling * constants.product_share(gpu.family, is_fp8=False)
    rate = gpu.matmul_flops(gpu.timed_as(run.products)) * constants.product_share(gpu.family, is_fp8=is_fp8)
    # A faster product still takes as long to fill and drain.
    edges = constants.edge * work.edge_flops + constants.grouped_edge * work.grouped_edge_flops
    product = work.product_flops / rate + (edges + work.head_flops) / plain_rate
    # Torch's only float32 kernel is one of the first kind.
    share = constants.attention_share(gpu.family, run.fused_attention if plain == "half" else "first")
    flash_edges = constants.flash_edge * work.flash_edge_flops + constants.both_ways_edge * work.both_ways_edge_flops
    flash = (work.flash_flops + flash_edges) / (gpu.attention_flops(plain) * share)
    materialised = work.materialised_flops / (ceiling * constants.materialised_share)
    # The traffic of a head is counted kernel by kernel.
    is_joined = run.framework.is_fused or not work.num_layers
    traffic = constants.traffic if is_joined else constants.unfused_traffic
    moved = traffic * work.moved_bytes / gpu.memory_bytes_per_second
    if run.framework.bounds_gates:
        moved += constants.traffic * work.bounded_bytes / gpu.memory_bytes_per_second
    pairs = constants.traffic * work.num_pairs / gpu.memory_bytes_per_second
    grouped = constants.traffic * run.bytes_per_element * work.num_grouped_pairs / gpu.memory_bytes_per_second
    casts = constants.cast_traffic * work.cast_bytes / gpu.memory_bytes_per_second if is_fp8 else 0.0
    if is_fp8 and not run.saves_float8:
        # Each tensor once along either dim.
        casts *= 2
    moved += constants.traffic * work.adapter_bytes / gpu.memory_bytes_per_second
    # Frozen weights have no master weights and stay in float32; each product casts its own.
    lowered = _CAST_BYTES * work.num_frozen / gpu.memory_bytes_per_second if run.is_mixed else 0.0
    adapters = (work.adapter_flops + constants.edge * work.adapter_edge_flops) / plain_rate
    least = constants.layer_seconds * work.num_layers
    if run.framework.launches_experts:
        least += constants.expert_seconds * work.num_experts * (2 if run.is_overlapped else 1)
    width = run.bytes_per_element
    scored = materialised + (_PAIR_NUMBERS * width + 1) * pairs + _GROUPED_PAIR_NUMBERS * grouped
    forward = max(product + flash + scored + moved + casts + lowered + adapters, least)
    messages = _messages(run, work, gpu, constants)
    hides = run.framework.hides_tensor
    hidden_share = 1.0 if hides in ("forward", "everywhere") else share_in_chunks(run) if work.num_layers else 0.0
    exposed = _unhidden_tensor(messages, hidden_share, constants)
    exposed |= _context(run, work, flash + materialised, gpu, constants, is_backward=False)
    if not part.passes_gradient and not part.is_trained:
        return Pass(compute=forward, exposed=exposed), Pass()
    num_products = part.passes_gradient + part.is_trained
    attended = FLASH_BACKWARD * flash + 2 * materialised + (_PAIR_BACKWARD_NUMBERS * width + 1) * pairs
    attended += _GROUPED_PAIR_BACKWARD_NUMBERS * grouped
    backward = num_products * product + 2 * (casts + adapters)
    backward += (constants.moved_backward if work.num_layers else _HEAD_BACKWARD) * moved
    backward = max(backward + (attended + lowered if part.passes_gradient else 0.0), least)
    later = _unhidden_tensor(messages, float(hides in ("backward", "everywhere")), constants)
    later |= _context(run, work, attended, gpu, constants, is_backward=True)
    if is_recomputed:
        backward += forward
        later = {axis: seconds + exposed[axis] for axis, seconds in later.items()}
    if "core_attention" in run.recompute.recomputed_parts and work.num_pairs:
        backward += scored
    if run.kernels.loss_chunk_tokens:
        # Logits of a chunk are computed once more.
        backward += work.logit_flops / plain_rate
    if part.layer is not None and work.num_layers and run.recomputes_feed_forward(part.layer):
        backward += product * work.mlp_flops / work.product_flops
        for name in ("ep", ROUTING):
            if name in messages:
                later[name] = later.get(name, 0.0) + messages[name]
    if not is_recomputed and work.num_layers and run.framework.recomputes:
        share = work.second_flops / work.product_flops if run.framework.recomputes == "second products" else 1.0
        backward += share * product + moved + casts
    return Pass(compute=forward, exposed=exposed), Pass(compute=backward, exposed=later)


def share_in_chunks(run: RunSettings) -> float:
    """Share of the messages of tp that the forward's products hide as a backward's do: each in chunks but for one of
    them, or by symmetric memory."""
    return 1.0 if run.kernels.symmetric_memory else 1 - 1 / run.kernels.num_tp_overlap_chunks


def _unhidden_tensor(messages: Mapping[str, float], hidden: float, constants: Constants) -> dict[str, float]:
    """Messages as they are exposed where products hide that share of those of tp."""
    share = 1 - hidden * (1 - constants.exposed_tensor)
    return {axis: seconds * (share if axis == "tp" else 1.0) for axis, seconds in messages.items()}


def _messages(run: Run, work: LayerWork, gpu: Gpu, constants: Constants) -> dict[str, float]:
    """Exposed communication of a forward by axis, without cp, which `_context` gives."""
    groups = groups_of(run.sizes)
    waited: dict[str, float] = {}
    if work.num_tensor_messages:
        # Half of the messages are gathers, whose tensors are cast before if they are inputs of FP8 products.
        is_cast = run.saves_float8 and run.sizes.sequence_parallel and work.num_layers > 0
        width = (1 + 1 / run.bytes_per_element) / 2 if is_cast else 1.0
        each = gather_seconds(width * work.tensor_bytes / work.num_tensor_messages, groups["tp"], gpu, constants)
        waited["tp"] = work.num_tensor_messages * each
    if work.num_expert_layers:
        waited[ROUTING] = 0.0 if run.framework.captures_routing else constants.routing_seconds
        waited["ep"] = _expert_seconds(run, work, gpu, constants)
    return waited


def _expert_seconds(run: Run, work: LayerWork, gpu: Gpu, constants: Constants) -> float:
    """Seconds of dispatch and combine in a forward or a backward."""
    groups = groups_of(run.sizes)
    seconds = 2 * exchange_seconds(work.expert_bytes / 2, groups["ep"], gpu, constants)
    return seconds + 2 * gather_seconds(work.expert_tensor_bytes / 2, groups["etp"], gpu, constants)


def _hidden_seconds(run: Run, rank: int, forward: Pass, backward: Pass, gpu: Gpu, constants: Constants) -> float:
    """Seconds of dispatch and combine that overlapped forwards and backwards hide: tokens of each are in
    flight while the other computes, at most for as long as that takes."""
    if not run.schedule.is_overlapped:
        return 0.0
    in_flight = 0.0
    for stage in run.stages[rank]:
        for part, count in stage.items():
            work = layer_work_of(part, run.model_parts, run.sizes, run.micro_batch_size, run.bytes_per_element)
            if work.num_expert_layers:
                in_flight += count * _expert_seconds(run, work, gpu, constants)
    return sum(
        min(in_flight, own.exposed.get("ep", 0.0), other.compute)
        for own, other in ((forward, backward), (backward, forward))
    )


def _context(
    run: Run, work: LayerWork, attention: float, gpu: Gpu, constants: Constants, *, is_backward: bool
) -> dict[str, float]:
    """Exposed communication of context parallelism, for attention of so many seconds."""
    if not work.key_bytes:
        return {}
    seconds = context_seconds(
        run.sizes,
        key_bytes=work.key_bytes,
        query_bytes=work.query_bytes,
        attention_seconds=attention,
        gradient_share=run.framework.ring_gradient_bytes / run.bytes_per_element,
        gpu=gpu,
        constants=constants,
        is_backward=is_backward,
    )
    return {"cp": seconds}


def _gathered_seconds(run: Run, rank: int, totals: list[float], gpu: Gpu, constants: Constants) -> tuple[float, float]:
    """Exposed parameter gathers and gradient reductions of fully sharded weights, in forward and backward."""
    dense, experts = parameters_of_rank(run, rank)
    groups = groups_of(run.sizes)
    width = run.bytes_per_element
    gather = gather_seconds(width * dense, groups["dp_cp"], gpu, constants)
    gather += gather_seconds(width * experts, groups["edp"], gpu, constants)
    scatter = gather * run.gradient_bytes / width
    is_always = run.framework.shards_weights == "always"
    sent = gather if is_always else gather / run.schedule.microbatches, scatter + (gather if is_always else 0.0)
    waits = []
    for total, seconds in zip(totals, sent, strict=True):
        waits.append(max(seconds - total, 0.0) + constants.exposed_gather * min(seconds, total))
    return waits[0], waits[1]


def _data_parallel_seconds(
    run: RunSettings,
    trained: tuple[int, int],
    step: StepWork,
    sharding: Sharding,
    forward: float,
    backward: float,
    gpu: Gpu,
    constants: Constants,
) -> tuple[float, float]:
    """Exposed gradient reduction and parameter gather of a step, and the optimizer's own seconds."""
    dense, experts = trained
    groups = groups_of(run.sizes)
    is_sharded = sharding != "none"
    is_cut = run.optimizer.shards_states or is_sharded
    waited, stepped = 0.0, 0.0
    width = run.gradient_bytes
    for number, group in ((dense, groups["dp_cp"]), (experts, groups["edp"])):
        stepped += number / (_divided(group, run.optimizer.shard_size)[0].size if is_cut else 1)
        if is_sharded:
            continue
        inner, outer = _divided(group, run.optimizer.shard_size)
        scatter = gather_seconds(width * number, inner, gpu, constants)
        # Where every rank steps all weights, what comes back are gradients, as late as the sums.
        gather = gather_seconds(run.bytes_per_element * number, inner, gpu, constants) if is_cut else 0.0
        if outer.size > 1:
            # Once a step, for what this rank has of them.
            waited += 2 * gather_seconds(width * number / inner.size, outer, gpu, constants)
        each = run.optimizer.shards_gradients and run.num_accumulated == 1
        # Accumulated gradients are reduced after all backwards.
        is_early = each or (run.optimizer.overlap_grad_reduce and run.num_accumulated == 1)
        reduced = _unhidden(scatter if is_cut else 2 * scatter, backward, is_early, constants)
        waited += (run.num_microbatches if each else 1) * reduced
        if run.optimizer.shards_parameters and run.optimizer.reshard_after_forward:
            # One part ahead, before each forward and each backward.
            passes = _unhidden(gather, forward, True, constants) + _unhidden(gather, backward, True, constants)
            waited += run.num_accumulated * run.num_microbatches * passes
        else:
            is_hidden = run.optimizer.overlap_param_gather or run.optimizer.shards_parameters
            waited += _unhidden(gather, forward, is_hidden, constants)
    step_numbers = _STEP_NUMBERS + _NUMBERS_OF_STATE * step.states
    step_bytes = step_numbers * run.stepped_bytes + _LOW_BYTES * run.is_mixed
    on_device = constants.traffic * step_bytes / gpu.memory_bytes_per_second
    # An optimizer multiplies matrices in 16 bits.
    on_device += step.flops / (gpu.matmul_flops("half") * constants.product_share(gpu.family, is_fp8=False))
    # Gradients come, and weights go, by PCIe.
    moved_bytes = run.gradient_bytes + run.bytes_per_element
    on_host = step_bytes / (gpu.host_gb_per_second * GIGA) + moved_bytes / (gpu.pcie_gb_per_second * GIGA)
    offloaded = run.optimizer.offload_fraction if run.optimizer.cpu_offload else 0.0
    return waited, stepped * ((1 - offloaded) * on_device + offloaded * on_host)


def _divided(group: Group, size: int) -> tuple[Group, Group]:
    """Ranks of a group that are next to each other, and those in one place among such."""
    if not size or size >= group.size:
        return group, Group(size=1)
    return Group(size=size, stride=group.stride), Group(size=group.size // size, stride=group.stride * size)


def _unhidden(seconds: float, compute: float, is_overlapped: bool, constants: Constants) -> float:
    if not is_overlapped:
        return seconds
    return max(seconds - compute, 0.0) + constants.exposed_gather * min(seconds, compute)
