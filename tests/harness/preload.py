"""Imported once by the fork server, so that the ranks forked from it find the heavy modules already loaded.

Nothing here may start a thread: the ranks are forks of the process that imports this.
"""

import contextlib
import gc
import importlib
import pkgutil
import warnings
from pathlib import Path

import torch

THIRD_PARTIES = (
    "numpy",
    "pytest",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch.utils.checkpoint",
    "torchmetrics",
    "lightning.pytorch",
)

# Rooms whose third parties start threads of their own when imported (Arrow, tokenizers).
LEFT_TO_THE_RANKS = ("data", "hf", "cli", "lightning_modules", "planner")


def package_modules() -> list[str]:
    """Names of the package's modules that are safe to import before a fork."""
    root = Path(__file__).resolve().parents[2] / "lightning_megatron"
    names = ["lightning_megatron"]
    for room in pkgutil.iter_modules([str(root)], "lightning_megatron."):
        if room.name.split(".")[1] in LEFT_TO_THE_RANKS:
            continue
        names.append(room.name)
        if room.ispkg:
            inside = pkgutil.iter_modules([str(root / room.name.split(".")[1])], f"{room.name}.")
            names.extend(module.name for module in inside)
    return names


torch.set_num_threads(1)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in (*THIRD_PARTIES, *package_modules()):
        # A module that cannot be imported fails again in the rank that needs it, where the traceback is seen.
        with contextlib.suppress(Exception):
            importlib.import_module(name)

# The ranks share these pages until one of them writes; the collector would write to all of them.
gc.collect()
gc.freeze()
