"""Samples of text that is read as it comes, of sources that are too large to be prepared first.

From texts to the samples of a global batch. Documents are read in order, put in a random order window by window, and
dealt to as many lanes as samples of a batch can be shared by: each to the lane that has had the fewest characters. Each
lane cuts or packs its own documents, and each gives equally many samples of every batch, the first lane the first ones.
So a global batch is a function of the texts alone, and who makes it needs to tokenize the documents of its lanes only.

    texts  ─►  windows, shuffled  ─►  lane 0   ─►  sample 0 of every batch      replica 0
                                      lane 1   ─►  sample 1
                                      lane 2   ─►  sample 2                     replica 1
                                      lane 3   ─►  sample 3

A reader has some of the lanes. Its state is where the texts are, and what its lanes have not told yet. Readers with
other lanes go on from the states of all readers together: they read on from the earliest place, and a lane takes no
document that it had before. Such states are taken now and then; what comes behind one is made again. The texts have no
end: behind the last comes the first, in another order.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from lightning_megatron.data.batch_ramp import BatchRamp
from lightning_megatron.data.chance import random_order
from lightning_megatron.data.lanes import Lane, Sample
from lightning_megatron.data.token_parts import BadDocument, encoded
from lightning_megatron.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lightning_megatron.data.sources import TextStream

LONGEST_CHARACTERS = 1 << 20
"""Longer documents are cut into parts of so many characters, each of which is a document of its own."""

NUM_BETWEEN = 32
"""Batches from one state to the next."""

_NUM_DEALT = 16
"""Documents that are dealt, at least, before lanes are looked at: tokenizers are faster with several."""

_MANY_DROPPED = 100
"""Documents in a row without a sample, from which on one asks whether any other is left."""

State = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """A document and the lane that it goes to."""

    number: int
    lane: int
    text: str


class Dealer:
    """All documents, in an order that depends on the texts, the window and the seed alone."""

    def __init__(self, stream: "TextStream", *, num_lanes: int, window: int, seed: int) -> None:
        """`window` is how many documents are put in a random order together; 1 keeps their own."""
        if window < 1:
            raise ValueError(f"window ({window}) must be at least 1, which keeps the order of the documents")
        self.num_lanes = num_lanes
        self._stream = stream
        self._window = window
        self._seed = seed
        self.load_state_dict(
            {"texts": None, "pass": 0, "window": 0, "dealt": 0, "number": 0, "characters": [0] * num_lanes}
        )

    def __next__(self) -> Dealt:
        return next(self._documents)

    def take_bad(self, fault: str) -> None:
        """Names a document that turned out to be bad, or refuses it, as the stream does."""
        self._stream.take_bad(fault)

    @property
    def num_passes(self) -> int:
        """Passes over the text that have begun behind the first."""
        return self._pass

    def state_dict(self) -> State:
        return {
            "texts": self._texts_state,
            "pass": self._pass,
            "window": self._num_windows,
            "dealt": self._num_dealt,
            "number": self.number,
            "characters": [characters for characters, _ in sorted(self._lanes, key=lambda entry: entry[1])],
        }

    def load_state_dict(self, state: State) -> None:
        # Where the texts were before this window; none: at the beginning.
        self._texts_state: Any = state["texts"]
        self._pass: int = state["pass"]
        # Before this one, of all passes.
        self._num_windows: int = state["window"]
        # Of this window.
        self._num_dealt: int = state["dealt"]
        # Of the document that comes next.
        self.number: int = state["number"]
        self._lanes: list[tuple[int, int]] = [(characters, lane) for lane, characters in enumerate(state["characters"])]
        heapq.heapify(self._lanes)
        self._documents = self._deal()

    def _deal(self) -> Iterator[Dealt]:
        while True:
            is_empty = self._texts_state is None
            texts = self._stream.texts(self._pass, self._texts_state)
            while window := self._read(texts):
                is_empty = False
                behind = self._stream.state_dict()
                order = np.arange(len(window))
                if self._window > 1:
                    order = random_order(len(window), self._seed, "window", self._num_windows)
                for place in order[self._num_dealt :].tolist():
                    self._num_dealt += 1
                    yield self._dealt(window[place])
                self._texts_state = behind
                self._num_windows += 1
                self._num_dealt = 0
            if is_empty:
                raise ValueError("the stream holds no document, and a corpus needs at least one")
            self._pass, self._texts_state = self._pass + 1, None

    def _read(self, texts: Iterator[str | None]) -> list[str]:
        """The next `window` documents, long ones cut; fewer at the end of the texts, none behind it."""
        some = islice((text for text in texts if text), self._window)
        return [text[i : i + LONGEST_CHARACTERS] for text in some for i in range(0, len(text), LONGEST_CHARACTERS)]

    def _dealt(self, text: str) -> Dealt:
        characters, lane = self._lanes[0]
        # One more, for the end of text.
        heapq.heapreplace(self._lanes, (characters + len(text) + 1, lane))
        self.number += 1
        return Dealt(number=self.number - 1, lane=lane, text=text)


class StreamReader:
    """The samples of some lanes."""

    def __init__(
        self, dealer: Dealer, tokenizer: Tokenizer, make_lane: Callable[[], Lane], lanes: Sequence[int], ramp: BatchRamp
    ) -> None:
        self._dealer = dealer
        self._tokenizer = tokenizer
        self._lanes = {lane: make_lane() for lane in lanes}
        # Of each lane: the number of the first document that it has not had.
        self._seen = dict.fromkeys(lanes, 0)
        # In a row: documents of which nothing will be in a sample.
        self._num_dropped = 0
        self._ramp = ramp
        self.consumed_samples = 0

    def batch(self) -> list[Sample]:
        """The samples of these lanes of the next global batch, lane after lane."""
        num_of_lane = self._ramp.size_at(self.consumed_samples) // self._dealer.num_lanes
        while any(lane.num_ready < num_of_lane for lane in self._lanes.values()):
            self._read()
        samples = []
        for name, lane in self._lanes.items():
            first = self.consumed_samples + name * num_of_lane
            samples += [lane.take(first + i) for i in range(num_of_lane)]
        self.consumed_samples += num_of_lane * self._dealer.num_lanes
        return samples

    def _read(self) -> None:
        dealt = [next(self._dealer) for _ in range(max(_NUM_DEALT, self._dealer.num_lanes))]
        own = [one for one in dealt if one.lane in self._lanes and one.number >= self._seen[one.lane]]
        for one, ids in zip(own, encoded(self._tokenizer, [one.text for one in own]), strict=True):
            if isinstance(ids, BadDocument):
                self._dealer.take_bad(f"{ids.why} (it begins with {one.text[:40]!r})")
                self._num_dropped += 1
                continue
            is_kept = self._lanes[one.lane].add(np.array([*ids, self._tokenizer.end_of_text], dtype=np.int64))
            self._num_dropped = 0 if is_kept else self._num_dropped + 1
        # As many as in two passes, of a small corpus more: by chance a lane may have long ones alone for a while.
        dealer = self._dealer
        if self._num_dropped >= _MANY_DROPPED and self._num_dropped * dealer.num_passes >= 2 * dealer.number:
            raise ValueError(
                f"the last {self._num_dropped} documents of the stream gave no sample: they are empty, bad, or longer"
                " than a row and dropped; raise sequence_length, or set long_documents to 'split'"
            )

    def state_dict(self) -> State:
        number = self._dealer.number
        return {
            "dealer": self._dealer.state_dict(),
            "lanes": {
                str(name): {"seen": max(self._seen[name], number), "lane": lane.state_dict()}
                for name, lane in self._lanes.items()
            },
        }

    def load_state_dicts(self, consumed_samples: int, states: Sequence[State]) -> None:
        """Goes on after the samples consumed, from the states of readers that had all lanes together."""
        lanes = {int(name): lane for state in states for name, lane in state["lanes"].items()}
        require_lanes(states, self._dealer.num_lanes)
        if lanes.keys() != set(range(self._dealer.num_lanes)):
            raise ValueError(
                f"the state of a stream has the lanes {sorted(lanes)} of {self._dealer.num_lanes}: go on"
                " from a checkpoint that holds the states of all replicas, as those of MegatronStrategy do"
            )
        self.consumed_samples = consumed_samples
        dealer = min((state["dealer"] for state in states), key=itemgetter("number"))
        self._dealer.load_state_dict(dealer)
        for name, own in self._lanes.items():
            own.load_state_dict(lanes[name]["lane"])
            self._seen[name] = lanes[name]["seen"]


def require_lanes(states: Sequence[State], num_lanes: int) -> None:
    """Raises ValueError unless the texts were dealt to so many lanes where the states were taken."""
    for state in states:
        if (found := len(state["dealer"]["characters"])) != num_lanes:
            raise ValueError(
                f"the checkpoint's stream was dealt to {found} lanes, and this run has {num_lanes}, one for each sample"
                " that batches of all sizes share; go on with the same global_batch_size and batch_ramp, or start anew"
                " from the checkpoint's weights"
            )


@dataclass(frozen=True, kw_only=True)
class StreamStart:
    """Where readers go on: from states that were taken after some samples, behind those consumed since."""

    state_samples: int = 0
    states: tuple[State, ...] = ()
    """Of readers that had all lanes together; none: from the beginning."""
    consumed_samples: int = 0


Part = tuple[list[Sample], State | None] | ValueError
"""Of a batch the samples of some lanes, and now and then the state before it; or what is wrong with the text."""


class StreamedBatches(IterableDataset[Part]):
    """Of each of `num_batches` global batches the samples of some lanes; of every 32nd the state before it too.

    Each worker of a loader has its share of the lanes. Workers come in turn, so the parts of a batch follow each other.
    A ValueError about the text comes as one of them, the last: raised in a worker, it would end in its traceback.
    """

    def __init__(
        self,
        make_reader: Callable[[Sequence[int]], StreamReader],
        lanes: Sequence[int],
        ramp: BatchRamp,
        num_batches: int,
        start: StreamStart,
    ) -> None:
        self.make_reader = make_reader
        self.lanes = lanes
        self.ramp = ramp
        self.num_batches = num_batches
        self.start = start

    def __iter__(self) -> Iterator[Part]:
        try:
            yield from self._parts()
        except ValueError as error:
            yield error

    def _parts(self) -> Iterator[Part]:
        worker = get_worker_info()
        rank, count = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        first, last = (len(self.lanes) * i // count for i in (rank, rank + 1))
        reader = self.make_reader(self.lanes[first:last])
        if self.start.states:
            reader.load_state_dicts(self.start.state_samples, self.start.states)
        while reader.consumed_samples < self.start.consumed_samples:
            reader.batch()
        number = self.ramp.num_batches(reader.consumed_samples)
        for i in range(number, number + self.num_batches):
            state = reader.state_dict() if i % NUM_BETWEEN == 0 else None
            yield reader.batch(), state
