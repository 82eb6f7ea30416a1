"""The path of tokens to the ranks of their experts (dispatch) and back (combine), over ep and etp.

Every rank of ep x etp brings tokens of its own and holds E/ep experts, 1/etp of the features of each.

    AllToAll     dispatch   sort by expert; all-to-all over ep; all-gather over etp; sort the rows by expert
                 combine    the reverse; each rank adds up the rows of its tokens
    AllGather    dispatch   all-gather all tokens over etp and ep; take the rows of own experts
                 combine    add up the rows of each token; reduce-scatter over ep and etp
    Shared       dispatch   take the rows of own experts: all ranks of ep have the same tokens
                 combine    add up the rows of each token; all-reduce over ep

AllToAll moves the rows that are wanted; AllGather moves everything: it suits few ranks and many experts per token.
Both hand the same rows in the same order to the experts. A fused backend is a further value of `TokenDispatcher`.

How many rows go where is data, and a kernel's output needs its size: the host reads it once, in `on_host`. It need not
where every expert's rows are padded to a capacity, and where a rank that has all experts knows how many rows its tokens
make together: then only a GEMM that loops over experts reads how many each has.

T tokens of this rank, K experts of each token, H hidden, E experts, L own experts, P ranks of ep, Q ranks of etp,
R rows.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lightning_megatron.comm import collectives, differentiable
from lightning_megatron.comm.async_collectives import (
    AsyncTensor,
    YieldToPeer,
    all_gather_v,
    all_to_all_v,
    no_op,
    reduce_scatter_v,
    start,
)
from lightning_megatron.mesh import Axis
from lightning_megatron.moe.experts import DispatchedTokens, Experts
from lightning_megatron.moe.grouped_gemm import ExpertGroups
from lightning_megatron.moe.permute import Permutation, permute, regrouped, sort_by_expert, unpermute
from lightning_megatron.tensor.linear import as_gemm_input

ReadCounts = Callable[[Tensor, torch.Size], Tensor]
"""Copies counts by expert [..., E] from the device to the host, given the shape [T, K] of the choices of a rank."""


class DispatchWork(Protocol):
    """A dispatch in flight. Call `wait`, then `combine`, once each; compute other things before `wait`."""

    def wait(self) -> DispatchedTokens:
        """The rows for this rank's experts, once they have arrived."""
        ...

    def combine(self, rows_RH: Tensor) -> Tensor:
        """For each token of this rank the sum of its experts' outputs, [T, H]; the rows come in the order of `wait`."""
        ...


class TokenDispatcher:
    """Sends tokens to the ranks of their experts, of which there are `num_experts`, and their outputs back."""

    def __init__(self, num_experts: int, *, ep: Axis, etp: Axis) -> None:
        self.num_experts, self.ep, self.etp = num_experts, ep, etp
        self.yield_to_peer: YieldToPeer = no_op
        """Called before each wait for a message."""
        self.read: ReadCounts = on_host
        """Brings numbers of tokens to the host."""

    def dispatch(
        self,
        hidden_TH: Tensor,
        expert_ids_TK: Tensor,
        probs_TK: Tensor,
        capacity: int | None = None,
        num_rows: int | None = None,
    ) -> DispatchWork:
        """Starts to send each token to its experts; the expert -1 is none.

        With a capacity every expert gets so many rows of each rank, zeros after those of tokens; no expert may have
        more tokens than that, and all ranks pass the same capacity. `num_rows` is how many of this rank's choices are
        experts, where the host knows it.
        """
        raise NotImplementedError

    def _groups(self, counts_L: Tensor, shape_TK: torch.Size, num_rows: int | None) -> ExpertGroups:
        """Groups of rows by expert; read at once, unless this rank has all experts and the number of rows is known."""

        def read() -> tuple[int, ...]:
            return tuple(self.read(counts_L, shape_TK).tolist())

        if num_rows is None or self.ep.size * self.etp.size > 1:
            return ExpertGroups.known(read(), counts_L)
        return ExpertGroups(num_rows, counts_L, read)


class AllToAllTokenDispatcher(TokenDispatcher):
    """Sends each token to the ranks of its experts alone. Ranks may have different numbers of tokens, or none."""

    def dispatch(
        self,
        hidden_TH: Tensor,
        expert_ids_TK: Tensor,
        probs_TK: Tensor,
        capacity: int | None = None,
        num_rows: int | None = None,
    ) -> DispatchWork:
        by_expert = sort_by_expert(expert_ids_TK, self.num_experts)
        by_rank, shape_TK = (self.ep.size, self.num_experts // self.ep.size), expert_ids_TK.shape
        if capacity is None:
            counts_QE = collectives.all_gather(by_expert.counts_E[None], self.etp)
            counts_PQE = collectives.all_gather(counts_QE[None], self.ep)
        else:
            counts_PQE = by_expert.counts_E.new_full((self.ep.size, self.etp.size, self.num_experts), capacity)
        counts_PQL = counts_PQE.unflatten(2, by_rank)[:, :, self.ep.rank]
        if capacity is None and self.ep.size * self.etp.size == 1:
            groups = self._groups(by_expert.counts_E, shape_TK, num_rows)
            rows_PQP = torch.tensor([[[groups.num_rows]]])
        else:
            sizes_PQE = self.read(counts_PQE, shape_TK) if capacity is None else torch.full(counts_PQE.shape, capacity)
            sizes_PQPL = sizes_PQE.unflatten(2, by_rank)
            sizes_L: list[int] = sizes_PQPL[:, :, self.ep.rank].sum((0, 1)).tolist()
            groups = ExpertGroups.known(tuple(sizes_L), counts_PQL.sum((0, 1)))
            rows_PQP = sizes_PQPL.sum(3)
        plan = _AllToAllPlan(self.ep, self.etp, groups, counts_PQL, rows_PQP, self.yield_to_peer)
        choices_R = by_expert.dropless(sum(plan.num_sent)) if capacity is None else by_expert.padded(capacity)
        of_tokens, of_choices = by_expert.orders(choices_R, is_dropless=capacity is None)
        rows_RH, probs_R = permute(hidden_TH, of_tokens), permute(probs_TK.flatten(), of_choices)
        return _AllToAllWork(plan, of_tokens, rows_RH, probs_R)


class _AllToAllPlan:
    """How many rows each rank sends to each other one, `rows_PQP`, and what this rank does with what it receives."""

    def __init__(
        self,
        ep: Axis,
        etp: Axis,
        groups: ExpertGroups,
        counts_PQL: Tensor,
        rows_PQP: Tensor,
        yield_to_peer: YieldToPeer,
    ) -> None:
        self.ep, self.etp, self.groups, self.yield_to_peer = ep, etp, groups, yield_to_peer
        own_PQ = rows_PQP[:, :, ep.rank]
        # Rows for each rank of ep.
        self.num_sent: list[int] = rows_PQP[ep.rank, etp.rank].tolist()
        # Rows from each rank of ep.
        self.num_received: list[int] = own_PQ[:, etp.rank].tolist()
        # Rows that each rank of etp received.
        self.num_gathered: list[int] = own_PQ.sum(0).tolist()
        # Rows come in blocks (etp, ep, expert) and are wanted by expert, then as ranks are counted: (expert, ep, etp).
        self.by_expert = regrouped(counts_PQL.transpose(0, 1), groups.num_rows)


class _AllToAllWork:
    def __init__(self, plan: _AllToAllPlan, of_tokens: Permutation, rows_RH: Tensor, probs_R: Tensor) -> None:
        self._plan, self._of_tokens = plan, of_tokens
        self._work = [
            all_to_all_v(rows, plan.ep, plan.num_sent, plan.num_received, plan.yield_to_peer)
            for rows in (rows_RH, probs_R)
        ]
        # Where nothing is sent over ep, the gather over etp starts here and is in flight as long.
        self._is_gathering = all(rows.is_complete for rows in self._work)
        if self._is_gathering:
            self._gather()

    def wait(self) -> DispatchedTokens:
        if not self._is_gathering:
            self._gather()
        rows_RH, probs_R = (permute(rows.wait(), self._plan.by_expert) for rows in self._work)
        return DispatchedTokens(rows_RH, probs_R, self._plan.groups)

    def combine(self, rows_RH: Tensor) -> Tensor:
        plan = self._plan
        own_work = reduce_scatter_v(unpermute(rows_RH, plan.by_expert), plan.etp, plan.num_gathered, plan.yield_to_peer)
        back_work = all_to_all_v(own_work.wait(), plan.ep, plan.num_received, plan.num_sent, plan.yield_to_peer)
        # The experts' output is not needed while rows are in flight.
        del rows_RH
        return unpermute(back_work.wait(), self._of_tokens)

    def _gather(self) -> None:
        """Starts the all-gather over etp of the rows that came over ep."""
        plan = self._plan
        self._work = [all_gather_v(rows.wait(), plan.etp, plan.num_gathered, plan.yield_to_peer) for rows in self._work]


class AllGatherTokenDispatcher(TokenDispatcher):
    """Sends each token to all ranks. All ranks have the same number of tokens."""

    def dispatch(
        self,
        hidden_TH: Tensor,
        expert_ids_TK: Tensor,
        probs_TK: Tensor,
        capacity: int | None = None,
        num_rows: int | None = None,
    ) -> DispatchWork:
        num_own = self.num_experts // self.ep.size
        expert_ids = collectives.all_gather(collectives.all_gather(expert_ids_TK, self.etp), self.ep)
        by_expert = sort_by_expert(expert_ids - self.ep.rank * num_own, num_own)
        if capacity is None:
            # Own experts take their share of all ranks' tokens.
            groups = self._groups(by_expert.counts_E, expert_ids_TK.shape, num_rows)
            choices_R = by_expert.dropless(groups.num_rows)
        else:
            of_all = capacity * self.ep.size * self.etp.size
            groups = ExpertGroups.known((of_all,) * num_own, torch.full_like(by_expert.counts_E, of_all))
            choices_R = by_expert.padded(of_all)
        orders = by_expert.orders(choices_R, is_dropless=capacity is None)
        return _AllGatherWork(self.ep, self.etp, orders, groups, hidden_TH, probs_TK, self.yield_to_peer)


class _AllGatherWork:
    def __init__(
        self,
        ep: Axis,
        etp: Axis,
        orders: tuple[Permutation, Permutation],
        groups: ExpertGroups,
        hidden_TH: Tensor,
        probs_TK: Tensor,
        yield_to_peer: YieldToPeer,
    ) -> None:
        self._ep, self._etp, self._groups, self._yield_to_peer = ep, etp, groups, yield_to_peer
        self._of_tokens, self._of_choices = orders
        etp_work = [_all_gather(x, etp, yield_to_peer) for x in (hidden_TH, probs_TK)]
        self._work = [_all_gather(x.wait(), ep, yield_to_peer) for x in etp_work]

    def wait(self) -> DispatchedTokens:
        hidden, probs = (each.wait() for each in self._work)
        rows_RH, probs_R = permute(hidden, self._of_tokens), permute(probs.flatten(), self._of_choices)
        return DispatchedTokens(rows_RH, probs_R, self._groups)

    def combine(self, rows_RH: Tensor) -> Tensor:
        back_work = _reduce_scatter(unpermute(rows_RH, self._of_tokens), self._ep, self._yield_to_peer)
        # The experts' output is not needed while rows are in flight.
        del rows_RH
        return _reduce_scatter(back_work.wait(), self._etp, self._yield_to_peer).wait()


class SharedTokenDispatcher(TokenDispatcher):
    """Takes the rows of own experts from tokens that all ranks of ep have. Sends nothing before the sum over ep."""

    def dispatch(
        self,
        hidden_TH: Tensor,
        expert_ids_TK: Tensor,
        probs_TK: Tensor,
        capacity: int | None = None,
        num_rows: int | None = None,
    ) -> DispatchWork:
        assert capacity is None, "experts of other models have none"
        num_own = self.num_experts // self.ep.size
        by_expert = sort_by_expert(expert_ids_TK - self.ep.rank * num_own, num_own)
        groups = self._groups(by_expert.counts_E, expert_ids_TK.shape, num_rows)
        orders = by_expert.orders(by_expert.dropless(groups.num_rows), is_dropless=True)
        hidden_TH, probs_TK = (differentiable.copy(x, self.ep) for x in (hidden_TH, probs_TK))
        return _SharedWork(self.ep, orders, groups, hidden_TH, probs_TK)


class _SharedWork:
    def __init__(
        self,
        ep: Axis,
        orders: tuple[Permutation, Permutation],
        groups: ExpertGroups,
        hidden_TH: Tensor,
        probs_TK: Tensor,
    ) -> None:
        self._ep, self._groups, (self._of_tokens, of_choices) = ep, groups, orders
        self._rows_RH, self._probs_R = permute(hidden_TH, self._of_tokens), permute(probs_TK.flatten(), of_choices)

    def wait(self) -> DispatchedTokens:
        return DispatchedTokens(self._rows_RH, self._probs_R, self._groups)

    def combine(self, rows_RH: Tensor) -> Tensor:
        return differentiable.reduce(unpermute(rows_RH, self._of_tokens), self._ep)


def _all_gather(x: Tensor, axis: Axis, yield_to_peer: YieldToPeer) -> AsyncTensor:
    return start(
        x,
        lambda x: collectives.all_gather(x, axis, wait=False),
        lambda grad: collectives.reduce_scatter(grad, axis, wait=False),
        yield_to_peer,
    )


def _reduce_scatter(x: Tensor, axis: Axis, yield_to_peer: YieldToPeer) -> AsyncTensor:
    return start(
        x,
        lambda x: collectives.reduce_scatter(x, axis, wait=False),
        lambda grad: collectives.all_gather(grad, axis, wait=False),
        yield_to_peer,
    )


def on_host(counts: Tensor, shape_TK: torch.Size) -> Tensor:
    """The counts where Python can read them. The one place where experts make the host wait for the device."""
    return counts.cpu()


def moe_forward(
    hidden_TH: Tensor,
    expert_ids_TK: Tensor,
    probs_TK: Tensor,
    *,
    dispatcher: TokenDispatcher,
    experts: Experts,
    capacity: int | None = None,
    num_rows: int | None = None,
    overlapped: Callable[[], Tensor | None] = lambda: None,
) -> tuple[Tensor, Tensor | None]:
    """Sum of the outputs of each token's experts, scaled by their router probabilities, [T, H]; and the result of
    `overlapped`, which is computed while tokens are in flight.

    The expert -1 is none. With a `capacity` every expert gets so many rows of each rank, zeros after those of tokens;
    `num_rows` is how many of this rank's choices are experts, where the host knows it. Talks over ep and etp.
    """
    # Tokens travel in the dtype of the GEMM.
    dispatch_work = dispatcher.dispatch(as_gemm_input(hidden_TH), expert_ids_TK, probs_TK, capacity, num_rows)
    other = overlapped()
    return dispatch_work.combine(experts(dispatch_work.wait())), other
