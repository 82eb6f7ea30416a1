"""A plan as panels of a picture: the memory of every pipeline rank, and the time of one step."""

from lightning_megatron.metrics.schedule_figure import schedule_panel
from lightning_megatron.metrics.timeline_figure import Bar, Panel, Row
from lightning_megatron.pipeline.bubble import timeline_of
from lightning_megatron.pipeline.simulate import Costs
from lightning_megatron.planner.estimate import Estimate
from lightning_megatron.planner.hardware import GIGA

# Okabe's and Ito's colours, which the colour-blind can distinguish.
_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#f0e442", "#e69f00", "#d55e00", "#999999")
# A schedule of more is not drawn: the picture would be larger than anybody can look at.
_MOST_ACTIONS = 40_000


def plan_panels(found: Estimate) -> list[Panel]:
    """Panels of memory by kind with the GPU's capacity, and of a batch's schedule where there are several stages."""
    memory = Panel(
        heading=f"Memory of each pipeline rank; the dashed line is what {found.gpu.name} has",
        rows=_memory_rows(found),
        unit="GB",
        limit=found.gpu.memory_bytes / GIGA,
    )
    schedule, time = found.run.schedule, found.time
    if schedule.pp == 1 or 2 * schedule.pp * schedule.chunks * schedule.microbatches > _MOST_ACTIONS:
        return [memory]
    forward, backward = sum(time.forwards) / schedule.pp, sum(time.backwards) / schedule.pp
    half = backward / 2
    costs = Costs(forward=forward, backward=backward, backward_input=half, backward_weight=half)
    what = "step" if found.run.num_accumulated == 1 else "batch of a step"
    heading = f"One {what}, every stage taking the mean stage's time"
    return [memory, schedule_panel(timeline_of(schedule, costs), unit="seconds", heading=heading)]


def _memory_rows(found: Estimate) -> list[Row]:
    rows = []
    for rank, memory in enumerate(found.memory):
        bars: list[Bar] = []
        for (kind, num_bytes), colour in zip(memory.by_kind().items(), _COLOURS, strict=True):
            start = bars[-1].end if bars else 0.0
            bars.append(Bar(start, start + num_bytes / GIGA, colour, kind.replace("_", " ")))
        rows.append(Row(f"rank {rank}", bars, note=f"{memory.total / GIGA:.1f} GB"))
    return rows
