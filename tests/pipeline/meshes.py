"""Meshes of the ranks that a test runs on."""

import torch.distributed as dist

from lightning_megatron.mesh import Mesh, Sizes


def make_mesh(sizes: Sizes) -> Mesh:
    """This rank's mesh, with process groups."""
    return Mesh.build(sizes, dist.get_rank(), lambda ranks: dist.new_group(list(ranks), use_local_synchronization=True))
