"""`certify`: a user's module on one device, beside the same module under layouts."""

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_megatron.testing.causes import explained
from lightning_megatron.testing.certificate import Certificate
from lightning_megatron.testing.defaults import LIMIT_SECONDS, ROWS, STEPS
from lightning_megatron.testing.layout_name import DEFAULT, OF_EXPERTS, Layout, layouts_of, refused_before
from lightning_megatron.testing.outcome import TOLERANCE, LayoutResult, firsts_of, summarised
from lightning_megatron.testing.processes import Ended, Task, free_port, run_processes
from lightning_megatron.testing.quantities import NUMBERS, Deviation
from lightning_megatron.testing.run import Facts, Place, Plan, RankReport, run_one_device, run_rank
from lightning_megatron.testing.subject import FromFunctions, MakeSubject, maker_fault
from lightning_megatron.testing.tiny import TinyTwin

Progress = Callable[[str], None]


class CertifyError(ValueError):
    """What was given cannot be certified; the message says why."""


class NotTrainedError(CertifyError):
    """The module does not train on one device; the message says why, and need not name the module."""


_DAY_SECONDS = 24 * 60 * 60


def certify(
    make_module: Callable[[], pl.LightningModule],
    make_batches: Callable[[], pl.LightningDataModule | Iterable[Any]] | None = None,
    *,
    layouts: Sequence[str] = "all",
    steps: int = STEPS,
    rows: int = ROWS,
    trainer: Mapping[str, Any] | None = None,
    tiny: bool = False,
    limit_seconds: float = LIMIT_SECONDS,
) -> Certificate:
    """The certificate of a module: what it does under each layout, beside what it does on one device.

    `make_module` and `make_batches` stand at the top level of a file, because other processes import and call them;
    `make_batches` makes a data module, a loader or a list of batches, and without it the module's own
    `train_dataloader` is used. `layouts` are names such as "tp2" or "dp2pp2"; "all" are those of 1, 2 and 4 ranks.
    `trainer` are further options of the Trainer that change the numbers, such as `gradient_clip_val`. `tiny` trains the
    small twin of a model that is built in `configure_model` from a configuration of the module's. A layout that is
    not done after `limit_seconds` has failed. Raises CertifyError where the module does not train on one device.
    """
    makers = {"make_module": make_module} | ({} if make_batches is None else {"make_batches": make_batches})
    if faults := [fault for name, make in makers.items() if (fault := maker_fault(make, name))]:
        raise CertifyError("\n".join(faults))
    make: MakeSubject = FromFunctions(make_module=make_module, make_batches=make_batches, trainer=dict(trainer or {}))
    if tiny:
        make = TinyTwin(make=make)
    found_in = list(makers.values())
    return certified(make, layouts=layouts, steps=steps, rows=rows, limit_seconds=limit_seconds, found_in=found_in)


def certified(
    make: MakeSubject,
    *,
    layouts: Sequence[str] = "all",
    steps: int = STEPS,
    rows: int = ROWS,
    limit_seconds: float = LIMIT_SECONDS,
    found_in: Sequence[Callable[..., Any]] = (),
    progress: Progress = lambda line: None,
) -> Certificate:
    """As `certify`, for whatever makes a subject."""
    asked = _asked(layouts, steps=steps, rows=rows, limit_seconds=limit_seconds)
    with tempfile.TemporaryDirectory(prefix="certify-") as folder:
        plan = Plan(make=make, steps=steps, rows=rows, folder=Path(folder))
        progress("one device")
        facts = _facts(plan, limit_seconds, found_in)
        if layouts == "all" and facts.has_experts:
            asked += layouts_of(OF_EXPERTS)
        results: list[LayoutResult] = []
        for layout in asked:
            refused = [result.layout for result in results if result.verdict == "refused"] if layouts == "all" else []
            if (known := refused_before(layout, refused)) is not None:
                results.append(LayoutResult(layout=layout, verdict="not run", message=f"{known.name} is refused"))
                continue
            progress(layout.name)
            tasks = _tasks(plan, layout, facts.precision, found_in)
            by_rows = [one for one in results if not one.layout.axes and one.verdict in ("equal", "differs")]
            results.append(
                _result(layout, facts, run_processes(tasks, limit_seconds=limit_seconds, is_right=_is_right), by_rows)
            )
    return Certificate(facts=facts, steps=steps, rows=rows, results=tuple(results))


def _asked(names: Sequence[str], *, steps: int, rows: int, limit_seconds: float) -> list[Layout]:
    faults = []
    try:
        layouts = layouts_of(DEFAULT if names == "all" else names)
    except ValueError as error:
        layouts, faults = [], str(error).splitlines()
    if steps < 1:
        faults.append(f"steps ({steps}) must be at least 1")
    if not 1 <= limit_seconds <= _DAY_SECONDS:
        faults.append(f"limit_seconds ({limit_seconds}) must be from 1 to {_DAY_SECONDS} (a day)")
    parts = sorted({layout.num_parts for layout in layouts})
    unit = math.lcm(*parts)
    if rows < 1 or rows % unit:
        fits = " or ".join(str(fit) for fit in (rows // unit * unit, max(-(-rows // unit), 1) * unit) if fit > 0)
        faults.append(
            f"rows ({rows}) must be a multiple of the parts into which layouts divide them ({parts}); use {fits}"
        )
    if faults:
        raise CertifyError("\n".join(faults))
    return layouts


def _facts(plan: Plan, limit_seconds: float, found_in: Sequence[Callable[..., Any]]) -> Facts:
    try:
        task = Task.of(partial(run_one_device, plan), found_in)
    except ValueError as error:
        raise CertifyError(str(error)) from error
    [ended] = run_processes([task], limit_seconds=limit_seconds)
    if ended.failure:
        raise NotTrainedError(ended.failure)
    assert isinstance(ended.result, Facts)
    return ended.result


def _tasks(plan: Plan, layout: Layout, precision: str, found_in: Sequence[Callable[..., Any]]) -> list[Task]:
    port = free_port()
    places = [Place(rank=rank, world=layout.world, port=port) for rank in range(layout.world)]
    return [Task.of(partial(run_rank, plan, layout, precision, place), found_in) for place in places]


def _is_right(report: RankReport) -> bool:
    return not report.error


def _result(layout: Layout, facts: Facts, ended: Sequence[Ended], by_rows: Sequence[LayoutResult]) -> LayoutResult:
    """A row of the certificate, given those of layouts that divide nothing but the rows of a batch."""
    reports = [one.result for one in ended if isinstance(one.result, RankReport)]
    warnings = tuple(dict.fromkeys(text for report in reports for text in report.warnings))
    errors = sorted((report for report in reports if report.error), key=lambda report: report.ended_seconds)
    deviations = [one for report in reports for one in report.deviations]
    is_refused = bool(errors) and errors[0].is_refused
    if is_refused:
        refusal = errors[0].error
        if not summarised(deviations, TOLERANCE[facts.precision])[1]:
            return LayoutResult(layout=layout, verdict="refused", message=refusal, warnings=warnings)
        # Steps before it went wrong already.
        warnings = (*warnings, f"a later step was refused: {refusal}")
        errors = []
    lost = [f"rank {rank}: {one.failure}\n{one.printed}".rstrip() for rank, one in enumerate(ended) if one.failure]
    if errors or lost:
        message = f"rank {errors[0].rank}: {errors[0].error}" if errors else lost[0]
        return LayoutResult(layout=layout, verdict="failed", message=message, warnings=warnings)
    tolerance = TOLERANCE[facts.precision]
    deviations += [] if is_refused else _unheld(facts, reports)
    largest, first = summarised(deviations, tolerance)
    differences = tuple(
        explained(
            one,
            layout,
            facts,
            deviations,
            tolerance,
            is_right_by_rows=any(one.quantity not in result.first for result in by_rows),
        )
        for one in firsts_of(first)
    )
    return LayoutResult(
        layout=layout,
        verdict="differs" if first else "equal",
        largest=largest,
        first=first,
        differences=differences,
        warnings=warnings,
    )


def _unheld(facts: Facts, reports: Sequence[RankReport]) -> list[Deviation]:
    """What one device has and no rank: of numbers every rank has all, of tensors some rank has each."""
    seen = [{(one.quantity, one.step, one.name) for one in report.deviations} for report in reports]
    anywhere = set().union(*seen)
    missing = []
    for quantity, step, name in facts.held:
        ranks = [rank for rank, own in enumerate(seen) if (quantity, step, name) not in own]
        if quantity in NUMBERS and ranks:
            missing.append(_missing(quantity, step, name, ranks[0]))
        elif (quantity, step, name) not in anywhere:
            missing.append(_missing(quantity, step, name, 0))
    return missing


def _missing(quantity: str, step: int, name: str, rank: int) -> Deviation:
    return Deviation(
        quantity=quantity, step=step, name=name, rank=rank, relative=math.inf, ours=math.nan, theirs=math.nan
    )
