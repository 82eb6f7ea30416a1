"""The fit of the planner's constants: which rows it learns from, and that it finds what made them."""

import json
from dataclasses import fields, replace

from benchmarks.fit_planner import PATH, errors, fit, is_learned_from, ratios, table, timed_rows
from benchmarks.published import later_rows, rows
from lightning_megatron.planner.constants import GIVEN, Constants, fitted
from lightning_megatron.planner.step_time import step_time


def test_a_row_is_in_one_half_whatever_the_order_of_its_fields() -> None:
    for row in rows()[:50]:
        assert is_learned_from(row) == is_learned_from(dict(reversed(row.items())))
    number = sum(row.is_learned_from for row in timed_rows())
    assert 0.4 < number / len(timed_rows()) < 0.6


def test_a_fit_finds_the_constants_that_made_the_times() -> None:
    hidden = replace(Constants(), ampere_share=0.7, step_seconds=0.1)
    some = [row for row in timed_rows() if row.planned.gpu.family == "ampere"][::15]
    made = [replace(row, seconds=step_time(row.planned.run, row.planned.gpu, hidden).total) for row in some]
    found = fit(made, num_sweeps=3)
    before = table(made, errors(made, Constants()))[-1]
    after = table(made, errors(made, found))[-1]
    assert after[3] < before[3] / 3 and abs(found.ampere_share / 0.7 - 1) < 0.05
    assert all(getattr(found, name) == getattr(Constants(), name) for name in GIVEN)


def test_the_file_has_a_value_for_every_fitted_constant_and_says_what_it_is_of() -> None:
    record = json.loads(PATH.read_text())
    assert set(record["values"]) == {field.name for field in fields(Constants)} - set(GIVEN)
    assert record["rows"].startswith(f"{sum(row.is_learned_from for row in timed_rows())} of {len(timed_rows())} rows")


def test_the_file_has_the_ratios_of_the_rows_that_were_not_fitted() -> None:
    unseen = [row for row in timed_rows() if not row.is_learned_from] + timed_rows(later_rows())
    found = ratios(unseen, fitted())
    assert json.loads(PATH.read_text())["published_over_predicted"] == found
    assert sum(one["num_rows"] for one in found if one["family"] == "all GPUs") == len(unseen)
    # Twice the time is twice the ratio.
    doubled = ratios([replace(row, seconds=2 * row.seconds) for row in unseen], fitted())
    for one, twice in zip(found, doubled, strict=True):
        assert abs(twice["low"] - 2 * one["low"]) < 0.002 and abs(twice["high"] - 2 * one["high"]) < 0.002
