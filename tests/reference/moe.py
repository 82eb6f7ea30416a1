"""A layer of experts on one device in plain torch: every expert sees every token, and weights pick what counts.

Each row of [batch, sequence, hidden] is one sequence, all of it real tokens: documents come one by one. What a router
carries from step to step is a `RouterState`, what it saw in a step a `Seen`; the loop around the model owns both.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_megatron.moe.capacity import ExpertCapacity
from lightning_megatron.moe.config import MoEConfig, RouterConfig

Activate = Callable[[Tensor], Tensor]


@dataclass
class Seen:
    """What a router saw since the last step, over all sequences."""

    counts: Tensor
    """int64 [3, E]: tokens that have each expert among their best by score alone; that chose it; and that it took."""
    weight: Tensor
    """Of all tokens."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """Sums over tokens, each times its weight."""

    @staticmethod
    def nothing(num_experts: int) -> "Seen":
        return Seen(torch.zeros(3, num_experts, dtype=torch.int64), torch.zeros((), dtype=torch.float64))

    def add(self, counts: Tensor, losses: dict[str, Tensor], weights: Tensor) -> None:
        """Takes in a call's `counts` [3, E], losses [B] and the weights [B, S] of its tokens."""
        self.counts = self.counts + counts
        self.weight = self.weight + weights.double().sum()
        for name, loss in losses.items():
            own = (weights.double().mean(1) * loss.detach().double()).sum()
            self.losses[name] = self.losses.get(name, torch.zeros((), dtype=torch.float64)) + own


@dataclass
class RouterState:
    """What a router carries from step to step, and what it saw in this one."""

    config: RouterConfig
    bias: Tensor
    """float32: added to the scores where experts are chosen."""
    shares: Tensor
    """int64: of the step before, how many tokens had each expert among their best."""
    seen: Seen

    @staticmethod
    def initial(config: RouterConfig, shunned: tuple[int, ...] = ()) -> "RouterState":
        """That of a new model; the bias of `shunned` experts is so low that no token chooses them."""
        num = config.num_experts
        state = RouterState(config, torch.zeros(num), torch.zeros(num, dtype=torch.int64), Seen.nothing(num))
        state.bias[list(shunned)] = -1.0
        return state

    def forget(self) -> None:
        """Leaves a step out."""
        self.seen = Seen.nothing(self.config.num_experts)

    def end_step(self) -> dict[str, Tensor]:
        """Learns from the step and forgets it; what it saw and what it carries on, by name."""
        seen, config = self.seen, self.config
        preferred, chosen, kept = seen.counts
        self.forget()
        report = {f"{name} loss": loss / max(seen.weight.item(), 1e-300) for name, loss in seen.losses.items()}
        report |= {"chosen": chosen, "kept": kept}
        if config.bias_update_rate:
            for expert, count in enumerate(chosen.tolist()):
                is_idle, is_busy = count < chosen.double().mean(), count > chosen.double().mean()
                self.bias[expert] += config.bias_update_rate * (int(is_idle) - int(is_busy))
            report["expert_bias"] = self.bias.clone()
        if any(loss.scope == "global" for loss in config.aux_losses):
            self.shares = preferred if preferred.any() else self.shares
            report["global_tokens_per_expert"] = self.shares
        return report


def mix(
    x: Tensor, router_x: Tensor, moe: MoEConfig, weights: dict[str, Tensor], state: RouterState, activate: Activate
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """What the experts make of `x` [B, S, H]; the auxiliary losses of each row, summed over its tokens, by name [B];
    and the counts of `Seen`. `router_x` is what the router reads, `weights` are the layer's, by name."""
    config = moe.router
    logits = router_x @ weights["router.weight"].T + bias(weights, "router.bias", 0)
    scores = score(logits, config)
    preferred = best(scores, config.top_k)
    chosen = choose(scores, config, state.bias)
    amounts = torch.where(chosen, scores, 0.0)
    if config.norm_topk_prob:
        amounts = amounts / amounts.sum(-1, keepdim=True)
    amounts = amounts * config.topk_scaling_factor
    kept = chosen if moe.capacity is None else within(moe.capacity, chosen, amounts.detach(), config)
    inner = torch.einsum("bsh,efh->bsef", x, weights["experts.up"].flatten(1, -2))
    inner = activate(inner + bias(weights, "experts.up_bias", 1))
    outputs = torch.einsum("bsef,ehf->bseh", inner, weights["experts.down"]) + bias(weights, "experts.down_bias", 1)
    y = (torch.where(kept, amounts, 0.0).unsqueeze(-1) * outputs).sum(2)
    if moe.shared_expert_intermediate_size:
        inner = activate(x @ weights["shared.up.weight"].flatten(0, -2).T + bias(weights, "shared.up.bias", 0))
        shared = inner @ weights["shared.down.weight"].T + bias(weights, "shared.down.bias", 0)
        if moe.shared_expert_gate:
            shared = shared / (1 + torch.exp(-(x @ weights["shared.gate"].T)))
        y = y + shared
    counts = torch.stack([preferred, chosen, kept]).sum((1, 2))
    return y, losses(logits, scores, preferred, state), counts


def bias(weights: dict[str, Tensor], name: str, first: int) -> Tensor:
    """The dims from the `first` on of a bias as one, 0 where there is none."""
    return weights[name].flatten(first) if name in weights else torch.zeros(())


def score(logits: Tensor, config: RouterConfig) -> Tensor:
    """What each token gives each expert."""
    if config.score_function == "softmax":
        return torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
    assert config.score_function == "sigmoid"
    return 1 / (1 + torch.exp(-logits))


def best(scores: Tensor, count: int) -> Tensor:
    """Whether an expert is among the `count` best of a token, of equal ones the first: bool [B, S, E]."""
    places = scores.detach().argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, places, True)


def choose(scores: Tensor, config: RouterConfig, bias: Tensor) -> Tensor:
    """Whether a token goes to an expert: by score and bias, in the best groups alone, a group being worth its best
    experts' sum."""
    assert config.routing_type == "top_k"
    scores = scores.detach() + bias.to(scores.dtype)
    if config.group_topk < config.num_groups:
        groups = scores.unflatten(-1, (config.num_groups, -1))
        worth = groups.sort(-1, descending=True).values[..., : config.top_k // config.group_topk].sum(-1)
        is_open = best(worth, config.group_topk).unsqueeze(-1).expand_as(groups).flatten(-2)
        scores = torch.where(is_open, scores, -math.inf)
    return best(scores, config.top_k)


def within(capacity: ExpertCapacity, chosen: Tensor, amounts: Tensor, config: RouterConfig) -> Tensor:
    """Those of the chosen that an expert takes of each row: of the greatest amounts, or the first tokens."""
    length = chosen.shape[1]
    most = math.ceil(capacity.factor * length * config.top_k / config.num_experts - 1e-9)
    places = torch.arange(length).view(1, -1, 1)
    merit = amounts if capacity.drop_policy == "probs" else -places.to(amounts.dtype)
    order = torch.where(chosen, merit, -math.inf).argsort(dim=1, descending=True, stable=True)
    ranks = torch.empty_like(order).scatter(1, order, places.expand_as(order).contiguous())
    return chosen & (ranks < most)


def losses(logits: Tensor, scores: Tensor, preferred: Tensor, state: RouterState) -> dict[str, Tensor]:
    """The auxiliary losses of each row, summed over its tokens and without coefficients: [B] by name."""
    config = state.config
    shares = scores / scores.sum(-1, keepdim=True)
    found = {}
    for loss in config.aux_losses:
        assert loss.scope in ("sequence", "global"), "a loss over a microbatch depends on the layout"
        counts = preferred.sum(1, keepdim=True) if loss.scope == "sequence" else state.shares.view(1, 1, -1)
        # Before the first step nothing is known, and all experts count as equally busy.
        busy = counts.double() * config.num_experts / counts.sum(-1, keepdim=True) if counts.any() else counts + 1.0
        found[loss.scope] = (shares * busy.to(shares.dtype)).sum((1, 2))
    if config.z_loss:
        found["z"] = torch.log(torch.exp(logits).sum(-1)).square().sum(1)
    return found


def objective(found: dict[str, Tensor], config: RouterConfig) -> Tensor:
    """The losses of each row times their coefficients: [B]."""
    coefficients = {loss.scope: loss.coefficient for loss in config.aux_losses} | {"z": config.z_loss}
    return sum((coefficients[name] * loss for name, loss in found.items()), torch.zeros(()))
