"""A training step of one rank without a device: the package's own code on meta tensors.

Two steps run: a first one, after which the optimizer has its moments, and the measured one, of a few microbatches: the
step of all is composed from their trace (`step_trace`). Memory is that of as many as it takes for a rank to reach its
peak; messages and products are scaled up to all of them. The microbatches between the first and the last are equal, or
RuntimeError is raised. Of the batches that one step accumulates two run, and the second stands for all later ones.
"""

import gc
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from lightning_megatron.any_module.layer_list import layers_of
from lightning_megatron.comm.p2p import TensorMeta
from lightning_megatron.mesh import Mesh, NewGroup
from lightning_megatron.pipeline.layout import assign_alike
from lightning_megatron.pipeline.lower import ScheduledProgram
from lightning_megatron.pipeline.plans import backward_plan, forward_plan, training_plan
from lightning_megatron.pipeline.registry import spec_of
from lightning_megatron.pipeline.schedule import Action
from lightning_megatron.planner.balanced_runs import fullest_line
from lightning_megatron.planner.dry_rank import FullModel, Rank, Trained, build_rank, hidden_tokens, resized
from lightning_megatron.planner.dry_step import OPTIMIZER_STEP, DryStep
from lightning_megatron.planner.fake_process_group import HostMessages, Ledger, MessageCounts, fake_mesh
from lightning_megatron.planner.memory_tracker import MemoryTracker
from lightning_megatron.planner.model_parts import ModelPart
from lightning_megatron.planner.requires_grad import stages_with_gradients
from lightning_megatron.planner.run import Run, RunSettings
from lightning_megatron.planner.shallow_stage import LayersDifferError
from lightning_megatron.planner.step_trace import (
    Cell,
    Event,
    Level,
    Passes,
    Trace,
    Work,
    events_of,
    flops_of,
    kinds_of,
    levels_of,
    passes_of,
    peak_of,
    with_only,
    works_of,
)
from lightning_megatron.planner.step_work import StepWork, step_work

META = torch.device("meta")
StageKinds = tuple[Hashable, ...]
"""What the parts of a stage are, in order."""


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
    host_bytes: int
    """The most that the rank holds in host memory: what its optimizer steps there, and offloaded activations."""
    saved_bytes: int
    """Bytes at the peak that are held between actions, beyond weights, gradients and the optimizer's."""
    peak_action: str
    """Action in which memory peaks, in words."""
    flops: Mapping[str, float]
    """FLOPs of the rank, by kind of product."""
    messages: MessageCounts
    """Messages by axis and kind."""
    num_run: int
    """Number of microbatches of a batch that ran."""
    modules: Mapping[str, Passes]
    """What the forward and the backward of a microbatch do in all stages of the rank, by module where that is asked:
    one between the first and the last microbatch, where there is one."""
    trained: tuple[int, int]
    """Number of dense and of expert parameters of the rank that are trained."""
    num_layers: int
    """Number of layers of the rank."""
    step: StepWork
    """What the optimizer's step takes."""

    @property
    def passes(self) -> Passes:
        """What the forward and the backward of a microbatch do in all modules."""
        total = Work(), Work()
        for passes in self.modules.values():
            for work, own in zip(total, passes, strict=True):
                work.add(own)
        return total


@dataclass(frozen=True, kw_only=True)
class _Known:
    """The trace of a rank, and the cell of it that stands for those of each kind."""

    trace: Trace
    stand_ins: Mapping[object, Cell]
    parameters: int
    trained: tuple[int, int]
    num_layers: int
    step: StepWork


class DryRuns:
    """Dry runs of the ranks of a run, which must have no errors; ranks of equal stages share a trace.

    A `Run` has its own model. Of an `is_whole` step all microbatches run, and `walks_all` composes the step of all of
    them. `watch` is called with each rank that runs, and with what takes its steps. On a real device the world must be
    of one rank.
    """

    def __init__(
        self,
        run: RunSettings,
        full_model: Trained | None = None,
        *,
        device: torch.device = META,
        is_whole: bool = False,
        walks_all: bool = False,
        watch: Callable[[Rank, DryStep], None] = lambda own, step: None,
    ) -> None:
        if full_model is None:
            assert isinstance(run, Run), "settings alone do not say what is trained"
            full_model = FullModel(run)
        self._run, self._full_model, self._device, self._watch = run, full_model, device, watch
        self._is_whole = is_whole or run.balanced is not None
        # One call has all microbatches of a collective step, each of which runs.
        self._runs_all = self._is_whole or run.is_collective
        self._walks_all = self._runs_all or walks_all
        self._told: HostMessages | None = None
        self._known: dict[object, list[_Known]] = {}
        self.are_deep = False
        """Whether layers that seemed alike were found to differ, so that all run."""

    def of(self, rank: int) -> DryRun:
        """Counts of a global rank over a step."""
        run, (known, events, stages, stands_for) = self._run, self._traced(rank)
        peak = peak_of(known.trace, events, stands_for, stages)
        own = stands_for or {cell: cell for cell in known.stand_ins.values()}
        work = _of_step(works_of(known.trace), run, own)
        # The last stage runs all backwards of a collective step at once.
        number = self._count if run.is_collective else 1
        cells = (
            list(own) if run.is_collective else [own[chunk, min(1, self._count - 1)] for chunk in range(len(stages))]
        )
        passes = passes_of(known.trace, cells)
        return DryRun(
            run=run,
            rank=rank,
            stages=stages,
            parameters=known.parameters,
            peak_bytes=sum(peak.by_kind.values()),
            peak_by_kind={kind: size for kind, size in peak.by_kind.items() if size},
            host_bytes=peak.host_bytes,
            saved_bytes=peak.saved_bytes,
            peak_action=peak.action,
            flops=work.flops,
            messages=work.messages,
            num_run=len({number for _, number in known.stand_ins.values()}),
            modules={name: (one.of_each(number), other.of_each(number)) for name, (one, other) in passes.items()},
            trained=known.trained,
            num_layers=known.num_layers,
            step=known.step,
        )

    def levels(self, rank: int) -> list[Level]:
        """What a global rank holds in each piece of a step, in order."""
        known, events, _, stands_for = self._traced(rank)
        return levels_of(known.trace, events, stands_for)

    def _traced(self, rank: int) -> "tuple[_Known, list[Event], tuple[int, ...], Mapping[Cell, Cell] | None]":
        """The trace of a global rank, and the events of its step on its stages; which cells of the trace stand for
        those of the events, or None where all of them ran."""
        run, ledger = self._run, Ledger()
        with fake_mesh(run.sizes, rank, ledger, self.told_on(rank)) as (mesh, new_group):
            pp_rank, stages = mesh.pp.rank, mesh.own_stages
            steps = self._program.plan[pp_rank]
            events = events_of(steps, stages)
            is_whole = self._is_whole or not self._program.overlapped.isdisjoint(
                step for step in steps if isinstance(step, Action)
            )
            parts = None if is_whole or self.are_deep else self._parts_of(stages)
            # A split backward whose gradients are reduced finds their memory, or not, by what ran just before it.
            splits = spec_of(run.schedule.name).splits_backward
            is_whole |= run.is_collective or (splits and run.optimizer.shards_gradients)
            kinds = kinds_of(events, self._count, parts if run.sizes.placement == "loop" else None)
            if is_whole:
                kinds = {cell: cell for cell in kinds}
            # Ranks of cp see other keys under a window, and other tokens of uneven sequences.
            # A whole trace is in the order of its own rank.
            has_own = parts is None or is_whole
            alike = self._known.setdefault(rank if has_own else (parts, mesh.cp.rank), [])
            known = next((one for one in alike if one.stand_ins.keys() >= set(kinds.values())), None)
            if known is None:
                stand_ins = {kind: cell for cell, kind in reversed(kinds.items())}
                try:
                    known = self._known_of(mesh, new_group, ledger, stand_ins, parts)
                except LayersDifferError:
                    self.are_deep = True
                    return self._traced(rank)
                alike.append(known)
        return (
            known,
            events,
            stages,
            None if is_whole else {cell: known.stand_ins[kind] for cell, kind in kinds.items()},
        )

    def told_on(self, rank: int) -> HostMessages | None:
        """What a global rank hears of the last stage, which runs first; None but of a collective step."""
        if not self._run.is_collective:
            return None
        if self._told is None:
            self._told = HostMessages()
            if rank >= self._run.sizes.world // self._run.sizes.pp:
                # The last stage is on the first ranks.
                self._traced(0)
        self._told.rewind()
        return self._told

    def _known_of(
        self,
        mesh: Mesh,
        new_group: NewGroup,
        ledger: Ledger,
        stand_ins: Mapping[object, Cell],
        parts: tuple[StageKinds, ...] | None,
    ) -> _Known:
        tracker = MemoryTracker(self._device)
        with tracker, own_garbage():
            # No name holds the rank, which is garbage as soon as it is measured.
            return self._measured(
                build_rank(self._run, mesh, new_group, self._device, self._full_model),
                tracker,
                ledger,
                stand_ins,
                parts,
            )

    @cached_property
    def _count(self) -> int:
        """Number of microbatches of a batch that are walked through."""
        return self._run.num_microbatches if self._walks_all else min(self._run.num_microbatches, num_needed(self._run))

    @cached_property
    def _program(self) -> ScheduledProgram:
        return plan_of(self._run, self._count)

    def _parts_of(self, stages: tuple[int, ...]) -> tuple[StageKinds, ...] | None:
        """The parts of each stage, of which equal ones do the same; None where that is not known."""
        run = self._run
        # Which layers stay out of FP8 goes by their places.
        if run.fp8 is not None and run.fp8.num_first_layers_bf16 + run.fp8.num_last_layers_bf16 > 0:
            return None
        if isinstance(run, Run):
            parts = stages_with_gradients(run.model_parts, run.sizes.num_stages, run.sizes.stage_layout)
            return tuple(parts[stage] for stage in stages)
        names, last = self._full_model.layer_kinds, run.sizes.num_stages - 1
        # The inputs of layers that do not run would be copied to host memory, too.
        if not names or (run.recompute.granularity == "full" and run.recompute.offload):
            return None
        kinds, indices = list(names.values()), assign_alike(len(names), last + 1, run.sizes.stage_layout)
        # The ends hold what stands around the layers.
        return tuple(((stage == 0, stage == last), *(kinds[index] for index in indices[stage])) for stage in stages)

    def _measured(
        self,
        own: Rank,
        tracker: MemoryTracker,
        ledger: Ledger,
        stand_ins: Mapping[object, Cell],
        parts: tuple[StageKinds, ...] | None,
    ) -> _Known:
        run = own.run
        # Deferred weight gradients are not those of a layer at a time.
        # With layers left out no bucket of theirs is full before the backward has ended.
        is_in_turn = not (spec_of(run.schedule.name).splits_backward or run.optimizer.shards_gradients)
        can_be_shallow = parts is not None and is_in_turn
        kinds = [] if parts is None else _kinds_by_module(own, parts, self._full_model)
        step = DryStep(own, meta_of(own), tracker, ledger, kinds, is_shallow=can_be_shallow)
        self._watch(own, step)
        name_tensors(tracker, own)
        cells = frozenset(stand_ins.values())
        step.take(program_of(plan_of(run, 1), own.mesh, {(stage, 0) for stage, _ in cells}), 1)
        name_tensors(tracker, own)
        # What cycles of the first step still hold, a longer run would not.
        gc.collect()
        trace = step.take(program_of(self._program, own.mesh, cells), self._count)
        parameters = sum(parameter.numel() for parameter in own.module.parameters())
        dense, experts = 0, 0
        for param in own.gradients.params:
            if param.parameter.requires_grad:
                dense += param.parameter.numel() * (param.shard.data is None)
                experts += param.parameter.numel() * (param.shard.data is not None)
        layers = [
            name
            for model in own.models.values()
            for stage in own.mesh.own_stages
            for name in model.parts_of(stage)
            if name in model.layer_names
        ]
        return _Known(
            trace=trace,
            stand_ins=stand_ins,
            parameters=parameters,
            trained=(dense, experts),
            num_layers=len(layers or layers_or_links(own.module)),
            step=step_work(own.moments(), sum(one.numel() for one in own.stepped), flops_of(trace, OPTIMIZER_STEP)),
        )


def layers_or_links(module: nn.Module) -> tuple[str, ...]:
    """Names of the layers that a module holds or, without a list of like ones, of the links of its one chain, which
    stages share as they do layers."""
    chains = [child for child in module.children() if isinstance(child, nn.Sequential)]
    return layers_of(module) or (tuple(chains[0]._modules) if len(chains) == 1 else ())


@contextmanager
def own_garbage() -> Iterator[None]:
    """Within it, garbage is looked for only among what is made there, and gone at its end: among all that is alive it
    takes long."""
    # What somebody else has frozen stays so.
    is_ours = not gc.get_freeze_count()
    if is_ours:
        gc.freeze()
    try:
        yield
        gc.collect()
    finally:
        if is_ours:
            gc.unfreeze()


def dry_run(
    run: RunSettings,
    rank: int,
    *,
    full_model: Trained | None = None,
    device: torch.device = META,
    is_whole: bool = False,
) -> DryRun:
    """Counts of a global rank over a step, as `DryRuns` has them. One `full_model` serves all ranks of a run."""
    return DryRuns(run, full_model, device=device, is_whole=is_whole).of(rank)


def meta_of(own: Rank) -> Callable[[int, int], TensorMeta]:
    """Returns a function of stage and microbatch that describes the tensors which the stage sends to the next."""
    run, mesh = own.run, own.mesh
    metas = own.trained.output_metas(own.module) if mesh.pp.size > 1 else {}
    if run.balanced is None:
        return lambda stage, microbatch: metas[stage]
    step, groups = run.balanced, run.balanced.plan.groups_of(mesh.axis("dp+cp").rank)
    return lambda stage, microbatch: resized(metas[stage], hidden_tokens(step, groups[microbatch], mesh))


def plan_of(run: RunSettings, count: int) -> ScheduledProgram:
    """The plan of a batch of so many microbatches, which are all in one call of a collective step."""
    if not run.is_collective:
        return training_plan(replace(run.schedule, microbatches=count))
    forward, backward = (plan(run.sizes, count) for plan in (forward_plan, backward_plan))
    steps = tuple((*one, *other) for one, other in zip(forward.plan, backward.plan, strict=True))
    return replace(forward, plan=steps)


def num_needed(run: RunSettings) -> int:
    """Number of microbatches after which a rank has reached its peak, and at least one is neither first nor last; all
    where they differ, or are in one call."""
    schedule = run.schedule
    needs_all = run.balanced is not None or run.is_collective
    return schedule.microbatches if needs_all else spec_of(schedule.name).steady_after(schedule)


def shown_ranks(run: RunSettings) -> tuple[int, ...]:
    """Global ranks of the first, the middle and the last pipeline rank; where microbatches differ, those that hold the
    most tokens at a time."""
    pp_ranks = sorted({0, run.sizes.pp // 2, run.sizes.pp - 1})
    return tuple(global_rank(run, rank, fullest_line(run, rank)) for rank in pp_ranks)


def global_rank(run: RunSettings, pp_rank: int, line: int) -> int:
    """Global rank of the first tp rank of a pipeline rank (first stage first) and of index `line` within dp x cp."""
    sizes = run.sizes
    # The last stage is on global rank 0.
    return (sizes.pp - 1 - pp_rank) * (sizes.world // sizes.pp) + line * sizes.tp


def name_tensors(tracker: MemoryTracker, own: Rank) -> None:
    """Names the tensors that are held from step to step."""
    gradients = own.gradients
    tracker.leave_out(own.on_host)
    tracker.name("weights", (param.parameter.data for param in gradients.params))
    if own.master_weights is not None:
        tracker.name("weights", (one.gathered for one in own.master_weights.sharded))
    tracker.name("gradients", (one for bucket in gradients.buckets for one in bucket.held))
    tracker.name("master weights", (shard.tensor.data for shard in gradients.param_shards))
    tracker.name("moments", own.moments())


def program_of(program: ScheduledProgram, mesh: Mesh, cells: Container[Cell]) -> ScheduledProgram:
    """The program of these cells of a rank, which need no others."""
    steps = with_only(program.plan[mesh.pp.rank], mesh.own_stages, cells)
    return replace(program, plan=tuple(steps if rank == mesh.pp.rank else () for rank in range(mesh.pp.size)))


def _kinds_by_module(own: Rank, parts: tuple[StageKinds, ...], trained: Trained) -> list[Mapping[nn.Module, Hashable]]:
    """The kinds of the parts of each stage of a rank, in order."""
    found: list[Mapping[nn.Module, Hashable]] = []
    if not isinstance(own.run, Run):
        names, sizes = list(trained.layer_kinds), own.run.sizes
        indices = assign_alike(len(names), sizes.num_stages, sizes.stage_layout)
        for stage, (_, *of_layers) in zip(own.mesh.own_stages, parts, strict=True):
            layers = [own.module.get_submodule(names[index]) for index in indices[stage]]
            found.append(dict(zip(layers, of_layers, strict=True)))
        return found
    [model] = own.models.values()
    for stage, of_stage in zip(own.mesh.own_stages, parts, strict=True):
        joined: list[tuple[ModelPart, ...]] = []
        for part in of_stage:
            assert isinstance(part, ModelPart)
            joined = [*joined[:-1], (*joined[-1], part)] if part.is_joined else [*joined, (part,)]
        found.append(dict(zip(map(model.get_submodule, model.parts_of(stage)), joined, strict=True)))
    return found


def _of_step(works: Mapping[tuple[int, Cell | None], Work], run: RunSettings, stands_for: Mapping[Cell, Cell]) -> Work:
    """Sum over a full step, in which each cell of the first microbatches of a batch does what its stand-in did."""
    count = 1 + max(number for _, number in stands_for)
    total, counts, more = Work(), Counter(stands_for.values()), run.num_microbatches - count
    for stage in {stage for stage, _ in stands_for} if more else ():
        counts[stands_for[stage, 1]] += more
        between = {cell: works[0, cell] for cell in (stands_for[stage, number] for number in range(1, count - 1))}
        known = works[0, stands_for[stage, 1]]
        # What is done to gradients after a stage's last backward falls to the message that is posted next.
        if any((work.flops, work.messages) != (known.flops, known.messages) for work in between.values()):
            raise RuntimeError(f"microbatches of a step differ, and some cannot stand for all: {between}")
    for (batch, cell), work in works.items():
        total.add(work, 1 if cell is None else counts[cell] * (run.num_accumulated - 1 if batch else 1))
    return total
