"""What sums in another order explain is no deviation, and what they do not is told."""

import pytest
import torch

from lightning_megatron.any_module.deviation import relative_deviation


@pytest.mark.parametrize(
    ("off", "told"), [(1e-9, ""), (0.1, "off by 1e-01 of the largest"), (float("nan"), "no numbers (NaN or Inf)")]
)
def test_deviations_that_sums_explain_are_none(off: float, told: str) -> None:
    wanted = torch.ones(3, dtype=torch.float64)
    assert relative_deviation(wanted + off, wanted) == told
    assert relative_deviation(wanted[:0], wanted[:0]) == ""


def test_numbers_under_autocast_are_as_exact_as_its_dtype() -> None:
    wanted = torch.ones(3)
    assert relative_deviation(wanted + 0.01, wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_deviation(wanted + 0.01, wanted) == ""
