"""Counts what a layer of each kind asks of a GPU, prints where the host copies and waits, and writes the page."""

import argparse
from pathlib import Path

from tests.fake_cuda.cases import CASES, cost_of
from tests.fake_cuda.compiled import COMPILED, compiled_cost
from tests.fake_cuda.kernels_page import page_of
from tests.harness.ranks import run_on_ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="file of the page; printed where it is left out")
    arguments = parser.parse_args()
    # Each in a process of its own: fake devices change a process for good.
    compiled = {name: run_on_ranks(1, compiled_cost, name, init=False, timeout=900)[0] for name in COMPILED}
    costs = {name: cost_of(case) for name, case in CASES.items()}
    for name, cost in costs.items():
        for what, found in (("copy", cost.copies), ("wait", cost.waits)):
            for where, times in found.items():
                print(f"{name}: {what}, {times} x {where}")
    page = page_of(costs, compiled)
    if arguments.write is None:
        print(page)
    else:
        arguments.write.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
