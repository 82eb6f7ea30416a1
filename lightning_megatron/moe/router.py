"""The router of a mixture-of-experts layer: the experts of each token and their probabilities.

It stands between the norm and the token dispatcher. Each rank routes a part of the tokens: the weight is replicated,
and its gradients are partial sums over the axis that cuts tokens, as a norm's are.
Logits, scores and probabilities are float32 or wider whatever the precision. Padding goes to no expert.

T tokens of this rank, H hidden, E experts, K experts of a token, P sequence groups.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.comm import collectives, rng
from lightning_megatron.mesh import Axis
from lightning_megatron.moe import load_balancing, topk
from lightning_megatron.moe.config import RouterConfig
from lightning_megatron.moe.load import RoutingRecords, RoutingReport
from lightning_megatron.moe.sequence_groups import RoutedTokens, SequenceGroups, routing_map, sum_over
from lightning_megatron.precision.autocast import autocast
from lightning_megatron.sharding import Initial, shard_parameter

# Least sum of a token's scores, by which they are divided.
_LEAST_SUM = 1e-20


@dataclass(frozen=True)
class Routing:
    """Experts and probabilities of a rank's tokens, and its auxiliary losses."""

    expert_ids_TK: Tensor
    """Experts of each token, -1 for none (padding, and with "expert_choice", where K is E): int64."""
    probs_TK: Tensor
    """Router probability of each expert, which scales its output; 0 for none."""
    auxiliary: Tensor
    """Sum of this rank's auxiliary losses, weighted per token and times their coefficients: []. 0 in evaluation, and
    for a call that does not count."""


class Router(nn.Module):
    """Maps hidden states [T/cut, H] to a `Routing`; weight [E, H].

    `cut` is the axis over which tokens come cut. `name` is the router's name in the model and seeds jitter and random
    routing. Buffers exist only with an expert bias or a loss over the global batch.
    """

    bias: nn.Parameter | None
    expert_bias: Tensor
    global_tokens_per_expert: Tensor

    def __init__(
        self, config: RouterConfig, hidden_size: int, *, tp: Axis, cut: Axis, name: str, initial: Initial
    ) -> None:
        super().__init__()
        self.config = config
        self.weight = shard_parameter((config.num_experts, hidden_size), initial=initial, replicas=(tp,), partial=cut)
        self.bias = None
        if config.logit_bias:
            self.bias = shard_parameter((config.num_experts,), initial=Initial(), replicas=(tp,), partial=cut)
        self.jitter_key, self.chance_key = rng.key(name, "jitter"), rng.key(name, "chance")
        self.records = RoutingRecords()
        if self.has_bias:
            self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=torch.float32))
        if self.is_global:
            # As integers, so that no cast of the module rounds them.
            self.register_buffer("global_tokens_per_expert", torch.zeros(config.num_experts, dtype=torch.int64))

    @property
    def has_bias(self) -> bool:
        return self.config.has_expert_bias

    @property
    def is_global(self) -> bool:
        """Whether a load-balancing loss looks at the load of the global batch."""
        return any(loss.scope == "global" for loss in self.config.aux_losses)

    @property
    def chooses_by_score(self) -> bool:
        """Whether a token's experts are the top-k by score alone."""
        config = self.config
        return config.routing_type == "top_k" and not self.has_bias and config.group_topk == config.num_groups

    @property
    def num_experts(self) -> int:
        return self.config.num_experts

    def forward(self, x_TH: Tensor, tokens: RoutedTokens) -> Routing:
        """Routing of the tokens. Talks over the axes that cut sequences where a loss or routing needs full ones."""
        groups = tokens.sequence_groups
        logits_TE = self._logits(x_TH, tokens)
        scores_TE = score(logits_TE, self.config)
        with torch.no_grad():
            expert_ids_TK = self._choose(logits_TE, scores_TE, tokens, groups)
            expert_ids_TK = torch.where(tokens.is_real_T.unsqueeze(1), expert_ids_TK, -1)
        probs_TK = topk_probs(logits_TE, scores_TE, expert_ids_TK, self.config)
        auxiliary = logits_TE.new_zeros(())
        if self.training and tokens.is_counted:
            auxiliary = self._record(logits_TE, scores_TE, expert_ids_TK, tokens, groups)
        return Routing(expert_ids_TK, probs_TK, auxiliary)

    @torch.no_grad()
    def learn(self, preferred_E: Tensor, chosen_E: Tensor) -> None:
        """Updates expert bias and global load from the counts of a global batch; `end_step` calls it each step."""
        if self.config.bias_update_rate > 0 and self.weight.requires_grad:
            # The bias of a frozen router is frozen too.
            self.expert_bias += self.config.bias_update_rate * load_balancing.expert_bias_step(chosen_E)
        if self.is_global:
            # A step without tokens says nothing about the load.
            self.global_tokens_per_expert.copy_(
                torch.where(preferred_E.sum() > 0, preferred_E, self.global_tokens_per_expert)
            )

    def _logits(self, x_TH: Tensor, tokens: RoutedTokens) -> Tensor:
        """Router logits in float32 or wider, under autocast too: [T, E]."""
        dtype = torch.promote_types(x_TH.dtype, getattr(torch, self.config.dtype))
        # Values in padding, NaN among them, must not reach the gradient of the weight.
        x_TH = x_TH.to(dtype).masked_fill(~tokens.is_real_T.unsqueeze(1), 0.0)
        if self.training and self.config.jitter:
            columns_H = torch.arange(x_TH.shape[1], device=x_TH.device)
            keys_T1 = rng.bits(self.jitter_key, tokens.keys_T).unsqueeze(1)
            x_TH = x_TH * (1.0 + self.config.jitter * (2.0 * rng.uniform(keys_T1, columns_H) - 1.0)).to(dtype)
        with autocast(x_TH, None):
            return F.linear(x_TH, self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))

    def _choose(self, logits_TE: Tensor, scores_TE: Tensor, tokens: RoutedTokens, groups: SequenceGroups) -> Tensor:
        """Experts of each token, padding included: int64 [T, K]."""
        config, kind = self.config, self.config.routing_type
        if kind == "expert_choice":
            return topk.expert_choice(scores_TE, tokens.positions_T, groups, config.top_k)
        if kind == "random":
            return topk.random(rng.bits(self.chance_key, tokens.keys_T), config.num_experts, config.top_k)
        if kind == "round_robin":
            return topk.round_robin(tokens.positions_T, config.num_experts, config.top_k)
        if kind == "sinkhorn" and self.training:
            scores_TE = topk.sinkhorn(logits_TE, groups, config.num_sinkhorn_iterations)
        if self.has_bias:
            scores_TE = scores_TE + self.expert_bias.to(scores_TE.dtype)
        if config.group_topk < config.num_groups:
            scores_TE = topk.group_limited_scores(
                scores_TE, num_groups=config.num_groups, group_topk=config.group_topk, count=config.top_k
            )
        return topk.topk(scores_TE, config.top_k)

    def _record(
        self, logits_TE: Tensor, scores_TE: Tensor, expert_ids_TK: Tensor, tokens: RoutedTokens, groups: SequenceGroups
    ) -> Tensor:
        """Sum of the auxiliary losses of this rank's tokens, each times its coefficient: []."""
        real_T = tokens.is_real_T
        with torch.no_grad():
            chosen_TE = preferred_TE = routing_map(expert_ids_TK, self.num_experts)
            if self.config.aux_losses and not self.chooses_by_score:
                best_TK = topk.topk(scores_TE, self.config.top_k)
                preferred_TE = routing_map(torch.where(real_T.unsqueeze(1), best_TK, -1), self.num_experts)
        terms, weight = [], logits_TE.new_zeros((), dtype=torch.float64)
        if self.config.loss_names:
            assert tokens.weights_T is not None, "the model says that its routers have no auxiliary losses"
            weights_T = tokens.weights_T.to(logits_TE.dtype)
            probabilities_TE = normalized_scores(scores_TE, self.config)
            for loss in self.config.aux_losses:
                load_TE = self._load(loss.scope, preferred_TE, groups, scores_TE.dtype)
                term = load_balancing.aux_loss_sum(probabilities_TE, load_TE, weights_T, real_T)
                terms.append((loss.coefficient, term))
            if self.config.z_loss:
                terms.append((self.config.z_loss, load_balancing.z_loss_sum(logits_TE, weights_T, real_T)))
            weight = tokens.weights_T.masked_fill(~real_T, 0.0).sum(dtype=torch.float64)
        sums_S = torch.stack([weight, *(term.detach().double() for _, term in terms)])
        self.records.add(tokens.call, torch.stack([preferred_TE.sum(0), chosen_TE.sum(0)]), sums_S)
        return torch.stack([logits_TE.new_zeros(()), *(coefficient * term for coefficient, term in terms)]).sum()

    def _load(self, scope: str, preferred_TE: Tensor, groups: SequenceGroups, dtype: torch.dtype) -> Tensor:
        """Load of the experts over each token's scope: [T, E], or [1, E] for all tokens."""
        if scope == "sequence":
            return groups.spread(load_balancing.expert_load(groups.sum(preferred_TE), dtype))
        if scope == "microbatch":
            return load_balancing.expert_load(sum_over(preferred_TE.sum(0, keepdim=True), groups.axes), dtype)
        return load_balancing.expert_load(self.global_tokens_per_expert.unsqueeze(0), dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Keeps the expert bias in float32 when the module is cast: in 16 bits a step of 0.001 would be lost."""
        wide: Any = self.expert_bias if self.has_bias else None
        super()._apply(fn, recurse)
        if wide is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = wide.to(self.expert_bias.device)
        return self

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.config.top_k}, routing_type={self.config.routing_type!r}"


def end_step(routers: Sequence[Router], *, cut: Axis, data: Axis) -> list[RoutingReport]:
    """Reports of the routers for the step that ends; their expert biases have moved by one step.

    Call it once per optimizer step, after the last backward, on all ranks that hold these routers; it talks over
    `cut` (which cuts tokens before routers) and `data` (dp+cp), two all-reduces for all routers. For a skipped step
    call `records.forget()`.
    """
    if not routers:
        return []
    counts = [
        torch.cat(
            (
                _total(router.records.counts, (2, router.num_experts), torch.int64, router.weight.device),
                _total(router.records.accepted, (1, router.num_experts), torch.int64, router.weight.device),
            )
        )
        for router in routers
    ]
    sums = [_total(r.records.sums, (1 + len(r.config.loss_names),), torch.float64, r.weight.device) for r in routers]
    all_counts = torch.cat([each.flatten() for each in counts])
    all_sums = torch.cat(sums)
    for axis in (cut, data):
        all_counts, all_sums = collectives.all_reduce(all_counts, axis), collectives.all_reduce(all_sums, axis)
    reports = []
    counts_by_router = all_counts.split([each.numel() for each in counts])
    sums_by_router = all_sums.split([each.numel() for each in sums])
    for router, flat_counts, sums_S in zip(routers, counts_by_router, sums_by_router, strict=True):
        preferred_E, chosen_E, accepted_E = flat_counts.view(3, -1)
        router.learn(preferred_E, chosen_E)
        router.records.forget()
        weight, *losses = sums_S
        means = [torch.where(weight > 0, loss / weight, 0.0) for loss in losses]
        named = dict(zip(router.config.loss_names, means, strict=True))
        reports.append(RoutingReport(losses=named, counts_E=chosen_E.clone(), accepted_E=accepted_E.clone()))
    return reports


def score(logits_TE: Tensor, config: RouterConfig) -> Tensor:
    """Score of each expert for a token: [T, E]."""
    if config.score_function == "softmax":
        return logits_TE.softmax(1)
    if config.score_function == "sigmoid":
        return logits_TE.sigmoid()
    # Far below 0 softplus is 0, where the slope of the square root is infinite.
    return F.softplus(logits_TE).clamp(min=torch.finfo(logits_TE.dtype).tiny).sqrt()


def topk_probs(logits_TE: Tensor, scores_TE: Tensor, expert_ids_TK: Tensor, config: RouterConfig) -> Tensor:
    """Router probabilities of the chosen experts, 0 where there is none: [T, K]."""
    index_TK = expert_ids_TK.clamp(min=0)
    if config.norm_topk_prob and config.score_function == "softmax":
        # It equals dividing by their sum, and is exact where that sum is tiny.
        probs_TK = logits_TE.gather(1, index_TK).softmax(1)
    else:
        probs_TK = scores_TE.gather(1, index_TK)
        if config.norm_topk_prob:
            probs_TK = probs_TK / (probs_TK.sum(1, keepdim=True) + _LEAST_SUM)
    return torch.where(expert_ids_TK >= 0, probs_TK * config.topk_scaling_factor, 0.0)


def normalized_scores(scores_TE: Tensor, config: RouterConfig) -> Tensor:
    """Scores scaled so that they sum to 1 for each token: [T, E]."""
    if config.score_function == "softmax":
        return scores_TE
    return scores_TE / (scores_TE.sum(1, keepdim=True) + _LEAST_SUM)


def _total(by_call: dict[int, Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Sum over calls in the order of their numbers; zeros without calls."""
    nothing = torch.zeros(shape, dtype=dtype, device=device)
    return torch.stack([nothing, *(by_call[call].view(shape) for call in sorted(by_call))]).sum(0)
