"""What the code that runs a layout keeps and sends beyond what the layout says, as a value.

`OURS` is this package. The others describe the code behind published runs, so that the same formulas can be checked
against what was measured there; a search never proposes them.
"""

from dataclasses import dataclass
from typing import Literal

Sharding = Literal["none", "between_passes", "always"]
"""When replicas hold their own part of the weights alone: never; but from a step's first forward to its last backward;
or gathering each layer before its forward and its backward."""

Hiding = Literal["nowhere", "forward", "backward", "everywhere"]
"""Behind which passes' products messages of tensor parallelism travel."""

Again = Literal["", "second products", "products"]
"""What a backward runs again whatever a run says, beside elementwise kernels: every second product, or each."""

AttentionKernel = Literal["first", "second", "vendor"]
"""That of the first open source ones (2022), that of FlashAttention-2, which torch has, or the GPU vendor's own."""


@dataclass(frozen=True, kw_only=True)
class FrameworkProfile:
    """Habits of a training system."""

    name: str
    """Name in reports."""
    shards_weights: Sharding = "none"
    """Weight sharding over data-parallel ranks beyond the optimizer's."""
    pair_bytes: int = 7
    """Kept for each pair of tokens and head where attention lays its weights out: softmax, mask, what was dropped."""
    logit_bytes: int = 6
    """For each token and row of the vocabulary at the peak: logits in half precision, and exponentials in float32."""
    widens_norms: bool = False
    """Under mixed precision norms keep what they read in float32."""
    counts_work: bool = False
    """What a backward, the optimizer and messages hold for a while is counted, beside the largest gradient of a
    weight."""
    squares_relu: bool = False
    """What a run calls ReLU is its square, whose backward reads its input."""
    ring_gradient_bytes: int = 4
    """Of a number of the gradients of keys and values that go round a ring, or are summed over its ranks."""
    is_fused: bool = False
    """Neighbouring elementwise kernels are one, by hand or by a compiler."""
    attention: AttentionKernel = "second"
    """Where attention runs in one kernel."""
    hides_tensor: Hiding = "backward"
    """Behind products: messages of tp."""
    splits_hops: bool = False
    """What goes to the next stage goes once, and tp gathers it there, where each of its ranks would send all of it."""
    runs_again: Again = ""
    """Part of a layer that the backward recomputes."""
    bounds_gates: bool = False
    """Of experts: what a gate reads is held within bounds, and biases are added expert by expert, each step by
    itself."""


OURS = FrameworkProfile(name="lightning_megatron", widens_norms=True, counts_work=True)

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
arXiv 2104.04473, section 4.1: what goes between stages is scattered and gathered."""

FULLY_SHARDED = FrameworkProfile(name="fully sharded data parallel", shards_weights="always", attention="first")
"""Source: Rajbhandari et al., arXiv 1910.02054, section 5.3 (ZeRO, stage 3)."""

SHARDED_BETWEEN_PASSES = FrameworkProfile(name="sharded gradients", shards_weights="between_passes", attention="first")
"""Source: the same, section 5.2 (stage 2), with weights that are gathered once a step."""
