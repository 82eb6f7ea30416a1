"""Parallel sizes that a mixture of experts allows."""

from collections.abc import Callable

from lightning_megatron.mesh import Sizes
from lightning_megatron.moe.config import MoEConfig


def layout_faults(config: MoEConfig, ffn_hidden_size: int, sizes: Sizes) -> list[str]:
    """Errors of experts with ffn_hidden_size features on a mesh of these sizes, one sentence each."""
    num_experts, shared = config.router.num_experts, config.shared_expert_intermediate_size
    faults = []

    def add_unless_divides(size: int, number: int, what: str, name: str) -> None:
        if size > 0 and number % size:
            fits = ", ".join(map(str, _first(number, lambda n: number % n == 0)))
            faults.append(f"{what} ({number}) must be a multiple of {name} ({size}); {name} may be {fits}")

    add_unless_divides(sizes.ep, num_experts, "number of experts", "expert_model_parallel_size")
    add_unless_divides(sizes.etp, ffn_hidden_size, "ffn_hidden_size of an expert", "expert_tensor_parallel_size")
    add_unless_divides(sizes.tp, shared, "shared_expert_intermediate_size", "tensor_model_parallel_size")
    if sizes.ep > 1 and sizes.tp > 1 and not sizes.sequence_parallel:
        faults.append(
            f"expert_model_parallel_size ({sizes.ep}) with tensor_model_parallel_size ({sizes.tp}) needs "
            "sequence_parallel: without it hidden states are replicated over tensor-parallel ranks, to be cut before "
            "and all-gathered after the experts of each layer; set it, or one size to 1"
        )
    return faults


def _first(largest: int, fits: Callable[[int], bool], most: int = 12) -> list[int]:
    return [n for n in range(1, largest + 1) if fits(n)][:most]
