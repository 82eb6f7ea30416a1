"""Fits the constants of the planner's time model on one half of the published runs and prints its errors on the other.

    python -m benchmarks.fit_planner             fit, and write lightning_megatron/planner/constants.json
    python -m benchmarks.fit_planner --check     the errors of the constants that are there
    python -m benchmarks.fit_planner --ratios    no fit: writes stated over predicted times into that file

A hash of a row's text decides its half. The fit is a pattern search over the logarithms of the constants: one
at a time up and down by a step that shrinks. It is deterministic, and needs neither a GPU nor anything beyond Python.
"""

import argparse
import hashlib
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.published import Planned, Row, has_bridge_experts, later_rows, rows, run_of, step_seconds, why_untimed
from lightning_megatron.planner.constants import GIVEN, Constants, fitted
from lightning_megatron.planner.step_time import step_time
from lightning_megatron.planner.time_range import ALL_FAMILIES

PATH = Path(__file__).resolve().parents[1] / "lightning_megatron" / "planner" / "constants.json"
_HUBER = 0.08
# The loss of a row grows only up to such an error of the logarithm.
_PRIOR = 2e-4
# Weight that holds a constant to its start: one that no row determines stays there.

BOUNDS = {
    # NCCL's rings reach 366 GB/s of 450 on H200 and 682 of 900 on B200 (stas00/ml-engineering, network).
    "link_share": (0.05, 0.81),
    "edge": (1.0, 1000.0),
    "grouped_edge": (1.0, 3000.0),
    "traffic": (1.0, 4.0),
    "unfused_traffic": (1.0, 6.0),
    "cast_traffic": (0.3, 4.0),
    "layer_seconds": (2e-5, 2e-3),
    "link_seconds": (1e-6, 5e-5),
    "network_seconds": (3e-6, 2e-4),
    "hop_seconds": (5e-6, 5e-4),
    "routing_seconds": (1e-5, 2e-3),
    "expert_seconds": (1e-6, 1e-3),
    "step_seconds": (1e-3, 0.3),
    "straggling": (1e-4, 0.02),
}
# Shares lie in these: no step reaches a ceiling.
_SHARES = (0.05, 0.97)


@dataclass(frozen=True)
class Timed:
    """A row that states its step time and everything that the time depends on."""

    number: int
    planned: Planned
    seconds: float
    group: tuple[str, str]
    # GPU and precision
    source: str
    is_learned_from: bool


def timed_rows(published: Sequence[Row] = rows()) -> list[Timed]:
    """The rows that can be timed, in order."""
    found = []
    for number, row in enumerate(published):
        seconds = step_seconds(row)
        if seconds is None or why_untimed(row):
            continue
        planned = run_of(row)
        if isinstance(planned, str):
            continue
        precision = "FP8" if planned.run.fp8 is not None else "16 bits"
        found.append(
            Timed(
                number=number,
                planned=planned,
                seconds=seconds,
                group=(planned.gpu.name, precision),
                source=family_of(str(row["source"])),
                is_learned_from=is_learned_from(row),
            )
        )
    return found


def family_of(source: str) -> str:
    """The publication of a source, without its lines."""
    return source.partition("(")[0].partition(" Table")[0].partition("README")[0].strip()[:40]


def is_learned_from(row: Any) -> bool:
    """Whether a row is in the half that constants are fitted on: with experts in Megatron-Bridge all of the releases
    before the held-out later one."""
    if has_bridge_experts(row):
        return True
    text = json.dumps(row, sort_keys=True)
    return hashlib.sha256(text.encode()).digest()[0] % 2 == 0


def errors(timed: Sequence[Timed], constants: Constants) -> list[float]:
    """Errors of the rows: the logarithm of the predicted over the stated step time."""
    return [math.log(step_time(row.planned.run, row.planned.gpu, constants).total / row.seconds) for row in timed]


def fit(timed: Sequence[Timed], *, num_sweeps: int = 14) -> Constants:
    """The constants with the least loss on these rows."""
    sizes: dict[str, int] = defaultdict(int)
    for row in timed:
        sizes[f"{row.group} {row.source}"] += 1
    # A publication of many rows pulls more than one of few, and not as many times more.
    weights = [1 / math.sqrt(sizes[f"{row.group} {row.source}"]) for row in timed]
    start = Constants()
    names = [field.name for field in fields(Constants) if field.name not in GIVEN]

    def loss(constants: Constants) -> float:
        total = sum(
            weight * (math.sqrt(_HUBER**2 + error**2) - _HUBER)
            for weight, error in zip(weights, errors(timed, constants), strict=True)
        )
        held = sum(math.log(getattr(constants, name) / getattr(start, name)) ** 2 for name in names)
        return total / sum(weights) + _PRIOR * held

    best, least = start, loss(start)
    steps = dict.fromkeys(names, 0.2)
    for sweep in range(num_sweeps):
        if sweep == num_sweeps // 2:
            # Constants that others compensated for may move once more.
            steps = dict.fromkeys(names, 0.2)
        for name in names:
            low, high = BOUNDS.get(name, _SHARES)
            for factor in (math.exp(steps[name]), math.exp(-steps[name])):
                value = min(max(getattr(best, name) * factor, low), high)
                tried = replace(best, **{name: value})
                if value != getattr(best, name) and (found := loss(tried)) < least:
                    best, least = tried, found
                    steps[name] *= 1.3
                    break
            else:
                steps[name] *= 0.5
        print(f"sweep {sweep + 1}: loss {least:.5f}", flush=True)
    return best


def table(timed: Sequence[Timed], found: Sequence[float]) -> list[tuple[str, str, int, float, float]]:
    """GPU, precision, rows, median and 90th percentile of the relative error; the last line is all of them."""
    by_group: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row, error in zip(timed, found, strict=True):
        relative = abs(math.expm1(error))
        by_group[row.group].append(relative)
        by_group["all", "all"].append(relative)
    ends = sorted(group for group in by_group if group != ("all", "all"))
    return [(*group, len(by_group[group]), *_quantiles(by_group[group])) for group in [*ends, ("all", "all")]]


def _quantiles(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(math.ceil(0.9 * len(ordered)) - 1, len(ordered) - 1)]


def ratios(timed: Sequence[Timed], constants: Constants) -> list[dict[str, Any]]:
    """Stated over predicted step times: their 10th and 90th percentile by family, precision and experts, and of all."""
    groups: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    for row, error in zip(timed, errors(timed, constants), strict=True):
        has_experts = row.planned.run.model.moe is not None
        for family, precision in ((row.planned.gpu.family, row.group[1]), (ALL_FAMILIES, "any")):
            groups[family, precision, has_experts].append(math.exp(-error))
    return [
        {
            "family": family,
            "precision": precision,
            "has_experts": has_experts,
            "num_rows": len(found),
            "low": round(statistics.quantiles(found, n=10, method="inclusive")[0], 3),
            "high": round(statistics.quantiles(found, n=10, method="inclusive")[-1], 3),
        }
        for (family, precision, has_experts), found in sorted(groups.items(), key=lambda item: item[0][::-1])
        if len(found) > 1
    ]


def show(title: str, timed: Sequence[Timed], constants: Constants) -> None:
    """Prints the table of errors."""
    print(f"\n{title}\n\n| GPU | precision | rows | median | 90th percentile |\n|---|---|---|---|---|")
    for gpu, precision, number, median, high in table(timed, errors(timed, constants)):
        print(f"| {gpu} | {precision} | {number} | {median:.1%} | {high:.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fit nothing, and print the errors")
    parser.add_argument("--ratios", action="store_true", help="fit nothing, and write the ratios into the file")
    parser.add_argument("--by-source", action="store_true", help="fit without each publication in turn")
    options = parser.parse_args()
    timed = timed_rows()
    learned, held_out = [row for row in timed if row.is_learned_from], [row for row in timed if not row.is_learned_from]
    later = timed_rows(later_rows())
    if not (options.check or options.ratios):
        constants = fit(learned)
        record = {
            "what": "constants of the time model, fitted by benchmarks/fit_planner.py",
            "rows": f"{len(learned)} of {len(timed)} rows of tests/planner/published_runs.json that state a step time",
            "values": {n: float(f"{value:.6g}") for n, value in asdict(constants).items() if n not in GIVEN},
        }
        PATH.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        fitted.cache_clear()
    constants = fitted()
    if not options.check:
        record = json.loads(PATH.read_text(encoding="utf-8"))
        record["published_over_predicted"] = ratios([*held_out, *later], constants)
        PATH.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    show("Rows that were learned from", learned, constants)
    show("Rows that were held out", held_out, constants)
    show("A later release, dense models", [row for row in later if row.planned.run.model.moe is None], constants)
    show("A later release, experts", [row for row in later if row.planned.run.model.moe is not None], constants)
    if options.by_source:
        publications = {row.number: row.source.partition(" ")[0] for row in timed}
        for publication in sorted(set(publications.values())):
            others = [row for row in learned if publications[row.number] != publication]
            own = [row for row in timed if publications[row.number] == publication]
            show(f"Fitted without {publication}", own, fit(others, num_sweeps=8))


if __name__ == "__main__":
    main()
