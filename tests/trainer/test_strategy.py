"""Ordinary modules under every kind of layout do what they do on one device: Lightning's own strategy is the judge."""

import functools

import pytest

from tests.harness.ranks import run_on_ranks
from tests.trainer import modules
from tests.trainer.fits import Case, Trace, difference
from tests.trainer.layouts import PLAIN, Layout

# Rounding of float64 sums in another order, through eight steps.
TOLERANCE = 1e-11

LAYOUTS = {
    "one m2": Layout(microbatches=2),
    "pp2": Layout(world=2, pp=2, microbatches=2),
    "pp2 collective": Layout(world=2, pp=2, microbatches=2, collective=True),
    "pp4": Layout(world=4, pp=4, microbatches=4),
    "dp2": Layout(world=2),
    "dp2 m2": Layout(world=2, microbatches=2),
    "tp2": Layout(world=2, tp=2),
    "pp2 dp2": Layout(world=4, pp=2, microbatches=2),
}

CASES = {
    "a chain between plain layers": Case(module=modules.Small),
    "a pipeline module": Case(module=modules.OwnPipeline),
    "an embedding used on both sides": Case(module=modules.Embedded),
    "losses over nothing": Case(module=modules.Weighted),
    "accumulation with a partial last window": Case(
        module=modules.Small, trainer={"accumulate_grad_batches": 2}, num_rows=35
    ),
    "clipping by norm": Case(module=modules.Small, trainer={"gradient_clip_val": 0.05}),
    "clipping by value": Case(
        module=modules.Small, trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    ),
    "accumulation and clipping": Case(
        module=modules.Small, trainer={"gradient_clip_val": 0.05, "accumulate_grad_batches": 3}
    ),
    "schedulers": Case(module=modules.Scheduled),
    "frozen and unused weights": Case(module=modules.Partly),
    "manual optimization": Case(module=modules.Manual),
    "two dependent calls": Case(module=modules.CalledTwice, is_one_call=False),
    "all kinds of logging": Case(module=modules.Measured),
    "limited batches": Case(module=modules.Small, trainer={"limit_train_batches": 2, "limit_val_batches": 1}),
    "one batch for a try": Case(module=modules.Small, trainer={"fast_dev_run": True}),
    "a sanity check": Case(module=modules.Measured, trainer={"num_sanity_val_steps": 2, "max_epochs": 1}),
}


def fits(case: str, layout: Layout) -> bool:
    """Whether the layout can run the case: a schedule of several stages takes one call a step."""
    return CASES[case].is_one_call or layout.pp == 1 or layout.collective


def run_all(layout: Layout) -> dict[str, Trace]:
    return {name: case.run(layout) for name, case in CASES.items() if fits(name, layout)}


@functools.cache
def _traces(layout: str) -> list[dict[str, Trace]] | Exception:
    chosen = PLAIN if layout == "plain" else LAYOUTS[layout]
    try:
        return run_on_ranks(chosen.world, run_all, chosen, init=False, timeout=120)
    except Exception as error:
        # Kept, so that the other cases of the layout fail at once instead of running into it again.
        return error


def traces(layout: str) -> list[dict[str, Trace]]:
    """[rank][case]: all cases by the same processes, one Trainer after the other."""
    ran = _traces(layout)
    if isinstance(ran, Exception):
        raise ran
    return ran


@pytest.mark.parametrize(
    ("layout", "case"), [(name, case) for name, layout in LAYOUTS.items() for case in CASES if fits(case, layout)]
)
def test_a_module_does_what_it_does_on_one_device(layout: str, case: str) -> None:
    [wanted] = [rank[case] for rank in traces("plain")]
    ran = [rank[case] for rank in traces(layout)]
    found = [difference(trace, wanted) for trace in ran]
    assert max(found) < TOLERANCE, found
    held = set().union(*(trace.weights for trace in ran))
    assert held == wanted.weights.keys()
    assert any(abs(first - last) > 1e-3 for first, last in zip(wanted.losses, wanted.losses[1:], strict=False)) or (
        case in ("one batch for a try", "manual optimization")
    ), "a run that changes nothing proves nothing"
