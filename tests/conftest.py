"""What every test gets: one thread a process, a fixed seed, and a skip of GPU tests where there is no GPU."""

import ctypes
import functools
import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import random
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# The same examples every time, and none too slow: the machine may be busy with ranks.
settings.register_profile("repository", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repository")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """The test's own random stream, whatever ran before it."""
    random.seed(0)
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is marked `gpu` on a machine without one."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


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
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
