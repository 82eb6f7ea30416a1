"""Finds whether a loss or a logged value couples the rows of a batch, as in-batch negatives do.

Where each row has a term of its own in a loss, L(a, b) + L(a', b') = L(a, b') + L(a', b) for any numbers a and a' of
the first half of the rows and b and b' of the others. The numbers are those that the last weights computed, and for
what is logged those of the batch too, as masks; the loss is that of the operations after them, recorded in a step and
run again.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice, product
from math import prod
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_megatron.trainer.step.first_steps import NUM_CHECKED
from lightning_megatron.trainer.step.operation_record import (
    OperationRecord,
    Value,
    history,
    run_again,
    tensors_of_rows,
    widened,
)
from lightning_megatron.trainer.step.user_step import loss_reduction_of, says_what_it_counts

ROUNDING, EPSILON = 1e-6, 1e-12
"""Parts of the largest change of a loss, and of the loss, up to which a difference is taken for rounding."""
_MAX_ORDERS, _MAX_OPERATIONS = 64, 1000
# With two rows, a single draw shows that a loss is of the harder one in a third of all cases.
_NUM_DRAWS = 12

Numbers = dict[Value, Tensor]
Name = TypeVar("Name", bound=Hashable)


class RowCheck:
    """Warns, once, of a loss and logged values that couple rows where a step runs in several parts of a global batch.

    `own_ranks`: ranks that compute the same rows. `step`: name of the step.
    """

    def __init__(self, module: LightningModule, own_ranks: tuple[int, ...], step: str) -> None:
        self._module, self._own_ranks, self._step = module, own_ranks, step
        # Rows of the batches that were looked at; none once no look is left.
        self._rows: list[Tensor] = []
        # What a mask leaves out shows in some batches alone, and in training each look takes of the step's time.
        self._num_left = NUM_CHECKED if step != "training_step" else int(module.automatic_optimization)

    def recording(self, batch: Any, num_rows: int, num_parts: int) -> AbstractContextManager[OperationRecord | None]:
        """Records the step of so many rows that runs inside the block; None where it is not looked at."""
        if not self._num_left or num_parts == 1 or num_rows < 2:
            return nullcontext()
        # Tokens of prompts and the like, which are attributes of a module.
        attributes = (one for module in self._module.modules() for one in vars(module).values())
        tensors = (one for one in attributes if isinstance(one, Tensor))
        own = tensors_of_rows(batch, num_rows)
        is_alike = [one.shape[1:] for one in own] == [one.shape[1:] for one in self._rows]
        # One batch may have a mask that is the same in all of its rows.
        self._rows = [torch.cat(rows) for rows in (zip(own, self._rows, strict=True) if is_alike else zip(own))]
        given = zip(own, self._rows, strict=True)
        return OperationRecord(num_rows, (*self._module.buffers(), *tensors), self._own_ranks, given)

    def check(
        self,
        record: OperationRecord | None,
        loss: Tensor | None,
        output: Any,
        logged: Mapping[str, Tensor],
        by_rows: Collection[str],
        num_parts: int,
    ) -> None:
        """Warns where the loss, [], or one of the `logged` means and sums of a recorded step couples rows.

        A loss is not told of where `output` says what it counts, nor anything where each part may stand for itself.
        `by_rows`: names of means that count by their rows, as no masked one should.
        """
        if record is None or not self._num_left:
            return
        self._num_left -= 1
        if not self._num_left:
            self._rows = []
        if loss_reduction_of(output) == "mean":
            # Each part may stand for itself.
            return
        # None is the loss.
        numbers: dict[str | None, Tensor] = dict(logged.items())
        if loss is not None:
            numbers[None] = loss
        coupling = coupling_rows(record, numbers, by_rows)
        parts = f"each of the {num_parts} parts of a global batch (microbatches of data-parallel ranks) has its own"
        if None in coupling and not says_what_it_counts(output):
            rank_zero_warn(
                "the loss of training_step seems to couple the rows of its batch (in-batch negatives, hardest rows, "
                f"statistics of the batch, a root of a mean), of which {parts}: the mean over parts is then not the "
                "loss of one device. Use num_microbatches=1, and gather what couples rows by self.all_gather(rows, "
                "sync_grads=True); where each part may stand for itself, return "
                '{"loss": loss, "loss_reduction": "mean"}',
                category=UserWarning,
            )
        others = [name for name in coupling if name is not None]
        # The loss may be logged too.
        if names := [name for name in others if loss is None or logged[name].data_ptr() != loss.data_ptr()]:
            self._num_left, self._rows = 0, []
            rank_zero_warn(
                f"what {self._step} logs as {', '.join(names)} seems to be no mean over rows (a maximum, a root, an "
                f"exponential, a ratio, a mean over a mask, a statistic of the batch), and {parts}: what is logged of "
                "the parts' values is then not the value of one device. Log what it is computed from, or a "
                "torchmetrics.Metric; or give reduce_fx, or as batch_size what it is a mean over",
                category=UserWarning,
            )


def coupling_rows(
    record: OperationRecord, numbers: Mapping[Name, Tensor], with_batch: Collection[Name] = ()
) -> list[Name]:
    """Finds the names of numbers, [] each, that couple rows, as a loss with in-batch negatives does; those of
    `with_batch` by what the batch holds too, as a mean over a mask of it does.

    A number is left out where this is not known: where the operations after the last weights cannot run again with
    other numbers, or not in double precision, where they have more numbers than a record keeps, and where rows may lie
    in the numbers of a network in more than `_MAX_ORDERS` ways.
    """
    values = {name: value for name, number in numbers.items() if (value := record.value_of(number)) is not None}
    look = partial(_coupling, num_rows=record.num_rows)
    counted = {name: value for name, value in values.items() if name in with_batch}
    looked_at = _looked_at(counted, partial(look, is_with_batch=True))
    # What cannot run with other rows may with other numbers of the network.
    looked_at |= _looked_at({name: value for name, value in values.items() if name not in looked_at}, look)
    return [name for name in numbers if looked_at.get(name)]


def _looked_at(values: Mapping[Name, Value], look: Callable[..., set[Name] | None]) -> dict[Name, bool]:
    """Whether numbers couple rows, by the look at several of the same sources; without those that cannot run again."""
    found: dict[Name, bool] = {}
    by_sources: dict[frozenset[Value], dict[Name, Value]] = {}
    for name, value in values.items():
        sources, _ = history([value])
        by_sources.setdefault(frozenset(one for one in sources if not one.is_given), {})[name] = value
    for alike in by_sources.values():
        together, runs = look(alike), alike
        if together is None and len(alike) > 1:
            # One that cannot run again says nothing of the others.
            runs = {name: one for name, one in alike.items() if look({name: one}, num_draws=1) is not None}
            together = look(runs)
        if together is not None:
            found |= {name: name in together for name in runs}
    return found


def _coupling(
    values: Mapping[Name, Value], *, num_rows: int, is_with_batch: bool = False, num_draws: int = _NUM_DRAWS
) -> set[Name] | None:
    """Finds the names of numbers that couple rows, all of the same sources; None where not all can run again."""
    sources, operations = history(values.values())
    if any(source.numbers is None for source in sources) or len(operations) > _MAX_OPERATIONS:
        return None
    try:
        numbers = {source: widened(source.numbers) for source in sources if source.numbers is not None}
        # In a batch the rows lie in the first dim.
        num_ways = {source: int(is_with_batch) if source.is_given else None for source in numbers}
        ways = {source: list(islice(_first_rows(numbers[source], num_rows), most)) for source, most in num_ways.items()}
        orders = {source: found for source, found in ways.items() if found}
        if not orders or prod(map(len, orders.values())) > _MAX_ORDERS:
            return set()
        run = partial(run_again, list(values.values()), operations)
        unchanged = run(numbers)
        couples = torch.ones(len(values), dtype=torch.bool)
        for masks in product(*orders.values()):
            first_rows = dict(zip(orders, masks, strict=True))
            differs = torch.zeros_like(couples)
            for draw in range(num_draws):
                differs |= _differ(run, unchanged, numbers, first_rows, draw)
                if differs[couples].all():
                    break
            couples &= differs
            if not couples.any():
                break
    # Other numbers may lead operations anywhere, and a look that only warns ends no run.
    except Exception:
        return None
    return {name for name, is_found in zip(values, couples.tolist(), strict=True) if is_found}


def _differ(run: Callable[[Numbers], Tensor], own: Tensor, numbers: Numbers, first_rows: Numbers, draw: int) -> Tensor:
    """Whether each result, bool [N], changes with all rows by other than the sum of its changes with the first half of
    the rows and with the others; `own` has the results [N] of the numbers as they are."""
    # Of its own: torch's default generator shuffles the rows of the next epoch, on all ranks alike.
    generator = torch.Generator().manual_seed(draw)
    others = {
        one: _others(numbers[one], generator) if one.rows is None else _other_rows(one.rows, len(numbers[one]), draw)
        for one in first_rows
    }
    first = {one: torch.where(mask, others[one], numbers[one]) for one, mask in first_rows.items()}
    rest = {one: torch.where(mask, numbers[one], others[one]) for one, mask in first_rows.items()}
    changes = torch.stack([run(numbers | changed) - own for changed in (others, first, rest)])
    largest = changes.abs().amax(0)
    return (changes[0] - changes[1] - changes[2]).abs() > ROUNDING * largest + EPSILON * own.abs()


def _others(numbers: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers of the same size, in other rows and elsewhere."""
    if not numbers.numel():
        return numbers
    noise = torch.randn(numbers.shape, dtype=numbers.dtype, device=numbers.device, generator=generator)
    scale = numbers.std(correction=0)
    return numbers + noise * torch.where(scale > 0, scale, 1.0)


def _other_rows(rows: Tensor, num_rows: int, draw: int) -> Tensor:
    """So many of the rows, of all tensors of a batch the same: where each has as many valid targets, it stays so."""
    places = torch.randint(len(rows), (num_rows,), generator=torch.Generator().manual_seed(draw))
    return widened(rows[places.to(rows.device)])


def _first_rows(numbers: Tensor, num_rows: int) -> Iterator[Tensor]:
    """Masks of the first half of the rows, for each way in which numbers of rows may lie in the first dim, or in the
    second of three (sequences first): k of a row side by side, and that again for further batches (tokens of views)."""
    for dim in range(2 if numbers.ndim > 2 else min(numbers.ndim, 1)):
        length = numbers.shape[dim]
        each = 0 if length % num_rows else length // num_rows
        places = torch.arange(length, device=numbers.device).view(-1, *(1 for _ in numbers.shape[dim + 1 :]))
        for size in range(each, 0, -1):
            if each % size == 0:
                yield places // size % num_rows < num_rows // 2
