"""Meshes of the ranks that a test runs on, and the mailboxes of their stages."""

import torch
import torch.distributed as dist

from lightning_megatron.comm.p2p import Mailbox, build_lanes
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.pipeline.lower import hops


def new_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A group of these ranks, made by them alone."""
    group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return group


def make_mesh(sizes: Sizes) -> Mesh:
    """This rank's mesh, with process groups."""
    return Mesh.build(sizes, dist.get_rank(), new_group)


def make_mailbox(mesh: Mesh) -> Mailbox:
    """This rank's mailbox, with lanes between all neighbouring stages."""
    ranks = tuple(mesh.sizes.pp_rank_of(stage) for stage in range(mesh.sizes.num_stages))
    return Mailbox(mesh.pp, build_lanes(mesh.pp, hops(ranks), new_group, new_group), torch.device("cpu"))
