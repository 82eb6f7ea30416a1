"""`lightning-megatron schedule`: a pipeline schedule as a grid, its bubble and its saved activations.

It shows the order that a run would execute, simulated with the given costs; where messages take time, the plan that the
order is lowered to.
"""

import argparse
import json
import math
import shutil
from typing import Any

from lightning_megatron.cli.ascii_timeline import ascii_timeline
from lightning_megatron.cli.commands import add_command
from lightning_megatron.cli.picture import add_out, out_faults, write_picture
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.metrics.schedule_figure import schedule_panel
from lightning_megatron.pipeline.bubble import peak_shares, timeline_of
from lightning_megatron.pipeline.paused_gc import paused_gc
from lightning_megatron.pipeline.registry import (
    SCHEDULES,
    bubble_formula,
    default_name,
    default_text,
    names_with,
    schedule_faults,
    spec_of,
)
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.simulate import Costs, Timeline
from lightning_megatron.rules.limits import MOST_STAGES, limit_faults

_COMPUTE_FIELDS = ("kind", "stage", "microbatch", "start", "end")
# Columns where stdout is no terminal.
_COLUMNS = 120
# Most computes that are simulated within seconds.
_MOST_COMPUTES = 1_000_000
# Most computes that are drawn within seconds.
_MOST_DRAWN = 5_000
# Sums of costs that differ by more lose the smaller one.
_MOST_DIFFERENCE = 1e15
_EPILOG = """\
Costs are in one unit of your choice, those of one microbatch through all layers of a rank: a chunk takes 1/vp of them,
so that schedules of different --vp compare. A message costs the same whatever --vp is.

F is a forward, B a full backward, I and W a split backward: the gradients of a stage's input (dgrad) and of its weights
(wgrad). Activations are saved from F until B or W.

example:  lightning-megatron schedule --pp 8 --vp 2 --microbatches 16 --out schedule.svg
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command and its options."""
    parser = add_command(
        commands,
        "schedule",
        "Shows a pipeline schedule as a grid, with the time that ranks are idle (the bubble) and the "
        "activations that they save.",
        run=run_schedule,
        epilog=_EPILOG,
    )
    sizes = parser.add_argument_group("the schedule")
    sizes.add_argument("--pp", type=int, required=True, metavar="RANKS", help="ranks of the pipeline, from 1")
    sizes.add_argument(
        "--vp",
        type=int,
        metavar="CHUNKS",
        help="chunks of the model on each rank (default: the fewest that --schedule takes)",
    )
    sizes.add_argument(
        "--microbatches", type=int, required=True, metavar="NUMBER", help="microbatches of a step, from 1"
    )
    sizes.add_argument(
        "--schedule",
        metavar="NAME",
        help=f"{', '.join(SCHEDULES)} (default: {default_text('--vp')})",
    )
    sizes.add_argument(
        "--group-size",
        type=int,
        default=0,
        metavar="NUMBER",
        help="microbatches that go through a chunk before the next chunk's turn, from pp; with "
        f"{names_with(lambda spec: spec.has_groups)} only "
        "(default: 0, which is pp)",
    )
    sizes.add_argument(
        "--overlapped",
        action="store_true",
        help="a forward overlaps a backward of another microbatch, which hides the communication of experts "
        "(overlap_expert_exchange); with "
        f"{names_with(lambda spec: spec.make_overlapped is not None, 'and')} only. Each pair is drawn one after the "
        "other",
    )
    costs = parser.add_argument_group("the costs")
    for name, what in (
        ("forward", "time of a forward"),
        ("backward", "time of a full backward"),
        ("backward-input", "time of the backward of the input (dgrad)"),
        ("backward-weight", "time of the backward of the weights (wgrad)"),
        ("message", "time of a message from one rank to the next"),
    ):
        default = getattr(Costs(), name.replace("-", "_"))
        costs.add_argument(f"--{name}", type=float, metavar="TIME", help=f"{what} (default: {default:g})")
    output = parser.add_argument_group("the output")
    add_out(output, "the schedule")
    output.add_argument("--json", action="store_true", help="print everything as JSON, every compute with its times")
    output.add_argument(
        "--max-columns",
        type=int,
        default=0,
        metavar="NUMBER",
        help=f"characters of a line of the grid, from 20 (default: 0, the width of the terminal, or {_COLUMNS})",
    )


def run_schedule(options: argparse.Namespace) -> None:
    """Prints the schedule, and writes its picture with --out. Raises UsageError with all errors."""
    schedule, costs = _read(options)
    with paused_gc():
        timeline = timeline_of(schedule, costs)
        if unused := _unused_costs(options, schedule, timeline):
            raise UsageError(unused)
        shortest = min(cost for cost in vars(costs).values() if cost > 0) / schedule.chunks
        if not math.isfinite(timeline.makespan):
            raise UsageError(["the costs add up to more than a number can hold; give them in a larger unit"])
        if shortest * _MOST_DIFFERENCE <= timeline.makespan:
            raise UsageError(
                [f"the smallest cost ({shortest:g}) is lost in the makespan ({timeline.makespan:g}); use 0"]
            )
        if options.out is not None:
            title = f"{_name(schedule)}: bubble {_percent(timeline.bubble)}"
            write_picture(options.out, [schedule_panel(timeline, unit="time")], title=title)
        if options.json:
            print(json.dumps(_record(schedule, costs, timeline)))
        else:
            columns = options.max_columns or shutil.get_terminal_size((_COLUMNS, 0)).columns
            print(_report(schedule, costs, timeline, columns))


def _read(options: argparse.Namespace) -> tuple[Schedule, Costs]:
    name = default_name(options.vp or 1) if options.schedule is None else options.schedule
    fewest = SCHEDULES[name].min_chunks if name in SCHEDULES else 1
    schedule = Schedule(
        name=name,
        pp=options.pp,
        chunks=fewest if options.vp is None else options.vp,
        microbatches=options.microbatches,
        group_size=options.group_size,
        is_overlapped=options.overlapped,
    )
    computes = {"pp x vp x microbatches": max(schedule.pp, 1) * max(schedule.chunks, 1) * schedule.microbatches}
    absurd = limit_faults(computes, _MOST_COMPUTES if options.out is None else _MOST_DRAWN)
    if absurd := absurd or limit_faults({"pp x vp": max(schedule.pp, 1) * schedule.chunks}, MOST_STAGES):
        raise UsageError(absurd)
    costs = Costs()
    faults = schedule_faults(schedule)
    try:
        costs = Costs(**{name: cost for name in vars(costs) if (cost := getattr(options, name)) is not None})
    except ValueError as error:
        faults.append(str(error))
    faults += out_faults(options.out)
    if options.max_columns != 0 and options.max_columns < 20:
        faults.append(
            f"--max-columns ({options.max_columns}) must be at least 20; use 0, which is the terminal's, or 20 or more"
        )
    if options.json and options.max_columns:
        faults.append(f"--max-columns ({options.max_columns}) is for the grid, and --json prints none; leave one out")
    if faults:
        raise UsageError(faults)
    return schedule, costs


def _unused_costs(options: argparse.Namespace, schedule: Schedule, timeline: Timeline) -> list[str]:
    """A fault for each cost that was given and of which the schedule has nothing."""
    there = {span.action.kind.name.lower() for spans in timeline.spans for span in spans}
    if schedule.pp > 1:
        there.add("message")
    return [
        f"--{name.replace('_', '-')} ({cost:g}) acts on nothing: {_name(schedule)} has none; leave it out"
        for name in vars(Costs())
        if name not in there and (cost := getattr(options, name)) is not None
    ]


def _name(schedule: Schedule) -> str:
    """The schedule in words, as in "gpipe, 8 ranks of 2 chunks, 16 microbatches"."""
    ranks = _num(schedule.pp, "rank")
    chunks = "" if schedule.chunks == 1 else f" of {schedule.chunks} chunks"
    group = f" in groups of {schedule.group_size}" if schedule.group_size else ""
    joint = ", forwards beside backwards" if schedule.is_overlapped else ""
    return f"{schedule.name}{joint}, {ranks}{chunks}, {_num(schedule.microbatches, 'microbatch', 'es')}{group}"


def _report(schedule: Schedule, costs: Costs, timeline: Timeline, columns: int) -> str:
    formula = bubble_formula(schedule, costs)
    formula_text = (
        f"formula {formula.text} = {_percent(formula.bubble)}" if formula else "no formula for these numbers and costs"
    )
    shares = peak_shares(timeline, schedule.chunks)
    rows = [("rank", "bubble", "peak", "in shares")]
    rows += [
        (str(rank), f"{_percent(bubble)}", str(peak), f"{share:g}")
        for rank, (bubble, peak, share) in enumerate(
            zip(timeline.bubbles, timeline.peak_activations, shares, strict=True)
        )
    ]
    table = "\n".join(f"{rank:>4}  {bubble:>6}  {peak:>4}  {share:>9}" for rank, bubble, peak, share in rows)
    return f"""\
{_name(schedule)}

{ascii_timeline(timeline, message_time=costs.message, columns=columns)}

bubble    {_percent(timeline.bubble)} of the makespan, mean over the ranks; {formula_text}
makespan  {timeline.makespan:g}, of which a rank computes {timeline.makespan * (1 - timeline.bubble):g}

Activations that a rank keeps at most, in microbatches through one chunk (peak), and in shares of a microbatch through
all layers of a rank:

{table}"""


def _record(schedule: Schedule, costs: Costs, timeline: Timeline) -> dict[str, Any]:
    """Everything that is known, as JSON."""
    formula = bubble_formula(schedule, costs)
    return {
        "schedule": schedule.name,
        "pp": schedule.pp,
        "vp": schedule.chunks,
        "microbatches": schedule.microbatches,
        "is_overlapped": schedule.is_overlapped,
        "group_size": schedule.group if spec_of(schedule.name).has_groups else None,
        "costs": vars(costs),
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "formula": None if formula is None else vars(formula),
        "compute_fields": _COMPUTE_FIELDS,
        "ranks": [
            {
                "bubble": timeline.bubbles[rank],
                "peak_activations": timeline.peak_activations[rank],
                "peak_shares": share,
                "computes": [
                    (span.action.kind.value, span.action.stage, span.action.microbatch, span.start, span.end)
                    for span in timeline.spans[rank]
                ],
            }
            for rank, share in enumerate(peak_shares(timeline, schedule.chunks))
        ],
    }


def _num(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"


def _percent(share: float) -> str:
    # A rank that is never idle may miss its makespan by a rounding.
    return f"{max(share, 0):.1%}"
