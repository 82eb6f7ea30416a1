"""A store for the process groups of one attempt, where torchrun has one store for all of them.

A process group is made through a store: each rank writes where it listens, and waits for what the others write. After
a restart (`torchrun --max-restarts`) the store still has what the ranks of the last attempt wrote, and a rank that is
early reads that. So the ranks of an attempt agree on a name for it first, and everything else is written below it.
torchrun's own count of restarts is no such name: its agents on several machines count by themselves, and differ.

    a rank r > 0    writes a ticket under its number, and waits for an answer to that very ticket
    rank 0          draws the name; answers every ticket it finds, new ones in place of old ones too
    a rank r > 0    counts itself under the name: rank 0 looks for new tickets until all are counted
"""

import os
import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

_PREFIX = "lightning_megatron/attempt"
_POLL_SECONDS = 0.02
# A look at the tickets reads all of them: of thousands of ranks rather every few seconds.
_POLL_SECONDS_A_RANK = 2e-4


def attempt_store(rank: int, num_ranks: int, timeout: timedelta) -> Store | None:
    """The store of this attempt; None where torch makes a new one by itself. Collective over all ranks."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True) or dist.is_initialized():
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timeout)
    name = _answered(store, num_ranks, timeout) if rank == 0 else _asked(store, rank, timeout)
    return PrefixStore(f"{_PREFIX} {name}", store)


def _answered(store: Store, num_ranks: int, timeout: timedelta) -> str:
    """The name that this rank, the first, has drawn, once all others know it."""
    name = uuid4().hex
    tickets = [_ticket_key(rank) for rank in range(1, num_ranks)]
    answered: set[bytes] = set()
    until_seconds = time.monotonic() + timeout.total_seconds()
    store.wait(tickets, timeout)
    while store.add(f"{_PREFIX} {name} known", 0) < num_ranks - 1:
        for ticket in set(store.multi_get(tickets)) - answered:
            answered.add(ticket)
            store.set(_answer_key(ticket.decode()), name)
        if time.monotonic() > until_seconds:
            raise RuntimeError(
                f"not all {num_ranks} ranks have come within {timeout.total_seconds():g} s (timeout_seconds): see why "
                "a process has not started, or raise timeout_seconds"
            )
        time.sleep(max(_POLL_SECONDS, num_ranks * _POLL_SECONDS_A_RANK))
    return name


def _asked(store: Store, rank: int, timeout: timedelta) -> str:
    """The name that the first rank answers."""
    ticket = uuid4().hex
    store.set(_ticket_key(rank), ticket)
    store.wait([_answer_key(ticket)], timeout)
    name = store.get(_answer_key(ticket)).decode()
    store.add(f"{_PREFIX} {name} known", 1)
    return name


def _ticket_key(rank: int) -> str:
    return f"{_PREFIX} ticket of rank {rank}"


def _answer_key(ticket: str) -> str:
    return f"{_PREFIX} answer to {ticket}"
