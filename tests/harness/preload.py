"""Imported once by the fork server, so that the ranks forked from it find the heavy modules already loaded.

Nothing here may start a thread: the ranks are forks of the process that imports this.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import pkgutil
import sys
import warnings
from pathlib import Path

import torch

THIRD_PARTIES = (
    "numpy",
    "datasets",
    "pytest",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch.utils.checkpoint",
    "torchmetrics",
    "lightning.pytorch",
    "transformers.modeling_utils",
)

# Their tests start ranks.
HELPED_ROOMS = ("reference", "any_module", "models", "trainer", "transformer", "moe", "optim", "pipeline", "context")
HELPED_ROOMS += ("checkpoint",)
ROOT = Path(__file__).resolve().parents[2]


def package_modules() -> list[str]:
    """Names of the package's modules, but for the one that is a script."""
    found = pkgutil.walk_packages([str(ROOT / "lightning_megatron")], "lightning_megatron.")
    return ["lightning_megatron", *(module.name for module in found if not module.name.endswith("__main__"))]


def test_helpers() -> list[str]:
    """Names of the modules that tests of the engine share: each rank would import them itself."""
    helpers = (
        path.relative_to(ROOT).with_suffix("")
        for room in HELPED_ROOMS
        for path in sorted((ROOT / "tests" / room).rglob("*.py"))
        if not path.name.startswith(("test_", "__")) and not path.name.endswith("_script.py")
    )
    return [".".join(path.parts) for path in helpers]


HUGE_PAGE_BYTES = 2**21
# Of Linux 6.1 and later; others refuse it, and nothing changes.
MADV_COLLAPSE = 25


def own_memory() -> list[tuple[int, int]]:
    """Bounds of the memory of this process that no file backs, in whole huge pages."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, access, *_, last = line.split(maxsplit=5)
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        start, end = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if access.startswith("rw") and last in ("0", "[heap]") and start < end:
            found.append((start, end))
    return found


# Arrow's allocator would start a thread as it is loaded.
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
torch.set_num_threads(1)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in (*THIRD_PARTIES, *package_modules(), *test_helpers()):
        # A module that cannot be imported fails again in the rank that needs it, where the traceback is seen.
        with contextlib.suppress(Exception):
            importlib.import_module(name)

# A rank that fails waits for three of these, so that the watch of each other rank reads of it. Half a second is chosen
# for thousands of ranks that ask one store; here it would be most of the time of each test of a refusal.
importlib.import_module("lightning_megatron.trainer.fault_tolerance.failure_watch")._POLL_SECONDS = 0.1  # type: ignore[attr-defined]
# A rank that ends by a mistake of the user's gives the first rank time for its message: that is its parent under
# Lightning's launcher. Here nobody's parent is a rank.
importlib.import_module("lightning_megatron.cli.recipe")._SECONDS_TO_REPORT = 0.1  # type: ignore[attr-defined]

# A fork takes one thread along and leaves what the others hold locked.
assert not Path("/proc/self/task").exists() or len(list(Path("/proc/self/task").iterdir())) == 1

# The ranks share these pages until one of them writes; the collector would write to all of them.
gc.collect()
gc.freeze()
# A fork copies a table of them: of huge pages, where the kernel makes some of them at once, one of a hundredth.
for start, end in own_memory() if sys.platform == "linux" else ():
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)
