"""Architecture of a transformer: the sizes and choices of its layers, and nothing about who runs them.

Read by the layers, by the cost model and by checkpoints. Faults of a configuration are reported all at once; those
that only a layout has are reported by its `layout_faults`, before any process group is needed.
"""

import math
from collections.abc import Callable
from typing import ClassVar, Literal

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.mesh import Sizes
from lightning_megatron.moe import layout as moe_layout
from lightning_megatron.moe.config import MoEConfig
from lightning_megatron.tensor.activation import GATED, Activation
from lightning_megatron.transformer.latent_config import LatentConfig
from lightning_megatron.transformer.rotary import RopeScaling, yarn_amplitude

Normalization = Literal["layernorm", "rmsnorm", "zero_centered_rmsnorm"]
NormPlacement = Literal["pre", "sandwich", "output", "post"]
Position = Literal["learned", "rotary", "relative", "none"]
_CHOICES = {
    "activation": ("gelu", "gelu_tanh", "quick_gelu", "relu", "swiglu", "geglu_tanh", "clamped_swiglu"),
    "normalization": ("layernorm", "rmsnorm", "zero_centered_rmsnorm"),
}


@config_dataclass
class TransformerConfig:
    """Architecture of a stack of transformer layers. A size of 0 follows from other sizes and is filled in at once."""

    positions: ClassVar[tuple[Position, ...]] = ("learned", "rotary", "none")
    """Position encodings that a model of this kind can have."""
    norm_placements: ClassVar[tuple[NormPlacement, ...]] = ("pre",)
    """Placements of norms that a model of this kind can have."""
    scales_scores: ClassVar[bool] = True
    """Whether attention scores are divided by sqrt(head_dim)."""
    sees_both_ways: ClassVar[bool] = False
    """Whether attention is bidirectional, in the first of two stacks: ranks of cp then hold contiguous pieces of a
    sequence."""
    has_cross_attention: ClassVar[bool] = False
    """Whether some layers attend to the output of an encoder."""

    num_layers: int
    """Number of transformer layers, over all pipeline stages."""
    hidden_size: int
    """Hidden size: features of a token in the residual stream."""
    num_attention_heads: int
    """Number of attention heads (of queries) in each layer."""
    num_query_groups: int = 0
    """Number of key-value heads in each layer, under grouped-query attention; 0: as many as num_attention_heads
    (multi-head attention)."""
    head_dim: int = 0
    """Features of one attention head; 0: hidden_size / num_attention_heads."""
    latent: LatentConfig | None = None
    """Multi-head latent attention (MLA) in the place of attention over fused queries, keys and values; none: that.
   """
    ffn_hidden_size: int = 0
    """Features between the two linears of the MLP; of gate and of up each, where it is gated. 0: 4 * hidden_size."""
    activation: Activation = "gelu"
    """Activation of the MLP: exact GELU (gelu), its approximations by tanh (gelu_tanh) and by a sigmoid (quick_gelu),
    ReLU (relu), or a gate with SiLU (swiglu), with GELU by tanh (geglu_tanh), or of gpt-oss, which clamps gate and up
    (clamped_swiglu)."""
    normalization: Normalization = "layernorm"
    """Norm of hidden states: LayerNorm, RMSNorm, or an RMSNorm that scales by 1 + weight (zero_centered_rmsnorm)."""
    norm_epsilon: float = 1e-5
    """Number added to the variance (RMSNorm: to the mean square) under the root of a norm."""
    norm_placement: NormPlacement = "pre"
    """Placement of norms: before attention and MLP (pre), before and after each (sandwich), or of what each gives to
    the residual stream (output), all with one after the last layer; or after each residual addition (post)."""
    add_bias_linear: bool = True
    """Whether every linear of a layer has a bias."""
    add_qkv_bias: bool = False
    """Whether the query-key-value linear has a bias even where add_bias_linear is false."""
    position: Position = "learned"
    """Position encoding: a learned embedding added to the input (learned), a rotation of queries and keys (rotary), a
    learned bias of attention scores for each distance (relative, of T5), or none."""
    rotary_base: float = 10000.0
    """Base of the rotary embedding's wavelengths (rope_theta)."""
    rotary_fraction: float = 1.0
    """Fraction of a head's features that are rotated, from above 0 to 1."""
    window_rotary_base: float = 0.0
    """Base of the wavelengths of layers with a sliding window, which no scaling stretches; 0: as all others."""
    rope_scaling: RopeScaling | None = None
    """Scaling of rotary wavelengths for sequences longer than those first trained on; none: no scaling."""
    qk_norm: bool = False
    """Whether queries and keys get an RMSNorm over the features of each head before they are rotated."""
    qk_norm_across_heads: bool = False
    """Whether these norms are each over the features of all heads at once; their weights are then cut over tp."""
    sliding_window: int = 0
    """Sliding window of causal attention, in tokens: each token attends to itself and those right before it; 0: to all
    before it."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers, counted from 0, that attend to all tokens before in spite of sliding_window."""
    max_sequence_length: int = 2048
    """Longest sequence in tokens: positions of a learned embedding, and what pipeline stages are balanced for."""
    hidden_dropout: float = 0.0
    """Dropout probability of the embedding's output and of attention's and the MLP's output before each residual
    addition."""
    score_dim: int = 0
    """Number by whose root attention scores are divided; 0: head_dim."""
    attention_softcap: float = 0.0
    """Bound c of attention scores, which become c tanh(score / c); 0: none."""
    attention_sinks: bool = False
    """Whether each head attends to one more key, of value 0 and of a learned score (an attention sink)."""
    attention_dropout: float = 0.0
    """Dropout probability of attention weights."""
    ffn_dropout: float = 0.0
    """Dropout probability between the two linears of a dense MLP."""
    moe: MoEConfig | None = None
    """Mixture of experts in place of dense MLPs; none: all layers are dense."""
    init_std: float = 0.02
    """Standard deviation of initial weights; output projections of attention and MLP use init_std / sqrt(2 *
    num_layers)."""

    def __post_init__(self) -> None:
        if self.latent is not None and self.head_dim == 0:
            object.__setattr__(self, "head_dim", self.latent.qk_head_dim)
        for name, size in (
            ("num_query_groups", self.num_attention_heads),
            ("head_dim", self.hidden_size // max(self.num_attention_heads, 1)),
            ("ffn_hidden_size", 4 * self.hidden_size),
        ):
            if getattr(self, name) == 0:
                self._check_share(name)
                object.__setattr__(self, name, size)
        if faults := self.faults():
            raise ValueError("\n".join(faults))

    def _check_share(self, name: str) -> None:
        """Raises ValueError where hidden_size / num_attention_heads is no integer and head_dim is not given."""
        if name == "head_dim" and self.num_attention_heads > 0 and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                f"({self.num_attention_heads}) where head_dim is 0; give head_dim, or num_attention_heads may be "
                f"{_list(_fitting(self.num_attention_heads * 2, lambda n: self.hidden_size % n == 0))}"
            )

    def faults(self) -> list[str]:
        """Every rule that this configuration breaks, one sentence each."""
        faults = [
            f"{name} ({getattr(self, name)}) must be at least 1"
            for name in (
                "num_layers",
                "hidden_size",
                "num_attention_heads",
                "num_query_groups",
                "head_dim",
                "ffn_hidden_size",
                "max_sequence_length",
            )
            if getattr(self, name) < 1
        ]
        faults += [
            f"{name} ({getattr(self, name)!r}) must be one of {', '.join(map(repr, choices))}"
            for name, choices in {
                **_CHOICES,
                "position": self.positions,
                "norm_placement": self.norm_placements,
            }.items()
            if getattr(self, name) not in choices
        ]
        faults += [
            f"{name} ({getattr(self, name)}) must be at least 0 and below 1"
            for name in ("hidden_dropout", "attention_dropout", "ffn_dropout")
            if not 0.0 <= getattr(self, name) < 1.0
        ]
        if not 0.0 < self.rotary_fraction <= 1.0:
            faults.append(f"rotary_fraction ({self.rotary_fraction}) must be above 0 and at most 1")
        faults += [
            f"{name} ({getattr(self, name)}) must be above 0"
            for name in ("norm_epsilon", "rotary_base")
            if not getattr(self, name) > 0
        ]
        faults += self._attention_faults() + self._moe_faults()
        if not (math.isfinite(self.init_std) and self.init_std >= 0):
            faults.append(f"init_std ({self.init_std}) must be at least 0")
        heads, groups = self.num_attention_heads, self.num_query_groups
        if heads >= 1 and groups >= 1 and heads % groups:
            fits = _fitting(heads, lambda n: heads % n == 0)
            faults.append(
                f"num_attention_heads ({heads}) must be a multiple of num_query_groups ({groups}); "
                f"num_query_groups may be {_list(fits)}"
            )
        if self.position == "rotary" and self.head_dim >= 1 and self.head_dim * self.rotary_fraction < 2:
            faults.append(
                f"head_dim ({self.head_dim}) times rotary_fraction ({self.rotary_fraction}) must be at least 2, "
                "because features are rotated in pairs"
            )
        return faults

    def _attention_faults(self) -> list[str]:
        faults = []
        if self.latent is not None:
            faults += self._latent_faults(self.latent)
        elif self.rope_scaling is not None and self.rope_scaling.mscale_all_dim:
            faults.append(
                f"rope_scaling mscale_all_dim ({self.rope_scaling.mscale_all_dim}) scales scores of latent attention "
                "alone; give latent, or leave it out"
            )
        if self.rope_scaling is not None and self.position != "rotary":
            faults.append(
                f"rope_scaling ({self.rope_scaling.kind}) stretches rotary positions, and position is "
                f"{self.position!r}; leave rope_scaling out, or use position='rotary'"
            )
        faults += [
            f"{name} ({getattr(self, name)}) must be at least 0, which is none"
            for name in ("window_rotary_base", "score_dim", "attention_softcap")
            if not 0 <= getattr(self, name) < math.inf
        ]
        if self.window_rotary_base and (self.position != "rotary" or self.sliding_window == 0):
            faults.append(
                f"window_rotary_base ({self.window_rotary_base}) is one of rotary layers with a sliding window, and "
                f"position is {self.position!r} and sliding_window {self.sliding_window}; leave it out, or set those"
            )
        if self.window_rotary_base and self.rope_scaling is not None and self.rope_scaling.kind == "yarn":
            faults.append(
                "rope_scaling yarn also scales amplitudes, and window_rotary_base goes without; leave one out"
            )
        if self.qk_norm_across_heads and not self.qk_norm:
            faults.append(
                "qk_norm_across_heads (True) says over what queries and keys are normed, and qk_norm is False; set "
                "qk_norm=True, or leave it out"
            )
        if self.sliding_window < 0:
            faults.append(f"sliding_window ({self.sliding_window}) must be at least 0; 0 is no window")
        if self.full_attention_layers and self.sliding_window == 0:
            faults.append(
                f"full_attention_layers ({_list(list(self.full_attention_layers))}) need a sliding_window above 0, "
                "which they leave out; without one leave them out: all layers see everything"
            )
        unknown = [layer for layer in self.full_attention_layers if not 0 <= layer < self.num_layers]
        if unknown:
            faults.append(
                f"full_attention_layers {_list(unknown)} must be from 0 to num_layers - 1 ({self.num_layers - 1})"
            )
        return faults

    def _latent_faults(self, latent: LatentConfig) -> list[str]:
        needed = {
            "head_dim": latent.qk_head_dim,
            "num_query_groups": self.num_attention_heads,
            "position": "rotary",
            "rotary_fraction": 1.0,
            "add_bias_linear": False,
            "add_qkv_bias": False,
            "qk_norm": False,
            "window_rotary_base": 0.0,
            "attention_sinks": False,
            "attention_softcap": 0.0,
        }
        return [
            f"{name} ({value!r}) must be {fit!r} for latent attention"
            for name, fit in needed.items()
            if (value := getattr(self, name)) != fit
        ]

    def _moe_faults(self) -> list[str]:
        if self.moe is None:
            return []
        faults = self.moe.layer_faults(self.num_layers)
        if self.moe.capacity is not None and self.max_sequence_length >= 1:
            router = self.moe.router
            faults += self.moe.capacity.length_faults(self.max_sequence_length, router.top_k, router.num_experts)
        return faults

    def layout_faults(self, sizes: Sizes) -> list[str]:
        """Every rule that this architecture breaks on that many ranks, one sentence each."""
        tp, heads, groups = sizes.tp, self.num_attention_heads, self.num_query_groups
        faults = []

        def add_unless(fits: Callable[[int], bool], rule: str) -> None:
            if not fits(tp):
                may_be = _list(_fitting(min(heads, self.ffn_hidden_size), fits))
                faults.append(f"{rule}; tensor_model_parallel_size may be {may_be}")

        add_unless(
            lambda n: heads % n == 0,
            f"num_attention_heads ({heads}) must be a multiple of tensor_model_parallel_size ({tp})",
        )
        add_unless(
            lambda n: groups % n == 0 or n % groups == 0,
            f"num_query_groups ({groups}) must be a multiple or a divisor of tensor_model_parallel_size ({tp})",
        )
        if self.qk_norm_across_heads:
            add_unless(
                lambda n: groups % n == 0,
                f"num_query_groups ({groups}) must be a multiple of tensor_model_parallel_size ({tp}) for "
                "qk_norm_across_heads, so that each key head is normed on one rank",
            )
        rows = groups * (self.heads_per_group + 2) * self.head_dim
        if self.latent is None and (groups % tp == 0 or tp % groups == 0):
            add_unless(
                lambda n: rows % n == 0,
                f"the rows of the query-key-value weight ({rows} = num_query_groups * (num_attention_heads / "
                f"num_query_groups + 2) * head_dim) must be a multiple of tensor_model_parallel_size ({tp})",
            )
        add_unless(
            lambda n: self.ffn_hidden_size % n == 0,
            f"ffn_hidden_size ({self.ffn_hidden_size}) must be a multiple of tensor_model_parallel_size ({tp})",
        )
        if self.moe is not None:
            width = self.moe.ffn_hidden_size or self.ffn_hidden_size
            faults += moe_layout.layout_faults(self.moe, width, sizes)
        if heads % tp == 0 and heads // tp % sizes.cp_ulysses:
            fits = [n for n in _fitting(sizes.cp, lambda n: heads // tp % n == 0) if n > 1 and sizes.cp % n == 0]
            way = f'ContextConfig(comm_type="hierarchical", ulysses_size=...) with {_list(fits)}, or ' if fits else ""
            faults.append(
                f"num_attention_heads / tensor_model_parallel_size ({heads} / {tp} = {heads // tp}) must be a multiple "
                f"of the context-parallel ranks that exchange heads for tokens ({sizes.cp_ulysses}); take {way}"
                'ContextConfig(comm_type="ring"), which asks nothing of heads'
            )
        return faults

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts instead of a dense MLP."""
        return self.moe is not None and self.moe.has_experts(layer)

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layers of the model have a dense MLP."""
        return not all(self.has_experts(layer) for layer in range(self.num_layers))

    @property
    def has_auxiliary_losses(self) -> bool:
        """Whether layers add terms of their own to the objective."""
        return self.moe is not None and self.moe.has_losses

    def window_of(self, layer: int) -> int:
        """Tokens that a token sees in a layer, counted from 0, under causal attention; 0: all before it."""
        return 0 if layer in self.full_attention_layers else self.sliding_window

    @property
    def score_scale(self) -> float:
        """Factor of attention scores."""
        if not self.scales_scores:
            return 1.0
        scaling = self.rope_scaling
        stretched = yarn_amplitude(scaling.factor, scaling.mscale_all_dim) if scaling is not None else 1.0
        return stretched**2 / math.sqrt(self.score_dim or self.head_dim)

    @property
    def num_staged_layers(self) -> int:
        """Layers between which stages of a pipeline are cut."""
        return self.num_layers

    @property
    def idle_parts(self) -> frozenset[str]:
        """Parts of the model that are there for files that have them, and never run."""
        return frozenset()

    @property
    def output_std(self) -> float:
        """Standard deviation of the initial projections back into the residual stream."""
        return self.init_std / math.sqrt(2 * self.num_layers)

    @property
    def has_qkv_bias(self) -> bool:
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def is_gated(self) -> bool:
        return self.activation in GATED

    @property
    def heads_per_group(self) -> int:
        return self.num_attention_heads // self.num_query_groups

    @property
    def rotary_width(self) -> int:
        """Pairs of features of a head that are rotated: 0 where positions are not rotary."""
        if self.latent is not None:
            return self.latent.qk_rope_head_dim // 2
        return int(self.head_dim * self.rotary_fraction) // 2 if self.position == "rotary" else 0


@config_dataclass
class LanguageModelConfig(TransformerConfig):
    """Architecture of a transformer between a token embedding and a head that predicts tokens."""

    predicts_further: ClassVar[bool] = False
    """Whether a model of this kind can have layers that predict tokens beyond the next."""

    vocab_size: int
    """Number of tokens in the vocabulary."""
    vocab_multiple: int = 1
    """The vocabulary is padded so that each tensor-parallel rank holds a multiple of this many rows; GPUs are faster
    with 128."""
    tie_embeddings: bool = True
    """Whether the head shares the weight of the token embedding."""
    scales_embedding: bool = False
    """Whether embedded tokens are multiplied by sqrt(hidden_size)."""
    logit_softcap: float = 0.0
    """Bound c of logits, which become c tanh(logit / c); 0: none."""
    num_mtp_layers: int = 0
    """Number of layers after the last that learn to predict tokens beyond the next (multi-token prediction), in
    training alone."""
    mtp_loss_weight: float = 0.3
    """Weight of the mean of their losses in the objective."""
    label_smoothing: float = 0.0
    """Label smoothing: share of a target's probability that is spread evenly over the vocabulary."""

    def faults(self) -> list[str]:
        faults = super().faults()
        faults += [
            f"{name} ({getattr(self, name)}) must be at least 1"
            for name in ("vocab_size", "vocab_multiple")
            if getattr(self, name) < 1
        ]
        if not 0.0 <= self.logit_softcap < math.inf:
            faults.append(f"logit_softcap ({self.logit_softcap}) must be at least 0; 0 is none")
        if self.num_mtp_layers < 0:
            faults.append(f"num_mtp_layers ({self.num_mtp_layers}) must be at least 0")
        if self.num_mtp_layers > 0 and not self.predicts_further:
            faults.append(
                f"num_mtp_layers ({self.num_mtp_layers}) must be 0: multi-token prediction is built for GPTs alone"
            )
        if not 0.0 <= self.mtp_loss_weight < math.inf:
            faults.append(f"mtp_loss_weight ({self.mtp_loss_weight}) must be at least 0")
        if not 0.0 <= self.label_smoothing < 1.0:
            faults.append(f"label_smoothing ({self.label_smoothing}) must be at least 0 and below 1")
        return faults

    @property
    def token_embedding_std(self) -> float:
        """Standard deviation of initial token embeddings."""
        return self.init_std


# Largest value that an error suggests.
_MOST_SUGGESTED = 65_536


def _fitting(largest: int, fits: Callable[[int], bool]) -> list[int]:
    return [n for n in range(1, min(largest, _MOST_SUGGESTED) + 1) if fits(n)]


def _list(values: list[int]) -> str:
    """Values as text, a dozen at most."""
    return ", ".join(map(str, values)) if len(values) <= 12 else ", ".join(map(str, values[:12])) + ", ..."
