"""Streaming: samples of text that is read while it is trained on, from sources too large to prepare first.

From texts to the samples of a global batch. Documents are read in order, shuffled window by window, and assigned to
token packers: each document to the packer that has had the fewest characters. Each packer cuts or packs its own
documents and gives equally many samples of every batch, the first packer the first ones. So a global batch is a
function of the texts alone, and a process tokenizes only the documents of its own packers.

    texts  ─►  windows, shuffled  ─►  packer 0   ─►  sample 0 of every batch      dp rank 0
                                      packer 1   ─►  sample 1
                                      packer 2   ─►  sample 2                     dp rank 1
                                      packer 3   ─►  sample 3

A reader has some of the packers. Its state is the position in the texts, and what its packers have not emitted yet.
Readers with other packers resume from the states of all readers together: they read on from the earliest position, and
a packer takes no document that it had before. Such states are taken now and then; what follows one is recomputed. The
texts have no end: after the last comes the first, in another order.
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
from lightning_megatron.data.collate import Sample
from lightning_megatron.data.corpus_shards import BadDocument, encoded
from lightning_megatron.data.seeded_random import random_order
from lightning_megatron.data.token_packers import TokenPacker
from lightning_megatron.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lightning_megatron.data.sources import TextStream

LONGEST_CHARACTERS = 1 << 20
"""Most characters of a document; longer ones are cut into parts, each of which is a document of its own."""

NUM_BETWEEN = 32
"""Batches from one saved state to the next."""

_NUM_ASSIGNED = 16
"""Fewest documents that are assigned before packers are checked: tokenizers are faster with several."""

_MANY_DROPPED = 100
"""Documents in a row without a sample after which the reader checks whether any other is left."""

State = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class AssignedDocument:
    """A document and the packer that it goes to."""

    number: int
    packer: int
    text: str


class DocumentAssigner:
    """Assigns documents to token packers, in an order that depends on the texts, the window and the seed alone."""

    def __init__(self, stream: "TextStream", *, num_packers: int, window: int, seed: int) -> None:
        """`window` is the number of documents that are shuffled together; 1 preserves their order."""
        if window < 1:
            raise ValueError(f"window ({window}) must be at least 1, which keeps the order of the documents")
        self.num_packers = num_packers
        self._stream = stream
        self._window = window
        self._seed = seed
        self.load_state_dict(
            {"texts": None, "pass": 0, "window": 0, "assigned": 0, "number": 0, "characters": [0] * num_packers}
        )

    def __next__(self) -> AssignedDocument:
        return next(self._documents)

    def take_bad(self, fault: str) -> None:
        """Logs a document that turned out to be bad, or refuses it, as the stream does."""
        self._stream.take_bad(fault)

    @property
    def num_passes(self) -> int:
        """Epochs of the text after the first that have begun."""
        return self._pass

    def state_dict(self) -> State:
        return {
            "texts": self._texts_state,
            "pass": self._pass,
            "window": self._num_windows,
            "assigned": self._num_assigned,
            "number": self.number,
            "characters": [characters for characters, _ in sorted(self._packers, key=lambda entry: entry[1])],
        }

    def load_state_dict(self, state: State) -> None:
        # Position of the texts before this window; None: at the beginning.
        self._texts_state: Any = state["texts"]
        self._pass: int = state["pass"]
        # Before this one, of all passes.
        self._num_windows: int = state["window"]
        # Of this window.
        self._num_assigned: int = state["assigned"]
        # Of the document that comes next.
        self.number: int = state["number"]
        self._packers: list[tuple[int, int]] = [
            (characters, packer) for packer, characters in enumerate(state["characters"])
        ]
        heapq.heapify(self._packers)
        self._documents = self._assign()

    def _assign(self) -> Iterator[AssignedDocument]:
        while True:
            is_empty = self._texts_state is None
            texts = self._stream.texts(self._pass, self._texts_state)
            while window := self._read(texts):
                is_empty = False
                after_window = self._stream.state_dict()
                order = np.arange(len(window))
                if self._window > 1:
                    order = random_order(len(window), self._seed, "window", self._num_windows)
                for index in order[self._num_assigned :].tolist():
                    self._num_assigned += 1
                    yield self._assigned_document(window[index])
                self._texts_state = after_window
                self._num_windows += 1
                self._num_assigned = 0
            if is_empty:
                raise ValueError("the stream holds no document, and a corpus needs at least one")
            self._pass, self._texts_state = self._pass + 1, None

    def _read(self, texts: Iterator[str | None]) -> list[str]:
        """The next `window` documents, long ones cut; fewer at the end of the texts, none after it."""
        some = islice((text for text in texts if text), self._window)
        return [text[i : i + LONGEST_CHARACTERS] for text in some for i in range(0, len(text), LONGEST_CHARACTERS)]

    def _assigned_document(self, text: str) -> AssignedDocument:
        characters, packer = self._packers[0]
        # One more, for the end of text.
        heapq.heapreplace(self._packers, (characters + len(text) + 1, packer))
        self.number += 1
        return AssignedDocument(number=self.number - 1, packer=packer, text=text)


class StreamReader:
    """Reads the documents of some packers and gives their samples."""

    def __init__(
        self,
        assigner: DocumentAssigner,
        tokenizer: Tokenizer,
        make_packer: Callable[[], TokenPacker],
        packers: Sequence[int],
        ramp: BatchRamp,
    ) -> None:
        self._assigner = assigner
        self._tokenizer = tokenizer
        self._packers = {packer: make_packer() for packer in packers}
        # Of each packer: the number of the first document that it has not had.
        self._seen = dict.fromkeys(packers, 0)
        # In a row: documents of which nothing will be in a sample.
        self._num_dropped = 0
        self._ramp = ramp
        self.consumed_samples = 0

    def batch(self) -> list[Sample]:
        """The samples that these packers give to the next global batch, packer after packer."""
        num_of_packer = self._ramp.size_at(self.consumed_samples) // self._assigner.num_packers
        while any(packer.num_ready < num_of_packer for packer in self._packers.values()):
            self._read()
        samples = []
        for name, packer in self._packers.items():
            first = self.consumed_samples + name * num_of_packer
            samples += [packer.take(first + i) for i in range(num_of_packer)]
        self.consumed_samples += num_of_packer * self._assigner.num_packers
        return samples

    def _read(self) -> None:
        assigned = [next(self._assigner) for _ in range(max(_NUM_ASSIGNED, self._assigner.num_packers))]
        own = [one for one in assigned if one.packer in self._packers and one.number >= self._seen[one.packer]]
        for one, ids in zip(own, encoded(self._tokenizer, [one.text for one in own]), strict=True):
            if isinstance(ids, BadDocument):
                self._assigner.take_bad(f"{ids.why} (it begins with {one.text[:40]!r})")
                self._num_dropped += 1
                continue
            is_used = self._packers[one.packer].add(np.array([*ids, self._tokenizer.end_of_text], dtype=np.int64))
            self._num_dropped = 0 if is_used else self._num_dropped + 1
        # As many as in two passes, of a small corpus more: a packer may happen to get long ones alone for a while.
        assigner = self._assigner
        if self._num_dropped >= _MANY_DROPPED and self._num_dropped * assigner.num_passes >= 2 * assigner.number:
            raise ValueError(
                f"the last {self._num_dropped} documents of the stream gave no sample: they are empty, bad, or longer"
                " than a row and dropped; raise sequence_length, or set long_documents to 'split'"
            )

    def state_dict(self) -> State:
        number = self._assigner.number
        return {
            "assigner": self._assigner.state_dict(),
            "packers": {
                str(name): {"seen": max(self._seen[name], number), "packer": packer.state_dict()}
                for name, packer in self._packers.items()
            },
        }

    def load_state_dicts(self, consumed_samples: int, states: Sequence[State]) -> None:
        """Resumes after the samples consumed, from the states of readers that together had all packers."""
        packers = {int(name): packer for state in states for name, packer in state["packers"].items()}
        require_packers(states, self._assigner.num_packers)
        if packers.keys() != set(range(self._assigner.num_packers)):
            raise ValueError(
                f"the state of a stream has the packers {sorted(packers)} of {self._assigner.num_packers}: go on"
                " from a checkpoint that holds the states of all data-parallel ranks, as those of MegatronStrategy do"
            )
        self.consumed_samples = consumed_samples
        assigner = min((state["assigner"] for state in states), key=itemgetter("number"))
        self._assigner.load_state_dict(assigner)
        for name, own in self._packers.items():
            own.load_state_dict(packers[name]["packer"])
            self._seen[name] = packers[name]["seen"]


def require_packers(states: Sequence[State], num_packers: int) -> None:
    """Raises ValueError unless the texts were assigned to so many packers where the states were taken."""
    for state in states:
        if (found := len(state["assigner"]["characters"])) != num_packers:
            raise ValueError(
                f"the checkpoint's stream was split over {found} packers, and this run has {num_packers}, one for each"
                " sample that batches of all sizes share; go on with the same global_batch_size and batch_ramp, or"
                " start anew from the checkpoint's weights"
            )


@dataclass(frozen=True, kw_only=True)
class StreamStart:
    """The position that readers resume from: saved states, and the samples consumed since."""

    state_samples: int = 0
    states: tuple[State, ...] = ()
    """States of readers that together had all packers; empty: from the beginning."""
    consumed_samples: int = 0


BatchPart = tuple[list[Sample], State | None] | ValueError
"""The samples of some packers in a batch, with the state before it every 32nd time; or an error of the text."""


@dataclass(eq=False)
class StreamedBatches(IterableDataset[BatchPart]):
    """The samples of some packers in each of `num_batches` global batches, with the state before every 32nd.

    Each worker of a loader has its share of the packers. Workers come in turn, so parts of a batch follow each other.
    A ValueError about the text comes as one of them, the last: raised in a worker, it would end in its traceback.
    """

    make_reader: Callable[[Sequence[int]], StreamReader]
    packers: Sequence[int]
    ramp: BatchRamp
    num_batches: int
    start: StreamStart

    def __iter__(self) -> Iterator[BatchPart]:
        try:
            yield from self._parts()
        except ValueError as error:
            yield error

    def _parts(self) -> Iterator[BatchPart]:
        worker = get_worker_info()
        rank, count = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        first, last = (len(self.packers) * i // count for i in (rank, rank + 1))
        reader = self.make_reader(self.packers[first:last])
        if self.start.states:
            reader.load_state_dicts(self.start.state_samples, self.start.states)
        while reader.consumed_samples < self.start.consumed_samples:
            reader.batch()
        number = self.ramp.num_batches(reader.consumed_samples)
        for i in range(number, number + self.num_batches):
            state = reader.state_dict() if i % NUM_BETWEEN == 0 else None
            yield reader.batch(), state
