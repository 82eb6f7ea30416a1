"""How the layers of a module compute what a `KernelConfig` names, whoever builds them: the strategy or a dry run."""

from torch import nn

from lightning_megatron.models.heads import LanguageModelHead
from lightning_megatron.precision.kernels import KernelConfig
from lightning_megatron.tensor.linear import ParallelLinear


def set_kernels(module: nn.Module, config: KernelConfig) -> None:
    """Sets how the heads and linears inside a module compute."""
    for part in module.modules():
        if isinstance(part, LanguageModelHead):
            part.chunk_tokens = config.loss_chunk_tokens
        elif isinstance(part, ParallelLinear):
            part.num_chunks, part.is_symmetric = config.num_tp_overlap_chunks, config.symmetric_memory
