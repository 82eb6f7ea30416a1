"""A search over the layouts of a model on so many GPUs: those that fit, fastest first, and why others do not.

It tries tensor sizes within a node, every pipeline size and chunk count that layers allow, context sizes where
sequences are long, expert sizes that divide the experts, each expert unsharded or sharded over tp many ranks, and
microbatches of 1 to 8 samples. Layers that stages do not divide are spread by cost; the run's own layout of stages is
used for its own number of stages. Full recomputation is tried where nothing else fits. Each layout goes through the
rules of the strategy.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from lightning_megatron.context.config import ContextConfig
from lightning_megatron.mesh import Sizes, StageLayout
from lightning_megatron.planner.constants import fitted
from lightning_megatron.planner.hardware import GIGA, Gpu
from lightning_megatron.planner.memory import rank_memory
from lightning_megatron.planner.run import Run, context_fields, faults_of
from lightning_megatron.planner.step_time import step_time
from lightning_megatron.transformer.recompute import RecomputeConfig

_FULL = RecomputeConfig(granularity="full")
_MICRO_BATCHES = (1, 2, 4, 8)
_CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
# More context ranks must leave each rank so many tokens of a sequence.
_LEAST_TOKENS = 4096
_MOST_TENSOR = 8
_EVEN = StageLayout()
_BY_COST = StageLayout(balance="cost")


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A layout that breaks a rule or needs more memory than there is."""

    run: Run
    why: str
    """Reason in one sentence."""
    needed_bytes: float = 0.0
    """Memory that the fullest rank needs; 0 where memory is not the reason."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Layouts that a search found."""

    fitting: tuple[Run, ...]
    """Fastest first."""
    seconds: tuple[float, ...]
    """Step time of each fitting layout."""
    rejected: tuple[Rejected, ...]

    def least(self) -> Rejected | None:
        """The layout that lacks the least memory."""
        return next(iter(self.nearest(1)), None)

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


def search(run: Run, gpu: Gpu, *, memory_bytes: float, free_recompute: bool = True) -> Found:
    """Layouts of the run's model and batch on its world, whatever its own layout.

    `free_recompute` allows full recomputation where nothing else fits. Precision, optimizer and FP8 are the run's.
    """
    constants = fitted()
    fitting: list[tuple[float, Run]] = []
    rejected: list[Rejected] = []
    for candidate in candidates(run, gpu):
        if faults := faults_of(candidate):
            rejected.append(Rejected(run=candidate, why="; ".join(faults)))
            continue
        best = _that_fits(candidate, memory_bytes, free_recompute)
        if isinstance(best, Rejected):
            rejected.append(best)
        else:
            fitting.append((step_time(best, gpu, constants).total, best))
    fitting.sort(key=lambda pair: pair[0])
    return Found(
        fitting=tuple(run for _, run in fitting),
        seconds=tuple(seconds for seconds, _ in fitting),
        rejected=tuple(rejected),
    )


def fewest_gpus(run: Run, gpu: Gpu, *, memory_bytes: float, free_recompute: bool = True) -> int:
    """The least number of GPUs, by doubling, on which some layout fits; 0 where none does.

    Only the layouts that need the least memory are tried: one sample a microbatch, one chunk. The search ends where
    data-parallel ranks outnumber the samples of a batch for all sizes.
    """
    world = run.sizes.world
    while True:
        world *= 2
        grown = replace(run, sizes=replace(run.sizes, world=world))
        frugal = list(candidates(grown, gpu, micro_batches=(1,), chunks=(1,)))
        if not frugal:
            return 0
        for candidate in frugal:
            if not faults_of(candidate) and isinstance(_that_fits(candidate, memory_bytes, free_recompute), Run):
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
                    # Groups of microbatches must be full.
                    if vp > 1 and (pp == 1 or m % pp or pp * vp > num_layers):
                        continue
                    sizes = Sizes(world=world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, vp=vp, sequence_parallel=tp > 1)
                    yield _with_layout(run, sizes, micro)


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
        schedule_name=None,
        group_size=0,
        is_overlapped=False,
    )


def _that_fits(run: Run, memory_bytes: float, free_recompute: bool) -> Run | Rejected:
    """The run with as little recomputation as fits, or why none does."""
    needed = 0.0
    for recompute in dict.fromkeys([run.recompute, _FULL] if free_recompute else [run.recompute]):
        tried = replace(run, recompute=recompute)
        ranks = {rank: rank_memory(tried, rank) for rank in _fullest_ranks(tried)}
        rank, fullest = max(ranks.items(), key=lambda pair: pair[1].total)
        needed = fullest.total
        if needed <= memory_bytes:
            return tried
    most = max(fullest.by_kind().items(), key=lambda pair: pair[1])
    return Rejected(
        run=tried,
        why=(
            f"needs {needed / GIGA:.1f} GB on pipeline rank {rank} of {memory_bytes / GIGA:.1f} GB; "
            f"most of it {most[0].replace('_', ' ')}, {most[1] / GIGA:.1f} GB"
        ),
        needed_bytes=needed,
    )


def _fullest_ranks(run: Run) -> list[int]:
    """The first of each set of ranks with equal stages: it saves the most microbatches."""
    ranks = reversed(range(run.sizes.pp))
    return sorted({tuple(map(id, run.stages[rank])): rank for rank in ranks}.values())


def _kind(rejected: Rejected) -> str:
    """Reason of a rejection without the numbers of its layout."""
    if rejected.needed_bytes:
        return "not enough memory"
    return rejected.why.partition(" (")[0] + " does not fit"


def _powers(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length()) if 1 << k <= most]
