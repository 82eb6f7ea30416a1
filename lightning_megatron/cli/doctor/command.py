"""`lightning-megatron doctor`: what of this machine would spoil a run, and a ping over its ranks.

`facts.py` gathers what is there; pure functions beside it judge that, section by section; `ping.py` lets ranks
communicate.
"""

import argparse
import json
import math
import sys
from typing import Any

from lightning_megatron.cli.commands import add_command
from lightning_megatron.cli.doctor.facts import DoctorFacts, gathered_facts
from lightning_megatron.cli.doctor.finding import (
    Finding,
    Sections,
    counts_of,
    mind,
    record_of,
    section_text,
    summary_text,
)
from lightning_megatron.cli.doctor.gpus import gpu_findings, torch_findings
from lightning_megatron.cli.doctor.launch import launch_findings
from lightning_megatron.cli.doctor.machine import machine_findings
from lightning_megatron.cli.doctor.outcome import (
    FORMULA,
    NobodyThereError,
    PingOutcome,
    Word,
    machine_differences,
    ping_findings,
)
from lightning_megatron.cli.doctor.software import software_findings
from lightning_megatron.cli.doctor.variables import variable_findings
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.version import VERSION

_LIMIT_SECONDS = 60.0
_LEAST_SECONDS, _MOST_SECONDS = 5.0, 3600.0
_SIZES = "1,64"
_MOST_MB = 4000
_LOCAL_RANKS = 2
_MOST_LOCAL_RANKS = 64
_PING = "ping"
_EPILOG = """\
A finding is ok, or something to mind, or wrong; the last two come with the mend. Under torchrun, srun or another
launcher every rank joins the ping, and rank 0 prints, for all machines.

exit code: 0 where nothing is wrong, 1 where something is, 2 for a mistake

example:  lightning-megatron doctor
          torchrun --nproc-per-node 8 -m lightning_megatron doctor
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command and its options."""
    parser = add_command(
        commands,
        "doctor",
        "Looks at packages, GPUs, the launcher, variables of the environment and the machine, and lets ranks reduce "
        "tensors; says of each what is ok, what to mind, and what is wrong. It changes nothing.",
        run=run_doctor,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--ping",
        type=int,
        metavar="RANKS",
        help="processes that reduce tensors, 0 for none (default: those of the launcher; without one as many as GPUs, "
        f"by nccl, or {_LOCAL_RANKS} on the CPU, by gloo)",
    )
    parser.add_argument(
        "--sizes-mb",
        default=_SIZES,
        metavar="SIZES",
        help=f"sizes of the tensors in MB, 10^6 bytes, with commas between them (default: {_SIZES})",
    )
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=_LIMIT_SECONDS,
        metavar="SECONDS",
        help="time in which all ranks must have come, and again in which they must have reduced "
        f"(default: {_LIMIT_SECONDS:g})",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run_doctor(options: argparse.Namespace) -> int:
    """Prints the findings; 1 where something is wrong. Raises UsageError with all errors of what was given."""
    sizes_bytes = _sizes_bytes(options)
    facts = gathered_facts()
    launch = facts.launch
    if launch.launcher and options.ping not in (None, 0, launch.world):
        raise UsageError(
            [
                f"--ping ({options.ping}) must be the number of ranks that {launch.launcher} has started "
                f"({launch.world}), or 0 for none; leave it out"
            ]
        )
    sections = sections_of(facts)
    if launch.rank == 0 and not options.json:
        print("\n".join(section_text(title, findings) for title, findings in sections.items()), flush=True)
    try:
        further, outcome = _pinged(options, facts, sections, sizes_bytes)
    except NobodyThereError as error:
        print(f"error: rank {launch.rank} on {facts.machine.host}: {error}", file=sys.stderr)
        return 1
    if launch.rank != 0:
        return _tell_why_not_met(facts, sections, further)
    everything = {**sections, **further}
    if options.json:
        record = {"formula": FORMULA, "ping": None if outcome is None else outcome.record}
        print(json.dumps({**record_of(everything), **record}, indent=1))
    else:
        for title, findings in further.items():
            print(section_text(f"{title}: {FORMULA}" if title == _PING else title, findings))
        print(summary_text(everything))
    return 1 if counts_of(everything)["wrong"] else 0


def _is_placed(sections: Sections) -> bool:
    return all(finding.kind != "wrong" for finding in sections["launcher"])


def _tell_why_not_met(facts: DoctorFacts, sections: Sections, further: Sections) -> int:
    """The exit code of a rank that is not the first: of one that did not join nobody else knows why, so it says it."""
    if _PING not in further:
        return 0
    amiss = [*further[_PING], *(finding for finding in sections["launcher"] if finding.kind == "wrong")]
    told = "; ".join(f"{finding.about}: {finding.found}" for finding in amiss)
    print(f"error: rank {facts.launch.rank} on {facts.machine.host}: {told}", file=sys.stderr)
    return 1


def _pinged(
    options: argparse.Namespace, facts: DoctorFacts, sections: Sections, sizes_bytes: tuple[int, ...]
) -> tuple[dict[str, list[Finding]], PingOutcome | None]:
    """The sections that a ping adds, and its outcome; neither on ranks but the first, nor where none is asked for."""
    if options.ping == 0:
        return {}, None
    if (reason := _no_ping(facts, is_placed=_is_placed(sections))) is not None:
        return {_PING: [reason]}, None
    # Torch takes a second to import, and may be what is wrong.
    from lightning_megatron.cli.doctor.ping import PingRequest, ping_launched, ping_locally

    request = PingRequest(sizes_bytes=sizes_bytes, limit_seconds=options.limit_seconds)
    if not facts.launch.launcher:
        num_usable = _num_usable_gpus(facts)
        num_ranks = options.ping or num_usable or _LOCAL_RANKS
        outcome = ping_locally(request, num_ranks, has_gpus=num_usable >= num_ranks)
        return {_PING: ping_findings(outcome)}, outcome
    if (found := ping_launched(request, facts.launch, _word(facts, sections))) is None:
        return {}, None
    outcome, words = found
    differences = machine_differences(words)
    return {_PING: ping_findings(outcome)} | ({"other machines": differences} if differences else {}), outcome


def sections_of(facts: DoctorFacts) -> dict[str, list[Finding]]:
    """All that is to be said of the facts, section by section."""
    torch, machine, launch, variables = facts.torch, facts.machine, facts.launch, facts.variables
    return {
        "versions": [
            *software_findings(facts.python, facts.versions),
            *torch_findings(torch, driver=machine.driver),
        ],
        "GPUs": gpu_findings(torch),
        "launcher": launch_findings(launch, variables, has_mpi4py="mpi4py" in facts.versions),
        "variables": variable_findings(
            variables,
            launch,
            num_gpus=len(torch.gpus),
            num_cores=machine.num_cores,
            interfaces=machine.interfaces,
            has_driver=bool(machine.driver),
        ),
        "machine": machine_findings(machine, launch, has_gloo_interface="GLOO_SOCKET_IFNAME" in variables),
    }


def _sizes_bytes(options: argparse.Namespace) -> tuple[int, ...]:
    """The sizes of the ping. Raises UsageError with all errors of the options."""
    faults, sizes = [], []
    for text in options.sizes_mb.split(","):
        try:
            size = float(text)
        except ValueError:
            size = math.nan
        if not 0 < size <= _MOST_MB:
            faults.append(
                f"--sizes-mb ({text.strip()!r}) must be a number above 0 and up to {_MOST_MB}, as in {_SIZES}"
            )
        else:
            sizes.append(max(int(size * 1e6) // 4 * 4, 4))
    if options.ping is not None and options.ping not in range(_MOST_LOCAL_RANKS + 1):
        faults.append(
            f"--ping ({options.ping}) must be from 0 to {_MOST_LOCAL_RANKS}; start more ranks by torchrun or srun"
        )
    if not _LEAST_SECONDS <= options.limit_seconds <= _MOST_SECONDS:
        faults.append(
            f"--limit-seconds ({options.limit_seconds:g}) must be from {_LEAST_SECONDS:g} to {_MOST_SECONDS:g}"
        )
    if faults:
        raise UsageError(faults)
    return tuple(sizes)


def _no_ping(facts: DoctorFacts, *, is_placed: bool) -> Finding | None:
    """Why there can be no ping; None where there can be."""
    launch = facts.launch
    if facts.torch.fault or "gloo" not in facts.torch.backends:
        return mind("ranks", "they did not meet, since torch cannot communicate", "mend torch first")
    if not is_placed:
        return mind("ranks", "they did not meet, since what the launcher has set is wrong", "mend the launch first")
    if launch.launcher and not (launch.address and launch.port):
        return mind(
            "ranks",
            f"they did not meet, since {launch.launcher} does not say where",
            "set MASTER_ADDR to the machine with rank 0, and MASTER_PORT to a free port of it",
        )
    return None


def _num_usable_gpus(facts: DoctorFacts) -> int:
    return sum(not gpu.fault for gpu in facts.torch.gpus) if "nccl" in facts.torch.backends else 0


def _word(facts: DoctorFacts, sections: Sections) -> Word:
    is_first = facts.launch.local_rank == 0
    amiss = [finding for findings in sections.values() for finding in findings if finding.kind != "ok"]
    names = ("torch", "lightning", "torchmetrics", "numpy")
    versions = {
        "lightning-megatron": VERSION,
        "python": facts.python,
        **{name: facts.versions.get(name, "none") for name in names},
        "nccl": facts.torch.nccl or "none",
        "driver": facts.machine.driver or "none",
    }
    return Word(
        host=facts.machine.host,
        has_gpu=facts.launch.local_rank < _num_usable_gpus(facts),
        versions=versions,
        findings=tuple(amiss) if is_first else (),
    )
