"""The router of a layer of experts: which experts each token goes to, and how much each of them weighs.

It stands between the norm and the dispatch of a layer. Each rank routes a part of the tokens: the weight is whole on
all ranks, and its gradients are parts of a sum over the axis that cuts tokens, as a norm's are.
Logits, scores and weights are float32 or wider whatever the precision. Tokens of padding go nowhere.

Legend: T tokens of this rank, H hidden, E experts, K chosen, P pools.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.comm import rng
from lightning_megatron.mesh import Axis
from lightning_megatron.moe import load_balancing, topk
from lightning_megatron.moe.config import RouterConfig
from lightning_megatron.moe.load import RoutingRecords
from lightning_megatron.moe.sequence_groups import RoutedTokens, SequenceGroups, routing_map, sum_over
from lightning_megatron.precision.autocast import autocast
from lightning_megatron.sharding import Initial, shard_parameter

# Below it the scores of a token do not sum up to anything.
_LEAST_SUM = 1e-20


@dataclass(frozen=True)
class Routing:
    """Where the tokens of a rank go."""

    expert_ids_TK: Tensor
    """int64: experts, -1 for none: of padding, and of "expert_choice", where K is E."""
    probs_TK: Tensor
    """Of their outputs in the token's, 0 for none."""
    auxiliary: Tensor
    # []: the sum of this rank's auxiliary losses, each token's times its weight and each loss times its coefficient;
    # 0 in evaluation, and of a call that does not count


class Router(nn.Module):
    """From hidden states [T/cut, H] to a `Routing`; weight [E, H].

    `cut` is the axis over which tokens are cut when they come. `name` is the router's name in the model: it names the
    random numbers of jitter and of chance. Without a bias or a loss over the global batch it holds no state beside its
    weight.
    """

    expert_bias: Tensor
    global_tokens_per_expert: Tensor

    def __init__(
        self, config: RouterConfig, hidden_size: int, *, tp: Axis, cut: Axis, name: str, initial: Initial
    ) -> None:
        super().__init__()
        self.config = config
        self.weight = shard_parameter((config.num_experts, hidden_size), initial=initial, replicas=(tp,), partial=cut)
        self.jitter_key, self.chance_key = rng.key(name, "jitter"), rng.key(name, "chance")
        self.records = RoutingRecords()
        if self.has_bias:
            self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=torch.float32))
        if self.is_global:
            # As integers, so that no cast of the module rounds them.
            self.register_buffer("global_tokens_per_expert", torch.zeros(config.num_experts, dtype=torch.int64))

    @property
    def has_bias(self) -> bool:
        return self.config.bias_update_rate > 0

    @property
    def is_global(self) -> bool:
        """Whether a loss looks at the shares of a global batch."""
        return any(loss.scope == "global" for loss in self.config.aux_losses)

    @property
    def chooses_by_score(self) -> bool:
        """Whether the chosen are the best by score alone."""
        config = self.config
        return config.routing_type == "top_k" and not self.has_bias and config.group_topk == config.num_groups

    @property
    def num_experts(self) -> int:
        return self.config.num_experts

    @property
    def loss_names(self) -> tuple[str, ...]:
        return self.config.loss_names

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def forward(self, x_TH: Tensor, tokens: RoutedTokens) -> Routing:
        """Talks over the axes that cut sequences, where a loss or a choice looks at whole ones."""
        pools = tokens.pools
        logits_TE = self._logits(x_TH, tokens)
        scores_TE = score(logits_TE, self.config)
        with torch.no_grad():
            expert_ids_TK = self._choose(logits_TE, scores_TE, tokens, pools)
            expert_ids_TK = torch.where(tokens.is_real_T.unsqueeze(1), expert_ids_TK, -1)
        probs_TK = topk_probs(logits_TE, scores_TE, expert_ids_TK, self.config)
        auxiliary = logits_TE.new_zeros(())
        if self.training and tokens.is_counted:
            auxiliary = self._record(logits_TE, scores_TE, expert_ids_TK, tokens, pools)
        return Routing(expert_ids_TK, probs_TK, auxiliary)

    @torch.no_grad()
    def learn(self, preferred_E: Tensor, chosen_E: Tensor) -> None:
        """Takes in the counts of a whole global batch, once a step: `load.end_step` calls it."""
        if self.has_bias and self.weight.requires_grad:
            # That of a frozen router is frozen too.
            self.expert_bias += self.config.bias_update_rate * load_balancing.expert_bias_step(chosen_E)
        if self.is_global:
            # A step without any token says nothing about what comes.
            self.global_tokens_per_expert.copy_(
                torch.where(preferred_E.sum() > 0, preferred_E, self.global_tokens_per_expert)
            )

    def _logits(self, x_TH: Tensor, tokens: RoutedTokens) -> Tensor:
        """float32 or wider, under autocast too: [T, E]."""
        dtype = torch.promote_types(x_TH.dtype, getattr(torch, self.config.dtype))
        # What padding holds must not reach the weight, NaN neither.
        x_TH = x_TH.to(dtype).masked_fill(~tokens.is_real_T.unsqueeze(1), 0.0)
        if self.training and self.config.jitter:
            columns_H = torch.arange(x_TH.shape[1], device=x_TH.device)
            keys_T1 = rng.bits(self.jitter_key, tokens.keys_T).unsqueeze(1)
            x_TH = x_TH * (1.0 + self.config.jitter * (2.0 * rng.uniform(keys_T1, columns_H) - 1.0)).to(dtype)
        with autocast(x_TH, None):
            return F.linear(x_TH, self.weight.to(dtype))

    def _choose(self, logits_TE: Tensor, scores_TE: Tensor, tokens: RoutedTokens, pools: SequenceGroups) -> Tensor:
        """The experts of each token, those of padding too: int64 [T, K]."""
        config, kind = self.config, self.config.routing_type
        if kind == "expert_choice":
            return topk.expert_choice(scores_TE, tokens.positions_T, pools, config.top_k)
        if kind == "random":
            return topk.random(rng.bits(self.chance_key, tokens.keys_T), config.num_experts, config.top_k)
        if kind == "round_robin":
            return topk.round_robin(tokens.positions_T, config.num_experts, config.top_k)
        if kind == "sinkhorn" and self.training:
            scores_TE = topk.sinkhorn(logits_TE, pools, config.num_sinkhorn_iterations)
        if self.has_bias:
            scores_TE = scores_TE + self.expert_bias.to(scores_TE.dtype)
        if config.group_topk < config.num_groups:
            scores_TE = topk.group_limited_scores(
                scores_TE,
                num_groups=config.num_groups,
                group_topk=config.group_topk,
                count=config.top_k,
            )
        return topk.topk(scores_TE, config.top_k)

    def _record(
        self, logits_TE: Tensor, scores_TE: Tensor, expert_ids_TK: Tensor, tokens: RoutedTokens, pools: SequenceGroups
    ) -> Tensor:
        """The auxiliary losses of this rank's tokens, each times its coefficient, as one sum: []."""
        real_T, weights_T = tokens.is_real_T, tokens.weights_T.to(logits_TE.dtype)
        with torch.no_grad():
            chosen_TE = preferred_TE = routing_map(expert_ids_TK, self.num_experts)
            if self.config.aux_losses and not self.chooses_by_score:
                best_TK = topk.topk(scores_TE, self.config.top_k)
                preferred_TE = routing_map(torch.where(real_T.unsqueeze(1), best_TK, -1), self.num_experts)
        probabilities_TE = normalized_scores(scores_TE, self.config)
        terms = []
        for loss in self.config.aux_losses:
            load_TE = self._load(loss.scope, preferred_TE, pools, scores_TE.dtype)
            terms.append((loss.coefficient, load_balancing.aux_loss_sum(probabilities_TE, load_TE, weights_T, real_T)))
        if self.config.z_loss:
            terms.append((self.config.z_loss, load_balancing.z_loss_sum(logits_TE, weights_T, real_T)))
        weight = torch.where(real_T, tokens.weights_T, 0.0).sum(dtype=torch.float64)
        sums_S = torch.stack([weight, *(term.detach().double() for _, term in terms)])
        self.records.add(tokens.call, torch.stack([preferred_TE.sum(0), chosen_TE.sum(0)]), sums_S)
        return torch.stack([logits_TE.new_zeros(()), *(coefficient * term for coefficient, term in terms)]).sum()

    def _load(self, scope: str, preferred_TE: Tensor, pools: SequenceGroups, dtype: torch.dtype) -> Tensor:
        """How busy the experts of each token's pool are: [T, E], or [1, E] for all."""
        if scope == "sequence":
            return pools.spread(load_balancing.expert_load(pools.sum(preferred_TE), dtype))
        if scope == "microbatch":
            return load_balancing.expert_load(sum_over(preferred_TE.sum(0, keepdim=True), pools.axes), dtype)
        return load_balancing.expert_load(self.global_tokens_per_expert.unsqueeze(0), dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """A module cast to half takes its buffers along; a bias that moves by 0.001 would not move any more."""
        wide: Any = self.expert_bias if self.has_bias else None
        super()._apply(fn, recurse)
        if wide is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = wide.to(self.expert_bias.device)
        return self

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.config.top_k}, routing_type={self.config.routing_type!r}"


def score(logits_TE: Tensor, config: RouterConfig) -> Tensor:
    """What a token gives each expert: [T, E]."""
    if config.score_function == "softmax":
        return logits_TE.softmax(1)
    if config.score_function == "sigmoid":
        return logits_TE.sigmoid()
    # Far below 0 softplus is 0, where the slope of the root has no end.
    return F.softplus(logits_TE).clamp(min=torch.finfo(logits_TE.dtype).tiny).sqrt()


def topk_probs(logits_TE: Tensor, scores_TE: Tensor, expert_ids_TK: Tensor, config: RouterConfig) -> Tensor:
    """The weights of the chosen experts, 0 where there is none: [T, K]."""
    places_TK = expert_ids_TK.clamp(min=0)
    if config.norm_topk_prob and config.score_function == "softmax":
        # The same as dividing by their sum, where that is not too small to divide by.
        probs_TK = logits_TE.gather(1, places_TK).softmax(1)
    else:
        probs_TK = scores_TE.gather(1, places_TK)
        if config.norm_topk_prob:
            probs_TK = probs_TK / (probs_TK.sum(1, keepdim=True) + _LEAST_SUM)
    return torch.where(expert_ids_TK >= 0, probs_TK * config.topk_scaling_factor, 0.0)


def normalized_scores(scores_TE: Tensor, config: RouterConfig) -> Tensor:
    """The scores, scaled so that those of a token sum up to 1: [T, E]."""
    if config.score_function == "softmax":
        return scores_TE
    return scores_TE / (scores_TE.sum(1, keepdim=True) + _LEAST_SUM)
