"""A search over the layouts of a model on so many GPUs: those that fit, fastest first, and why others do not.

It tries tensor sizes within a node, every pipeline size and chunk count that layers allow, context sizes where
sequences are long, expert sizes that divide the experts, each expert unsharded or sharded over tp many ranks, and
microbatches of 1 to 8 samples. Layers that stages do not divide are spread by cost; the run's own layout of stages is
used for its own number of stages. Full recomputation is tried where nothing else fits. Each layout goes through the
rules of the strategy.

The closed form of memory drops what is hopeless, times order the rest, and layouts are measured from the fastest on
until as many fit as are shown. What did not fit tells of layouts that differ in their chunks alone. Of a model that is
not the package's fewer sizes are tried, and what is expected of them is measured too (`forecast`).
"""

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from typing import Any

from lightning_megatron.context.config import ContextConfig
from lightning_megatron.mesh import Sizes, StageLayout
from lightning_megatron.planner.constants import Constants
from lightning_megatron.planner.estimate import Estimate, estimate
from lightning_megatron.planner.forecast import ClosedForm, FewSamples, Forecast
from lightning_megatron.planner.hardware import GIGA, Gpu
from lightning_megatron.planner.measured import Measure, measured
from lightning_megatron.planner.memory import Memory
from lightning_megatron.planner.model_size import ModelSize
from lightning_megatron.planner.run import Run, RunSettings, UnmeasuredError, context_fields, faults_of
from lightning_megatron.transformer.recompute import RecomputeConfig

_FULL = RecomputeConfig(granularity="full")
_MICRO_BATCHES = (1, 2, 4, 8)
_CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
# More context ranks must leave each rank so many tokens of a sequence.
_LEAST_TOKENS = 4096
_MOST_TENSOR = 8
# A layout is measured unless its closed form is above the memory by more than this: it may be 8% too high.
_SLACK = 1.1
# Layouts that differ in their chunks alone are off by the same share, within this.
_SLACK_OF_CHUNKS = 1.02
# The search chooses the schedule itself: what a recipe says of its own has no part in it.
_NO_SCHEDULE: dict[str, Any] = {
    "schedule_name": None,
    "group_size": 0,
    "is_overlapped": False,
    "is_collective": False,
}
_EVEN = StageLayout()
_BY_COST = StageLayout(balance="cost")


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A layout that breaks a rule or needs more memory than there is."""

    run: RunSettings
    why: str
    """Reason in one sentence."""
    needed_bytes: float = 0.0
    """Memory that the fullest rank needs; 0 where memory is not the reason."""
    is_refused: bool = False
    """Whether the model itself cannot run so."""


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """A layout that was measured and fits."""

    estimate: Estimate
    alike: tuple[RunSettings, ...] = ()
    """Layouts whose times print alike, and which need more memory."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Layouts that a search found."""

    confirmed: tuple[Confirmed, ...]
    """Measured layouts, fastest first."""
    others: tuple[RunSettings, ...]
    """Slower ones, which fit by the closed form."""
    rejected: tuple[Rejected, ...]

    @property
    def num_fitting(self) -> int:
        """Number of layouts that fit, as measured or by the closed form."""
        return sum(1 + len(one.alike) for one in self.confirmed) + len(self.others)

    def least_bytes(self, measure: Measure = measured) -> float:
        """Memory of a GPU that would do, as measured of the layout that needs the least in closed form; 0 where no
        layout lacks memory."""
        return max((memory.total for one in self.nearest(1) for memory in measure(one.run).memory), default=0.0)

    def nearest(self, number: int) -> list[Rejected]:
        """Layouts that lack the least memory, one for each sharding of the weights."""
        first: dict[tuple[int, ...], Rejected] = {}
        for one in sorted(self.rejected, key=lambda one: one.needed_bytes):
            sizes = one.run.sizes
            if one.needed_bytes:
                first.setdefault((sizes.tp, sizes.pp, sizes.cp, sizes.ep, sizes.etp), one)
        return list(first.values())[:number]

    def reasons(self) -> dict[str, int]:
        """Number of rejected layouts by reason."""
        return dict(Counter(_kind(one) for one in self.rejected).most_common())


def search(
    run: RunSettings,
    gpu: Gpu,
    *,
    memory_bytes: float,
    free_recompute: bool = True,
    num_confirmed: int = 1,
    measure: Measure = measured,
    size: ModelSize | None = None,
) -> Found:
    """Layouts of the run's model and batch on its world, whatever its own layout; the fastest are measured until so
    many of different times fit.

    `free_recompute` allows full recomputation where nothing else fits. Precision, optimizer and FP8 are the run's. A
    `Run` has its own `size`.
    """
    queue = _Queue(gpu, memory_bytes, free_recompute, measure, size)
    if size is None:
        assert isinstance(run, Run), "the size of any other model is given"
        tried: Iterator[RunSettings] = candidates(run, gpu)
    else:
        tried = few_candidates(run, gpu, size)
    for candidate in tried:
        if faults := faults_of(candidate):
            queue.rejected.append(Rejected(run=candidate, why="; ".join(faults)))
        else:
            queue.add(candidate)
    confirmed: list[Confirmed] = []
    while len(confirmed) < num_confirmed and (alike := queue.fastest()):
        confirmed += queue.confirmed(alike)
    found = Found(confirmed=tuple(confirmed), others=queue.unmeasured(), rejected=tuple(queue.rejected))
    for one in () if confirmed else found.nearest(1):
        # What is expected is not the last word where nothing fits.
        queue = _Queue(gpu, memory_bytes, free_recompute, measure, size)
        if is_enough := queue.confirmed([_Pending(0.0, 0, one.run, one.needed_bytes)]):
            rejected = tuple(other for other in found.rejected if other is not one)
            found = replace(found, confirmed=tuple(is_enough), rejected=rejected)
    return found


@dataclass(order=True)
class _Pending:
    """A layout that may fit."""

    seconds: float
    order: int
    run: RunSettings = field(compare=False)
    closed_form: float = field(compare=False)
    """Memory of the fullest rank as it is expected."""


class _Queue:
    """Layouts that may fit, fastest first, and those that do not."""

    def __init__(
        self, gpu: Gpu, memory_bytes: float, free_recompute: bool, measure: Measure, size: ModelSize | None = None
    ) -> None:
        self._gpu, self._memory_bytes, self._free_recompute = gpu, memory_bytes, free_recompute
        self._measure, self._size = measure, size
        self._constants: Constants = gpu.constants
        self._forecast: Forecast = (
            ClosedForm(gpu, self._constants) if size is None else FewSamples(measure, gpu, self._constants)
        )
        self._pending: list[_Pending] = []
        self._orders = count()
        # Of layouts that did not fit: measured over expected memory, whatever their chunks.
        self._shares: dict[Hashable, float] = {}
        self.rejected: list[Rejected] = []

    def add(self, run: RunSettings) -> None:
        """Adds a layout, with full recomputation where it is hopeless without, or rejects it."""
        try:
            rank, fullest = self._fullest(run)
        except UnmeasuredError as error:
            self._refuse(run, error)
            return
        if fullest.total <= _SLACK * self._memory_bytes:
            seconds = self._forecast.seconds(run)
            heapq.heappush(self._pending, _Pending(seconds, next(self._orders), run, fullest.total))
        else:
            self._give_up(run, rank, fullest)

    def fastest(self) -> list[_Pending]:
        """Takes the fastest layouts, whose times print alike, the least memory first; empty where none is left."""
        alike: list[_Pending] = []
        while self._pending and (not alike or f"{self._pending[0].seconds:.4g}" == f"{alike[0].seconds:.4g}"):
            alike.append(heapq.heappop(self._pending))
        return sorted(alike, key=lambda one: one.closed_form)

    def confirmed(self, alike: list[_Pending]) -> list[Confirmed]:
        """The first of the layouts that fits as measured, if any; what is measured before it is rejected, and so are
        layouts like one that did not fit."""
        most = _SLACK_OF_CHUNKS * self._memory_bytes
        for index, one in enumerate(alike):
            if (share := self._shares.get(_without_chunks(one.run), 0.0)) * one.closed_form > most:
                rank, expected = self._fullest(one.run)
                self._give_up(one.run, rank, expected.times(share))
                continue
            try:
                found = estimate(one.run, self._gpu, self._constants, measure=self._measure, size=self._size)
            except UnmeasuredError as error:
                self._refuse(one.run, error)
                continue
            if found.peak_bytes <= self._memory_bytes:
                rest = [other for other in alike[index + 1 :] if self._fits(other)]
                return [Confirmed(estimate=found, alike=tuple(other.run for other in rest))]
            rank = max(range(len(found.memory)), key=lambda rank: found.memory[rank].total)
            self._shares[_without_chunks(one.run)] = found.peak_bytes / one.closed_form
            self._give_up(one.run, rank, found.memory[rank])
        return []

    def any_fits(self) -> bool:
        """Whether a layout fits as measured; those that need the least memory in closed form are measured first."""
        while self._pending:
            least = min(self._pending, key=lambda one: one.closed_form)
            self._pending.remove(least)
            if self.confirmed([least]):
                return True
        return False

    def unmeasured(self) -> tuple[RunSettings, ...]:
        """Layouts that are left and fit by the closed form, fastest first; the others are rejected."""
        return tuple(one.run for one in sorted(self._pending) if self._fits(one))

    def _fits(self, one: _Pending) -> bool:
        if one.closed_form > self._memory_bytes:
            self._reject(one.run, *self._fullest(one.run))
        return one.closed_form <= self._memory_bytes

    def _fullest(self, run: RunSettings) -> tuple[int, Memory]:
        """The fullest rank as far as it is known before it is measured."""
        return max(self._forecast.memory(run).items(), key=lambda pair: pair[1].total)

    def _give_up(self, run: RunSettings, rank: int, memory: Memory) -> None:
        if self._free_recompute and run.recompute != _FULL:
            self.add(replace(run, recompute=_FULL))
        else:
            self._reject(run, rank, memory)

    def _refuse(self, run: RunSettings, error: UnmeasuredError) -> None:
        why = "; ".join(str(error).splitlines())
        self.rejected.append(Rejected(run=run, why=why, is_refused=True))

    def _reject(self, run: RunSettings, rank: int, memory: Memory) -> None:
        needed, most = memory.total, max(memory.by_kind().items(), key=lambda pair: pair[1])
        why = (
            f"needs {needed / GIGA:.1f} GB on pipeline rank {rank} of {self._memory_bytes / GIGA:.1f} GB; "
            f"most of it {most[0].replace('_', ' ')}, {most[1] / GIGA:.1f} GB"
        )
        self.rejected.append(Rejected(run=run, why=why, needed_bytes=needed))


def fewest_gpus(
    run: Run, gpu: Gpu, *, memory_bytes: float, free_recompute: bool = True, measure: Measure = measured
) -> int:
    """The least number of GPUs, by doubling, on which some layout fits; 0 where none does.

    Only the layouts that need the least memory are tried: one sample a microbatch, one chunk. The search ends where
    data-parallel ranks outnumber the samples of a batch for all sizes.
    """
    world = run.sizes.world
    while True:
        world *= 2
        queue = _Queue(gpu, memory_bytes, free_recompute, measure)
        grown = replace(run, sizes=replace(run.sizes, world=world))
        frugal = list(candidates(grown, gpu, micro_batches=(1,), chunks=(1,)))
        if not frugal:
            return 0
        for candidate in frugal:
            if not faults_of(candidate):
                queue.add(candidate)
        if queue.any_fits():
            return world


def candidates(
    run: Run, gpu: Gpu, *, micro_batches: Sequence[int] = _MICRO_BATCHES, chunks: Sequence[int] = _CHUNKS
) -> Iterator[Run]:
    """The layouts that a search tries; some may have errors."""
    model, world, sequence = run.model, run.sizes.world, run.lengths.sequence
    num_layers = run.model_parts.num_layers
    num_experts = model.moe.router.num_experts if model.moe is not None else 1
    tensors = [tp for tp in _powers(min(gpu.gpus_per_node, _MOST_TENSOR)) if world % tp == 0]
    contexts = [cp for cp in _powers(world) if cp == 1 or sequence // cp >= _LEAST_TOKENS]
    experts = [ep for ep in range(1, num_experts + 1) if num_experts % ep == 0]
    for tp, cp in product(tensors, contexts):
        rest = world // (tp * cp) if world % (tp * cp) == 0 else 0
        for pp in [pp for pp in range(1, min(rest, num_layers) + 1) if rest % pp == 0]:
            dp = world // (tp * cp * pp)
            micros = [micro for micro in micro_batches if run.global_batch_size % (dp * micro) == 0]
            expert_cuts = [1] if model.moe is None else sorted({1, tp})
            folds = [(ep, etp) for ep, etp in product(experts, expert_cuts) if world % (pp * ep * etp) == 0]
            for (ep, etp), micro in product(folds, micros):
                m = run.global_batch_size // (dp * micro)
                for vp in chunks:
                    if vp > 1 and not _fills_groups(pp, vp, m, num_layers):
                        continue
                    sizes = Sizes(world=world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, vp=vp, sequence_parallel=tp > 1)
                    yield _with_layout(run, sizes, micro)


def few_candidates(run: RunSettings, gpu: Gpu, size: ModelSize) -> Iterator[RunSettings]:
    """The layouts that a search tries for a model that is not the package's: tensor sizes within a node, all pipeline
    sizes and chunk counts that layers allow, context sizes where sequences are long, and expert sizes that divide the
    experts. Some may have errors."""
    world = run.sizes.world
    tensors = [tp for tp in _powers(min(gpu.gpus_per_node, _MOST_TENSOR)) if world % tp == 0]
    contexts = [cp for cp in _powers(world) if cp == 1 or run.lengths.sequence // cp >= _LEAST_TOKENS]
    experts = [ep for ep in range(1, size.num_experts + 1) if size.num_experts % ep == 0]
    for tp, pp, cp, ep in product(tensors, range(1, world + 1), contexts, experts):
        # Ranks of tp hold the same experts.
        etp = tp if ep > 1 else 1
        if world % (tp * pp * cp) or world % (pp * ep * etp):
            continue
        plain = Sizes(world=world, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, sequence_parallel=tp > 1)
        for micro, vp in product(_MICRO_BATCHES, _CHUNKS):
            is_in_groups = vp == 1 or _fills_groups(
                pp, vp, run.global_batch_size // (plain.dp * micro), size.num_layers
            )
            if run.global_batch_size % (plain.dp * micro) or not is_in_groups:
                continue
            sizes = replace(plain, vp=vp, **context_fields(run.context, cp))
            yield replace(
                run,
                sizes=sizes,
                micro_batch_size=micro,
                **_NO_SCHEDULE,
            )


def _fills_groups(pp: int, vp: int, num_microbatches: int, num_layers: int) -> bool:
    """Whether groups of microbatches of stages with several chunks are full, and every chunk has a layer."""
    return pp > 1 and num_microbatches % pp == 0 and pp * vp <= num_layers


def _with_layout(run: Run, sizes: Sizes, micro: int) -> Run:
    """The run on these sizes, with stages and context exchange that fit them."""
    own, context = run.sizes, run.context
    if sizes.cp % context.ulysses_size_of(sizes.cp):
        context = ContextConfig(uneven=context.uneven)
    if (own.pp, own.vp) == (sizes.pp, sizes.vp):
        layout = own.stage_layout
    else:
        layout = _EVEN if run.model_parts.num_layers % sizes.num_stages == 0 else _BY_COST
    sizes = replace(sizes, stage_layout=layout, **context_fields(context, sizes.cp))
    return replace(
        run,
        sizes=sizes,
        context=context,
        micro_batch_size=micro,
        **_NO_SCHEDULE,
    )


def _without_chunks(run: RunSettings) -> Hashable:
    """All that a search changes of a layout but its chunks."""
    sizes = run.sizes
    return sizes.tp, sizes.cp, sizes.pp, sizes.ep, sizes.etp, run.micro_batch_size, run.recompute


def _kind(rejected: Rejected) -> str:
    """Reason of a rejection without the numbers of its layout."""
    if rejected.needed_bytes:
        return "not enough memory"
    if rejected.is_refused:
        return rejected.why
    return rejected.why.partition(" (")[0] + " does not fit"


def _powers(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length()) if 1 << k <= most]
