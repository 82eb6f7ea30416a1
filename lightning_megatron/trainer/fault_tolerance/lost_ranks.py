"""Sentences on why a run ends: a rank that failed, ranks whose processes are gone, ranks that say nothing any more."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

# How many ranks a sentence names one by one.
_MOST_NAMED = 16


@dataclass(frozen=True, kw_only=True)
class Process:
    """Process of one rank, as other machines name it."""

    rank: int
    host: str = ""
    pid: int = 0

    @staticmethod
    def own(rank: int) -> "Process":
        """The calling process."""
        return Process(rank=rank, host=socket.gethostname(), pid=os.getpid())

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})" if self.pid else f"rank {self.rank}"


@dataclass(frozen=True, kw_only=True)
class Cause:
    """First failure of a run, as far as anybody knows it."""

    text: str
    """Ends the sentence "the run ends because ..."."""
    rank: int = -1
    """Rank that raised; -1 where ranks are lost, none of which can say so itself."""
    lost: Sequence[int] = field(default_factory=tuple)
    """Ranks that are gone or say nothing any more."""


def gone_sentence(processes: Sequence[Process]) -> str:
    """Says that connections closed without a word: the kernel closes them when a process ends."""
    verb, whose = ("was", "its process") if len(processes) == 1 else ("were", "their processes")
    return (
        f"{_named(processes)} {verb} killed or crashed: {whose} ended without a word (a signal, the kernel for lack of "
        "memory, or a fault in a library)"
    )


def silent_sentence(processes: Sequence[Process], seconds: float, timeout_seconds: float) -> str:
    """Says that nothing has come for so long, over connections that are open."""
    verb, why = ("has", "its process is stopped or hangs, or its machine or the network to it is lost")
    if len(processes) > 1:
        verb, why = ("have", "their processes are stopped or hang, or their machines or the network to them are lost")
    return f"{_named(processes)} {verb} not answered for {seconds:.0f} s (timeout_seconds={timeout_seconds:g}): {why}"


def _named(processes: Sequence[Process]) -> str:
    if len(processes) == 1:
        return str(processes[0])
    ranks = ", ".join(str(process.rank) for process in processes[:_MOST_NAMED])
    more = f" and {len(processes) - _MOST_NAMED} more" if len(processes) > _MOST_NAMED else ""
    hosts = sorted({process.host for process in processes if process.host})
    where = f" (on {', '.join(hosts[:_MOST_NAMED])}{', ...' if len(hosts) > _MOST_NAMED else ''})" if hosts else ""
    return f"ranks {ranks}{more}{where}"
