"""Ordinary modules under every kind of layout do what they do on one device: Lightning's own strategy is the judge."""

import functools
from typing import Any

import pytest
import torch

from tests.harness.ranks import run_on_ranks
from tests.harness.sample import diagonal
from tests.trainer import modules
from tests.trainer.fits import Case, Trace, difference
from tests.trainer.layouts import PLAIN, Layout, make_trainer

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
    "manual optimization": Case(module=modules.Manual, is_automatic=False),
    "two dependent calls": Case(module=modules.CalledTwice, is_one_call=False),
    "all kinds of logging": Case(module=modules.Measured),
    "limited batches": Case(module=modules.Small, trainer={"limit_train_batches": 2, "limit_val_batches": 1}),
    "one batch for a try": Case(module=modules.Small, trainer={"fast_dev_run": True}),
    "a sanity check": Case(module=modules.Measured, trainer={"num_sanity_val_steps": 2, "max_epochs": 1}),
}


# Layouts that combine others run what is most likely to go wrong in combination.
COMBINED = ("pp4", "dp2 m2")
TELLING = (
    "an embedding used on both sides",
    "losses over nothing",
    "accumulation and clipping",
    "frozen and unused weights",
    "all kinds of logging",
)


def cases_of(layout: str) -> list[str]:
    """What runs under a layout.

    A schedule of several stages takes one call a step; where manual steps have no stages, nothing cuts their batches.
    """
    chosen = {**LAYOUTS, "plain": PLAIN}[layout]
    can_call_twice = chosen.pp == 1 or chosen.collective
    can_be_manual = chosen.pp > 1 or chosen.microbatches == 1
    own = TELLING if layout in COMBINED else tuple(CASES)
    cases = [case for case in own if CASES[case].is_one_call or can_call_twice]
    return [case for case in cases if CASES[case].is_automatic or can_be_manual]


def run_all(layout: Layout, cases: list[str]) -> dict[str, Trace]:
    return {case: CASES[case].run(layout) for case in cases}


CELLS = diagonal([(layout, case) for layout in LAYOUTS for case in cases_of(layout)])


@functools.cache
def _traces(layout: str) -> list[dict[str, Trace]] | Exception:
    chosen = PLAIN if layout == "plain" else LAYOUTS[layout]
    cases = cases_of(layout) if layout == "plain" else [case for name, case in CELLS if name == layout]
    try:
        return run_on_ranks(chosen.world, run_all, chosen, cases, init=False, timeout=120)
    except Exception as error:
        # Kept, so that the other cases of the layout fail at once instead of running into it again.
        return error


def traces(layout: str) -> list[dict[str, Trace]]:
    """[rank][case]: all cases by the same processes, one Trainer after the other."""
    ran = _traces(layout)
    if isinstance(ran, Exception):
        raise ran
    return ran


@pytest.mark.matrix
@pytest.mark.parametrize(("layout", "case"), CELLS)
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


class Asks(modules.Small):
    """Asks the strategy for what Lightning and its callbacks ask for."""

    def on_train_start(self) -> None:
        strategy, rank = self.trainer.strategy, self.trainer.global_rank
        own, decide = torch.tensor([float(rank), 1.0]), strategy.reduce_boolean_decision
        self.heard = {
            "sum": strategy.reduce(own, reduce_op="sum").tolist(),
            "mean": strategy.reduce(torch.tensor(rank)).item(),
            "plain": strategy.reduce("a text"),
            "gathered": self.all_gather(own).tolist(),
            "broadcast": strategy.broadcast({"from": rank}, src=2),
            "any": [decide(rank == 3, all=False), decide(rank == 3)],
            "all": [decide(True), decide(False, all=False)],
            "untouched": own.tolist(),
        }


def answers(layout: Layout) -> dict[str, Any]:
    module = Asks()
    make_trainer(layout, max_epochs=1, limit_train_batches=1, limit_val_batches=0).fit(module, modules.Data())
    return module.heard


def test_collectives_are_over_dp_ranks_and_decisions_over_all_ranks() -> None:
    for rank, heard in enumerate(run_on_ranks(4, answers, LAYOUTS["pp2 dp2"], init=False)):
        # Replicas 0 and 1 of a stage are neighbours: ranks 0 and 1, 2 and 3.
        pair = [[0.0, 1.0], [1.0, 1.0]] if rank < 2 else [[2.0, 1.0], [3.0, 1.0]]
        assert heard["sum"] == [pair[0][0] + pair[1][0], 2.0]
        assert heard["mean"] == (pair[0][0] + pair[1][0]) / 2
        assert heard["gathered"] == pair and heard["untouched"] == [float(rank), 1.0]
        assert heard["plain"] == "a text" and heard["broadcast"] == {"from": 2}
        assert heard["any"] == [True, False] and heard["all"] == [True, False]
