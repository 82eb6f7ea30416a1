"""GPT samples: every token of an epoch is a target once, epochs follow each other, and orders are those of the rule."""

import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.comm.rng import bits, key
from lightning_megatron.data.gpt_samples import DocumentStretches, GPTSamples
from lightning_megatron.data.megatron_files import megatron_writer
from lightning_megatron.data.seeded_random import random_order, uniforms, uniforms_at
from tests.data.stretches import cut_in_stretches

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any)


def documents_of(sizes: list[int]) -> list[list[int]]:
    """Token 100 d + p is place p of document d."""
    return [[100 * number + position for position in range(size)] for number, size in enumerate(sizes)]


def order_by_sorting(count: int, *purpose: int | str) -> list[int]:
    """A random order, one by one: sorted by random bits of which as many as a number needs are left out."""
    num_low = max(count - 1, 1).bit_length()
    return sorted(range(count), key=lambda i: (int(bits(key(*purpose), torch.tensor(i))) >> num_low, i))


def samples_by_hand(documents: list[list[int]], length: int, num_samples: int, seed: int) -> list[list[int]]:
    """The rule in plain words: epochs as one list of tokens, cut, and each epoch's pieces shuffled."""
    row: list[int] = []
    starts_of_epochs = []
    while len(row) < num_samples * length + 1:
        starts_of_epochs.append(len(row))
        for number in order_by_sorting(len(documents), seed, "documents of epoch", len(starts_of_epochs) - 1):
            row += documents[number]
    pieces = [(j * length, row[j * length : (j + 1) * length + 1]) for j in range(num_samples)]
    out = []
    for epoch, (start, stop) in enumerate(pairwise([*starts_of_epochs, len(row) + 1])):
        mine = [piece for position, piece in pieces if start <= position < stop]
        out += [mine[i] for i in order_by_sorting(len(mine), seed, "stretches of epoch", epoch)]
    return out


def all_of(samples: DocumentStretches) -> list[list[int]]:
    return [samples.sample_tokens(i).tolist() for i in range(len(samples))]


@given(SIZES, st.integers(1, 12), st.integers(1, 40), st.integers(0, 3))
def test_samples_are_those_of_the_rule(sizes: list[int], length: int, num_samples: int, seed: int) -> None:
    documents = documents_of(sizes)
    samples = cut_in_stretches(documents, length, num_samples=num_samples, seed=seed)
    assert all_of(samples) == samples_by_hand(documents, length, num_samples, seed)


@given(SIZES, st.integers(1, 4), st.integers(0, 3))
def test_within_an_epoch_every_token_but_the_last_few_and_the_first_is_a_target_once(
    sizes: list[int], length: int, seed: int
) -> None:
    if sum(sizes) <= length:
        return
    samples = cut_in_stretches(documents_of(sizes), length, seed=seed)
    targets = [token for ids in all_of(samples) for token in ids[1:]]
    assert len(set(targets)) == len(targets) == (sum(sizes) - 1) // length * length


def test_nothing_is_seen_twice_before_all_was_seen_once() -> None:
    sizes = [7, 30, 12, 25, 26]
    samples = cut_in_stretches(documents_of(sizes), 10, num_samples=25)
    inputs = [ids[:-1] for ids in all_of(samples)]
    for epoch in (0, 1):
        seen = [token for ids in inputs[10 * epoch : 10 * epoch + 10] for token in ids]
        assert sorted(seen) == sorted(token for ids in documents_of(sizes) for token in ids)
    assert inputs[:10] != inputs[10:20]
    # The last epoch is a part of one.
    assert len({token for ids in inputs[20:] for token in ids}) == 50


def test_the_last_target_may_need_another_epoch() -> None:
    # 10 tokens are 5 samples of 2 but for the last one's target.
    samples = cut_in_stretches(documents_of([10]), 2, num_samples=5)
    assert sorted(all_of(samples))[-1] == [8, 9, 0]
    assert len(samples.index.documents) == 2
    assert len(cut_in_stretches(documents_of([10]), 2).index.documents) == 1


def test_labels_are_the_next_tokens_and_no_view_of_them() -> None:
    sample = cut_in_stretches([[1, 2, 3, 4]], 3)[0]
    assert sample["tokens"].tolist() == [1, 2, 3] and sample["labels"].tolist() == [2, 3, 4]
    assert sample["loss_mask"].tolist() == [1, 1, 1]
    sample["labels"][0] = -100
    assert sample["tokens"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("sizes", "length", "num_samples", "shown"),
    [
        ([3, 2], 5, 0, "takes 6; give more text, or a sequence_length of at most 4"),
        ([], 5, 0, "has 0 tokens in 0 documents"),
        ([0, 0], 5, 3, "has 0 tokens in 2 documents"),
        ([3], 0, 0, r"sequence_length \(0\) must be at least 1"),
        ([3], 1, -1, r"num_samples \(-1\)"),
    ],
)
def test_what_cannot_be_cut_is_refused(sizes: list[int], length: int, num_samples: int, shown: str) -> None:
    with pytest.raises(ValueError, match=shown):
        cut_in_stretches(documents_of(sizes), length, num_samples=num_samples)


def test_samples_of_files_are_those_of_memory_and_the_index_is_written_once(tmp_path: Path) -> None:
    documents = documents_of([7, 0, 30, 12])
    with megatron_writer(tmp_path / "a", np.int32) as writer:
        for ids in documents:
            writer.add_document([ids[:5], ids[5:]])
    samples = GPTSamples(tmp_path / "a", 8, num_samples=20, seed=3)
    assert all_of(samples) == all_of(cut_in_stretches(documents, 8, num_samples=20, seed=3))
    [index] = tmp_path.glob("*.npy")
    before = index.stat().st_mtime_ns
    copy = pickle.dumps(samples)
    assert len(copy) < 1000
    assert all_of(pickle.loads(copy)) == all_of(samples)
    assert [path.stat().st_mtime_ns for path in tmp_path.glob("*.npy")] == [before]
    assert all_of(GPTSamples(tmp_path / "a", 8, num_samples=20, seed=4)) != all_of(samples)
    for index_of_none in (-1, 20):
        with pytest.raises(IndexError):
            samples[index_of_none]


def test_orders_are_the_same_on_every_machine() -> None:
    # Another result here makes every run that is resumed see other samples, and written indices need another _FORM.
    assert random_order(8, 0, "a").tolist() == [5, 0, 7, 2, 6, 3, 1, 4]
    assert uniforms(2, 0, "a").tolist() == pytest.approx([0.8528489097377911, 0.28292364399473807], abs=1e-15)


@given(st.integers(0, 300), st.integers(0, 3))
def test_a_random_order_has_each_number_once_and_is_that_of_sorting(count: int, seed: int) -> None:
    order = random_order(count, seed, "x").tolist()
    assert sorted(order) == list(range(count))
    assert order == order_by_sorting(count, seed, "x")


def test_a_random_order_is_one_over_blocks_too() -> None:
    order = random_order(700_001, "many")
    assert (np.bincount(order) == 1).all()
    # Of a random order neighbours are far apart: a third of all on average.
    assert abs(np.abs(np.diff(order)).mean() / 700_001 - 1 / 3) < 0.01


def test_all_orders_of_three_are_alike() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for i in range(3000):
        order = tuple(random_order(3, "of three", i).tolist())
        counts[order] = counts.get(order, 0) + 1
    # 500 each, and six standard deviations are 122.
    assert len(counts) == 6 and all(abs(count - 500) < 122 for count in counts.values())


def test_numbers_at_positions_are_those_of_all() -> None:
    at = np.array([5, 0, 9, 5])
    assert uniforms_at(at, 7, "x").tolist() == uniforms(10, 7, "x")[at].tolist()
