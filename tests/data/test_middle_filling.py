"""Fill-in-the-middle: nothing is lost, cuts are even, and documents are reordered each by itself."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.data.middle_filling import FillInTheMiddle, fill_documents, fill_in_the_middle

PRE, SUF, MID, END = 1, 2, 3, 0
FILL = FillInTheMiddle(prefix_token=PRE, suffix_token=SUF, middle_token=MID, rate=1.0)


def in_order(ids: list[int]) -> tuple[list[int], bool, tuple[int, int]]:
    """The text in its own order, whether the suffix came first, and where it was cut."""
    assert ids[0] == PRE
    suffix, middle = ids.index(SUF), ids.index(MID)
    last, behind = ids[suffix + 1 : middle], ids[middle + 1 :]
    if suffix == 1:
        return behind + last, True, (-1, len(behind))
    first = ids[1:suffix]
    return first + behind + last, False, (len(first), len(first) + len(behind))


@given(st.lists(st.integers(4, 99), min_size=1, max_size=20), st.integers(0, 10**6), st.sampled_from([0.0, 0.5, 1.0]))
def test_the_text_is_there_with_three_tokens_more(ids: list[int], sample: int, suffix_first: float) -> None:
    fill = replace(FILL, suffix_first_rate=suffix_first)
    put = fill_in_the_middle(np.array(ids), fill, seed=0, sample=sample).tolist()
    assert len(put) == len(ids) + 3
    if suffix_first == 1.0:
        assert put[:2] == [PRE, SUF]
        assert in_order(put)[0] == ids
    elif suffix_first == 0.0 and put[1] != SUF:
        assert in_order(put)[0] == ids


def test_documents_are_reordered_at_their_rates_and_cut_anywhere() -> None:
    ids = np.arange(10, 15)
    half = replace(FILL, rate=0.5, suffix_first_rate=0.25)
    put = [fill_in_the_middle(ids, half, seed=0, sample=i).tolist() for i in range(4000)]
    changed = [one for one in put if one != ids.tolist()]
    assert abs(len(changed) - 2000) < 5 * 31.6
    # An empty first part looks like a suffix that comes first.
    is_first = sum(one[1] == SUF for one in changed)
    assert abs(is_first / len(changed) - (0.25 + 0.75 * 11 / 36)) < 0.06
    cuts = {in_order(one)[2] for one in changed if one[1] != SUF}
    assert cuts == {(a, b) for a in range(1, 6) for b in range(a, 6)}


def test_each_document_of_a_sample_is_reordered_by_itself() -> None:
    documents = [list(range(10, 17)), list(range(20, 29)), [], list(range(30, 36))]
    tokens = [token for ids in documents for token in (*ids, END)]
    put = fill_documents(np.array(tokens), FILL, END, seed=5, sample=7)
    expected: list[int] = []
    for number, ids in enumerate(documents):
        expected += fill_in_the_middle(np.array(ids), FILL, seed=5, sample=7, document=number).tolist()
        expected.append(END)
    assert put.tolist() == expected[: len(tokens)]
    assert len(expected) == len(tokens) + 9
    # Each of its own: not the same cuts for all.
    alike = fill_documents(np.array([*range(10, 30), END, *range(10, 30), END]), FILL, END, seed=0, sample=0).tolist()
    assert alike[: alike.index(END)] != alike[alike.index(END) + 1 :][: alike.index(END)]


def test_nothing_is_changed_at_rate_zero_or_without_tokens() -> None:
    tokens = np.array([5, END, 6, 7])
    assert fill_documents(tokens, replace(FILL, rate=0.0), END, seed=0, sample=0).tolist() == tokens.tolist()
    assert fill_in_the_middle(np.array([], dtype=np.int64), FILL, seed=0, sample=0).tolist() == []


def test_sample_seed_and_document_each_change_the_cuts() -> None:
    ids = np.arange(10, 1010)
    seen = {
        fill_in_the_middle(ids, FILL, seed=seed, sample=sample, document=document).tobytes()
        for seed in (0, 1)
        for sample in (0, 1)
        for document in (0, 1)
    }
    assert len(seen) == 8
    assert fill_in_the_middle(ids, FILL, seed=0, sample=0).tobytes() in seen


def test_rates_and_tokens_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rate \(1.5\) must be from 0 to 1; .*must be three tokens"):
        FillInTheMiddle(prefix_token=1, suffix_token=2, middle_token=2, rate=1.5)
