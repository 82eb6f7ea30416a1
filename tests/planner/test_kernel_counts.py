"""Counts of kernels are those of the tensors that they multiply, read and write."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.planner.memory_tracker import MemoryTracker

META = torch.device("meta")


def counted(run: Callable[[], object]) -> Counter[str]:
    tracker = MemoryTracker(META)
    with tracker:
        run()
        return Counter({kind: count for kind, count in tracker.take_counts().items() if count})


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def test_a_product_has_flops_and_edges_and_nothing_else() -> None:
    m, k, n = 24, 40, 56
    flops, edges = 2 * m * k * n, 2 * (m * n + n * k + k * m)
    x, y = empty(m, k), empty(k, n)
    assert counted(lambda: x @ y) == pytest.approx({"products": flops, "edges": edges})
    batch_x, batch_y = empty(3, m, k), empty(3, k, n)
    assert counted(lambda: batch_x @ batch_y) == pytest.approx({"products": 3 * flops, "edges": 3 * edges})
    # Four experts have the rows of one product each.
    rows, weights = empty(4 * m, k, dtype=torch.bfloat16), empty(4, k, n, dtype=torch.bfloat16)
    ends = torch.empty(4, dtype=torch.int32, device=META)
    grouped = counted(lambda: torch.nn.functional.grouped_mm(rows, weights, offs=ends))
    assert grouped == pytest.approx({"products": 4 * flops, "grouped edges": 4 * edges, "grouped products": 1})


def test_a_backward_of_fused_attention_recomputes_its_scores() -> None:
    q = empty(1, 2, 32, 16, dtype=torch.bfloat16).requires_grad_()
    forward = counted(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))["attention"]
    output = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    backward = counted(lambda: torch.autograd.grad(output, q, torch.empty_like(output)))["attention"]
    assert forward == 4 * 2 * 32 * 32 / 2 * 16 and backward == 2.5 * forward


@pytest.mark.parametrize(
    ("run", "moved"),
    [
        (lambda x: x + x.t(), 3 * 400),
        (lambda x: x.view(100).unsqueeze(0).expand(7, 100), 0),
        (lambda x: x.reshape(5, 20), 0),
        (lambda x: torch.empty_like(x), 0),
        (lambda x: torch.zeros_like(x), 400),
        (lambda x: x.to(torch.bfloat16), 400 + 200),
        (lambda x: x.add_(1), 2 * 400),
        (lambda x: x.copy_(x.t()), 2 * 400),
        (lambda x: x.zero_(), 400),
        (lambda x: x.sum(), 404),
        # A row is read once for all that it is added to.
        (lambda x: x + x[0].expand(10, 10), 2 * 400 + 400),
        (lambda x: torch.cat([x, x]), 4 * 400),
        (lambda x: F.embedding(torch.empty(3, dtype=torch.int64, device=META), x), 2 * 120),
        (lambda x: x.index_add_(0, torch.empty(1, dtype=torch.int64, device=META), x[:1]), 3 * (8 + 40)),
    ],
)
def test_bytes_are_those_that_a_kernel_reads_and_writes(run: Callable[[Tensor], object], moved: int) -> None:
    x = empty(10, 10)
    assert counted(lambda: run(x))["moved bytes"] == moved
