"""Messages between neighbours arrive whole, in order, whatever their shapes, and both ways at once."""

import pytest
import torch
from torch import Tensor

from lightning_megatron.comm.p2p import Mailbox, Receive, Send
from lightning_megatron.mesh import Axis, Sizes
from tests.harness.ranks import run_on_ranks
from tests.pipeline.meshes import make_mesh

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)


def message(dtype: torch.dtype, shape: tuple[int, ...], salt: int) -> Tensor:
    numbers = torch.arange(max(1, torch.Size(shape).numel())) + salt
    return (numbers % 5).to(dtype)[: torch.Size(shape).numel()].reshape(shape)


SHAPES: list[tuple[int, ...]] = [(3,), (2, 3), (), (0, 4), (1, 2, 1, 2, 1, 2), (5, 1), (7,)]


def there_and_back() -> int:
    """Each dtype and shape from both ends at once; the answers' shapes are known, and need no header."""
    pp = make_mesh(Sizes(world=2, pp=2)).pp
    mailbox = Mailbox(pp, CPU)
    peer = 1 - pp.rank
    count = 0
    for dtype, shape in zip(DTYPES, SHAPES, strict=True):
        own, theirs = message(dtype, shape, pp.rank), message(dtype, shape, peer)
        [landed] = mailbox.exchange([Send(peer, own, has_header=True)], [Receive(peer, None)])
        assert landed.dtype is dtype and landed.shape == theirs.shape and torch.equal(landed, theirs)
        like = (own.shape, own.dtype)
        [landed] = mailbox.exchange([Send(peer, own, has_header=False)], [Receive(peer, like)])
        assert torch.equal(landed, theirs)
        count += 1
    # What is not contiguous arrives as it reads.
    turned = torch.arange(6.0).view(2, 3).T
    [landed] = mailbox.exchange([Send(peer, turned, has_header=True)], [Receive(peer, None)])
    assert torch.equal(landed, turned)
    mailbox.finish()
    return count


def test_every_dtype_and_shape_arrives() -> None:
    assert run_on_ranks(2, there_and_back) == [len(DTYPES)] * 2


def along_a_line() -> list[float]:
    """Three stages, two messages a time in each direction, sent from buffers that are gone at once."""
    pp: Axis = make_mesh(Sizes(world=3, pp=3)).pp
    mailbox = Mailbox(pp, CPU)
    peers = [rank for rank in (pp.rank - 1, pp.rank + 1) if 0 <= rank < 3]
    heard: list[float] = []
    for turn in range(20):
        sends = [Send(p, torch.full((1000,), 100.0 * pp.rank + 10 * i + turn), True) for p in peers for i in range(2)]
        landed = mailbox.exchange(sends, [Receive(p, None) for p in peers for _ in range(2)])
        del sends
        # Reuses freed memory: a message still on its way must not be in it.
        torch.full((1000,), -1.0)
        assert all((t == t[0]).all() for t in landed)
        heard += [t[0].item() - turn for t in landed]
    mailbox.finish()
    return heard


def test_messages_keep_their_order_and_their_content() -> None:
    by_rank = run_on_ranks(3, along_a_line)
    # Stage s is on rank 2 - s.
    assert by_rank[2] == [100.0, 110.0] * 20
    assert by_rank[1] == [0.0, 10.0, 200.0, 210.0] * 20
    assert by_rank[0] == [100.0, 110.0] * 20


def refused(kind: str) -> str:
    pp = make_mesh(Sizes(world=2, pp=2)).pp
    bad = torch.zeros((1,) * 7) if kind == "dims" else torch.zeros(2, dtype=torch.complex64)
    try:
        Mailbox(pp, CPU).exchange([Send(1 - pp.rank, bad, has_header=True)], [])
    except ValueError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("kind", ["dims", "dtype"])
def test_what_a_header_cannot_tell_is_refused(kind: str) -> None:
    for told in run_on_ranks(2, refused, kind):
        assert "it may have up to 6 dims and be one of torch.float32" in told
