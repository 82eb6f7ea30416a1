"""The way of tokens to the ranks of their experts and back, over ep and etp.

Every rank of ep x etp comes with tokens of its own and holds E/ep experts, of each of them 1/etp of the features.

    AllToAll     out   sort by expert; exchange over ep; join over etp; sort the rows of all ranks by expert
                 home  the same backwards; the rows of a token are added up at home
    AllGather    out   join all tokens over etp and ep; take the rows of own experts
                 home  add the rows of each token up; sum over ep and etp, each rank its own tokens

AllToAll moves the rows that are wanted; AllGather moves everything: it is for few ranks and many choices.
Both hand the same rows in the same order to the experts. A fused backend is a third value of `TokenDispatcher`.

How many rows go where is data, and a kernel's output needs its size: the host reads it once, in `on_host`, and never
where every expert's rows are padded to a capacity.

T tokens of this rank, K choices of each, H hidden, E experts, L own experts, P ranks of ep, Q ranks of etp, R rows.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lightning_megatron.comm import collectives
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
from lightning_megatron.moe.experts import DispatchedTokens
from lightning_megatron.moe.grouped_gemm import ExpertGroups
from lightning_megatron.moe.permute import Permutation, permute, regrouped, sort_by_expert, unpermute

Read = Callable[[Tensor, int], Tensor]
"""From counts by expert [..., E] on the device the same on the host; it is told of how many tokens each row is."""


class Journey(Protocol):
    """The tokens of one microbatch on their way. The three in turn, once each; between them, do other things."""

    def arrive(self) -> DispatchedTokens:
        """The rows for this rank's experts, once they are here."""
        ...

    def send_back(self, rows_RH: Tensor) -> None:
        """Starts what the experts made of the rows, in the same order, on its way home."""
        ...

    def come_home(self) -> Tensor:
        """For each token of this rank the sum of its experts' outputs, [T, H], once they are here."""
        ...


class TokenDispatcher(Protocol):
    """How tokens travel."""

    yield_to_peer: YieldToPeer
    """Called before each wait for tokens on their way."""
    read: Read
    """Brings numbers of rows to the host."""

    def dispatch(
        self, hidden_TH: Tensor, expert_ids_TK: Tensor, probs_TK: Tensor, capacity: int | None = None
    ) -> Journey:
        """Starts the tokens on their way to the experts that they chose; -1 is no choice.

        With a capacity every expert gets so many rows of each rank, zeros behind those of tokens; no expert may be
        chosen more often, and all ranks come with the same one.
        """
        ...


class AllToAllTokenDispatcher:
    """Sends each token to the ranks of its experts alone. Ranks may have different numbers of tokens, or none."""

    def __init__(self, num_experts: int, *, ep: Axis, etp: Axis) -> None:
        self.num_experts, self.ep, self.etp = num_experts, ep, etp
        self.yield_to_peer: YieldToPeer = no_op
        self.read: Read = on_host

    def dispatch(
        self, hidden_TH: Tensor, expert_ids_TK: Tensor, probs_TK: Tensor, capacity: int | None = None
    ) -> Journey:
        by_expert = sort_by_expert(expert_ids_TK, self.num_experts)
        shape = (self.ep.size, self.etp.size, self.num_experts)
        if capacity is None:
            counts_QE = collectives.all_gather(by_expert.counts_E[None], self.etp)
            counts_PQE = collectives.all_gather(counts_QE[None], self.ep)
            sizes_PQE = self.read(counts_PQE, len(expert_ids_TK))
            choices_R = by_expert.dropless(int(sizes_PQE[self.ep.rank, self.etp.rank].sum()))
        else:
            counts_PQE = by_expert.counts_E.new_full(shape, capacity)
            sizes_PQE = torch.full(shape, capacity)
            choices_R = by_expert.padded(capacity)
        of_tokens, of_choices = by_expert.orders(choices_R, is_dropless=capacity is None)
        plan = _Exchange(self.ep, self.etp, counts_PQE, sizes_PQE, self.yield_to_peer)
        return _AllToAllJourney(plan, of_tokens, permute(hidden_TH, of_tokens), permute(probs_TK.flatten(), of_choices))


class _Exchange:
    """Who sends how many rows to whom, read off the rows of each expert on each rank."""

    def __init__(self, ep: Axis, etp: Axis, counts_PQE: Tensor, sizes_PQE: Tensor, yield_to_peer: YieldToPeer) -> None:
        self.ep, self.etp, self.yield_to_peer = ep, etp, yield_to_peer
        num_own = sizes_PQE.shape[2] // ep.size
        sizes_PQPL = sizes_PQE.unflatten(2, (ep.size, num_own))
        # Rows for each rank of ep.
        self.given: list[int] = sizes_PQPL[ep.rank, etp.rank].sum(1).tolist()
        own_PQL = sizes_PQPL[:, :, ep.rank]
        # Rows of each rank of ep.
        self.taken: list[int] = own_PQL[:, etp.rank].sum(1).tolist()
        # Rows that each rank of etp took.
        self.shares: list[int] = own_PQL.sum((0, 2)).tolist()
        sizes_L: list[int] = own_PQL.sum((0, 1)).tolist()
        counts_PQL = counts_PQE.unflatten(2, (ep.size, num_own))[:, :, ep.rank]
        self.groups = ExpertGroups(tuple(sizes_L), counts_PQL.sum((0, 1)))
        # Rows come in blocks (etp, ep, expert) and are wanted by expert, then as ranks are counted: (expert, ep, etp).
        self.by_expert = regrouped(counts_PQL.transpose(0, 1), self.groups.num_rows)


class _AllToAllJourney:
    def __init__(self, plan: _Exchange, of_tokens: Permutation, rows_RH: Tensor, probs_R: Tensor) -> None:
        self._plan, self._of_tokens = plan, of_tokens
        self._out = [
            all_to_all_v(rows, plan.ep, plan.given, plan.taken, plan.yield_to_peer) for rows in (rows_RH, probs_R)
        ]
        # Where no message goes over ep that over etp starts here, and flies as long.
        self._is_joining = all(rows.is_complete for rows in self._out)
        if self._is_joining:
            self._join()
        self._home: AsyncTensor

    def arrive(self) -> DispatchedTokens:
        if not self._is_joining:
            self._join()
        rows_RH, probs_R = (permute(rows.wait(), self._plan.by_expert) for rows in self._out)
        return DispatchedTokens(rows_RH, probs_R, self._plan.groups)

    def send_back(self, rows_RH: Tensor) -> None:
        plan = self._plan
        own = reduce_scatter_v(unpermute(rows_RH, plan.by_expert), plan.etp, plan.shares, plan.yield_to_peer)
        self._home = all_to_all_v(own.wait(), plan.ep, plan.taken, plan.given, plan.yield_to_peer)

    def come_home(self) -> Tensor:
        return unpermute(self._home.wait(), self._of_tokens)

    def _join(self) -> None:
        """The rows that came over ep go on over etp."""
        plan = self._plan
        self._out = [all_gather_v(rows.wait(), plan.etp, plan.shares, plan.yield_to_peer) for rows in self._out]


class AllGatherTokenDispatcher:
    """Sends each token to all ranks. All ranks have the same number of tokens."""

    def __init__(self, num_experts: int, *, ep: Axis, etp: Axis) -> None:
        self.num_own, self.ep, self.etp = num_experts // ep.size, ep, etp
        self.yield_to_peer: YieldToPeer = no_op
        self.read: Read = on_host

    def dispatch(
        self, hidden_TH: Tensor, expert_ids_TK: Tensor, probs_TK: Tensor, capacity: int | None = None
    ) -> Journey:
        experts = collectives.all_gather(collectives.all_gather(expert_ids_TK, self.etp), self.ep)
        by_expert = sort_by_expert(experts - self.ep.rank * self.num_own, self.num_own)
        if capacity is None:
            # Own experts take their share of all ranks' tokens.
            sizes = tuple(self.read(by_expert.counts_E, len(experts) // self.ep.size).tolist())
            groups = ExpertGroups(sizes, by_expert.counts_E)
            choices_R = by_expert.dropless(groups.num_rows)
        else:
            of_all = capacity * self.ep.size * self.etp.size
            groups = ExpertGroups((of_all,) * self.num_own, torch.full_like(by_expert.counts_E, of_all))
            choices_R = by_expert.padded(of_all)
        orders = by_expert.orders(choices_R, is_dropless=capacity is None)
        return _AllGatherJourney(self.ep, self.etp, orders, groups, hidden_TH, probs_TK, self.yield_to_peer)


class _AllGatherJourney:
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
        joining = [_gather(x, etp, yield_to_peer) for x in (hidden_TH, probs_TK)]
        self._out = [_gather(x.wait(), ep, yield_to_peer) for x in joining]
        self._home: AsyncTensor

    def arrive(self) -> DispatchedTokens:
        hidden, weights = (each.wait() for each in self._out)
        return DispatchedTokens(
            permute(hidden, self._of_tokens), permute(weights.flatten(), self._of_choices), self._groups
        )

    def send_back(self, rows_RH: Tensor) -> None:
        self._home = _reduce_scatter(unpermute(rows_RH, self._of_tokens), self._ep, self._yield_to_peer)

    def come_home(self) -> Tensor:
        return _reduce_scatter(self._home.wait(), self._etp, self._yield_to_peer).wait()


def _gather(x: Tensor, axis: Axis, yield_to_peer: YieldToPeer) -> AsyncTensor:
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


def on_host(counts: Tensor, num_tokens: int) -> Tensor:
    """The counts where Python can read them. The one place where experts make the host wait for the device."""
    return counts.cpu()
