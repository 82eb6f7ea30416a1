"""Counts what a layer of each kind asks of a GPU, prints where the host copies and waits, and writes the page."""

import argparse
from pathlib import Path

from tests.fake_cuda.cases import CASES, cost_of
from tests.fake_cuda.kernels_page import page_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="file of the page; printed where it is left out")
    arguments = parser.parse_args()
    costs = {name: cost_of(case) for name, case in CASES.items()}
    for name, cost in costs.items():
        for what, found in (("copy", cost.copies), ("wait", cost.waits)):
            for where, times in found.items():
                print(f"{name}: {what}, {times} x {where}")
    page = page_of(costs)
    if arguments.write is None:
        print(page)
    else:
        arguments.write.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
