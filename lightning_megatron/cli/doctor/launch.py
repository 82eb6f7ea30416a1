"""Who has started this process: the launcher, the ranks that it has started, and where they meet.

It is read from variables of the environment in the order in which Lightning's Trainer looks for launchers, without
importing it. What contradicts itself there is wrong.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_megatron.cli.amounts import num_text
from lightning_megatron.cli.doctor.finding import Finding, mind, ok, wrong

Variables = Mapping[str, str]
# Of a launcher, and in this order: rank, ranks, rank in its machine, ranks of its machine, machines.
# An empty name stands for a number that a launcher does not tell.
_NUMBERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    "SLURM": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES"),
    "LSF": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE", ""),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "",
    ),
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""),
    "Kubeflow": ("RANK", "WORLD_SIZE", "", "", ""),
}
_LSF = {"LSB_JOBID", "LSB_DJOB_RANKFILE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE"}
_KUBEFLOW = {"KUBERNETES_PORT", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"}
# By these Lightning tells a process that was started by hand, and its machine.
_BY_HAND = ("LOCAL_RANK", "NODE_RANK")
_MOST_PORT = 65535
# Lightning's: SLURM's ports are 15000 and the last four digits of the job.
_FIRST_PORT, _LONE_PORT = 15000, 12910


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The launcher of this process, and its place among the ranks that were started."""

    launcher: str = ""
    """Its name; empty where there is none."""
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    num_nodes: int = 1
    address: str = ""
    """The machine at which ranks meet; empty where nothing tells it."""
    port: int = 0
    is_store_there: bool = False
    """Whether the launcher holds the store at which ranks meet; else rank 0 does."""
    attempt: int = 0
    """How often the launcher has started the ranks again."""


def launch_of(variables: Variables) -> Launch:
    """The launch that the variables tell of; numbers that are none count as not there."""
    launcher = _launcher(variables)
    address = variables.get("MASTER_ADDR", "")
    port = _number(variables, "MASTER_PORT", 0)
    if not launcher:
        return Launch(address=address, port=port)
    rank, world, local_rank, local_world, nodes = _NUMBERS[launcher]
    num_ranks = max(_number(variables, world, 1), 1)
    num_nodes = max(_number(variables, nodes, 0), 0)
    local = max(_number(variables, local_world, 0), 0)
    if launcher == "Kubeflow":
        num_nodes = num_ranks
    elif not num_nodes:
        num_nodes = -(-num_ranks // local) if local else 1
        # Of ranks that nothing tells to share this machine none is counted.
        local = local or _number(variables, local_rank, 0) + 1
    if launcher == "SLURM":
        job = variables.get("SLURM_JOB_ID", "")[-4:]
        address = address or _first_node(variables.get("SLURM_NODELIST", "127.0.0.1"))
        port = port or (_FIRST_PORT + int(job) if job.isdecimal() else _LONE_PORT)
    return Launch(
        launcher=launcher,
        rank=_number(variables, rank, 0),
        world=num_ranks,
        local_rank=_number(variables, local_rank, 0),
        local_world=local or -(-num_ranks // num_nodes),
        num_nodes=num_nodes,
        address=address,
        port=port,
        is_store_there=launcher == "torchrun" and variables.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
        attempt=_number(variables, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def launch_findings(launch: Launch, variables: Variables, *, has_mpi4py: bool) -> list[Finding]:
    """What is to be said of the launcher; all that is wrong stands before the rest."""
    faults = [*_number_faults(launch, variables), *_place_faults(launch, variables)]
    if not launch.launcher:
        return [*faults, *_no_launcher(variables)]
    where = f", {launch.local_world} on each of {launch.num_nodes} machines" if launch.num_nodes > 1 else ""
    started = f"{launch.launcher} has started {num_text(launch.world, 'rank')}{where}"
    told = ok("launcher", f"{started}; this is rank {launch.rank}")
    return [*faults, *_not_seen(launch, has_mpi4py=has_mpi4py), told]


def _launcher(variables: Variables) -> str:
    if "TORCHELASTIC_RUN_ID" in variables:
        return "torchrun"
    # In such a job Lightning's processes are not those of the job.
    if "SLURM_NTASKS" in variables and variables.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return "SLURM"
    if variables.keys() >= _LSF:
        return "LSF"
    for name in ("Open MPI", "MPI"):
        if _number(variables, _NUMBERS[name][1], 1) > 1:
            return name
    return "Kubeflow" if variables.keys() >= _KUBEFLOW else ""


def _number(variables: Variables, name: str, default: int) -> int:
    text = variables.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else default


def _first_node(nodes: str) -> str:
    """The first host of a list of SLURM's, as node[5-9],other is one."""
    return re.sub(r"\[(.*?)(?:[,-].*)?\]", r"\1", nodes).split(" ")[0].split(",")[0]


def _number_faults(launch: Launch, variables: Variables) -> Iterator[Finding]:
    names = [name for name in _NUMBERS.get(launch.launcher, ()) if name]
    for name in [*names, "MASTER_PORT"]:
        if (text := variables.get(name)) is not None and not text.isdecimal():
            yield wrong(name, f"{text!r} is no number from 0", f"set {name} as the launcher does, or unset it")
    if launch.launcher == "SLURM":
        for name in names[:1] + names[2:3]:
            if name not in variables:
                yield wrong(name, "it is not there, so that srun has not started this process", "start it by srun")
    if launch.launcher in ("torchrun", "Kubeflow"):
        for name in names:
            if name not in variables:
                yield wrong(
                    name, f"{launch.launcher} sets it, and it is not there", "do not unset what the launcher sets"
                )
    if (port := _number(variables, "MASTER_PORT", 1)) not in range(1, _MOST_PORT + 1):
        yield wrong("MASTER_PORT", f"{port} is no port", f"give a port from 1 to {_MOST_PORT}")


def _place_faults(launch: Launch, variables: Variables) -> Iterator[Finding]:
    if not launch.launcher:
        return
    rank, world, local_rank, local_world, nodes = _NUMBERS[launch.launcher]
    mend = f"let {launch.launcher} set them, and start the process by it alone"
    if launch.rank >= launch.world:
        yield wrong(rank, f"rank {launch.rank} is not below {world} ({launch.world})", mend)
    if launch.local_rank >= launch.local_world:
        yield wrong(local_rank, f"{launch.local_rank} is not below {local_world or world} ({launch.local_world})", mend)
    if launch.launcher == "SLURM" and launch.world > 1 and local_world not in variables:
        yield wrong(
            world,
            f"{launch.world} tasks, and {local_world} is not set: Lightning refuses to start",
            "ask for tasks by --ntasks-per-node beside --nodes, and not by --ntasks",
        )
    elif local_world in variables and nodes in variables and launch.local_world * launch.num_nodes != launch.world:
        yield wrong(
            world,
            f"{launch.world} ranks are not {nodes} ({launch.num_nodes}) x {local_world} ({launch.local_world})",
            "start as many processes on every machine",
        )
    if launch.num_nodes > 1 and (launch.address == "localhost" or launch.address.startswith("127.")):
        yield wrong(
            "MASTER_ADDR",
            f"{launch.address} is each machine's own address, and there are {launch.num_nodes} machines",
            "set it to the name of the machine with rank 0",
        )


def _no_launcher(variables: Variables) -> Iterator[Finding]:
    if by_hand := _named(variables, _BY_HAND):
        yield mind(
            "launcher",
            f"none that is known, and {by_hand}: Lightning takes this process for one of several that you start by "
            "hand, and starts no others",
            f"unset {' and '.join(_BY_HAND)}, or start all processes by torchrun",
        )
    else:
        yield ok("launcher", "none: Lightning starts the processes of this machine by itself")
    if ignored := _named(variables, ("RANK", "WORLD_SIZE")):
        yield mind("RANK", f"{ignored}, which Lightning does not read without torchrun", "start by torchrun, or unset")
    if (tasks := _number(variables, "SLURM_NTASKS", 1)) > 1:
        yield mind(
            "SLURM_NTASKS",
            f"{tasks} tasks, in a job of the name {variables.get('SLURM_JOB_NAME')}, which Lightning takes for one "
            "where you work by hand",
            "start by srun with another name of the job where all tasks shall train",
        )


def _not_seen(launch: Launch, *, has_mpi4py: bool) -> Iterator[Finding]:
    """Launchers that a Trainer does not see by itself."""
    if launch.launcher == "Kubeflow":
        yield mind(
            "launcher",
            "Lightning does not look for Kubeflow by itself",
            "give Trainer(plugins=[KubeflowEnvironment()]), or start by torchrun in each pod",
        )
    if launch.launcher in ("Open MPI", "MPI") and not has_mpi4py:
        yield wrong(
            "launcher",
            f"{launch.launcher} has started {launch.world} processes, and Lightning sees them by mpi4py alone, which "
            "is not installed: each would train by itself",
            "pip install mpi4py, or start by torchrun",
        )


def _named(variables: Variables, names: Sequence[str]) -> str:
    return ", ".join(f"{name}={variables[name]}" for name in names if name in variables)
