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

How many rows go where is data, and a kernel's output needs its size: the host reads it once, in `on_host`, and never
where every expert's rows are padded to a capacity.

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
        self, hidden_TH: Tensor, expert_ids_TK: Tensor, probs_TK: Tensor, capacity: int | None = None
    ) -> DispatchWork:
        """Starts to send each token to its experts; the expert -1 is none.

        With a capacity every expert gets so many rows of each rank, zeros after those of tokens; no expert may have
        more tokens than that, and all ranks pass the same capacity.
        """
        raise NotImplementedError


class AllToAllTokenDispatcher(TokenDispatcher):
    """Sends each token to the ranks of its experts alone. Ranks may have different numbers of tokens, or none."""

    def dispatch(
        self, hidden_TH: Tensor, expert_ids_TK: Tensor, probs_TK: Tensor, capacity: int | None = None
    ) -> DispatchWork:
        by_expert = sort_by_expert(expert_ids_TK, self.num_experts)
        shape = (self.ep.size, self.etp.size, self.num_experts)
        if capacity is None:
            counts_QE = collectives.all_gather(by_expert.counts_E[None], self.etp)
            counts_PQE = collectives.all_gather(counts_QE[None], self.ep)
            sizes_PQE = self.read(counts_PQE, expert_ids_TK.shape)
            choices_R = by_expert.dropless(int(sizes_PQE[self.ep.rank, self.etp.rank].sum()))
        else:
            counts_PQE = by_expert.counts_E.new_full(shape, capacity)
            sizes_PQE = torch.full(shape, capacity)
            choices_R = by_expert.padded(capacity)
        of_tokens, of_choices = by_expert.orders(choices_R, is_dropless=capacity is None)
        plan = _AllToAllPlan(self.ep, self.etp, counts_PQE, sizes_PQE, self.yield_to_peer)
        rows_RH, probs_R = permute(hidden_TH, of_tokens), permute(probs_TK.flatten(), of_choices)
        return _AllToAllWork(plan, of_tokens, rows_RH, probs_R)


class _AllToAllPlan:
    """How many rows each rank sends to each other one, from the rows of each expert on each rank."""

    def __init__(self, ep: Axis, etp: Axis, counts_PQE: Tensor, sizes_PQE: Tensor, yield_to_peer: YieldToPeer) -> None:
        self.ep, self.etp, self.yield_to_peer = ep, etp, yield_to_peer
        num_own = sizes_PQE.shape[2] // ep.size
        sizes_PQPL = sizes_PQE.unflatten(2, (ep.size, num_own))
        # Rows for each rank of ep.
        self.num_sent: list[int] = sizes_PQPL[ep.rank, etp.rank].sum(1).tolist()
        own_PQL = sizes_PQPL[:, :, ep.rank]
        # Rows from each rank of ep.
        self.num_received: list[int] = own_PQL[:, etp.rank].sum(1).tolist()
        # Rows that each rank of etp received.
        self.num_gathered: list[int] = own_PQL.sum((0, 2)).tolist()
        sizes_L: list[int] = own_PQL.sum((0, 1)).tolist()
        counts_PQL = counts_PQE.unflatten(2, (ep.size, num_own))[:, :, ep.rank]
        self.groups = ExpertGroups(tuple(sizes_L), counts_PQL.sum((0, 1)))
        # Rows come in blocks (etp, ep, expert) and are wanted by expert, then as ranks are counted: (expert, ep, etp).
        self.by_expert = regrouped(counts_PQL.transpose(0, 1), self.groups.num_rows)


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
        self, hidden_TH: Tensor, expert_ids_TK: Tensor, probs_TK: Tensor, capacity: int | None = None
    ) -> DispatchWork:
        num_own = self.num_experts // self.ep.size
        expert_ids = collectives.all_gather(collectives.all_gather(expert_ids_TK, self.etp), self.ep)
        by_expert = sort_by_expert(expert_ids - self.ep.rank * num_own, num_own)
        if capacity is None:
            # Own experts take their share of all ranks' tokens.
            sizes = tuple(self.read(by_expert.counts_E, expert_ids_TK.shape).tolist())
            groups = ExpertGroups(sizes, by_expert.counts_E)
            choices_R = by_expert.dropless(groups.num_rows)
        else:
            of_all = capacity * self.ep.size * self.etp.size
            groups = ExpertGroups((of_all,) * num_own, torch.full_like(by_expert.counts_E, of_all))
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
        self, hidden_TH: Tensor, expert_ids_TK: Tensor, probs_TK: Tensor, capacity: int | None = None
    ) -> DispatchWork:
        assert capacity is None, "experts of other models have none"
        num_own = self.num_experts // self.ep.size
        by_expert = sort_by_expert(expert_ids_TK - self.ep.rank * num_own, num_own)
        groups = ExpertGroups(tuple(self.read(by_expert.counts_E, expert_ids_TK.shape).tolist()), by_expert.counts_E)
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
    overlapped: Callable[[], Tensor | None] = lambda: None,
) -> tuple[Tensor, Tensor | None]:
    """Sum of the outputs of each token's experts, scaled by their router probabilities, [T, H]; and the result of
    `overlapped`, which is computed while tokens are in flight.

    The expert -1 is none. With a `capacity` every expert gets so many rows of each rank, zeros after those of tokens.
    Talks over ep and etp.
    """
    # Tokens travel in the dtype of the GEMM.
    dispatch_work = dispatcher.dispatch(as_gemm_input(hidden_TH), expert_ids_TK, probs_TK, capacity)
    other = overlapped()
    return dispatch_work.combine(experts(dispatch_work.wait())), other
