"""What a transformer is: the sizes and choices of its layers, and nothing about who runs them.

Read by the layers, by the cost model and by checkpoints. Faults of a configuration are told all at once; those that
only a layout has are told by its `layout_faults`, before any process group is needed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from lightning_megatron.mesh import Sizes
from lightning_megatron.moe import layout as moe_layout
from lightning_megatron.moe.config import MoEConfig
from lightning_megatron.tensor.activation import GATED, Activation
from lightning_megatron.transformer.rotary import RopeScaling

Normalization = Literal["layernorm", "rmsnorm"]
Position = Literal["learned", "rotary", "relative", "none"]
_CHOICES = {
    "activation": ("gelu", "gelu_tanh", "quick_gelu", "relu", "swiglu", "geglu_tanh"),
    "normalization": ("layernorm", "rmsnorm"),
}


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The architecture of a stack of equal layers. A size given as 0 follows from others and is filled in at once."""

    positions: ClassVar[tuple[Position, ...]] = ("learned", "rotary", "none")
    """That a model of this kind can have."""
    scales_scores: ClassVar[bool] = True
    """Whether products of queries and keys are divided by sqrt(head_dim)."""
    sees_both_ways: ClassVar[bool] = False
    """Whether a token sees those behind it: ranks of cp then hold one piece of a sequence each; of two stacks the
    first."""
    has_cross_attention: ClassVar[bool] = False
    """Whether some layers look at the output of others."""

    num_layers: int
    """Layers of the stack, over all stages."""
    hidden_size: int
    """Features of a token between layers."""
    num_attention_heads: int
    """Query heads of a layer."""
    num_query_groups: int = 0
    """Key and value heads of a layer, each shared by a group of query heads; 0: one for each query head."""
    head_dim: int = 0
    """Features of a head; 0: hidden_size / num_attention_heads."""
    ffn_hidden_size: int = 0
    """Features between the two linears of the MLP (of gate and of up alike where gated); 0: 4 * hidden_size."""
    activation: Activation = "gelu"
    """Of the MLP: exact GELU, its approximations by tanh and by a sigmoid, ReLU, or a gate with SiLU or GELU by
    tanh."""
    normalization: Normalization = "layernorm"
    """Before each half of a layer and after the last layer."""
    norm_epsilon: float = 1e-5
    """Added to the variance (or mean square) under the root."""
    add_bias_linear: bool = True
    """Every linear of a layer has a bias."""
    add_qkv_bias: bool = False
    """The query-key-value linear has a bias even where the others have none."""
    position: Position = "learned"
    """How a token knows its place: an embedding added to the input, a rotation of queries and keys, a learned number
    added to scores for the distance, or not at all."""
    rotary_base: float = 10000.0
    """Base of the geometric row of rotary wavelengths."""
    rotary_fraction: float = 1.0
    """Share of a head's features that are rotated."""
    rope_scaling: RopeScaling | None = None
    """How rotary wavelengths are stretched for sequences longer than those first trained on; none: not at all."""
    qk_norm: bool = False
    """Queries and keys of each head are normed (RMS over the head's features) before they are rotated."""
    sliding_window: int = 0
    """Tokens that a token sees in causal attention, itself and those right before it; 0: all before it."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers, counted from 0, in which a token sees all before it in spite of sliding_window."""
    max_sequence_length: int = 2048
    """Positions of a learned embedding, in tokens."""
    hidden_dropout: float = 0.0
    """Probability that a feature of the embedding or of a layer half's output is dropped in training."""
    attention_dropout: float = 0.0
    """Probability that an attention weight is dropped in training."""
    ffn_dropout: float = 0.0
    """Probability that a feature between the two linears of a dense MLP is dropped in training."""
    moe: MoEConfig | None = None
    """Layers of experts in the place of dense MLPs; none: all are dense."""
    init_std: float = 0.02
    """Standard deviation of initial weights; projections back into the residual stream use init_std / sqrt(2
    num_layers)."""

    def __post_init__(self) -> None:
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
        """Only a head size that follows from others can fail to come out even."""
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
            for name, choices in {**_CHOICES, "position": self.positions}.items()
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
        if self.rope_scaling is not None and self.position != "rotary":
            faults.append(
                f"rope_scaling ({self.rope_scaling.kind}) stretches rotary positions, and position is "
                f"{self.position!r}; leave rope_scaling out, or use position='rotary'"
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
        rows = groups * (self.heads_per_group + 2) * self.head_dim
        if groups % tp == 0 or tp % groups == 0:
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
        """Whether a layer, counted from 0, has experts in the place of a dense MLP."""
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
        return int(self.head_dim * self.rotary_fraction) // 2 if self.position == "rotary" else 0


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(TransformerConfig):
    """A transformer between an embedding of tokens and a head that predicts tokens."""

    vocab_size: int
    """Different tokens."""
    vocab_multiple: int = 1
    """Each rank holds a multiple of this many rows of the vocabulary; GPUs are faster with 128."""
    tie_embeddings: bool = True
    """The head uses the weight of the token embedding."""
    label_smoothing: float = 0.0
    """Share of a target's probability spread evenly over the whole vocabulary."""

    def faults(self) -> list[str]:
        faults = super().faults()
        faults += [
            f"{name} ({getattr(self, name)}) must be at least 1"
            for name in ("vocab_size", "vocab_multiple")
            if getattr(self, name) < 1
        ]
        if not 0.0 <= self.label_smoothing < 1.0:
            faults.append(f"label_smoothing ({self.label_smoothing}) must be at least 0 and below 1")
        return faults


_MOST_TOLD = 65_536
# Above it no value is looked for, which is told to a reader.


def _fitting(largest: int, fits: Callable[[int], bool]) -> list[int]:
    return [n for n in range(1, min(largest, _MOST_TOLD) + 1) if fits(n)]


def _list(values: list[int]) -> str:
    """At most a dozen values, as a reader takes them in."""
    return ", ".join(map(str, values)) if len(values) <= 12 else ", ".join(map(str, values[:12])) + ", ..."
