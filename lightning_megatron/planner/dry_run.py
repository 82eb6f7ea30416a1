"""A training step of one rank of a run without a device: the package's own code on tensors that hold no numbers.

Two steps run: a first one, after which the optimizer has its moments, and the one that is told of. Of many microbatches
the second runs some, from which on a rank keeps no more, whatever comes: their messages and products are multiplied by
as many as the step has. The microbatches between the first and the last are alike, or RuntimeError is raised.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_megatron.comm.p2p import Like, Payload
from lightning_megatron.mesh import Mesh, NewGroup
from lightning_megatron.optim.agreement import found_nonfinite
from lightning_megatron.pipeline import microbatches
from lightning_megatron.pipeline.plans import training_plan
from lightning_megatron.pipeline.runtime import Runtime
from lightning_megatron.pipeline.scheduled import ScheduledCall
from lightning_megatron.planner.dry_rank import Rank, Whole, build_rank, call, call_context, make_batch
from lightning_megatron.planner.imagined import ImaginedMailbox, Ledger, Messages, imagined_mesh, total_of
from lightning_megatron.planner.run import Run, faults_of
from lightning_megatron.planner.watch import Watch

_K = TypeVar("_K")
_V = TypeVar("_V", bound=Any)
META = torch.device("meta")
_MAX_NORM = 1.0
# to which gradients are clipped, whatever a recipe says: it takes no memory worth a name


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What one rank does in a step."""

    run: Run
    rank: int
    # global
    stages: tuple[int, ...]
    # that it holds
    parameters: int
    # that it holds
    peak_bytes: int
    peak_by_kind: Mapping[str, int]
    peak_place: str
    # where it is, in words
    flops: Mapping[str, float]
    # of the rank, by kind of product
    messages: Mapping[tuple[str, str], Messages]
    # by axis and kind
    num_run: int
    # of the step's microbatches


def dry_run(run: Run, rank: int, *, whole: Whole | None = None, device: torch.device = META, most: int = 0) -> DryRun:
    """The step of a global rank; the run must have no faults. `whole` serves all ranks of a run.

    `most` microbatches are run at least, all where the step has no more. On a real device the world must be of one
    rank.
    """
    whole = Whole(run) if whole is None else whole
    ledger = Ledger()
    with imagined_mesh(run.sizes, rank, ledger) as (mesh, new_group):
        return _run(run, mesh, new_group, whole, ledger, device, most)


def _run(
    run: Run, mesh: Mesh, new_group: NewGroup, whole: Whole, ledger: Ledger, device: torch.device, most: int
) -> DryRun:
    watch = Watch(device)
    with watch:
        own = build_rank(run, mesh, new_group, device, whole)
    likes = whole.likes(own.model.stages) if mesh.pp.size > 1 else {}
    with watch:
        step = _Step(own, likes, watch, ledger)
        _name(watch, own)
        step.take(1)
        _name(watch, own)
        count = min(run.num_microbatches, max(num_needed(run), most))
        watch.begin()
        ledger.entries.clear()
        step.flops.clear()
        step.take(count)
    more = run.num_microbatches - count
    flops = _with_more(step.flops, count, more)
    messages = _with_more(ledger.entries, count, more)
    sums: Counter[str] = Counter()
    for by_kind in flops.values():
        sums.update(by_kind)
    return DryRun(
        run=run,
        rank=mesh.global_rank,
        stages=mesh.own_stages,
        parameters=sum(parameter.numel() for parameter in own.model.parameters()),
        peak_bytes=watch.peak_bytes,
        peak_by_kind=watch.peak_by_kind,
        peak_place=watch.peak_place,
        flops=sums,
        messages=total_of(messages),
        num_run=count,
    )


def dry_faults(run: Run) -> list[str]:
    """One sentence for each rule that the run breaks, and for what cannot be run without a device."""
    faults = faults_of(run)
    if run.num_accumulated > 1:
        faults.append(
            f"accumulate_grad_batches ({run.num_accumulated}) must be 1 in a dry run, whose step is one batch; set "
            "trainer.accumulate_grad_batches to 1"
        )
    if run.fp8 is not None and run.fp8.engine != "torch":
        faults.append(
            f"fp8 engine ({run.fp8.engine!r}) needs a GPU to run; a dry run knows engine 'torch', whose products keep "
            "as much: set precision bf16-true and the strategy's fp8 to engine torch"
        )
    return faults


def num_needed(run: Run) -> int:
    """Microbatches after which a rank has held the most that it will, and at least one is neither first nor last.

    All of GPipe's; of others the warm-up and some more. Of interleaved ones the last group stays as full as it was.
    """
    schedule = run.schedule
    match schedule.name:
        case "gpipe":
            return schedule.microbatches
        case "interleaved":
            group = schedule.group_size or schedule.pp
            return 3 * group + schedule.microbatches % group
        case "1f1b":
            return schedule.pp + 2
    return 2 * schedule.pp + 2


def shown_ranks(run: Run) -> tuple[int, ...]:
    """Global ranks of the first, the middle and the last pipeline rank."""
    sizes = run.sizes
    rest = sizes.world // sizes.pp
    # The last stage is on global rank 0.
    return tuple((sizes.pp - 1 - place) * rest for place in sorted({0, sizes.pp // 2, sizes.pp - 1}))


def _name(watch: Watch, own: Rank) -> None:
    """Tells what is held from step to step."""
    gradients = own.gradients
    watch.name("weights", (held.parameter.data for held in gradients.held))
    watch.name("gradients", (bucket.gradient for bucket in gradients.buckets))
    watch.name("main weights", (owned.tensor.data for owned in gradients.owned))
    watch.name("moments", own.moments())


def _with_more(
    entries: Mapping[int | None, Mapping[_K, _V]], count: int, more: int
) -> dict[int | None, Mapping[_K, _V]]:
    """What `count` microbatches did, and so many more that are like those in the middle."""
    everything = dict(entries)
    if more:
        between = [entries.get(place, {}) for place in range(1, count - 1)]
        if not between or any(one != between[0] for one in between):
            raise RuntimeError(f"microbatches of a step differ, and some cannot stand for all: {between}")
        everything[count] = {kind: value * more for kind, value in between[0].items()}
    return everything


class _Step:
    """Takes training steps of a rank, as the strategy does under a schedule."""

    def __init__(self, own: Rank, likes: Mapping[int, Like], watch: Watch, ledger: Ledger) -> None:
        run = own.run
        self._own, self._watch, self._ledger = own, watch, ledger
        self._runtime = Runtime(own.mesh.pp, ImaginedMailbox(own.mesh.pp, likes, own.device, ledger))
        batch = make_batch(run, run.num_microbatches * run.micro_batch_size, own.device)
        self._parts = microbatches.split(batch, run.num_microbatches)
        self.flops: dict[int | None, Counter[str]] = {}
        # by microbatch

    def take(self, count: int) -> None:
        """A step of the first so many microbatches."""
        own = self._own
        gradients, exchange = own.gradients, own.exchange
        with self._at("the exchange of gradients", None):
            # Those of the last step are zeroed anyway, and are let go before the memory is needed.
            gradients.free(dropped=True)
            gradients.take()
        exchange.begin_backwards()
        mbs = own.run.micro_batch_size
        firsts = [place * mbs for place in range(count)]
        call_ = ScheduledCall(
            [own.model], own.mesh, self._enter, _differentiate, firsts, own.weight_gradients.opened, exchange
        )
        own.model.driver = call_
        self._runtime.run(training_plan(replace(own.run.schedule, microbatches=count)), _Told(call_, self._at))
        with self._at("the exchange of gradients", None):
            self._reduce()
        with self._at("the optimizer's step", None):
            exchange.prepare_step()
            own.optimizer.step()
            exchange.publish()
            own.model.end_step(is_skipped=False)
            if own.fp8 is not None:
                own.fp8.end_step()

    def _enter(self, microbatch: int) -> Tensor:
        """The sum of a microbatch's losses."""
        own = self._own
        own.model.loss_weight = None
        with call_context(own.run, own.device):
            loss = call(own.model, self._parts[microbatch])
        weight = own.model.loss_weight
        assert weight is not None
        return loss * (weight / own.mesh.cp.size).to(loss.dtype)

    def _reduce(self) -> None:
        """From what backwards left to gradients of one device, clipped."""
        own = self._own
        gradients = own.gradients
        pending = gradients.take()
        own.optimizer.zero_grad()
        gradients.free(dropped=False)
        gradients.add(pending)
        del pending
        gradients.reduce(outside_over_stages=True, factor=torch.ones((), dtype=torch.float64, device=own.device))
        if own.run.optimizer.on_nonfinite != "ignore":
            found_nonfinite(own.stepped, own.mesh.world, own.device)
        gradients.clip(_MAX_NORM, own.stepped)

    @contextmanager
    def _at(self, place: str, microbatch: int | None) -> Iterator[None]:
        """Inside the block whatever is counted belongs there."""
        before = self._watch.flops
        self._watch.flops = self.flops.setdefault(microbatch, Counter())
        self._ledger.microbatch = microbatch
        try:
            with self._watch.at(place):
                yield
        finally:
            self._watch.flops, self._ledger.microbatch = before, None


def _differentiate(loss: Tensor) -> None:
    loss.backward()


class _Told:
    """The work of stages that tells, before each piece of it, what comes."""

    def __init__(self, work: ScheduledCall, at: Callable[[str, int | None], AbstractContextManager[None]]) -> None:
        self._work, self._at = work, at

    def forward(self, stage: int, microbatch: int, received: Payload | None) -> Payload | None:
        with self._at(f"the forward of microbatch {microbatch} through stage {stage}", microbatch):
            return self._work.forward(stage, microbatch, received)

    def backward(self, stage: int, microbatch: int, grad: Payload | None) -> Payload | None:
        with self._at(f"the backward of microbatch {microbatch} through stage {stage}", microbatch):
            return self._work.backward(stage, microbatch, grad)

    def backward_input(self, stage: int, microbatch: int, grad: Payload | None) -> Payload | None:
        with self._at(f"the backward for the input of microbatch {microbatch} through stage {stage}", microbatch):
            return self._work.backward_input(stage, microbatch, grad)

    def backward_weight(self, stage: int, microbatch: int) -> None:
        with self._at(f"the backward for the weights of microbatch {microbatch} through stage {stage}", microbatch):
            self._work.backward_weight(stage, microbatch)

    def reduce_gradients(self, stage: int) -> None:
        with self._at("the exchange of gradients", None):
            self._work.reduce_gradients(stage)

    def gather_parameters(self, stage: int) -> None:
        self._work.gather_parameters(stage)
