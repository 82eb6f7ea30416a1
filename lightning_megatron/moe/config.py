"""Configuration of mixture-of-experts layers: the router, load balancing, expert capacity and the token dispatcher."""

import math
from typing import Literal, get_args

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.moe.capacity import ExpertCapacity

Scope = Literal["sequence", "microbatch", "global"]
ScoreFunction = Literal["softmax", "sigmoid", "sqrt_softplus"]
RoutingType = Literal["top_k", "expert_choice", "sinkhorn", "random", "round_robin"]
RouterDtype = Literal["float32", "float64"]
DispatcherName = Literal["all_to_all", "all_gather"]
ExpertGemmName = Literal["grouped", "sequential"]


@config_dataclass
class AuxLoss:
    """A load-balancing loss: 1 (times its coefficient) where all experts get equally many tokens, more elsewhere."""

    scope: Scope = "sequence"
    """Tokens over which an expert's load is counted: each sequence (packed: each document), one microbatch of one
    data-parallel rank, or the global batch of the previous step. Only "microbatch" depends on the layout: on the number
    of microbatches and data-parallel ranks."""
    coefficient: float = 0.01
    """Coefficient of the auxiliary load-balancing loss in the objective."""

    def faults(self) -> list[str]:
        """Errors of this loss, one sentence each."""
        faults = []
        if self.scope not in get_args(Scope):
            faults.append(f"scope of a balance loss ({self.scope!r}) must be one of {_listed(get_args(Scope))}")
        if not (math.isfinite(self.coefficient) and self.coefficient > 0):
            faults.append(
                f"coefficient of the balance loss per {self.scope} ({self.coefficient}) must be above 0; "
                "for no loss leave it out of aux_losses"
            )
        return faults


@config_dataclass
class RouterConfig:
    """The router of a mixture-of-experts layer. Raises ValueError that lists all errors at once."""

    num_experts: int
    """Number of experts of a layer, the shared expert not counted."""
    top_k: int = 2
    """Number of experts per token; with routing_type "expert_choice" the mean number."""
    routing_type: RoutingType = "top_k"
    """How tokens and experts are matched: "top_k", each token takes its best experts; "expert_choice", each expert
    takes its best tokens of every sequence; "sinkhorn", top-k of scores that Sinkhorn iterations balance within a
    sequence (in training only); and, for benchmarks, "random" or "round_robin"."""
    score_function: ScoreFunction = "softmax"
    """Function from router logits to scores: "softmax" over all experts, or "sigmoid" or "sqrt_softplus" of each."""
    norm_topk_prob: bool = True
    """Whether the probabilities of a token's experts are scaled to sum to topk_scaling_factor. For "softmax" scores:
    softmax after top-k if true, before top-k if false."""
    logit_bias: bool = False
    """Whether router logits have a learned bias for each expert."""
    topk_scaling_factor: float = 1.0
    """Factor on the router probabilities of the chosen experts."""
    num_groups: int = 1
    """Number of equal groups of neighbouring experts, for group-limited routing; 1 disables it."""
    group_topk: int = 1
    """Number of groups that a token may use: those with the highest sum of their best top_k / group_topk scores."""
    aux_losses: tuple[AuxLoss, ...] = ()
    """Auxiliary load-balancing losses, at most one of each scope."""
    z_loss: float = 0.0
    """Coefficient of the router z-loss (mean square of the log-sum-exp of logits) in the objective; 0 disables it."""
    bias_update_rate: float = 0.0
    """Step of the expert bias (aux-loss-free load balancing): after each optimizer step the bias of each expert, which
    top-k sees and router probabilities do not, moves by this much towards balance; 0: it stays as it is, and there is
    none unless expert_bias is set."""
    expert_bias: bool = False
    """Whether there is an expert bias even where bias_update_rate is 0, as in a model that was trained with one."""
    jitter: float = 0.0
    """Noise in training: router inputs are multiplied by random numbers from 1 - jitter to 1 + jitter; 0 is none."""
    num_sinkhorn_iterations: int = 20
    """Number of Sinkhorn iterations with routing_type "sinkhorn"."""
    dtype: RouterDtype = "float32"
    """Least precision of logits, scores and probabilities; wider inputs stay as wide as they are."""

    def __post_init__(self) -> None:
        if faults := self.faults():
            raise ValueError("\n".join(faults))

    def faults(self) -> list[str]:
        """Errors of this configuration, one sentence each."""
        faults = [
            f"{name} ({getattr(self, name)!r}) must be one of {_listed(get_args(choices))}"
            for name, choices in (
                ("routing_type", RoutingType),
                ("score_function", ScoreFunction),
                ("dtype", RouterDtype),
            )
            if getattr(self, name) not in get_args(choices)
        ]
        return faults + self._size_faults() + self._weight_faults() + self._balance_faults()

    @property
    def has_expert_bias(self) -> bool:
        """Whether each expert has a bias that top-k sees and router probabilities do not."""
        return self.expert_bias or self.bias_update_rate > 0

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Names of the auxiliary losses in use, in the order of their sums."""
        return (*(loss.scope for loss in self.aux_losses), *(("z",) if self.z_loss else ()))

    def _size_faults(self) -> list[str]:
        small = [
            f"{name} ({size}) must be at least 1"
            for name in ("num_experts", "top_k", "num_groups", "group_topk", "num_sinkhorn_iterations")
            if (size := getattr(self, name)) < 1
        ]
        if small:
            return small
        faults = []
        if self.top_k > self.num_experts:
            faults.append(f"top_k ({self.top_k}) must be at most num_experts ({self.num_experts})")
        if self.num_experts % self.num_groups:
            fits = ", ".join(str(n) for n in range(1, self.num_experts + 1) if self.num_experts % n == 0)
            faults.append(
                f"num_groups ({self.num_groups}) must divide num_experts ({self.num_experts}); it may be {fits}"
            )
        if self.group_topk > self.num_groups:
            faults.append(f"group_topk ({self.group_topk}) must be at most num_groups ({self.num_groups})")
        elif not faults and (
            self.top_k % self.group_topk or self.top_k * self.num_groups > self.group_topk * self.num_experts
        ):
            size = self.num_experts // self.num_groups
            fitting = [str(n * self.group_topk) for n in range(1, size + 1)]
            faults.append(
                f"top_k ({self.top_k}) must be a multiple of group_topk ({self.group_topk}), and at most "
                f"{size} for each of them, which is the experts of a group; it may be {', '.join(fitting)}"
            )
        if self.num_groups > 1 and self.routing_type != "top_k":
            faults.append(
                f"num_groups ({self.num_groups}) limits routing_type 'top_k' alone, and routing_type is "
                f"{self.routing_type!r}; set 1"
            )
        return faults

    def _weight_faults(self) -> list[str]:
        faults = []
        if self.norm_topk_prob and self.routing_type == "expert_choice":
            faults.append(
                "norm_topk_prob (True) has no meaning for routing_type 'expert_choice', where a token may have no "
                "expert; set norm_topk_prob=False"
            )
        elif self.norm_topk_prob and self.top_k == 1:
            faults.append(
                f"top_k (1) with norm_topk_prob=True makes every weight {self.topk_scaling_factor:g} and gives the "
                f"router no gradient; set norm_topk_prob=False, which weighs by the {self.score_function} score "
                "itself, or top_k 2 or more"
            )
        if not (math.isfinite(self.topk_scaling_factor) and self.topk_scaling_factor > 0):
            faults.append(f"topk_scaling_factor ({self.topk_scaling_factor}) must be above 0")
        if not 0 <= self.jitter < 1:
            faults.append(f"jitter ({self.jitter}) must be from 0 to below 1; 0.01 is usual")
        return faults

    def _balance_faults(self) -> list[str]:
        faults = [fault for loss in self.aux_losses for fault in loss.faults()]
        scopes = [loss.scope for loss in self.aux_losses]
        faults += [
            f"aux_losses has {scopes.count(scope)} losses of scope {scope!r}; give one with the sum of their "
            "coefficients"
            for scope in dict.fromkeys(scopes)
            if scopes.count(scope) > 1
        ]
        faults += [
            f"{name} ({getattr(self, name)}) must be 0 or above"
            for name in ("z_loss", "bias_update_rate")
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0)
        ]
        if self.routing_type == "expert_choice" and self.aux_losses:
            faults.append("routing_type 'expert_choice' keeps experts equally busy by itself; leave aux_losses empty")
        if self.routing_type != "top_k" and self.bias_update_rate > 0:
            faults.append(
                f"bias_update_rate ({self.bias_update_rate}) acts on routing_type 'top_k' alone, and routing_type is "
                f"{self.routing_type!r}; set 0"
            )
        return faults


@config_dataclass
class MoEConfig:
    """Mixture-of-experts layers in place of dense MLPs. Raises ValueError that lists all errors at once."""

    router: RouterConfig
    """The router and its number of experts."""
    ffn_hidden_size: int = 0
    """Hidden features of one expert's MLP; 0 means ffn_hidden_size of the model."""
    layer_freq: int = 1
    """Every how many layers one has experts: layers 0, layer_freq, 2 * layer_freq ..."""
    layers: tuple[int, ...] = ()
    """Layers with experts, counted from 0; given in place of layer_freq."""
    shared_expert_intermediate_size: int = 0
    """Hidden features of the shared expert, which every token goes through; 0 means no shared expert."""
    shared_expert_gate: bool = False
    """Whether the shared expert's output is scaled per token by the sigmoid of a learned gate."""
    capacity: ExpertCapacity | None = None
    """Number of tokens that an expert accepts; without it no token is dropped."""
    dispatcher: DispatcherName = "all_to_all"
    """Token dispatcher: "all_to_all" sends tokens to the ranks of their experts, "all_gather" to all ranks."""
    expert_gemm: ExpertGemmName = "grouped"
    """GEMM of the experts of a rank: "grouped", one kernel for all where there is one, or "sequential"."""

    def __post_init__(self) -> None:
        if faults := self.faults():
            raise ValueError("\n".join(faults))

    def faults(self) -> list[str]:
        """Errors of this configuration, one sentence each."""
        faults = [
            f"moe {name} ({getattr(self, name)!r}) must be one of {_listed(get_args(choices))}"
            for name, choices in (("dispatcher", DispatcherName), ("expert_gemm", ExpertGemmName))
            if getattr(self, name) not in get_args(choices)
        ]
        faults += [
            f"moe {name} ({getattr(self, name)}) must be at least 0"
            for name in ("ffn_hidden_size", "shared_expert_intermediate_size")
            if getattr(self, name) < 0
        ]
        if self.layer_freq < 1:
            faults.append(f"moe layer_freq ({self.layer_freq}) must be at least 1, which gives all layers experts")
        if self.layers and self.layer_freq != 1:
            faults.append(
                f"moe layer_freq ({self.layer_freq}) and layers both say which layers have experts; give one of them"
            )
        if len(set(self.layers)) < len(self.layers):
            faults.append("moe layers name a layer twice; name each once")
        if self.shared_expert_gate and not self.shared_expert_intermediate_size:
            faults.append(
                "shared_expert_gate needs a shared expert; give shared_expert_intermediate_size, or leave it out"
            )
        return faults

    def layer_faults(self, num_layers: int) -> list[str]:
        """Errors of this configuration in a stack of num_layers layers, one sentence each."""
        unknown = [layer for layer in self.layers if not 0 <= layer < num_layers]
        if not unknown:
            return []
        return [
            f"moe layers {', '.join(map(str, unknown))} must be from 0 to num_layers - 1 ({num_layers - 1}): layers "
            "are counted from 0"
        ]

    def has_experts(self, layer: int) -> bool:
        """Whether the layer, counted from 0, has experts."""
        return layer in self.layers if self.layers else layer % self.layer_freq == 0

    @property
    def has_losses(self) -> bool:
        """Whether routers add an auxiliary loss to the objective."""
        return bool(self.router.aux_losses) or self.router.z_loss > 0


def _listed(choices: tuple[str, ...]) -> str:
    return ", ".join(map(repr, choices))
