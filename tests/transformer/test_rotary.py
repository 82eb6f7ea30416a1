"""Rotary positions are complex rotations by position times frequency; scores depend on distances alone."""

import math
from typing import Any

import pytest
import torch

from lightning_megatron.transformer.rotary import RopeScaling, angles, frequencies, rotate, rotate_into


def rotated(x: torch.Tensor, positions: torch.Tensor, pairs: int, base: float, sign: int = 1) -> torch.Tensor:
    cos, sin = angles(positions, frequencies(pairs, base, None))
    out = torch.empty_like(x)
    rotate_into(out, x, cos.to(x.dtype), sign * sin.to(x.dtype))
    return out


@pytest.mark.parametrize(("size", "pairs"), [(8, 4), (10, 3), (8, 0)])
def test_each_pair_is_a_complex_number_that_turns(size: int, pairs: int) -> None:
    positions = torch.tensor([[0, 1, 5, 1000]])
    x = torch.randn(1, 4, size, dtype=torch.float64)
    out = rotated(x, positions, pairs, 500.0)
    for token, position in enumerate(positions[0].tolist()):
        for i in range(pairs):
            turn = torch.exp(torch.tensor(1j * position / 500.0 ** (i / pairs), dtype=torch.complex128))
            expected = torch.complex(x[0, token, i], x[0, token, pairs + i]) * turn
            assert abs(out[0, token, i] - expected.real) < 1e-12
            assert abs(out[0, token, pairs + i] - expected.imag) < 1e-12
    assert torch.equal(out[..., 2 * pairs :], x[..., 2 * pairs :])


def test_turning_back_undoes_it() -> None:
    positions = torch.arange(6)[None]
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    out = rotated(x, positions, 4, 10000.0)
    assert (rotated(out, positions, 4, 10000.0, sign=-1) - x).abs().max() < 1e-12
    assert (out - x).abs().max() > 0.1


def test_scores_depend_on_distances_alone() -> None:
    queries, keys = torch.randn(2, 1, 5, 8, dtype=torch.float64)
    positions = torch.arange(5)[None]

    def scores(shift: int) -> torch.Tensor:
        return rotated(queries, positions + shift, 4, 100.0) @ rotated(keys, positions + shift, 4, 100.0).mT

    assert (scores(0) - scores(37)).abs().max() < 1e-12
    assert (scores(0) - queries @ keys.mT).abs().max() > 0.1


def test_far_positions_are_exact_in_float32() -> None:
    far = torch.tensor([[1_000_003]])
    cos, _ = angles(far, frequencies(2, 10000.0, None))
    assert abs(cos[0, 0, 1].item() - torch.tensor(1_000_003 / 100.0, dtype=torch.float64).cos().item()) < 1e-9


def test_a_rotation_that_autograd_knows_has_its_gradient() -> None:
    cos, sin = angles(torch.arange(4)[None], frequencies(2, 100.0, None))
    x = torch.randn(1, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rotate, (x, cos, sin))
    assert torch.equal(rotate(x, cos, sin), rotated(x, torch.arange(4)[None], 2, 100.0))


# Stretched waves. That they are those of transformers is shown in tests/hf.

LLAMA3 = RopeScaling(kind="llama3", factor=8.0, original_max_sequence_length=8192)
YARN = RopeScaling(kind="yarn", factor=4.0, original_max_sequence_length=4096)


def test_linear_scaling_stretches_every_wave() -> None:
    plain = frequencies(32, 10000.0, None)
    assert torch.equal(frequencies(32, 10000.0, RopeScaling(kind="linear", factor=4.0)), plain / 4)


@pytest.mark.parametrize("scaling", [LLAMA3, YARN])
def test_short_waves_stay_long_ones_are_stretched_and_the_others_lie_between(scaling: RopeScaling) -> None:
    plain = frequencies(64, 500000.0, None)
    ratio = plain / frequencies(64, 500000.0, scaling)
    num_waves = scaling.original_max_sequence_length * plain / (2 * math.pi)
    most, least = (4.0, 1.0) if scaling.kind == "llama3" else (32.0, 1.0)
    # Yarn rounds to whole indices outwards.
    apart = 1.0 if scaling.kind == "llama3" else 1.3
    assert ratio[num_waves > most * apart] == pytest.approx(1.0, abs=1e-12)
    assert ratio[num_waves < least / apart] == pytest.approx(scaling.factor, abs=1e-12)
    assert (ratio.diff() >= -1e-12).all()
    between = ratio[(ratio > 1 + 1e-9) & (ratio < scaling.factor - 1e-9)]
    assert len(between) > 3


def test_yarn_changes_the_amplitude() -> None:
    assert YARN.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    cos, sin = angles(torch.arange(3)[None], frequencies(4, 10000.0, YARN), YARN)
    assert cos.square() + sin.square() == pytest.approx(YARN.attention_factor**2)
    cos, sin = angles(torch.arange(3)[None], frequencies(4, 10000.0, LLAMA3), LLAMA3)
    assert cos.square() + sin.square() == pytest.approx(1.0)


def test_a_line_of_no_width_is_a_step() -> None:
    # Half a wave is the most that eight tokens hold: every index is past the line.
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_sequence_length=8, beta_fast=6.0, beta_slow=5.0)
    assert frequencies(1, 100.0, scaling).isfinite().all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "dynamic", "factor": 2.0}, "kind ('dynamic') must be one of 'linear', 'llama3', 'yarn'"),
        ({"kind": "linear", "factor": 0.5}, "factor (0.5) must be at least 1"),
        ({"kind": "yarn", "factor": 2.0}, "original_max_sequence_length (0) must be at least 1 under kind 'yarn'"),
        ({"kind": "linear", "factor": 2.0, "beta_fast": 8.0}, "beta_fast (8.0) acts under kind yarn alone"),
        (
            {"kind": "linear", "factor": 2.0, "original_max_sequence_length": 8},
            "original_max_sequence_length (8) acts under kind llama3 and yarn alone, and it is 'linear'; leave it out",
        ),
        (
            {"kind": "llama3", "factor": 2.0, "original_max_sequence_length": 8, "low_frequency_factor": 5.0},
            "low_frequency_factor (5.0) must be above 0 and below high_frequency_factor (4.0)",
        ),
        (
            {"kind": "yarn", "factor": 2.0, "original_max_sequence_length": 8, "attention_factor": -1.0},
            "attention_factor (-1.0) must be at least 0",
        ),
    ],
)
def test_settings_that_cannot_be_are_reported(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as raised:
        RopeScaling(**settings)
    assert f"rope_scaling {words}" in str(raised.value)
