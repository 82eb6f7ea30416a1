"""Tests of the counter-based random numbers: a slice is that of the full tensor, and the numbers are random enough."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_megatron.comm import rng

ROWS, COLUMNS = 256, 512


def row_keys(num_rows: int = ROWS, first: int = 0) -> Tensor:
    """Keys of rows as a model makes them."""
    return rng.bits(rng.key(7, "rows"), torch.arange(first, first + num_rows))


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's, over all elements."""
    return torch.corrcoef(torch.stack((a.double().flatten(), b.double().flatten())))[0, 1].item()


def test_a_key_tells_its_parts_their_order_and_their_types_apart() -> None:
    parts: list[tuple[int | str, ...]] = [(1, 2), (2, 1), (12,), ("1", 2), (1, "2"), ("12",), (1, 2, 0), (-1, 2), ()]
    assert len({rng.key(*each) for each in parts}) == len(parts)
    assert all(-(2**63) <= rng.key(*each) < 2**63 for each in parts)
    # The numbers of a run resumed elsewhere must go on as they were: these are for ever.
    assert rng.key(1234, "weight") == 5943902933469259029
    assert rng.bits(rng.key(1234, "weight"), torch.arange(3)).tolist() == [
        -6846500491254909352,
        5414976087039527400,
        6821783895050398566,
    ]


def test_mixing_is_one_to_one() -> None:
    x = torch.cat((torch.arange(-5000, 5000), torch.tensor([-(2**63), 2**63 - 1])))
    assert rng.mix(x).unique().numel() == x.numel()


@given(st.integers(0, 20), st.integers(1, 30), st.integers(0, 40), st.integers(1, 60), st.floats(0.0, 0.99))
def test_the_mask_of_a_shard_is_the_slice_of_the_whole(
    row: int, num_rows: int, column: int, num_columns: int, probability: float
) -> None:
    full = rng.keep_mask(row_keys(64), 128, probability)
    shard = rng.keep_mask(row_keys(num_rows, first=row), num_columns, probability, first_column=column)
    assert shard.equal(full[row : row + num_rows, column : column + num_columns])


def test_the_mask_of_a_shard_is_not_that_of_another_position() -> None:
    full = rng.keep_mask(row_keys(), COLUMNS, 0.5)
    assert not rng.keep_mask(row_keys(), COLUMNS // 2, 0.5).equal(full[:, COLUMNS // 2 :])
    assert not rng.keep_mask(row_keys(ROWS // 2), COLUMNS, 0.5).equal(full[ROWS // 2 :])


@pytest.mark.parametrize("block", [1, 3 * COLUMNS - 1, 100 * COLUMNS])
def test_a_mask_drawn_in_blocks_is_the_one_drawn_at_once(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = row_keys().view(2, 4, -1)
    full = rng.keep_mask(keys, COLUMNS, 0.3, first_column=5)
    monkeypatch.setattr(rng, "MASK_BLOCK", block)
    assert rng.keep_mask(keys, COLUMNS, 0.3, first_column=5).equal(full)
    # No row stands for another, and a mask without columns is one.
    assert full.flatten(0, 2).unique(dim=0).shape[0] == ROWS
    assert rng.keep_mask(keys, 0, 0.3).shape == (*keys.shape, 0)


@pytest.mark.parametrize("probability", [0.001, 0.1, 0.5, 0.9])
def test_the_drop_rate_is_the_given_probability(probability: float) -> None:
    dropped = ~rng.keep_mask(row_keys(), COLUMNS, probability)
    deviation = math.sqrt(probability * (1 - probability))
    assert abs(dropped.double().mean() - probability) < 4 * deviation / math.sqrt(ROWS * COLUMNS)
    # In each row and in each column too: 5 deviations for the worst of some hundred.
    for dim in (0, 1):
        rates = dropped.double().mean(dim)
        assert (rates - probability).abs().max() < 5 * deviation / math.sqrt(dropped.shape[dim]) + 1 / COLUMNS
    assert rng.keep_mask(row_keys(), COLUMNS, 0.0).all()


def test_rows_columns_and_keys_are_uncorrelated() -> None:
    mask = rng.keep_mask(row_keys(), COLUMNS, 0.5)
    limit = 5 / math.sqrt(ROWS * COLUMNS)
    for step in (1, 2, 3, 8, 64):
        assert abs(correlation(mask[step:], mask[:-step])) < limit
        assert abs(correlation(mask[:, step:], mask[:, :-step])) < limit
        assert abs(correlation(mask[step:, step:], mask[:-step, :-step])) < limit
        assert abs(correlation(mask[step:, :-step], mask[:-step, step:])) < limit
    other = rng.keep_mask(rng.bits(rng.key(7, "other rows"), torch.arange(ROWS)), COLUMNS, 0.5)
    assert abs(correlation(mask, other)) < limit
    # It would notice rows whose numbers are those of their neighbour, moved by one.
    moved = torch.stack([mask[0].roll(row) for row in range(ROWS)])
    assert abs(correlation(moved[1:, 1:], moved[:-1, :-1])) > limit


def test_every_bit_is_set_half_the_time() -> None:
    drawn = rng.bits(rng.key(1, "bits"), torch.arange(1 << 14))
    for bit in range(64):
        rate = ((drawn >> bit) & 1).double().mean()
        assert abs(rate - 0.5) < 5 * 0.5 / 128


def test_uniform_numbers_are_uniform_and_never_0_or_1() -> None:
    drawn = rng.uniform(rng.key(3, "uniform"), torch.arange(1 << 16))
    assert drawn.dtype == torch.float64 and drawn.min() > 0.0 and drawn.max() < 1.0
    counts = torch.histc(drawn, bins=64, min=0.0, max=1.0)
    # Chi squared with 63 degrees of freedom: mean 63, deviation 11.
    assert ((counts - 1024).square() / 1024).sum() < 63 + 5 * 11.3


def test_normal_numbers_have_the_moments_of_the_normal_distribution() -> None:
    drawn = rng.normal(rng.key(5, "normal"), torch.arange(1 << 16))
    scale = 1 / 256
    assert abs(drawn.mean()) < 4 * scale
    assert abs(drawn.square().mean() - 1) < 4 * math.sqrt(2) * scale
    assert abs(drawn.pow(3).mean()) < 4 * math.sqrt(15) * scale
    assert abs(drawn.pow(4).mean() - 3) < 4 * math.sqrt(96) * scale
    assert abs(correlation(drawn[1:], drawn[:-1])) < 4 * scale
    assert drawn.abs().max() < 6


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=3))
def test_the_index_of_a_box_is_its_position_in_the_tensor(dims: list[tuple[int, int, int]]) -> None:
    shape = [extent for extent, _, _ in dims]
    offsets = [min(offset, extent - 1) for extent, offset, _ in dims]
    sizes = [min(size, extent - offset) for (extent, _, size), offset in zip(dims, offsets, strict=True)]
    full = torch.arange(math.prod(shape)).view(shape)
    slices = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    assert rng.box_index(shape, offsets, sizes, torch.device("cpu")).equal(full[slices])


def test_filling_a_box_in_blocks_gives_the_slice_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    full = rng.fill_normal_(torch.empty(20, 30), 0.5, rng.key(0, "w"), (20, 30), (0, 0))
    monkeypatch.setattr(rng, "_BLOCK", 7)
    part = torch.empty(30, 5).t()  # not contiguous, as the valid part of a padded shard is not
    rng.fill_normal_(part, 0.5, rng.key(0, "w"), (20, 30), (3, 0))
    assert part.equal(full[3:8])
    assert not part.equal(full[4:9])


def test_sample_keys_depend_on_the_index_in_the_global_batch_and_not_on_its_cut() -> None:
    cpu = torch.device("cpu")
    full = rng.Draws(seed=3, step=5).sample_keys(8, cpu)
    assert torch.cat([rng.Draws(seed=3, step=5, first_sample=i).sample_keys(2, cpu) for i in (0, 2, 4, 6)]).equal(full)
    others = [rng.Draws(seed=4, step=5), rng.Draws(seed=3, step=6), rng.Draws(seed=3, step=5, call=1)]
    for other in others:
        assert not (other.sample_keys(8, cpu) == full).any()
    assert full.unique().numel() == 8
