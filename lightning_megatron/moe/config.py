"""Which layers have experts, how a router chooses among them and keeps them equally busy, and how tokens reach them."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_megatron.moe.capacity import ExpertCapacity

Scope = Literal["sequence", "microbatch", "global"]
ScoreFunction = Literal["softmax", "sigmoid", "sqrt_softplus"]
RoutingType = Literal["top_k", "expert_choice", "sinkhorn", "random", "round_robin"]
RouterDtype = Literal["float32", "float64"]
DispatcherName = Literal["all_to_all", "all_gather"]
ExpertGemmName = Literal["grouped", "sequential"]


@dataclass(frozen=True, kw_only=True)
class AuxLoss:
    """An auxiliary loss that is 1 times its coefficient where all experts are equally busy, and more where not."""

    scope: Scope = "sequence"
    """Over which tokens an expert's share is taken: each sequence (packed: each document), one model call on one
    replica, or the global batch of the step before. Only that of "microbatch" depends on the layout: on the number of
    microbatches and of replicas."""
    coefficient: float = 0.01
    """Of the loss in the objective."""

    def faults(self) -> list[str]:
        """Every rule that this loss breaks, one sentence each."""
        faults = []
        if self.scope not in get_args(Scope):
            faults.append(f"scope of a balance loss ({self.scope!r}) must be one of {_listed(get_args(Scope))}")
        if not (math.isfinite(self.coefficient) and self.coefficient > 0):
            faults.append(
                f"coefficient of the balance loss per {self.scope} ({self.coefficient}) must be above 0; "
                "for no loss leave it out of aux_losses"
            )
        return faults


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The router of a layer of experts. Raises ValueError, telling all faults at once."""

    num_experts: int
    """Of the layer."""
    top_k: int = 2
    """Experts of a token; under "expert_choice" the mean number of them."""
    routing_type: RoutingType = "top_k"
    """Who chooses: each token its best experts; each expert its best tokens of every sequence; tokens by a plan in
    which the experts of a sequence are equally busy (in training alone); or, for benchmarks, chance, or experts in
    turn."""
    score_function: ScoreFunction = "softmax"
    """Of a token for its experts: softmax over all of them, or a function of each alone."""
    norm_topk_prob: bool = True
    """The weights of a token's chosen experts sum up to topk_scaling_factor. With softmax this is softmax after the
    choice, without it softmax before."""
    topk_scaling_factor: float = 1.0
    """By which the weights are multiplied."""
    num_groups: int = 1
    """Of experts, neighbours in each."""
    group_topk: int = 1
    """Of them may be used by one token: those whose best top_k / group_topk experts have the highest sum."""
    aux_losses: tuple[AuxLoss, ...] = ()
    """Auxiliary losses, at most one of each scope."""
    z_loss: float = 0.0
    """Coefficient of the mean square of the log-sum-exp of logits."""
    bias_update_rate: float = 0.0
    """After each step a bias that choices see, and weights do not, goes so far up or down for each expert; 0: no
    bias."""
    jitter: float = 0.0
    """In training, inputs of the router are multiplied by random numbers from 1 - jitter to 1 + jitter."""
    num_sinkhorn_iterations: int = 20
    """Of the plan of "sinkhorn"."""
    dtype: RouterDtype = "float32"
    """Of logits, scores and weights; wider inputs stay as wide as they are."""

    def __post_init__(self) -> None:
        if faults := self.faults():
            raise ValueError("\n".join(faults))

    def faults(self) -> list[str]:
        """Every rule that this configuration breaks, one sentence each."""
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
    def loss_names(self) -> tuple[str, ...]:
        """The auxiliary losses there are, in the order of their sums."""
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


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Layers of experts in the place of dense feed-forward networks. Raises ValueError, telling all faults at once."""

    router: RouterConfig
    """Who chooses among how many experts."""
    ffn_hidden_size: int = 0
    """Features of one expert between its two matrices; 0: those of the model's dense layers."""
    layer_freq: int = 1
    """Of so many layers the first has experts: layers 0, every, 2 * every ..."""
    layers: tuple[int, ...] = ()
    """In the place of `layer_freq`: the layers with experts, counted from 0."""
    shared_expert_intermediate_size: int = 0
    """Features of an expert that every token goes through beside those chosen; 0: there is none."""
    shared_expert_gate: bool = False
    """Each token's output of the shared expert is weighed by the sigmoid of a product with a learned vector."""
    capacity: ExpertCapacity | None = None
    """How many tokens an expert takes; none: all that chose it."""
    dispatcher: DispatcherName = "all_to_all"
    """How tokens travel: to the ranks of their experts, or to all."""
    expert_gemm: ExpertGemmName = "grouped"
    """How the experts of a rank multiply: all in one kernel where there is one, or one after another."""

    def __post_init__(self) -> None:
        if faults := self.faults():
            raise ValueError("\n".join(faults))

    def faults(self) -> list[str]:
        """Every rule that this configuration breaks, one sentence each."""
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
        """What is wrong with it for a stack of so many layers, one sentence each."""
        unknown = [layer for layer in self.layers if not 0 <= layer < num_layers]
        if not unknown:
            return []
        return [
            f"moe layers {', '.join(map(str, unknown))} must be from 0 to num_layers - 1 ({num_layers - 1}): layers "
            "are counted from 0"
        ]

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        return layer in self.layers if self.layers else layer % self.layer_freq == 0

    @property
    def has_losses(self) -> bool:
        """Whether its routers add to the objective."""
        return bool(self.router.aux_losses) or self.router.z_loss > 0


def _listed(choices: tuple[str, ...]) -> str:
    return ", ".join(map(repr, choices))
