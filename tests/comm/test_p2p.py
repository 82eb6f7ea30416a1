"""Messages between neighbours arrive complete, in order, whatever their shapes, and both ways at once."""

import re
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_megatron.comm.p2p import Hop, LaneGroups, Mailbox, Payload, TensorMeta, build_lanes, connect_lanes
from lightning_megatron.mesh import Axis, Sizes
from tests.harness.ranks import run_on_ranks
from tests.harness.threads import DeadlockError, ThreadGroup, new_group, run_on_threads
from tests.pipeline.meshes import make_mesh
from tests.pipeline.meshes import new_group as new_gloo_group
from tests.pipeline.threads import hops_of, make_thread_mailbox

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
SHAPES: list[tuple[int, ...]] = [(3,), (2, 3), (), (0, 4), (1, 2, 1, 2, 1, 2, 1), (5, 1), (7,)]
BOTH_WAYS: list[Hop] = [(0, 1), (1, 0)]


def message(dtype: torch.dtype, shape: tuple[int, ...], salt: int) -> Tensor:
    numel = torch.Size(shape).numel()
    return ((torch.arange(numel) + salt) % 5).to(dtype).reshape(shape)


def require_same(got: Payload, wanted: Payload) -> None:
    assert isinstance(got, dict) == isinstance(wanted, dict)
    ours, theirs = (each if isinstance(each, dict) else {"": each} for each in (got, wanted))
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype is theirs[name].dtype and tensor.shape == theirs[name].shape
        assert torch.equal(tensor, theirs[name])


def pair(world: ThreadGroup) -> tuple[Mailbox, int]:
    """This thread's mailbox, with lanes both ways between two ranks, and the other rank."""
    axis = Axis("pp", 2, world.global_rank, (0, 1))
    return make_thread_mailbox(axis, BOTH_WAYS), 1 - world.global_rank


def all_kinds(salt: int) -> list[Payload]:
    singles: list[Payload] = [message(dtype, shape, salt) for dtype in DTYPES for shape in SHAPES]
    # What is not contiguous arrives as it reads.
    turned = [torch.arange(6.0).view(2, 3).T + salt, torch.arange(8)[::2] + salt, torch.ones(1).expand(4) * salt]
    dicts: list[Payload] = [
        {str(shape): message(dtype, shape, salt) for shape in SHAPES for dtype in (DTYPES[i], DTYPES[-1 - i])}
        for i in range(len(DTYPES))
    ]
    mixed: Payload = {f"{dtype} ä": message(dtype, (3, i), salt) for i, dtype in enumerate(DTYPES)}
    return [*singles, *turned, *dicts, mixed]


def there_and_back(mailbox: Mailbox, own_rank: int, num_runs: int) -> int:
    """Every kind of payload from both ends at once, one after another and all posted at once; shapes known and not."""
    peer = 1 - own_rank
    own, theirs = all_kinds(own_rank), all_kinds(peer)
    for _ in range(num_runs):
        for i in range(len(own)):
            mailbox.receive_forward(("F", i), peer)
            mailbox.receive_backward(("B", i), peer, TensorMeta.of(theirs[i]))
            mailbox.send_forward(i, peer, own[i])
            mailbox.send_backward(-1 - i, peer, own[i])
        for i, wanted in enumerate(theirs):
            require_same(mailbox.wait(("F", i)), wanted)
            require_same(mailbox.wait(("B", i)), wanted)
        mailbox.finish()
        for i, wanted in enumerate(theirs):
            # Each alone in its run: the same shape is expected the second time.
            for _ in range(2):
                mailbox.receive_forward(i, peer)
                mailbox.send_forward("mine", peer, own[i])
                require_same(mailbox.wait(i), wanted)
                mailbox.finish()
    return len(own)


def exchange_on_threads(world: ThreadGroup) -> int:
    return there_and_back(pair(world)[0], world.global_rank, 2)


def exchange_on_ranks() -> int:
    pp = make_mesh(Sizes(world=2, pp=2)).pp
    return there_and_back(Mailbox(pp, build_lanes(pp, BOTH_WAYS, new_gloo_group, new_gloo_group), CPU), pp.rank, 1)


def test_every_dtype_and_shape_arrives_alone_and_in_a_dict() -> None:
    assert run_on_threads(2, exchange_on_threads) == [len(all_kinds(0))] * 2
    assert run_on_ranks(2, exchange_on_ranks) == [len(all_kinds(0))] * 2


# -- expected shapes


def num_posted(world: ThreadGroup) -> int:
    return len(world.board.posted[world.global_rank])


def forward_run(
    world: ThreadGroup, mailbox: Mailbox, shapes: list[Any], order: list[int] | None = None
) -> tuple[int, int]:
    """Messages of these shapes from rank 0 to rank 1, all receives posted first, waited for in this order.

    How many messages over a lane one forward message took, and how many of them were posted before its header came.
    """
    before = num_posted(world)
    payloads = [torch.arange(float(torch.Size(shape).numel())).reshape(shape) + i for i, shape in enumerate(shapes)]
    if world.global_rank == 0:
        for i, payload in enumerate(payloads):
            mailbox.send_forward(i, 1, payload)
        posted = num_posted(world)
    else:
        for i in range(len(shapes)):
            mailbox.receive_forward(i, 0)
        posted = num_posted(world)
        for i in order or range(len(shapes)):
            require_same(mailbox.wait(i), payloads[i])
    mailbox.finish()
    return num_posted(world) - before, posted - before


def runs_of_shapes(world: ThreadGroup, runs: list[list[Any]], order: list[int] | None) -> list[tuple[int, int]]:
    mailbox, _ = pair(world)
    return [forward_run(world, mailbox, shapes, order) for shapes in runs]


def test_a_shape_seen_in_the_last_run_is_received_before_its_header_is_read() -> None:
    a, b = (2, 3), (4,)
    runs = [[a] * 3, [a] * 3, [b] * 3, [b] * 2, [a, b], [a] * 2, [a] * 2]
    sent, received = run_on_threads(2, runs_of_shapes, runs, None)
    # In all, and posted before the first wait: a header each at first, with a payload when the shape is known.
    assert received[0] == (6, 3)
    assert received[1] == (6, 6)
    # Another one: a filler in its place, and the message after its header.
    assert received[2] == (9, 6)
    assert received[3] == (4, 4)
    assert received[4] == (5, 4)
    # After two shapes in one run neither is expected; after a run of one shape that is.
    assert received[5] == (4, 2)
    assert received[6] == (4, 4)
    assert [count for count, _ in sent] == [count for count, _ in received]


@pytest.mark.parametrize("order", [None, [3, 0, 5, 1, 2, 4]])
def test_unexpected_shapes_between_expected_ones_arrive_whatever_the_order_of_the_waits(
    order: list[int] | None,
) -> None:
    a, b, c = (2, 3), (4,), (0, 2)
    runs = [[a] * 6, [a, b, a, a, c, a], [c, c, b, a, b, c], [a] * 6, [a] * 6, [b, a, a, a, a, b]]
    _, received = run_on_threads(2, runs_of_shapes, runs, order)
    assert [count for count, _ in received] == [12, 14, 12, 12, 12, 14]


@settings(max_examples=40, deadline=None)
@given(
    runs=st.lists(st.lists(st.sampled_from([(2,), (3,), (3, 1)]), min_size=1, max_size=4), min_size=1, max_size=6),
)
def test_runs_of_any_shapes_arrive(runs: list[list[Any]]) -> None:
    run_on_threads(2, runs_of_shapes, runs, None)


def a_run_without_messages(world: ThreadGroup) -> tuple[int, int]:
    mailbox, _ = pair(world)
    forward_run(world, mailbox, [(2,)])
    mailbox.finish()
    return forward_run(world, mailbox, [(2,)])


def test_a_run_without_messages_leaves_the_expectation() -> None:
    assert run_on_threads(2, a_run_without_messages)[1] == (2, 2)


# -- the life of a message


class Turns:
    """Lets a thread wait until another has come to a point."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.may_receive = threading.Event()


def overwrites(world: ThreadGroup, turns: Turns, is_after_release: bool) -> float:
    mailbox, peer = pair(world)
    if world.global_rank == 1:
        assert turns.may_receive.wait(60)
        # Long enough for rank 0 to go on, had its release not waited.
        time.sleep(0.05)
        mailbox.receive_forward("m", peer)
        got = mailbox.wait("m")
        mailbox.finish()
        assert isinstance(got, Tensor)
        return got[0].item()
    tensor = torch.ones(3)
    mailbox.send_forward("m", peer, tensor)
    turns.may_receive.set()
    if is_after_release:
        mailbox.release("m")
    tensor.fill_(-1)
    mailbox.finish()
    return 0.0


def test_a_sent_tensor_may_be_overwritten_once_it_is_released_and_not_before() -> None:
    assert run_on_threads(2, overwrites, Turns(), True)[1] == 1
    assert run_on_threads(2, overwrites, Turns(), False)[1] == -1


def holds(world: ThreadGroup, kind: str) -> list[bool]:
    """Whether a tensor is alive after its send, after its release or the finish."""
    mailbox, peer = pair(world)
    if world.global_rank == 1:
        mailbox.receive_forward("f", peer)
        mailbox.wait("f")
        mailbox.receive_backward("b", peer, TensorMeta.of(torch.ones(4)))
        mailbox.wait("b")
        mailbox.finish()
        return []
    alive = []
    sends = {"f": mailbox.send_forward, "b": mailbox.send_backward}
    tensors = {key: torch.ones(4) for key in sends}
    references = [weakref.ref(tensor) for tensor in tensors.values()]
    for key, send in sends.items():
        send(key, peer, tensors[key])
    alive.append(len(mailbox._sending) == 2)
    tensors.clear()
    if kind == "release":
        mailbox.release("f")
        mailbox.release("b")
    else:
        mailbox.finish()
    alive.append(bool(mailbox._sending) or any(ref() is not None for ref in references))
    mailbox.finish()
    return alive


@pytest.mark.parametrize("kind", ["release", "finish"])
def test_a_message_is_held_until_its_release_or_the_finish(kind: str) -> None:
    assert run_on_threads(2, holds, kind)[0] == [True, False]


def leftovers(world: ThreadGroup) -> list[str]:
    mailbox, peer = pair(world)
    for shapes in ([(2,)], [(2,)], [(3,), (2,), (3,)], [(2,), (2,)]):
        forward_run(world, mailbox, shapes)
    like = TensorMeta.of(torch.ones(2))
    mailbox.receive_backward("g", peer, like)
    mailbox.send_backward("s", peer, torch.ones(2))
    mailbox.wait("g")
    mailbox.finish()
    left = [name for name in ("_sending", "_incoming", "_gradients", "_fillers") if vars(mailbox)[name]]
    return left + [f"{hop} {state}" for hop, state in mailbox._hops.items() if state.unread or state.seen]


def test_a_finish_leaves_nothing() -> None:
    assert run_on_threads(2, leftovers) == [[], []]


def forgets_a_wait(world: ThreadGroup, lane: str) -> None:
    mailbox, peer = pair(world)
    if world.global_rank == 0:
        mailbox.send_forward("m", peer, torch.ones(2))
        mailbox.send_backward("g", peer, torch.ones(2))
    elif lane == "forward":
        mailbox.receive_backward("g", peer, TensorMeta.of(torch.ones(2)))
        mailbox.wait("g")
        mailbox.receive_forward("m", peer)
    else:
        mailbox.receive_forward("m", peer)
        mailbox.wait("m")
        mailbox.receive_backward("g", peer, TensorMeta.of(torch.ones(2)))
    mailbox.finish()


@pytest.mark.parametrize("lane", ["forward", "backward"])
def test_a_finish_tells_of_a_receive_that_nobody_waited_for(lane: str) -> None:
    with pytest.raises(AssertionError, match="received and never waited for"):
        run_on_threads(2, forgets_a_wait, lane)


# -- lanes


def early_gradient(world: ThreadGroup, is_one_lane: bool) -> list[float]:
    """Rank 0 posts the receive of a gradient before it sends what the gradient is of."""
    axis = Axis("pp", 2, world.global_rank, (0, 1))
    lanes = build_lanes(axis, [(0, 1)], new_group, new_group)
    if is_one_lane:
        lanes = {hop: LaneGroups(*[groups.header] * 4) for hop, groups in lanes.items()}
    mailbox = Mailbox(axis, lanes, CPU)
    heard = []
    for i in range(3):
        if axis.rank == 0:
            mailbox.receive_backward("g", 1, TensorMeta.of(torch.ones(2)))
            mailbox.send_forward("x", 1, torch.full((2,), 1.0 + i))
            got = mailbox.wait("g")
        else:
            mailbox.receive_forward("x", 0)
            got = mailbox.wait("x")
            assert isinstance(got, Tensor)
            mailbox.send_backward("g", 0, -got)
        assert isinstance(got, Tensor)
        heard.append(got[0].item())
        mailbox.finish()
    return heard


def test_a_receive_posted_early_holds_up_no_other_lane() -> None:
    assert run_on_threads(2, early_gradient, False) == [[-1.0, -2.0, -3.0], [1.0, 2.0, 3.0]]
    with pytest.raises(DeadlockError):
        run_on_threads(2, early_gradient, True)


def along_a_line(world: ThreadGroup) -> list[float]:
    """Three stages, two messages a time in each direction, sent from tensors that are gone at once."""
    axis = Axis("pp", 3, world.global_rank, (0, 1, 2))
    mailbox = make_thread_mailbox(axis, [(0, 1), (1, 2)])
    before, after = axis.rank - 1, axis.rank + 1
    heard: list[float] = []
    for turn in range(20):
        keys = [("F", i) for i in range(2)] if before >= 0 else []
        for key in keys:
            mailbox.receive_forward(key, before)
        if after < 3:
            keys += [("B", i) for i in range(2)]
            for i in range(2):
                mailbox.receive_backward(("B", i), after, TensorMeta.of(torch.ones(1000)))
                mailbox.send_forward(i, after, torch.full((1000,), 100.0 * axis.rank + 10 * i + turn))
        if before >= 0:
            for i in range(2):
                mailbox.send_backward(-1 - i, before, torch.full((1000,), 100.0 * axis.rank + 10 * i + turn))
        # Takes up freed memory: a message still on its way must not be in it.
        torch.full((1000,), -1.0)
        landed = [mailbox.wait(key) for key in keys]
        assert all(isinstance(t, Tensor) and (t == t[0]).all() for t in landed)
        heard += [t[0].item() - turn for t in landed if isinstance(t, Tensor)]
        mailbox.finish()
    return heard


def test_messages_keep_their_order_and_their_content() -> None:
    by_rank = run_on_threads(3, along_a_line)
    assert by_rank[0] == [100.0, 110.0] * 20
    assert by_rank[1] == [0.0, 10.0, 200.0, 210.0] * 20
    assert by_rank[2] == [100.0, 110.0] * 20


@pytest.mark.parametrize("pp", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(("chunks", "placement"), [(1, "loop"), (2, "loop"), (2, "v")])
def test_ranks_make_equally_many_groups_and_the_two_of_a_hop_theirs_at_the_same_turn(
    pp: int, chunks: int, placement: Any
) -> None:
    sizes = Sizes(world=pp, pp=pp, vp=chunks, placement=placement)
    pairs = hops_of(sizes)
    made: list[list[tuple[int, ...]]] = []
    for rank in range(pp):
        groups: list[tuple[int, ...]] = []
        # Global ranks run against the stages, and start anywhere.
        axis = Axis("pp", pp, rank, tuple(range(10 + pp, 10, -1)))
        lanes = build_lanes(axis, pairs, groups.append, groups.append)  # type: ignore[arg-type]
        assert set(lanes) == {hop for hop in pairs if rank in hop}
        made.append(groups)
    assert len({len(groups) for groups in made}) == 1
    for one, two in pairs:
        members = tuple(sorted((10 + pp - one, 10 + pp - two)))
        turns = [[turn for turn, group in enumerate(made[rank]) if group == members] for rank in (one, two)]
        assert turns[0] == turns[1] and len(turns[0]) == 4 * ((one, two) in pairs) + 4 * ((two, one) in pairs)


def test_every_device_lane_is_connected_in_its_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(world=3, pp=3, vp=2)
    messages: dict[str, list[tuple[Any, int]]] = {"send": [], "recv": []}
    for rank in range(3):
        monkeypatch.setattr(dist, "send", lambda x, group, group_dst, own=rank: messages["send"].append((group, own)))
        monkeypatch.setattr(dist, "recv", lambda x, group, group_src, own=rank: messages["recv"].append((group, own)))
        names = ("header", "payload", "resent", "gradient")
        lanes = {hop: LaneGroups(*((name, hop) for name in names)) for hop in hops_of(sizes) if rank in hop}  # type: ignore[arg-type]
        connect_lanes(Axis("pp", 3, rank, (0, 1, 2)), lanes, CPU)
    forward = [((name, hop), hop) for hop in hops_of(sizes) for name in ("payload", "resent")]
    backward = [(("gradient", hop), hop[::-1]) for hop in hops_of(sizes)]
    wanted = [*forward, *backward]
    assert sorted(messages["send"]) == sorted((group, ends[0]) for group, ends in wanted)
    assert sorted(messages["recv"]) == sorted((group, ends[1]) for group, ends in wanted)


# -- what is refused


@pytest.mark.parametrize(
    ("payload", "error_message"),
    [
        (
            [torch.ones(2)],
            r"a stage hands list to the next; it may hand a tensor or a dict of named tensors, of torch\.fl",
        ),
        (None, "a stage hands NoneType to the next"),
        ({"x": torch.ones(2), "y": 3}, "a stage hands int under 'y' to the next"),
        ({"x": (torch.ones(2),)}, "a stage hands tuple under 'x' to the next"),
        ({0: torch.ones(2)}, "under 0 to the next"),
        (torch.zeros(2, dtype=torch.complex64), r"a stage hands a tensor of torch\.complex64 to the next"),
        ({"z": torch.zeros(2, dtype=torch.uint8)}, r"a stage hands a tensor of torch\.uint8 under 'z' to the next"),
        ({}, "hands an empty dict to the next; it must hand at least one tensor"),
    ],
)
def test_what_cannot_travel_is_refused(payload: Any, error_message: str) -> None:
    with pytest.raises(ValueError, match=error_message):
        TensorMeta.of(payload)


def sends_long_names(world: ThreadGroup) -> str:
    mailbox, peer = pair(world)
    error_message = ""
    for length in (20, 100):
        payload: Payload = {f"{i}".rjust(length): torch.ones(1) for i in range(10)}
        if world.global_rank == 1:
            if length == 20:
                mailbox.receive_forward("m", peer)
                require_same(mailbox.wait("m"), payload)
        else:
            try:
                mailbox.send_forward("m", peer, payload)
            except ValueError as error:
                error_message = str(error)
        # Of what was refused nothing was sent.
        mailbox.finish()
    return error_message


def test_names_that_a_header_cannot_hold_are_refused_before_anything_is_sent() -> None:
    error_message, _ = run_on_threads(2, sends_long_names)
    taken = re.match(
        r"the names and shapes of what a stage hands to the next take (\d+) bytes; they may take 1024", error_message
    )
    assert taken is not None and 1024 < int(taken[1]) < 2048


def test_of_what_goes_forward_only_floating_tensors_come_back() -> None:
    x, n = torch.ones(2, 3), torch.ones(4, dtype=torch.int64)
    assert TensorMeta.of({"x": x, "n": n}).of_gradient() == TensorMeta.of({"x": x})
    assert TensorMeta.of(x).of_gradient() == TensorMeta.of(x)


def test_a_single_tensor_is_sent_from_where_it_lies() -> None:
    x = torch.ones(2, 3)
    assert TensorMeta.of(x).pack(x).data_ptr() == x.data_ptr()
    assert TensorMeta.of(x.T).pack(x.T).is_contiguous()
