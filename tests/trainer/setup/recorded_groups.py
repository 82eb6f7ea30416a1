"""The process groups that a rank of a run asks for, written down and made by nobody: by the code that makes them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_megatron.checkpoint import CheckpointConfig
from lightning_megatron.mesh import Axis, Sizes
from lightning_megatron.optim.reductions import stage_axes
from lightning_megatron.trainer.setup import connections, fp8_layers
from lightning_megatron.trainer.setup.connections import Connections
from lightning_megatron.trainer.setup.process_groups import Groups

Made = tuple[str, tuple[int, ...]]
"""Device or host, and the members of a group."""

# A device that is not the CPU, and has no memory to write to.
DEVICE = torch.device("meta")


class Recorder(Groups):
    """Groups of one rank that are made by nobody, each a line of what was asked for."""

    def __init__(self) -> None:
        super().__init__(60)
        self.made: list[Made] = []

    def on_device(self, ranks: tuple[int, ...]) -> Any:
        self.made.append(("device", ranks))

    def on_host(self, ranks: tuple[int, ...]) -> Any:
        self.made.append(("host", ranks))


def groups_of(sizes: Sizes, rank: int, *, routes_documents: bool = True) -> list[Made]:
    """The groups that a rank makes in a run: its connections, for weights that first and last stage share, for FP8.

    Only where nothing is sent: `without_messages`.
    """
    groups = Recorder()
    host = groups.tree_over_host(Axis("world", sizes.world, rank, tuple(range(sizes.world))))
    own = Connections.opened(
        sizes, rank, groups, DEVICE, CheckpointConfig(), host=host, routes_documents=routes_documents
    )
    assert own.device_mesh is None or sizes.world > 1
    names = [["embedding"] * (stage in (0, sizes.pp - 1)) + ["part"] * (stage == 1) for stage in range(sizes.pp)]
    stage_axes(names, own.mesh, groups.on_device)
    groups.on_device(fp8_layers.ranks_of_stage(own.mesh))
    return groups.made


def without_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends nothing over groups that nobody has made."""
    monkeypatch.setattr(dist, "send", lambda x, group, group_dst: None)
    monkeypatch.setattr(dist, "recv", lambda x, group, group_src: None)
    monkeypatch.setattr(connections.DeviceMesh, "from_group", lambda *args, **kwargs: "mesh")
