"""Dynamic context parallelism in the background: while a step runs, the next one's documents are planned and sent.

    main thread        reads batch k+1      trains on batch k                       reads batch k+2 ...
    this one's thread                       lengths, plan, documents of batch k+1

The thread talks over a process group of its own: two threads that share one would take each other's messages. The
loader stays with the main thread, whose generators and whose state are read when a checkpoint is saved.
"""

import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.context.balance import CostModel, DynamicContextConfig, RankGroup, StepPlan, group_sizes, plan
from lightning_megatron.context.document_exchange import (
    DocumentRoute,
    LoadedDocuments,
    PlannedMicrobatch,
    exchange_documents,
    loaded_documents,
)
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.pipeline.plans import training_plan
from lightning_megatron.pipeline.registry import microbatch_multiple
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.planner.balanced_batch import BalancedBatch
from lightning_megatron.trainer.step.batch_checks import batch_digest

# Batches whose contents are compared over the context-parallel ranks that read the same data.
_CHECKED_BATCHES = 2


@dataclass(frozen=True, eq=False)
class Routed:
    """Microbatches that this rank runs in a step."""

    microbatches: list[PlannedMicrobatch]
    step: BalancedBatch
    """Who runs which documents of the global batch."""
    num_rows: int
    """Rows of the global batch."""
    keys: frozenset[str]
    """Keys of the loader's batches."""


@dataclass(frozen=True)
class _BatchSummary:
    """Summary of the batch that a rank has read, for the other ranks of dp and cp."""

    lengths: tuple[int, ...]
    names: list[list[int]]
    rows: int
    schema: dict[str, str]
    """Dtypes by key."""
    digest: str


class DynamicContext:
    """Plans the steps of one fit, ahead of them. Every rank prepares and takes the same batches in the same order."""

    def __init__(
        self,
        config: DynamicContextConfig,
        mesh: Mesh,
        line: Axis,
        *,
        num_wanted: Callable[[], float],
        schedule_of: Callable[..., Schedule],
        device: torch.device,
    ) -> None:
        """`line` is dp x cp over host memory with a process group that nobody else uses.

        `num_wanted` returns how many batches of an epoch are trained on, `schedule_of` the schedule of so many
        `microbatches`.
        """
        multiple = math.lcm(config.microbatch_multiple, microbatch_multiple(schedule_of(microbatches=1)))
        self.config = replace(config, microbatch_multiple=multiple)
        self._mesh, self._line = mesh, line
        self._num_wanted, self._schedule_of = num_wanted, schedule_of
        self._is_pinned = device.type == "cuda"
        # Set before the first step.
        self.cost: CostModel | None = config.cost
        # The step that runs, or was the last.
        self.taken: BalancedBatch | None = None
        self._num_checked = 0
        # Plans by the number of the batch in its epoch.
        self._ready: dict[int, Future[Routed]] = {}
        self._tasks: queue.SimpleQueue[tuple[object, Future[Routed]] | None] = queue.SimpleQueue()
        # Error of the thread: after it the ranks no longer know where the others are.
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dynamic-context", daemon=True)
        self._thread.start()

    # --- of the main thread -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A new round of the loader begins; what was made ready and not taken is dropped."""
        self._ready.clear()

    def is_wanted(self, number: int) -> bool:
        """Whether a batch with this number in its epoch will be trained on, as far as is known."""
        return number < self._num_wanted()

    def prepare(self, number: int, batch: object) -> None:
        """Prepares a batch in the background. A later call with the same number replaces the batch."""
        future: Future[Routed] = Future()
        self._ready[number] = future
        self._tasks.put((batch, future))

    def take(self, number: int, batch: object) -> Routed:
        """Microbatches that this rank runs in place of a batch, waited for if need be.

        Raises what went wrong in the background, and RuntimeError for a batch that is none of the loader's.
        """
        found = self._ready.pop(number).result() if number in self._ready else None
        if found is None or not isinstance(batch, Mapping) or not found.keys <= batch.keys():
            planned = "nothing" if found is None else f"one of {', '.join(sorted(found.keys))}"
            got = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
            raise RuntimeError(
                f"training_step got batch {number} of its epoch, of {got}, and {planned} was planned; dynamic context "
                "parallelism takes the batches of one training dataloader, each a dict of tensors"
            )
        self._ready = {later: future for later, future in self._ready.items() if later > number}
        self.taken = found.step
        return found

    def stop(self, *, is_failed: bool) -> None:
        """Ends the thread; after a failure of this rank without waiting for ranks that may be gone."""
        self._tasks.put(None)
        self._ready.clear()
        # All ranks have prepared the same batches, so every exchange that was begun will end.
        self._thread.join(timeout=1.0 if is_failed else None)

    # --- of the background ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            batch, future = task
            try:
                if self._failure is not None:
                    raise self._failure
                future.set_result(self._route(batch))
            except BaseException as error:
                self._failure = error
                future.set_exception(error)

    def _route(self, batch: object) -> Routed:
        held = loaded_documents(batch)
        summaries: list[_BatchSummary] = collectives.gather_objects(self._summary(held), self._line)
        copies = self._mesh.cp.size
        _require_alike(summaries, copies)
        dp_batches = summaries[::copies]
        lengths = [length for dp_batch in dp_batches for length in dp_batch.lengths]
        planned = self._plan(lengths)
        # The schedule of a new number of microbatches is made here too, and not within the step.
        training_plan(self._schedule_of(microbatches=len(planned.slots)))
        first = sum(len(dp_batch.lengths) for dp_batch in dp_batches[: self._mesh.dp.rank])
        route = DocumentRoute.of(planned, [dp_batch.lengths for dp_batch in dp_batches], copies)
        found = exchange_documents(held, first, _names_of(dp_batches), route, self._line)
        if self._is_pinned:
            found = [
                replace(part, batch={key: value.pin_memory() for key, value in part.batch.items()}) for part in found
            ]
        step = BalancedBatch(lengths=tuple(lengths), plan=planned)
        return Routed(found, step, sum(dp_batch.rows for dp_batch in dp_batches), frozenset(held.schema))

    def _summary(self, held: LoadedDocuments) -> _BatchSummary:
        digest = ""
        if self._num_checked < _CHECKED_BATCHES:
            self._num_checked += 1
            digest = batch_digest(held.values)
        schema = {key: str(dtype) for key, dtype in held.schema.items()}
        return _BatchSummary(held.lengths, held.names_D2.tolist(), held.rows, schema, digest)

    def _plan(self, lengths: Sequence[int]) -> StepPlan:
        ranks = self._line.size
        if not lengths:
            return _plan_of_nothing(ranks, self.config)
        assert self.cost is not None
        return plan(lengths, ranks, self.cost, self.config, pp=self._mesh.pp.size)


def _plan_of_nothing(ranks: int, config: DynamicContextConfig) -> StepPlan:
    """Plan of a global batch without any document."""
    size = group_sizes(ranks, config)[0]
    slot = tuple(RankGroup(first, size, ()) for first in range(0, ranks, size))
    count = -(-config.min_microbatches // config.microbatch_multiple) * config.microbatch_multiple
    return StepPlan(ranks, (slot,) * count, 0.0, 0.0)


def _names_of(dp_batches: Sequence[_BatchSummary]) -> Tensor:
    """The names of all documents in the global batch, whose rows are in the order of dp ranks: int64 [D, 2]."""
    names, first_row = [], 0
    for dp_batch in dp_batches:
        names += [[first_row + row, number] for row, number in dp_batch.names]
        first_row += dp_batch.rows
    return torch.tensor(names, dtype=torch.int64).view(-1, 2)


def _require_alike(summaries: Sequence[_BatchSummary], copies: int) -> None:
    """Raises RuntimeError, on every rank, where batches differ that must not, or have other keys."""
    for first in range(0, len(summaries), copies):
        if any(one != summaries[first] for one in summaries[first : first + copies]):
            raise RuntimeError(
                f"the context-parallel ranks of data-parallel rank {first // copies} got different batches; they "
                "send its documents together and must read the same data: shard by "
                "trainer.strategy.data_parallel_rank and data_parallel_size, not by the global rank, and shuffle with "
                "a seed that all ranks share"
            )
    schemas = [one.schema for one in summaries]
    if any(schema != schemas[0] for schema in schemas):
        raise RuntimeError(
            f"data-parallel ranks got batches of different keys or dtypes: {schemas[::copies]}; documents go from "
            "one rank to another, so give all of them the same"
        )
