"""The certificate: every layout computes the numbers of one device in plain torch."""

import pytest
import torch

from tests.certificate.cases import (
    BAD_STEP,
    BATCH,
    EXPERTS,
    HALF_VARIANT,
    LAYOUTS,
    RATE_DECAY,
    SEQUENCE,
    SHUNNED,
    TOLERANCE,
    Layout,
    sampled_cells,
    sampled_half_layouts,
)
from tests.certificate.compare import HALF_QUANTITIES, deviations, half_bound, half_deviations, outcomes
from tests.certificate.runs import reference

CELLS = sampled_cells()


def num_sampled_steps(layout: str) -> int:
    """Two for every third layout, and else one: a second step shows what the first one left; the third of
    `make certificate` has a batch without any image. One under dynamic context parallelism, whose steps have many
    microbatches."""
    return 1 if LAYOUTS[layout].dynamic is not None else 1 + (list(CELLS).index(layout) % 3 == 1)


@pytest.mark.parametrize("layout", list(CELLS))
def test_a_layout_computes_what_one_device_computes(layout: str) -> None:
    cells, num_steps = CELLS[layout], num_sampled_steps(layout)
    ran = zip(cells, outcomes(layout, cells, num_steps), strict=True)
    found = {cell: deviations(layout, cell, ranks, num_steps) for cell, ranks in ran}
    wrong = {cell: of_cell for cell, of_cell in found.items() if not max(of_cell.values()) < TOLERANCE[cell[1]]}
    assert not wrong, wrong


@pytest.mark.parametrize("layout", sampled_half_layouts())
def test_a_layout_in_16_bits_skips_and_steps_as_one_device_does(layout: str) -> None:
    for precision in HALF_QUANTITIES:
        for quantity, deviation in half_deviations(layout, precision).items():
            assert deviation <= half_bound(layout, precision, quantity), (precision, quantity)


def test_a_step_too_many_or_a_rate_that_does_not_fall_is_far_outside_the_bounds_in_16_bits() -> None:
    layout = Layout(world=1)
    right = reference(HALF_VARIANT, "32-true", layout, decay=RATE_DECAY, left_out=(BAD_STEP,)).weights
    for decay, left_out in ((RATE_DECAY, ()), (1.0, (BAD_STEP,))):
        wrong = reference(HALF_VARIANT, "32-true", layout, decay=decay, left_out=left_out).weights
        largest = max((wrong[name] - weight).abs().max().item() for name, weight in right.items())
        assert largest > 10 * half_bound("16 bits, dp2", "16-mixed", "float32")


def test_in_the_models_with_experts_all_happens_that_could_go_wrong() -> None:
    steps = {variant: reference(variant, "64-true", Layout(world=1)).steps for variant in EXPERTS}
    for step in steps["moe"]:
        for layer in range(0, 4, 2):
            chosen = step.routing[f"layers.{layer} chosen"]
            assert not chosen[list(SHUNNED["moe"])].any() and chosen.sum() == 2 * BATCH * SEQUENCE
            assert not step.gradients[f"layers.{layer}.moe.experts.up"][list(SHUNNED["moe"])].any()
    for variant, layers in (("moe top-1", (1, 2, 3)), ("moe packed", (0, 3))):
        for step in steps[variant]:
            for layer in layers:
                kept, chosen = (step.routing[f"layers.{layer} {name}"].sum() for name in ("kept", "chosen"))
                assert 0.2 * chosen < kept < 0.95 * chosen
    # The bias changes choices, and so do groups.
    last = steps["moe packed"][-1].routing
    assert not torch.equal(last["layers.0 chosen"], last["layers.0 global_tokens_per_expert"])
    assert last["layers.0 expert_bias"].unique().numel() > 1
