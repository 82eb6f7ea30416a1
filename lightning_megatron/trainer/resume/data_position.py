"""Position of training in its data: loaders that count what they have handed out, and resume from there.

what the loader reads                         how a resumed run comes to the next batch
own state (`state_dict`, `load_state_dict`)   the loader's own, restored
indices of a dataset                          the samplers are rerun, their first batches are not loaded
a dataset that streams, with own state        the dataset's own, restored (without workers)
anything else                                 the first batches are reread and dropped
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, islice
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader, IterableDataset

from lightning_megatron.comm import rng
from lightning_megatron.mesh import Axis
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.trainer.dynamic_context.prefetch import DynamicContext
from lightning_megatron.trainer.resume import rng_state
from lightning_megatron.trainer.resume.data_indices import (
    AllStates,
    Indices,
    Stateful,
    all_states,
    explicit_generators,
    reading,
    reads_indices,
    set_all_states,
    set_explicit_states,
)
from lightning_megatron.trainer.step.uneven_inputs import JoinedIterable, Watch, unwatched

LoaderPosition = dict[str, Any]
"""Where a loader is, as plain data."""

INDICES, OWN_STATE, READING = "the indices of its samplers", "a state of its own", "reading what comes first again"


@runtime_checkable
class MergesStates(Protocol):
    """A loader whose states on all data-parallel ranks merge into one, from which any number of ranks goes on."""

    def merged_state(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """State that each data-parallel rank's loader loads, merged from the states that all of them saved."""
        ...


class Reader:
    """Hands out a loader's batches and knows its position.

    In a resumed run the first round begins with its first batch, and not as soon as Lightning asks for an iterator: by
    then Lightning has restored its counters, and the default generators are those of the checkpoint.

    With `ahead` each batch is read while the one before it is handed out. What counts is what was handed out.
    """

    def __init__(
        self,
        loader: Any,
        dp: Axis,
        epoch: Callable[[], int],
        start: "Start | None",
        ahead: DynamicContext | None = None,
        watch: Watch = unwatched,
    ) -> None:
        """`watch` raises where other data-parallel ranks have more batches or fewer."""
        self.loader = loader
        self._ahead = ahead
        self._watch = watch
        # Positions before each batch that was read ahead and perhaps not trained on, by its number in the epoch.
        self._positions: dict[int, LoaderPosition] = {}
        self.indices: Indices | None = None
        # What is read, whose workers run.
        self.source = loader
        if reads_indices(loader):
            self.indices = Indices(loader, dp, epoch)
            self.source = reading(loader, self.indices)
        self._dp = dp
        self._epoch_now = epoch
        self._start = start
        self._epoch = -1
        # Batches of this round; a short loader next to a long one goes round several times in an epoch.
        self._handed = 0
        # Batches of this epoch.
        self.in_epoch = 0
        # States of the generators when this round began.
        self._round_start: AllStates | None = None
        # This loader's position before the last batch, where Lightning asks for one more than it trains on.
        self._before: LoaderPosition | None = None
        self._resumed: LoaderPosition | None = None
        # Position at which the first round of a resumed run began.
        self._begun_from: LoaderPosition | None = None
        # Whether the last round came to its end.
        self._is_exhausted = False
        # Whether somebody holds an iterator that has not begun.
        self._is_requested = False
        self._begun: Iterator[Any] | None = None

    @property
    def batch_samples(self) -> int | None:
        """Samples of a batch over all data-parallel ranks, where the loader has a batch size."""
        size = getattr(self.loader, "batch_size", None) if self.indices is None else self.indices.batch_size
        return size * self._dp.size if isinstance(size, int) else None

    # --- handing out ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if self._start is None or self._start.is_over:
            return self._count(self._begin())
        if self._begun_from is not None and not self._is_exhausted:
            self._resumed, self._begun_from = self._begun_from, None
        self._is_requested = True
        return self._hand_out_late(self._start)

    def _hand_out_late(self, start: "Start") -> Iterator[Any]:
        is_training = self in start.readers
        with start.as_saved() if is_training else nullcontext():
            # Lightning would have begun them in this order: each draws from the same generators.
            for reader in start.readers if is_training else [self]:
                reader.begin_late()
            batches, self._begun = self._begun, None
            assert batches is not None
            first = list(islice(batches, 1))
        yield from first
        yield from batches

    def begin_late(self) -> None:
        """Begins the requested round, if it has not begun."""
        if not self._is_requested:
            return
        self._is_requested = False
        if self._resumed is None:
            self._begun = self._count(self._begin())
        else:
            self._begun_from, self._resumed = self._resumed, None
            self._begun = self._go_on(self._begun_from)

    def _begin(self) -> Iterator[Any]:
        if (epoch := self._epoch_now()) != self._epoch:
            self._epoch, self.in_epoch = epoch, 0
        self._handed, self._is_exhausted = 0, False
        self._positions.clear()
        self._round_start = all_states(self.loader) if self.kind == READING else None
        return self._watch(iter(self.source), number=0)

    def _count(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self._ahead is not None:
            yield from self._count_read_ahead(batches, self._ahead)
            return
        while True:
            if sized_len(self.loader) is None:
                self._before = self.position() | {"fetch": rng_state.states()}
            try:
                batch = next(batches)
            except StopIteration:
                self._is_exhausted = True
                return
            self._handed += 1
            self.in_epoch += 1
            yield batch

    def _count_read_ahead(self, batches: Iterator[Any], ahead: DynamicContext) -> Iterator[Any]:
        """Batches counted as they are handed out, while the next one is read already."""
        ahead.begin()
        read: deque[Any] = deque()
        while True:
            # The batch that is handed out, and the one after it.
            while len(read) < 2 and not self._is_exhausted and (not read or ahead.is_wanted(self.in_epoch + len(read))):
                number = self.in_epoch + len(read)
                before = {"handed": self._handed + len(read), "in_epoch": number, "fetch": rng_state.states()}
                self._positions.setdefault(number, self.position() | before)
                try:
                    batch = next(batches)
                except StopIteration:
                    self._is_exhausted = True
                    break
                ahead.prepare(number, batch)
                read.append(batch)
            if not read:
                return
            self._handed += 1
            self.in_epoch += 1
            # Lightning may hold one batch more than it has trained on.
            self._positions = {num: one for num, one in self._positions.items() if num >= self.in_epoch - 2}
            yield read.popleft()

    # --- where it is ------------------------------------------------------------------------------------------------

    def position(self) -> LoaderPosition:
        """Current position of the loader."""
        own = self._own()
        return {
            "kind": self.kind,
            "batch_samples": self.batch_samples,
            "data_parallel_size": self._dp.size,
            **self._order(),
            "has_workers": self._epoch >= 0 and bool(getattr(self.loader, "persistent_workers", False)),
            "handed": self._handed,
            "in_epoch": self.in_epoch,
            "has_begun": self._epoch == self._epoch_now(),
            "round_start": self._round_start if self.indices is None else self.indices.round_start,
            "explicit": [generator.get_state() for generator in explicit_generators(self.loader)],
            "own": None if own is None else copy.deepcopy(own.state_dict()),
        }

    def _order(self) -> LoaderPosition:
        if self.indices is None:
            return {"order": None, "is_followed": False}
        return {"order": self.indices.order, "is_followed": self.indices.is_followed}

    def position_after(self, trained: int) -> LoaderPosition:
        """Position of the loader after `trained` batches of this epoch: Lightning may hold one that it has not trained
        on."""
        if self._resumed is not None:
            return self._in_own_batches(self._resumed)
        if trained in self._positions:
            return self._positions[trained]
        position = self.position() if self.in_epoch <= trained or self._before is None else self._before
        if self.kind == OWN_STATE:
            return position
        # A step that failed has taken a batch, which is to be repeated.
        ahead = min(max(0, position["in_epoch"] - trained), position["handed"])
        return position | {"handed": position["handed"] - ahead, "in_epoch": position["in_epoch"] - ahead}

    def position_at_end(self) -> LoaderPosition:
        """Position of the loader at the end of its epoch."""
        position = self.position() if self._resumed is None else self._in_own_batches(self._resumed)
        return position | {"handed": 0, "in_epoch": 0, "has_begun": False, "round_start": None}

    def _in_own_batches(self, position: LoaderPosition) -> LoaderPosition:
        """A checkpoint's position as this run counts: in its batches, in the order that it follows."""
        return position | {
            "batch_samples": self.batch_samples,
            "data_parallel_size": self._dp.size,
            **self._order(),
            "handed": self.batches_of(position, position["handed"]),
            "in_epoch": self.batches_of(position, position["in_epoch"]),
        }

    @property
    def kind(self) -> str:
        """Way in which this loader comes to its next batch in a resumed run."""
        if self.indices is not None:
            return INDICES
        return OWN_STATE if self._own() is not None else READING

    def _own(self) -> Stateful | None:
        if isinstance(self.loader, Stateful):
            return self.loader
        dataset = getattr(self.loader, "dataset", None)
        # Workers have copies of it.
        if isinstance(dataset, IterableDataset) and isinstance(dataset, Stateful) and self.loader.num_workers == 0:
            return dataset
        return None

    # --- going on ---------------------------------------------------------------------------------------------------

    def go_on_from(self, position: LoaderPosition, *, is_equal_everywhere: bool) -> None:
        """Makes the next round begin at a saved position. Raises ConfigurationError where it cannot be found."""
        if position["kind"] != self.kind:
            raise ConfigurationError(
                f"the checkpoint's training loader goes on by {position['kind']}, and this run's "
                f"({type(self.loader).__name__}) by {self.kind}; resume with the loader that it was saved with"
            )
        is_moved = position["data_parallel_size"] != self._dp.size or position["batch_samples"] != self.batch_samples
        own = self._own()
        if own is not None:
            if position["data_parallel_size"] != self._dp.size and not is_equal_everywhere:
                raise ConfigurationError(_differs(position, self._dp.size))
        elif self.indices is not None:
            # A run that followed another one's order is not in that of its samplers, not even on the same dp size.
            is_other = is_moved or position.get("is_followed", False)
            self.indices.follow(position["order"], is_moved=is_other, is_within=position["handed"] > 0)
        elif is_moved and position["handed"]:
            raise ConfigurationError(_differs(position, self._dp.size))
        self._resumed = position

    def batches_of(self, position: LoaderPosition, batches: int) -> int:
        """Number of this loader's batches that hold the samples of so many batches of a checkpoint's loader."""
        old, new, what = position["batch_samples"], self.batch_samples, "samples"
        if self.indices is not None and (old is None or new is None):
            # Each rank reads a batch of a batch sampler of the user's.
            old, new, what = position["data_parallel_size"], self._dp.size, "batches of its batch sampler"
        if old == new or old is None or new is None:
            return batches
        if batches * old % new:
            raise ConfigurationError(
                f"the checkpoint was saved after {batches * old} {what} of its epoch, where no batch of {new} {what} "
                f"(over all data-parallel ranks) begins; resume with batches of {old}, or of a number that divides "
                f"{batches * old}"
            )
        return batches * int(old) // int(new)

    def _go_on(self, position: LoaderPosition) -> Iterator[Any]:
        handed = self.batches_of(position, position["handed"])
        if (own := self._own()) is not None and position["own"]:
            own.load_state_dict(copy.deepcopy(position["own"]))
        if not position.get("has_begun", handed > 0):
            return self._go_on_with_a_round(position)
        self._epoch, self._is_exhausted = self._epoch_now(), False
        self._handed, self.in_epoch = handed, self.batches_of(position, position["in_epoch"])
        self._round_start = position["round_start"]
        if self.indices is not None and position["round_start"] is None:
            # No index was drawn, but the user's generator has given the seed for workers.
            set_explicit_states(self.loader, position["explicit"])
        if self.indices is not None:
            self.indices.skip(handed, position["handed"] * (position["batch_samples"] or 0), position["round_start"])
            batches = self._begin_workers()
        elif own is not None:
            batches = self._begin_workers()
        else:
            batches = self._reread(handed)
        if position.get("fetch") is not None and self._ahead is not None:
            self._positions = {self.in_epoch: self._in_own_batches(position)}
            return self._count(self._with_first_fetched(batches, position))
        counted = self._count(batches)
        if position.get("fetch") is None:
            return counted
        # The checkpoint was saved after a batch, and this one was fetched before that batch was trained on.
        with rng_state.forked():
            rng_state.set_states(position["fetch"])
            first = list(islice(counted, 1))
        return chain(first, counted)

    def _with_first_fetched(self, batches: Iterator[Any], position: LoaderPosition) -> Iterator[Any]:
        """The batches, the first of them read with the random states of its first reading."""
        with rng_state.forked():
            rng_state.set_states(position["fetch"])
            first = list(islice(batches, 1))
        yield from first
        yield from batches

    def _go_on_with_a_round(self, position: LoaderPosition) -> Iterator[Any]:
        if self.indices is not None and position["has_workers"]:
            # Workers that were there already cost no draw of a seed; these are new.
            self.indices.begin_from = rng_state.states()
        if self.kind != OWN_STATE:
            set_explicit_states(self.loader, position["explicit"])
        batches = self._count(self._begin())
        return self._next_round_if_empty(batches) if self.kind == OWN_STATE else batches

    def _next_round_if_empty(self, batches: Iterator[Any]) -> Iterator[Any]:
        """A round, or the next one where it is empty: the state was that of a round at its end."""
        first = list(islice(batches, 1))
        yield from first or self._count(self._begin())
        yield from batches

    def _begin_workers(self) -> Iterator[Any]:
        """Begins to read; torch draws a seed for workers that the run which was not interrupted drew long ago."""
        with rng_state.forked(), _seeding_workers_by_default(self.source):
            seed = rng.key(torch.initial_seed(), "workers", self._epoch, self.in_epoch, self._dp.rank)
            torch.default_generator.manual_seed(seed & ((1 << 63) - 1))
            batches: Iterator[Any] = iter(self.source)
        return self._watch(batches, number=self._handed)

    def _reread(self, handed: int) -> Iterator[Any]:
        rank_zero_info(
            f"{type(self.loader).__name__} cannot tell where it was: {handed} batches are read and dropped. A loader "
            "or a dataset with state_dict and load_state_dict goes on at once"
        )
        assert self._round_start is not None
        with rng_state.forked():
            set_all_states(self.loader, self._round_start)
            batches: Iterator[Any] = iter(self.source)
            for _ in islice(batches, handed):
                pass
        return self._watch(batches, number=self._handed)


class Start(Protocol):
    """State that a resumed run starts from."""

    readers: list[Reader]
    """Readers of its training loaders, in their order."""
    is_over: bool
    """Whether training has resumed."""

    def as_saved(self) -> AbstractContextManager[None]:
        """A context with the default generators of the checkpoint; what they become inside stays."""
        ...


class PositionedIterable:
    """Stand-in for a training loader that is no DataLoader, by which Lightning reads it."""

    def __init__(self, reader: Reader) -> None:
        vars(self).update(getattr(reader.loader, "__dict__", {}))
        self.reader = reader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.reader)

    def __len__(self) -> int:
        return len(self.reader.loader)

    def state_dict(self) -> dict[str, Any]:
        """The loader's own state, from which plain Lightning resumes; here each data-parallel rank's position counts.
        Lightning saves loaders that have this method, and warns that a run goes on within an epoch of any other."""
        loader = self.reader.loader
        return copy.deepcopy(loader.state_dict()) if isinstance(loader, Stateful) else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        return


class PositionedDataLoader(PositionedIterable, DataLoader[Any]):  # type: ignore[misc]
    """Stand-in for a training DataLoader, with all its attributes, by which Lightning reads it."""

    @property
    def _iterator(self) -> Any:
        # By this name Lightning finds the workers that it ends after a fit.
        return getattr(self.reader.source, "_iterator", None)

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self.reader.source._iterator = iterator


def positioned(
    loader: Any,
    dp: Axis,
    epoch: Callable[[], int],
    start: Start | None,
    ahead: DynamicContext | None = None,
    watch: Watch = unwatched,
) -> PositionedIterable:
    """The loader as one that knows its position."""
    reader = Reader(loader, dp, epoch, start, ahead, watch)
    return PositionedDataLoader(reader) if isinstance(loader, DataLoader) else PositionedIterable(reader)


def unwrapped(loader: Any) -> Any:
    """The user's loader, where a CombinedLoader of the user keeps what an earlier run put in."""
    if isinstance(loader, JoinedIterable):
        loader = loader.uneven
    return loader.reader.loader if isinstance(loader, PositionedIterable) else loader


@contextmanager
def _seeding_workers_by_default(loader: Any) -> Iterator[None]:
    """Takes the generator off a DataLoader: its sampler draws from it whenever workers read ahead."""
    if not isinstance(loader, DataLoader):
        yield
        return
    own, loader.generator = loader.generator, None
    try:
        yield
    finally:
        loader.generator = own


def _differs(position: LoaderPosition, size: int) -> str:
    what = "a state of its own on each data-parallel rank" if position["own"] else "no state"
    return (
        f"the checkpoint lies within an epoch of a training loader with {what}, saved with data-parallel "
        f"size {position['data_parallel_size']} and batches of {position['batch_samples']} samples; this run has "
        f"data-parallel size {size}. Resume with the same sizes, resume a checkpoint from the end of an epoch, or give "
        "the loader (or its dataset) a state_dict that is the same on all data-parallel ranks, as the samples consumed "
        "by all of them are"
    )
