"""The roofline counts what the formulas say, measures every part, and its table adds up."""

from typing import Any

import pytest
import torch

from benchmarks import roofline
from benchmarks.roofline import PARTS, measure, table
from benchmarks.shapes import SHAPES
from tests.harness.ranks import run_on_ranks

SMOKE, LAYERS, SEQUENCE = "smoke", 2, 32


def measured() -> dict[str, Any]:
    return measure(SMOKE, LAYERS, SEQUENCE, torch.device("cpu"))


def test_products_are_those_of_the_shape_and_every_part_takes_time() -> None:
    [found] = run_on_ranks(1, measured, init=False)
    shape = SHAPES[SMOKE]
    of_products = [2 * m * n * k for m, n, k in shape.products(shape.microbatch_tokens)]
    # Those of the head come last.
    assert found["flops"]["products"] == LAYERS * sum(of_products[:-3]) + sum(of_products[-3:])
    assert found["flops"]["attention"] > 0 and found["bytes"] > 0
    assert set(found["part_seconds"]) == set(PARTS) and min(found["part_seconds"].values()) > 0
    assert min(found["flops_per_second"], found["bytes_per_second"], found["seconds"]) > 0


def test_the_table_shows_bounds_and_what_no_kernel_took() -> None:
    found = {
        "size": "8b",
        "layers": 4,
        "sequence": 4096,
        "is_compiled": False,
        "seconds": 0.1,
        "part_seconds": {"products": 0.06, "attention": 0.01, "other kernels": 0.02},
        "flops": {"products": 4e13, "attention": 8e12},
        "bytes": 3e10,
        "flops_per_second": 8e14,
        "bytes_per_second": 3e12,
    }
    rows = table(found)[-4:]
    assert rows == [
        "| products | 40.000 TFLOP | 50.00 | 60.00 | 60.0% |",
        "| attention | 8.000 TFLOP | 10.00 | 10.00 | 10.0% |",
        "| other kernels | 30.00 GB | 10.00 | 20.00 | 20.0% |",
        "| no kernel | | | 10.00 | 10.0% |",
    ]


@pytest.mark.parametrize(
    ("options", "shown"),
    [(["--layers", "0"], "--layers (0)"), (["--device", "cpu", "--size", "70b"], "invalid choice: '70b'")],
)
def test_a_wrong_option_ends_in_words(
    options: list[str], shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["roofline.py", *options])
    with pytest.raises(SystemExit) as ended:
        roofline.main()
    assert ended.value.code == 2 and shown in capsys.readouterr().err
