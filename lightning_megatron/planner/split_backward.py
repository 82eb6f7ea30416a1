"""Memory of a rank under a split backward (dgrad and wgrad apart), as in ZB-H1 and ZB-V.

The order of the schedule is walked. From its forward on a microbatch saves what `activations` counts. After dgrad of a
layer it saves the inputs of the layer's linears and the gradients of their outputs, until wgrad.

    forward       logits, and dropout's draws
    dgrad         gradients inside a layer; the layers after it as they wait for wgrad, those before it as saved
    wgrad         the gradient of the largest weight, where it is accumulated in a wider precision
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lightning_megatron.context.unfused_attention import MOST_SCORES
from lightning_megatron.pipeline.lower import P2PBatch, ScheduledProgram
from lightning_megatron.pipeline.plans import training_plan
from lightning_megatron.pipeline.schedule import Action, Kind
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.planner import transient_memory as transient
from lightning_megatron.planner.activations import (
    bytes_after_layers,
    feed_forward_bytes,
    logit_bytes,
    logit_share,
    parts_after_layers,
    stage_bytes,
)
from lightning_megatron.planner.frozen_activations import frozen_activation_bytes, recompute_groups
from lightning_megatron.planner.model_parts import ModelPart, Stage
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.trainable import backward_part
from lightning_megatron.transformer import cost

# The message that each compute reads.
_RECEIVED = {
    Kind.FORWARD: Kind.RECV_FORWARD,
    Kind.BACKWARD: Kind.RECV_BACKWARD,
    Kind.BACKWARD_INPUT: Kind.RECV_BACKWARD,
    Kind.BACKWARD_WEIGHT: None,
}

# Finding the bucket of a relative position takes so much for each pair of positions.
_BUCKET_BYTES = 60


@dataclass(frozen=True, kw_only=True)
class SplitBackwardStep:
    """A forward, dgrad or wgrad on a rank, and what the rank holds meanwhile."""

    kind: Kind
    chunk: int
    """Chunk of the rank, counted from 0."""
    saved: tuple[float, ...]
    """Microbatches of each chunk between their forward and their dgrad, the current one included."""
    waiting: tuple[float, ...]
    """Microbatches of each chunk between their dgrad and their wgrad."""
    in_flight: float
    """Messages that are posted ahead or not known to be sent."""


@lru_cache(maxsize=4096)
def split_backward_steps(schedule: Schedule, rank: int) -> tuple[SplitBackwardStep, ...]:
    """All distinct steps of a rank. Steps of more than 2 p + 2 microbatches repeat."""
    some = replace(schedule, microbatches=min(schedule.microbatches, 2 * schedule.pp + 2))
    return tuple(dict.fromkeys(step for step, _ in walked(some, rank, [1] * some.microbatches)))


def walked(schedule: Schedule, rank: int, sizes: Sequence[float]) -> Iterator[tuple[SplitBackwardStep, int]]:
    """Each compute of a rank with its microbatch, and what the rank holds, for microbatches of these sizes."""
    program = training_plan(schedule)
    own = [stage for stage, its_rank in enumerate(program.ranks) if its_rank == rank]
    saved, waiting = [0.0] * len(own), [0.0] * len(own)
    in_flight: dict[Action, float] = {}
    for step in program.plan[rank]:
        if isinstance(step, P2PBatch):
            in_flight |= {message: sizes[message.microbatch] for message in step.posted}
            for message in step.released:
                in_flight.pop(message)
        elif step.kind in _RECEIVED:
            chunk, size = own.index(step.stage), sizes[step.microbatch]
            if received := _RECEIVED[step.kind]:
                in_flight.pop(Action(received, step.stage, step.microbatch), None)
            if step.kind is Kind.FORWARD:
                saved[chunk] += size
            held = SplitBackwardStep(
                kind=step.kind,
                chunk=chunk,
                saved=tuple(saved),
                waiting=tuple(waiting),
                in_flight=sum(in_flight.values()),
            )
            yield held, step.microbatch
            if step.kind is Kind.BACKWARD_WEIGHT:
                waiting[chunk] -= size
            elif step.kind is not Kind.FORWARD:
                saved[chunk] -= size
                waiting[chunk] += size * (step.kind is Kind.BACKWARD_INPUT)
            in_flight |= dict.fromkeys(_handed_over(step, program), size)


def _handed_over(step: Action, program: ScheduledProgram) -> list[Action]:
    """The message that a compute hands to the stage before or after it, where that is on its own rank."""
    ranks, stage = program.ranks, step.stage
    match step.kind:
        case Kind.FORWARD if stage + 1 < len(ranks) and ranks[stage + 1] == ranks[stage]:
            return [Action(Kind.RECV_FORWARD, stage + 1, step.microbatch)]
        case Kind.BACKWARD | Kind.BACKWARD_INPUT if stage and ranks[stage - 1] == ranks[stage]:
            return [Action(Kind.RECV_BACKWARD, stage - 1, step.microbatch)]
    return []


def split_backward_bytes(run: Run, rank: int, steps: Iterable[SplitBackwardStep], trained: tuple[int, int]) -> float:
    """The most that a rank holds on top of weights, gradients and optimizer states, over these steps."""
    stages = run.stages[rank]
    passed = [backward_part(stage) for stage in stages]
    each = zip(passed, stages, transient.received_by_chunk(run, rank), strict=True)
    saved = [stage_bytes(run, passing) - frozen_activation_bytes(run, stage) + size for passing, stage, size in each]
    waiting = [_stage_waiting(run, stage) for stage in stages]
    work = {
        Kind.FORWARD: [_forward_work(run, stage) for stage in stages],
        Kind.BACKWARD_INPUT: [max(_walked_back(run, stage, is_split=True)) for stage in passed],
        Kind.BACKWARD_WEIGHT: [_weight_work(run, stage) for stage in stages],
        Kind.BACKWARD: [max(_walked_back(run, stage, is_split=False)) for stage in passed],
    }
    message = max(transient.message_bytes(run, stage) for stage in stages)
    held = max(
        sum(count * size for count, size in zip(step.saved + step.waiting, saved + waiting, strict=True))
        + step.in_flight * message
        + work[step.kind][step.chunk]
        for step in steps
    )
    return max(held + transient.always_bytes(run, trained), transient.stepping_bytes(run, rank, trained))


def _stage_waiting(run: Run, stage: Stage) -> float:
    """Bytes that a microbatch saves of a stage between dgrad and wgrad."""
    layers = sum(count * transient.waiting_bytes(run, part) for part, count in stage.items())
    return layers + _end_waiting(run, stage, stage)


def _end_waiting(run: Run, stage: Stage, parts: Stage) -> float:
    """Bytes that parts of a stage without layers save between dgrad and wgrad: inputs of the head and of other
    products, and gradients of their outputs."""
    waiting = 0.0
    if transient.trains_head(parts):
        waiting += logit_bytes(run, stage) * logit_share(run, run.bytes_per_element) + transient.own_bytes(run, stage)
    products = [product for part in parts if part.is_trained for product in part.products]
    numbers = sum(product.tokens * (product.inputs + product.outputs) for product in products)
    return waiting + run.micro_batch_size * numbers * run.bytes_per_element


def _forward_work(run: Run, stage: Stage) -> float:
    inside = max(
        (max(transient.drawing_bytes(run, part), transient.experts_bytes(run, part)) for part in stage), default=0.0
    )
    return max(logit_bytes(run, stage), inside - bytes_after_layers(run, stage))


def _walked_back(run: Run, stage: Stage, *, is_split: bool) -> Iterator[float]:
    """Bytes that a backward, or dgrad where it is split, holds on top of what its microbatch saved: at each of its
    moments, from the head to the embedding."""
    matrix = cost.vocabulary_parameters(run.model, run.sizes)
    gradient = logit_bytes(run, stage) * logit_share(run, run.bytes_per_element)
    if gradient:
        yield logit_bytes(run, stage)
        yield gradient + transient.head_work(run, stage, matrix)
    more = is_split * _end_waiting(run, stage, parts_after_layers(stage)) - bytes_after_layers(run, stage)
    more += is_split * matrix * transient.waiting_look_up_width(run, stage)
    parts = [part for part, count in stage.items() if part.layer is not None for _ in range(count)]
    for recomputed, each in reversed(recompute_groups(run, stage)):
        more += recomputed
        for saved in reversed(each):
            part = parts.pop()
            if recomputed:
                # Dropout masks are redrawn.
                yield more + transient.drawing_bytes(run, part)
            yield more + transient.layer_work(run, part)
            work = max(transient.scores_bytes(run, part), transient.exchanged_bytes(run, part), _tile_bytes(run, part))
            yield more + (_attention_grown(run, part) if is_split else 0.0) + work
            more += is_split * transient.waiting_bytes(run, part) - saved
    yield more
    if any(part.embedded_tokens and part.is_trained for part in stage):
        yield more + matrix * (transient.look_up_width(run, stage) - transient.waiting_look_up_width(run, stage))


def _attention_grown(run: Run, part: ModelPart) -> float:
    """Bytes by which a layer has grown once its feed-forward network waits for wgrad and attention runs backward."""
    if not part.layer or not part.layer.repeats:
        return 0.0
    waiting = transient.waiting_bytes(run, part) - transient.waiting_bytes(run, part, is_attention=True)
    return waiting - feed_forward_bytes(run, part)


def _tile_bytes(run: Run, part: ModelPart) -> float:
    """Bytes that the backward of attention with relative positions holds: float32 gradients of queries, keys and
    values, three tiles of scores, and the int64 search for the buckets of a tile."""
    layer = part.layer
    if layer is None or not layer.has_relative_bias:
        return 0.0
    heads = layer.config.num_attention_heads / run.sizes.tp
    queries = run.micro_batch_size * layer.sequence / run.sizes.cp * heads
    tile = min(queries * layer.sequence / run.sizes.cp, MOST_SCORES)
    return 12 * (queries * layer.config.head_dim + tile) + _BUCKET_BYTES * tile / heads


def _weight_work(run: Run, stage: Stage) -> float:
    """Bytes of a weight's gradient before it is accumulated in a wider precision; experts' gradients exist before."""
    is_wider = transient.is_widened(run)
    made = (transient.weight_of(run, part) for part in stage if is_wider or (part.layer and part.layer.has_experts))
    return run.bytes_per_element * max(made, default=0.0)
