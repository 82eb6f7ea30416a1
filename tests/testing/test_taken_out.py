"""certify says of each mend that it is missing: modules of users that are right, or refused, and are not without it."""

from collections.abc import Callable
from typing import Any

import pytest

from lightning_megatron.testing import certify
from tests.harness.sample import every_nth
from tests.testing import modules, taken_out

# A module, what takes its mend out, a layout, what certify says with it, and without it: a verdict, and words.
ROWS: list[tuple[Callable[[], Any], Callable[[], Any], str, str, str, str]] = [
    (taken_out.SaysSum, taken_out.sums, "m2", "equal", "differs", "the loss is a sum over rows"),
    (modules.SaysItsWeight, taken_out.said_weights, "m2", "equal", "differs", "a mean of means"),
    (taken_out.IgnoresSome, taken_out.counted_targets, "dp2", "equal", "differs", "a mean of means"),
    (
        taken_out.StepsByItself,
        taken_out.steps_past_an_empty_closure,
        "dp2",
        "equal",
        "differs",
        "gradient net.0.weight of step 1, on rank 0: only one of them has it",
    ),
    (modules.ClipsByItself, taken_out.compared_hooks, "pp2", "differs", "differs", "something that a rank has a part"),
    (
        modules.Penalty,
        taken_out.refused_penalties,
        "pp2",
        "refused",
        "differs",
        "the loss has a term over self.parameters()",
    ),
    (
        modules.Penalty,
        taken_out.compared_losses,
        "pp2-collective",
        "refused",
        "differs",
        "ranks return different losses",
    ),
    (
        taken_out.LogsModelNorm,
        taken_out.norms_of_all_ranks,
        "pp2",
        "equal",
        "differs",
        "is read off gradients or weights, of which a rank has only a part",
    ),
    (
        taken_out.ReadsGradients,
        taken_out.shown_gradients,
        "dp2-zero",
        "equal",
        "differs",
        "first  logged squares of step 1, on rank 0: 0 for 0.5",
    ),
    (modules.Drifts, taken_out.checked_replicas, "dp2", "failed", "differs", "ranks drift apart"),
    (taken_out.ReturnsMore, taken_out.further_outputs, "pp2", "equal", "failed", "KeyError: 'accuracy'"),
    (taken_out.TiedOutside, taken_out.refused_ties, "pp2", "refused", "failed", "rank "),
    (
        taken_out.GradientByInput,
        taken_out.refused_gradients_by_input,
        "pp2",
        "refused",
        "failed",
        "appears to not have been used in the graph",
    ),
    (taken_out.LogsSum, taken_out.logged_sums, "m2", "equal", "differs", "'rows' is a sum or a count"),
]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("module", "without", "layout", "verdict", "verdict_without", "words"),
    every_nth(ROWS, 4),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_certify_finds_a_mend_that_was_taken_out(
    module: Callable[[], Any],
    without: Callable[[], Any],
    layout: str,
    verdict: str,
    verdict_without: str,
    words: str,
) -> None:
    [result] = certify(module, modules.rows, layouts=[layout], steps=2).results
    assert result.verdict == verdict, result.message
    found = certify(without, modules.rows, layouts=[layout], steps=2)
    assert [result.verdict for result in found.results] == [verdict_without], found.text
    assert words in found.text, found.text
    assert not found
