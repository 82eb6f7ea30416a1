"""What a rank holds where the halves of backwards that make weights' gradients are put off, as under ZB-H1 and ZB-V.

The order of the schedule is walked. From its forward on a microbatch keeps what `activations` counts; when its half for
the input has gone through a layer, what the layer's products read and the gradients of what they give, until its half
for the weights is done.

    forward       logits, and what dropout draws
    input         gradients inside of a layer, the layers behind it as they wait, those before it as they were kept
    weights       the gradient of the largest weight before it is added, where it is made narrower
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from lightning_megatron.context.unfused_attention import MOST_SCORES
from lightning_megatron.models import T5Config
from lightning_megatron.pipeline.lower import P2PBatch, ScheduledProgram
from lightning_megatron.pipeline.plans import training_plan
from lightning_megatron.pipeline.schedule import Action, Kind
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.planner.activations import (
    behind_bytes,
    behind_layers,
    feed_forward_bytes,
    logit_bytes,
    logit_share,
    recompute_groups,
    stage_bytes,
)
from lightning_megatron.planner.frozen_activations import frozen_activation_bytes, frozen_activations_of
from lightning_megatron.planner.model_parts import ModelPart, Stage
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.trainable import backward_part
from lightning_megatron.planner.transient_memory import (
    always_bytes,
    drawing_bytes,
    exchanged_bytes,
    experts_bytes,
    head_work,
    is_widened,
    layer_work,
    look_up_width,
    message_bytes,
    own_bytes,
    received_by_chunk,
    scores_bytes,
    stepping_bytes,
    trains_head,
    waiting_bytes,
    waiting_look_up_width,
    weight_of,
)
from lightning_megatron.transformer import cost

_RECEIVED = {
    Kind.FORWARD: Kind.RECV_FORWARD,
    Kind.BACKWARD: Kind.RECV_BACKWARD,
    Kind.BACKWARD_INPUT: Kind.RECV_BACKWARD,
    Kind.BACKWARD_WEIGHT: None,
}
# Computes, and what each reads.

# Of each pair of positions.
_BUCKET_BYTES = 60


@dataclass(frozen=True, kw_only=True)
class SplitBackwardStep:
    """A forward or half of a backward at work on a rank, and what else the rank holds."""

    kind: Kind
    chunk: int
    """Of the rank."""
    kept: tuple[float, ...]
    """Microbatches of each chunk from their forward on, that at work included."""
    waiting: tuple[float, ...]
    """From the end of their half for the input on."""
    flying: float
    """Messages that were posted ahead, or are not known to have left."""


@lru_cache(maxsize=4096)
def split_backward_steps(schedule: Schedule, rank: int) -> tuple[SplitBackwardStep, ...]:
    """All that differ of a rank's step. A step of more microbatches repeats those of 2 p + 2."""
    some = replace(schedule, microbatches=min(schedule.microbatches, 2 * schedule.pp + 2))
    found = {half: None for half, _ in walked(some, rank, [1] * some.microbatches)}
    return tuple(found)


def walked(schedule: Schedule, rank: int, sizes: Sequence[float]) -> Iterator[tuple[SplitBackwardStep, int]]:
    """Each compute of a rank and what is held at it, of microbatches of these sizes; and which is at work."""
    program = training_plan(schedule)
    own = [stage for stage, its_rank in enumerate(program.ranks) if its_rank == rank]
    kept, waiting = [0.0] * len(own), [0.0] * len(own)
    flying: dict[Action, float] = {}
    for step in program.plan[rank]:
        if isinstance(step, P2PBatch):
            flying |= {message: sizes[message.microbatch] for message in step.posted}
            for message in step.released:
                flying.pop(message)
        elif step.kind in _RECEIVED:
            chunk, size = own.index(step.stage), sizes[step.microbatch]
            if received := _RECEIVED[step.kind]:
                flying.pop(Action(received, step.stage, step.microbatch), None)
            if step.kind is Kind.FORWARD:
                kept[chunk] += size
            moment = SplitBackwardStep(
                kind=step.kind,
                chunk=chunk,
                kept=tuple(kept),
                waiting=tuple(waiting),
                flying=sum(flying.values()),
            )
            yield moment, step.microbatch
            if step.kind is Kind.BACKWARD_WEIGHT:
                waiting[chunk] -= size
            elif step.kind is not Kind.FORWARD:
                kept[chunk] -= size
                waiting[chunk] += size * (step.kind is Kind.BACKWARD_INPUT)
            flying |= dict.fromkeys(_handed_over(step, program), size)


def _handed_over(step: Action, program: ScheduledProgram) -> list[Action]:
    """What a compute gives to the next stage, or to the one before, where that is on its own rank."""
    ranks, stage = program.ranks, step.stage
    match step.kind:
        case Kind.FORWARD if stage + 1 < len(ranks) and ranks[stage + 1] == ranks[stage]:
            return [Action(Kind.RECV_FORWARD, stage + 1, step.microbatch)]
        case Kind.BACKWARD | Kind.BACKWARD_INPUT if stage and ranks[stage - 1] == ranks[stage]:
            return [Action(Kind.RECV_BACKWARD, stage - 1, step.microbatch)]
    return []


def split_backward_bytes(
    run: Run, rank: int, split_steps: Iterable[SplitBackwardStep], trained: tuple[int, int]
) -> float:
    """The most that a rank holds beside weights, gradients and optimizer states, over these moments."""
    stages = run.stages[rank]
    passed = [backward_part(stage) for stage in stages]
    each = zip(passed, stages, received_by_chunk(run, rank), strict=True)
    kept = [stage_bytes(run, passing) - frozen_activation_bytes(run, stage) + size for passing, stage, size in each]
    waiting = [_stage_waiting(run, stage) for stage in stages]
    more = {
        Kind.FORWARD: [_forward_work(run, stage) for stage in stages],
        Kind.BACKWARD_INPUT: [_input_work(run, stage, matrix=_matrix(run)) for stage in passed],
        Kind.BACKWARD_WEIGHT: [_weight_work(run, stage) for stage in stages],
        Kind.BACKWARD: [_backward_work(run, stage, passing) for stage, passing in zip(stages, passed, strict=True)],
    }
    message = max(message_bytes(run, stage) for stage in stages)
    held = max(
        sum(count * size for count, size in zip(half.kept + half.waiting, kept + waiting, strict=True))
        + half.flying * message
        + more[half.kind][half.chunk]
        for half in split_steps
    )
    return max(held + always_bytes(run, trained), stepping_bytes(run, rank, trained))


def _backward_work(run: Run, stage: Stage, passed: Stage) -> float:
    """The most that a backward that is not cut in two holds beside what its microbatch kept."""
    return max(_walked_back(run, passed, _matrix(run), waits=False))


def _matrix(run: Run) -> int:
    return cost.vocabulary_parameters(run.model, run.sizes)


def _stage_waiting(run: Run, stage: Stage) -> float:
    """What a microbatch keeps of a stage between the halves of its backward."""
    return sum(count * waiting_bytes(run, part) for part, count in stage.items()) + _end_waiting(run, stage, stage)


def _end_waiting(run: Run, stage: Stage, parts: Stage) -> float:
    """The same of pieces of a stage that are no layers: the gradient of logits and what the head reads, and what other
    products read and the gradients of what they give."""
    waiting = 0.0
    if trains_head(parts):
        waiting += logit_bytes(run, stage) * logit_share(run, run.bytes_per_element) + own_bytes(run, stage)
    products = [product for part in parts if part.is_trained for product in part.products]
    numbers = sum(product.tokens * (product.inputs + product.outputs) for product in products)
    return waiting + run.micro_batch_size * numbers * run.bytes_per_element


def _forward_work(run: Run, stage: Stage) -> float:
    inside = max((max(drawing_bytes(run, part), experts_bytes(run, part)) for part in stage), default=0.0)
    return max(logit_bytes(run, stage), inside - behind_bytes(run, stage))


def _input_work(run: Run, stage: Stage, matrix: int) -> float:
    """The most that the half for the input holds beside what its microbatch kept."""
    return max(_walked_back(run, stage, matrix))


def _walked_back(run: Run, stage: Stage, matrix: int, *, waits: bool = True) -> Iterator[float]:
    """The same at each of its moments, from the head to the embedding; `waits`: products wait for `W`."""
    gradient = logit_bytes(run, stage) * logit_share(run, run.bytes_per_element)
    if gradient:
        yield logit_bytes(run, stage)
        yield gradient + head_work(run, stage, matrix)
    more = waits * _end_waiting(run, stage, behind_layers(stage)) - behind_bytes(run, stage)
    more += waits * matrix * waiting_look_up_width(run, stage)
    parts = [part for part, count in stage.items() if part.layer is not None for _ in range(count)]
    for again, each in reversed(recompute_groups(run, stage, partial(frozen_activations_of, run))):
        more += again
        for kept in reversed(each):
            part = parts.pop()
            waiting = waits * waiting_bytes(run, part)
            if again:
                # What is dropped is drawn again.
                yield more + drawing_bytes(run, part)
            yield more + layer_work(run, part)
            work = max(scores_bytes(run, part), exchanged_bytes(run, part), _tile_bytes(run, part))
            yield more + (_attention_grown(run, part) if waits else 0.0) + work
            more += waiting - kept
    yield more
    if any(part.embedded_tokens and part.is_trained for part in stage):
        yield more + matrix * (look_up_width(run, stage) - waiting_look_up_width(run, stage))


def _attention_grown(run: Run, part: ModelPart) -> float:
    """By how much a layer has grown when its feed-forward network waits and its attention comes."""
    if not part.layer or not part.layer.repeats:
        return 0.0
    waiting = waiting_bytes(run, part) - waiting_bytes(run, part, is_attention=True)
    return waiting - feed_forward_bytes(run, part)


def _tile_bytes(run: Run, part: ModelPart) -> float:
    """What the backward of attention with relative positions holds: gradients of queries, keys and values in float32,
    three tiles of scores, and what finds the buckets of a tile, int64."""
    layer = part.layer
    if layer is None or not isinstance(layer.config, T5Config) or layer.config.position != "relative":
        return 0.0
    heads = layer.config.num_attention_heads / run.sizes.tp
    rows = run.micro_batch_size * layer.sequence / run.sizes.cp * heads
    tile = min(rows * layer.sequence / run.sizes.cp, MOST_SCORES)
    return 12 * (rows * layer.config.head_dim + tile) + _BUCKET_BYTES * tile / heads


def _weight_work(run: Run, stage: Stage) -> float:
    """The gradient of a weight before it is added to wider ones; of experts' it is made before in any case."""
    is_wider = is_widened(run)
    made = (weight_of(run, part) for part in stage if is_wider or (part.layer and part.layer.has_experts))
    return run.bytes_per_element * max(made, default=0.0)
