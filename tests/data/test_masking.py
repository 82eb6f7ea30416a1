"""Masking: whole words in runs, as much as asked for, and a function of (seed, sample, tokens) alone."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_megatron.data.masking import Masked, Masking, mask_words
from lightning_megatron.data.packing import Numbers
from lightning_megatron.data.seeded_random import uniforms

CLS, SEP, MASK = 0, 1, 2
MASKING = Masking(vocab_size=50, mask_token=MASK, special_tokens=(CLS, SEP))


def starts_word(tokens: Numbers) -> NDArray[np.bool_]:
    """In these tests an odd token goes on with a word."""
    started: NDArray[np.bool_] = tokens % 2 == 0
    return started


TEXTS = st.lists(st.integers(3, 49), max_size=60).map(
    lambda ids: np.array([CLS, *ids[: len(ids) // 2], SEP, *ids[len(ids) // 2 :], SEP], dtype=np.int64)
)


def words_of(tokens: Numbers) -> list[list[int]]:
    """The places of each word."""
    words: list[list[int]] = []
    for position, token in enumerate(tokens.tolist()):
        if token in (CLS, SEP, MASK):
            continue
        if token % 2 and words and words[-1][-1] == position - 1:
            words[-1].append(position)
        else:
            words.append([position])
    return words


def masked_by_hand(tokens: Numbers, masking: Masking, seed: int, sample: int) -> tuple[list[int], list[int]]:
    """The rule in plain words, token by token."""
    words = words_of(tokens)
    num_ordinary = sum(map(len, words))
    left = max(1, round(masking.mask_prob * num_ordinary))
    drawn = uniforms(2 * len(words), seed, "hidden words", sample).tolist()
    hidden: set[int] = set()
    for word in sorted(range(len(words)), key=lambda w: drawn[w]):
        # 1/n for n words: the number of runs whose chances together are not above what was drawn.
        chances = [1 / n for n in range(1, masking.max_ngram + 1)]
        run, reached = 1, chances[0]
        while drawn[len(words) + word] * sum(chances) >= reached:
            run, reached = run + 1, reached + chances[run]
        for other in range(word, word + run):
            if other == len(words) or words[other][0] in hidden or len(words[other]) > left:
                break
            if other > word and words[other][0] != words[other - 1][-1] + 1:
                break
            hidden |= set(words[other])
            left -= len(words[other])
    what = uniforms(2 * len(tokens), seed, "what stands for hidden tokens", sample).tolist()
    ordinary = [i for i in range(masking.vocab_size) if i not in (CLS, SEP, MASK)]
    seen, labels = tokens.tolist(), [-100] * len(tokens)
    for position in hidden:
        labels[position] = seen[position]
        if what[position] < masking.mask_token_prob:
            seen[position] = MASK
        elif what[position] < masking.mask_token_prob + masking.random_token_prob:
            seen[position] = ordinary[int(what[len(tokens) + position] * len(ordinary))]
    return seen, labels


@given(TEXTS, st.integers(0, 3), st.integers(0, 10**9), st.sampled_from([0.15, 0.5, 0.9]))
def test_what_is_hidden_is_that_of_the_rule(tokens: Numbers, seed: int, sample: int, share: float) -> None:
    masking = Masking(vocab_size=50, mask_token=MASK, special_tokens=(CLS, SEP), mask_prob=share)
    masked = mask_words(tokens, starts_word(tokens), masking, seed=seed, sample=sample)
    assert (masked.tokens.tolist(), masked.labels.tolist()) == masked_by_hand(tokens, masking, seed, sample)


@given(TEXTS, st.integers(0, 100))
def test_whole_words_are_hidden_and_nothing_special(tokens: Numbers, sample: int) -> None:
    labels = mask_words(tokens, starts_word(tokens), MASKING, seed=0, sample=sample).labels
    hidden = labels != -100
    assert not hidden[tokens <= MASK].any()
    assert (labels[hidden] == tokens[hidden]).all()
    assert all(hidden[word].all() or not hidden[word].any() for word in words_of(tokens))


@given(TEXTS, st.integers(0, 100))
def test_as_much_is_hidden_as_whole_words_allow(tokens: Numbers, sample: int) -> None:
    hidden = mask_words(tokens, starts_word(tokens), MASKING, seed=0, sample=sample).labels != -100
    words = words_of(tokens)
    missing = max(1, round(0.15 * sum(map(len, words)))) - int(hidden.sum())
    assert missing >= 0
    assert all(len(word) > missing for word in words if not hidden[word[0]])


def sample_of_single_words(sample: int, size: int = 400, **changes: Any) -> tuple[Numbers, Masked]:
    tokens = np.random.RandomState(0).randint(3, 50, size)
    masking = Masking(**({"vocab_size": 50, "mask_token": MASK, "special_tokens": (CLS, SEP)} | changes))
    return tokens, mask_words(tokens, np.ones(size, dtype=np.bool_), masking, seed=0, sample=sample)


def test_single_words_are_hidden_to_the_token() -> None:
    for sample in range(20):
        assert (sample_of_single_words(sample)[1].labels != -100).sum() == 60


def test_hidden_tokens_are_masked_random_or_left_in_their_shares() -> None:
    num_masked = num_random = num_left = 0
    drawn: set[int] = set()
    for sample in range(300):
        tokens, masked = sample_of_single_words(sample)
        hidden = masked.labels != -100
        assert (masked.tokens[~hidden] == tokens[~hidden]).all()
        is_masked, is_left = masked.tokens[hidden] == MASK, masked.tokens[hidden] == tokens[hidden]
        num_masked += is_masked.sum()
        num_left += is_left.sum()
        num_random += (~is_masked & ~is_left).sum()
        drawn |= set(masked.tokens[hidden][~is_masked & ~is_left].tolist())
    total = 300 * 60
    # Five standard deviations of a share of 18000 are at most 0.015; one random token in 47 is the token itself.
    assert abs(num_masked / total - 0.8) < 0.015
    assert abs(num_random / total - 0.1 * 46 / 47) < 0.012
    assert abs(num_left / total - 0.1 - 0.1 / 47) < 0.012
    assert drawn == set(range(3, 50))


def test_every_position_is_masked_about_as_often() -> None:
    counts = sum((sample_of_single_words(sample, 40)[1].labels != -100).astype(int) for sample in range(1500))
    # 225 each, standard deviation 13.8; the first few follow on fewer words whose run could reach them.
    assert counts[3:].min() > 225 - 4 * 13.8 and counts.max() < 225 + 4 * 13.8
    assert counts[0] > 225 / 2


def test_runs_have_lengths_of_one_in_n() -> None:
    lengths = []
    for sample in range(400):
        hidden = sample_of_single_words(sample, 2000, mask_prob=0.01)[1].labels != -100
        edges = np.flatnonzero(np.diff(np.concatenate([[False], hidden, [False]])))
        lengths += np.diff(edges)[::2].tolist()
    counts = np.bincount(lengths, minlength=5)
    # 1 : 1/2 : 1/3, but the last run of a sample is cut to what is left, and few runs touch.
    assert 0.52 < counts[1] / len(lengths) < 0.62
    assert 0.22 < counts[2] / len(lengths) < 0.32
    assert counts[4:].sum() < 0.06 * len(lengths)
    singles = sample_of_single_words(0, 2000, mask_prob=0.01, max_ngram=1)[1].labels != -100
    assert singles.sum() == 20 and (singles[1:] & singles[:-1]).sum() <= 2


def test_each_sample_and_each_seed_hides_others() -> None:
    tokens = np.arange(3, 50)
    starts = np.ones(47, dtype=np.bool_)
    of = {(seed, n): mask_words(tokens, starts, MASKING, seed=seed, sample=n) for seed in (0, 1) for n in (0, 1)}
    assert len({masked.labels.tobytes() for masked in of.values()}) == 4
    again = mask_words(tokens, starts, MASKING, seed=1, sample=0)
    assert (again.tokens == of[1, 0].tokens).all() and (again.labels == of[1, 0].labels).all()


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"mask_prob": 0.0}, r"mask_prob \(0.0\)"),
        ({"mask_prob": 1.0}, r"mask_prob \(1.0\)"),
        ({"max_ngram": 0}, r"max_ngram \(0\)"),
        ({"mask_token_prob": 0.8, "random_token_prob": 0.3}, "together at most 1"),
        ({"random_token_prob": -0.1}, "at least 0"),
        ({"mask_token": 50}, r"special tokens \[50\] must lie in the vocabulary, from 0 to 49"),
        ({"vocab_size": 3}, "leave room"),
        ({"mask_prob": 2.0, "max_ngram": 0}, "mask_prob .*; max_ngram"),
    ],
)
def test_a_masking_that_cannot_be_is_refused(changes: dict[str, Any], shown: str) -> None:
    with pytest.raises(ValueError, match=shown):
        Masking(**({"vocab_size": 50, "mask_token": MASK, "special_tokens": (CLS, SEP)} | changes))
