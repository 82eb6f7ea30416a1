"""`python -m tests.mutants`: which of the planted faults the tests of every run notice.

Each fault is put into a copy of the tree, alone. First the tests that mirror its file run, then those of its room and
of the rooms that build on it. A fault that passes all of them has survived, and the command ends with exit code 1.

`--whole` runs survivors against whole matrices too (`pytest --whole`): a fault that only those notice is one that the
sample of every run misses.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mutants.faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
# What stands on nearly every room.
WIDE = ("trainer/test_strategy.py", "models")
LIMIT_SECONDS = 900
_TESTS_FAILED = 1
_OUT_OF_TIME = 71


def main() -> int:
    """Plants the faults one by one and prints what became of each. Returns 1 where one survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--whole", action="store_true", help="run survivors against whole matrices too")
    parser.add_argument("--only", metavar="TEXT", default="", help="only faults whose file or new text has this in it")
    parser.add_argument("--mirror", action="store_true", help="run the tests that mirror the file, and no others")
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if options.only in fault.file or options.only in fault.new]
    copied = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    files = subprocess.run(copied, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for name in files:
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(folder) / name)
        _move_into(Path(folder))
        mirrors = sorted({path for fault in chosen for path in fault.tests})
        if not options.only and _run(mirrors) != 0:
            print("the tests fail without any fault; see above")
            return 2
        survived = [fault for fault in chosen if not _is_killed(fault, whole=options.whole, mirror=options.mirror)]
        print(f"{len(chosen) - len(survived)} of {len(chosen)} faults were noticed")
    return 1 if survived else 0


def planted(fault: Fault, text: str) -> str:
    """A file's text with the fault in it. Raises ValueError where its place is not found exactly once."""
    if (count := text.count(fault.old)) != 1:
        raise ValueError(f"{fault.file}: {fault.old!r} stands there {count} times, and must once; write the fault anew")
    return text.replace(fault.old, fault.new)


def _move_into(folder: Path) -> None:
    """Makes the copy what this process and those that it starts import, and loads once what all runs need."""
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "lightning_megatron")]:
        del sys.modules[name]
    for name in ("torch", "lightning.pytorch"):
        __import__(name)


def _is_killed(fault: Fault, *, whole: bool, mirror: bool) -> bool:
    file = Path("lightning_megatron", fault.file)
    text, started_seconds = file.read_text(), time.monotonic()
    room = fault.file.split("/")[0] if "/" in fault.file else "tensor"
    stages: dict[str, tuple[Sequence[str], tuple[str, ...]]] = {"mirror": (fault.tests, ())}
    if not mirror:
        stages["rooms"] = ((room, *WIDE), ())
    if whole:
        stages["whole"] = ((room, *WIDE, "certificate"), ("--whole",))
    file.write_text(planted(fault, text))
    try:
        by = next((name for name, (paths, extra) in stages.items() if _run(paths, *extra) == _TESTS_FAILED), "")
    finally:
        file.write_text(text)
    ending = f"noticed by {by}" if by else "SURVIVED"
    print(f"{ending:18} {time.monotonic() - started_seconds:5.0f} s  {fault.file}: {fault.new}".rstrip(), flush=True)
    return bool(by)


def _run(paths: Sequence[str], *extra: str) -> int:
    """The exit code of a run of tests in a fork of this process, which has torch and Lightning loaded."""
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        _be_pytest([f"tests/{path}" for path in paths], extra)
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            if code not in (0, _TESTS_FAILED):
                print(Path("run.log").read_text()[-3000:])
                raise RuntimeError(f"pytest ended with {code}: the fault is none, or its tests are not there")
            return code
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    # No answer: ranks that wait for ever are ended, and told as a failure, by the tests' own harness.
    return _OUT_OF_TIME


def _be_pytest(paths: Sequence[str], extra: Sequence[str]) -> None:
    log = os.open("run.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 70
    try:
        code = pytest.main(
            ["-x", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider", *extra, *paths]
        )
    finally:
        # A fork must not unwind: the copy is the parent's to remove.
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
