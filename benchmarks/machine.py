"""Description of a benchmark's machine: hardware, load and versions, for a table's head and for its JSON."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys


def machine() -> dict[str, str]:
    """Names and versions of hardware and software; those of a GPU where this process sees one."""
    import torch

    facts = {
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": ", ".join(f"{load:.1f}" for load in os.getloadavg()),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for package in ("lightning", "transformers"):
        if version := version_of(package):
            facts[package] = version
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        facts["GPU"] = f"{found.name}, {found.total_memory / 2**30:.1f} GiB"
        facts["CUDA"] = str(torch.version.cuda)
        facts["driver"] = _driver()
    return facts


def version_of(package: str, python: str = sys.executable) -> str:
    """Version of a package in this or another interpreter; empty where it is not installed."""
    if python != sys.executable:
        done = subprocess.run([python, "-c", _PRINT_VERSION, package], capture_output=True, text=True, timeout=60)
        return done.stdout.strip()
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


_PRINT_VERSION = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"


def as_line(facts: dict[str, str]) -> str:
    """The facts as the head of a table."""
    return "; ".join(f"{name} {value}" for name, value in facts.items())


def _driver() -> str:
    """The version of the GPU's driver by its own tool; "unknown" without that tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else "unknown"
