"""Values of metrics over a global batch, of what all its parts have added to them.

A metric that a step calls and logs with `on_step` gives each part a value, and few metrics are the mean of those: a
ratio of counts, a median or an area under a curve is not. So a copy of the metric takes in what each part gives it.
"""

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.metric import CompositionalMetric

from lightning_megatron.mesh import Axis
from lightning_megatron.trainer.setup.metric_sync import gather_over, is_synced_over

Given = tuple[tuple[Any, ...], dict[str, Any]]


class BatchMetrics:
    """Copies of metrics, each of which holds one global batch.

    Metrics with a call of their own, such as wrappers, and those that their user synchronises have none.
    """

    def __init__(self, modules: Iterable[nn.Module], dp: Axis) -> None:
        self._dp = dp
        # By identity: the hash of a metric is that of its state.
        self._metrics = {id(one): one for one in modules if _has_one_call(one)}
        self._given: dict[int, Given] = {}
        self._copies: dict[int, Metric] = {}
        # Those whose copies have taken in something of the batch.
        self._taken: set[int] = set()
        # Ranks of dp whose batches count: one that has none left repeats one.
        self._counting = [True] * dp.size

    @property
    def holding(self) -> list[Metric]:
        """The copies that hold a part of the batch."""
        return [self._copies[key] for key in self._taken]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the block, which runs the parts of a batch, what metrics are called with is kept until it is taken."""
        self._given, self._taken = {}, set()
        handles = [
            metric.register_forward_pre_hook(partial(self._keep, key), with_kwargs=True)
            for key, metric in self._metrics.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take(self, metric: Metric) -> None:
        """Adds what a metric was called with last to what its copy holds of the batch."""
        key = id(metric)
        if key not in self._given:
            return
        if key not in self._copies:
            self._copies[key] = self._copy_of(metric)
        if key not in self._taken:
            self._copies[key].reset()
        args, kwargs = self._given.pop(key)
        self._copies[key].update(*args, **kwargs)
        self._taken.add(key)

    def values(self, metrics: Sequence[Metric], num_copies: float) -> list[Tensor | None]:
        """The value of each metric over the global batch, [], or None where some rank's copy holds nothing of it.

        Collective over dp. Where `num_copies` is infinite the batch of this rank counts for nothing.
        """
        if not metrics:
            return []
        flags = torch.tensor([num_copies < math.inf, *(id(metric) in self._taken for metric in metrics)])
        of_ranks = torch.stack(gather_over(self._dp, flags))
        self._counting = of_ranks[:, 0].tolist()
        are_taken = of_ranks[:, 1:].all(0).tolist()
        return [self._value(id(one)) if is_taken else None for one, is_taken in zip(metrics, are_taken, strict=True)]

    def _keep(self, key: int, metric: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._given[key] = args, kwargs

    def _copy_of(self, metric: Metric) -> Metric:
        parts = [one for one in metric.modules() if isinstance(one, Metric)]
        # What synchronises metrics, and this, which watches them, are no part of a copy.
        kept = {id(one): one for one in (self, *(part.dist_sync_fn for part in parts))}
        # States may have gradients, and such tensors cannot be copied.
        states = [(part, full_state(part)) for part in parts]
        metric.reset()
        found = copy.deepcopy(metric, kept)
        for part, state in states:
            restore(part, state)
        for part in (one for one in found.modules() if isinstance(one, Metric)):
            part.dist_sync_fn = self._gather
        return found

    def _value(self, key: int) -> Tensor | None:
        with warnings.catch_warnings():
            # What it says of its states, the metric itself has said.
            warnings.simplefilter("ignore", UserWarning)
            value = self._copies[key].compute()
        return value if isinstance(value, Tensor) and value.numel() == 1 else None

    def _gather(self, result: Tensor, group: Any = None) -> list[Tensor]:
        """A state of all data-parallel ranks whose batches count."""
        found = gather_over(self._dp, result, group)
        return [one for one, is_counted in zip(found, self._counting, strict=True) if is_counted]


def _has_one_call(module: nn.Module) -> bool:
    """Whether it is a metric whose call gives the value of what it is called with, synchronised by the strategy."""
    if not isinstance(module, Metric) or type(module).forward not in (Metric.forward, CompositionalMetric.forward):
        return False
    return all(is_synced_over(one) for one in module.modules() if isinstance(one, Metric))


def full_state(metric: Metric) -> dict[str, Any]:
    """A metric's state as it is now; metrics may add to their tensors in place."""
    states = {
        name: list(value) if isinstance(value, list) else value.clone() for name, value in metric.metric_state.items()
    }
    return {
        "states": states,
        "update_count": metric._update_count,
        "forward_cache": metric._forward_cache,
        "computed": metric._computed,
    }


def restore(metric: Metric, state: dict[str, Any]) -> None:
    """Restores a state that `full_state` returned."""
    for name, value in state["states"].items():
        setattr(metric, name, value)
    metric._update_count = state["update_count"]
    metric._forward_cache = state["forward_cache"]
    metric._computed = state["computed"]
