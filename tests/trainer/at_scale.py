"""What a run says over host memory, and how many sockets it has open, with up to 16,384 ranks that nobody starts.

    python -m tests.trainer.at_scale [--write docs/at_scale.md]

Real code on imagined ranks. The groups over host memory are those that the code asks for on each rank; what a group
of gloo costs is measured by making one of each size over a store that counts. What is said is written down in a run of
four real ranks; each collective is then run on every imagined rank, over families whose messages are put down.
"""

import argparse
import pickle
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.comm.p2p import build_lanes
from lightning_megatron.comm.tree_axis import FAN_OUT, TreeAxis, tree_over
from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.pipeline.lower import hops
from lightning_megatron.trainer.setup import attempt_store
from tests.harness.counting_store import CountingStore, gloo_cost
from tests.harness.ranks import run_on_ranks
from tests.trainer.recorded_calls import PHASES, Call, record

LAYOUTS = (
    Sizes(world=8, tp=8),
    Sizes(world=1_024, tp=8, pp=8, vp=2),
    Sizes(world=16_384, tp=8, pp=16, vp=2),
)
# So often the first rank looks at the tickets of torchrun's ranks until all have theirs.
_NUM_LOOKS = 20
_TIMEOUT = timedelta(seconds=60)


@dataclass
class Traffic:
    """Bytes over host memory, and in how many rounds one after another."""

    all_bytes: int = 0
    most_bytes: int = 0
    """Of the rank that gets the most."""
    median_bytes: int = 0
    rounds: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.all_bytes + other.all_bytes,
            self.most_bytes + other.most_bytes,
            self.median_bytes + other.median_bytes,
            self.rounds + other.rounds,
        )


@dataclass
class Start:
    """What it takes to connect over host memory."""

    store_bytes: int = 0
    most_sockets: int = 0
    median_sockets: int = 0


# --- sockets and the store ------------------------------------------------------------------------------------------


def start_of(sizes: Sizes) -> Start:
    """Cost of the groups over host memory, of the failure watch and of an attempt's name."""
    store_bytes = attempt_bytes(sizes.world)
    sockets = []
    lanes = [_lanes_of(sizes, rank) for rank in range(0, sizes.world, sizes.world // sizes.pp)]
    world = tuple(range(sizes.world))
    for rank in world:
        # Those of a stage have equally many.
        families: list[tuple[int, ...]] = []
        tree = tree_over(Axis("world", sizes.world, rank, world), families.append)  # type: ignore[arg-type]
        # One tree of the main thread, and one for what is saved in the background.
        made = [*lanes[rank // (sizes.world // sizes.pp)], *families, *families]
        # As many bytes a rank as there are in its groups: each group is counted once.
        costs = [gloo_cost(len(ranks)) for ranks in made]
        store_bytes += round(sum(cost[0] / len(ranks) for cost, ranks in zip(costs, made, strict=True)))
        # Where the store is, and the watch: its own connection, those to its server, and where that listens.
        sockets.append(sum(cost[1] for cost in costs) + 1 + _watch_sockets(tree))
    return Start(store_bytes, max(sockets), sorted(sockets)[len(sockets) // 2])


def _lanes_of(sizes: Sizes, rank: int) -> list[tuple[int, ...]]:
    made: list[tuple[int, ...]] = []
    pp = Mesh.imagine(rank, sizes).pp
    pairs = hops(tuple(sizes.pp_rank_of(stage) for stage in range(sizes.num_stages)))
    build_lanes(pp, pairs, lambda ranks: None, made.append)  # type: ignore[arg-type]
    return made


def _watch_sockets(tree: Axis) -> int:
    below = tree.below if isinstance(tree, TreeAxis) else tree
    has_server = tree.is_first or (isinstance(tree, TreeAxis) and below.size > 1)
    return 1 + (below.size - (not tree.is_first) + 1 if has_server else 0)


class _Answering(CountingStore):
    """A store in which the first rank answers each ticket as it is waited for, and has come to know all at its last
    look."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.num_ranks, self.num_looks = num_ranks, 0

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        before = self.num_bytes
        for key in keys:
            if "answer to" in key:
                self.set(key, "0" * 32)
        self.num_bytes = before
        super().wait(keys, timeout)

    def add(self, key: str, amount: int) -> int:
        known = super().add(key, amount)
        if amount == 0:
            self.num_looks += 1
            known = self.num_ranks - 1 if self.num_looks > _NUM_LOOKS else 0
        return known


def attempt_bytes(num_ranks: int) -> int:
    """Through torchrun's store, for the name of an attempt."""
    store = _Answering(num_ranks)
    for rank in range(1, num_ranks):
        attempt_store._asked(store, rank, _TIMEOUT)
    with mock.patch.object(attempt_store.time, "sleep"):
        attempt_store._answered(store, num_ranks, _TIMEOUT)
    return store.num_bytes


# --- what is said ---------------------------------------------------------------------------------------------------


class _NotThere(Exception):
    """A message that this rank waits for has not been put down yet."""


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


@dataclass
class _Messages:
    """Messages of all ranks, put down under their group, its how-manieth operation it is, and the rank in the group."""

    rank: int = 0
    put: dict[tuple[Any, int], dict[int, Any]] = field(default_factory=lambda: defaultdict(dict))
    # Of each rank: bytes that it got, and after how many rounds it is where it is.
    got_bytes: Counter[int] = field(default_factory=Counter)
    clocks: dict[tuple[Any, int], dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    clock: int = 0
    rounds: int = 0
    _turns: Counter[Any] = field(default_factory=Counter)
    _counted: set[tuple[Any, int]] = field(default_factory=set)

    def begin(self, rank: int) -> None:
        """The rank runs from its beginning; what it has put down and got before is not counted again."""
        self.rank, self.clock = rank, 0
        self._turns.clear()

    def say(self, group: tuple[Any, ...], value: Any) -> tuple[Any, int]:
        place = group, self._turns[group]
        self._turns[group] += 1
        self.put[place].setdefault(self.rank, value)
        self.clocks[place].setdefault(self.rank, self.clock)
        return place

    def hear(self, place: tuple[Any, int], ranks: Sequence[int], num_bytes: Callable[[list[Any]], int]) -> list[Any]:
        """What the ranks have said at a place."""
        put = self.put[place]
        if any(rank not in put for rank in ranks):
            raise _NotThere
        found = [put[rank] for rank in ranks]
        if (place, self.rank) not in self._counted:
            self._counted.add((place, self.rank))
            self.got_bytes[self.rank] += num_bytes(found)
        # Messages that are on their way at one time are one round.
        self.clock = max(self.clock, 1 + max(self.clocks[place][rank] for rank in ranks))
        self.rounds = max(self.rounds, self.clock)
        return found


def _length(value: Any) -> int:
    return len(value) if isinstance(value, bytes) else len(pickle.dumps(value))


@contextmanager
def _said_to(messages: _Messages) -> Iterator[None]:
    """Puts torch's collectives over single groups down as messages; a group is the tuple of its ranks."""

    def send(x: Tensor, group: tuple[int, ...], group_dst: int) -> None:
        messages.say((group, messages.rank, group[group_dst]), x)

    def recv(x: Tensor, group: tuple[int, ...], group_src: int) -> None:
        source = group[group_src]
        place = messages.say((group, source, messages.rank), None)
        x.copy_(messages.hear(place, [source], lambda values: values[0].nbytes)[0])

    def broadcast_object_list(box: list[Any], group: tuple[int, ...], group_src: int) -> None:
        source = group[group_src]
        place = messages.say(group, box[0])
        if messages.rank != source:
            [box[0]] = messages.hear(place, [source], lambda values: 8 + _length(values[0]))

    def all_reduce(x: Tensor, op: Any, group: tuple[int, ...], async_op: bool) -> dist.Work:
        place = messages.say(group, int(x))
        # What a child gets here does not count: it comes once more from the first rank.
        if messages.rank == group[0]:
            x.fill_(sum(messages.hear(place, group, lambda values: 8 * (len(values) - 1))))
        return _Done()

    def broadcast(x: Tensor, group: tuple[int, ...], group_src: int) -> None:
        place = messages.say(group, int(x))
        if messages.rank != group[group_src]:
            x.fill_(messages.hear(place, [group[group_src]], lambda values: 8)[0])

    def all_gather_single(gathered: Tensor, own: Tensor, group: tuple[int, ...]) -> None:
        place = messages.say(group, own.clone())
        rows = messages.hear(place, group, lambda values: sum(len(one) for one in values))
        gathered.copy_(torch.cat(rows))

    def all_gather_object(found: list[Any], value: Any, group: tuple[int, ...]) -> None:
        place = messages.say(group, value)
        found[:] = messages.hear(place, group, lambda values: len(values) * (8 + max(map(_length, values))))

    with (
        mock.patch.multiple(
            dist,
            send=send,
            recv=recv,
            broadcast_object_list=broadcast_object_list,
            all_reduce=all_reduce,
            broadcast=broadcast,
            all_gather_object=all_gather_object,
        ),
        mock.patch.multiple(
            collectives,
            _all_gather_single=all_gather_single,
            _get_object_coll_device=lambda group: torch.device("cpu"),
            _is_cpu_pair=lambda x, axis: False,
        ),
    ):
        yield


def traffic_of(call: Call, num_ranks: int) -> Traffic:
    """A collective over so many ranks, in which each of them gives as many bytes as the recorded one."""
    world = tuple(range(num_ranks))
    axes = [tree_over(Axis("world", num_ranks, rank, world), lambda ranks: ranks, FAN_OUT) for rank in world]  # type: ignore[arg-type,return-value]

    def own() -> bytes:
        # Each rank's is an object of its own, for pickle writes one object once.
        return bytes(call.given_bytes)

    result = bytes(call.got_bytes)
    parts = [bytes(call.got_bytes) for _ in world]
    programs: dict[str, Callable[[Axis], Any]] = {
        "all_reduce": lambda axis: collectives.all_reduce(torch.tensor(1), axis),
        "broadcast_object": lambda axis: collectives.broadcast_object(result if axis.is_first else None, axis),
        "merge_objects": lambda axis: collectives.merge_objects(own(), axis, lambda values: result),
        "gather_on_first": lambda axis: collectives.gather_on_first(own(), axis),
        "scatter_objects": lambda axis: collectives.scatter_objects(parts if axis.is_first else [], axis),
        "gather_objects": lambda axis: collectives.gather_objects(own(), axis),
        "barrier": lambda axis: collectives.barrier(axis),
    }
    messages, left = _Messages(), list(reversed(world))
    with _said_to(messages):
        while left:
            waiting = []
            for rank in left:
                messages.begin(rank)
                try:
                    programs[call.name](axes[rank])
                except _NotThere:
                    waiting.append(rank)
            # What goes up the tree is put down from the last rank on, what comes down from the first.
            left = waiting[::-1]
    got = sorted(messages.got_bytes[rank] for rank in world)
    return Traffic(sum(got), got[-1], got[len(got) // 2], messages.rounds)


def recorded(folder: Path) -> list[Call]:
    """The calls of a run over the whole world, with the bytes of the rank that gives and gets the most."""
    by_rank = run_on_ranks(4, record, folder, init=False, timeout=300)
    assert len({tuple((one.phase, one.name, one.is_on_host) for one in calls) for calls in by_rank}) == 1
    merged = []
    for calls in zip(*by_rank, strict=True):
        given = max(one.given_bytes for one in calls)
        # Of what is scattered each rank has its own part; of what is gathered only the first has all.
        got = max(one.got_bytes for one in calls)
        merged.append(replace(calls[0], given_bytes=given, got_bytes=got))
    return merged


def on_host(calls: Sequence[Call], sizes: Sizes) -> dict[str, Traffic]:
    """What is said over host memory in each phase."""
    known: dict[tuple[str, int, int], Traffic] = {}
    by_phase = {phase: Traffic() for phase in PHASES}
    for call in (one for one in calls if one.is_on_host and one.phase in by_phase):
        key = call.name, call.given_bytes, call.got_bytes
        if key not in known:
            known[key] = traffic_of(call, sizes.world)
        by_phase[call.phase] += known[key]
    return by_phase


# --- the page -------------------------------------------------------------------------------------------------------

_PAGE = """\
# At scale: what ranks say over host memory

Written by `python -m tests.trainer.at_scale --write docs/at_scale.md`, of real code on imagined ranks. The groups are
those that the code asks for on each of them, and a group of gloo of each size is really made over a store that counts.
What is said over the whole world is written down in a run of four real ranks (tp 2, distributed optimizer, a chain of a
dozen small layers), and each collective is then run on every imagined rank. NCCL's and torch's own start of NCCL are
not in it, nor are the tensors of training and the signs of life of the failure watch, some bytes to each neighbour in
30 s.

The world talks over host memory by a [tree](comm.md#the-world-over-host-memory): a rank is connected
with at most {fan_out} children, its parent and that one's other children, in each of two trees: one is for saves in the
background.

## To connect

Sockets of a rank: of the groups over host memory, of the failure watch and of the store, where they listen too. The
store itself has one connection of each rank. The first rank of an attempt under torchrun has looked for tickets
{looks} times.

| ranks | layout | sockets of a rank, median | most | MB through the store |
|---|---|---|---|---|
{connect}

## To talk

All over the world and over host memory, received; rounds come one after another. The first rank gets what all have
written, for the manifest, and plans who writes what once.

| ranks | phase | rounds | KB of a rank, median | of the rank that gets most | MB in all |
|---|---|---|---|---|---|
{talk}

## Over devices

Collectives over all devices in the same run, each with the bytes of a rank. None of them gathers objects.

| phase | collectives |
|---|---|
{devices}

## What is left

| what | grows with |
|---|---|
| `broadcast` of the manifest when a checkpoint is loaded, to each rank | the chunks of the checkpoint |
| the plan of a first save, on the first rank alone | the chunks of the checkpoint |
| documents under dynamic context parallelism: one group of gloo over dp x cp | dp x cp, on each rank |
| what user's hooks do to gradients is compared in each step (`HookCheck`), over devices | the world, 512 bytes a rank |
| numbers of batches at the start, shapes where experts gather all tokens, over devices | dp, 512 bytes a rank |
| a checkpoint that is one file: every rank knows whose boxes come | the chunks of the checkpoint |
"""


def page(calls: Sequence[Call], layouts: Sequence[Sizes] = LAYOUTS) -> str:
    """The page of the documentation."""
    connect, talk = [], []
    for sizes in layouts:
        start = start_of(sizes)
        connect.append(
            f"| {sizes.world:,} | tp {sizes.tp}, pp {sizes.pp}, vp {sizes.vp} | {start.median_sockets} | "
            f"{start.most_sockets} | {start.store_bytes / 1e6:.2f} |"
        )
        for phase, one in on_host(calls, sizes).items():
            talk.append(
                f"| {sizes.world:,} | {phase} | {one.rounds} | {one.median_bytes / 1e3:.1f} | "
                f"{one.most_bytes / 1e3:,.1f} | {one.all_bytes / 1e6:,.2f} |"
            )
    devices = []
    for phase in PHASES:
        found = Counter((one.name, one.given_bytes) for one in calls if one.phase == phase and not one.is_on_host)
        words = [
            f"{count} x `{name}` of {num_bytes}" for (name, num_bytes), count in found.items() if name != "barrier"
        ]
        barriers = sum(count for (name, _), count in found.items() if name == "barrier")
        words += [f"{barriers} x `barrier`"] if barriers else []
        devices.append(f"| {phase} | {', '.join(words) or 'none'} |")
    return _PAGE.format(
        fan_out=FAN_OUT,
        looks=_NUM_LOOKS,
        connect="\n".join(connect),
        talk="\n".join(talk),
        devices="\n".join(devices),
    )


def main() -> None:
    """Prints the page, or writes it."""
    parser = argparse.ArgumentParser(description="What ranks say over host memory, and the sockets that they have open")
    parser.add_argument("--write", type=Path, help="the file to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = page(recorded(Path(folder)))
    if options.write is None:
        print(text)
    else:
        options.write.write_text(text)


if __name__ == "__main__":
    main()
