"""What is said of variables of the environment: those that matter to a run, and those that contradict each other."""

from collections.abc import Iterator, Mapping, Sequence

from lightning_megatron.cli.doctor.finding import Finding, mind, ok, wrong
from lightning_megatron.cli.doctor.launch import Launch

Variables = Mapping[str, str]
_NAMES = {
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "NODE_RANK",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "GLOO_SOCKET_IFNAME",
    "KUBERNETES_PORT",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
}
_FAMILIES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "SLURM_", "OMPI_COMM_", "PMI_", "JSM_", "LSB_", "TORCHELASTIC_")
# Shown though nothing is wrong with them; launchers set dozens of others.
_SHOWN = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "MASTER_", "CUDA_", "OMP_NUM_THREADS", "PYTORCH_", "GLOO_")
_OLD_NAMES = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
}
_SLOW = {
    "NCCL_P2P_DISABLE": "GPUs of a machine send each other messages over host memory",
    "NCCL_SHM_DISABLE": "GPUs that do not reach each other send messages over the network",
    "NCCL_IB_DISABLE": "machines send each other messages over TCP, and not over InfiniBand",
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel, so that no communication is hidden",
}
_MOST_QUEUES = 32


def is_of_interest(name: str) -> bool:
    """Whether a variable is one that the doctor looks at."""
    return name in _NAMES or name.startswith(_FAMILIES)


def variable_findings(
    variables: Variables, launch: Launch, *, num_gpus: int, num_cores: int, interfaces: Sequence[str], has_driver: bool
) -> list[Finding]:
    """What is to be said of the variables, beside those by which a launcher tells of ranks.

    `num_gpus` are those that torch sees, `num_cores` those that this process may use.
    """
    findings = [
        *_devices(variables, launch, num_gpus=num_gpus, has_driver=has_driver),
        *_queues(variables),
        *_threads(variables, launch, num_cores),
        *_interfaces(variables, launch, interfaces),
        *_nccl(variables),
        *_torch_nccl(variables, launch),
        *_allocator(variables),
        *_old_names(variables),
        *_left_over(variables, launch),
    ]
    told = {finding.about for finding in findings}
    shown = {name: value for name, value in variables.items() if name.startswith(_SHOWN) and name not in told}
    findings += [ok(name, value or "empty") for name, value in shown.items()]
    return findings or [ok("variables", "none is set of those that matter")]


def _devices(variables: Variables, launch: Launch, *, num_gpus: int, has_driver: bool) -> Iterator[Finding]:
    name = "CUDA_VISIBLE_DEVICES"
    if (text := variables.get(name)) is not None:
        devices = [device.strip() for device in text.split(",") if device.strip()]
        if not devices or devices == ["-1"]:
            if has_driver:
                yield mind(name, f"{text!r} hides every GPU", f"unset {name}, or name the GPUs to use")
        elif len(set(devices)) < len(devices):
            yield wrong(name, f"{text} names a GPU twice", "name each once")
        elif has_driver and len(devices) != num_gpus:
            yield wrong(
                name,
                f"{text} names {len(devices)} and torch sees {num_gpus}: CUDA leaves out all from the first that is "
                "not there",
                "name GPUs that are there, from 0",
            )
    if launch.launcher and 0 < num_gpus < launch.local_world:
        yield wrong(
            "GPUs of a rank",
            f"{launch.local_world} ranks are on this machine and each sees {num_gpus}: Lightning takes the GPU whose "
            "number is the local rank",
            "let every rank see all GPUs of its machine (SLURM: --gpus-per-node, and not --gpus-per-task), and start "
            "no more ranks than GPUs",
        )


def _queues(variables: Variables) -> Iterator[Finding]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    text = variables.get(name)
    if text is None:
        return
    if not text.isdecimal() or int(text) not in range(1, _MOST_QUEUES + 1):
        yield wrong(name, f"{text!r} is no number from 1 to {_MOST_QUEUES}", "unset it: 8 is CUDA's default")
    elif text == "1":
        yield mind(
            name,
            "1 puts the work of all streams into one queue, where a receive holds up what its sender waits for; with "
            "pipeline stages a run refuses to start",
            "unset it: 8 is CUDA's default",
        )


def _threads(variables: Variables, launch: Launch, num_cores: int) -> Iterator[Finding]:
    name = "OMP_NUM_THREADS"
    text = variables.get(name)
    ranks = launch.local_world if launch.launcher else 1
    if text is None:
        if ranks > 1:
            yield mind(
                name,
                f"it is not set, and {ranks} ranks are on this machine: until Lightning sets it, each takes all cores",
                f"set {name} to {max(num_cores // ranks, 1)} or less before Python starts",
            )
    elif not text.split(",")[0].strip().isdecimal() or int(text.split(",")[0]) == 0:
        yield wrong(name, f"{text!r} is no number from 1", "give a number of threads, or unset it")
    elif (threads := int(text.split(",")[0])) * ranks > num_cores and threads > 1:
        yield mind(
            name,
            f"{threads} threads x {ranks} ranks are more than the {num_cores} cores",
            f"set it to {max(num_cores // ranks, 1)}",
        )


def _interfaces(variables: Variables, launch: Launch, interfaces: Sequence[str]) -> Iterator[Finding]:
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    for name in names:
        if not (text := variables.get(name)):
            continue
        if not (used := _used(text, interfaces, is_nccl=name == names[0])):
            yield wrong(
                name,
                f"{text} is none of this machine's interfaces ({', '.join(interfaces)})",
                "name one of them on which the machines reach each other",
            )
        elif launch.num_nodes > 1 and used == ["lo"]:
            yield wrong(
                name, f"{text} reaches this machine alone, and there are {launch.num_nodes}", "name a network's"
            )
    one, other = (name in variables for name in names)
    if one != other:
        there, absent = names if one else reversed(names)
        yield mind(
            absent,
            f"it is not set, and {there} is {variables[there]}: tensors of GPUs go over NCCL, small objects and plans "
            "of checkpoints over gloo",
            f"set it to the same interface where the machine has several, or unset {there}",
        )


def _used(text: str, interfaces: Sequence[str], *, is_nccl: bool) -> list[str]:
    """The interfaces that a variable names: gloo takes names, NCCL beginnings of names, `=name` and `^not these`."""
    is_without = is_nccl and text.startswith("^")
    is_exact = not is_nccl or text.lstrip("^").startswith("=")
    words = [word.strip() for word in text.lstrip("^=").split(",") if word.strip()]
    named = {name for name in interfaces for word in words if (name == word if is_exact else name.startswith(word))}
    return [name for name in interfaces if (name in named) != is_without]


def _nccl(variables: Variables) -> Iterator[Finding]:
    for name, what in _SLOW.items():
        if variables.get(name, "0") not in ("0", ""):
            yield mind(name, f"{variables[name]}: {what}", "unset it, once what it avoids is mended")
    if variables.get("NCCL_IB_DISABLE", "0") not in ("0", "") and variables.get("NCCL_IB_HCA"):
        yield wrong(
            "NCCL_IB_HCA",
            f"{variables['NCCL_IB_HCA']} names adapters, and NCCL_IB_DISABLE uses none",
            "unset one of the two",
        )
    if variables.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        yield mind("NCCL_DEBUG", f"{variables['NCCL_DEBUG']} prints much on every rank", "use WARN for long runs")


def _torch_nccl(variables: Variables, launch: Launch) -> Iterator[Finding]:
    handling, waiting = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"
    if _is_on(variables, waiting):
        # It is torchrun that sets the other where the user does not.
        if variables.get(handling, "0") != "0" and launch.launcher != "torchrun":
            yield wrong(
                waiting,
                f"it is on, and {handling} is {variables[handling]}: torch uses the first of them alone",
                f"unset {waiting}",
            )
        else:
            yield mind(waiting, "the host waits for every message, so that none is hidden", "unset it")
    elif variables.get(handling) == "0":
        yield mind(handling, "0: a message that fails ends no rank, and the others wait for ever", "unset it")
    sizes = [variables.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")]
    if _is_on(variables, "TORCH_NCCL_DUMP_ON_TIMEOUT") and "0" in sizes:
        yield wrong(
            "TORCH_NCCL_DUMP_ON_TIMEOUT",
            "it is on, and the buffer of what it would write holds 0 collectives",
            "set TORCH_FR_BUFFER_SIZE to 20000",
        )


def _is_on(variables: Variables, name: str) -> bool:
    return variables.get(name, "0").lower() not in ("0", "", "false", "n", "no")


def _allocator(variables: Variables) -> Iterator[Finding]:
    new, old = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    if new in variables and old in variables and variables[new] != variables[old]:
        yield wrong(new, f"{variables[new]}, and {old} says {variables[old]}", f"unset {old}")
    for name in (new, old):
        parts = [part for part in variables.get(name, "").split(",") if part.strip()]
        # A list in brackets has commas of its own.
        if parts and "[" not in variables[name] and not all(":" in part for part in parts):
            yield wrong(
                name, f"{variables[name]} is no list of name:value", "write it as expandable_segments:True is written"
            )


def _old_names(variables: Variables) -> Iterator[Finding]:
    for old, new in _OLD_NAMES.items():
        if old in variables and new not in variables:
            yield mind(old, f"{variables[old]}, by an old name", f"call it {new}")


def _left_over(variables: Variables, launch: Launch) -> Iterator[Finding]:
    if launch.launcher:
        return
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name in variables:
            yield mind(
                name,
                f"{variables[name]}, and no launcher is there: the processes that Lightning starts will meet there",
                f"unset {name} where a former job has left it",
            )
