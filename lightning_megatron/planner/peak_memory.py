"""When a pipeline rank holds the most, where microbatches differ: under dynamic context parallelism.

The order of a schedule is walked: a microbatch is held from its forward to the last part of its backward. What is held
grows with tokens, so of the moments those matter that no other equals in both the tokens held and the tokens at work.
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
    """A microbatch at work on a rank that keeps others."""

    run: Run
    """In which all microbatches are like the one at work."""
    line: int
    """Place of the rank among dp x cp."""
    kept: tuple[float, ...]
    """Microbatches like that one whose tokens are as many as those that are kept, by chunk."""
    split_steps: tuple[SplitBackwardStep, ...] = ()
    """The same where halves of backwards are put off."""


def of_group(run: Run, group: RankGroup) -> Run:
    """The run of which all microbatches are like that of a group of the run's balanced batch."""
    assert run.balanced is not None
    return of_documents(run, run.balanced.lengths_of(group), group.size)


def of_documents(run: Run, documents: tuple[int, ...], size: int) -> Run:
    """The run of which all microbatches have documents of these lengths, over so many of the ranks dp x cp."""
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
        # It is under a schedule, be it alone.
        cuts_by_rows=True,
    )


def moments_of(run: Run, rank: int, line: int | None = None) -> list[Moment]:
    """Of a pipeline rank, over all ranks that share its stages or on the one at that place among them."""
    assert run.balanced is not None
    step = run.balanced
    lines = step.lines if line is None else {line: step.plan.groups_of(line)}
    moments = [
        (line, groups, *moment)
        for line, groups in lines.items()
        for moment in walked(run.schedule, rank, [step.rows_of(group) for group in groups])
    ]
    # What a report tells of activations, whichever moment is the peak: put-off halves count as whole.
    fullest: dict[int, tuple[float, ...]] = {}
    for own, _, half, _ in moments:
        fullest[own] = max(fullest.get(own, ()), tuple(map(add, half.kept, half.waiting)), key=sum)
    found: list[Moment] = []
    most: dict[tuple[Kind, int] | None, int] = {}
    for line, groups, half, microbatch in sorted(moments, key=lambda one: -sum(one[2].kept + one[2].waiting)):
        rows = step.rows_of(groups[microbatch])
        place = (half.kind, half.chunk) if splits_backward(run.schedule) else None
        if rows <= most.get(place, 0):
            continue
        most[place] = rows
        alike = replace(
            of_group(run, groups[microbatch]), held_tokens=sum(sum(step.lengths_of(group)) for group in groups)
        )
        kept, waiting = (tuple(own / rows for own in held) for held in (half.kept, half.waiting))
        split_steps = () if place is None else (replace(half, kept=kept, waiting=waiting, flying=half.flying / rows),)
        if split_steps:
            kept = tuple(held / rows for held in fullest[line])
        found.append(Moment(run=alike, line=line, kept=kept, split_steps=split_steps))
    return found
