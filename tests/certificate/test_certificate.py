"""The certificate: every layout computes the numbers of one device in plain torch."""

import pytest

from tests.certificate.cases import LAYOUTS, TOLERANCE, VARIANTS
from tests.certificate.compare import deviations


@pytest.mark.parametrize("precision", list(TOLERANCE))
@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_layout_computes_what_one_device_computes(layout: str, variant: str, precision: str) -> None:
    found = deviations(layout, variant, precision)
    assert max(found.values()) < TOLERANCE[precision], found
