"""Tests of what a microbatch asks of a GPU: nothing crashes on a CUDA tensor, and no number of the page rises."""

import os

import pytest

from tests.fake_cuda.cases import CASES, cost_of
from tests.fake_cuda.compiled import COMPILED, compiled_cost
from tests.fake_cuda.kernels_page import COMMAND, row_of, shown_row
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import WHOLE


@pytest.mark.parametrize("name", CASES)
def test_a_microbatch_asks_of_a_gpu_what_the_page_shows(name: str) -> None:
    [found] = run_on_ranks(1, counted_row, name, init=False)
    assert found == shown_row(name), f"if this is a change for the better, write the page: {COMMAND}"


@pytest.mark.matrix
@pytest.mark.parametrize("name", COMPILED if WHOLE in os.environ else ["GPT-2 124M"])
def test_a_compiled_layer_asks_for_what_the_page_shows(name: str) -> None:
    [found] = run_on_ranks(1, compiled_numbers, name, init=False)
    kernels, size = (shown_row(f"{name}, compiled").split("|")[column].strip() for column in (3, 5))
    assert found == (int(kernels), float(size)), f"if this is a change for the better, write the page: {COMMAND}"


def compiled_numbers(name: str) -> tuple[int, float]:
    cost = compiled_cost(name)
    return cost.kernels, round(cost.bytes / 1e9, 2)


def counted_row(name: str) -> str:
    return row_of(name, cost_of(CASES[name]))
