"""Exchange of documents between the ranks that read them and the ranks that run them, under a dynamic context plan.

It runs after a plan is made and before its step. The dp x cp ranks of a stage are a line. The cp ranks of a
data-parallel rank have read the same rows, so they share the sending: one of them sends each document, to every rank of
its group.

D documents, X tokens of all of them, W bytes of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.context.balance.slots import RankGroup, StepPlan
from lightning_megatron.context.documents import NO_DOCUMENT, documents_of
from lightning_megatron.mesh import Axis

SEGMENTS = "segments"
TokenValues = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class LoadedDocuments:
    """The documents of a data-parallel rank's batch; `loaded_documents` finds them."""

    lengths: tuple[int, ...]
    names_D2: Tensor
    """Row of each document in the batch and its number in the row, -1 where it is the full row: int64."""
    rows: int
    """Number of rows of the batch."""
    index_X: Tensor
    """Index of each token in the flattened batch: int64."""
    values: TokenValues
    """Values of all tokens by key, each [B, S]."""

    @property
    def schema(self) -> dict[str, torch.dtype]:
        return {key: value.dtype for key, value in self.values.items()}


@dataclass(frozen=True, eq=False)
class PlannedMicrobatch:
    """The microbatch that a rank runs in one slot of a plan."""

    batch: TokenValues
    """Values [1, X] by key, with the segments of its documents; one token of no document if it has none."""
    names_D2: Tensor
    """Row of each document in the global batch and its number there: int64."""
    group: RankGroup


def loaded_documents(batch: object) -> LoadedDocuments:
    """Documents of a loader's batch: those that its `segments` mark, or each row as one.

    Raises ValueError where the batch is anything but a dict of tensors [batch, sequence].
    """
    values = _values_of(batch)
    rows, sequence = next(iter(values.values())).shape
    segments = values.pop(SEGMENTS, None)
    if segments is None:
        names = torch.stack([torch.arange(rows), torch.full((rows,), NO_DOCUMENT)], dim=1)
        return LoadedDocuments((sequence,) * rows, names, rows, torch.arange(rows * sequence), values)
    documents = documents_of(segments)
    starts = torch.tensor([0, *documents.lengths], dtype=torch.int64).cumsum(0)[:-1]
    names = torch.stack([documents.rows_X[starts], documents.numbers_X[starts]], dim=1)
    return LoadedDocuments(documents.lengths, names, rows, documents.index_X, values)


def _values_of(batch: object) -> TokenValues:
    rule = "dynamic context parallelism takes a batch apart: it must be a dict of tensors [batch, sequence]"
    if not isinstance(batch, Mapping) or not batch:
        raise ValueError(f"{rule}, and this is {type(batch).__name__}; give one, as `collate_tokens` does")
    shape = next((value.shape for value in batch.values() if isinstance(value, Tensor) and value.dim() == 2), None)
    faults = []
    for key, value in batch.items():
        what = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        if not isinstance(value, Tensor) or value.shape != shape:
            faults.append(f"{key!r} is {what}")
    if faults:
        wanted = "" if shape is None else f" like the first, {tuple(shape)}"
        raise ValueError(f"{rule}{wanted}, and {', '.join(faults)}; leave out what is not said of each token")
    return {str(key): value.detach().cpu() for key, value in batch.items()}


@dataclass(frozen=True)
class DocumentRoute:
    """Senders and receivers of all documents, equal on every rank of the line."""

    plan: StepPlan
    lengths: tuple[int, ...]
    """Lengths of all documents in tokens."""
    senders: tuple[int, ...]
    """Rank of the line that sends each document."""

    @staticmethod
    def of(plan: StepPlan, lengths_by_dp: Sequence[Sequence[int]], copies: int) -> DocumentRoute:
        """Route of the documents of all data-parallel ranks in turn, each held by `copies` ranks."""
        placed = sorted(document for slot in plan.slots for group in slot for document in group.documents)
        assert placed == list(range(sum(map(len, lengths_by_dp)))), "a plan has each document once"
        senders = [
            dp_rank * copies + document % copies
            for dp_rank, lengths in enumerate(lengths_by_dp)
            for document in range(len(lengths))
        ]
        return DocumentRoute(plan, tuple(length for lengths in lengths_by_dp for length in lengths), tuple(senders))

    def sent(self, sender: int, receiver: int) -> list[int]:
        """Documents that one rank sends another, in the order in which the other runs them."""
        return [document for document in self._run_by(receiver) if self.senders[document] == sender]

    def num_tokens(self, sender: int, receiver: int) -> int:
        """Number of tokens that one rank sends another."""
        return sum(self.lengths[document] for document in self.sent(sender, receiver))

    def received_by(self, receiver: int) -> list[int]:
        """Documents that a rank receives, in the order in which their tokens arrive."""
        ranks = range(self.plan.num_ranks)
        return [document for sender in ranks for document in self.sent(sender, receiver)]

    def _run_by(self, rank: int) -> list[int]:
        return [document for group in self.plan.groups_of(rank) for document in group.documents]


def exchange_documents(
    held: LoadedDocuments, first_document: int, names_D2: Tensor, route: DocumentRoute, line: Axis
) -> list[PlannedMicrobatch]:
    """Microbatches of this rank, one for each slot. Collective over the line.

    `first_document` is the number of this rank's first document among all, `names_D2` are the names of all.
    """
    ranks = range(line.size)
    indices = [_tokens_of(held, [d - first_document for d in route.sent(line.rank, rank)]) for rank in ranks]
    given = [len(index) for index in indices]
    taken = [route.num_tokens(rank, line.rank) for rank in ranks]
    rows_XW = _as_bytes(held.values)[held.index_X[torch.cat(indices)]]
    came = _from_bytes(collectives.all_to_all_v(rows_XW, line, given, taken), held.schema)
    starts: dict[int, int] = {}
    start = 0
    for document in route.received_by(line.rank):
        starts[document] = start
        start += route.lengths[document]
    groups = route.plan.groups_of(line.rank)
    return [_microbatch(group, starts, route.lengths, came, names_D2) for group in groups]


def _microbatch(
    group: RankGroup, starts: Mapping[int, int], lengths: Sequence[int], came: TokenValues, names_D2: Tensor
) -> PlannedMicrobatch:
    documents = list(group.documents)
    names = names_D2[documents]
    if not documents:
        batch = {key: values.new_zeros(1, 1) for key, values in came.items()}
        return PlannedMicrobatch(batch | {SEGMENTS: torch.full((1, 1), NO_DOCUMENT)}, names, group)
    index = torch.cat([torch.arange(starts[d], starts[d] + lengths[d]) for d in documents])
    batch = {key: values[index].unsqueeze(0) for key, values in came.items()}
    own = torch.tensor([lengths[document] for document in documents])
    batch[SEGMENTS] = torch.arange(len(documents)).repeat_interleave(own).unsqueeze(0)
    return PlannedMicrobatch(batch, names, group)


def _tokens_of(held: LoadedDocuments, documents: Sequence[int]) -> Tensor:
    """Indices of some documents' tokens among all loaded ones: int64."""
    bounds = torch.tensor([0, *held.lengths]).cumsum(0).tolist()
    spans = [torch.arange(bounds[document], bounds[document + 1]) for document in documents]
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)


def _as_bytes(values: TokenValues) -> Tensor:
    """All values of each token of a batch as bytes: uint8 [B * S, W]."""
    columns = [value.contiguous().reshape(-1, 1).view(torch.uint8) for value in values.values()]
    return torch.cat(columns, dim=1)


def _from_bytes(rows_XW: Tensor, schema: Mapping[str, torch.dtype]) -> TokenValues:
    values, column = {}, 0
    for key, dtype in schema.items():
        width = dtype.itemsize
        # Only a tensor of its own is sure to be aligned for the wider dtype.
        values[key] = rows_XW[:, column : column + width].flatten().clone().view(dtype)
        column += width
    return values
