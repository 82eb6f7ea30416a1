"""What a step logs: recorded while it runs, averaged over microbatches and replicas, logged once on every rank.

A schedule enters the step once per microbatch, and past the model call on the last stage only, so `self.log` there
would log parts, and only on some ranks. A monitored key that some ranks lack makes Lightning's ModelCheckpoint hang.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_megatron.comm import collectives, rng
from lightning_megatron.mesh import Mesh

_SIGNATURE = inspect.signature(LightningModule.log)
_HEAD = 3  # total weight, mean loss, key of the schema
_SLOTS = 64  # numbers that travel in one message of fixed size; a step that logs more sends a second one
Schema = list[tuple[str, dict[str, Any], str | None]]
"""Each logged name with the options it was logged with, and the attribute name of its metric where it is one."""


@dataclass
class _Entry:
    """One logged name: how it was logged, and its value and place in each microbatch."""

    options: dict[str, Any]
    values: list[tuple[int, Tensor]] = field(default_factory=list)
    metric: Metric | None = None

    @property
    def reduction(self) -> Literal["mean", "sum", "max", "min"]:
        function = self.options.get("reduce_fx", "mean")
        name = function if isinstance(function, str) else getattr(function, "__name__", "")
        match name:
            case "mean" | "avg":
                return "mean"
            case "sum":
                return "sum"
            case "max":
                return "max"
            case "min":
                return "min"
        raise ValueError(
            f"reduce_fx ({function!r}) cannot be taken over microbatches and replicas; "
            "use mean, sum, max or min, or log a torchmetrics.Metric"
        )


@dataclass(frozen=True)
class StepSummary:
    """What the whole global batch amounts to."""

    weight: Tensor
    # what the mean loss is a mean over, summed over microbatches and replicas, []
    loss: Tensor
    # that mean, []


class StepLog:
    """Records `module.log` during a step. The record of the last stage counts; every rank must call `replay`."""

    def __init__(
        self, module: LightningModule, mesh: Mesh, device: torch.device, dtype: torch.dtype, *, tail_on_last_stage: bool
    ) -> None:
        self._module = module
        self.dtype = dtype
        # in which values are logged
        self._replicas = mesh.axis("dp+cp")
        self._pp = mesh.pp
        self._device = device
        self._one_stage = tail_on_last_stage and mesh.pp.size > 1
        self._has_tail = mesh.pp.is_last or not self._one_stage
        self._schemas: dict[int, Schema] = {}
        self._metrics = {n: m for n, m in module.named_modules() if isinstance(m, Metric)} if self._one_stage else {}
        self._begin()

    def _begin(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._weights: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._lengths = {name: _list_lengths(metric) for name, metric in self._metrics.items()}
        self._updates = {name: metric._update_count for name, metric in self._metrics.items()}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside the block `module.log` records."""
        self._begin()
        # An instance attribute hides the method; removing it brings the method back. `log_dict` goes through it.
        self._module.__dict__["log"] = self._record
        try:
            yield
        finally:
            del self._module.__dict__["log"]

    def end_microbatch(self, loss: Tensor | None, weight: Tensor) -> None:
        """Says what the microbatch's loss was, and what it is a mean over ([] each)."""
        self._losses.append(torch.zeros(()) if loss is None else loss.detach())
        self._weights.append(weight)

    def _record(self, *args: Any, **kwargs: Any) -> None:
        bound = _SIGNATURE.bind(self._module, *args, **kwargs).arguments
        name, value = bound.pop("name"), bound.pop("value")
        bound.pop("self")
        entry = self._entries.setdefault(name, _Entry(dict(bound)))
        if isinstance(value, Metric):
            entry.metric = value
            return
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        if tensor.numel() != 1:
            raise ValueError(f"self.log({name!r}) got a tensor of {tuple(tensor.shape)}; it must hold one number")
        entry.values.append((len(self._weights), tensor.reshape(())))

    def replay(self) -> StepSummary:
        """Logs what was recorded, once on every rank, as values of the global batch. Collective over dp+cp and pp."""
        numbers = torch.zeros(_HEAD, dtype=torch.float64, device=self._device)
        schema: Schema = []
        if self._has_tail:
            schema = [(n, e.options, self._metric_name(e.metric)) for n, e in self._entries.items()]
            numbers = self._reduced(schema)
        if self._one_stage:
            numbers, schema = self._from_last_stage(numbers, schema)
            self._mirror_metrics()
        log = self._module.log
        for (name, options, metric_name), value in zip(schema, numbers[_HEAD:], strict=True):
            if metric_name is not None:
                log(name, self._module.get_submodule(metric_name), **options)  # type: ignore[arg-type]
            else:
                # A copy of its own: Lightning keeps it, and sync_dist may work on it in place.
                log(name, value.to(self.dtype, copy=True), **options)
        return StepSummary(weight=numbers[0], loss=numbers[1])

    def _metric_name(self, metric: Metric | None) -> str | None:
        if metric is None:
            return None
        names = [str(name) for name, module in self._module.named_modules() if module is metric]
        if names:
            return names[0]
        raise ValueError(f"self.log got a {type(metric).__name__} that is not an attribute of the module; make it one")

    def _reduced(self, schema: Schema) -> Tensor:
        """Total weight, mean loss, schema key and each value, over microbatches and replicas: float64 [3 + names]."""
        weights = self._stack(self._weights)
        key = torch.tensor(float(_schema_key(schema)), dtype=torch.float64, device=self._device)
        sums = [weights.sum(), (weights * self._stack(self._losses)).sum(), key]
        for name, _, metric_name in schema:
            sums += self._sum_and_share(self._entries[name], weights, is_number=metric_name is None)
        above = torch.stack(sums)
        if self._replicas.size > 1:
            above = self._over_replicas(above, key)
        numbers = [above[0], _quotient(above[1], above[0]), key]
        for i, (name, _, metric_name) in enumerate(schema):
            value, share = above[_HEAD + 2 * i], above[_HEAD + 2 * i + 1]
            entry = self._entries[name]
            if metric_name is not None or entry.reduction == "sum":
                numbers.append(value)
            elif entry.reduction == "mean":
                numbers.append(_quotient(value, share))
            else:
                own = getattr(self._stack([tensor for _, tensor in entry.values]), entry.reduction)()
                numbers.append(collectives.all_reduce(own, self._replicas, entry.reduction))
        return torch.stack(numbers)

    def _sum_and_share(self, entry: _Entry, weights: Tensor, *, is_number: bool) -> list[Tensor]:
        """A name's sum over microbatches and, for a mean, what to divide it by once it is summed over replicas."""
        nothing = torch.zeros((), dtype=torch.float64, device=self._device)
        if not is_number or entry.reduction in ("max", "min"):
            return [nothing, nothing]
        values = self._stack([tensor for _, tensor in entry.values])
        if entry.reduction == "sum":
            return [values.sum(), nothing]
        batch_size = entry.options.get("batch_size")
        # A mean given with its batch size is one over rows; any other is one over what the microbatch's loss is.
        shares = weights[[place for place, _ in entry.values]]
        if batch_size is not None:
            shares = torch.full_like(shares, float(batch_size))
        return [(values * shares).sum(), shares.sum()]

    def _over_replicas(self, numbers: Tensor, key: Tensor) -> Tensor:
        """The sum over replicas, once it is clear that all of them sum the same names."""
        first = torch.zeros(_SLOTS, dtype=torch.float64, device=self._device)
        count = min(_SLOTS, numbers.numel())
        first[:count] = numbers[:count]
        collectives.all_reduce_(first, self._replicas)
        if first[2].item() != key.item() * self._replicas.size:
            raise RuntimeError(
                f"replicas logged different names in one step; this rank logged {sorted(self._entries)}. "
                "Log the same names on every rank"
            )
        rest = numbers[count:].contiguous()
        return torch.cat([first[:count], collectives.all_reduce_(rest, self._replicas) if rest.numel() else rest])

    def _from_last_stage(self, numbers: Tensor, schema: Schema) -> tuple[Tensor, Schema]:
        """The numbers and names of the last stage, on every stage."""
        last = self._pp.size - 1
        first = torch.zeros(_SLOTS, dtype=torch.float64, device=self._device)
        count = min(_SLOTS, numbers.numel())
        first[:count] = numbers[:count]
        collectives.broadcast_(first, self._pp, last)
        key = int(first[2].item())
        if key not in self._schemas:
            # All stages have seen the same schemas, so all of them come here together.
            self._schemas[key] = collectives.broadcast_object(schema, self._pp, last)
        schema = self._schemas[key]
        rest = numbers[_SLOTS:].contiguous()
        if not self._pp.is_last:
            rest = torch.empty(max(0, _HEAD + len(schema) - _SLOTS), dtype=torch.float64, device=self._device)
        if rest.numel():
            collectives.broadcast_(rest, self._pp, last)
        return torch.cat([first[: _HEAD + len(schema)], rest]), schema

    def _mirror_metrics(self) -> None:
        """Brings what the last stage's metrics took in during the step to the other stages."""
        if not self._metrics:
            return
        news = {}
        if self._pp.is_last:
            for name, metric in self._metrics.items():
                if metric._update_count != self._updates[name]:
                    news[name] = _new_state(metric, self._lengths[name])
        news = collectives.broadcast_object(news, self._pp, self._pp.size - 1)
        if not self._pp.is_last:
            for name, state in news.items():
                _take_state(self._metrics[name], state)

    def _stack(self, values: list[Tensor]) -> Tensor:
        return torch.stack([value.to(self._device, torch.float64) for value in values])


def _schema_key(schema: Schema) -> int:
    """A whole number that a float64 and a sum over thousands of replicas hold exactly."""
    parts = [f"{name}|{metric}|{sorted((k, str(v)) for k, v in options.items())}" for name, options, metric in schema]
    return rng.key(*parts) & 0xFFFFFFFF


def _quotient(above: Tensor, below: Tensor) -> Tensor:
    # A divisor of zero means that nothing was valid; then the sum above it is zero too, and so is the mean.
    return above / below.clamp(min=torch.finfo(torch.float64).tiny)


def _list_lengths(metric: Metric) -> dict[str, int]:
    return {name: len(value) for name, value in metric.metric_state.items() if isinstance(value, list)}


def _new_state(metric: Metric, lengths: dict[str, int]) -> dict[str, Any]:
    """A metric's tensors, and the entries that its lists gained."""
    states = {
        name: [entry.cpu() for entry in value[lengths[name] :]] if isinstance(value, list) else value.cpu()
        for name, value in metric.metric_state.items()
    }
    # torchmetrics has no public door to these two; both are saved and restored by its own sync in the same way.
    return {"states": states, "update_count": metric._update_count, "forward_cache": metric._forward_cache}


def _take_state(metric: Metric, news: dict[str, Any]) -> None:
    for name, value in news["states"].items():
        if isinstance(value, list):
            getattr(metric, name).extend(entry.to(metric.device) for entry in value)
        else:
            setattr(metric, name, value.to(metric.device))
    metric._update_count = news["update_count"]
    metric._forward_cache = news["forward_cache"]
    metric._computed = None
