"""What every test gets: one thread a process, a fixed seed, and a skip of GPU tests where there is no GPU."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# The same examples every time, and none too slow: the machine may be busy with ranks.
settings.register_profile("repository", deadline=None, derandomize=True)
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
    before = dict(os.environ)
    yield
    # pytest's own note of where it is.
    kept = {name: os.environ[name] for name in ("PYTEST_CURRENT_TEST",) if name in os.environ}
    os.environ.clear()
    os.environ.update(before | kept)
