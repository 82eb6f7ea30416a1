"""Which experts a token goes to: pure functions of scores, whose ties the expert of the lowest number wins.

    topk           each token its best experts, maybe of its best groups of experts
    sinkhorn        the same on a plan in which each token gives 1 and the experts of a sequence get equally much
    expert_choice   each expert its best tokens of every sequence: as many as make the mean topk for a token
    random, round_robin    for benchmarks: by chance, or in turn along each sequence

A choice has no gradient. Each is a function of a sequence's tokens alone, so that no cut of a batch changes it. Legend:
T tokens of this rank, E experts, K chosen, G groups of experts, P pools, N tokens of all ranks that share the pools.
Source: Shazeer et al., arXiv 1701.06538 (top-k); DeepSeek-AI, arXiv 2412.19437, section 2.1.2 (groups, bias); Clark et
al., arXiv 2202.01169, section 3.1 (Sinkhorn); Zhou et al., arXiv 2202.09368, section 3.2 (expert choice).
"""

import torch
from torch import Tensor

from lightning_megatron.comm import rng
from lightning_megatron.moe.sequence_groups import SequenceGroups

# Below it a sum of a plan is that of an expert that no token reaches.
_LEAST = 1e-280


def topk(scores_TE: Tensor, count: int) -> Tensor:
    """The places of the highest scores, best first, of equal ones the first: int64 [T, count]."""
    # torch.topk does not say which of equal ones it takes.
    places_TE: Tensor = scores_TE.sort(dim=-1, descending=True, stable=True).indices
    return places_TE.narrow(-1, 0, count)


def group_limited_scores(scores_TE: Tensor, *, num_groups: int, group_topk: int, count: int) -> Tensor:
    """The scores of the chosen groups, -inf elsewhere: [T, E].

    A group is worth the sum of its best `count / group_topk` scores.
    """
    scores_TGE: Tensor = scores_TE.unflatten(1, (num_groups, -1))
    best_TG = scores_TGE.sort(dim=-1, descending=True).values[..., : count // group_topk].sum(-1)
    is_kept_TG = torch.zeros_like(best_TG, dtype=torch.bool).scatter_(1, topk(best_TG, group_topk), True)
    return scores_TGE.masked_fill(~is_kept_TG.unsqueeze(-1), -torch.inf).flatten(1)


def sinkhorn(logits_TE: Tensor, pools: SequenceGroups, num_iterations: int) -> Tensor:
    """exp(logits) with rows and columns scaled until a pool's experts get equally much of its tokens: float64 [T, E].

    Talks over the axes of the pools in each iteration.
    """
    num_experts = logits_TE.shape[1]
    real_T1 = pools.is_real_T.unsqueeze(1).double()
    # A row's largest logit is a factor of the row, which the first scaling takes out.
    plan_TE = torch.exp(logits_TE.double() - logits_TE.double().amax(1, keepdim=True)) * real_T1
    due_P1 = pools.sum(real_T1) / num_experts
    for _ in range(num_iterations):
        plan_TE = plan_TE / plan_TE.sum(1, keepdim=True).clamp(min=_LEAST)
        plan_TE = plan_TE * pools.spread(due_P1 / pools.sum(plan_TE).clamp(min=_LEAST))
    return plan_TE


def expert_choice(scores_TE: Tensor, positions_T: Tensor, pools: SequenceGroups, mean_count: int) -> Tensor:
    """Each expert's choice of the tokens of every pool, ties to the earlier token: int64 [T, E], -1 where not chosen.

    Of a pool of n tokens each expert takes the ceiling of n * mean_count / E. Talks over the axes of the pools.
    """
    num_experts = scores_TE.shape[1]
    scores_NE, ids_N, positions_N = (pools.gather(values) for values in (scores_TE, pools.ids_T, positions_T))
    sizes_P = torch.zeros(pools.num_pools, dtype=torch.int64, device=ids_N.device)
    sizes_P.index_add_(0, ids_N, torch.ones_like(ids_N))
    starts_P = sizes_P.cumsum(0) - sizes_P
    capacities_P = (sizes_P * mean_count + num_experts - 1) // num_experts
    capacities_P[-1] = 0
    # By pool, in it by score, in equal ones by position: stable sorts, the last word first.
    order_NE = positions_N.argsort(stable=True).unsqueeze(1).expand(-1, num_experts)
    order_NE = order_NE.gather(0, scores_NE.gather(0, order_NE).argsort(dim=0, descending=True, stable=True))
    order_NE = order_NE.gather(0, ids_N[order_NE].argsort(dim=0, stable=True))
    places_N = torch.arange(ids_N.shape[0], device=ids_N.device)
    sorted_ids_N = ids_N.sort(stable=True).values
    is_taken_N = places_N - starts_P[sorted_ids_N] < capacities_P[sorted_ids_N]
    is_chosen_NE = torch.zeros_like(scores_NE, dtype=torch.bool)
    is_chosen_NE.scatter_(0, order_NE, is_taken_N.unsqueeze(1).expand(-1, num_experts))
    experts_E = torch.arange(num_experts, device=ids_N.device)
    return torch.where(pools.own_part(is_chosen_NE), experts_E, -1)


def random(keys_T: Tensor, num_experts: int, count: int) -> Tensor:
    """Experts by chance, each set of them as likely as any other: int64 [T, count]."""
    experts_E = torch.arange(num_experts, device=keys_T.device)
    return topk(rng.uniform(keys_T.unsqueeze(1), experts_E), count)


def round_robin(positions_T: Tensor, num_experts: int, count: int) -> Tensor:
    """Experts in turn along each sequence, so that their loads differ by one token at most: int64 [T, count]."""
    turns_K = torch.arange(count, device=positions_T.device)
    return (positions_T.unsqueeze(1) * count + turns_K) % num_experts
