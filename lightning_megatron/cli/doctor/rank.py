"""One rank of the doctor's ping, which is a process of its own: it joins the others, and all of them reduce tensors.

What it finds and how far it has come it leaves in a store, where the doctor reads it: a process that hangs in NCCL, or
is ended by it, says nothing else.

    key "stage 3"    what rank 3 had done when it was last heard of
    key "result 3"   how rank 3 ended: what it measured, or why it failed
    counters         "ended" and "failed", of ranks
"""

import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

ENDED, FAILED = "ended", "failed"
# What the sums of all elements are over up to 65,000 ranks is exact in float32.
_PERIOD, _RANKS_PERIOD = 251, 8
_ELEMENT_BYTES = 4
# The reductions of one size are repeated for so long at most.
_REPEAT_SECONDS = 0.5
_MOST_REPEATS = 20
_POLL_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class PingPlace:
    """Where a rank meets the others, and what it is to do."""

    address: str
    port: int
    name: str
    """The name of this ping in the store."""
    rank: int
    world: int
    local_rank: int
    backend: str
    sizes_bytes: Sequence[int]
    limit_seconds: float

    def store(self) -> Store:
        """The store at which ranks meet."""
        timeout = timedelta(seconds=self.limit_seconds)
        return PrefixStore(self.name, TCPStore(self.address, self.port, is_master=False, timeout=timeout))


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """An all-reduce of so many bytes, and the time that the slowest rank took."""

    size_bytes: int
    seconds: float
    num_repeats: int


@dataclass(frozen=True, kw_only=True)
class PingResult:
    """How a rank ended."""

    failure: str = ""
    """Why it failed; empty where it did not."""
    ended_seconds: float = 0.0
    """When, by the clock of its machine."""
    reductions: tuple[Reduction, ...] = ()


def stage_key(rank: int) -> str:
    """The key of what a rank has done."""
    return f"stage {rank}"


def result_key(rank: int) -> str:
    """The key of how a rank ended."""
    return f"result {rank}"


def leave_result(store: Store, rank: int, result: PingResult) -> None:
    """Writes how a rank ended, and counts it."""
    store.set(result_key(rank), json.dumps(asdict(result)))
    if result.failure:
        store.add(FAILED, 1)
    store.add(ENDED, 1)


def read_result(store: Store, rank: int) -> PingResult | None:
    """How a rank ended; None where it has not."""
    if not store.check([result_key(rank)]):
        return None
    record = json.loads(store.get(result_key(rank)))
    record["reductions"] = tuple(Reduction(**one) for one in record["reductions"])
    return PingResult(**record)


def run_rank(place: PingPlace) -> None:
    """Runs one rank, and leaves its result in the store."""
    store = place.store()
    _mark(store, place, "had started")
    reductions, failure = list[Reduction](), ""
    try:
        reductions = _reductions(place, store)
    except Exception as error:
        failure = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    leave_result(
        store,
        place.rank,
        PingResult(failure=failure, ended_seconds=time.time(), reductions=tuple(reductions)),
    )
    # It closes connections in which others wait: they fail by it, later than this rank did.
    if dist.is_initialized():
        dist.destroy_process_group()


def _reductions(place: PingPlace, store: Store) -> list[Reduction]:
    device = torch.device("cpu") if place.backend == "gloo" else torch.device("cuda", place.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        place.backend,
        store=PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=place.limit_seconds),
        # NCCL connects at once, and not in the first message.
        device_id=None if device.type == "cpu" else device,
    )
    _mark(store, place, f"had joined the group of {place.world}")
    found = []
    for size_bytes in (_ELEMENT_BYTES, *place.sizes_bytes):
        _check_sum(place, size_bytes, device)
        found.append(_timed(size_bytes, device))
        _mark(store, place, f"had reduced {size_bytes} bytes")
    # Who leaves earlier closes connections in which the others wait.
    store.add("done", 1)
    until_seconds = time.monotonic() + place.limit_seconds
    while store.add("done", 0) < place.world and time.monotonic() < until_seconds:
        time.sleep(_POLL_SECONDS)
    return found


def _mark(store: Store, place: PingPlace, stage: str) -> None:
    store.set(stage_key(place.rank), stage)


def _num_elements(size_bytes: int) -> int:
    return max(size_bytes // _ELEMENT_BYTES, 1)


def _check_sum(place: PingPlace, size_bytes: int, device: torch.device) -> None:
    """Reduces a tensor of which each rank knows the sum. Raises RuntimeError where it is another."""
    place_of_element = torch.arange(_num_elements(size_bytes), device=device) % _PERIOD
    x = (place_of_element + place.rank % _RANKS_PERIOD).float()
    dist.all_reduce(x)
    wanted = (place_of_element * place.world + sum(rank % _RANKS_PERIOD for rank in range(place.world))).float()
    if num_wrong := int((x != wanted).sum()):
        first = int((x != wanted).nonzero()[0])
        raise RuntimeError(
            f"the sum of {size_bytes} bytes over {place.world} ranks is wrong in {num_wrong} of {len(x)} elements: "
            f"element {first} is {x[first].item():g} and not {wanted[first].item():g}"
        )


def _timed(size_bytes: int, device: torch.device) -> Reduction:
    # The sum of zeros is zeros, however often.
    x = torch.zeros(_num_elements(size_bytes), device=device)
    num_repeats = max(1, min(_MOST_REPEATS, int(_REPEAT_SECONDS / _slowest_seconds(x, 1))))
    return Reduction(size_bytes=size_bytes, seconds=_slowest_seconds(x, num_repeats), num_repeats=num_repeats)


def _slowest_seconds(x: torch.Tensor, num_repeats: int) -> float:
    """Time of one reduction on the rank where it takes longest; every rank gets the same."""
    elapsed = torch.zeros(1, dtype=torch.float64, device=x.device)
    # All begin together.
    dist.all_reduce(elapsed)
    _finish(x.device)
    started_seconds = time.perf_counter()
    for _ in range(num_repeats):
        dist.all_reduce(x)
    _finish(x.device)
    elapsed += (time.perf_counter() - started_seconds) / num_repeats
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Runs the rank that the argument describes."""
    place = PingPlace(**json.loads(sys.argv[1]))
    # Nobody else would end it where the doctor is gone.
    signal.alarm(int(place.limit_seconds) + 10)
    torch.set_num_threads(1)
    run_rank(place)
