"""Exposed communication of context parallelism in seconds, by the ways of `context.key_value_exchange`.

With n groups of ranks and attention of a seconds on this rank, of which each pair of groups takes a/n under zigzag:

    ring, forward        (n - 1) max(0, hop of keys and values - a/n)  and n - 1 merges of attention's outputs
    ring, backward       (n - 1) max(0, hop of them and of their gradients - a/n)  and the last hop of gradients, which
                         follows the last step
    all-gather, forward  max(0, gather - a/n): own keys first
    all-gather, backward as in the forward, and the reduce-scatter of gradients
    Ulysses              two all-to-alls each way: of queries, keys and values, and of attention's outputs

Source of the order of a ring: Liu et al., arXiv 2310.01889, section 3; Ulysses: Jacobs et al., arXiv 2309.14509,
section 3.
"""

from lightning_megatron.mesh import Sizes
from lightning_megatron.planner.collective_time import Group, exchange_seconds, gather_seconds, hop_seconds
from lightning_megatron.planner.constants import Constants
from lightning_megatron.planner.hardware import Gpu

# A merge reads the output so far and the new one and writes their sum, in float32 for activations in 16 bits.
_MERGED = 5


def context_seconds(
    sizes: Sizes,
    *,
    key_bytes: float,
    query_bytes: float,
    attention_seconds: float,
    gradient_share: float,
    gpu: Gpu,
    constants: Constants,
    is_backward: bool,
) -> float:
    """Exposed seconds of a layer's forward or backward, in which its attention takes `attention_seconds`.

    Own tokens have `key_bytes` of keys and values and `query_bytes` of queries, and their gradients have
    `gradient_share` times the bytes of keys and values.
    """
    inner = Group(size=sizes.cp_ulysses, stride=sizes.tp)
    outer = Group(size=sizes.cp // sizes.cp_ulysses, stride=sizes.tp * sizes.cp_ulysses)
    sent = 2 * query_bytes + key_bytes
    waited = exchange_seconds(sent, inner, gpu, constants) if inner.size > 1 else 0.0
    if outer.size == 1:
        return waited
    gradients = gradient_share * key_bytes if is_backward else 0.0
    each = attention_seconds / outer.size
    if sizes.cp_exchange == "all_gather":
        gather = gather_seconds(outer.size * key_bytes, outer, gpu, constants)
        return waited + max(gather - each, 0.0) + gather_seconds(outer.size * gradients, outer, gpu, constants)
    hop = hop_seconds(key_bytes + gradients, outer, gpu, constants)
    merge = _MERGED * query_bytes / gpu.memory_bytes_per_second
    last = hop_seconds(gradients, outer, gpu, constants)
    return waited + (outer.size - 1) * (max(hop - each, 0.0) + merge) + last
