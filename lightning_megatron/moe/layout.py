"""Which layouts experts can be spread over."""

from lightning_megatron.mesh import Sizes


def layout_faults(num_experts: int, sizes: Sizes) -> list[str]:
    """What is wrong with experts on a mesh of these sizes, one sentence each."""
    faults = []
    if sizes.ep > 0 and num_experts % sizes.ep:
        fits = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
        faults.append(
            f"number of experts ({num_experts}) must be a multiple of expert_model_parallel_size ({sizes.ep}); "
            f"it may be {fits}"
        )
    if sizes.ep > 1 and sizes.tp > 1 and not sizes.sequence_parallel:
        faults.append(
            f"expert_model_parallel_size ({sizes.ep}) with tensor_model_parallel_size ({sizes.tp}) needs "
            "sequence_parallel: without it tensor-parallel ranks would send the same tokens; set it, or one size to 1"
        )
    return faults
