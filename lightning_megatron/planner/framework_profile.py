"""Properties of a training framework that affect memory, time and messages beyond the layout, as a value.

`OURS` is this package. The others describe the frameworks of published runs, so that the same formulas can be checked
against measurements there; a search never proposes them.
"""

from dataclasses import dataclass
from typing import Literal

Sharding = Literal["none", "between_passes", "always"]
"""Sharding of weights over data-parallel ranks: never; outside of a step's forwards and backwards; or always, with each
layer gathered before its forward and its backward."""

Hiding = Literal["nowhere", "forward", "backward", "everywhere"]
"""Passes whose products hide messages of tensor parallelism."""

Recomputed = Literal["", "second products", "products"]
"""Products that every backward recomputes besides elementwise kernels, whatever a run's configuration: every second
one, or all."""

AttentionKernel = Literal["first", "second", "vendor"]
"""Fused attention kernel: one of the first (2022), FlashAttention-2, which torch has, or the GPU vendor's own."""


@dataclass(frozen=True, kw_only=True)
class FrameworkProfile:
    """Properties of a training framework."""

    name: str
    """Name in reports."""
    shards_weights: Sharding = "none"
    """Weight sharding over data-parallel ranks beyond the optimizer's."""
    pair_bytes: int = 7
    """Bytes saved for each pair of tokens and head of materialised attention: softmax, mask, dropped weights."""
    logit_bytes: int = 6
    """Bytes for each logit at the peak: the logit in half precision, and its exponential in float32."""
    squares_relu: bool = False
    """Whether ReLU stands for squared ReLU, whose backward reads its input."""
    ring_gradient_bytes: int = 4
    """Bytes for each element of the gradients of keys and values that are sent round a ring, or reduced over it."""
    is_fused: bool = False
    """Whether neighbouring elementwise kernels are fused, by hand or by a compiler."""
    attention: AttentionKernel = "second"
    """Fused attention kernel."""
    hides_tensor: Hiding = "backward"
    """Passes whose products hide messages of tp."""
    splits_hops: bool = False
    """Whether each tp rank sends a shard of a hidden state to the next stage, which gathers it over tp."""
    recomputes: Recomputed = ""
    """Products of a layer that every backward recomputes."""
    captures_routing: bool = False
    """Whether routing and dispatch are few kernels that a CUDA graph launches, so that they take no time of their
    own."""
    launches_experts: bool = False
    """Whether the host waits for the numbers of tokens of experts and then launches the casts and products of each."""
    bounds_gates: bool = False
    """Whether experts clamp the inputs of gates and add biases expert by expert, in kernels of their own."""


OURS = FrameworkProfile(name="lightning_megatron")

MEGATRON = FrameworkProfile(
    name="Megatron Core",
    pair_bytes=5,
    squares_relu=True,
    ring_gradient_bytes=2,
    is_fused=True,
    attention="vendor",
    splits_hops=True,
)
"""Sources: Korthikanti et al., arXiv 2205.05198, section 4.1: softmax 2, mask 1, dropped weights 2; Narayanan et al.,
arXiv 2104.04473, section 4.1: hidden states between stages are scattered and gathered."""

FULLY_SHARDED = FrameworkProfile(name="fully sharded data parallel", shards_weights="always", attention="first")
"""Source: Rajbhandari et al., arXiv 1910.02054, section 5.3 (ZeRO, stage 3)."""

SHARDED_BETWEEN_PASSES = FrameworkProfile(name="sharded gradients", shards_weights="between_passes", attention="first")
"""Source: Rajbhandari et al., arXiv 1910.02054, section 5.2 (ZeRO, stage 2), with weights gathered once a step."""
