"""Tests of collectives in chunks: what they give, in which order they start and land, and what an error leaves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from lightning_megatron.comm import collectives
from lightning_megatron.comm.chunked_collectives import compute_on_gathered, scatter_computed
from lightning_megatron.comm.collectives import all_reduce
from lightning_megatron.mesh import Axis
from tests.harness.ranks import run_on_ranks

# Rows of a rank: chunks of 4, 4 and 2.
ROWS, COLUMNS, OUT, CHUNKS = 10, 6, 5, 3
Function = Callable[..., Tensor]


class Log(list[str]):
    """What happens in this process, in order: collectives that start and land, and computes."""

    def __init__(self, *, fails_at: int = -1) -> None:
        super().__init__()
        self.num_computed, self.fails_at = 0, fails_at
        for name in ("all_gather", "reduce_scatter"):
            setattr(collectives, name, self.noting(getattr(collectives, name)))

    def noting(self, real: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            self.append("starts")
            pending = real(*args, **kwargs)
            if isinstance(pending, Tensor):
                self.append("lands")
                return pending
            assert pending.work is not None
            finish = pending.finish

            def landing(landed: Tensor) -> Tensor:
                self.append("lands")
                return landed if finish is None else finish(landed)

            pending.finish = landing
            return pending

        return collective

    def computing(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        def compute(x: Tensor) -> Tensor:
            if self.num_computed == self.fails_at:
                raise ArithmeticError("too many")
            self.num_computed += 1
            self.append("computes")
            return x @ weight

        return compute


def found_on_rank(run: Function, num_chunks: int, fails_at: int) -> tuple[Tensor | None, list[str], Tensor]:
    """What `run` gives on this rank, what it did, and a sum over the ranks afterwards."""
    rank, size = dist.get_rank(), dist.get_world_size()
    axis = Axis("sp", size, rank, tuple(range(size)), dist.group.WORLD)
    x, weight = rows_of(rank if run is compute_on_gathered else slice(None), size), weight_of(rank)
    if run is scatter_computed:
        x = x.flatten(0, 1) * (rank + 1)
    log, out = Log(fails_at=fails_at), None
    try:
        out = run(x, axis, num_chunks, log.computing(weight))
    except ArithmeticError:
        assert fails_at >= 0
    return out, list(log), all_reduce(torch.full((3,), rank + 1.0), axis)


def rows_of(ranks: int | slice, size: int) -> Tensor:
    return torch.arange(size * ROWS * COLUMNS, dtype=torch.float64).view(size, ROWS, COLUMNS)[ranks].sin()


def weight_of(rank: int) -> Tensor:
    return (torch.arange(COLUMNS * OUT, dtype=torch.float64).view(COLUMNS, OUT) + rank).cos()


def wanted(run: Function, rank: int, size: int) -> Tensor:
    """What one device computes."""
    x = rows_of(slice(None), size).flatten(0, 1)
    if run is compute_on_gathered:
        return x @ weight_of(rank)
    total = sum((each + 1) * x @ weight_of(each) for each in range(size))
    assert isinstance(total, Tensor)
    return total.chunk(size)[rank]


ORDERS = {
    compute_on_gathered: "starts starts lands computes starts lands computes lands computes",
    scatter_computed: "computes starts computes starts computes starts lands lands lands",
}
both = pytest.mark.parametrize("run", ORDERS)


@both
@pytest.mark.parametrize("size", [2, 4])
def test_each_message_but_one_is_in_flight_beside_a_compute(run: Function, size: int) -> None:
    found = run_on_ranks(size, found_on_rank, run, CHUNKS, -1)
    for rank, (out, log, _) in enumerate(found):
        assert " ".join(log) == ORDERS[run]
        assert out is not None
        assert_close(out, wanted(run, rank, size), rtol=0, atol=1e-12)
        other = wanted(run, (rank + 1) % size, size)
        assert (out - other).abs().max() > 1e-3


@both
@pytest.mark.parametrize(("num_chunks", "num_messages"), [(1, 1), (4, 4), (99, ROWS)])
def test_rows_go_in_so_many_messages_or_fewer(run: Function, num_chunks: int, num_messages: int) -> None:
    for rank, (out, log, _) in enumerate(run_on_ranks(2, found_on_rank, run, num_chunks, -1)):
        assert log.count("starts") == log.count("lands") == log.count("computes") == num_messages
        assert_close(out, wanted(run, rank, 2), rtol=0, atol=1e-12)


@both
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("fails_at", range(CHUNKS))
def test_an_error_leaves_no_message_in_flight(run: Function, size: int, fails_at: int) -> None:
    for out, log, total in run_on_ranks(size, found_on_rank, run, CHUNKS, fails_at):
        assert out is None and log.count("computes") == fails_at
        num_started = min(fails_at + 2, CHUNKS) if run is compute_on_gathered else fails_at
        assert log.count("starts") == log.count("lands") == num_started
        assert_close(total, torch.full((3,), size * (size + 1) / 2))


@both
def test_an_axis_of_one_rank_computes_all_rows_at_once(run: Function) -> None:
    x, log = torch.randn(ROWS, COLUMNS), Log.__new__(Log)
    log.num_computed, log.fails_at = 0, -1
    assert torch.equal(run(x, Axis.alone(0), CHUNKS, log.computing(torch.eye(COLUMNS))), x)
    assert log == ["computes"]
