"""Data-parallel ranks that share experts or shards of weights, and so make each model call together."""

from torch import nn

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.moe.experts import Experts
from lightning_megatron.transformer.moe import MoELayer


def linked_dp_ranks(module: nn.Module, mesh: Mesh) -> Axis:
    """Data-parallel ranks that share experts: all of dp, or this one alone.

    Talks over pp.
    """
    sizes = mesh.sizes
    is_linked = has_experts(module, mesh) and sizes.cp * sizes.tp % (sizes.ep * sizes.etp) != 0
    return mesh.dp if is_linked else Axis.alone(mesh.global_rank)


def calling_together(module: nn.Module, mesh: Mesh, *, shards_parameters: bool) -> Axis:
    """Data-parallel ranks that make each model call together: all of dp, or this one alone. Talks over pp."""
    return mesh.dp if shards_parameters else linked_dp_ranks(module, mesh)


def needs_equal_shapes(module: nn.Module) -> bool:
    """Whether experts of this stage need as many tokens on each rank that shares them."""
    configs = [layer.config for layer in module.modules() if isinstance(layer, MoELayer)]
    return any(c.dispatcher == "all_gather" or (c.capacity is not None and c.capacity.pad_to_capacity) for c in configs)


def has_experts(module: nn.Module, mesh: Mesh) -> bool:
    """Whether any stage has layers of experts; no communication where none are shared."""
    if mesh.sizes.ep * mesh.sizes.etp == 1:
        return False
    return any(collectives.gather_objects(any(isinstance(m, Experts) for m in module.modules()), mesh.pp))
