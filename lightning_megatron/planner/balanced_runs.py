"""Runs that stand for one group of a balanced batch, and the ranks that hold the most (dynamic context parallelism)."""

from dataclasses import replace

from lightning_megatron.context.balance import RankGroup
from lightning_megatron.pipeline.registry import order_of
from lightning_megatron.pipeline.schedule import Kind
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.run import Run, RunSettings


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


def fullest_line(run: RunSettings, pp_rank: int) -> int:
    """Index, among the dp x cp ranks of a pipeline rank, of that which holds the most tokens at a time; 0 where
    microbatches are equal."""
    batch = run.balanced
    if batch is None:
        return 0
    order, most = order_of(run.schedule)[pp_rank], dict.fromkeys(batch.lines, 0)
    for line, groups in batch.lines.items():
        held = 0
        for action in order:
            tokens = batch.tokens_of(groups[action.microbatch])
            if action.kind is Kind.FORWARD:
                held += tokens
                most[line] = max(most[line], held)
            elif action.kind is not Kind.BACKWARD_INPUT:
                held -= tokens
    return max(most, key=most.__getitem__)
