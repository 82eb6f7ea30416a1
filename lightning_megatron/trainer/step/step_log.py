"""The log of a step: recorded while it runs, averaged over microbatches and dp x cp, logged once on every rank.

A schedule enters the step once per microbatch, and past the model call on the last stage only, so `self.log` there
would log parts, and only on some ranks. A monitored key that some ranks lack makes Lightning's ModelCheckpoint hang.
"""

import inspect
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Number
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from torchmetrics import Metric

from lightning_megatron.any_module.loss_count import mean_count
from lightning_megatron.comm import collectives, rng
from lightning_megatron.comm.host_numbers import on_device
from lightning_megatron.mesh import Mesh
from lightning_megatron.pipeline.microbatches import of_share
from lightning_megatron.trainer.step.batch_metrics import BatchMetrics, States, full_state, restore
from lightning_megatron.trainer.step.loader_sync import Whereabouts, disagreement

Reduction = Literal["mean", "sum", "max", "min"]
_SIGNATURE = inspect.signature(LightningModule.log)
_HEAD = 4  # total weight, mean loss, key of the schema, rows
_SLOTS = 64  # numbers of one message of fixed size; a step that logs more sends a second one
# Added to every weight: of nothing but zeros the mean is then the plain one. Far below what any sum can notice.
_NOTHING = 1e-150
_SIGNS: dict[Reduction, float] = {"max": 1.0, "min": -1.0}
_REDUCTIONS: dict[str, Reduction] = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}
# What stands before the names of further numbers that a step returns; they are reduced and not logged.
_OUTPUT = "returned by training_step: "
REDUCED = "reduced over the data-parallel ranks"
"""The `sync_dist_group` of values that are those of the global batch already: `reduce` leaves them alone."""


@dataclass(frozen=True)
class _Line:
    """Options of one logged name, equal on every rank."""

    name: str
    options: dict[str, Any]
    """Options with which it was logged."""
    metric_name: str | None
    """Attribute name of its metric, where it is one."""
    is_sized: bool
    """Whether it was logged with a batch size."""


Schema = list[_Line]


@dataclass
class _LogEntry:
    """One logged name: how it was logged, and its values with their microbatches."""

    options: dict[str, Any]
    is_sized: bool
    values: list[tuple[int, Tensor]] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    counts: list[Tensor | float | None] = field(default_factory=list)
    """What each value is known to be a mean over, divided by the ranks that ran its microbatch together."""
    metric: Metric | None = None
    is_summed: bool = False
    """Whether it is the loss, which the step says is a sum."""

    @property
    def reduction(self) -> Reduction:
        if self.is_summed:
            return "sum"
        if self.metric is not None:
            return "mean"
        function = self.options.get("reduce_fx", "mean")
        name = function.lower() if isinstance(function, str) else getattr(function, "__name__", "")
        if name in _REDUCTIONS:
            return _REDUCTIONS[name]
        raise ValueError(
            f"reduce_fx ({function!r}) cannot be taken over microbatches and data-parallel ranks; "
            "use mean, sum, max or min, or log a torchmetrics.Metric"
        )


@dataclass(frozen=True)
class StepSummary:
    """Loss and weight of the global batch."""

    weight: Tensor
    """Weight that the mean loss is a mean over, summed over microbatches and dp x cp, []; 1 for a sum."""
    loss: Tensor
    """Mean loss of the global batch, or their sum, []."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Means of the further numbers that the step returned, [] each."""


@dataclass(frozen=True)
class _Mark:
    """Position in a record."""

    counts: dict[str, tuple[int, int]]
    """Values and sizes of each name."""
    metrics: dict[str, dict[str, Any]]
    """State of each metric, by attribute name."""
    of_batch: dict[str, States | None]
    """States that the batch has added to logged metrics, by the name in the log."""


class StepLog:
    """Records `module.log` during a step. The record of the last stage counts; every rank must call `replay`."""

    def __init__(
        self, module: LightningModule, mesh: Mesh, device: torch.device, dtype: torch.dtype, *, tail_on_last_stage: bool
    ) -> None:
        self._module = module
        # Dtype in which values are logged.
        self.dtype = dtype
        self._dp_cp = mesh.axis("dp+cp")
        # Ranks of cp or of a context group, which run the microbatch at hand together and log the same.
        # Each counts for its share; the number is infinite for a batch that counts for nothing.
        self.num_copies: float = mesh.cp.size
        self._pp = mesh.pp
        self.device = device
        self._one_stage = tail_on_last_stage and mesh.pp.size > 1
        self._has_tail = mesh.pp.is_last or not self._one_stage
        self._schemas: dict[int, Schema] = {}
        self._metrics = {n: m for n, m in module.named_modules() if isinstance(m, Metric)} if self._one_stage else {}
        self._batch_metrics = BatchMetrics(module.modules(), mesh.dp)
        self._begin()

    def _begin(self) -> None:
        self._entries: dict[str, _LogEntry] = {}
        self._weights: list[Tensor] = []
        self._losses: list[Tensor] = []
        # Ranks that ran each microbatch together.
        self._copies: list[float] = []
        self._rows = 0.0
        self._is_sum = False
        self._lengths = {name: _list_lengths(metric) for name, metric in self._metrics.items()}
        self._before = {name: (metric._update_count, metric._forward_cache) for name, metric in self._metrics.items()}

    @property
    def numbers(self) -> dict[str, Tensor]:
        """The last number, [], that was recorded for each name of which the step logs a mean or a sum."""
        entries = {name: one for name, one in self._entries.items() if one.metric is None and one.values}
        means = {name: one.values[-1][1] for name, one in entries.items() if one.reduction in ("mean", "sum")}
        return {name.removeprefix(_OUTPUT): number for name, number in means.items()}

    @property
    def by_rows(self) -> list[str]:
        """The names of means that are logged without what they are means over: they count as the loss does."""
        means = [(name, one) for name, one in self._entries.items() if one.metric is None and one.reduction == "mean"]
        return [name.removeprefix(_OUTPUT) for name, one in means if not one.is_sized and None in one.counts]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Has `module.log` record inside the block."""
        self._begin()
        # An instance attribute hides the method; removing it brings the method back. `log_dict` goes through it.
        self._module.__dict__["log"] = self._record
        try:
            with self._batch_metrics.watching():
                yield
        finally:
            del self._module.__dict__["log"]

    def end_microbatch(self, loss: Tensor | None, weight: Tensor, rows: float, *, is_sum: bool = False) -> None:
        """Records the microbatch's loss, what it is a mean over ([] each), unless it is a sum, and its rows."""
        self._batch_metrics.forget_calls()
        self._is_sum = is_sum
        if is_sum and loss is not None:
            for entry in self._entries.values():
                entry.is_summed |= any(tensor.data_ptr() == loss.data_ptr() for _, tensor in entry.values)
        self._rows += rows / self.num_copies
        self._losses.append(torch.zeros(()) if loss is None else loss.detach())
        self._weights.append(weight / self.num_copies)
        self._copies.append(self.num_copies)

    def take_output(self, name: str, value: Tensor | float) -> None:
        """Records a further number that the step returned, to be reduced as a logged mean is."""
        self._record(f"{_OUTPUT}{name}", value)

    def mark(self) -> "_Mark":
        """Position in the record, for `rewind`."""
        counts = {name: (len(entry.values), len(entry.sizes)) for name, entry in self._entries.items()}
        metrics = {name: full_state(metric) for name, metric in self._metrics.items()}
        return _Mark(counts, metrics, dict(self._batch_metrics.states))

    def rewind(self, mark: "_Mark") -> None:
        """Forgets what was logged, and what metrics took in, since `mark`: a stage that left its step counts nothing.

        A rank with several stages enters the step once for each, and only the last of the model's may leave a trace.
        """
        self._entries = {name: entry for name, entry in self._entries.items() if name in mark.counts}
        for name, (num_values, num_sizes) in mark.counts.items():
            del self._entries[name].values[num_values:]
            del self._entries[name].sizes[num_sizes:]
            del self._entries[name].counts[num_values:]
        for name, state in mark.metrics.items():
            restore(self._metrics[name], state)
        self._batch_metrics.states = mark.of_batch

    def _record(self, *args: Any, **kwargs: Any) -> None:
        bound = _SIGNATURE.bind(self._module, *args, **kwargs).arguments
        name, value = bound.pop("name"), bound.pop("value")
        bound.pop("self")
        if not isinstance(value, (Number, Metric, Tensor)):
            # A nested table, None and the like: Lightning's own method says what is wrong with it.
            LightningModule.log(self._module, name, value)
            raise ValueError(f"self.log({name!r}) takes a number, a tensor of one or a Metric, not {value!r}")
        if isinstance(value, DTensor):
            raise ValueError(f"self.log({name!r}) got a DTensor; log its full_tensor(), which every rank of tp has")
        batch_size = bound.pop("batch_size", None)
        entry = self._entries.setdefault(name, _LogEntry(dict(bound), is_sized=batch_size is not None))
        if batch_size is not None:
            entry.sizes.append(batch_size / self.num_copies)
        if isinstance(value, Metric):
            entry.metric = value
            if self._is_of_step(entry):
                self._batch_metrics.take(name, value)
            value = value._forward_cache  # its value for this microbatch, where it was called and not only updated
            if not _is_number(value):
                return
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        if tensor.numel() != 1:
            raise ValueError(f"self.log({name!r}) got a tensor of {tuple(tensor.shape)}; it must hold one number")
        if entry.reduction in _SIGNS and self.num_copies == math.inf:
            tensor = torch.full_like(tensor, -math.inf * _SIGNS[entry.reduction], dtype=torch.float64)
        entry.values.append((len(self._weights), tensor.reshape(())))
        count = mean_count(value) if isinstance(value, Tensor) else None
        entry.counts.append(None if count is None else count / self.num_copies)

    def replay(self, whereabouts: Whereabouts) -> StepSummary:
        """Logs what was recorded, once on every rank, as values of the global batch. Collective over dp+cp and pp.

        Raises RuntimeError where the ranks of dp+cp do not log the same, or are not at the same `whereabouts`.
        """
        numbers = torch.zeros(_HEAD, dtype=torch.float64, device=self.device)
        schema: Schema = []
        if self._has_tail:
            schema = [_Line(n, e.options, self._metric_name(e.metric), e.is_sized) for n, e in self._entries.items()]
            numbers = self._reduced(schema, whereabouts)
        if self._one_stage:
            numbers, schema = self._from_last_stage(numbers, schema)
            self._mirror_metrics()
        outputs = {}
        for i, line in enumerate(schema):
            value, share = numbers[_HEAD + 2 * i], numbers[_HEAD + 2 * i + 1]
            if line.name.startswith(_OUTPUT):
                outputs[line.name.removeprefix(_OUTPUT)] = value.to(self.dtype, copy=True)
            else:
                self._log(line, value, share, rows=numbers[3])
        return StepSummary(weight=numbers[0], loss=numbers[1], outputs=outputs)

    def _log(self, line: _Line, value: Tensor, share: Tensor, rows: Tensor) -> None:
        options = dict(line.options)
        if self._dp_cp.size > 1:
            options |= {"sync_dist": True, "sync_dist_group": REDUCED}
        # A mean over batches weighs this one by it; within one data-parallel rank Lightning finds it out by itself.
        if line.is_sized or self._dp_cp.size > 1:
            options["batch_size"] = (share if line.is_sized else rows).to(self.dtype)
        if line.metric_name is None:
            # A copy of its own: Lightning keeps it, and sync_dist may work on it in place.
            self._module.log(line.name, value.to(self.dtype, copy=True), **options)
            return
        metric = self._module.get_submodule(line.metric_name)
        assert isinstance(metric, Metric)
        if _is_number(metric._forward_cache):
            metric._forward_cache = value.to(self.dtype, copy=True)  # type: ignore[assignment]
        self._module.log(line.name, metric, **options)

    def _metric_name(self, metric: Metric | None) -> str | None:
        if metric is None:
            return None
        names = [str(name) for name, module in self._module.named_modules() if module is metric]
        if names:
            return names[0]
        raise ValueError(f"self.log got a {type(metric).__name__} that is not an attribute of the module; make it one")

    def _reduced(self, schema: Schema, whereabouts: Whereabouts) -> Tensor:
        """Numbers that replay the step, float64 [4 + 2 x names].

        Total weight, mean loss, schema key, rows; then each value, and what it is a mean over.
        """
        weights, losses = self._stack(self._weights), self._stack(self._losses)
        # Stages look names up by the key of the schema alone, which is another one in few steps.
        key, common = _key(schema), _key(schema, whereabouts)
        loss, rows = of_share(losses, weights).sum(), torch.tensor(self._rows, dtype=torch.float64)
        if self._is_sum:
            loss = (losses / self._copies_of(range(len(losses)))).sum()
        sums = [weights.sum(), loss, torch.tensor(float(common), dtype=torch.float64), rows]
        for line in schema:
            sums += self._sum_and_share(self._entries[line.name], weights)
        above = self._stack(sums)
        if self._dp_cp.size > 1:
            above = self._over_dp_cp(above, common, schema, whereabouts)
        head = [torch.ones_like(above[0]), above[1]] if self._is_sum else [above[0], _quotient(above[1], above[0])]
        numbers = [*head, torch.tensor(float(key), dtype=torch.float64), above[3]]
        of_batch = self._extremes(schema) | self._values_of_metrics(schema)
        for i, line in enumerate(schema):
            value, share = above[_HEAD + 2 * i], above[_HEAD + 2 * i + 1]
            entry = self._entries[line.name]
            if entry.reduction == "mean":
                # A mean over nothing is what one device computes of nothing.
                value = value / share
            numbers += [of_batch.get(line.name, value), share]
        return self._stack(numbers)

    def _extremes(self, schema: Schema) -> dict[str, Tensor]:
        """The largest or smallest value of each name that is reduced so, over microbatches and dp x cp."""
        entries = {
            line.name: self._entries[line.name] for line in schema if self._entries[line.name].reduction in _SIGNS
        }
        if not entries:
            return {}
        # A minimum is sent as the maximum of the negative numbers, so that one message takes them all.
        own = [_SIGNS[e.reduction] * self._stack([tensor for _, tensor in e.values]) for e in entries.values()]
        largest = collectives.all_reduce(self._stack([values.max() for values in own]), self._dp_cp, "max")
        return {name: _SIGNS[e.reduction] * value for (name, e), value in zip(entries.items(), largest, strict=True)}

    def _values_of_metrics(self, schema: Schema) -> dict[str, Tensor]:
        """Computes the value over the global batch of each metric that is logged for the step, by name."""
        logged = {line.name: self._entries[line.name] for line in schema}
        metrics = {name: one.metric for name, one in logged.items() if one.metric is not None and self._is_of_step(one)}
        return self._batch_metrics.values(metrics, max(self._copies))

    def _is_of_step(self, entry: _LogEntry) -> bool:
        """Whether a value is logged for each step, which is Lightning's default in training."""
        is_asked = entry.options.get("on_step")
        return self._module.trainer.training if is_asked is None else bool(is_asked)

    def _sum_and_share(self, entry: _LogEntry, weights: Tensor) -> list[Tensor]:
        """A name's sum over microbatches and, for a mean, what to divide it by once it is summed over dp x cp."""
        nothing = torch.zeros((), dtype=torch.float64, device=self.device)
        if not entry.values or entry.reduction in ("max", "min"):
            return [nothing, nothing]
        values = self._stack([tensor for _, tensor in entry.values])
        if entry.reduction == "sum":
            total = (values / self._copies_of(microbatch for microbatch, _ in entry.values)).sum()
            return [total, on_device(sum(entry.sizes), self.device, torch.float64)]
        # A mean given with its batch size is one over rows, and that of a loss one over what the loss counts. Any other
        # is a mean over what the microbatch's loss is.
        known = [count for count in entry.counts if count is not None]
        shares = (
            self._stack([torch.as_tensor(count) for count in known])
            if len(known) == len(values)
            else weights[on_device([microbatch for microbatch, _ in entry.values], self.device)]
        )
        if entry.is_sized:
            shares = on_device(entry.sizes, self.device, torch.float64)
        # Of nothing but means over nothing that are numbers, zeros mostly, the mean is the plain one.
        shares = shares + _NOTHING * (~values.isnan()).double()
        return [of_share(values, shares).sum(), shares.sum()]

    def _copies_of(self, microbatches: Iterable[int]) -> Tensor:
        return on_device([self._copies[i] for i in microbatches], self.device, torch.float64)

    def _over_dp_cp(self, numbers: Tensor, key: int, schema: Schema, whereabouts: Whereabouts) -> Tensor:
        """The sum over dp x cp, once it is clear that all its ranks sum the same names in the same step."""
        first, count = _first_message(numbers), min(_SLOTS, numbers.numel())
        collectives.all_reduce_(first, self._dp_cp)
        if first[2].item() != key * self._dp_cp.size:
            found = collectives.gather_objects((schema, whereabouts), self._dp_cp)
            where = disagreement([whereabouts for _, whereabouts in found])
            raise RuntimeError(where or _disagreement([schema for schema, _ in found]))
        rest = numbers[count:].contiguous()
        return torch.cat([first[:count], collectives.all_reduce_(rest, self._dp_cp) if rest.numel() else rest])

    def _from_last_stage(self, numbers: Tensor, schema: Schema) -> tuple[Tensor, Schema]:
        """The numbers and names of the last stage, on every stage."""
        last = self._pp.size - 1
        first = _first_message(numbers)
        collectives.broadcast_(first, self._pp, last)
        key = int(first[2].item())
        if key not in self._schemas:
            # All stages have seen the same schemas, so all of them come here together.
            self._schemas[key] = collectives.broadcast_object(schema, self._pp, last)
        schema = self._schemas[key]
        rest = numbers[_SLOTS:].contiguous()
        if not self._pp.is_last:
            rest = torch.empty(max(0, _HEAD + 2 * len(schema) - _SLOTS), dtype=torch.float64, device=self.device)
        if rest.numel():
            collectives.broadcast_(rest, self._pp, last)
        return torch.cat([first[: _HEAD + 2 * len(schema)], rest]), schema

    def _mirror_metrics(self) -> None:
        """Brings what the last stage's metrics took in during the step to the other stages."""
        if not self._metrics:
            return
        news = {}
        if self._pp.is_last:
            for name, metric in self._metrics.items():
                num_updates, value = self._before[name]
                # One that combines others has a value, and counts no updates of its own.
                if metric._update_count != num_updates or metric._forward_cache is not value:
                    news[name] = _new_state(metric, self._lengths[name])
        news = collectives.broadcast_object(news, self._pp, self._pp.size - 1)
        if not self._pp.is_last:
            for name, state in news.items():
                _take_state(self._metrics[name], state, self._lengths[name])

    def _stack(self, values: list[Tensor]) -> Tensor:
        # What the host has goes to the device without a wait for it.
        return torch.stack(
            [value.to(self.device, torch.float64, non_blocking=value.device.type == "cpu") for value in values]
        )


def _key(schema: Schema, whereabouts: Whereabouts | None = None) -> int:
    """An integer that a float64 and a sum over thousands of ranks hold exactly."""
    return rng.key(*(_text(line) for line in schema), str(whereabouts)) & 0xFFFFFFFF


def _text(line: _Line) -> str:
    options = sorted((name, str(value)) for name, value in line.options.items())
    return f"{line.name}|{line.metric_name}|{line.is_sized}|{options}"


def _disagreement(schemas: list[Schema]) -> str:
    """Message about what differs between the schemas of the dp x cp ranks."""
    names = [{line.name for line in schema} for schema in schemas]
    some = sorted(names[0].union(*names) - names[0].intersection(*names))
    if some:
        missing = "; ".join(f"{name!r} by ranks {[i for i, own in enumerate(names) if name in own]}" for name in some)
        return f"ranks of dp x cp logged different names in one step: {missing}. Log the same names on every rank"
    texts = [{line.name: _text(line) for line in schema} for schema in schemas]
    other = sorted(name for name in texts[0] if len({text[name] for text in texts}) > 1)
    if other:
        return f"ranks of dp x cp logged {', '.join(map(repr, other))} with different options; log alike on every rank"
    return f"ranks of dp x cp logged the same names in different orders: {[list(text) for text in texts]}; log alike"


def _first_message(numbers: Tensor) -> Tensor:
    """The first numbers, filled up with zeros to the fixed size of a message."""
    return torch.nn.functional.pad(numbers[:_SLOTS], (0, max(0, _SLOTS - numbers.numel())))


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _quotient(above: Tensor, below: Tensor) -> Tensor:
    # A divisor of zero means that nothing was valid; then the sum above it is zero too, and so is the mean.
    return above / below.clamp(min=torch.finfo(torch.float64).tiny)


def _list_lengths(metric: Metric) -> dict[str, int]:
    return {name: len(value) for name, value in metric.metric_state.items() if isinstance(value, list)}


def _new_state(metric: Metric, lengths: dict[str, int]) -> dict[str, Any]:
    """A metric's tensors, and the entries that its lists gained."""
    # Torchmetrics has no public door to these two; both are saved and restored by its own sync in the same way.
    states = {
        name: [entry.cpu() for entry in value[lengths[name] :]] if isinstance(value, list) else value.cpu()
        for name, value in metric.metric_state.items()
    }
    return {
        "states": states,
        "update_count": metric._update_count,
        "forward_cache": _moved(metric._forward_cache, "cpu"),
    }


def _take_state(metric: Metric, news: dict[str, Any], lengths: dict[str, int]) -> None:
    for name, value in news["states"].items():
        if isinstance(value, list):
            entries = getattr(metric, name)
            # What a metric took in before the model call, it took in on every stage.
            del entries[lengths[name] :]
            entries.extend(entry.to(metric.device) for entry in value)
        else:
            setattr(metric, name, value.to(metric.device))
    metric._update_count = news["update_count"]
    metric._forward_cache = _moved(news["forward_cache"], metric.device)
    metric._computed = None


def _moved(value: Any, device: torch.device | str) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)
