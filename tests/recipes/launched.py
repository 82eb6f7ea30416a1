"""A recipe's script on ranks forked from the tests' server, as under a launcher: heavy imports happen once."""

import os
import runpy
import sys
import tempfile
import warnings
from pathlib import Path
from subprocess import CompletedProcess

from tests.harness.ranks import ROOT, run_on_ranks


def launched(folder: Path, *options: str, script: str, num_ranks: int = 2) -> CompletedProcess[str]:
    """How `script options` ended in `folder` on so many ranks, and what all of them wrote, one rank after the other."""
    command = [str(ROOT / "recipes" / script), *options]
    with tempfile.TemporaryDirectory() as written:
        codes = run_on_ranks(num_ranks, _run_script, folder, command, Path(written), init=False, timeout=180)
        out, err = ("".join(path.read_text() for path in sorted(Path(written).glob(f"{fd}-*"))) for fd in (1, 2))
    return CompletedProcess(command, max(codes), out, err)


def _run_script(folder: Path, command: list[str], written: Path) -> int:
    os.chdir(folder)
    sys.argv = command
    # The descriptors themselves: handlers of loggers know them since the server began.
    for fd in (1, 2):
        os.dup2(os.open(written / f"{fd}-{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    with warnings.catch_warnings():
        # A script of a user's makes no errors of warnings.
        warnings.simplefilter("default")
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0
