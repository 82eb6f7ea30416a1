"""What every test gets: one thread a process, a fixed seed, and a skip of GPU tests where there is no GPU."""

import ctypes
import functools
import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from tests.harness import device
from tests.harness.ranks import start_server
from tests.harness.sample import WHOLE, sample_of_matrix

torch.set_num_threads(1)

# The same examples every time, and none too slow: the machine may be busy with ranks.
settings.register_profile("repository", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repository")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """The test's own random stream, whatever ran before it."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def loaded_server() -> None:
    """Starts the fork server that ranks come from, whose modules are loaded, before `certify` starts one without."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        start_server()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--whole` and `--device`."""
    parser.addoption(
        "--whole", action="store_true", help="run every cell of sampled matrices (tests/harness/sample.py)"
    )
    parser.addoption(
        "--device", default="cpu", choices=["cpu", "cuda"], help="of tests' Trainers (tests/harness/device.py)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tells test modules, before they are imported, whether they are to sample, and on which device to train."""
    if config.getoption("whole"):
        os.environ[WHOLE] = "1"
    os.environ[device.CHOICE] = config.getoption("device")


# Folders whose tests take the longest (docs/suite.md). They begin, so that no worker has one of them left at the end.
_SLOW = ("tests/trainer/", "tests/testing/", "tests/recipes/", "tests/lightning_modules/", "tests/cli/")
_ROWS = "tests/certificate/"


class _FilesThenRows(LoadScopeScheduling):
    """Keeps the tests of a file on one worker, in the order of `_by_cost`; rows of the certificate are units alone.

    Tests of a file share what they compute once. Rows share nothing, and small units at the end leave no worker idle.
    """

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(_ROWS) else nodeid.split("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Takes the place of xdist's own scheduler under `--dist loadfile`."""
    if config.getvalue("dist") != "loadfile":
        return None
    # Files stay in the order of the collection, which knows more than their numbers of tests.
    config.option.loadscopereorder = False
    return _FilesThenRows(config, log)


def _by_cost(items: list[pytest.Item]) -> None:
    """Sorts tests: slow folders, then others, each by the number of tests in a file; the certificate's rows last."""
    files = Counter(item.nodeid.split("::")[0] for item in items)

    def cost(item: pytest.Item) -> tuple[int, int, str]:
        file = item.nodeid.split("::")[0]
        room = 2 if file.startswith(_ROWS) else 0 if file.startswith(_SLOW) else 1
        return room, -files[file], file

    items.sort(key=cost)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes a sample of what is marked `matrix`, sorts by cost, and skips `gpu` tests on a machine without one."""
    if not config.getoption("whole"):
        _take_samples(config, items)
    _by_cost(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Takes what collection made, which lives to the end, out of the collector's rounds: each would visit all of it."""
    gc.collect()
    gc.freeze()


def _take_samples(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked `matrix`, keeps a covering sample of the cells that its parameters make.

    Cells that are asked for by name run as asked.
    """
    if any("::" in argument for argument in config.args):
        return
    matrices: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("matrix") and hasattr(item, "callspec"):
            matrices.setdefault(item.nodeid.split("[")[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for cells in matrices.values():
        kept = sample_of_matrix([cell.callspec.params for cell in cells])
        left_out |= {cell for place, cell in enumerate(cells) if place not in kept}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _environment_is_left_as_it_was() -> Iterator[None]:
    """Lightning leaves a seed in the environment, and its launcher who this process is; processes and ranks that later
    tests start would find them and, taking themselves for launched, start no others."""
    # pytest's own note of where it is.
    before = dict(os.environ)
    yield
    kept = {name: os.environ[name] for name in ("PYTEST_CURRENT_TEST",) if name in os.environ}
    os.environ.clear()
    os.environ.update(before | kept)


@pytest.fixture(autouse=True, scope="module")
def _memory_is_given_back() -> Iterator[None]:
    """What a file's tests computed once for each other is of no use to the next file, and a worker runs a hundred."""
    yield
    for module in [module for name, module in sys.modules.items() if name.startswith("tests.")]:
        for value in vars(module).values():
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()
    with warnings.catch_warnings():
        # Of what is left open, it is not the next file's tests that shall hear.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
        # What lives now lives on, and the next file's collection need not visit it again.
        gc.freeze()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
