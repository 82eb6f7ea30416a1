"""Copies of metrics hold one global batch: rows of ranks that count, and nothing of steps before."""

import math

import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor, nn

from lightning_megatron.mesh import Axis
from lightning_megatron.trainer.setup.metric_sync import sync_metrics_over
from lightning_megatron.trainer.step.batch_metrics import BatchMetrics
from tests.harness.ranks import on_ranks


def worldwide() -> Axis:
    return Axis("dp", 2, dist.get_rank(), (0, 1), dist.group.WORLD)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sum, self.largest = torchmetrics.SumMetric(), torchmetrics.MaxMetric()
        self.wrapped = torchmetrics.MinMaxMetric(torchmetrics.SumMetric())
        # Its user synchronises it.
        self.own = torchmetrics.SumMetric(dist_sync_fn=lambda state, group: [state])


@on_ranks(2)
def test_a_value_is_that_of_the_parts_of_all_ranks_that_count() -> None:
    module, dp = Counts(), worldwide()
    sync_metrics_over(module, dp)
    metrics, rank = BatchMetrics(module.modules(), dp), dp.rank

    def step(parts: list[Tensor], num_copies: float, *, has_all: bool = True) -> list[Tensor | None]:
        with metrics.watching():
            for part in parts:
                for metric in (module.sum, module.largest, module.own) if has_all else (module.sum,):
                    metric(part)
                    metrics.take(metric)
                # Only a call that was made since is taken.
                metrics.take(module.sum)
                module.wrapped(part)
                metrics.take(module.wrapped)
        return metrics.values([module.sum, module.largest, module.wrapped, module.own], num_copies)

    parts = [torch.tensor([1.0, 2.0]) + 10 * rank, torch.tensor([5.0]) + 10 * rank]
    assert step(parts, 1) == [46, 15, None, None]
    # The second step has nothing of the first.
    assert step(parts[:1], 1) == [26, 12, None, None]
    # The rows of a rank that repeats its last batch count for nothing.
    assert step(parts, math.inf if rank else 1) == [8, 5, None, None]
    # All ranks agree on what has a value.
    assert step(parts, 1, has_all=rank == 0) == [46, None, None, None]
    assert module.sum.compute() == 46 + 26 + 46 + 46
