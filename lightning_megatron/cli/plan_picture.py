"""A plan as panels of a picture: memory of every pipeline rank, of the fullest one over time, and one step."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from lightning_megatron.metrics.schedule_figure import schedule_panel
from lightning_megatron.metrics.timeline_figure import Area, AreaPanel, Bar, Panel, Row
from lightning_megatron.pipeline.registry import order_of
from lightning_megatron.pipeline.schedule import COMPUTES
from lightning_megatron.pipeline.simulate import Costs, Timeline, play
from lightning_megatron.planner.estimate import Estimate
from lightning_megatron.planner.hardware import GIGA
from lightning_megatron.planner.memory_tracker import OTHERS
from lightning_megatron.planner.run import RunSettings
from lightning_megatron.planner.step_trace import Level

# Okabe's and Ito's colours, which the colour-blind can distinguish.
_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#f0e442", "#e69f00", "#d55e00", "#999999")
_STATIC = ("weights", "gradients", "master weights", "moments")
# A schedule of more is not drawn: the picture would be larger than anybody can look at.
_MOST_ACTIONS = 40_000


def can_be_drawn(run: RunSettings) -> bool:
    """Whether a step of the run is drawn: its microbatches are alike and can be looked at."""
    schedule = run.schedule
    return run.balanced is None and 2 * schedule.pp * schedule.chunks * schedule.microbatches <= _MOST_ACTIONS


def plan_panels(found: Estimate, levels: Sequence[Level]) -> list[Panel | AreaPanel]:
    """Panels of memory by kind with the GPU's capacity, and, where a step can be drawn, of memory over time, by the
    `levels` of the fullest rank, and of the schedule."""
    memory = Panel(
        heading=f"Memory of each pipeline rank; the dashed line is what {found.gpu.name} has",
        rows=_memory_rows(found),
        unit="GB",
        limit=found.gpu.memory_bytes / GIGA,
    )
    if not can_be_drawn(found.run):
        return [memory]
    sizes, time = found.run.sizes, found.time
    costs = []
    for rank in map(sizes.pp_rank_of, range(sizes.num_stages)):
        backward = time.backwards[rank] / sizes.vp
        forward = time.forwards[rank] / sizes.vp
        costs.append(
            Costs(forward=forward, backward=backward, backward_input=backward / 2, backward_weight=backward / 2)
        )
    timeline = play(order_of(found.run.schedule), costs)
    what = "step" if found.run.num_accumulated == 1 else "last batch of a step"
    return [
        memory,
        _over_time(found, levels, timeline, what),
        schedule_panel(timeline, unit="seconds", heading=f"The {what}: forwards and backwards"),
    ]


def _over_time(found: Estimate, levels: Sequence[Level], timeline: Timeline, what: str) -> AreaPanel:
    """Memory by kind of the fullest rank, at the peak of each compute and between computes."""
    rank = found.fullest
    pieces = list(_timed(levels, timeline, rank, found.time.optimizer + found.time.exposed["dp"]))
    # What no dry run counts is there all the time.
    more = found.memory[rank].total - max(sum(kinds.values()) for *_, kinds in pieces)
    names = [name.replace("_", " ") for name in found.memory[rank].by_kind()]
    return AreaPanel(
        heading=f"Memory of pipeline rank {rank} over the {what}, and while the optimizer runs",
        moments=[moment for start, end, _ in pieces for moment in (start, end)],
        areas=[
            Area(name, colour, [kinds.get(name, more) / GIGA for *_, kinds in pieces for _ in range(2)])
            for name, colour in zip(names, _COLOURS, strict=True)
        ],
        unit="seconds",
        height_unit="GB",
        limit=found.gpu.memory_bytes / GIGA,
    )


def _timed(
    levels: Sequence[Level], timeline: Timeline, rank: int, last_seconds: float
) -> Iterator[tuple[float, float, dict[str, int]]]:
    """Pieces of the last batch of a step, and of what follows it: start, end, and bytes by kind."""
    last = max(level.batch for level in levels if level.event is not None)
    behind = [level for level in levels if level.batch > last]
    spans, now, before = iter(timeline.spans[rank]), 0.0, levels[0].after
    for (batch, event), pieces in groupby(levels, key=lambda level: (level.batch, level.event)):
        own = list(pieces)
        if batch == last and event is not None and event.phase == "computed" and event.action.kind in COMPUTES:
            span, fullest = next(spans), max(own, key=lambda level: sum(level.peak.values()))
            yield now, span.start, _by_kind(before, before, before)
            yield span.start, span.end, _by_kind(before, fullest.peak, own[-1].after)
            now = span.end
        elif batch > last:
            for level in own:
                yield now, now + last_seconds / len(behind), _by_kind(before, level.peak, level.after)
                now, before = now + last_seconds / len(behind), level.after
        before = own[-1].after


def _by_kind(before: Mapping[str, int], peak: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Bytes by kind of a report: activations are held on either side of a piece, and buffers within it."""
    saved = min(max(before.get(OTHERS, 0), after.get(OTHERS, 0)), peak.get(OTHERS, 0))
    static = {name: peak.get(name, 0) for name in _STATIC}
    return static | {"activations": saved, "buffers": peak.get(OTHERS, 0) - saved}


def _memory_rows(found: Estimate) -> list[Row]:
    rows = []
    for rank, memory in enumerate(found.memory):
        bars: list[Bar] = []
        for (kind, num_bytes), colour in zip(memory.by_kind().items(), _COLOURS, strict=True):
            start = bars[-1].end if bars else 0.0
            bars.append(Bar(start, start + num_bytes / GIGA, colour, kind.replace("_", " ")))
        rows.append(Row(f"rank {rank}", bars, note=f"{memory.total / GIGA:.1f} GB"))
    return rows
