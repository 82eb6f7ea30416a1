"""Cutting a batch and joining the results give back what was there, whatever the batch is made of."""

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_megatron.pipeline.microbatches import combine, num_rows, split


@given(rows=st.integers(1, 40), count=st.integers(1, 12))
def test_microbatches_are_nearly_equal_the_larger_first_and_nothing_is_lost(rows: int, count: int) -> None:
    batch = {"x": torch.arange(rows), "names": [f"row {i}" for i in range(rows)], "scale": torch.tensor(2.0), "k": 3}
    parts = split(batch, count)
    sizes = [num_rows(part) for part in parts]
    assert len(parts) == min(count, rows) and sum(sizes) == rows
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert [name for part in parts for name in part["names"]] == batch["names"]
    assert all(part["scale"] is batch["scale"] and part["k"] == 3 for part in parts)


def test_the_cut_is_a_view() -> None:
    x = torch.zeros(4)
    split((x,), 2)[1][0].add_(1)
    assert x.tolist() == [0, 0, 1, 1]


def test_a_change_of_one_microbatch_in_place_is_none_of_the_others() -> None:
    first, second = split(torch.ones(4, 2), 2)
    weight = torch.ones(2, requires_grad=True)
    product = (weight * first).sum()
    second.mul_(3)
    product.backward()
    assert weight.grad is not None and weight.grad.tolist() == [2.0, 2.0]


def test_lists_of_tensors_are_tensors_of_rows_and_not_rows() -> None:
    pair = [torch.arange(2), torch.arange(2) + 10]
    first, second = split(pair, 2)
    assert [t.tolist() for t in first] == [[0], [10]] and [t.tolist() for t in second] == [[1], [11]]


def test_tensors_of_different_rows_are_refused_only_where_they_must_be_cut() -> None:
    batch = (torch.zeros(4), torch.zeros(3))
    assert split(batch, 1) == [batch]
    with pytest.raises(ValueError, match=r"have \[3, 4\] rows.*set num_microbatches=1"):
        split(batch, 2)


def test_scalars_are_averaged_by_weight_and_rows_joined() -> None:
    outputs = [{"loss": torch.tensor(1.0), "y": torch.zeros(2, 3)}, {"loss": torch.tensor(4.0), "y": torch.ones(1, 3)}]
    joined = combine(outputs, [torch.tensor(2.0), torch.tensor(1.0)])
    assert joined["loss"].item() == pytest.approx(2.0)
    assert joined["y"].sum(-1).tolist() == [0, 0, 3]
    zero = combine([torch.tensor(0.0), torch.tensor(0.0)], [torch.tensor(0.0), torch.tensor(0.0)])
    assert zero.item() == 0.0


class Opaque:
    """Somebody's own kind of batch, of which nothing is known."""

    def __init__(self) -> None:
        self.x = torch.ones(4)


def test_a_batch_without_rows_is_refused_and_not_trained_with_weight_zero() -> None:
    with pytest.raises(ValueError, match="Opaque holds no rows"):
        split(Opaque(), 2)


@dataclass(frozen=True)
class Record:
    x: Tensor
    names: list[str]
    scale: float


def test_dataclasses_and_mappings_of_ones_own_are_cut_inside() -> None:
    batch = (Record(torch.arange(5), list("abcde"), 2.0), UserDict({"y": torch.arange(10).view(5, 2), "k": 1}))
    assert num_rows(batch) == 5
    first, second = split(batch, 2)
    assert (first[0].x.tolist(), first[0].names, first[0].scale) == ([0, 1, 2], ["a", "b", "c"], 2.0)
    assert (second[0].x.tolist(), second[0].names) == ([3, 4], ["d", "e"])
    assert (
        isinstance(first[1], UserDict) and first[1]["y"].shape == (3, 2) and second[1]["y"].tolist() == [[6, 7], [8, 9]]
    )
    assert batch[0].x.tolist() == [0, 1, 2, 3, 4]


def test_records_of_the_rows_are_cut_with_them_whatever_they_hold() -> None:
    images = torch.arange(4.0).view(4, 1)
    targets = [{"boxes": torch.zeros(row, 4), "number": row} for row in range(4)]
    assert num_rows((images, targets)) == 4
    first, second = split((images, targets), 2)
    assert [one["number"] for one in first[1]] == [0, 1] and [one["number"] for one in second[1]] == [2, 3]
    # A list of records alone is no list of rows: as many records could be parts of one batch.
    assert num_rows([{"x": images}, {"y": images}]) == 4
    # Two records of as many rows are cut inside, and of other rows they are refused.
    views = {"x": torch.arange(4.0), "views": [{"x": images}, {"x": images}]}
    assert [len(one["x"]) for one in split(views, 2)[1]["views"]] == [2, 2]
    for rows in (3, 8):
        with pytest.raises(ValueError, match="rows; to be cut into microbatches"):
            split({"x": torch.arange(4.0), "views": [{"x": torch.arange(float(rows))}] * 2}, 2)
