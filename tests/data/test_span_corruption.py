"""Span corruption: nothing is lost, as much is taken out as asked for, and every placing is alike."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.data.corpus import corpus_in_memory
from lightning_megatron.data.seeded_random import random_order, uniforms
from lightning_megatron.data.span_corruption import SpanCorruption, T5Pieces, corrupt_spans

START, END, PAD = 0, 1, 2
SENTINELS = tuple(range(1000, 1100))
CORRUPTION = SpanCorruption(
    sentinels=SENTINELS, start_token=START, end_token=END, padding_token=PAD, encoder_length=128, decoder_length=64
)


def corrupted_by_hand(tokens: list[int], to: SpanCorruption, seed: int, sample: int) -> tuple[list[int], list[int]]:
    """The rule in plain words: lengths drawn one by one, spans laid before kept tokens."""
    goal = max(1, min(round(to.mask_prob * len(tokens)), len(tokens) - 1))
    drawn = iter(uniforms(goal, seed, "lengths of spans", sample).tolist())
    lengths: list[int] = []
    while sum(lengths) < goal:
        # A span goes on after a token where the number drawn is below (1 - span_stop_prob) to that power.
        length, number = 1, next(drawn)
        while length < to.max_span_length and number <= (1 - to.span_stop_prob) ** length:
            length += 1
        lengths.append(min(length, goal - sum(lengths)))
    while len(lengths) > len(to.sentinels) or sum(lengths) + len(lengths) + 1 > to.decoder_length:
        lengths.pop()
    lengths = lengths[: len(tokens) - goal + 1]
    num_unmasked = len(tokens) - sum(lengths)
    gaps = set(random_order(num_unmasked + 1, seed, "places of spans", sample)[: len(lengths)].tolist())
    left, spans = iter(tokens), iter(zip(lengths, to.sentinels, strict=False))
    encoder, target = [], []
    for gap in range(num_unmasked + 1):
        if gap in gaps:
            length, sentinel = next(spans)
            encoder.append(sentinel)
            target += [sentinel, *(next(left) for _ in range(length))]
        if gap < num_unmasked:
            encoder.append(next(left))
    return [*encoder, END], [*target, END]


def joined(encoder: list[int], target: list[int]) -> list[int]:
    """The text that a model which knows the target would write in place of the sentinels."""
    spans: dict[int, list[int]] = {}
    for token in target[:-1]:
        if token in SENTINELS:
            spans[last := token] = []
        else:
            spans[last].append(token)
    return [token for i in encoder[:-1] for token in (spans[i] if i in SENTINELS else [i])]


@given(
    st.integers(1, 127),
    st.integers(0, 10**9),
    st.integers(0, 3),
    st.sampled_from(
        [{}, {"span_stop_prob": 1.0}, {"mask_prob": 0.4}, {"sentinels": SENTINELS[:2]}, {"max_span_length": 3}]
    ),
)
def test_what_is_taken_out_is_that_of_the_rule(size: int, sample: int, seed: int, changes: dict[str, Any]) -> None:
    to = replace(CORRUPTION, **({"decoder_length": 90} | changes))
    tokens = list(range(3, 3 + size))
    found = corrupt_spans(np.array(tokens), to, seed=seed, sample=sample)
    assert (found.encoder.tolist(), found.target.tolist()) == corrupted_by_hand(tokens, to, seed, sample)


@given(st.integers(1, 127), st.integers(0, 10**6))
def test_nothing_is_lost_and_as_much_is_taken_out_as_asked_for(size: int, sample: int) -> None:
    tokens = list(range(3, 3 + size))
    found = corrupt_spans(np.array(tokens), CORRUPTION, seed=0, sample=sample)
    encoder, target = found.encoder.tolist(), found.target.tolist()
    assert joined(encoder, target) == tokens
    used = [token for token in encoder if token in SENTINELS]
    assert used == [token for token in target if token in SENTINELS] == list(SENTINELS[: len(used)])
    assert len(target) - len(used) - 1 == CORRUPTION.goal(size)
    assert not any(a in SENTINELS and b in SENTINELS for a, b in itertools.pairwise(encoder))


def test_spans_are_geometric_up_to_the_longest() -> None:
    to = replace(CORRUPTION, encoder_length=4097, decoder_length=900)
    lengths: list[int] = []
    for sample in range(30):
        target = corrupt_spans(np.full(4096, 7), to, seed=0, sample=sample).target
        lengths += np.diff(np.flatnonzero(target >= 1000)).tolist()
    counts, total = Counter(length - 1 for length in lengths), len(lengths)
    assert max(counts) == 10
    for length in range(1, 10):
        expected = 0.2 * 0.8 ** (length - 1)
        assert abs(counts[length] / total - expected) < 5 * (expected / total) ** 0.5
    assert abs(counts[10] / total - 0.8**9) < 5 * (0.8**9 / total) ** 0.5


def test_every_placing_is_alike() -> None:
    # 2 single tokens of 6, not side by side: C(5, 2) ways.
    to = replace(CORRUPTION, mask_prob=0.34, span_stop_prob=1.0)
    ways = Counter(corrupt_spans(np.arange(3, 9), to, seed=0, sample=i).encoder.tobytes() for i in range(4000))
    # 400 each, and six standard deviations are 114.
    assert len(ways) == 10 and all(abs(count - 400) < 114 for count in ways.values())


def test_there_are_no_more_spans_than_sentinels_or_room() -> None:
    few = replace(CORRUPTION, sentinels=SENTINELS[:1], span_stop_prob=1.0)
    assert len(corrupt_spans(np.arange(3, 103), few, seed=0, sample=0).target) == 3
    narrow = replace(CORRUPTION, decoder_length=22, span_stop_prob=0.9)
    longest = max(len(corrupt_spans(np.arange(127), narrow, seed=0, sample=i).target) for i in range(100))
    assert longest == 22


def test_samples_are_padded_pieces_of_documents() -> None:
    documents = [[list(range(10, 310))], [[]], [list(range(400, 410))]]
    samples = T5Pieces(corpus_in_memory(documents), CORRUPTION)
    assert len(samples) == 4
    pieces = []
    for sample in (samples[i] for i in range(9)):
        entries = {name: value.tolist() for name, value in sample.items()}
        num_seen, num_predicted = entries["encoder_segments"].count(0), entries["decoder_segments"].count(0)
        encoder, target = entries["encoder_tokens"][:num_seen], entries["labels"][:num_predicted]
        assert entries["encoder_segments"] == [0] * num_seen + [-1] * (128 - num_seen)
        assert entries["encoder_tokens"][num_seen:] == [PAD] * (128 - num_seen)
        assert entries["labels"][num_predicted:] == [-100] * (64 - num_predicted)
        assert entries["decoder_tokens"] == [START, *target[:-1]] + [PAD] * (64 - num_predicted)
        assert entries["loss_mask"] == [1.0] * num_predicted + [0.0] * (64 - num_predicted)
        assert encoder[-1] == target[-1] == END
        pieces.append(joined(encoder, target))
    expected = [list(range(10, 137)), list(range(137, 264)), list(range(264, 310)), list(range(400, 410))]
    assert pieces[:4] == pieces[4:8] == expected


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"mask_prob": 1.0}, r"mask_prob \(1.0\)"),
        ({"span_stop_prob": 0.0}, r"span_stop_prob \(0.0\)"),
        ({"max_span_length": 0}, r"max_span_length \(0\)"),
        ({"encoder_length": 2}, r"encoder_length \(2\)"),
        ({"sentinels": ()}, r"sentinels \(0\)"),
        ({"sentinels": (5, 5)}, "all different"),
        ({"decoder_length": 21}, r"decoder_length \(21\) must be at least 22: of 127 tokens 19 are taken out in 2"),
        ({"mask_prob": 0.0, "max_span_length": 0}, "mask_prob .*; max_span_length"),
    ],
)
def test_a_corruption_that_cannot_be_is_refused(changes: dict[str, Any], shown: str) -> None:
    with pytest.raises(ValueError, match=shown):
        replace(CORRUPTION, **changes)
