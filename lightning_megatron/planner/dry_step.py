"""Training steps of a rank without Lightning, as the strategy takes them under a schedule, traced by segments."""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn

from lightning_megatron.comm.p2p import TensorMeta
from lightning_megatron.optim.reductions import scale_in_place
from lightning_megatron.optim.replica_check import finite_norm
from lightning_megatron.pipeline.collective import CollectiveCall
from lightning_megatron.pipeline.forward_backward_overlap import ForwardBackwardOverlap
from lightning_megatron.pipeline.lower import ScheduledProgram
from lightning_megatron.pipeline.runtime import Runtime
from lightning_megatron.pipeline.schedule import Action, Kind
from lightning_megatron.pipeline.scheduled import ScheduledCall
from lightning_megatron.pipeline.step_hooks import Activity
from lightning_megatron.planner.dry_rank import Microbatch, Rank, call, microbatches_of
from lightning_megatron.planner.fake_process_group import FakeMailbox, Ledger
from lightning_megatron.planner.memory_tracker import HOST, OTHERS, MemoryTracker
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.shallow_stage import Block, ShallowLayers, ShallowStage
from lightning_megatron.planner.step_trace import Event, Phase, Segment, Trace
from lightning_megatron.transformer.moe import share_yield_to_peer
from lightning_megatron.transformer.recompute import RecomputeRunner

# Gradients are clipped to this norm, whatever a recipe says: the memory of clipping is negligible.
_MAX_NORM = 1.0
_AROUND = "the step around the model"
OPTIMIZER_STEP = "the optimizer's step"
"""Name of a piece of a trace."""
_PHASES: Mapping[Kind, Phase] = {
    Kind.RECV_FORWARD: "awaited",
    Kind.RECV_BACKWARD: "awaited",
    Kind.SEND_FORWARD: "released",
    Kind.SEND_BACKWARD: "released",
}


class DryStep:
    """Takes training steps of a rank, as the strategy does under a schedule, and traces them.

    `kinds` has the parts of each stage, in order, with equal values for those that do the same: where a stage is equal
    to an earlier one it need not run, and in an `is_shallow` step some parts stand for others.
    """

    def __init__(
        self,
        own: Rank,
        meta_of: Callable[[int, int], TensorMeta],
        tracker: MemoryTracker,
        ledger: Ledger,
        kinds: Sequence[Mapping[nn.Module, object]],
        *,
        is_shallow: bool,
    ) -> None:
        self._own, self._tracker, self._ledger = own, tracker, ledger
        turns = _Turns(own.device, tracker, self)
        share_yield_to_peer(own.module, turns.yield_to_peer)
        mailbox = FakeMailbox(
            own.mesh.pp,
            meta_of,
            own.device,
            ledger,
            posting=lambda message: self.go_on(self._event("posted", message)),
            releasing=lambda message: self.go_on(self._event("released", message)),
        )
        self._mailbox = mailbox
        self._runtime = Runtime(own.mesh.pp, mailbox, turns)
        self._runtime.step_hook = self
        self._microbatches = [] if own.run.is_collective else microbatches_of(own)
        self._alike: list[tuple[nn.Module, nn.Module]] = []
        firsts: dict[tuple[object, ...], Mapping[nn.Module, object]] = {}
        for stage in kinds:
            self._alike += zip(firsts.setdefault(tuple(stage.values()), stage), stage, strict=True)
        self._shallow: list[ShallowStage | ShallowLayers] = []
        for model in own.models.values():
            if isinstance(model.runner, RecomputeRunner):
                model.runner.to_host = self._to_host
        for model in own.models.values() if is_shallow and isinstance(own.run, Run) else ():
            known = {module: kind for stage in kinds for module, kind in stage.items()}
            shallow = ShallowStage(model.runner, own.run.recompute, known, self._enter_forward, self._enter_backward)
            self._shallow.append(shallow)
            model.runner = shallow
        for stage in kinds if is_shallow and not isinstance(own.run, Run) else ():
            self._shallow.append(ShallowLayers(stage, self._enter_forward, self._enter_backward))
        self.current: Event | None = None
        self._block: Block | None = None
        self._blocks: list[Block | None] = []
        # Index of the current event's first segment.
        self._begun = 0
        # Bytes that a block left, by block.
        self._left: Counter[Block] = Counter()
        # Blocks of the current backward.
        self._past: set[Block] = set()
        self._action = ""
        self.module_of: Callable[[], str] = lambda: ""
        """Gives the path of the module that computes, where somebody asks."""
        self._module = ""
        self._held: Mapping[str, int] = {}
        self._segments: list[Segment] = []
        self._pieces: list[tuple[Segment, ...]] = []

    def _to_host(self, x: Tensor) -> Tensor:
        self._ledger.add("host", "copy", 2 * x.numel() * x.element_size(), 1.0)
        return self._tracker.to_host(x)

    def take(self, program: ScheduledProgram, count: int) -> Trace:
        """Takes a step whose batches are cut into so many microbatches, of which some are in the program."""
        own = self._own
        dp_comm = own.dp_comm
        self._pieces = []
        self.go_on(None)
        self._segments.clear()
        self._blocks.clear()
        self._begun = 0
        before = dict(self._held)
        # What a layer keeps from step to step, such as a table, its copies do.
        kept = self._tracker.kept().items()
        before[OTHERS] += sum((one.times - 1) * size for one, size in kept if isinstance(one, Block))
        for batch in range(min(own.run.num_accumulated, 2)):
            if own.run.is_collective:
                self._take_collective_batch(count, is_first=batch == 0)
            else:
                self._take_batch(program, count, is_first=batch == 0)
        self._reduce()
        self.go_on(None, OPTIMIZER_STEP)
        dp_comm.prepare_step()
        dp_comm.owned.begin_step(own.optimizer)
        own.optimizer.step()
        dp_comm.owned.end_step(own.optimizer)
        dp_comm.update_params()
        for model in own.models.values():
            model.end_step(is_skipped=False)
        if own.fp8 is not None:
            own.fp8.end_step()
        self._end_piece()
        return Trace(held=before, pieces=tuple(self._pieces))

    def _take_batch(self, program: ScheduledProgram, count: int, *, is_first: bool) -> None:
        """Adds the gradients of a batch to those of the batches before it."""
        own = self._own
        gradients, dp_comm = own.gradients, own.dp_comm
        is_only = own.run.num_accumulated == 1
        aside: dict[nn.Parameter, Tensor] = {}
        self.go_on(None, "the reduction of gradients")
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
        self._end_piece()
        self._runtime.run(program, call_)
        self._complete_gradients()
        self._end_piece()
        self.go_on(None, "the reduction of gradients")
        pending = gradients.take()
        gradients.add(aside)
        if is_first:
            own.optimizer.zero_grad()
        if not is_only:
            # Each batch has its own number of tokens.
            scale_in_place(list(pending.values()), torch.ones((), dtype=torch.float64, device=own.device))
        gradients.free(dropped=False)
        gradients.add(pending)

    def _take_collective_batch(self, count: int, *, is_first: bool) -> None:
        """Adds the gradients of a batch of so many microbatches, which one call of the model has."""
        own = self._own
        dp_comm, pp = own.dp_comm, own.mesh.pp
        driver = CollectiveCall(pp, self._mailbox, own.device, lambda rows: count)
        driver.step_hook = self
        for model in own.models.values():
            model.driver, model.draws.first_sample, model.draws.call = driver, 0, 0
        self.go_on(None, _AROUND)
        self._end_piece()
        self.go_on(None, _AROUND)
        dp_comm.gather(0)
        graph = dp_comm.begin_graph()
        batch = own.trained.batch(count * own.run.micro_batch_size, own.device)
        with warnings.catch_warnings():
            # Torch says so of its own code, which reads what the last stage describes.
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
            loss = call(own, Microbatch(batch=batch, num_copies=own.mesh.cp.size))
        if is_first:
            own.optimizer.zero_grad()
        dp_comm.free_gradients(dropped=False)
        if pp.is_last:
            # Autograd goes on from the loss through the last stage, all microbatches of it.
            self.go_on(self._event("computed", Action(Kind.BACKWARD, own.mesh.sizes.num_stages - 1, 0)))
        with own.weight_gradients.opened():
            loss.backward()
        del loss
        dp_comm.end_graph(graph)
        if dp_comm.expects_each:
            dp_comm.end_backward()
        self._complete_gradients()
        dp_comm.complete(0)
        dp_comm.end_passes()
        self._end_piece()
        self.go_on(None, "the reduction of gradients")

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
        gradients.reduce(outside_over_stages=not own.run.is_collective, factor=factor)
        is_checked = own.run.optimizer.on_nonfinite != "ignore"
        gradients.clip(_MAX_NORM, own.stepped, finite_norm(gradients, own.stepped) if is_checked else None)

    def begin(self, activity: Activity) -> None:
        """Begins the segment of the runtime's next activity, as its step hook."""
        if isinstance(activity, Action):
            if activity.kind is Kind.REDUCE_GRADS:
                self._complete_gradients()
            self.go_on(self._event(_PHASES.get(activity.kind, "computed"), activity))

    def end(self, activity: Activity) -> None:
        """What follows up to the next activity belongs to this one, but for what is around the call of a model that has
        all microbatches."""
        if activity == Runtime.SENDS and self._own.run.is_collective:
            self.go_on(None, _AROUND)

    def _complete_gradients(self) -> None:
        """Gives parts that did not run gradients like those that stand for them."""
        within = [(one, other) for stage in self._shallow for one, left in stage.stands_for.items() for other in left]
        for one, other in [*within, *self._alike]:
            pairs = zip(one.parameters(), other.parameters(), strict=True)
            self._own.gradients.add_zeros(parameter for known, parameter in pairs if known.grad is not None)

    def _enter_forward(self, block: Block | None) -> None:
        # What is recomputed belongs to its backward.
        if self.current is not None and self.current.action.kind is Kind.FORWARD:
            self._enter_block(block)

    def _enter_backward(self, block: Block) -> None:
        if self.current is not None and self.current.action.kind is not Kind.FORWARD:
            self._enter_block(block)

    def _enter_block(self, block: Block | None) -> None:
        if block is not self._block:
            self.go_on(self.current, block=block)

    def _event(self, phase: Phase, action: Action) -> Event:
        return Event(phase, replace(action, stage=self._own.mesh.own_stages.index(action.stage)))

    def go_on(self, event: Event | None, action: str = "", block: Block | None = None) -> None:
        """Ends a segment and begins the next one."""
        held, peak, owned = self._tracker.held, self._tracker.take_peak(), self._tracker.owned
        change = _difference(held, self._held)
        if self._block is not None:
            self._left[self._block] += sum(change.values()) - change.get(HOST, 0)
            if self.current is not None and self.current.action.kind is not Kind.FORWARD:
                self._past.add(self._block)
        if event != self.current:
            # What nodes of the graph hold after a block's backward is freed with the graph, for each of its copies.
            change[OTHERS] -= sum((one.times - 1) * (self._left.pop(one) - owned[one]) for one in self._past)
            self._past.clear()
            change[OTHERS] -= self._freed_later()
        self._segments.append(
            Segment(
                event=self.current,
                action=self._action,
                change=change,
                peak=_difference(peak, self._held),
                flops=self._tracker.take_flops(),
                counts=self._tracker.take_counts(),
                messages=self._ledger.take(),
                module=self._module,
            )
        )
        self._blocks.append(self._block)
        if event != self.current:
            self._begun = len(self._blocks)
        self.current, self._held, self._action, self._block = event, held, action, block
        self._module = self.module_of()
        self._tracker.owner = block

    def take_turns(self) -> None:
        """Ends a segment where another module begins to compute."""
        if self.module_of() != self._module:
            self.go_on(self.current, self._action, self._block)

    def _freed_later(self) -> int:
        """Bytes of a forward's layers that did not run, and that are freed when all have run: one layer frees so much
        less of the one before it than is freed of it in the end."""
        freed, total = self._tracker.take_freed(), 0
        is_forward = self.current is not None and self.current.action.kind is Kind.FORWARD
        ran = {block for block in self._blocks[self._begun :] if block is not None} | {self._block} - {None}
        for one in ran if is_forward else ():
            assert one is not None
            out = sum(size for (owner, turn), size in freed.items() if owner is one and turn in ran)
            taken = sum(size for (owner, turn), size in freed.items() if turn is one and owner in ran)
            self._left[one] -= out - taken
            total += (one.times - 1) * (out - taken)
        return total

    def _end_piece(self) -> None:
        self.go_on(None)
        self._pieces.append(tuple(repeated(self._segments, self._blocks)))
        self._segments.clear()
        self._blocks.clear()
        self._begun = 0


def repeated(segments: Sequence[Segment], blocks: Sequence[Block | None]) -> list[Segment]:
    """The segments in order, those of a block and an event as often as the block counts."""
    found: list[Segment] = []
    for (block, _), pairs in groupby(zip(blocks, segments, strict=True), key=lambda pair: (pair[0], pair[1].event)):
        found += [segment for _, segment in pairs] * (1 if block is None else block.times)
    return found


def _difference(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {kind: now.get(kind, 0) - before.get(kind, 0) for kind in (*before, *(now.keys() - before.keys()))}


class _Turns(ForwardBackwardOverlap):
    """A forward and a backward that take turns, each counted by itself."""

    def __init__(self, device: torch.device, tracker: MemoryTracker, step: DryStep) -> None:
        super().__init__(device)
        self._tracker, self._step = tracker, step

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        super().run(first, partial(self._watched, second))

    def yield_to_peer(self) -> None:
        event = self._step.current
        super().yield_to_peer()
        if self._step.current != event:
            self._step.go_on(event)

    def _watched(self, task: Callable[[], None]) -> None:
        # A dispatch mode is entered in one thread alone.
        with self._tracker:
            task()
