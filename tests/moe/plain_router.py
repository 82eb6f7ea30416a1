"""The router spelled out for one device, token by token, and batches that try to break the one under test."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.comm import rng
from lightning_megatron.moe.config import RouterConfig

B, S, H, E = 4, 8, 6, 8
NAME = "layers.3.moe.router"

# Where documents begin in each row; -1 from where on a row is padding. The third row is padding alone.
DOCUMENTS = ([0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, -1, -1, -1], [-1] * 8, [0, 1, 1, 1, 1, 1, 1, -1])


@dataclass(frozen=True)
class Batch:
    """A global batch: B rows of S tokens."""

    x_BSH: Tensor
    # NaN in padding, which must reach nothing
    out_BSE: Tensor
    """What the weight of each expert is worth in the objective."""
    documents_BS: Tensor
    """Documents of the full batch, -1 for padding."""
    positions_BS: Tensor
    keys_BS: Tensor
    targets_BS: Tensor
    """How much the target of each token counts in the mean loss; of one document none does."""

    @property
    def is_real_BS(self) -> Tensor:
        return self.documents_BS >= 0

    @property
    def divisor(self) -> float:
        """What the mean of a step divides by: the weights of all targets."""
        return float(self.targets_BS[self.is_real_BS].sum())

    def weight_of(self, document: int) -> float:
        """How much each token of a document counts in the auxiliary losses: their sum is that of the targets."""
        is_own_BS = self.documents_BS == document
        return float(self.targets_BS[is_own_BS].sum()) / int(is_own_BS.sum())


def make_batch(seed: int) -> Batch:
    """Rows of documents of uneven lengths, some of which padding follows."""
    generator = torch.Generator().manual_seed(seed)
    documents, positions, first = [], [], 0
    for row in DOCUMENTS:
        documents.append([first + number if number >= 0 else -1 for number in row])
        positions.append([row[:place].count(number) for place, number in enumerate(row)])
        first += max(row) + 1
    documents_BS = torch.tensor(documents)
    x_BSH = torch.randn(B, S, H, generator=generator, dtype=torch.float64)
    x_BSH[documents_BS < 0] = torch.nan
    targets_BS = torch.rand(B, S, generator=generator, dtype=torch.float64)
    targets_BS[torch.rand(B, S, generator=generator) < 0.3] = 0.0
    targets_BS[documents_BS == 1] = 0.0
    return Batch(
        targets_BS=targets_BS,
        x_BSH=x_BSH,
        out_BSE=torch.randn(B, S, E, generator=generator, dtype=torch.float64),
        documents_BS=documents_BS,
        positions_BS=torch.tensor(positions),
        keys_BS=rng.bits(rng.key("test", seed), torch.arange(B * S)).view(B, S),
    )


@dataclass
class Plain:
    """What one device makes of a batch, `State` before it and after it."""

    objective: Tensor
    losses: dict[str, Tensor]
    """Each a mean over real tokens, by their weights."""
    counts: list[int]
    """Of the chosen experts."""
    preferred: list[int]
    """Of the best by score."""


def plain_step(
    batch: Batch,
    x_BSH: Tensor,
    weight_EH: Tensor,
    config: RouterConfig,
    *,
    bias: Tensor,
    preferred: list[int],
    microbatches_B: tuple[int, ...],
) -> Plain:
    """The objective of a step: the worth of all weights over the weights of targets, and each loss by its coefficient.

    `microbatches_B` says which rows share a model call, which the loss per microbatch looks at.
    """
    places = [(b, s) for b in range(B) for s in range(S) if batch.documents_BS[b, s] >= 0]
    columns = torch.arange(H)
    x = {}
    for place in places:
        noise = rng.uniform(rng.bits(rng.key(NAME, "jitter"), batch.keys_BS[place]), columns)
        x[place] = x_BSH[place] * (1 + config.jitter * (2 * noise - 1))
    logits = {place: weight_EH @ x[place] for place in places}
    scores = {place: plain_scores(logits[place], config) for place in places}
    documents = {place: int(batch.documents_BS[place]) for place in places}
    chosen = plain_choice(batch, places, documents, logits, scores, config, bias)
    best = {place: plain_top(scores[place].tolist(), config.top_k) for place in places}
    counting = {place: batch.weight_of(documents[place]) / batch.divisor for place in places}

    objective = torch.zeros((), dtype=torch.float64)
    for place in places:
        for expert, weight in plain_weights(scores[place], chosen[place], config):
            objective = objective + batch.out_BSE[place][expert] * weight / batch.divisor

    def busy_of(pool: list[tuple[int, int]]) -> list[float]:
        counts = [sum(e in best[place] for place in pool) for e in range(E)]
        return [count * E / sum(counts) for count in counts]

    losses: dict[str, Tensor] = {}
    for loss in config.aux_losses:
        total = torch.zeros((), dtype=torch.float64)
        for place in places:
            if loss.scope == "sequence":
                busy = busy_of([other for other in places if documents[other] == documents[place]])
            elif loss.scope == "microbatch":
                call = microbatches_B[place[0]]
                busy = busy_of([other for other in places if microbatches_B[other[0]] == call])
            else:
                busy = [n * E / sum(preferred) for n in preferred] if sum(preferred) else [1.0] * E
            p = scores[place] / scores[place].sum()
            for e in range(E):
                total = total + counting[place] * p[e] * busy[e]
        losses[loss.scope] = total
        objective = objective + loss.coefficient * losses[loss.scope]
    if config.z_loss:
        squares = [counting[place] * torch.log(torch.exp(logits[place]).sum()) ** 2 for place in places]
        losses["z"] = torch.stack(squares).sum()
        objective = objective + config.z_loss * losses["z"]
    return Plain(
        objective=objective,
        losses=losses,
        counts=[sum(e in chosen[place] for place in places) for e in range(E)],
        preferred=[sum(e in best[place] for place in places) for e in range(E)],
    )


def plain_scores(logits: Tensor, config: RouterConfig) -> Tensor:
    """By the formula of each."""
    if config.score_function == "softmax":
        return torch.exp(logits) / torch.exp(logits).sum()
    if config.score_function == "sigmoid":
        return 1 / (1 + torch.exp(-logits))
    return torch.log(1 + torch.exp(logits)).sqrt()


def plain_top(values: list[float], count: int) -> list[int]:
    """The best, of equal ones the first."""
    return sorted(range(len(values)), key=lambda e: (-values[e], e))[:count]


def plain_weights(scores: Tensor, chosen: list[int], config: RouterConfig) -> list[tuple[int, Tensor]]:
    """Each chosen expert with its weight."""
    total = torch.stack([scores[e] for e in chosen]).sum() if config.norm_topk_prob else torch.tensor(1.0)
    return [(e, scores[e] / total * config.topk_scaling_factor) for e in chosen]


def plain_choice(
    batch: Batch,
    places: list[tuple[int, int]],
    documents: dict[tuple[int, int], int],
    logits: dict[tuple[int, int], Tensor],
    scores: dict[tuple[int, int], Tensor],
    config: RouterConfig,
    bias: Tensor,
) -> dict[tuple[int, int], list[int]]:
    """The experts of each token."""
    k = config.top_k
    if config.routing_type == "random":
        keys = {place: rng.bits(rng.key(NAME, "chance"), batch.keys_BS[place]) for place in places}
        return {place: plain_top(rng.uniform(keys[place], torch.arange(E)).tolist(), k) for place in places}
    if config.routing_type == "round_robin":
        return {place: [(int(batch.positions_BS[place]) * k + j) % E for j in range(k)] for place in places}
    pools = [[place for place in places if documents[place] == d] for d in sorted(set(documents.values()))]
    chosen: dict[tuple[int, int], list[int]] = {place: [] for place in places}
    if config.routing_type == "expert_choice":
        for pool in pools:
            capacity = -(-len(pool) * k // E)
            for e in range(E):
                for place in sorted(pool, key=lambda place: (-scores[place][e].item(), place))[:capacity]:
                    chosen[place].append(e)
        return chosen
    if config.routing_type == "sinkhorn":
        for pool in pools:
            plan = torch.exp(torch.stack([logits[place].detach() for place in pool]))
            for _ in range(config.num_sinkhorn_iterations):
                plan = plan / plan.sum(1, keepdim=True)
                plan = plan / plan.sum(0, keepdim=True) * len(pool) / E
            for row, place in zip(plan, pool, strict=True):
                chosen[place] = plain_top(row.tolist(), k)
        return chosen
    size = E // config.num_groups
    for place in places:
        values = (scores[place].detach() + bias).tolist()
        groups = [values[g * size : (g + 1) * size] for g in range(config.num_groups)]
        worth = [sum(sorted(group, reverse=True)[: k // config.group_topk]) for group in groups]
        kept = plain_top(worth, config.group_topk)
        chosen[place] = plain_top([v if e // size in kept else -torch.inf for e, v in enumerate(values)], k)
    return chosen
