"""Rotary positions are complex rotations by position times frequency; scores depend on distances alone."""

import pytest
import torch

from lightning_megatron.transformer.rotary import angles, rotate_into


def rotated(x: torch.Tensor, positions: torch.Tensor, pairs: int, base: float, sign: int = 1) -> torch.Tensor:
    cos, sin = angles(positions, pairs, base)
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
    cos, _ = angles(far, 2, 10000.0)
    assert abs(cos[0, 0, 1].item() - torch.tensor(1_000_003 / 100.0, dtype=torch.float64).cos().item()) < 1e-9
