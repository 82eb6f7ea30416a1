"""`python -m tests.lightning_suite CHECKOUT`: Lightning's own tests with MegatronStrategy put in.

CHECKOUT is a checkout of Lightning's repository, of the installed version; nothing is fetched. The tests run without
injection first; then, mode by mode, those that were green and made the Trainer choose a strategy run with ours in its
place. What fails is sorted by `reasons.py`; a failure without a reason is a defect, and the command ends with exit
code 1.

Results are kept in the folder of results: a test that has one is not run again.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.lightning_suite.plugin import GRACE_SECONDS, LOCKSTEP_MODES
from tests.lightning_suite.report import Outcome, is_consequence, is_green, page
from tests.lightning_suite.strategies import NUM_LOCKSTEP_RANKS

ROOT = Path(__file__).resolve().parents[2]
MODES = {"world1": "single_device", "lockstep": "single_device", "ddp": "ddp"}
# What the tests expect of pytest, from their repository's pyproject.toml, which a copy of the tests alone lacks.
PYTEST_INI = """[pytest]
addopts = --strict-markers --disable-pytest-warnings
markers =
    cloud: Run the cloud tests for example
    flaky: Run again where they fail, by a plugin
xfail_strict = true
filterwarnings =
    error::FutureWarning
    ignore::FutureWarning:onnxscript
    ignore:You are using `torch.load` with `weights_only=False`.*:FutureWarning
    ignore::FutureWarning:torch.distributed.algorithms.ddp_comm_hooks
    ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated.*:FutureWarning
"""
_ROUNDS = 40

Results = dict[str, dict[str, Any]]


def main() -> int:
    """Runs what is asked for and prints the tables. Returns 1 where a failure has no reason."""
    parser = argparse.ArgumentParser(prog="python -m tests.lightning_suite", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of Lightning's repository, or of its folder tests")
    parser.add_argument("--mode", choices=[*MODES, "all"], default="all", help="what is put in, and where")
    parser.add_argument("--only", metavar="PATH", default="", help="only this folder or file of tests_pytorch")
    parser.add_argument("--results", type=Path, default=Path("lightning_suite_results"), help="folder of the results")
    parser.add_argument("--limit", type=int, default=30, metavar="SECONDS", help="time limit of a test")
    parser.add_argument("--again", action="store_true", help="run once more what failed")
    parser.add_argument(
        "--report", action="store_true", help="run nothing; print the page of the results that are there"
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the page to this file")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    tests = checkout if (checkout / "tests_pytorch").is_dir() else checkout / "tests"
    if not (tests / "tests_pytorch" / "conftest.py").is_file():
        parser.error(f"{checkout} has no tests/tests_pytorch; give a checkout of Lightning's repository")
    suite = Run(tests, options.results.resolve(), options.limit)
    places = [place for place in suite.places() if place.startswith(options.only)]
    modes = list(MODES) if options.mode == "all" else [options.mode]
    for place in places if not options.report else []:
        suite.run("plain", place, None)
        for mode in modes:
            suite.run(mode, place, suite.to_inject(mode, place), again=options.again)
            if mode == "lockstep":
                failed = [name for name, result in suite.results(mode, place).items() if not is_green(result)]
                suite.run("control", place, failed)
    outcomes = [suite.outcome(mode, places) for mode in modes]
    text = page(suite.all("plain", places), outcomes)
    if options.write:
        options.write.write_text(text)
    else:
        print(text)
    return int(any(outcome.num_without_reason for outcome in outcomes))


class Run:
    """Runs of the tests of one checkout, whose results are kept in a folder."""

    def __init__(self, tests: Path, folder: Path, limit: int) -> None:
        self._tests = tests
        self._folder = folder
        self._limit = limit

    def places(self) -> list[str]:
        """Folders of tests, and files of tests outside of a folder."""
        root = self._tests / "tests_pytorch"
        folders = {path.relative_to(root).parts[0] for path in root.rglob("test_*.py")}
        return sorted(folders)

    def to_inject(self, mode: str, place: str) -> list[str]:
        """Tests that are green without injection and let the Trainer choose what the mode replaces."""
        plain = self.results("plain", place)
        return [name for name, result in plain.items() if is_green(result) and MODES[mode] in result["chosen"]]

    def results(self, mode: str, place: str) -> Results:
        """Result of each test that all ranks have finished: the failure that came first, if there is one."""
        of_ranks = [_read(self._file(mode, place, rank)) for rank in range(_num_ranks(mode))]
        merged: Results = {}
        for name in of_ranks[0]:
            if all(name in results for results in of_ranks):
                found = [{**results[name], "rank": rank} for rank, results in enumerate(of_ranks)]
                # A rank whose peer has left the test fails too; what it says is not why.
                failed = sorted((one for one in found if not is_green(one)), key=is_consequence)
                merged[name] = failed[0] if failed else found[0]
        return merged

    def all(self, mode: str, places: Iterable[str]) -> Results:
        """Result of each test of the places."""
        return {name: result for place in places for name, result in self.results(mode, place).items()}

    def outcome(self, mode: str, places: Sequence[str]) -> Outcome:
        """What became of the tests of a mode."""
        names = [name for place in places for name in self.to_inject(mode, place)]
        results = self.all(mode, places)
        return Outcome(
            mode=mode,
            names=names,
            results={name: results[name] for name in names if name in results},
            control=self.all("control", places) if mode == "lockstep" else {},
        )

    def run(self, mode: str, place: str, names: list[str] | None, *, again: bool = False) -> None:
        """Runs the tests that have no result yet; again where a process ended before its tests did."""
        if again:
            failed = {name for name, result in self.results(mode, place).items() if not is_green(result)}
            for rank in range(_num_ranks(mode)):
                file = self._file(mode, place, rank)
                lines = file.read_text().splitlines() if file.is_file() else []
                file.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["test"] not in failed))
        for _ in range(_ROUNDS):
            done = set.intersection(*(set(_read(self._file(mode, place, rank))) for rank in range(_num_ranks(mode))))
            if names is None:
                collected = self._file(mode, place, 0).with_suffix(".collected")
                names = collected.read_text().splitlines() if collected.is_file() else None
            left = None if names is None else [name for name in names if name not in done]
            if left == []:
                return
            print(f"{mode}: {'all' if left is None else len(left)} tests of {place}", flush=True)
            self._start(mode, place, left)

    def _start(self, mode: str, place: str, names: list[str] | None) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes, logs = [], []
        with tempfile.TemporaryDirectory(prefix="lightning_suite_") as folder:
            if names is not None:
                (Path(folder) / "names").write_text("\n".join(names))
            files = [place] if names is None else sorted({name.split("::")[0] for name in names})
            for rank in range(_num_ranks(mode)):
                settings = {
                    "mode": mode,
                    "results": self._file(mode, place, rank),
                    "tests": Path(folder) / "names",
                    "folder": Path(folder) / "tests",
                    "limit": self._limit,
                    "rank": rank,
                    "port": store.port,
                }
                command = [*self._pytest(*files), *(f"--suite-{name}={value}" for name, value in settings.items())]
                log = self._file(mode, place, rank).with_suffix(".log").open("a")
                logs.append(log)
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        env=self._environment(),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
            try:
                self._wait(processes)
            finally:
                for process in processes:
                    _end_group(process)
        for log in logs:
            log.close()
        for rank, process in enumerate(processes):
            self._close_started(mode, place, rank, process.returncode)

    def _wait(self, processes: list["subprocess.Popen[bytes]"]) -> None:
        """Waits for all processes; not long for the others once one has ended."""
        while all(process.poll() is None for process in processes):
            time.sleep(0.2)
        ends = time.monotonic() + self._limit + GRACE_SECONDS
        while any(process.poll() is None for process in processes) and time.monotonic() < ends:
            time.sleep(0.2)

    def _close_started(self, mode: str, place: str, rank: int, status: int | None) -> None:
        """Says of a test in which the process ended that it did not finish."""
        file = self._file(mode, place, rank)
        lines = file.read_text().splitlines() if file.is_file() else []
        if not lines or (last := json.loads(lines[-1]))["outcome"] != "started":
            return
        message = f"the process ended in this test, with status {status}"
        result = {"test": last["test"], "outcome": "failed", "message": message, "where": "", "text": "", "chosen": []}
        with file.open("a") as opened:
            opened.write(json.dumps(result) + "\n")

    def _pytest(self, *places: str) -> list[str]:
        self._folder.mkdir(parents=True, exist_ok=True)
        ini = self._folder / "pytest.ini"
        ini.write_text(PYTEST_INI)
        paths = [
            self._tests / (place if place.startswith("tests_pytorch") else f"tests_pytorch/{place}") for place in places
        ]
        options = ("-c", ini, "--rootdir", self._tests, "-p", "no:cacheprovider", "-p", "tests.lightning_suite.plugin")
        flags = ("-q", "--continue-on-collection-errors")
        return [sys.executable, "-m", "pytest", *map(str, options), *flags, *map(str, paths)]

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join((str(ROOT), str(self._tests), os.environ.get("PYTHONPATH", "")))
        return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def _file(self, mode: str, place: str, rank: int) -> Path:
        return self._folder / f"{mode}_{place}_{rank}.jsonl"


def _num_ranks(mode: str) -> int:
    return NUM_LOCKSTEP_RANKS if mode in LOCKSTEP_MODES else 1


def _read(file: Path) -> Results:
    lines = file.read_text().splitlines() if file.is_file() else []
    results = (json.loads(line) for line in lines)
    return {result["test"]: result for result in results if result["outcome"] != "started"}


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Ends the process and what its tests left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
