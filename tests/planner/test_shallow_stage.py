"""Which layers of a stage stand for all of them."""

import pytest

from lightning_megatron.planner.shallow_stage import blocks_of


@pytest.mark.parametrize(
    ("kinds", "run"),
    [
        ("Etttttttttt", "Ettt"),
        ("ttttL", "tttL"),
        ("dededededede", "dedede"),
        ("lllglllglllglllglllg", "lllglllglllg"),
        ("dddeeeeeh", "dddeeeh"),
        ("abcabc", "abcabc"),
        ("", ""),
    ],
)
def test_of_many_equal_periods_three_run_and_the_second_counts_for_all_between(kinds: str, run: str) -> None:
    blocks = blocks_of(kinds)
    assert "".join(kinds[index] for block in blocks for index in block.indices) == run
    # Every kind comes as often, and in the same order.
    counted = [kinds[block.indices.start : block.indices.stop] * block.times for block in blocks]
    assert "".join(counted) == kinds


def test_the_ends_of_a_row_run_by_themselves() -> None:
    found = [(block.indices, block.times) for block in blocks_of("tttttt")]
    assert found == [(range(1), 1), (range(1, 2), 4), (range(5, 6), 1)]
