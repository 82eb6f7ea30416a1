"""The balancer: from the lengths of a step's documents to the plan that all ranks follow.

It runs ahead of a step, while training goes on. The search has one dial, how long a document may take: a document gets
the fewest ranks that keep it and the memory cap. A low dial cuts long documents over many ranks: it balances well and
communicates much. For each setting a tree of groups is grown and judged by its longest path; the best
is improved by changing the width of one document at a time, of that path or the slowest of all; only the best trees
become microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_megatron.context.balance.bound import fewest_microbatches, lower_bound, rounded_up
from lightning_megatron.context.balance.config import DynamicContextConfig, group_sizes
from lightning_megatron.context.balance.cost import CostModel
from lightning_megatron.context.balance.empty import without_empty_groups
from lightning_megatron.context.balance.microbatches import Limits, fewest_slots, microbatches
from lightning_megatron.context.balance.slots import SlotGroups, StepPlan, shortest_at_ends, step_seconds
from lightning_megatron.context.balance.tree import Tree, grow, slowest_documents
from lightning_megatron.context.balance.widths import PlannedDocuments, Widths, dials

# Number of trees that become microbatches.
NUM_FINALISTS = 2
# The search improves a tree until its candidates have placed this many documents, which bounds its time.
PLACED_DOCUMENTS = 6144
MAX_CHANGES = 48


def plan(lengths: Sequence[int], ranks: int, cost: CostModel, config: DynamicContextConfig, *, pp: int = 1) -> StepPlan:
    """Plan of a step with documents of these lengths in tokens, on a line of dp x cp ranks.

    It is equal on every rank for equal input. `pp`: the ranks of a pipeline, see `step_seconds`.
    Raises ValueError where there is no document, where one is empty, and where one is longer than the memory cap times
    the widest group.
    """
    sizes = group_sizes(ranks, config)
    _require_plannable(lengths, sizes, config)
    lengths = [int(length) for length in lengths]
    bound = lower_bound(lengths, ranks, cost, config, pp=pp)
    search = _Search(lengths, ranks, cost, config, pp, PlannedDocuments.of(lengths, sizes, cost, config))
    drafts = search.drafts(good=bound * (1 + config.balance_tolerance))
    found: list[tuple[float, int, tuple[SlotGroups, ...]]] = []
    for draft in drafts[:NUM_FINALISTS]:
        made = microbatches(draft.tree, lengths, cost, draft.limits)
        # Where sending takes longer than computing, more ranks are no gain and a group stays empty.
        joined = without_empty_groups(made, draft.tree.sizes, lengths)
        for slots in [joined] if joined == made else [joined, made]:
            slots = shortest_at_ends(slots, lengths, cost) if pp > 1 else slots
            found.append((step_seconds(slots, lengths, cost, pp), most_tokens_per_rank(slots, lengths), slots))
    seconds, _, slots = min(found, key=lambda entry: entry[:2])
    return StepPlan(ranks, slots, seconds, bound)


def most_tokens_per_rank(slots: Sequence[SlotGroups], lengths: Sequence[int]) -> int:
    """Most tokens of a microbatch on a rank, rounded up."""
    return max(-(-sum(lengths[d] for d in group.documents) // group.size) for slot in slots for group in slot)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A tree, and an estimate of its plan's time."""

    seconds: float
    widths: Widths
    tree: Tree
    limits: Limits


@dataclass(frozen=True, slots=True)
class _Search:
    lengths: list[int]
    ranks: int
    cost: CostModel
    config: DynamicContextConfig
    pp: int
    documents: PlannedDocuments

    def drafts(self, good: float) -> list[_Draft]:
        """Drafts, the best first; the search ends at one within `good` seconds."""
        fewest = fewest_microbatches(self.lengths, self.ranks, self.config)
        found: list[_Draft] = []
        for dial in dials(self.documents, self.ranks, fewest, self.pp):
            widths = self.documents.widths(dial)
            is_known = any(
                (draft.widths == widths).all() and draft.limits.min_microbatches == dial.num_microbatches
                for draft in found
            )
            if not is_known:
                found.append(self._draft(widths, dial.num_microbatches))
                if found[-1].seconds <= good:
                    return [found[-1]]
        found.sort(key=lambda draft: draft.seconds)
        return [self._improved(found[0], good), *found[1:]]

    def _draft(self, widths: Widths, num_microbatches: int) -> _Draft:
        """Draft with these widths, in at least num_microbatches microbatches."""
        documents = self.documents
        tree = grow(
            documents.by_level(widths),
            documents.seconds_by_level,
            documents.sizes[::-1],
            self.ranks,
            self.lengths,
            self.cost,
        )
        # More microbatches than documents would leave some empty.
        fewest = fewest_microbatches(self.lengths, self.ranks, self.config)
        most = max(fewest, rounded_up(len(self.lengths), self.config.microbatch_multiple))
        limits = Limits(self.config.max_tokens_per_rank, min(num_microbatches, most), self.config.microbatch_multiple)
        count = rounded_up(max(limits.min_microbatches, fewest_slots(tree, self.lengths, limits)), limits.multiple)
        slowest = tree.slowest_seconds + count * self.cost.fixed_seconds
        longest = max(slowest / count, documents.longest_seconds(widths) + self.cost.fixed_seconds)
        return _Draft(slowest + (self.pp - 1) * longest, widths, tree, limits)

    def _improved(self, draft: _Draft, good: float) -> _Draft:
        """The draft after changes of single documents on its longest path, each of which makes it faster."""
        num_left = min(MAX_CHANGES, PLACED_DOCUMENTS // len(self.lengths))
        is_better = True
        while is_better and draft.seconds > good:
            is_better = False
            for widths in self.documents.neighbours(draft.widths, slowest_documents(draft.tree)):
                if num_left == 0:
                    return draft
                num_left -= 1
                changed = self._draft(widths, draft.limits.min_microbatches)
                if changed.seconds < draft.seconds:
                    draft, is_better = changed, True
                    break
        return draft


def _require_plannable(lengths: Sequence[int], sizes: Sequence[int], config: DynamicContextConfig) -> None:
    """Raises ValueError that names all documents that cannot be planned, and the way out."""
    if not len(lengths):
        raise ValueError("a step without documents cannot be planned; give at least one length")
    if empty := [document for document, length in enumerate(lengths) if length < 1]:
        raise ValueError(f"documents {_some(empty)} have no token; leave them out of the step")
    cap, widest = config.max_tokens_per_rank, sizes[-1]
    if long := [f"{document} ({length} tokens)" for document, length in enumerate(lengths) if length > cap * widest]:
        raise ValueError(
            f"documents {_some(long)} are longer than max_tokens_per_rank ({cap}) times the widest group ({widest} "
            f"ranks), {cap * widest} tokens; cut them, or set max_tokens_per_rank to at least "
            f"{-(-max(lengths) // widest)}"
        )


def _some(things: Sequence[object]) -> str:
    """The first five things, and the number of further ones."""
    first = ", ".join(map(str, things[:5]))
    return f"{first} and {len(things) - 5} more" if len(things) > 5 else first
