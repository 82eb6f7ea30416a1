"""What is said of the host: memory, limits, cores, disks, clock, and its name."""

import time
from collections.abc import Iterator

from lightning_megatron.cli.amounts import byte_text
from lightning_megatron.cli.doctor.facts import MachineFacts
from lightning_megatron.cli.doctor.finding import Finding, mind, ok, wrong
from lightning_megatron.cli.doctor.launch import Launch

_GB = 10**9
# Torch and Lightning alone take half a GB in each rank.
_LEAST_MEMORY = 2 * _GB
# Containers get 64 MiB where nobody asks for more.
_LEAST_SHARED_MEMORY = _GB
# Loaders, checkpoints and the connections of ranks: the usual limit is 1024.
_LEAST_OPEN_FILES = 4096
_LEAST_DISK, _NO_DISK = 10 * _GB, _GB
# Files of a network's disk have another machine's clock.
_CLOCK_SECONDS = 120


def machine_findings(machine: MachineFacts, launch: Launch, *, has_gloo_interface: bool) -> list[Finding]:
    """What is to be said of this host; `has_gloo_interface` is whether GLOO_SOCKET_IFNAME is set."""
    return [
        *_host(machine, launch, has_gloo_interface=has_gloo_interface),
        *_main_address(machine, launch),
        _fabric(machine, launch),
        _cores(machine, launch),
        _memory(machine, launch),
        *_shared_memory(machine),
        _open_files(machine),
        *_disks(machine),
        _clock(machine),
    ]


def _host(machine: MachineFacts, launch: Launch, *, has_gloo_interface: bool) -> Iterator[Finding]:
    mend = "put the name and the machine's address into /etc/hosts or the DNS, or set GLOO_SOCKET_IFNAME"
    is_alone = launch.num_nodes == 1 or has_gloo_interface
    if machine.host_fault:
        found = f"{machine.host} stands for no address ({machine.host_fault}): gloo would listen at this machine alone"
        yield mind("host name", found, mend) if is_alone else wrong("host name", found, mend)
    elif not is_alone and all(address.startswith("127.") or address == "::1" for address in machine.addresses):
        yield wrong(
            "host name",
            f"{machine.host} stands for {', '.join(machine.addresses)}, where the {launch.num_nodes - 1} other "
            "machines do not reach gloo",
            mend,
        )
    else:
        yield ok("host name", f"{machine.host} stands for {', '.join(machine.addresses)}")


def _main_address(machine: MachineFacts, launch: Launch) -> Iterator[Finding]:
    if machine.main_fault:
        yield wrong(
            "MASTER_ADDR",
            f"{launch.address} stands for no machine ({machine.main_fault})",
            "give the name or the address of the machine with rank 0",
        )


def _fabric(machine: MachineFacts, launch: Launch) -> Finding:
    about, ports = "InfiniBand", machine.fabric_ports
    active = [f"{port.name} at {port.rate or 'an unknown rate'}" for port in ports if port.is_active]
    idle = [port.name for port in ports if not port.is_active]
    parts = ["active: " + ", ".join(active)] * bool(active) + ["not active: " + ", ".join(idle)] * bool(idle)
    found = "; ".join(parts) or "no adapter is there"
    if launch.num_nodes == 1 or (active and not idle):
        return ok(about, found)
    if active:
        return mind(about, found, "see whether a cable is out, or name those that are in NCCL_IB_HCA")
    return mind(
        about,
        f"{found}: messages between the {launch.num_nodes} machines go over TCP",
        "give a container the devices of /dev/infiniband, or train over as few machines as hold the model",
    )


def _cores(machine: MachineFacts, launch: Launch) -> Finding:
    if launch.launcher and machine.num_cores < launch.local_world:
        return mind(
            "cores",
            f"this process may use {machine.num_cores}, and {launch.local_world} ranks are on the machine",
            "ask for a core for each rank at least (SLURM: --cpus-per-task), or start fewer",
        )
    return ok("cores", f"{machine.num_cores}")


def _memory(machine: MachineFacts, launch: Launch) -> Finding:
    found = f"{byte_text(machine.free_memory_bytes)} of {byte_text(machine.memory_bytes)} free"
    ranks = launch.local_world if launch.launcher else 1
    if machine.free_memory_bytes < _LEAST_MEMORY * ranks:
        return mind(
            "host memory",
            found + (f", for {ranks} ranks" if ranks > 1 else ""),
            f"end what uses it, or ask for more: a rank wants {byte_text(_LEAST_MEMORY)} beside its data",
        )
    return ok("host memory", found)


def _shared_memory(machine: MachineFacts) -> Iterator[Finding]:
    size = machine.shared_memory_bytes
    if size is None:
        yield mind("shared memory", "there is no /dev/shm", "mount one: workers of loaders and NCCL use it")
    elif size < _LEAST_SHARED_MEMORY:
        yield mind(
            "shared memory",
            f"/dev/shm holds {byte_text(size)}: workers of loaders and NCCL run out of it",
            "give a container more (docker run --shm-size=8g, or --ipc=host)",
        )
    else:
        yield ok("shared memory", f"/dev/shm holds {byte_text(size)}")


def _open_files(machine: MachineFacts) -> Finding:
    about = "limit of open files"
    if machine.open_files >= _LEAST_OPEN_FILES:
        return ok(about, f"{machine.open_files}")
    can_raise = machine.most_open_files >= _LEAST_OPEN_FILES
    return mind(
        about,
        f"{machine.open_files}: workers of loaders and the connections of many ranks use it up",
        f"ulimit -n {min(machine.most_open_files, 65536)}"
        if can_raise
        else f"ask who runs the machine to raise it above {machine.most_open_files}",
    )


def _disks(machine: MachineFacts) -> Iterator[Finding]:
    for disk in machine.disks:
        found = f"{byte_text(disk.free_bytes)} free at {disk.path}"
        if not disk.is_writable:
            yield mind(
                disk.what,
                f"{disk.path} cannot be written",
                "give checkpoints and logs another folder (Trainer(default_root_dir=...)), temporary files another "
                "TMPDIR",
            )
        elif disk.free_bytes < _NO_DISK:
            yield wrong(disk.what, found, "free some: checkpoints, logs and caches are written")
        elif disk.free_bytes < _LEAST_DISK:
            yield mind(disk.what, found, "free some before checkpoints of large models are written")
        else:
            yield ok(disk.what, found)


def _clock(machine: MachineFacts) -> Finding:
    now, then = (_moment(seconds) for seconds in (machine.now_seconds, machine.files_seconds))
    if machine.now_seconds < machine.files_seconds - _CLOCK_SECONDS:
        return wrong(
            "clock",
            f"it shows {now}, before the package's files were written ({then})",
            "set the clock (NTP): certificates of the network and the order of checkpoints hang on it",
        )
    return ok("clock", now)


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
