"""A training step of one rank without a device: the package's own code on meta tensors.

Two steps run: a first one, after which the optimizer has its moments, and the measured one. Of many microbatches the
second step runs as many as it takes for a rank to reach its peak; messages and products are scaled up to all of them.
The microbatches between the first and the last are equal, or RuntimeError is raised. Of the batches that one step
accumulates two run, and the second stands for all later ones.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_megatron.comm.p2p import TensorMeta
from lightning_megatron.mesh import Mesh, NewGroup
from lightning_megatron.optim.reductions import scale_in_place
from lightning_megatron.optim.replica_check import finite_norm
from lightning_megatron.pipeline.forward_backward_overlap import ForwardBackwardOverlap
from lightning_megatron.pipeline.plans import training_plan
from lightning_megatron.pipeline.registry import spec_of
from lightning_megatron.pipeline.runtime import Runtime
from lightning_megatron.pipeline.schedule import Action, Kind
from lightning_megatron.pipeline.scheduled import ScheduledCall
from lightning_megatron.pipeline.step_hooks import Activity
from lightning_megatron.planner.dry_rank import (
    FullModel,
    Rank,
    Trained,
    build_rank,
    call,
    hidden_tokens,
    microbatches_of,
    resized,
)
from lightning_megatron.planner.fake_process_group import FakeMailbox, Ledger, Messages, MicrobatchKey, fake_mesh
from lightning_megatron.planner.memory import fullest
from lightning_megatron.planner.memory_tracker import MemoryTracker
from lightning_megatron.planner.run import Run, RunSettings
from lightning_megatron.transformer.moe import share_yield_to_peer

_K = TypeVar("_K")
_V = TypeVar("_V", bound=Any)
META = torch.device("meta")
# Gradients are clipped to this norm, whatever a recipe says: the memory of clipping is negligible.
_MAX_NORM = 1.0
_KIND_TEXTS = {
    Kind.FORWARD: "the forward",
    Kind.BACKWARD: "the backward",
    Kind.BACKWARD_INPUT: "the backward for the input",
    Kind.BACKWARD_WEIGHT: "the backward for the weights",
}


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Counts of one rank over a step: memory, FLOPs and messages."""

    run: RunSettings
    rank: int
    """Global rank."""
    stages: tuple[int, ...]
    """Stages of the rank."""
    parameters: int
    """Number of parameters of the rank."""
    peak_bytes: int
    peak_by_kind: Mapping[str, int]
    peak_action: str
    """Action in which memory peaks, in words."""
    flops: Mapping[str, float]
    """FLOPs of the rank, by kind of product."""
    messages: Mapping[tuple[str, str], Messages]
    """Messages by axis and kind."""
    num_run: int
    """Number of microbatches of a batch that ran."""


def dry_run(
    run: RunSettings, rank: int, *, full_model: Trained | None = None, device: torch.device = META, most: int = 0
) -> DryRun:
    """Counts of a global rank over a step; the run must have no errors. One `full_model` serves all ranks of a run, and
    a `Run` has its own.

    At least `most` microbatches are run, all where the step has no more. On a real device the world must be of one
    rank.
    """
    if full_model is None:
        assert isinstance(run, Run), "settings alone do not say what is trained"
        full_model = FullModel(run)
    ledger = Ledger()
    with fake_mesh(run.sizes, rank, ledger) as (mesh, new_group):
        return _run(run, mesh, new_group, full_model, ledger, device, most)


def _run(
    run: RunSettings,
    mesh: Mesh,
    new_group: NewGroup,
    trained: Trained,
    ledger: Ledger,
    device: torch.device,
    most: int,
) -> DryRun:
    tracker = MemoryTracker(device)
    with tracker:
        own = build_rank(run, mesh, new_group, device, trained)
    with tracker:
        step = _Step(own, _meta_of(own), tracker, ledger)
        _name_tensors(tracker, own)
        step.take(1)
        _name_tensors(tracker, own)
        count = min(run.num_microbatches, max(num_needed(run), most))
        # What cycles of the first step still hold, a longer run would not.
        gc.collect()
        tracker.begin()
        ledger.entries.clear()
        step.flops.clear()
        step.take(count)
    return DryRun(
        run=run,
        rank=mesh.global_rank,
        stages=mesh.own_stages,
        parameters=sum(parameter.numel() for parameter in own.module.parameters()),
        peak_bytes=tracker.peak_bytes,
        peak_by_kind=tracker.peak_by_kind,
        peak_action=tracker.peak_action,
        flops=_of_step(step.flops, run, count),
        messages=_of_step(ledger.entries, run, count),
        num_run=count,
    )


def _meta_of(own: Rank) -> Callable[[int, int], TensorMeta]:
    """Returns a function of stage and microbatch that describes the tensors which the stage sends to the next."""
    run, mesh = own.run, own.mesh
    metas = own.trained.output_metas(own.module) if mesh.pp.size > 1 else {}
    if run.balanced is None:
        return lambda stage, microbatch: metas[stage]
    step, groups = run.balanced, run.balanced.plan.groups_of(mesh.axis("dp+cp").rank)
    return lambda stage, microbatch: resized(metas[stage], hidden_tokens(step, groups[microbatch], mesh))


def num_needed(run: RunSettings) -> int:
    """Number of microbatches after which a rank has reached its peak, and at least one is neither first nor last; all
    where they differ."""
    schedule = run.schedule
    return schedule.microbatches if run.balanced is not None else spec_of(schedule.name).steady_after(schedule)


def shown_ranks(run: RunSettings) -> tuple[int, ...]:
    """Global ranks of the first, the middle and the last pipeline rank; where microbatches differ, those with the
    largest planned memory."""
    pp_ranks = sorted({0, run.sizes.pp // 2, run.sizes.pp - 1})
    lines = dict.fromkeys(pp_ranks, 0)
    if isinstance(run, Run) and run.balanced is not None:
        lines = {rank: fullest(run, rank)[0] for rank in pp_ranks}
    return tuple(global_rank(run, rank, line) for rank, line in lines.items())


def global_rank(run: RunSettings, pp_rank: int, line: int) -> int:
    """Global rank of the first tp rank of a pipeline rank (first stage first) and of index `line` within dp x cp."""
    sizes = run.sizes
    # The last stage is on global rank 0.
    return (sizes.pp - 1 - pp_rank) * (sizes.world // sizes.pp) + line * sizes.tp


def _name_tensors(tracker: MemoryTracker, own: Rank) -> None:
    """Names the tensors that are held from step to step."""
    gradients = own.gradients
    tracker.name("weights", (param.parameter.data for param in gradients.params))
    tracker.name("gradients", (bucket.gradient for bucket in gradients.buckets))
    tracker.name("master weights", (shard.tensor.data for shard in gradients.param_shards))
    tracker.name("moments", own.moments())


def _of_step(entries: Mapping[MicrobatchKey, Mapping[_K, _V]], run: RunSettings, count: int) -> dict[_K, _V]:
    """Sums of counts over a full step, of which `count` microbatches of the first two batches ran."""
    more = run.num_microbatches - count
    total: dict[_K, _V] = {}
    for key, by_kind in entries.items():
        times = 1
        if key is not None:
            batch, microbatch = key
            times = (run.num_accumulated - 1 if batch else 1) * (1 + (more if microbatch == 1 else 0))
        for kind, value in by_kind.items():
            total[kind] = total[kind] + value * times if kind in total else value * times
    for batch in range(min(run.num_accumulated, 2) if more else 0):
        between = [entries.get((batch, number), {}) for number in range(1, count - 1)]
        if not between or any(one != between[0] for one in between):
            raise RuntimeError(f"microbatches of a step differ, and some cannot stand for all: {between}")
    return total


class _Step:
    """Takes training steps of a rank, as the strategy does under a schedule."""

    def __init__(
        self, own: Rank, meta_of: Callable[[int, int], TensorMeta], tracker: MemoryTracker, ledger: Ledger
    ) -> None:
        self._own, self._tracker, self._ledger = own, tracker, ledger
        turns = _Turns(own.device, tracker, ledger)
        share_yield_to_peer(own.module, turns.yield_to_peer)
        self._runtime = Runtime(own.mesh.pp, FakeMailbox(own.mesh.pp, meta_of, own.device, ledger), turns)
        self._runtime.step_hook = self
        self._microbatches = microbatches_of(own)
        self._entered: dict[Activity, AbstractContextManager[None]] = {}
        self.flops: dict[MicrobatchKey, Counter[str]] = {}

    def take(self, count: int) -> None:
        """Takes a step of the first so many microbatches of each batch."""
        own = self._own
        dp_comm = own.dp_comm
        for batch in range(min(own.run.num_accumulated, 2)):
            self._ledger.batch = batch
            self._take_batch(count, is_first=batch == 0)
        with self._at("the reduction of gradients"):
            self._reduce()
        with self._at("the optimizer's step"):
            dp_comm.prepare_step()
            own.optimizer.step()
            dp_comm.update_params()
            for model in own.models.values():
                model.end_step(is_skipped=False)
            if own.fp8 is not None:
                own.fp8.end_step()

    def _take_batch(self, count: int, *, is_first: bool) -> None:
        """Adds the gradients of a batch to those of the batches before it."""
        own = self._own
        gradients, dp_comm = own.gradients, own.dp_comm
        is_only = own.run.num_accumulated == 1
        aside: dict[nn.Parameter, Tensor] = {}
        with self._at("the reduction of gradients"):
            # The last step's gradients would be zeroed anyway; they are freed before the memory is needed.
            gradients.free(dropped=is_first)
            if is_first:
                gradients.take()
            elif own.run.sets_gradients_aside:
                aside = gradients.take(copied=True)
        if is_only:
            dp_comm.begin_backwards()
        mbs = own.run.micro_batch_size
        firsts = [index * mbs for index in range(count)]
        models, opened = list(own.models.values()), own.weight_gradients.opened
        call_ = ScheduledCall(models, own.mesh, self._enter, Tensor.backward, firsts, opened, dp_comm)
        for model in models:
            model.driver = call_
        self._runtime.run(training_plan(replace(own.run.schedule, microbatches=count)), call_)
        with self._at("the reduction of gradients"):
            pending = gradients.take()
            gradients.add(aside)
            if is_first:
                own.optimizer.zero_grad()
            if not is_only:
                # Each batch has its own number of tokens.
                scale_in_place(list(pending.values()), torch.ones((), dtype=torch.float64, device=own.device))
            gradients.free(dropped=False)
            gradients.add(pending)

    def _enter(self, microbatch: int) -> Tensor:
        """The sum of a microbatch's losses, from its forward."""
        return call(self._own, self._microbatches[microbatch])

    def _reduce(self) -> None:
        """Reduces gradients over ranks and clips them."""
        own = self._own
        gradients = own.gradients
        is_only = own.run.num_accumulated == 1
        factor = torch.ones((), dtype=torch.float64, device=own.device) if is_only else None
        # What several ranks of pp hold has a gradient on one of them, which they would tell each other.
        held_by_several = [param.parameter for param in gradients.params if param.holders is not None]
        gradients.add_zeros(parameter for parameter in held_by_several if parameter.requires_grad)
        gradients.reduce(outside_over_stages=True, factor=factor)
        is_checked = own.run.optimizer.on_nonfinite != "ignore"
        gradients.clip(_MAX_NORM, own.stepped, finite_norm(gradients, own.stepped) if is_checked else None)

    def begin(self, activity: Activity) -> None:
        """Counts the schedule's next action by itself, as the runtime's step hook."""
        action, microbatch = self._tracker.action, None
        if isinstance(activity, Action) and activity.kind in _KIND_TEXTS:
            microbatch = activity.microbatch
            action = f"{_KIND_TEXTS[activity.kind]} of microbatch {microbatch} through stage {activity.stage}"
        elif isinstance(activity, Action) and activity.kind is Kind.REDUCE_GRADS:
            action = "the reduction of gradients"
        self._entered[activity] = self._at(action, microbatch)
        self._entered[activity].__enter__()

    def end(self, activity: Activity) -> None:
        """Ends the action that `begin` began."""
        self._entered.pop(activity).__exit__(None, None, None)

    @contextmanager
    def _at(self, action: str, microbatch: int | None = None) -> Iterator[None]:
        """A block in which everything counts for one action and microbatch."""
        before = self._tracker.flops
        key = None if microbatch is None else (self._ledger.batch, microbatch)
        self._tracker.flops = self.flops.setdefault(key, Counter())
        self._ledger.microbatch = microbatch
        try:
            with self._tracker.at(action):
                yield
        finally:
            self._tracker.flops, self._ledger.microbatch = before, None


class _Turns(ForwardBackwardOverlap):
    """A forward and a backward that take turns, each counted by itself."""

    def __init__(self, device: torch.device, tracker: MemoryTracker, ledger: Ledger) -> None:
        super().__init__(device)
        self._tracker, self._ledger = tracker, ledger

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        with self._with_restored_action():
            super().run(first, partial(self._watched, second))

    def yield_to_peer(self) -> None:
        with self._with_restored_action():
            super().yield_to_peer()

    def _watched(self, task: Callable[[], None]) -> None:
        # A dispatch mode is entered in one thread alone.
        with self._tracker:
            task()

    @contextmanager
    def _with_restored_action(self) -> Iterator[None]:
        """A block after which counting goes on for the action before it."""
        tracker, ledger = self._tracker, self._ledger
        before = tracker.flops, tracker.action, ledger.microbatch
        try:
            yield
        finally:
            tracker.flops, tracker.action, ledger.microbatch = before
