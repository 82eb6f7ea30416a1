"""Errors name what FP8 does not fit, and sizes that would do."""

from typing import Any

import pytest

from lightning_megatron import Fp8Config
from lightning_megatron.mesh import Sizes
from lightning_megatron.models import GPTConfig
from lightning_megatron.rules.cross_config import Facts, faults
from lightning_megatron.transformer.fp8_rules import fp8_faults


def model(**changes: Any) -> GPTConfig:
    sizes = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    return GPTConfig(**(sizes | changes))


def test_tiles_that_divide_are_no_fault() -> None:
    assert fp8_faults(Fp8Config(), model(), Sizes(world=4, tp=4)) == []
    # A vocabulary takes no part: the head stays as it is.
    assert fp8_faults(Fp8Config(), model(vocab_size=101), Sizes()) == []


def test_a_hidden_size_that_the_tiles_do_not_divide_is_reported_with_those_that_they_do() -> None:
    errors = fp8_faults(Fp8Config(), model(hidden_size=72, ffn_hidden_size=256, head_dim=16), Sizes())
    assert errors == [
        "hidden_size (72) must be a multiple of 16 for fp8, whose products work in tiles of 16; use 64 or 80, or leave "
        "fp8 out"
    ]


def test_a_cut_size_must_leave_each_rank_whole_tiles() -> None:
    [error] = fp8_faults(Fp8Config(), model(ffn_hidden_size=80), Sizes(world=2, tp=2))
    assert "ffn_hidden_size (80) must be a multiple of 16 x tensor_model_parallel_size (16 x 2 = 32)" in error
    assert "use 64 or 96" in error
    heads, rows = fp8_faults(Fp8Config(), model(head_dim=8), Sizes(world=4, tp=4))
    assert "num_attention_heads x head_dim (32)" in heads and "use 64" in heads
    assert "the rows of the query-key-value weight (96)" in rows and "use 64 or 128" in rows


def test_blocks_of_mxfp8_want_tiles_of_32() -> None:
    config = Fp8Config(scaling="mxfp8")
    assert fp8_faults(config, model(), Sizes(world=2, tp=2)) == []
    heads, rows = fp8_faults(config, model(), Sizes(world=4, tp=4))
    assert "num_attention_heads x head_dim (64) must be a multiple of 32 x tensor_model_parallel_size" in heads
    assert "the rows of the query-key-value weight (192)" in rows
    assert fp8_faults(Fp8Config(), model(), Sizes(world=4, tp=4)) == []


def test_some_layer_must_be_left_for_fp8() -> None:
    config = Fp8Config(num_first_layers_bf16=3, num_last_layers_bf16=1)
    [error] = fp8_faults(config, model(), Sizes())
    assert "(3 + 1) must be below num_layers (4)" in error
    assert fp8_faults(Fp8Config(num_first_layers_bf16=3), model(), Sizes()) == []


def test_all_faults_of_a_run_in_fp8_are_reported_at_once() -> None:
    config = Fp8Config(engine="transformer_engine", num_first_layers_bf16=4)
    message = "\n".join(faults(Facts(sizes=Sizes(), model=model(hidden_size=72), fp8=config, precision="64-true")))
    assert "hidden_size (72)" in message and "num_first_layers_bf16" in message and "lightning-megatron[fp8]" in message
    assert "precision ('64-true') must be one of bf16-mixed, bf16-true, 32-true" in message


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
def test_a_sound_run_in_fp8_has_no_fault(precision: str) -> None:
    assert faults(Facts(sizes=Sizes(), model=model(), fp8=Fp8Config(), precision=precision)) == []
