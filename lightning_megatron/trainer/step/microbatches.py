"""Microbatches of a batch, with the rows, ranks and documents that each of them stands for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_megatron.context.document_exchange import PlannedMicrobatch
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.pipeline import microbatches


@dataclass(frozen=True, eq=False)
class StepBatch:
    """One microbatch of a step."""

    batch: Any
    rows: float
    """Samples of the global batch that it stands for."""
    first_sample: int
    """Index of its first row in the global batch."""
    group_index: int
    """Index of the ranks that run it within dp, of which random numbers of the user's code are a function."""
    num_copies: float
    """Ranks that run it together, each with the whole loss; infinite where it counts for nothing."""
    context_group: Axis | None = None
    """Ranks that run it together, where they are not those of cp."""
    documents: Tensor | None = None
    """Row in the global batch and number in the row of each document, [D, 2], where documents were sent here."""


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """Number of microbatches of a data-parallel rank's batch: always the same, or by its rows."""

    number: int = 1
    """Microbatches of a batch."""
    size: int = 0
    """Rows of a microbatch, from which their number follows; 0 leaves it to `number`."""

    def count_of(self, rows: int) -> int:
        """Microbatches of a batch of so many rows."""
        return -(-rows // self.size) if self.size else self.number

    @property
    def is_whole(self) -> bool:
        """Whether no batch is cut."""
        return self.number == 1 and not self.size


def cut_evenly(
    batch: Any, num_microbatches: int, mesh: Mesh, first_row: int | None, num_copies: float
) -> list[StepBatch]:
    """Microbatches of a data-parallel rank's batch, cut along its rows; `first_row` is the index of its first row in
    the global batch, where it is known."""
    parts = microbatches.split(batch, num_microbatches)
    rows = [rows_of(part) for part in parts]
    first = mesh.dp.rank * sum(rows) if first_row is None else first_row
    firsts = [first + sum(rows[:i]) for i in range(len(rows))]
    return [
        StepBatch(part, count, start, mesh.dp.rank, num_copies)
        for part, count, start in zip(parts, rows, firsts, strict=True)
    ]


def as_planned(parts: Sequence[PlannedMicrobatch], num_rows: int, mesh: Mesh) -> list[StepBatch]:
    """The microbatches of a plan. The `num_rows` samples of the global batch are spread evenly over ranks and slots:
    documents of one sample may be in several."""
    share = num_rows / (mesh.axis("dp+cp").size * max(1, len(parts)))
    return [
        StepBatch(
            part.batch,
            rows=share * part.group.size,
            first_sample=0,
            group_index=part.group.first,
            num_copies=part.group.size,
            context_group=mesh.context_group(part.group.size),
            documents=part.names_D2,
        )
        for part in parts
    ]


def rows_of(batch: Any) -> int:
    """Rows of a batch; 1 where its tensors do not agree or there are none."""
    try:
        return max(1, microbatches.num_rows(batch))
    except ValueError:
        return 1
