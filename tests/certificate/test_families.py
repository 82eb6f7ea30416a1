"""Families of transformers compute on layouts what they compute on one device."""

import pytest

from tests.certificate.families import FAMILIES, fault_of, layouts_of, results_of
from tests.harness.sample import every_nth

CELLS = [(family, layout) for family in FAMILIES for layout in layouts_of(family)]


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "layout"), every_nth(CELLS, 14))
def test_a_family_trains_as_on_one_device(family: str, layout: str) -> None:
    [result] = results_of(family, (layout,))
    assert fault_of(result) == ""


def test_each_family_is_on_ten_layouts() -> None:
    assert all(len(layouts_of(family)) >= 10 for family in FAMILIES)
