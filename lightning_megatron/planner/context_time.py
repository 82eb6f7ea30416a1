"""Seconds that attention waits where ranks share sequences, by the ways of `context.exchange`.

With n groups of ranks and attention that takes a seconds here, of which zigzag gives each pair of groups a/n:

    ring, forward        (n - 1) max(0, hop of keys and values - a/n)  and n - 1 merges of what attention gives
    ring, backward       (n - 1) max(0, hop of them and of their gradients - a/n)  and the last hop of gradients, which
                         come home behind the last step
    all-gather, forward  max(0, gather - a/n): own keys first
    all-gather, backward the same, and the scatter of gradients
    heads for tokens     two exchanges each way: queries, keys and values there, and what attention gives back

Source of the order of a ring: Liu et al., arXiv 2310.01889, section 3; heads for tokens: Jacobs et al., arXiv
2309.14509, section 3.
"""

from dataclasses import dataclass

from lightning_megatron.mesh import Sizes
from lightning_megatron.planner.collective_time import Group, exchange_seconds, gather_seconds, hop_seconds
from lightning_megatron.planner.constants import Constants
from lightning_megatron.planner.hardware import Gpu

# What attention gave so far and what it gives now are read, and their sum is written: in float32 beside 16 bits.
_MERGED = 5


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The attention of a layer on one of the ranks that share a sequence."""

    key_bytes: float
    """Keys and values of own tokens."""
    query_bytes: float
    """Queries of own tokens, and as much comes out."""
    attention_seconds: float
    """Seconds of attention in this pass."""


def context_seconds(
    sizes: Sizes,
    shared: Shared,
    *,
    gradient_share: float,
    gpu: Gpu,
    constants: Constants,
    is_backward: bool,
) -> float:
    """Seconds of a pass that nothing hides; `gradient_share` is the width of gradients of keys over that of keys."""
    inner = Group(size=sizes.cp_ulysses, stride=sizes.tp)
    outer = Group(size=sizes.cp // sizes.cp_ulysses, stride=sizes.tp * sizes.cp_ulysses)
    sent = 2 * shared.query_bytes + shared.key_bytes
    waited = exchange_seconds(sent, inner, gpu, constants) if inner.size > 1 else 0.0
    if outer.size == 1:
        return waited
    gradients = gradient_share * shared.key_bytes if is_backward else 0.0
    each = shared.attention_seconds / outer.size
    if sizes.cp_exchange == "all_gather":
        gather = gather_seconds(outer.size * shared.key_bytes, outer, gpu, constants)
        return waited + max(gather - each, 0.0) + gather_seconds(outer.size * gradients, outer, gpu, constants)
    hop = hop_seconds(shared.key_bytes + gradients, outer, gpu, constants)
    merge = _MERGED * shared.query_bytes / gpu.memory_bytes_per_second
    home = hop_seconds(gradients, outer, gpu, constants)
    return waited + (outer.size - 1) * (max(hop - each, 0.0) + merge) + home
