"""The planner's prediction for this machine follows what was measured of it."""

import pytest

from benchmarks.plan_on_cpu import NAMES, measure_rank, predicted, table

RATES = {
    "products": 8e10,
    "tensor_products": 6e10,
    "attention": 3e10,
    "memory": 3e9,
    "message_seconds": 5e-4,
    "link": 1e9,
    "sequence_link": 5e8,
}
OF_OTHER_MODES = {
    "dp2": {"tensor_products", "sequence_link"},
    "tp2": {"products", "sequence_link"},
    "tp2+sp": {"products", "link"},
}


@pytest.mark.parametrize("mode", NAMES)
def test_twice_the_rates_take_half_the_time(mode: str) -> None:
    faster = {name: value / 2 if name.endswith("seconds") else 2 * value for name, value in RATES.items()}
    assert predicted(mode, faster) == pytest.approx(predicted(mode, RATES) / 2)


@pytest.mark.parametrize("mode", OF_OTHER_MODES)
def test_every_rate_of_a_mode_counts_and_no_other(mode: str) -> None:
    whole = predicted(mode, RATES)
    for name, value in RATES.items():
        better = value / 10 if name.endswith("seconds") else 10 * value
        assert (predicted(mode, RATES | {name: better}) < whole) == (name not in OF_OTHER_MODES[mode]), name


def test_rates_are_measured_and_shown_with_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    rates = measure_rank()
    assert rates.keys() == {"products", "attention", "memory"} and min(rates.values()) > 1e6
    shown = predicted("one", rates)
    assert f"| one | {shown:.3f} | {2 * shown:.3f} | 0.50 |" in table([{"one": (shown, 2 * shown)}])
