"""Choice of a token's experts by pure functions of router scores; ties go to the expert of the lowest number.

    topk            each token takes its best experts, with group limits those of its best groups
    sinkhorn        top-k of scores that Sinkhorn iterations balance over the experts of a sequence
    expert_choice   each expert takes its best tokens of every sequence, so that a token has top-k experts in the mean
    random          random experts, for benchmarks
    round_robin     experts in turn along each sequence, for benchmarks

None has a gradient. Each depends on a sequence's tokens alone, so that no cut of a batch changes it.
T tokens of this rank, E experts, K experts of a token, G groups of experts, P sequence groups, N tokens of all ranks
that share the sequence groups.
Source: Shazeer et al., arXiv 1701.06538 (top-k); DeepSeek-AI, arXiv 2412.19437, section 2.1.2 (groups, bias); Clark et
al., arXiv 2202.01169, section 3.1 (Sinkhorn); Zhou et al., arXiv 2202.09368, section 3.2 (expert choice).
"""

import torch
from torch import Tensor

from lightning_megatron.comm import rng
from lightning_megatron.moe.sequence_groups import SequenceGroups

# A smaller sum of Sinkhorn scores belongs to an expert that no token reaches.
_LEAST = 1e-280


def topk(scores_TE: Tensor, count: int) -> Tensor:
    """Indices of the highest scores, best first, ties to the lowest index: int64 [T, count]."""
    # torch.topk does not define which of equal scores it takes.
    index_TE: Tensor = scores_TE.sort(dim=-1, descending=True, stable=True).indices
    return index_TE.narrow(-1, 0, count)


def group_limited_scores(scores_TE: Tensor, *, num_groups: int, group_topk: int, count: int) -> Tensor:
    """Scores of the experts in the best groups, -inf elsewhere: [T, E].

    A group is worth the sum of its best `count / group_topk` scores.
    """
    scores_TGE: Tensor = scores_TE.unflatten(1, (num_groups, -1))
    best_TG = scores_TGE.sort(dim=-1, descending=True).values[..., : count // group_topk].sum(-1)
    is_best_TG = torch.zeros_like(best_TG, dtype=torch.bool).scatter_(1, topk(best_TG, group_topk), True)
    return scores_TGE.masked_fill(~is_best_TG.unsqueeze(-1), -torch.inf).flatten(1)


def sinkhorn(logits_TE: Tensor, groups: SequenceGroups, num_iterations: int) -> Tensor:
    """exp(logits), rows and columns scaled so that experts get equal shares of a sequence's tokens: float64 [T, E].

    Talks over the axes of the sequence groups in each iteration.
    """
    num_experts = logits_TE.shape[1]
    real_T1 = groups.is_real_T.unsqueeze(1).double()
    # The first scaling removes a factor of a row, so the largest logit may be subtracted for stability.
    plan_TE = torch.exp(logits_TE.double() - logits_TE.double().amax(1, keepdim=True)) * real_T1
    due_P1 = groups.sum(real_T1) / num_experts
    for _ in range(num_iterations):
        plan_TE = plan_TE / plan_TE.sum(1, keepdim=True).clamp(min=_LEAST)
        plan_TE = plan_TE * groups.spread(due_P1 / groups.sum(plan_TE).clamp(min=_LEAST))
    return plan_TE


def expert_choice(scores_TE: Tensor, positions_T: Tensor, groups: SequenceGroups, mean_count: int) -> Tensor:
    """Experts that chose each token, ties to the earlier token: int64 [T, E], -1 where not chosen.

    Of a sequence of n tokens each expert takes ceil(n * mean_count / E). Talks over the axes of the sequence groups.
    """
    num_experts = scores_TE.shape[1]
    scores_NE, ids_N, positions_N = (groups.gather(values) for values in (scores_TE, groups.ids_T, positions_T))
    sizes_P = torch.zeros(groups.num_groups, dtype=torch.int64, device=ids_N.device)
    sizes_P.index_add_(0, ids_N, torch.ones_like(ids_N))
    starts_P = sizes_P.cumsum(0) - sizes_P
    capacities_P = (sizes_P * mean_count + num_experts - 1) // num_experts
    capacities_P[-1] = 0
    # Sorted by sequence, then by score, then by position: stable sorts, the last key first.
    order_NE = positions_N.argsort(stable=True).unsqueeze(1).expand(-1, num_experts)
    order_NE = order_NE.gather(0, scores_NE.gather(0, order_NE).argsort(dim=0, descending=True, stable=True))
    order_NE = order_NE.gather(0, ids_N[order_NE].argsort(dim=0, stable=True))
    index_N = torch.arange(ids_N.shape[0], device=ids_N.device)
    sorted_ids_N = ids_N.sort(stable=True).values
    is_taken_N = index_N - starts_P[sorted_ids_N] < capacities_P[sorted_ids_N]
    is_chosen_NE = torch.zeros_like(scores_NE, dtype=torch.bool)
    is_chosen_NE.scatter_(0, order_NE, is_taken_N.unsqueeze(1).expand(-1, num_experts))
    experts_E = torch.arange(num_experts, device=ids_N.device)
    return torch.where(groups.own_part(is_chosen_NE), experts_E, -1)


def random(keys_T: Tensor, num_experts: int, count: int) -> Tensor:
    """Random experts, all sets equally likely: int64 [T, count]."""
    experts_E = torch.arange(num_experts, device=keys_T.device)
    return topk(rng.uniform(keys_T.unsqueeze(1), experts_E), count)


def round_robin(positions_T: Tensor, num_experts: int, count: int) -> Tensor:
    """Experts in turn along each sequence, whose loads differ by at most one token: int64 [T, count]."""
    turns_K = torch.arange(count, device=positions_T.device)
    return (positions_T.unsqueeze(1) * count + turns_K) % num_experts
