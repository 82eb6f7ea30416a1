"""When a pipeline rank holds the most, where microbatches differ: under dynamic context parallelism.

The order of a schedule is walked: a microbatch is held from its forward to the last part of its backward. What is held
grows with tokens, so of the moments those matter that no other equals in both the tokens held and the tokens at work.
"""

from dataclasses import dataclass, replace

from lightning_megatron.context.balance import Group
from lightning_megatron.pipeline.choice import order_of
from lightning_megatron.pipeline.schedule import Kind
from lightning_megatron.planner.anatomy import Texts
from lightning_megatron.planner.run import Run

_LAST = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
_WORKING = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A microbatch at work on a rank that keeps others."""

    run: Run
    # in which all microbatches are like the one at work
    line: int
    # place of the rank among dp x cp
    kept: tuple[float, ...]
    # microbatches like that one whose tokens are as many as those that are kept, by chunk


def of_group(run: Run, group: Group) -> Run:
    """The run of which all microbatches are like that of a group of the run's balanced batch."""
    assert run.balanced is not None
    return of_documents(run, run.balanced.lengths_of(group), group.size)


def of_documents(run: Run, documents: tuple[int, ...], size: int) -> Run:
    """The run of which all microbatches have documents of these lengths, over so many of the ranks dp x cp."""
    sizes = replace(
        run.sizes,
        cp=size,
        cp_inner=size if run.sizes.context_groups_by_heads else 1,
        context_groups=(),
        context_groups_by_heads=False,
    )
    return replace(
        run,
        balanced=None,
        sizes=sizes,
        texts=Texts(sequence=max(sum(documents), 1), are_packed=True, documents=documents),
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
    walked = [(line, groups, *moment) for line, groups in lines.items() for moment in _walked(run, rank, groups)]
    found: list[Moment] = []
    most = 0
    for line, groups, held, microbatch in sorted(walked, key=lambda moment: -sum(moment[2])):
        rows = step.rows_of(groups[microbatch])
        if rows <= most:
            continue
        most = rows
        alike = replace(
            of_group(run, groups[microbatch]), held_tokens=sum(sum(step.lengths_of(group)) for group in groups)
        )
        found.append(Moment(run=alike, line=line, kept=tuple(own / rows for own in held)))
    return found


def _walked(run: Run, rank: int, groups: tuple[Group, ...]) -> list[tuple[tuple[int, ...], int]]:
    """At each start of a compute the tokens that are held, by chunk, and the microbatch that is at work."""
    assert run.balanced is not None
    rows = [run.balanced.rows_of(group) for group in groups]
    sizes = run.sizes
    own = [number for number in range(sizes.num_stages) if sizes.pp_rank_of(number) == rank]
    held, found = [0] * len(own), []
    for action in order_of(run.schedule)[rank]:
        chunk = own.index(action.stage)
        held[chunk] += rows[action.microbatch] * (action.kind is Kind.FORWARD)
        if action.kind in _WORKING:
            found.append((tuple(held), action.microbatch))
        held[chunk] -= rows[action.microbatch] * (action.kind in _LAST)
    return found
