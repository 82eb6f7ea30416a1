"""Layout of a call's tokens over context-parallel ranks, and the attention blocks that follow: index arithmetic.

A stream is a row of segments (documents; an unpacked batch has one, which all its rows share). The axis is ring_size
x ulysses_size ranks, those of a Ulysses group next to each other. Every segment is cut into chunks of nearly equal
length, two for each group under zig-zag and one without:

    zig-zag, 4 groups     0 1 2 3 3 2 1 0      group g holds an early and a late chunk: causal work is even
    contiguous            0 1 2 3              for attention that sees both ways

A group's stream is its chunks in the order of the segments; each of its ranks holds an equal contiguous part of it.
Tokens that do not divide go to the groups that have fewest: there is no padding where all divides, and less than one
token for each rank in all.

A token's place is its index in the stream of all ranks, its position that in the segment, its row that in a group's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.comm.host_numbers import on_device

_HOST = torch.device("cpu")
PADDING = -1
"""Place and position of padding: a row that holds no token."""


@dataclass(frozen=True, kw_only=True)
class MaskSpec:
    """The attention mask within a segment: causal or not, with or without a window."""

    is_causal: bool
    """Whether a token sees no token after itself."""
    window: int = 0
    """Number of latest tokens that a token sees under causal attention, itself included; 0 means all."""

    def is_visible(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Mask of one segment, true where a query (row) sees a key (column): bool [queries, keys]."""
        return self.sees(query_positions[:, None] - key_positions)

    def sees(self, distance: Tensor) -> Tensor:
        """Whether a query sees a key that lies `distance` before it in its segment: bool, elementwise."""
        seen = distance >= 0 if self.is_causal else torch.ones_like(distance, dtype=torch.bool)
        return seen & (distance < self.window) if self.window else seen


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Consecutive tokens of a segment that are consecutive in a group's stream too."""

    segment: int
    position: int
    row: int
    num: int

    @property
    def last_position(self) -> int:
        return self.position + self.num - 1


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Rows of queries and rows of keys of one segment that one attention call takes."""

    query_row: int
    num_queries: int
    key_row: int
    num_keys: int
    kind: Literal["full", "causal", "masked"]
    """Mask of the block: none, causal (query i sees keys 0 to i), or as `MaskSpec.is_visible` says."""


@dataclass(frozen=True, eq=False)
class ContextLayout:
    """Layout of a stream over ring_size x ulysses_size ranks; `cut` makes it."""

    lengths: tuple[int, ...]
    """Length of each segment in tokens."""
    ring_size: int
    """Number of groups, which hold different tokens of a segment."""
    ulysses_size: int
    """Number of ranks of a group, which share its stream."""
    is_zigzag: bool
    runs: tuple[tuple[TokenRange, ...], ...]
    """Token ranges of each group, in the order of its rows."""
    num_rows: int
    """Number of rows of one rank, padding included."""

    @property
    def size(self) -> int:
        """Number of context-parallel ranks."""
        return self.ring_size * self.ulysses_size

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all segments."""
        return sum(self.lengths)

    @property
    def num_group_rows(self) -> int:
        """Number of rows of a group's stream, which are the rows of its ranks in turn."""
        return self.num_rows * self.ulysses_size

    def num_own(self, rank: int) -> int:
        """Number of a rank's rows that are no padding."""
        before = rank % self.ulysses_size * self.num_rows
        return min(max(_num(self.runs[rank // self.ulysses_size]) - before, 0), self.num_rows)

    def first_rows(self, rank: int) -> list[int]:
        """Row of a rank that holds the first token of each segment, PADDING where none of its rows does."""
        before, found = rank % self.ulysses_size * self.num_rows, [PADDING] * len(self.lengths)
        for run in self.runs[rank // self.ulysses_size]:
            if run.position == 0 and 0 <= run.row - before < self.num_rows:
                found[run.segment] = run.row - before
        return found

    @cached_property
    def group_places(self) -> Tensor:
        """Place of each row, int64 [ring_size, group rows], on the host."""
        return torch.stack([self.places_of_group(group) for group in range(self.ring_size)])

    @cached_property
    def group_positions(self) -> Tensor:
        """Position of each row, int64 [ring_size, group rows], on the host."""
        return torch.stack([self.positions_of_group(group) for group in range(self.ring_size)])

    def places_of_group(self, group: int, device: torch.device = _HOST) -> Tensor:
        """Place of each row of a group, made on the device: int64 [group rows]."""
        starts = (0, *accumulate(self.lengths))
        return self._numbered(group, [starts[run.segment] + run.position for run in self.runs[group]], device)

    def positions_of_group(self, group: int, device: torch.device = _HOST, padding: int = PADDING) -> Tensor:
        """Position of each row of a group, made on the device: int64 [group rows]."""
        return self._numbered(group, [run.position for run in self.runs[group]], device, padding)

    def places(self, rank: int, device: torch.device = _HOST) -> Tensor:
        """Places of a rank's rows, int64 [rows]."""
        return self._part(rank, self.places_of_group(rank // self.ulysses_size, device))

    def positions(self, rank: int, device: torch.device = _HOST, padding: int = PADDING) -> Tensor:
        """Positions of a rank's rows, `padding` where there is no token: int64 [rows]."""
        return self._part(rank, self.positions_of_group(rank // self.ulysses_size, device, padding))

    @cached_property
    def rows(self) -> Tensor:
        """Row of each place, among the rows of all ranks in turn: int64 [tokens]."""
        places = self.group_places.flatten()
        own = torch.nonzero(places != PADDING).flatten()
        return torch.empty(self.num_tokens, dtype=torch.int64).index_copy_(0, places[own], own)

    def spans(self, group: int) -> list[tuple[int, int, int]]:
        """Number, first row and number of rows of each segment that a group holds some of."""
        return [(segment, runs[0].row, _num(runs)) for segment, runs in self._by_segment[group].items()]

    def blocks(self, group: int, source: int, mask_spec: MaskSpec) -> tuple[AttentionBlock, ...]:
        """Attention blocks of one group's queries with another group's keys; a query may be in several."""
        found = self._blocks.get((group, source, mask_spec))
        if found is None:
            found = self._blocks[group, source, mask_spec] = tuple(self._make_blocks(group, source, mask_spec))
        return found

    @cached_property
    def _blocks(self) -> dict[tuple[int, int, MaskSpec], tuple[AttentionBlock, ...]]:
        return {}

    def _part(self, rank: int, of_group: Tensor) -> Tensor:
        """A rank's rows of those of its group."""
        return of_group.view(self.ulysses_size, self.num_rows)[rank % self.ulysses_size]

    def _numbered(self, group: int, firsts: list[int], device: torch.device, padding: int = PADDING) -> Tensor:
        """Numbers of a group's rows: of each token range from its first on, and then of padding."""
        runs = self.runs[group]
        num = _num(runs)
        if len(runs) == 1:
            numbers = torch.arange(firsts[0], firsts[0] + num, device=device)
        else:
            shifts = [first - run.row for first, run in zip(firsts, runs, strict=True)]
            shifts_R, lengths_R = on_device([shifts, [run.num for run in runs]], device)
            numbers = torch.arange(num, device=device) + shifts_R.repeat_interleave(lengths_R, output_size=num)
        num_padding = self.num_group_rows - num
        return F.pad(numbers, (0, num_padding), value=padding) if num_padding else numbers

    def _make_blocks(self, group: int, source: int, mask_spec: MaskSpec) -> Iterator[AttentionBlock]:
        keys_of = self._by_segment[source]
        for segment, queries in self._by_segment[group].items():
            keys = keys_of.get(segment, [])
            if not keys:
                continue
            if mask_spec.window and mask_spec.window < self.lengths[segment]:
                yield from _within_window(queries, keys, mask_spec.window)
            elif mask_spec.is_causal:
                yield from _causal(queries, keys)
            else:
                yield _block(queries, keys, "full")

    @cached_property
    def _by_segment(self) -> list[dict[int, list[TokenRange]]]:
        by_segment: list[dict[int, list[TokenRange]]] = []
        for runs in self.runs:
            found: dict[int, list[TokenRange]] = {}
            for run in runs:
                found.setdefault(run.segment, []).append(run)
            by_segment.append(found)
        return by_segment


def cut(lengths: Sequence[int], ring_size: int = 1, ulysses_size: int = 1, is_zigzag: bool = True) -> ContextLayout:
    """Layout of segments of these lengths in tokens, equal on every rank."""
    owners = [*range(ring_size), *reversed(range(ring_size))] if is_zigzag and ring_size > 1 else list(range(ring_size))
    runs: list[list[TokenRange]] = [[] for _ in range(ring_size)]
    num_rows = [0] * ring_size
    for segment, length in enumerate(lengths):
        position = 0
        for owner, num in zip(owners, _chunk_lengths(length, owners, num_rows), strict=True):
            if num:
                runs[owner].append(TokenRange(segment, position, num_rows[owner], num))
                num_rows[owner] += num
            position += num
    # A call without tokens goes through every layer nevertheless: other ranks wait for this one.
    most = max(1, -(-max(num_rows) // ulysses_size))
    return ContextLayout(tuple(lengths), ring_size, ulysses_size, is_zigzag, tuple(map(tuple, runs)), most)


def require_even(lengths: Sequence[int], *, ring_size: int, ulysses_size: int, is_zigzag: bool = True) -> None:
    """Raises ValueError for segments that need padding to be cut."""
    step = (2 * ring_size if is_zigzag and ring_size > 1 else ring_size) * ulysses_size
    uneven = [length for length in lengths if length % step]
    if uneven:
        below = uneven[0] // step * step
        fits = " or ".join(str(length) for length in (below, below + step) if length)
        raise ValueError(
            f"{len(uneven)} of {len(lengths)} sequences, the first of {uneven[0]} tokens, are no multiples of {step} "
            f'tokens, by which context parallelism cuts them; give {fits}, or ContextConfig(uneven="pad")'
        )


def _chunk_lengths(length: int, owners: Sequence[int], num_rows: Sequence[int]) -> list[int]:
    """Nearly equal chunk lengths; the remainder goes to groups with the fewest rows first."""
    each, rest = divmod(length, len(owners))
    lengths = [each] * len(owners)
    if rest:
        order = sorted(range(len(set(owners))), key=lambda group: (num_rows[group], group))
        # Every group once before any twice.
        turns = [owners.index(group) for group in order]
        turns += [len(owners) - 1 - chunk for chunk in turns]
        for chunk in turns[:rest]:
            lengths[chunk] += 1
    return lengths


def _causal(queries: list[TokenRange], keys: list[TokenRange]) -> Iterator[AttentionBlock]:
    """Blocks of causal attention of a group's token ranges to another's, both in the order of positions."""
    keys = [run for run in keys if run.position <= queries[-1].last_position]
    queries = [run for run in queries if keys and run.last_position >= keys[0].position]
    if not keys or not queries:
        return
    if [(run.position, run.num) for run in queries] == [(run.position, run.num) for run in keys]:
        yield _block(queries, keys, "causal")
    elif queries[0].position >= keys[-1].last_position:
        yield _block(queries, keys, "full")
    else:
        for query in queries:
            seen = [run for run in keys if run.last_position <= query.position]
            if seen:
                yield _block([query], seen, "full")
            for key in keys:
                if query.position < key.last_position and key.position <= query.last_position:
                    yield _block([query], [key], "causal" if query.position == key.position else "masked")


def _within_window(queries: list[TokenRange], keys: list[TokenRange], window: int) -> Iterator[AttentionBlock]:
    """Blocks of sliding-window attention, cut into tiles so that few masked scores are computed."""
    length = max(window, 128)
    for run in queries:
        for start in range(0, run.num, length):
            tile = TokenRange(run.segment, run.position + start, run.row + start, min(length, run.num - start))
            for key in keys:
                first = max(key.position, tile.position - window + 1)
                last = min(key.last_position, tile.last_position)
                if first > last:
                    continue
                seen = TokenRange(key.segment, first, key.row + first - key.position, last - first + 1)
                is_full = seen.last_position <= tile.position and tile.last_position - first < window
                yield _block([tile], [seen], "full" if is_full else "masked")


def _block(
    queries: list[TokenRange], keys: list[TokenRange], kind: Literal["full", "causal", "masked"]
) -> AttentionBlock:
    return AttentionBlock(queries[0].row, _num(queries), keys[0].row, _num(keys), kind)


def _num(runs: Sequence[TokenRange]) -> int:
    return sum(run.num for run in runs)
