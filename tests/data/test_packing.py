"""Packing: every document in one row, rows full and alike, and the same on every machine."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.data import packing
from lightning_megatron.data.packing import Numbers, Packing, cut_documents, pack_lengths, pack_pairs

ROW = 32
LENGTHS = st.lists(st.integers(1, ROW), min_size=1, max_size=200).map(lambda found: np.array(found, dtype=np.int64))


def long_tailed(num_documents: int, median: float, longest: int) -> Numbers:
    drawn = np.random.RandomState(0).lognormal(np.log(median), 1.0, num_documents)
    return np.clip(drawn.astype(np.int64), 1, longest)


def rows_of(packed: Packing) -> list[list[int]]:
    return [packed.order[packed.row(i)].tolist() for i in range(packed.num_rows)]


# --- pairs ------------------------------------------------------------------------------------------------------------

PAIR_ROWS = (32, 20)
PAIRS = st.lists(st.tuples(st.integers(1, 32), st.integers(1, 20)), min_size=1, max_size=120).map(
    lambda found: np.array(found, dtype=np.int64)
)


@given(PAIRS, st.integers(0, 3))
def test_pairs_lie_in_one_row_of_which_neither_side_is_too_long(lengths_N2: Numbers, seed: int) -> None:
    rows = rows_of(pack_pairs(lengths_N2, PAIR_ROWS, seed))
    assert sorted(number for row in rows for number in row) == list(range(len(lengths_N2)))
    sums = [lengths_N2[row].sum(axis=0) for row in rows]
    assert all((one <= PAIR_ROWS).all() for one in sums)
    # The first fit leaves no two rows of a window that fit into one.
    assert all(((a + b) > PAIR_ROWS).any() for i, a in enumerate(sums) for b in sums[:i])
    assert rows == rows_of(pack_pairs(lengths_N2.copy(), PAIR_ROWS, seed))


def test_rows_of_pairs_are_the_same_on_every_machine() -> None:
    packed = pack_pairs(np.array([[3, 5], [8, 1], [2, 2], [1, 4], [6, 3], [2, 3]]), (8, 6), seed=5)
    # By hand: 1, 0 and 4 open rows, 3 finds no room with any, 5 goes to 4 and 2 to 3.
    assert rows_of(packed) == [[1], [3, 2], [5, 4], [0]]


def test_pairs_fill_their_rows_and_another_seed_puts_others_together() -> None:
    lengths_N2 = np.stack([long_tailed(4000, 60, 512), long_tailed(4000, 20, 128)[::-1]], axis=1)
    packed = pack_pairs(lengths_N2, (512, 128))
    # The side that is longer, in shares of its row, bounds how few rows there can be.
    fewest = (lengths_N2.sum(axis=0) / (512, 128)).max()
    assert packed.num_rows < 1.15 * fewest
    together = [{frozenset(row) for row in rows_of(pack_pairs(lengths_N2, (512, 128), seed))} for seed in (0, 1)]
    assert len(together[0] & together[1]) < 0.5 * len(together[0])


@pytest.mark.parametrize("lengths", [[], [[0, 1]], [[33, 1]], [[1, 21]]])
def test_pairs_that_fit_no_row_are_refused(lengths: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"must be from 1 to those of rows \(32, 20\)"):
        pack_pairs(np.array(lengths, dtype=np.int64), PAIR_ROWS)


# --- packing ----------------------------------------------------------------------------------------------------------


@given(LENGTHS, st.integers(0, 3))
def test_every_document_lies_in_one_row_and_no_row_is_over_its_length(lengths: Numbers, seed: int) -> None:
    rows = rows_of(pack_lengths(lengths, ROW, seed))
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(row and lengths[row].sum() <= ROW for row in rows)


@given(LENGTHS)
def test_no_two_rows_of_a_window_fit_into_one(lengths: Numbers) -> None:
    filled = sorted(int(lengths[row].sum()) for row in rows_of(pack_lengths(lengths, ROW)))
    assert len(filled) < 2 or filled[0] + filled[1] > ROW


@given(LENGTHS, st.integers(0, 3))
def test_rows_are_a_function_of_lengths_and_seed(lengths: Numbers, seed: int) -> None:
    assert rows_of(pack_lengths(lengths, ROW, seed)) == rows_of(pack_lengths(lengths.copy(), ROW, seed))


def test_rows_are_the_same_on_every_machine() -> None:
    # Another result here makes every run that is resumed see other rows, and written tables need another _FORM.
    packed = pack_lengths(np.array([3, 5, 2, 7, 1, 4, 6, 6, 2, 3]), 8, seed=5)
    assert rows_of(packed) == [[1, 9], [5, 0], [7, 8], [2, 6], [3, 4]]


def test_another_seed_puts_other_documents_together() -> None:
    lengths = long_tailed(4000, 100, 1024)
    together = [{frozenset(row) for row in rows_of(pack_lengths(lengths, 1024, seed))} for seed in (0, 1)]
    assert len(together[0] & together[1]) < 0.5 * len(together[0])


@pytest.mark.parametrize(("median", "row"), [(400, 2048), (400, 8192), (1500, 2048)])
def test_rows_of_long_tailed_documents_are_nearly_full(median: float, row: int) -> None:
    lengths = cut_documents(long_tailed(60_000, median, 10**9), row, "split").lengths
    packed = pack_lengths(lengths, row)
    assert lengths.sum() / (packed.num_rows * row) > 0.99


def test_documents_of_one_window_do_not_meet_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = long_tailed(3000, 100, 512)
    whole = pack_lengths(lengths, 512).num_rows
    monkeypatch.setattr(packing, "WINDOW_ROWS", 8)
    small = pack_lengths(lengths, 512)
    assert sorted(small.order.tolist()) == list(range(len(lengths)))
    assert max(lengths[row].sum() for row in rows_of(small)) <= 512
    # Each window may leave a row that is not full.
    assert whole < small.num_rows < whole * 1.2


def test_where_a_row_stands_says_nothing_of_its_documents() -> None:
    lengths = long_tailed(60_000, 300, 2048)
    packed = pack_lengths(lengths, 2048)
    costs = np.array([np.square(lengths[row]).sum() for row in rows_of(packed)], dtype=np.float64)
    counts = np.array([len(row) for row in rows_of(packed)])
    assert counts.std() > 2, "rows differ, so an order by length would show"
    assert abs(np.corrcoef(np.arange(len(counts)), counts)[0, 1]) < 0.05
    batches = costs[: len(costs) // 64 * 64].reshape(-1, 64).mean(axis=1)
    # The spread of means of 64 rows that are drawn at random, with room for the chance in some 150 of them.
    assert batches.std() < 1.2 * costs.std() / 8


def test_where_a_document_stands_in_its_row_says_nothing_of_its_length() -> None:
    lengths = long_tailed(20_000, 300, 2048)
    rows = [row for row in rows_of(pack_lengths(lengths, 2048)) if len(row) > 1]
    falls = np.array([np.sign(lengths[row[0]] - lengths[row[-1]]) for row in rows])
    # Chance alone makes 0.02 of some 3000 rows; the longest first would make nearly 1.
    assert np.abs(falls).mean() > 0.8 and abs(falls.mean()) < 0.06


@pytest.mark.parametrize("lengths", [[], [0, 3], [3, 33], [-1]])
def test_lengths_that_fit_no_row_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"must be from 1 to sequence_length \(32\)"):
        pack_lengths(np.array(lengths, dtype=np.int64), ROW)


def test_there_is_no_row_after_the_last_and_none_before_the_first() -> None:
    packed = pack_lengths(np.array([20, 20]), ROW)
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"row {index} of 2"):
            packed.row(index)


# --- long documents ---------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5 * ROW), min_size=1, max_size=50).filter(any))
def test_pieces_of_a_document_follow_each_other_and_all_but_its_last_fill_a_row(found: list[int]) -> None:
    lengths = np.array(found, dtype=np.int64)
    cut = cut_documents(lengths, ROW, "split")
    covered = [
        (number, position)
        for number, start, length in zip(cut.documents, cut.starts, cut.lengths, strict=True)
        for position in range(start, start + length)
    ]
    assert covered == [(number, position) for number, length in enumerate(found) for position in range(length)]
    is_last = np.append(np.diff(cut.documents) > 0, True)
    assert (cut.lengths[~is_last] == ROW).all() and (cut.lengths >= 1).all() and (cut.lengths <= ROW).all()
    assert cut.num_long == sum(length > ROW for length in found)


def test_long_documents_are_dropped_and_counted_and_those_that_just_fit_are_kept() -> None:
    cut = cut_documents(np.array([32, 33, 5, 0, 100]), ROW, "drop")
    assert cut.documents.tolist() == [0, 2] and cut.lengths.tolist() == [32, 5] and cut.starts.tolist() == [0, 0]
    assert cut.num_long == 2


def test_long_documents_are_refused_with_the_longest_and_the_ways_out() -> None:
    shown = (
        r"2 of 4 .* sequence_length \(32\): the longest, number 2 from 0, takes 90; raise .* to 90, .*'split'.*'drop'"
    )
    with pytest.raises(ValueError, match=shown):
        cut_documents(np.array([32, 33, 90, 1]), ROW, "refuse")
    assert len(cut_documents(np.array([32, 1]), ROW, "refuse").lengths) == 2


def test_what_leaves_nothing_to_pack_is_refused() -> None:
    with pytest.raises(ValueError, match=r"none of the 3 documents .* 2 are longer .*'drop', and 1 are too short"):
        cut_documents(np.array([33, 40, 0]), ROW, "drop")
    with pytest.raises(ValueError, match=r"long_documents \('cut'\) must be 'split', 'drop' or 'refuse'"):
        cut_documents(np.array([1]), ROW, "cut")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sequence_length \(0\) must be at least 1"):
        cut_documents(np.array([1]), 0, "split")
