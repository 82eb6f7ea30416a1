"""Tests of what a microbatch asks of a GPU: nothing crashes on a CUDA tensor, and no number of the page rises."""

import os
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_megatron.models import GPTConfig
from lightning_megatron.moe.capacity import ExpertCapacity
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from tests.fake_cuda.cases import CASES, Case, cost_of, work_of
from tests.fake_cuda.compiled import COMPILED, compiled_cost
from tests.fake_cuda.kernels_page import COMMAND, calls_row_of, row_of, shown_row
from tests.harness import fake_cuda
from tests.harness.ranks import on_ranks, run_on_ranks
from tests.harness.sample import WHOLE

# Inductor traces and lowers a layer with dropout for 20 seconds on an idle core, and shares cores with other tests.
COMPILE_SECONDS = 180
# Others of these models drop features, or have several documents in a row.
PLAINER = ("Llama 3 8B", "GPT-2 124M")


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name in CASES if WHOLE in os.environ or name not in PLAINER])
def test_a_microbatch_asks_of_a_gpu_what_the_page_shows(name: str) -> None:
    [found] = run_on_ranks(1, counted_rows, name, init=False)
    shown = shown_row(name), shown_row(f"{name}, a call")
    assert found == shown, f"if this is a change for the better, write the page: {COMMAND}"


@pytest.mark.matrix
@pytest.mark.parametrize("name", COMPILED if WHOLE in os.environ else ["GPT-2 124M"])
def test_a_compiled_layer_asks_for_what_the_page_shows(name: str) -> None:
    [found] = run_on_ranks(1, compiled_numbers, name, init=False, timeout=COMPILE_SECONDS)
    kernels, size = (shown_row(f"{name}, compiled").split("|")[column].strip() for column in (3, 5))
    assert found == (int(kernels), float(size)), f"if this is a change for the better, write the page: {COMMAND}"


def compiled_numbers(name: str) -> tuple[int, float]:
    cost = compiled_cost(name)
    return cost.kernels, round(cost.bytes / 1e9, 2)


def counted_rows(name: str) -> tuple[str, str]:
    cost = cost_of(CASES[name])
    return row_of(name, cost), calls_row_of(name, cost)


EXPERTS = MoEConfig(router=RouterConfig(num_experts=4, top_k=2), ffn_hidden_size=64)
SMALL = GPTConfig(
    num_layers=1, hidden_size=64, num_attention_heads=4, vocab_size=128, max_sequence_length=64, moe=EXPERTS
)
# Biased experts, experts that choose, and inputs that are padded to a capacity; and those for which the host waits.
WITHOUT_WAIT = {
    "biased": SMALL,
    "chosen by experts": replace(
        SMALL,
        moe=replace(EXPERTS, router=RouterConfig(num_experts=4, routing_type="expert_choice", norm_topk_prob=False)),
    ),
    "padded": replace(SMALL, moe=replace(EXPERTS, capacity=ExpertCapacity(factor=1.0, pad_to_capacity=True))),
}
WITH_WAIT = {
    "one by one": replace(SMALL, moe=replace(EXPERTS, expert_gemm="sequential")),
    "dropped": replace(SMALL, moe=replace(EXPERTS, capacity=ExpertCapacity(factor=1.0))),
}


def small_batch() -> dict[str, Any]:
    tokens = torch.ones(2, 64, dtype=torch.int64)
    segments = torch.arange(3).repeat_interleave(torch.tensor([10, 30, 24])).expand(2, 64)
    return {"tokens": tokens, "labels": tokens, "segments": segments}


SMALL_CASE = Case(config=lambda layers: SMALL, batch=small_batch)


@on_ranks(1, init=False)
def test_the_host_waits_for_no_expert_whose_number_of_rows_it_knows() -> None:
    for name, config in (WITHOUT_WAIT | WITH_WAIT).items():
        waits = work_of(SMALL_CASE, config).waits
        assert waits.total() == (name in WITH_WAIT), f"{name}: {waits}"


@on_ranks(1, init=False)
def test_gradients_of_experts_without_rows_are_written_where_the_kernel_leaves_them_undefined() -> None:
    written = {}
    for capability in ((9, 0), (10, 0)):
        with mock.patch.dict(fake_cuda._ANSWERS, get_device_capability=lambda device=None, it=capability: it):
            work = work_of(SMALL_CASE, SMALL)
        zeroed = [each for each in work.launches if each.name == "masked_fill_" and "grouped_gemm" in each.site]
        written[capability] = len(zeroed)
        assert not work.waits
    assert written == {(9, 0): 0, (10, 0): 2}
