"""What is said of torch's build, of the GPUs that it sees, and of how they reach each other."""

import re
from collections.abc import Iterator, Sequence

from lightning_megatron.cli.amounts import byte_text, num_text
from lightning_megatron.cli.doctor.facts import FoundGpu, TorchFacts
from lightning_megatron.cli.doctor.finding import Finding, mind, ok, wrong

# Bfloat16 and FlashAttention of torch begin with it.
_AMPERE = (8, 0)
# A context and a display take some.
_LEAST_FREE = 0.9


def torch_findings(torch: TorchFacts, *, driver: str) -> list[Finding]:
    """What is to be said of torch's build and its backends; `driver` is the version of NVIDIA's, empty without one."""
    if torch.fault:
        return [wrong("torch", f"it cannot be imported: {torch.fault}", "install it anew, for this machine")]
    return [_build(torch, driver), *_backends(torch)]


def gpu_findings(torch: TorchFacts) -> list[Finding]:
    """What is to be said of each GPU and of each pair; one line where there is none."""
    if not torch.gpus:
        return [ok("GPUs", "torch sees none; a run uses the CPU")]
    found = [ok("GPUs", f"torch sees {len(torch.gpus)}")]
    for index, gpu in enumerate(torch.gpus):
        found += _gpu(f"GPU {index}", gpu, torch.archs)
    return [*found, *_kinds(torch.gpus), *_peers(torch)]


def _build(torch: TorchFacts, driver: str) -> Finding:
    about = "build of torch"
    if not torch.built_for:
        if driver:
            return mind(
                about,
                f"it is for the CPU alone, and NVIDIA's driver {driver} is there",
                "install torch as pytorch.org says for CUDA, where runs shall use the GPUs",
            )
        return ok(about, "for the CPU")
    if torch.built_for.startswith("CUDA") and driver and not torch.gpus:
        return wrong(
            about,
            f"it is for {torch.built_for} and sees no GPU, though NVIDIA's driver {driver} is there"
            + (f" ({torch.warning})" if torch.warning else ""),
            "see whether CUDA_VISIBLE_DEVICES hides them, nvidia-smi lists them, and the driver is new enough for "
            f"{torch.built_for}",
        )
    found = f"driver {driver}" if driver else "and no driver is there"
    return ok(
        about, f"for {torch.built_for}, {found}" if torch.built_for.startswith("CUDA") else f"for {torch.built_for}"
    )


def _backends(torch: TorchFacts) -> Iterator[Finding]:
    about = "backends"
    if "gloo" not in torch.backends:
        yield wrong(about, f"gloo is not among torch's ({', '.join(torch.backends)})", "install a build that has gloo")
    if torch.gpus and "nccl" not in torch.backends:
        yield wrong(
            about,
            f"nccl is not among torch's ({', '.join(torch.backends)}), and GPUs communicate by it",
            "install a build that has NCCL",
        )
    names = ["nccl " + torch.nccl if name == "nccl" and torch.nccl else name for name in torch.backends]
    yield ok(about, ", ".join(names) or "none")


def _gpu(about: str, gpu: FoundGpu, archs: Sequence[str]) -> Iterator[Finding]:
    if gpu.fault:
        yield wrong(about, f"it cannot be used: {gpu.fault}", "see what nvidia-smi says of it, and who holds it")
        return
    if not gpu.name:
        yield ok(about, "the first rank of the machine looks at it")
        return
    capability = ".".join(map(str, gpu.capability))
    memory = f"{byte_text(gpu.free_bytes)} of {byte_text(gpu.memory_bytes)} free"
    told = f"{gpu.name}, {memory}, compute capability {capability}"
    if archs and not has_kernels(gpu.capability, archs):
        yield wrong(
            about, f"{told}, for which torch has no kernels ({', '.join(archs)})", "install a build of torch for it"
        )
    elif gpu.free_bytes < _LEAST_FREE * gpu.memory_bytes:
        yield mind(about, f"{told}: others hold memory of it", "see in nvidia-smi which processes, and end them")
    elif gpu.capability < _AMPERE:
        yield mind(
            about,
            f"{told}, which has no bfloat16 and no kernel of FlashAttention",
            'train with precision="16-mixed", or on a GPU of compute capability 8.0 and above',
        )
    else:
        yield ok(about, told)


def has_kernels(capability: tuple[int, int], archs: Sequence[str]) -> bool:
    """Whether a build has kernels for a GPU.

    Those of sm_86 run on 8.6 to 8.9, those of sm_90a on 9.0 alone, and compute_80 is compiled for any later GPU.
    """
    for arch in archs:
        if (match := re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", arch)) is None:
            continue
        kind, built, exact = match[1], (int(match[2]), int(match[3])), bool(match[4])
        if built == capability or (not exact and kind == "compute" and built <= capability):
            return True
        if not exact and built[0] == capability[0] and built <= capability:
            return True
    return False


def _kinds(gpus: Sequence[FoundGpu]) -> Iterator[Finding]:
    names = sorted({gpu.name for gpu in gpus if gpu.name})
    if len(names) > 1:
        yield mind(
            "kinds of GPUs",
            f"they differ: {', '.join(names)}",
            "every step takes as long as the slowest needs: name GPUs of one kind in CUDA_VISIBLE_DEVICES",
        )


def _peers(torch: TorchFacts) -> Iterator[Finding]:
    seen = [gpu for gpu in torch.gpus if gpu.name]
    if len(seen) < 2:
        return
    num_pairs = len(seen) * (len(seen) - 1) // 2
    if torch.strangers:
        pairs = ", ".join(f"{one}-{other}" for one, other in torch.strangers[:8])
        yield mind(
            "peer access",
            f"{len(torch.strangers)} of {num_text(num_pairs, 'pair')} of GPUs cannot read each other's memory "
            f"({pairs}): their messages go over host memory",
            "see in nvidia-smi topo -m how they are joined, and keep tensor parallelism within those that are",
        )
    else:
        yield ok("peer access", f"each of {num_text(num_pairs, 'pair')} of GPUs can read the other's memory")
