"""The certificate: every layout computes the numbers of one device in plain torch."""

import pytest

from tests.certificate.cases import (
    BAD_STEP,
    HALF_LAYOUTS,
    HALF_VARIANT,
    LAYOUTS,
    RATE_DECAY,
    TOLERANCE,
    Layout,
    cells_of,
)
from tests.certificate.compare import HALF_QUANTITIES, deviations, half_bound, half_deviations
from tests.certificate.runs import reference


@pytest.mark.parametrize(
    ("layout", "variant", "precision"), [(layout, *cell) for layout in LAYOUTS for cell in cells_of(layout)]
)
def test_a_layout_computes_what_one_device_computes(layout: str, variant: str, precision: str) -> None:
    found = deviations(layout, variant, precision)
    assert max(found.values()) < TOLERANCE[precision], found


@pytest.mark.parametrize("precision", list(HALF_QUANTITIES))
@pytest.mark.parametrize("layout", list(HALF_LAYOUTS))
def test_a_layout_in_16_bits_skips_and_steps_as_one_device_does(layout: str, precision: str) -> None:
    for quantity, deviation in half_deviations(layout, precision).items():
        assert deviation <= half_bound(layout, precision, quantity), quantity


def test_a_step_too_many_or_a_rate_that_does_not_fall_is_far_outside_the_bounds_in_16_bits() -> None:
    layout = Layout(world=1)
    right = reference(HALF_VARIANT, "32-true", layout, decay=RATE_DECAY, left_out=(BAD_STEP,)).weights
    for decay, left_out in ((RATE_DECAY, ()), (1.0, (BAD_STEP,))):
        wrong = reference(HALF_VARIANT, "32-true", layout, decay=decay, left_out=left_out).weights
        largest = max((wrong[name] - weight).abs().max().item() for name, weight in right.items())
        assert largest > 10 * half_bound("16 bits, dp2", "16-mixed", "float32")
