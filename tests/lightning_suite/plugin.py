"""A plugin of pytest for Lightning's tests: puts a strategy in, limits each test's time, and writes its result as JSON.

Mode by mode (`--suite-mode`), what it puts in:

| mode | where the Trainer would choose | is put in |
|---|---|---|
| plain | - | nothing; it notes which tests made the Trainer choose |
| world1 | its strategy of one CPU | MegatronStrategy, one process |
| lockstep | its strategy of one CPU | MegatronStrategy under tp 2; another process runs the same tests in step |
| control | its strategy of one CPU | Lightning's own DDP over the two processes |
| ddp | DDP on the CPU | MegatronStrategy, its processes started as DDP's |
"""

import faulthandler
import json
import multiprocessing
import os
import shutil
import signal
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from socket import socket
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.seed import seed_everything
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch.distributed import TCPStore

from lightning_megatron.trainer.setup import early_model_checks, model_checks
from tests.lightning_suite import strategies

LOCKSTEP_MODES = ("lockstep", "control")
# After the time limit of a test, for its teardown; then the process ends.
GRACE_SECONDS = 20
_PEER_IS_GONE = 71
SLURM_VARIABLES = (
    ("node_rank", "NODEID", "0"),
    ("local_rank", "LOCALID", "0"),
    ("global_rank", "PROCID", "0"),
    ("world_size", "NTASKS", "1"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what `tests.lightning_suite` passes to the processes that run the tests."""
    for name, help_text in (
        ("mode", "what is put in"),
        ("results", "file to which results are appended"),
        ("tests", "file with the names of the tests to run, one a line"),
        ("folder", "folder of the tests' temporary folders"),
        ("limit", "seconds that a test may take"),
        ("rank", "rank of this process in lockstep"),
        ("port", "port of the store over which ranks keep in step"),
    ):
        parser.addoption(f"--suite-{name}", help=help_text, default="0")


def pytest_configure(config: pytest.Config) -> None:
    """Puts the strategy in and starts to record."""
    torch.set_num_threads(1)
    config.pluginmanager.register(Suite(config))


class Suite:
    """The run of the tests in this process."""

    def __init__(self, config: pytest.Config) -> None:
        self._mode = str(config.getoption("--suite-mode"))
        self._rank = int(config.getoption("--suite-rank"))
        self._limit = int(config.getoption("--suite-limit"))
        # Less than a test may take: a rank whose peer has gone another way fails by itself.
        self._timeout = self._limit * 2 / 3
        self._folder = Path(config.getoption("--suite-folder"))
        names = Path(config.getoption("--suite-tests"))
        self._names = names.read_text().splitlines() if names.is_file() else None
        self._results = Path(config.getoption("--suite-results"))
        # Where a process was that had to be ended.
        self._stacks = self._results.with_suffix(".stacks").open("a")
        self._store = None
        if self._mode in LOCKSTEP_MODES:
            port = int(config.getoption("--suite-port"))
            self._store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=self._limit + 2 * GRACE_SECONDS))
        self._port = 0
        # What the running test has met.
        self._chosen: set[str] = set()
        self._reports: list[pytest.TestReport] = []
        self._put_in()
        if self._store is not None:
            # Tests draw the data of their parameters when they are collected.
            _seed(0)

    def _put_in(self) -> None:
        choose, init = _AcceleratorConnector._choose_strategy, _AcceleratorConnector._init_strategy

        def choose_strategy(connector: _AcceleratorConnector) -> Any:
            strategy = choose(connector)
            if type(strategy) is not SingleDeviceStrategy or strategy.root_device.type != "cpu":
                return strategy
            self._chosen.add("single_device")
            if self._mode == "world1":
                return strategies.for_one_process(self._timeout)
            if self._mode == "lockstep":
                return strategies.for_lockstep(self._rank, self._port, self._timeout)
            if self._mode == "control":
                return strategies.ddp_for_lockstep(self._rank, self._port, self._timeout)
            return strategy

        def init_strategy(connector: _AcceleratorConnector) -> None:
            init(connector)
            if type(connector.strategy) is DDPStrategy and isinstance(connector.accelerator, CPUAccelerator):
                # In lockstep it was put in by us.
                self._chosen.add("ddp")
                if self._mode == "ddp":
                    connector.strategy = strategies.in_place_of(connector.strategy, self._timeout)

        patch.object(_AcceleratorConnector, "_choose_strategy", choose_strategy).start()
        patch.object(_AcceleratorConnector, "_init_strategy", init_strategy).start()
        if self._mode != "plain":
            # SLURM always sets these variables, and Lightning's tests do not; DDP would ask for them too.
            for name, variable, default in SLURM_VARIABLES:
                value = partial(_variable, f"SLURM_{variable}", default)
                patch.object(SLURMEnvironment, name, lambda _, value=value: value()).start()
        # Lightning's modules have nothing that tensor parallelism could cut.
        for checks in (model_checks, early_model_checks):
            patch.object(checks, "unused_axis_faults", lambda *_: []).start()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves the tests that are asked for, in an order that is the same on every rank."""
        if self._names is None:
            self._results.with_suffix(".collected").write_text("\n".join(item.nodeid for item in items))
        else:
            names = set(self._names)
            items[:] = [item for item in items if item.nodeid in names]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Says of a file that could not be imported that it failed."""
        if report.failed and self._names is None:
            self._write({"test": report.nodeid, "chosen": [], **_result([report])})

    @pytest.fixture
    def tmp_path(self, request: pytest.FixtureRequest) -> Path:
        """A folder of the test, which the ranks of a machine share."""
        path = self._folder / f"{request.node.originalname[:40]}_{zlib.crc32(request.node.nodeid.encode()):08x}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Runs a test within its time limit, in step with the other rank, and writes what became of it."""
        self._chosen.clear()
        self._reports.clear()
        self._write({"test": item.nodeid, "outcome": "started"})
        self._meet(item.nodeid)
        signal.signal(signal.SIGALRM, _out_of_time)
        signal.alarm(self._limit)
        faulthandler.dump_traceback_later(self._limit + GRACE_SECONDS, exit=True, file=self._stacks)
        try:
            return (yield)
        finally:
            signal.alarm(0)
            faulthandler.cancel_dump_traceback_later()
            for child in multiprocessing.active_children():
                child.kill()
            self._write({"test": item.nodeid, "chosen": sorted(self._chosen), **_result(self._reports)})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[Any]:
        """Keeps the reports of the running test's phases."""
        report = yield
        self._reports.append(report)
        return report

    def _meet(self, name: str) -> None:
        """Waits for the other rank to begin the same test, and agrees with it on a port."""
        if self._store is None:
            return
        # Without it every rank would draw its own data.
        _seed(zlib.crc32(name.encode()))
        try:
            if self._rank == 0:
                with closing(socket()) as free:
                    free.bind(("127.0.0.1", 0))
                    self._store.set(f"port {name}", str(free.getsockname()[1]))
            self._port = int(self._store.get(f"port {name}"))
            self._store.set(f"{name} {self._rank}", "")
            self._store.wait([f"{name} {1 - self._rank}"])
        except RuntimeError:
            os._exit(_PEER_IS_GONE)

    def _write(self, result: dict[str, Any]) -> None:
        with self._results.open("a") as file:
            file.write(json.dumps(result) + "\n")

    def pytest_sessionfinish(self) -> None:
        """Removes what the tests wrote."""
        if self._rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)


def _seed(seed: int) -> None:
    seed_everything(seed, verbose=False)
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(variable, None)


def _variable(name: str, default: str) -> int:
    return int(os.environ.get(name, default))


def _out_of_time(signal_number: int, frame: FrameType | None) -> None:
    raise TimeoutError("the test ran out of time")


def _result(reports: Sequence[pytest.TestReport | pytest.CollectReport]) -> dict[str, Any]:
    seconds = round(sum(getattr(report, "duration", 0.0) for report in reports), 2)
    failed = [report for report in reports if report.failed]
    if failed:
        text = failed[0].longreprtext
        crash = getattr(failed[0].longrepr, "reprcrash", None)
        message = crash.message if crash is not None else text
        where = f"{crash.path}:{crash.lineno}" if crash is not None else ""
        return {
            "outcome": "failed",
            "phase": failed[0].when,
            # The error of a process that a test started stands at its end.
            "message": message if len(message) < 2000 else f"{message[:1000]}\n[...]\n{message[-1000:]}",
            "where": where,
            "text": text[-6000:],
            "seconds": seconds,
        }
    outcome = "skipped" if any(report.skipped for report in reports) else "passed"
    return {"outcome": outcome, "seconds": seconds}
