"""Moments at which a pipeline rank may reach its peak memory, where microbatches differ (dynamic context parallelism).

The order of a schedule is walked: a microbatch is held from its forward to the last part of its backward. Memory grows
with tokens, so a moment matters if no other has as many tokens both held and in the current microbatch.
"""

from dataclasses import dataclass, replace
from operator import add

from lightning_megatron.context.balance import RankGroup
from lightning_megatron.pipeline.schedule import Kind
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.pipeline_load import splits_backward
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.split_backward import SplitBackwardStep, walked


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A microbatch that runs on a rank, and the saved microbatches of that rank."""

    run: Run
    """A run in which all microbatches are like the current one."""
    line: int
    """Index of the rank within dp x cp."""
    saved: tuple[float, ...]
    """Saved microbatches of each chunk, in units of the current one's tokens."""
    split_steps: tuple[SplitBackwardStep, ...] = ()
    """The step of a split backward, in units of the current microbatch's tokens."""


def of_group(run: Run, group: RankGroup) -> Run:
    """A run whose microbatches are all like that of one group of the balanced batch."""
    assert run.balanced is not None
    return of_documents(run, run.balanced.lengths_of(group), group.size)


def of_documents(run: Run, documents: tuple[int, ...], size: int) -> Run:
    """A run whose microbatches all have documents of these lengths, over so many of the dp x cp ranks."""
    sizes = replace(
        run.sizes,
        cp=size,
        cp_ulysses=size if run.sizes.context_groups_by_heads else 1,
        context_groups=(),
        context_groups_by_heads=False,
    )
    return replace(
        run,
        balanced=None,
        sizes=sizes,
        lengths=SequenceLengths(sequence=max(sum(documents), 1), are_packed=True, documents=documents),
        micro_batch_size=1,
        global_batch_size=sizes.dp * run.num_microbatches,
        # Even a single microbatch runs under a schedule.
        cuts_by_rows=True,
    )


def moments_of(run: Run, rank: int, line: int | None = None) -> list[Moment]:
    """Moments of a pipeline rank, over all ranks that share its stages, or on the one with index `line` among them."""
    assert run.balanced is not None
    batch = run.balanced
    lines = batch.lines if line is None else {line: batch.plan.groups_of(line)}
    moments = [
        (line, groups, *moment)
        for line, groups in lines.items()
        for moment in walked(run.schedule, rank, [batch.tokens_of(group) for group in groups])
    ]
    # Reported activations, whichever moment is the peak: between dgrad and wgrad a microbatch counts as saved.
    fullest: dict[int, tuple[float, ...]] = {}
    for own, _, step, _ in moments:
        fullest[own] = max(fullest.get(own, ()), tuple(map(add, step.saved, step.waiting)), key=sum)
    found: list[Moment] = []
    most: dict[tuple[Kind, int] | None, int] = {}
    for line, groups, step, microbatch in sorted(moments, key=lambda one: -sum(one[2].saved + one[2].waiting)):
        tokens = batch.tokens_of(groups[microbatch])
        key = (step.kind, step.chunk) if splits_backward(run.schedule) else None
        if tokens <= most.get(key, 0):
            continue
        most[key] = tokens
        alike = replace(
            of_group(run, groups[microbatch]), held_tokens=sum(sum(batch.lengths_of(group)) for group in groups)
        )
        saved, waiting = (tuple(own / tokens for own in held) for held in (step.saved, step.waiting))
        split_steps: tuple[SplitBackwardStep, ...] = ()
        if key is not None:
            split_steps = (replace(step, saved=saved, waiting=waiting, in_flight=step.in_flight / tokens),)
            saved = tuple(held / tokens for held in fullest[line])
        found.append(Moment(run=alike, line=line, saved=saved, split_steps=split_steps))
    return found
