"""A configuration fills in what follows from other sizes, and tells every fault at once with what would do."""

import re
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from lightning_megatron.mesh import Sizes
from lightning_megatron.transformer.config import LanguageModelConfig, TransformerConfig
from lightning_megatron.transformer.rotary import RopeScaling

PLAIN: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8}


def test_sizes_left_out_follow_from_others() -> None:
    config = TransformerConfig(**PLAIN)
    assert (config.num_query_groups, config.head_dim, config.ffn_hidden_size) == (8, 8, 256)
    given = TransformerConfig(**PLAIN, num_query_groups=2, head_dim=10, ffn_hidden_size=100)
    assert (given.num_query_groups, given.head_dim, given.ffn_hidden_size) == (2, 10, 100)
    assert given.heads_per_group == 4


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        TransformerConfig(**PLAIN).num_layers = 5  # type: ignore[misc]


def test_rotary_pairs_are_those_of_the_rotated_part() -> None:
    config = TransformerConfig(**PLAIN, position="rotary")
    assert config.rotary_width == 4
    assert replace(config, rotary_fraction=0.5).rotary_width == 2
    assert replace(config, position="none").rotary_width == 0


def test_output_projections_start_smaller() -> None:
    assert TransformerConfig(**PLAIN, init_std=0.04).output_std == pytest.approx(0.04 / 8**0.5)


def test_all_faults_are_reported_in_one_error() -> None:
    with pytest.raises(ValueError) as raised:
        LanguageModelConfig(
            num_layers=0,
            hidden_size=64,
            num_attention_heads=8,
            num_query_groups=3,
            activation="elu",  # type: ignore[arg-type]
            hidden_dropout=1.0,
            norm_epsilon=0.0,
            rotary_fraction=1.5,
            init_std=-1.0,
            vocab_size=0,
            label_smoothing=-0.1,
        )
    lines = str(raised.value).splitlines()
    assert len(lines) == 9
    for expected in (
        "num_layers (0) must be at least 1",
        "activation ('elu') must be one of 'gelu', 'gelu_tanh', 'quick_gelu', 'relu', 'swiglu', 'geglu_tanh', "
        "'clamped_swiglu'",
        "hidden_dropout (1.0) must be at least 0 and below 1",
        "rotary_fraction (1.5) must be above 0 and at most 1",
        "norm_epsilon (0.0) must be above 0",
        "init_std (-1.0) must be at least 0",
        "num_attention_heads (8) must be a multiple of num_query_groups (3); num_query_groups may be 1, 2, 4, 8",
        "vocab_size (0) must be at least 1",
        "label_smoothing (-0.1) must be at least 0 and below 1",
    ):
        assert expected in lines


def test_a_head_size_that_does_not_come_out_even_is_reported() -> None:
    with pytest.raises(ValueError, match=r"hidden_size \(64\) must be a multiple .* \(6\) .* 1, 2, 4, 8$"):
        TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=6)


def test_a_rotation_needs_a_pair() -> None:
    with pytest.raises(ValueError, match=r"head_dim \(8\) times rotary_fraction \(0.2\)"):
        TransformerConfig(**PLAIN, position="rotary", rotary_fraction=0.2)


def test_layers_with_a_window_are_all_but_those_named() -> None:
    config = TransformerConfig(**PLAIN, sliding_window=3, full_attention_layers=(0, 2))
    assert [config.window_of(layer) for layer in range(4)] == [0, 3, 0, 3]
    assert [TransformerConfig(**PLAIN).window_of(layer) for layer in range(4)] == [0] * 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sliding_window": -1}, "sliding_window (-1) must be at least 0; 0 is no window"),
        ({"full_attention_layers": (1,)}, "full_attention_layers (1) need a sliding_window above 0"),
        (
            {"sliding_window": 2, "full_attention_layers": (1, 4)},
            "full_attention_layers 4 must be from 0 to num_layers - 1 (3)",
        ),
        (
            {"rope_scaling": RopeScaling(kind="linear", factor=2.0)},
            "rope_scaling (linear) stretches rotary positions, and position is 'learned'",
        ),
    ],
)
def test_windows_and_stretched_waves_that_cannot_be_are_reported(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as raised:
        TransformerConfig(**PLAIN, **change)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("change", "sizes", "faults"),
    [
        ({}, Sizes(world=8, tp=8), []),
        ({"num_query_groups": 2}, Sizes(world=8, tp=8), []),
        ({}, Sizes(world=16, tp=16), ["num_attention_heads (8) .* may be 1, 2, 4, 8$"]),
        (
            {"num_attention_heads": 12, "num_query_groups": 4, "head_dim": 6},
            Sizes(world=6, tp=6),
            ["num_query_groups (4) must be a multiple or a divisor .* may be 1, 2, 4, 8, 12$", "ffn_hidden_size (256)"],
        ),
        (
            {"num_query_groups": 1, "head_dim": 1},
            Sizes(world=4, tp=4),
            ["the rows of the query-key-value weight (10 = .* may be 1, 2, 5$"],
        ),
        ({"ffn_hidden_size": 90}, Sizes(world=4, tp=4), ["ffn_hidden_size (90) .* may be 1, 2, 3, 5, 6$"]),
        (
            {"ffn_hidden_size": 90, "num_attention_heads": 2},
            Sizes(world=4, tp=4),
            ["num_attention_heads (2)", "ffn_hidden_size (90)"],
        ),
    ],
)
def test_faults_of_a_layout_name_what_would_do(change: dict[str, Any], sizes: Sizes, faults: list[str]) -> None:
    found = TransformerConfig(**{**PLAIN, **change}).layout_faults(sizes)
    assert len(found) == len(faults), found
    for pattern, fault in zip(faults, found, strict=True):
        assert re.match(pattern.replace("(", r"\(").replace(")", r"\)"), fault), fault
