"""Process groups of a process from its first run on: the mesh, the lanes between stages, the groups of checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.device_mesh import DeviceMesh

from lightning_megatron.checkpoint import CheckpointConfig
from lightning_megatron.comm.p2p import Hop, LaneGroups, build_lanes, connect_lanes
from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.pipeline.lower import hops
from lightning_megatron.trainer.checkpointing.checkpoint_saver import CheckpointSaver
from lightning_megatron.trainer.setup.process_groups import Groups


@dataclass(frozen=True, kw_only=True)
class Connections:
    """Process groups of one process, made by its first run and used by the later ones too."""

    mesh: Mesh
    lanes: Mapping[Hop, LaneGroups]
    """Process groups of the messages between stages, by sender and receiver."""
    saver: CheckpointSaver
    """Writer of checkpoints, over groups of its own."""
    document_routing: Axis | None
    """Ranks of dp and cp over host memory, on which documents are sent in the background; None without
    dynamic context parallelism."""
    groups: Groups
    """Maker of further groups."""
    device: torch.device
    """Device of this process."""

    @staticmethod
    def opened(
        sizes: Sizes,
        global_rank: int,
        groups: Groups,
        device: torch.device,
        config: CheckpointConfig,
        *,
        host: Axis | None = None,
        routes_documents: bool,
    ) -> "Connections":
        """The connections of a rank; `host` is the world over host memory, None where there is one process.

        Collective over the world.
        """
        mesh = Mesh.build(sizes, global_rank, groups.on_device)
        ranks = tuple(sizes.pp_rank_of(stage) for stage in range(sizes.num_stages))
        lanes = build_lanes(mesh.pp, hops(ranks), groups.on_device, groups.on_host)
        connect_lanes(mesh.pp, lanes, device)
        saver = CheckpointSaver(host or mesh.world, groups.tree_over_host(mesh.world), config)
        routing = groups.over_host(mesh.axis("dp+cp")) if routes_documents else None
        return Connections(mesh=mesh, lanes=lanes, saver=saver, document_routing=routing, groups=groups, device=device)

    @cached_property
    def device_mesh(self) -> DeviceMesh | None:
        """The ranks of dp and tp as a mesh of torch, named as under Lightning's `ModelParallelStrategy`; None for one
        process. Collective over the world when it is first read."""
        if self.mesh.world.size == 1:
            return None
        dp, tp, own = self.mesh.dp, self.mesh.tp, self.mesh.global_rank
        alone = self.groups.on_device((own,)) if 1 in (dp.size, tp.size) else None
        return DeviceMesh.from_group(
            [group for axis in (dp, tp) if (group := axis.group or alone) is not None],
            self.device.type,
            [[row + column - own for column in tp.ranks] for row in dp.ranks],
            mesh_dim_names=("data_parallel", "tensor_parallel"),
        )
