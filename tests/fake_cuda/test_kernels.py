"""Tests of what a microbatch asks of a GPU: nothing crashes on a CUDA tensor, and no number of the page rises."""

import pytest

from tests.fake_cuda.cases import CASES, cost_of
from tests.fake_cuda.kernels_page import COMMAND, row_of, shown_row
from tests.harness.ranks import run_on_ranks


@pytest.mark.parametrize("name", CASES)
def test_a_microbatch_asks_of_a_gpu_what_the_page_shows(name: str) -> None:
    [found] = run_on_ranks(1, counted_row, name, init=False)
    assert found == shown_row(name), f"if this is a change for the better, write the page: {COMMAND}"


def counted_row(name: str) -> str:
    return row_of(name, cost_of(CASES[name]))
