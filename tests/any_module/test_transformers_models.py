"""Models of transformers, unchanged, compute one device's numbers on layouts: a sample of docs/models_table.md."""

import functools
from typing import Any

import pytest
import torch

from lightning_megatron.testing import certify
from tests.any_module.models_table import Causal, batches

SAMPLE = [
    # Norms of queries and keys; a tied head.
    ("qwen3", ("dp2pp2-zero", "tp2")),
    # Soft caps, windows, an attention of its own file.
    ("gemma2", ("cp2pp2", "tp2-sp")),
    # Experts, and attention sinks.
    ("qwen3_moe", ("ep2", "tp2-sp")),
    ("gpt_oss", ("cp2",)),
    # No plan of its own: linears go by their names, and its number of heads is that of a rank.
    ("opt", ("tp2",)),
    # All tokens choose experts of one rank.
    ("afmoe", ("ep2",)),
]


@pytest.mark.parametrize(("model_type", "layouts"), SAMPLE, ids=[model_type for model_type, _ in SAMPLE])
def test_a_model_as_it_is_trains_as_on_one_device(model_type: str, layouts: tuple[str, ...]) -> None:
    certify(functools.partial(Causal, model_type), batches, layouts=layouts, steps=2).assert_equal()


@pytest.mark.parametrize(
    ("model_type", "layout", "shown"),
    [
        ("mamba", "cp2", "backbone.layers.0 (MambaBlock) computes other hidden states from the tokens of a rank"),
        ("bloom", "cp2", "context_parallel_size (2) cuts nothing of Causal"),
        ("qwen3", "ep2", "expert_model_parallel_size (2)"),
        ("qwen3_moe", "ep2tp2", "expert_tensor_parallel_size (1) must be tensor_model_parallel_size (2)"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(model_type: str, layout: str, shown: str) -> None:
    [result] = certify(functools.partial(Causal, model_type), batches, layouts=(layout,), steps=1).results
    assert result.verdict == "refused" and shown in result.message


def padded() -> list[dict[str, Any]]:
    """The batches with rows of several lengths, padded at their ends, and in the last batch at their beginnings."""
    found = batches()
    for number, batch in enumerate(found):
        mask = torch.ones_like(batch["input_ids"])
        for row, length in enumerate((12, 3, 7, 12, 5, 9, 2, 11)):
            mask[row, length:] = 0
        batch["attention_mask"] = mask.flip(1) if number == 2 else mask
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    return found


def packed() -> list[dict[str, Any]]:
    """The batches with rows of two documents, told apart by positions that begin anew."""
    found = batches()
    for batch in found:
        positions = torch.arange(12).repeat(len(batch["input_ids"]), 1)
        for row in range(len(positions)):
            positions[row, row + 2 :] -= row + 2
        batch["position_ids"] = positions
    return found


@pytest.mark.parametrize("make_batches", [padded, packed])
def test_masks_are_those_of_all_tokens(make_batches: Any) -> None:
    make = functools.partial(Causal, "gemma2")
    certify(make, make_batches, layouts=("cp2tp2-sp",), steps=3).assert_equal()
    # The batches differ from those without a mask.
    assert not torch.equal(losses(make_batches), losses(batches))


def losses(make_batches: Any) -> torch.Tensor:
    module = Causal("gemma2")
    module.configure_model()
    return torch.stack([module.training_step(batch, 0).detach() for batch in make_batches()])
