"""Tests of CUDA tensors without numbers: they fail where a GPU's would, and what is asked of a GPU is counted."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.device_work import DeviceWork
from tests.harness.fake_cuda import FakeCuda
from tests.harness.ranks import on_ranks


@on_ranks(1, init=False)
def test_gradients_are_on_the_device_of_the_weights() -> None:
    with FakeCuda():
        linear = nn.Linear(8, 4, device="cuda")
        output = linear(torch.randn(3, 8).to("cuda"))
        output.sum().backward()
        assert output.device == torch.device("cuda", 0)
        assert linear.weight.grad is not None and linear.weight.grad.is_cuda


@on_ranks(1, init=False)
def test_a_tensor_on_the_wrong_device_is_refused() -> None:
    with FakeCuda(), pytest.raises(RuntimeError, match="cuda"):
        torch.ones(3, device="cuda") + torch.ones(3)


@on_ranks(1, init=False)
def test_integers_of_the_host_are_known_on_the_device_and_nothing_else_is() -> None:
    with FakeCuda():
        given = torch.tensor([3, 1, 2], device="cuda")
        kept = given[1:]
        given[2] = 7
        assert (kept.cumsum(0) + torch.arange(2, device="cuda")).tolist() == [1, 9]
        given[:1] = torch.randn(1, device="cuda").long()
        assert given.tolist() == [0, 0, 0]
        assert torch.ones(2, device="cuda").sum().item() == 0


def of_numbers(run: Callable[[Tensor, Tensor], object]) -> list[int]:
    """Kernels, bytes, FLOPs, copies and waits of a function of float32 [4, 8] and int64 [4] on the device."""
    with FakeCuda():
        numbers, index = torch.zeros(4, 8, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
        with DeviceWork() as counted:
            run(numbers, index)
    work = counted.work
    return [work.num_kernels, work.num_bytes, work.flops, work.copies.total(), work.waits.total()]


ASKED: dict[str, tuple[Callable[[Tensor, Tensor], object], list[int]]] = {
    "a sum": (lambda x, i: x + x.t().t(), [1, 3 * 128, 0, 0, 0]),
    "a row added to each": (lambda x, i: x.add_(x[0].expand(4, 8)), [1, 2 * 128 + 32, 0, 0, 0]),
    "views": (lambda x, i: x.view(8, 4)[2:].t().unsqueeze(0), [0, 0, 0, 0, 0]),
    "a tensor without numbers": (lambda x, i: torch.empty_like(x), [0, 0, 0, 0, 0]),
    "zeros": (lambda x, i: x.zero_(), [1, 128, 0, 0, 0]),
    "a product": (lambda x, i: x @ x.t(), [0, 0, 2 * 4 * 4 * 8, 0, 0]),
    "rows by index": (lambda x, i: x[i], [1, 2 * 128 + 32, 0, 0, 0]),
    "a copy to the device": (lambda x, i: torch.ones(3).to("cuda"), [0, 0, 0, 1, 1]),
    "a list": (lambda x, i: torch.tensor([1, 2], device="cuda"), [0, 0, 0, 1, 1]),
    "a copy that does not wait": (lambda x, i: torch.ones(3).to("cuda", non_blocking=True), [0, 0, 0, 1, 0]),
    "a copy to memory that is not pinned": (lambda x, i: x.to("cpu", non_blocking=True), [0, 0, 0, 1, 1]),
    "a number": (lambda x, i: x.sum().item(), [1, 128 + 4, 0, 0, 1]),
    "all numbers": (lambda x, i: i.tolist(), [0, 0, 0, 1, 1]),
    "repeats whose number is known": (
        lambda x, i: i.repeat_interleave(i.fill_(2), output_size=8),
        [3, 32 + (32 + 64) + (2 * 64 + 64), 0, 0, 0],
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_of_the_device_is_counted(name: str) -> None:
    check_counts(name)


@on_ranks(1, init=False)
def check_counts(name: str) -> None:
    run, wanted = ASKED[name]
    found = of_numbers(run)
    assert found == wanted, found


@on_ranks(1, init=False)
def test_a_wait_is_told_with_the_line_of_the_package_that_causes_it() -> None:
    from lightning_megatron.context.documents import documents_of

    with FakeCuda(), DeviceWork() as counted:
        documents_of(torch.zeros(2, 8, dtype=torch.int64).to("cuda"))
    assert any(where.startswith("_to_copy at context/documents.py:") for where in counted.work.waits)
