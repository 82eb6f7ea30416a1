"""Axes and mailboxes of ranks that are threads."""

import torch

from lightning_megatron.comm.p2p import Hop, Mailbox, build_lanes
from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.pipeline.lower import hops
from tests.harness.threads import ThreadGroup, new_group


def make_thread_pp(sizes: Sizes, world: ThreadGroup) -> Axis:
    """The axis of pipeline ranks, as the calling thread sees it."""
    # A mesh of one rank has one stage; the runtime can have several there.
    return Mesh.single().pp if sizes.pp == 1 else Mesh.build(sizes, world.global_rank, new_group).pp


def make_thread_mailbox(axis: Axis, pairs: list[Hop]) -> Mailbox:
    """The mailbox of the calling thread, with lanes for these pairs of ranks."""
    return Mailbox(axis, build_lanes(axis, pairs, new_group, new_group), torch.device("cpu"))


def hops_of(sizes: Sizes) -> list[Hop]:
    """Between neighbouring stages."""
    return hops(tuple(sizes.pp_rank_of(stage) for stage in range(sizes.num_stages)))
