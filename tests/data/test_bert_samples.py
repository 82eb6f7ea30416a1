"""BERT samples: spans of whole sentences of one document, parted, swapped or not, cut to fit."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.data.bert_samples import BertSampleConfig, BertSpans, part_and_swap, sentence_spans
from lightning_megatron.data.corpus import corpus_in_memory
from lightning_megatron.data.masking import Masking
from lightning_megatron.data.seeded_random import uniforms_at

CLS, SEP, MASK, PAD = 0, 1, 2, 3
CONFIG = BertSampleConfig(sequence_length=16, class_token=CLS, separator_token=SEP, padding_token=PAD)
MASKING = Masking(vocab_size=10_000, mask_token=MASK, special_tokens=(CLS, SEP, PAD))
DOCUMENTS = st.lists(st.lists(st.integers(0, 12), max_size=12), min_size=1, max_size=6)


def texts_of(documents: list[list[int]]) -> list[list[list[int]]]:
    """Sentences whose tokens count up from 4, so that a token says where it stood."""
    number = iter(range(4, 10_000))
    return [[[next(number) for _ in range(size)] for size in document] for document in documents]


def spans_by_hand(documents: list[list[int]], most: int, short_seq_prob: float, seed: int) -> list[list[int]]:
    """The rule in plain words, sentence by sentence."""
    spans, first_of_document, num_full_before = [], 0, 0
    for document in documents:
        full = [i for i, size in enumerate(document) if size]
        at = 0
        while len(full) - at >= 2:
            position = np.array([num_full_before + at])
            meant = most
            if uniforms_at(position, seed, "short spans")[0] < short_seq_prob:
                meant = 2 + int(uniforms_at(position, seed, "lengths of short spans")[0] * (most - 1))
            stop, total = at, 0
            while stop < len(full) and (total < meant or stop - at < 2):
                total += document[full[stop]]
                stop += 1
            if len(full) - stop == 1:
                stop += 1
            spans.append([first_of_document + full[at], first_of_document + full[stop - 1] + 1, meant])
            at = stop
        first_of_document += len(document)
        num_full_before += len(full)
    return spans


@given(DOCUMENTS, st.integers(2, 30), st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 3))
def test_spans_are_those_of_the_rule(documents: list[list[int]], most: int, short_seq_prob: float, seed: int) -> None:
    corpus = corpus_in_memory(texts_of(documents))
    expected = spans_by_hand(documents, most, short_seq_prob, seed)
    if not expected:
        with pytest.raises(ValueError, match="has two sentences"):
            sentence_spans(corpus.lengths, corpus.document_bounds, most, short_seq_prob, seed)
        return
    assert sentence_spans(corpus.lengths, corpus.document_bounds, most, short_seq_prob, seed).tolist() == expected


@given(DOCUMENTS, st.integers(2, 30))
def test_every_sentence_of_a_document_of_two_is_in_one_span(documents: list[list[int]], most: int) -> None:
    corpus = corpus_in_memory(texts_of(documents))
    asked = [document for document in documents if sum(size > 0 for size in document) >= 2]
    if not asked:
        return
    spans = sentence_spans(corpus.lengths, corpus.document_bounds, most, 0.1, 0)
    covered = np.concatenate([np.arange(first, last) for first, last, _ in spans.tolist()])
    assert len(set(covered.tolist())) == len(covered)
    assert int((corpus.lengths[covered] > 0).sum()) == sum(size > 0 for document in asked for size in document)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(2, 30), st.integers(0, 1000), st.integers(0, 3))
def test_parts_are_what_fits_of_a_span(sizes: list[int], most: int, sample: int, seed: int) -> None:
    [sentences] = texts_of([sizes])
    arrays = [np.array(ids) for ids in sentences]
    one, other, is_swapped = part_and_swap(arrays, most, 0.5, seed=seed, sample=sample)
    assert min(len(one), len(other)) >= 1
    assert len(one) + len(other) == min(most, sum(sizes))
    before, after = (other, one) if is_swapped else (one, other)
    assert before[-1] < after[0], "swapped parts stand the other way round"
    for part in (one, other):
        assert part.tolist() == list(range(part[0], part[-1] + 1)), "a part is one piece of the text"
    edges = np.cumsum([4, *sizes]).tolist()
    pivots = [edge for edge in edges[1:-1] if before[-1] < edge <= after[0]]
    assert pivots, "parts meet between two sentences"
    assert any(min(len(before), len(after)) >= min(edge - 4, edges[-1] - edge, most // 2) for edge in pivots), (
        "what is too much is taken from the longer part"
    )


def bert_spans(config: BertSampleConfig = CONFIG, seed: int = 0) -> BertSpans:
    documents = texts_of([[5, 4, 6, 3, 7], [30, 2], [1], [9, 9, 9, 9], []])
    return BertSpans(
        corpus_in_memory(documents), config, MASKING, lambda ids: np.ones(len(ids), dtype=np.bool_), seed=seed
    )


def test_a_sample_has_the_documented_layout() -> None:
    samples = bert_spans()
    for i in range(200):
        sample = {name: value.tolist() for name, value in samples[i].items()}
        seen = [
            label if label != -100 else token for token, label in zip(sample["tokens"], sample["labels"], strict=False)
        ]
        num_used = sum(sample["padding_mask"])
        assert sample["padding_mask"] == [True] * num_used + [False] * (16 - num_used)
        assert seen[0] == CLS and seen[num_used:] == [PAD] * (16 - num_used)
        separators = [position for position, token in enumerate(seen) if token == SEP]
        assert len(separators) == 2 and separators[1] == num_used - 1
        num_first = separators[0] + 1
        assert sample["token_types"] == [0] * num_first + [1] * (num_used - num_first) + [0] * (16 - num_used)
        assert (seen[1] > seen[num_first]) == bool(sample["sentence_order_labels"])
        assert sample["loss_mask"] == [float(label != -100) for label in sample["labels"]]
        assert sum(sample["loss_mask"]) == max(1, round(0.15 * (num_used - 3)))


def test_about_half_is_swapped_and_a_tenth_short() -> None:
    samples = bert_spans()
    swapped = sum(int(samples[i]["sentence_order_labels"]) for i in range(2000))
    assert abs(swapped - 1000) < 5 * 22.4
    lengths = np.full(40_000, 10)
    meant = sentence_spans(lengths, np.arange(0, 40_001, 20), 50, 0.1, 0)[:, 2]
    short = meant[meant < 50]
    assert abs(len(short) / len(meant) - 0.1) < 0.02
    assert set(short.tolist()) == set(range(2, 50))


def test_a_span_that_comes_again_in_another_epoch_is_split_and_masked_differently() -> None:
    samples = bert_spans()
    num_spans = len(samples.spans)
    assert any(not samples[i]["tokens"].equal(samples[num_spans + i]["tokens"]) for i in range(num_spans))


def test_a_sample_depends_on_seed_and_number_alone() -> None:
    one, other = bert_spans(), bert_spans()
    backwards = [other[i] for i in reversed(range(30))]
    for i, sample in enumerate(reversed(backwards)):
        assert all(sample[name].equal(value) for name, value in one[i].items())
    assert any(not bert_spans(seed=1)[i]["tokens"].equal(one[i]["tokens"]) for i in range(4))


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sequence_length \(4\) must be at least 5.*; short_seq_prob \(2\)"):
        BertSampleConfig(sequence_length=4, class_token=0, separator_token=1, padding_token=3, short_seq_prob=2)
    with pytest.raises(ValueError, match=r"tokens \[3\] stand for"):
        BertSpans(
            corpus_in_memory([[[5], [6]]]),
            CONFIG,
            Masking(vocab_size=10, mask_token=MASK, special_tokens=(CLS, SEP)),
            lambda ids: ids > 0,
        )
    with pytest.raises(ValueError, match="none of the 2 documents has two sentences"):
        BertSpans(corpus_in_memory([[[5]], [[6], []]]), CONFIG, MASKING, lambda ids: ids > 0)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_numbers_of_spans_go_on_over_epochs_and_each_is_masked_differently() -> None:
    spans = bert_spans()
    count = len(spans)
    assert count == len(spans.spans) and count > 3
    assert not any(same(spans[n], spans[n + count]) for n in range(count))
    assert not all(same(bert_spans(seed=1)[n], spans[n]) for n in range(count))


def test_without_an_order_a_sample_is_one_part_of_one_sentence_or_more() -> None:
    config = replace(CONFIG, is_pair=False, short_seq_prob=0.0)
    spans = bert_spans(config)
    # Of the document with one sentence, too.
    assert spans.spans[:, 0].tolist() == [0, 3, 5, 6, 7, 8, 10]
    for n in range(3 * len(spans)):
        sample = {name: value.tolist() for name, value in spans[n].items()}
        assert "sentence_order_labels" not in sample
        seen = [
            label if label != -100 else token for token, label in zip(sample["tokens"], sample["labels"], strict=True)
        ]
        num_used = sum(sample["padding_mask"])
        first, last, _ = spans.spans[n % len(spans)].tolist()
        assert num_used - 2 == min(14, int(spans.corpus.lengths[first:last].sum()))
        assert seen[0] == CLS and seen[num_used - 1] == SEP and seen.count(SEP) == 1
        assert seen[1 : num_used - 1] == list(range(seen[1], seen[1] + num_used - 2)), "one piece of the text"
        assert sample["token_types"] == [0] * 16
    fronts = {int(spans[2 + k * len(spans)]["tokens"][1]) for k in range(20)}
    assert len(fronts) > 5, "what is too long is cut at either end"
