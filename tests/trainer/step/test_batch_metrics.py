"""States of metrics hold one global batch: rows of ranks that count, and nothing of steps before."""

import math
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor, nn

from lightning_megatron.mesh import Axis
from lightning_megatron.trainer.setup.metric_sync import sync_metrics_over
from lightning_megatron.trainer.step.batch_metrics import BatchMetrics
from tests.harness.ranks import on_ranks


class Unreduced(torchmetrics.Metric):
    """Keeps rows in a list that no function reduces, and a largest number for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx=None)
        self.add_state("largest", torch.tensor(-1.0), dist_reduce_fx=None)
        # Cannot be copied.
        self.last: Any = None

    def update(self, rows: Tensor) -> None:
        self.last = (2 * rows.requires_grad_()).sum()
        self.rows += list(rows.detach())
        self.largest = torch.maximum(self.largest, rows.detach().max())

    def compute(self) -> Tensor:
        return torch.stack(self.rows).sum() + 1000 * self.largest.max()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sum, self.largest, self.unreduced = torchmetrics.SumMetric(), torchmetrics.MaxMetric(), Unreduced()
        self.composed = torchmetrics.SumMetric() / torchmetrics.MaxMetric()
        # Its user synchronizes it.
        self.own = torchmetrics.SumMetric(dist_sync_fn=lambda state, group: [state])

    def named(self) -> dict[str, torchmetrics.Metric]:
        return {name: one for name, one in self.named_children() if isinstance(one, torchmetrics.Metric)}


def worldwide() -> Axis:
    return Axis("dp", 2, dist.get_rank(), (0, 1), dist.group.WORLD)


@on_ranks(2)
def test_a_value_is_that_of_the_parts_of_all_ranks_that_count() -> None:
    module, dp = Counts(), worldwide()
    sync_metrics_over(module, dp)
    metrics, rank = BatchMetrics(module.modules(), dp), dp.rank

    def step(parts: list[Tensor], num_copies: float, without: tuple[str, ...] = ()) -> dict[str, float]:
        with metrics.watching():
            for part in parts:
                for name, metric in module.named().items():
                    if name not in without:
                        metric(part)
                        metrics.take(name, metric)
                metrics.forget_calls()
                # Only a call of this part is taken.
                metrics.take("sum", module.sum)
        return {name: float(value) for name, value in metrics.values(module.named(), num_copies).items()}

    # Ranks have different numbers of parts.
    parts = [torch.tensor([1.0, 2.0]) + 10 * rank, torch.tensor([5.0])][: 2 - rank]
    assert step(parts, 1) == {"sum": 31, "largest": 12, "unreduced": 12031}
    # The second step has nothing of the first.
    assert step(parts[:1], 1) == {"sum": 26, "largest": 12, "unreduced": 12026}
    # The rows of a rank that repeats its last batch count for nothing.
    assert step(parts, math.inf if rank else 1) == {"sum": 8, "largest": 5, "unreduced": 5008}
    # All ranks agree on what has a value.
    assert step(parts, 1, without=("largest",) if rank else ()) == {"sum": 31, "unreduced": 12031}
    # The metrics themselves go on with all steps, and with their own ways to sync.
    assert module.sum.compute() == 31 + 26 + 31 + 31
    assert module.own.compute() == [8 + 3 + 8 + 8, 23 * 4][rank]


def test_calls_under_two_names_and_changed_arguments() -> None:
    module, alone = Counts(), Axis("dp", 1, 0, (0,))
    module.wrapped = torchmetrics.MinMaxMetric(torchmetrics.SumMetric())
    sync_metrics_over(module, alone)
    metrics = BatchMetrics(module.modules(), alone)
    with metrics.watching():
        for part in (torch.tensor([1.0]), torch.tensor([10.0])):
            module.sum(part)
            metrics.take("first", module.sum)
            metrics.take("first again", module.sum)
            module.sum(2 * part)
            metrics.take("second", module.sum)
            module.largest(part)
            part += 1
            metrics.take("changed", module.largest)
            module.wrapped(part)
            metrics.take("wrapped", module.wrapped)
        before = dict(metrics.states)
        module.sum(part)
        metrics.take("first", module.sum)
        metrics.states = before
    names = {"first": module.sum, "first again": module.sum, "second": module.sum, "changed": module.largest}
    names["wrapped"] = module.wrapped
    assert metrics.values(names, 1) == {"first": 11, "first again": 11, "second": 22}
    assert not metrics.states


def test_a_collection_goes_on_as_if_nothing_were_taken() -> None:
    module = nn.Module()
    module.both = torchmetrics.MetricCollection(
        [torchmetrics.classification.BinaryPrecision(), torchmetrics.classification.BinaryRecall()]
    )
    alone = Axis("dp", 1, 0, (0,))
    sync_metrics_over(module, alone)
    wanted = module.both.clone()
    metrics = BatchMetrics(module.modules(), alone)
    inputs, labels = torch.tensor([0.9, 0.2, 0.8]), torch.tensor([1, 1, 0])
    for metric in (module.both, wanted):
        # The first update finds out which metrics have the same states.
        metric.update(inputs, labels)
    with metrics.watching():
        for _ in range(2):
            module.both(inputs, labels)
            wanted(inputs, labels)
            for name, metric in module.both.items():
                metrics.take(name, metric)
        module.both.update(1 - inputs, labels)
        wanted.update(1 - inputs, labels)
    assert module.both.compute() == wanted.compute()
