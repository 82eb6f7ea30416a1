"""The facts that the doctor judges: all of them are gathered here, and nothing is judged.

Nothing is changed: GPUs are asked for their names and their memory, files are read, and no package but torch is
imported.
"""

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_megatron.cli.doctor.launch import Launch, launch_of
from lightning_megatron.cli.doctor.software import EXTRAS, REQUIRED
from lightning_megatron.cli.doctor.variables import is_of_interest
from lightning_megatron.host_memory import machine_memory_bytes

_PACKAGE = Path(__file__).resolve().parents[1]
_SHARED_MEMORY = Path("/dev/shm")
_FABRIC = Path("/sys/class/infiniband")
_MEMORY = Path("/proc/meminfo")
_DRIVER = Path("/proc/driver/nvidia/version")
# Of a container: the limit, and what is used of it.
_MEMORY_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


@dataclass(frozen=True, kw_only=True)
class FoundGpu:
    """A GPU that torch sees."""

    name: str = ""
    memory_bytes: int = 0
    free_bytes: int = 0
    capability: tuple[int, int] = (0, 0)
    fault: str = ""
    """Why it cannot be used; empty where it can."""


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """What torch says of itself and of the GPUs."""

    fault: str = ""
    """Why it cannot be imported; empty where it can."""
    built_for: str = ""
    """The CUDA or ROCm that it is built for; empty for a build for the CPU."""
    warning: str = ""
    """What it says while it looks for GPUs."""
    backends: tuple[str, ...] = ()
    """Backends of process groups."""
    nccl: str = ""
    archs: tuple[str, ...] = ()
    """Kinds of GPUs that it has kernels for, as sm_90 or compute_90."""
    gpus: tuple[FoundGpu, ...] = ()
    strangers: tuple[tuple[int, int], ...] = ()
    """Pairs of GPUs of which one cannot read the other's memory."""


@dataclass(frozen=True, kw_only=True)
class FabricPort:
    """A port of an adapter by which machines read each other's memory: InfiniBand, RoCE and their like."""

    name: str
    is_active: bool
    rate: str
    """As the driver writes it, "400 Gb/sec (4X NDR)"; empty where it does not."""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A folder, and what is free on its disk."""

    what: str
    path: str
    free_bytes: int
    is_writable: bool


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """The host: its name, its memory, its limits, its clock."""

    host: str
    addresses: tuple[str, ...] = ()
    """Addresses that the host's name stands for."""
    host_fault: str = ""
    """Why the name stands for none; empty where it does."""
    main_fault: str = ""
    """Why the address at which ranks meet stands for no machine; empty where it does, or there is none."""
    interfaces: tuple[str, ...] = ()
    fabric_ports: tuple[FabricPort, ...] = ()
    driver: str = ""
    """Version of NVIDIA's driver; empty where there is none."""
    num_cores: int = 1
    memory_bytes: int = 0
    free_memory_bytes: int = 0
    shared_memory_bytes: int | None = None
    """Size of /dev/shm; None where there is none."""
    open_files: int = 0
    most_open_files: int = 0
    """What the limit of open files can be raised to."""
    now_seconds: float = 0.0
    files_seconds: float = 0.0
    """When the newest file of the package was written."""
    disks: tuple[Disk, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DoctorFacts:
    """All that is judged."""

    python: str
    versions: Mapping[str, str]
    """Versions of installed packages, by name; what is not installed is left out."""
    torch: TorchFacts
    machine: MachineFacts
    launch: Launch
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of the environment that matter to a run."""


def gathered_facts() -> DoctorFacts:
    """The facts of this machine and this process."""
    variables = {name: value for name, value in sorted(os.environ.items()) if is_of_interest(name)}
    launch = launch_of(variables)
    return DoctorFacts(
        python=platform.python_version(),
        versions=dict(_versions()),
        # Each look at a GPU takes some of its memory: of a machine's ranks one looks.
        torch=_torch_facts(looks_at_gpus=launch.local_rank == 0),
        machine=_machine_facts(launch),
        launch=launch,
        variables=variables,
    )


def _versions() -> Iterator[tuple[str, str]]:
    for name in (*REQUIRED, *EXTRAS, "mpi4py"):
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _torch_facts(*, looks_at_gpus: bool) -> TorchFacts:
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        # A library that a wheel needs and that the machine lacks is an OSError.
        return TorchFacts(fault=_first_line(error))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = tuple(_gpu(torch, index) if looks_at_gpus else FoundGpu() for index in range(num_gpus))
    usable = [index for index, gpu in enumerate(gpus) if looks_at_gpus and not gpu.fault]
    asked = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "mpi": dist.is_available() and dist.is_mpi_available(),
        "ucc": dist.is_available() and dist.is_ucc_available(),
    }
    return TorchFacts(
        built_for=f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "",
        warning=" ".join(_first_line(one.message) for one in caught),
        backends=tuple(name for name, is_there in asked.items() if is_there),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if asked["nccl"] else "",
        # ROCm's are by other names.
        archs=tuple(torch.cuda.get_arch_list()) if num_gpus and torch.version.cuda else (),
        gpus=gpus,
        strangers=tuple(
            (one, other)
            for one in usable
            for other in usable
            if one < other
            and not (torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one))
        ),
    )


def _gpu(torch: Any, index: int) -> FoundGpu:
    try:
        properties = torch.cuda.get_device_properties(index)
        free_bytes, memory_bytes = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        return FoundGpu(fault=_first_line(error))
    return FoundGpu(
        name=properties.name,
        memory_bytes=memory_bytes,
        free_bytes=free_bytes,
        capability=(properties.major, properties.minor),
    )


def _machine_facts(launch: Launch) -> MachineFacts:
    host = socket.gethostname()
    addresses, host_fault = _addresses(host)
    memory_bytes, free_memory_bytes = _memory()
    open_files, most_open_files = (
        sys.maxsize if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    folders = {"the working directory": Path.cwd(), "the folder of temporary files": Path(tempfile.gettempdir())}
    return MachineFacts(
        host=host,
        addresses=addresses,
        host_fault=host_fault,
        main_fault=_addresses(launch.address)[1] if launch.address else "",
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        fabric_ports=tuple(_fabric_ports()),
        driver=_driver(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=memory_bytes,
        free_memory_bytes=free_memory_bytes,
        shared_memory_bytes=shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.exists() else None,
        open_files=open_files,
        most_open_files=most_open_files,
        now_seconds=time.time(),
        files_seconds=max(path.stat().st_mtime for path in _PACKAGE.rglob("*.py")),
        disks=tuple(
            Disk(
                what=what,
                path=str(path),
                free_bytes=shutil.disk_usage(path).free,
                is_writable=os.access(path, os.W_OK),
            )
            for what, path in folders.items()
        ),
    )


def _fabric_ports() -> Iterator[FabricPort]:
    for port in sorted(_FABRIC.glob("*/ports/*")):
        state, rate = _line_of(port / "state"), _line_of(port / "rate")
        # The file of a port that works says "4: ACTIVE".
        yield FabricPort(name=f"{port.parts[-3]}:{port.name}", is_active=state.endswith("ACTIVE"), rate=rate)


def _line_of(file: Path) -> str:
    """The line in a file of a driver; empty where it has none, or the driver does not tell."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _addresses(host: str) -> tuple[tuple[str, ...], str]:
    """Addresses of a name, and why there are none."""
    try:
        found = socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        return (), _first_line(error)
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found)), ""


def _memory() -> tuple[int, int]:
    """Memory of this machine, or of the container, and what is free of it."""
    memory_bytes = free_bytes = machine_memory_bytes()
    for line in _MEMORY.read_text().splitlines() if _MEMORY.exists() else ():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            free_bytes = int(amount.split()[0]) * 1024
    for limit, used in _MEMORY_LIMITS:
        if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdecimal():
            memory_bytes = min(memory_bytes, int(text))
            free_bytes = min(free_bytes, max(int(text) - int(used.read_text()), 0))
    return memory_bytes, free_bytes


def _driver() -> str:
    words = _DRIVER.read_text().split() if _DRIVER.exists() else []
    # The first word of digits and dots: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  ...".
    return next((word for word in words if word.replace(".", "").isdecimal() and "." in word), "")


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
