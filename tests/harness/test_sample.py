"""A covering sample has every pair of settings that its matrix has, and is the same each time."""

import os
import subprocess
import sys
from collections import Counter
from itertools import product

import pytest

from tests.certificate.cases import LAYOUTS, cells_of, sampled_cells
from tests.harness.ranks import ROOT
from tests.harness.sample import WHOLE, covering, diagonal, every_nth, pairs_of, sample_of_matrix, sampled

MATRIX = [
    {"tp": tp, "pp": pp, "model": model, "precision": precision}
    for tp, pp, model, precision in product((1, 2, 4), (1, 2), "abcd", (32, 64))
    if tp * pp <= 4
]


def test_every_pair_of_settings_of_the_matrix_meets_in_the_sample() -> None:
    sample = covering(MATRIX, pairs_of)
    assert set().union(*map(pairs_of, sample)) == set().union(*map(pairs_of, MATRIX))
    assert len(sample) < len(MATRIX) / 2


def test_no_case_of_the_sample_could_be_left_out() -> None:
    sample = covering(MATRIX, pairs_of)
    for case in sample:
        others = [other for other in sample if other is not case]
        assert set().union(*map(pairs_of, others)) != set().union(*map(pairs_of, MATRIX))


def test_a_dear_case_is_left_out_where_cheap_ones_have_its_pairs() -> None:
    cases = [{"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1, "c": 2}, {"a": 2, "b": 1, "c": 1}, {"a": 1, "b": 2, "c": 1}]
    dear = cases[0]
    assert dear not in covering(cases, pairs_of, lambda case: 10.0 if case is dear else 1.0)
    assert covering(cases, pairs_of) == cases[1:]


def test_a_diagonal_has_each_row_and_each_column_and_is_balanced() -> None:
    cells = diagonal([(row, column) for row in range(9) for column in "abc" if (row, column) != (4, "b")])
    assert sorted(row for row, _ in cells) == list(range(9))
    assert Counter(column for _, column in cells) == {"a": 3, "b": 3, "c": 3}


def test_a_test_of_three_factors_keeps_all_pairs_of_two_a_diagonal_and_of_one_all() -> None:
    lists = [[0], [1], [2]]
    three = [{"a": a, "b": b, "c": c} for a, b, c in product(range(3), range(3), lists)]
    assert len(sample_of_matrix([{"a": a, "b": b} for a, b in product(range(4), range(3))])) == 4
    assert len(sample_of_matrix([{"a": a} for a in range(5)])) == 5
    kept = sample_of_matrix(three)
    assert len(kept) < len(three) and {(a, b) for a, b in product(range(3), range(3))} == {
        (three[place]["a"], three[place]["b"]) for place in kept
    }


def test_whole_takes_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WHOLE, raising=False)
    assert sampled(MATRIX, pairs_of) == covering(MATRIX, pairs_of)
    assert every_nth("abcdefg", 3) == ["a", "d", "g"]
    monkeypatch.setenv(WHOLE, "1")
    assert sampled(MATRIX, pairs_of) == MATRIX and every_nth("abcdefg", 3) == list("abcdefg")


def test_the_sample_of_the_certificate_is_the_same_in_another_process_and_has_every_model() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", "from tests.certificate.cases import sampled_cells; print(sampled_cells())"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != WHOLE} | {"PYTHONHASHSEED": "3"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    here = sampled_cells() if WHOLE not in os.environ else None
    assert here is None or shown.strip() == str(here)
    assert all(variant in shown for layout in LAYOUTS for variant, _ in cells_of(layout))
