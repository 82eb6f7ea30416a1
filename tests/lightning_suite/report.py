"""The page of docs that says what became of Lightning's tests, by mode and reason."""

import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from tests.lightning_suite.reasons import CONTROL, Reason, reason_of

Result = Mapping[str, Any]

HEAD = """# Lightning's own suite

<!-- Written by `python -m tests.lightning_suite CHECKOUT --write docs/lightning_suite.md`; do not edit by hand. -->

Lightning's tests of its Trainer (`tests/tests_pytorch` of its repository), with `MegatronStrategy` put in where they
would have run without it. The script fetches nothing; CHECKOUT is a checkout of the installed version:

    python -m tests.lightning_suite CHECKOUT [--mode world1|lockstep|ddp] [--only FOLDER] [--again]

Every test runs without injection first. Those that are green, and whose Trainer chose what a mode replaces, run again:
"""

MODES = {
    "world1": "one process: `MegatronStrategy()` wherever the Trainer would choose its own strategy of one CPU",
    "lockstep": "two processes that run the same test at the same time under `tensor_model_parallel_size=2`, each test "
    "with a process group of its own; green is a test that passes on both ranks",
    "ddp": "data-parallel ranks wherever a test asks for DDP on the CPU, started as it would start them",
}

FOOT = """
Checkpoints are those of `CheckpointConfig(kind="file")`. In lockstep both ranks share the test's temporary folder and
begin with the same random state, as ranks of one job do, and the refusal of sizes that cut nothing is off: the tests'
modules have nothing to cut. `SLURM_NODEID` and `SLURM_LOCALID`, which SLURM sets and the tests leave out, count as 0.
A test that takes longer than its time limit has failed.
"""


_CONSEQUENCE = re.compile(
    r"(closed|reset) by peer|Timed out waiting|wait timeout after|DistStoreError|ran out of time|the process ended|"
    "this rank failed after another one"
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of the tests of one mode."""

    mode: str
    names: Sequence[str]
    """Tests that are green without injection and choose what the mode replaces."""
    results: Mapping[str, Result]
    """Results of those of them that have run."""
    control: Mapping[str, Result]
    """Results of the tests that failed in lockstep, under Lightning's DDP."""

    @property
    def num_left(self) -> Counter[str]:
        """Tests that have not run, by folder."""
        return Counter(_short(name).split("::")[0].split("/")[0] for name in self.names if name not in self.results)

    @property
    def num_green(self) -> int:
        """Tests that passed."""
        return sum(is_green(result) for result in self.results.values())

    def failures(self) -> list[tuple[Reason | None, list[str]]]:
        """Names of the tests that failed, by reason, those without a reason last."""
        found: dict[Reason | None, list[str]] = {}
        for name, result in self.results.items():
            if not is_green(result):
                found.setdefault(self._reason_of(name, result), []).append(name)
        return sorted(found.items(), key=lambda item: (item[0] is None, -len(item[1])))

    @property
    def num_without_reason(self) -> int:
        """Failures that no reason covers."""
        return sum(len(names) for reason, names in self.failures() if reason is None)

    def _reason_of(self, name: str, result: Result) -> Reason | None:
        reason = reason_of(self.mode, name, result["message"], result.get("rank", 0))
        other = self.control.get(name)
        if reason is None and other is not None and not is_green(other) and _first_line(other) == _first_line(result):
            return CONTROL
        return reason


def is_green(result: Result) -> bool:
    """Whether the test passed."""
    return bool(result["outcome"] == "passed")


def is_consequence(result: Result) -> bool:
    """Whether a rank failed because another one had left the test."""
    return bool(_CONSEQUENCE.search(result.get("message", "")))


def page(plain: Mapping[str, Result], outcomes: Sequence[Outcome]) -> str:
    """The page, of what ran without injection and of each mode."""
    found = Counter(result["outcome"] for result in plain.values())
    lines = [HEAD, *(f"- `{mode}`: {text}." for mode, text in MODES.items()), FOOT]
    lines.append(
        f"python {platform.python_version()}, "
        + ", ".join(f"{package} {version(package)}" for package in ("lightning", "torch", "torchmetrics", "pytest"))
    )
    lines.append(
        f"\n## Without injection\n\n{len(plain):,} tests: {found['passed']:,} green, {found['skipped']:,} skipped (for "
        f"GPUs, other systems, absent packages), {found['failed']:,} not green and so not counted:\n"
    )
    lines += _listed([f"{_short(name)}: {_first_line(result)}" for name, result in plain.items() if _is_failed(result)])
    lines += [
        "\n## With MegatronStrategy\n",
        "| mode | tests | not run | green | fail for a reason below | fail | right |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for outcome in outcomes:
        total, green, bare = len(outcome.results), outcome.num_green, outcome.num_without_reason
        right = f"{100 * (total - bare) / total:.1f}%" if total else ""
        counts = f"{len(outcome.names):,} | {outcome.num_left.total():,} | {green:,} | {total - green - bare} | {bare}"
        lines.append(f"| {outcome.mode} | {counts} | {right} |")
    for outcome in outcomes:
        if left := outcome.num_left:
            told = ", ".join(f"{folder} ({num})" for folder, num in left.most_common())
            lines.append(f"\nNot run yet in mode {outcome.mode}: {told}.")
    for outcome in outcomes:
        lines.append(f"\n## Failures: {outcome.mode}")
        for reason, names in outcome.failures():
            title = "without a reason" if reason is None else reason.name
            defence = "To be mended." if reason is None else reason.defence
            lines.append(f"\n### {outcome.mode}: {title} ({len(names)})\n\n{defence}\n")
            lines += _listed([f"{_short(name)}{_told(outcome, name, reason)}" for name in names])
    return "\n".join(lines) + "\n"


def _told(outcome: Outcome, name: str, reason: Reason | None) -> str:
    return f": {_first_line(outcome.results[name])}" if reason is None else ""


def _is_failed(result: Result) -> bool:
    return bool(result["outcome"] == "failed")


def _short(name: str) -> str:
    return name.removeprefix("tests_pytorch/")


def _listed(names: list[str]) -> list[str]:
    return ["```text", *names, "```"] if names else []


def _first_line(result: Result) -> str:
    line = next(iter(result["message"].splitlines()), "")
    # Folders and addresses differ from run to run.
    line = re.sub(r"(/[\w.+-]+)+/", ".../", line)
    return re.sub(r"0x[0-9a-f]+", "0x...", line)[:160]
