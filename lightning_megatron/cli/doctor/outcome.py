"""What is said of a ping: who came, how fast it was, or why it failed; and how the machines of its ranks differ.

The time of an all-reduce says little without its size and its ranks. Bus bandwidth is what a link would carry were the
all-reduce made as well as can be, 2 (n - 1) / n x bytes / seconds for n ranks, so that it compares with the link's own.
Source: nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth", AllReduce.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_megatron.cli.amounts import byte_text, num_text
from lightning_megatron.cli.doctor.finding import Finding, mind, ok, wrong

FORMULA = "bus bandwidth is 2 (n - 1) / n x bytes / seconds for n ranks, as in nccl-tests"
# Ranks that differ in these compute something else, or do not understand each other.
_ALIKE = ("lightning-megatron", "torch", "lightning", "nccl")
_MOST_TOLD = 3
_MENDS = {
    "gloo": "see that the machines reach each other on every port, and name their network in GLOO_SOCKET_IFNAME",
    "nccl": "run it again with NCCL_DEBUG=INFO, which says what NCCL tries; name the network in NCCL_SOCKET_IFNAME",
}


class NobodyThereError(Exception):
    """The doctor of rank 0 is not where all ranks meet."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """An all-reduce as it is told."""

    size_bytes: int
    seconds: float
    bus_gb_per_second: float


@dataclass(frozen=True, kw_only=True)
class PingOutcome:
    """How a ping ended."""

    world: int
    backend: str
    """The backend of the process group; empty where the ranks did not come together."""
    why: str = ""
    """Why it is this backend."""
    timings: tuple[Timing, ...] = ()
    """The smallest first: it is the latency."""
    failure: str = ""
    """Why it failed; empty where it did not."""
    mend: str = ""

    @property
    def record(self) -> dict[str, Any]:
        """The outcome for a program."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Word:
    """What a rank that a launcher has started tells the first one."""

    host: str
    has_gpu: bool
    """Whether a GPU of its own is there for it."""
    versions: Mapping[str, str]
    findings: tuple[Finding, ...] = ()
    """What is not ok with its machine; empty where another rank of it tells."""

    @property
    def record(self) -> dict[str, Any]:
        """The word as JSON takes it."""
        return asdict(self)

    @staticmethod
    def of(record: Mapping[str, Any]) -> "Word":
        """The word of a record."""
        return Word(**{**record, "findings": tuple(Finding(**one) for one in record["findings"])})


def bus_gb_per_second(world: int, size_bytes: int, seconds: float) -> float:
    """Bus bandwidth of an all-reduce in GB/s, by the formula above."""
    return 2 * (world - 1) / world * size_bytes / seconds / 1e9


def ping_findings(outcome: PingOutcome) -> list[Finding]:
    """What is to be said of a ping."""
    if outcome.failure:
        return [wrong("ranks", outcome.failure, outcome.mend)]
    about = f"{num_text(outcome.world, 'rank')} joined by {outcome.backend}"
    findings = [ok("ranks", about + (f": {outcome.why}" if outcome.why else ""))]
    latency, *others = outcome.timings
    findings.append(ok("latency", f"an all-reduce of {latency.size_bytes} bytes takes {_microseconds(latency)}"))
    for one in others:
        findings.append(
            ok(
                f"all-reduce of {byte_text(one.size_bytes)}",
                f"{_microseconds(one)}, bus bandwidth {one.bus_gb_per_second:.3g} GB/s; the sum is right",
            )
        )
    return findings


def _microseconds(timing: Timing) -> str:
    return f"{timing.seconds * 1e6:,.0f} microseconds"


def missing_outcome(world: int, missing: Sequence[int], where: str, seconds: float) -> PingOutcome:
    """The outcome where ranks have not come to the place where all meet."""
    return PingOutcome(
        world=world,
        backend="",
        failure=f"{_ranks(missing)} of {world} {'has' if len(missing) == 1 else 'have'} not come to {where} within "
        f"{seconds:g} s",
        mend="see why they have not started (fewer processes than the launcher tells of), or do not reach that "
        "address (MASTER_ADDR, a firewall); --limit-seconds gives slow ones more time",
    )


def failed_outcome(
    world: int,
    backend: str,
    *,
    failures: Mapping[int, str],
    stages: Mapping[int, str],
    silent: Sequence[int],
    seconds: float,
) -> PingOutcome:
    """The outcome where ranks came together and some failed, the first one first, or were silent to the end."""
    told = [f"rank {rank}, which {stages.get(rank, 'had not started')}: {text}" for rank, text in failures.items()]
    told += [f"rank {rank}, which {stages.get(rank, 'had not started')}, was not done" for rank in silent]
    more = f"; and {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
    head = "the ping failed" if failures else f"the ping was not done after {seconds:g} s"
    return PingOutcome(
        world=world, backend=backend, failure=f"{head}: {'; '.join(told[:_MOST_TOLD])}{more}", mend=_MENDS[backend]
    )


def backend_for(has_gpu: Mapping[int, bool]) -> tuple[str, str]:
    """The backend for ranks that have a GPU each or not, and why."""
    without = [rank for rank, is_there in has_gpu.items() if not is_there]
    if not without:
        return "nccl", "each rank has a GPU"
    if len(without) == len(has_gpu):
        return "gloo", "no rank has a GPU of its own"
    return "gloo", f"{_ranks(without)} {'has' if len(without) == 1 else 'have'} no GPU, and others have"


def machine_differences(words: Mapping[int, Word]) -> list[Finding]:
    """What is to be said of versions that differ over ranks, and of the other machines than that of rank 0."""
    return [*_differences(words), *_of_other_machines(words)]


def _differences(words: Mapping[int, Word]) -> Iterator[Finding]:
    for name in sorted({name for word in words.values() for name in word.versions}):
        ranks_of = defaultdict(list)
        for rank, word in words.items():
            ranks_of[word.versions.get(name, "none")].append(rank)
        if len(ranks_of) > 1:
            found = "; ".join(f"{found} on {_ranks(ranks)}" for found, ranks in ranks_of.items())
            say = wrong if name in _ALIKE else mind
            yield say(name, f"it differs: {found}", "install the same on every machine")
    lacking = [rank for rank, word in words.items() if not word.has_gpu]
    if 0 < len(lacking) < len(words):
        yield wrong(
            "GPUs",
            f"{_ranks(lacking)} of {len(words)} {'has' if len(lacking) == 1 else 'have'} no GPU, and the others have",
            "start ranks on machines with as many GPUs, one for each rank",
        )


def _of_other_machines(words: Mapping[int, Word]) -> Iterator[Finding]:
    for rank, word in words.items():
        if rank != 0 and word.host != words[0].host:
            for finding in word.findings:
                yield replace(finding, about=f"{finding.about} of {word.host}")


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in text, as "ranks 0 to 7 and 9"; of many pieces the first ones."""
    pieces = list[list[int]]()
    for rank in ranks:
        if pieces and rank == pieces[-1][1] + 1:
            pieces[-1][1] = rank
        else:
            pieces.append([rank, rank])
    told = [f"{first} to {last}" if last > first else f"{first}" for first, last in pieces[:_MOST_TOLD]]
    if len(pieces) > _MOST_TOLD:
        told.append("others")
    text = " and ".join([", ".join(told[:-1]), told[-1]] if len(told) > 1 else told)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
