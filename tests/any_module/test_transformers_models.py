"""Models of transformers, unchanged, compute one device's numbers on layouts: a sample of docs/models_table.md."""

import functools

import pytest

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
