"""Ranks as threads of one process: a step of a layer or of a schedule on N ranks in milliseconds.

`run_on_threads(4, fn)` calls `fn(world)` in four threads. `world` is a `ThreadGroup`, a process group that every
`torch.distributed` function takes as `group=`; no default group is needed. It is stricter than gloo and than NCCL:

- Collectives must agree in order, kind, operation, shapes and dtypes.
- A result lands when its work is waited for, not before; a work that nobody waits for is an error.
- Send and receive meet: neither ends before the other is posted, tags are refused, shapes and dtypes must agree.
  What one rank posts to one peer is taken in order, both directions together, except inside one `batch_isend_irecv`.
  Gloo forgives a wrong order there; NCCL hangs.
- When no rank can go on, all end at once with a list of what each waits for.

The ranks share one default random generator: draw before the threads start, or from a `torch.Generator` of your own.
"""

import functools
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.board import Board, DeadlockError, Key, Message, MismatchError, Pending, RankEnded, described

__all__ = ["DeadlockError", "MismatchError", "RankEnded", "ThreadGroup", "new_group", "run_on_threads"]

# How long a rank may wait for one that is computing. A circle of ranks that wait for each other is found at once.
LIMIT_SECONDS = 120.0
# How long the others may take to end once one has failed.
GRACE_SECONDS = 5.0

REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


class ThreadGroup(dist.ProcessGroup):
    """One rank's handle of a group of threads; goes wherever a process group goes.

    `rank()` and `size()` are within the group; `global_rank` and `ranks` count in the whole run.
    """

    def __init__(self, board: Board, ranks: tuple[int, ...], global_rank: int) -> None:
        super().__init__(ranks.index(global_rank), len(ranks))  # type: ignore[call-arg,arg-type]
        self.board, self.ranks, self.global_rank = board, ranks, global_rank
        nth = board.num_made.get((global_rank, ranks), 0)
        board.num_made[global_rank, ranks] = nth + 1
        self.key: Key = (ranks, nth)
        self.num_collectives = 0
        # Note: P2POp and src= or dst= translate ranks through this table of torch; it is the only thing registered.
        dist.distributed_c10d._world.pg_group_ranks[self] = {rank: i for i, rank in enumerate(ranks)}

    def subgroup(self, ranks: Sequence[int]) -> "ThreadGroup | None":
        """This thread's handle of a group of these global ranks, or None where it is not among them."""
        if self.global_rank not in ranks:
            return None
        if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(self.board.num_ranks)):
            raise ValueError(f"ranks {list(ranks)} must be different ones of 0 to {self.board.num_ranks - 1}")
        return ThreadGroup(self.board, tuple(ranks), self.global_rank)

    def __repr__(self) -> str:
        return f"ThreadGroup(ranks={list(self.ranks)}, global_rank={self.global_rank})"

    # torch calls the collectives by the names below; the aliases are the spellings before 2.13.
    def allreduce(self, tensors: list[Tensor], opts: Any) -> Pending:  # type: ignore[override]
        check_contiguous(*tensors)
        op = opts.reduceOp.op

        def compute(inputs: list[Sequence[Tensor]], _: list[Any]) -> list[list[Tensor]]:
            sums = [reduced(list(parts), op) for parts in zip(*inputs, strict=True)]
            return [[value.clone() for value in sums] for _ in inputs]

        says = f"all_reduce({op.name}, {described(*tensors)})"
        return self.board.meet(self, says, tensors, tensors, compute)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Pending:  # type: ignore[override]
        check_contiguous(*tensors)
        root: int = opts.rootRank

        def compute(inputs: list[Sequence[Tensor]], _: list[Any]) -> list[list[Tensor]]:
            return [[tensor.clone() for tensor in inputs[root]] for _ in inputs]

        says = f"broadcast(from rank {self.ranks[root]}, {described(*tensors)})"
        return self.board.meet(self, says, tensors, tensors, compute)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Pending:
        check_contiguous(output, input)
        check_sizes("all_gather", output, whole=output, part=input, num_parts=self.size())

        def compute(inputs: list[Sequence[Tensor]], _: list[Any]) -> list[list[Tensor]]:
            return [[torch.cat([part[0].reshape(-1) for part in inputs])] for _ in inputs]

        return self.board.meet(self, f"all_gather_single({described(input)})", [input], [output], compute)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Pending:  # type: ignore[override]
        check_contiguous(*outputs[0], *inputs)
        if len(outputs[0]) != self.size() or any(each.shape != inputs[0].shape for each in outputs[0]):
            raise MismatchError(f"all_gather of {described(inputs[0])} into [{described(*outputs[0])}]")

        def compute(inputs: list[Sequence[Tensor]], _: list[Any]) -> list[list[Tensor]]:
            return [[part[0].clone() for part in inputs] for _ in inputs]

        return self.board.meet(self, f"all_gather({described(*inputs)})", inputs, outputs[0], compute)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Pending:
        check_contiguous(output, input)
        check_sizes("reduce_scatter", output, whole=input, part=output, num_parts=self.size())
        op = opts.reduceOp.op

        def compute(inputs: list[Sequence[Tensor]], _: list[Any]) -> list[list[Tensor]]:
            total = reduced([part[0].reshape(-1) for part in inputs], op)
            return [[piece.clone()] for piece in total.chunk(len(inputs))]

        says = f"reduce_scatter_single({op.name}, {described(input)})"
        return self.board.meet(self, says, [input], [output], compute)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Pending:  # type: ignore[override]
        check_contiguous(*outputs, *inputs[0])
        if len(inputs[0]) != self.size() or inputs[0][self.rank()].shape != outputs[0].shape:
            raise MismatchError(f"reduce_scatter of [{described(*inputs[0])}] into {described(*outputs)}")
        op = opts.reduceOp.op

        def compute(inputs: list[Sequence[Tensor]], _: list[Any]) -> list[list[Tensor]]:
            return [[reduced(list(parts), op)] for parts in zip(*inputs, strict=True)]

        says = f"reduce_scatter({op.name}, {described(*inputs[0])})"
        return self.board.meet(self, says, inputs[0], outputs, compute)

    def all_to_all_single(  # type: ignore[override]
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Pending:
        check_contiguous(output, input)
        takes = check_splits(output, output_splits, self.size())
        gives = check_splits(input, input_splits, self.size())

        def compute(inputs: list[Sequence[Tensor]], splits: list[Any]) -> list[list[Tensor]]:
            for source, (given, _) in enumerate(splits):
                for target, (_, taken) in enumerate(splits):
                    if given[target] != taken[source]:
                        raise MismatchError(
                            f"rank {self.ranks[source]} gives {given[target]} rows to rank {self.ranks[target]}, "
                            f"which takes {taken[source]}"
                        )
            pieces = [part[0].split(given) for part, (given, _) in zip(inputs, splits, strict=True)]
            return [[torch.cat([piece[target] for piece in pieces])] for target in range(len(inputs))]

        rows = f"{str(input.dtype).removeprefix('torch.')} rows of {list(input.shape[1:])}"
        says = f"all_to_all_single({rows})"
        return self.board.meet(self, says, [input], [output], compute, extra=(gives, takes))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Pending:  # type: ignore[override]
        check_contiguous(*outputs, *inputs)

        def compute(inputs: list[Sequence[Tensor]], outputs: list[Any]) -> list[list[Tensor]]:
            for source, given in enumerate(inputs):
                for target, taken in enumerate(outputs):
                    if given[target].shape != taken[source].shape:
                        raise MismatchError(
                            f"rank {self.ranks[source]} gives {described(given[target])} to rank "
                            f"{self.ranks[target]}, which takes {described(taken[source])}"
                        )
            return [[given[target].clone() for given in inputs] for target in range(len(inputs))]

        says = f"all_to_all({str(inputs[0].dtype).removeprefix('torch.')})"
        return self.board.meet(self, says, inputs, outputs, compute, extra=outputs)

    def barrier(self, opts: Any = None) -> Pending:  # type: ignore[override]
        return self.board.meet(self, "barrier", [], [], lambda inputs, _: [[] for _ in inputs])

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Pending:  # type: ignore[override]
        return self._post(True, tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Pending:  # type: ignore[override]
        return self._post(False, tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Pending:  # type: ignore[override]
        raise MismatchError("a receive must name its source: NCCL cannot receive from any rank")

    def _post(self, sends: bool, tensors: list[Tensor], group_peer: int, tag: int) -> Pending:
        (tensor,) = tensors
        check_contiguous(tensor)
        peer = self.ranks[group_peer]
        says = f"{'send' if sends else 'recv'} of {described(tensor)} {'to' if sends else 'from'} rank {peer}"
        if tag != 0:
            raise MismatchError(f"{says}: tag {tag} is not 0, and NCCL has no tags; order is all there is")
        if peer == self.global_rank:
            raise MismatchError(f"{says}: a rank cannot talk to itself")
        pending = Pending(self.board, self.global_rank, says, () if sends else (tensor,))
        pending.source = group_peer
        self.board.post(self, Message(sends, tensor, self.global_rank, peer, pending), batch_of_caller())
        return pending


def run_on_threads(
    num_ranks: int, fn: Callable[..., Any], *args: Any, limit_seconds: float = LIMIT_SECONDS
) -> list[Any]:
    """What `fn(world, *args)` returned on each rank; the first rank that failed raises its own error here."""
    board = Board(num_ranks, limit_seconds)
    results: list[Any] = [None] * num_ranks

    def live(rank: int) -> None:
        board.main_threads[rank] = threading.get_ident()
        HERE.world = world = ThreadGroup(board, tuple(range(num_ranks)), rank)
        try:
            results[rank] = fn(world, *args)
            forgotten = [pending.says for pending in board.posted[rank] if not pending.waited]
            if forgotten:
                raise RuntimeError(f"rank {rank} returned and never waited for: {'; '.join(forgotten)}")
        except BaseException as error:
            board.fail(rank, error)
        finally:
            board.finish(rank)

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    try:
        with board.changed:
            board.changed.wait_for(lambda: board.failure is not None or len(board.finished) == num_ranks)
        for thread in threads:
            thread.join(timeout=GRACE_SECONDS)
    finally:
        table = dist.distributed_c10d._world.pg_group_ranks
        for group in [group for group in table if isinstance(group, ThreadGroup) and group.board is board]:
            del table[group]
    if board.failure is not None:
        rank, error = board.failure
        error.add_note(f"raised on rank {rank} of {num_ranks}")
        raise error
    check_new_groups(board.new_groups)
    return results


def check_new_groups(made: list[list[tuple[int, ...]]]) -> None:
    """Raises unless any two ranks made the groups that hold both in the same order."""
    for one, two in itertools.combinations(range(len(made)), 2):
        first, second = ([group for group in made[rank] if {one, two} <= set(group)] for rank in (one, two))
        if first != second:
            raise MismatchError(
                "the members of a group must all make it, and in the same order:\n"
                f"  rank {one}: {first}\n  rank {two}: {second}"
            )


HERE = threading.local()


def new_group(ranks: Sequence[int]) -> ThreadGroup | None:
    """The calling rank's handle of a new group of these global ranks, or None where it is not among them.

    As with torch's own, all its members must call it, in the same order; the end of the run checks that.
    """
    world: ThreadGroup = HERE.world
    world.board.new_groups[world.global_rank].append(tuple(ranks))
    return world.subgroup(ranks)


def reduced(parts: list[Tensor], op: Any) -> Tensor:
    """The parts reduced in rank order, rounded after each as a ring does."""
    if op not in REDUCTIONS:
        raise MismatchError(f"reduction {op.name} is none of {', '.join(known.name for known in REDUCTIONS)}")
    total = functools.reduce(REDUCTIONS[op], parts)
    return total / len(parts) if op == dist.ReduceOp.AVG else total


def check_contiguous(*tensors: Tensor) -> None:
    """Raises for what NCCL does not take, or takes as something else."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise MismatchError(f"{described(tensor)} with strides {tensor.stride()} must be contiguous")


def check_sizes(kind: str, output: Tensor, *, whole: Tensor, part: Tensor, num_parts: int) -> None:
    """Raises unless the whole has the elements and the dtype of that many parts."""
    if whole.numel() != num_parts * part.numel() or whole.dtype != part.dtype:
        raise MismatchError(f"{kind} on {num_parts} ranks: whole {described(whole)}, part {described(part)}")


def check_splits(tensor: Tensor, splits: list[int], num_parts: int) -> list[int]:
    """Rows for each rank, even where no splits are given."""
    rows = tensor.shape[0]
    sizes = list(splits) or [rows // num_parts] * num_parts
    if sum(sizes) != rows or len(sizes) != num_parts:
        raise MismatchError(f"all_to_all on {num_parts} ranks: splits {sizes} of {described(tensor)}")
    return sizes


BATCH_CODE = inspect.unwrap(dist.batch_isend_irecv).__code__


def batch_of_caller() -> list[Any] | None:
    """The list given to the `batch_isend_irecv` that this send or receive is part of, if any."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is BATCH_CODE:
            batch: list[Any] = frame.f_locals["p2p_op_list"]
            return batch
        frame = frame.f_back  # type: ignore[assignment]
    return None
