"""Metrics that are logged for a step have the value of the global batch.

A metric that a step calls and logs for the step gives each part a value, and few metrics are the mean of those: a
ratio of counts, a median or an area under a curve is not. So what each part gives a metric is added to a state of its
own, from nothing in each step, and the states of data-parallel ranks are merged as the metric says.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis
from lightning_megatron.trainer.setup.metric_sync import is_synced_over

States = Mapping[str, Any]
"""The state of a metric: tensors and lists of tensors by the name of the attribute."""


@dataclass(frozen=True, eq=False)
class _Call:
    """The arguments with which a metric was called."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: tuple[int, ...]

    @property
    def is_as_called(self) -> bool:
        """Whether no tensor of it was changed since."""
        return self.versions == _versions(self.args, self.kwargs)


class BatchMetrics:
    """Keeps a state of one global batch for each metric that is logged, by its name in the log.

    Metrics whose call is another one than torchmetrics' own, such as wrappers and compositions, have none, nor have
    those that their user synchronizes.
    """

    def __init__(self, modules: Iterable[nn.Module], dp: Axis) -> None:
        self._dp = dp
        # By identity: the hash of a metric is that of its state.
        self._metrics = {
            id(one): one
            for one in modules
            if isinstance(one, Metric) and type(one).forward is Metric.forward and is_synced_over(one)
        }
        self._calls: dict[int, _Call] = {}
        self.states: dict[str, States | None] = {}
        """States that the parts of a batch added to, by name; None where arguments changed before they were added."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keeps the last call of each metric inside the block, which runs the parts of a batch."""
        self.states = {}
        handles = [
            metric.register_forward_pre_hook(partial(self._keep, key), with_kwargs=True)
            for key, metric in self._metrics.items()
        ]
        try:
            yield
        finally:
            self.forget_calls()
            for handle in handles:
                handle.remove()

    def forget_calls(self) -> None:
        """Frees the arguments of calls, once the part of the batch that made them has ended."""
        self._calls.clear()

    def take(self, name: str, metric: Metric) -> None:
        """Adds the last call of a metric to the state of a name; without a call nothing is added."""
        call = self._calls.get(id(metric))
        if call is None or self.states.get(name, {}) is None:
            return
        if not call.is_as_called:
            self.states[name] = None
            return
        with _set_aside(metric):
            for attribute, state in _copied(self.states.get(name) or {}).items():
                setattr(metric, attribute, state)
            metric.update(*call.args, **call.kwargs)
            self.states[name] = dict(metric.metric_state)

    def values(self, metrics: Mapping[str, Metric], num_copies: float) -> dict[str, Tensor]:
        """Computes the value of each metric over the global batch, [], by name, where all ranks have a state.

        Collective over dp, in one message. Where `num_copies` is infinite the batch of this rank counts for nothing.
        """
        if not metrics:
            return {}
        own = {name: tree_map(_on_host, self.states.get(name)) for name in metrics}
        ranks = collectives.gather_objects((num_copies < math.inf, own), self._dp)
        self.states = {}
        values = {}
        for name, metric in metrics.items():
            states = [states[name] for counts, states in ranks if counts]
            if states and all(state is not None for state in states):
                value = _value(metric, states)
                if isinstance(value, Tensor) and value.numel() == 1:
                    values[name] = value
        return values

    def _keep(self, key: int, metric: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls[key] = _Call(args, kwargs, _versions(args, kwargs))


def full_state(metric: Metric) -> dict[str, Any]:
    """Copies the state of a metric, which may add to its tensors in place."""
    return {
        "states": _copied(metric.metric_state),
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


@contextmanager
def _set_aside(metric: Metric) -> Iterator[None]:
    """Gives a metric a new state inside the block, which is not synchronized."""
    held, to_sync = full_state(metric), metric._to_sync
    metric.reset()
    metric._to_sync = False
    try:
        yield
    finally:
        restore(metric, held)
        metric._to_sync = to_sync


def _value(metric: Metric, ranks: list[States]) -> Any:
    """Computes the value of a metric from the states of several ranks."""
    with _set_aside(metric), warnings.catch_warnings():
        # What it says of its states, the metric itself has said.
        warnings.simplefilter("ignore", UserWarning)
        # Torchmetrics merges states inside of its own messages alone, and in this way.
        for attribute, reduction in metric._reductions.items():
            parts = [tree_map(lambda one: one.to(metric.device), states[attribute]) for states in ranks]
            merged: Any = parts[0]
            if isinstance(merged, list):
                merged = [one for part in parts for one in part]
                if reduction not in (None, dim_zero_cat):
                    merged = reduction(merged)  # type: ignore[operator]
            elif len(parts) > 1:
                merged = torch.stack(parts)
                merged = merged if reduction is None else reduction(merged)  # type: ignore[operator]
            setattr(metric, attribute, merged)
        metric._update_count = 1
        return metric.compute()


def _copied(states: States) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, list) else value.clone() for name, value in states.items()}


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    return tuple(
        one._version for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and not one.is_inference()
    )
