"""Who writes what: torch's planner spreads the boxes that several ranks hold over those ranks, and finds holes.

Making a plan is a conversation of all ranks. It is kept: while every rank holds the same boxes as at the last save, the
next one costs a vote.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from lightning_megatron.checkpoint import carrier
from lightning_megatron.checkpoint.attempt import on_all
from lightning_megatron.checkpoint.state import Pieces, as_pieces
from lightning_megatron.comm.collectives import all_reduce, gather_objects
from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import Box

Spot = tuple[str, tuple[int, ...]]
# A box to write: the tensor's name and the box's offsets.


@dataclass(frozen=True)
class Plan:
    """What this rank writes, and the shape and dtype of every tensor that any rank writes."""

    spots: tuple[Spot, ...] = ()
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """A box that this rank writes."""

    name: str
    box: Box
    tensor: Tensor


class Planning:
    """Plans of one world, the last one kept."""

    def __init__(self, world: Axis) -> None:
        self._world = world
        self._local: SavePlan | None = None
        self._plan = Plan()

    def items(self, held: Pieces) -> list[Item]:
        """The boxes that this rank writes, in parts of a bounded size. Collective.

        Raises on every rank, with the words of each that found it: ValueError where what is held is not what it should
        be, or the boxes of all ranks do not make whole tensors; RuntimeError for anything else.
        """
        proposal = on_all(lambda: _Proposal.of(held, self._world), self._world)
        is_known = torch.tensor(int(self._local is not None and self._local.items == proposal.local.items))
        if not int(all_reduce(is_known, self._world, "min")):
            by_rank = gather_objects(proposal.local, self._world)
            self._plan = on_all(lambda: _plan_of(proposal.planner, by_rank, self._world.rank), self._world)
            self._local = proposal.local
        pieces = {(name, piece.box.offsets): piece for name, held in proposal.carriers.items() for piece in held.pieces}
        return [Item(spot[0], pieces[spot].box, pieces[spot].tensor.detach()) for spot in self._plan.spots]

    @property
    def tensors(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor of the last plan."""
        return self._plan.tensors


@dataclass(frozen=True)
class _Proposal:
    """What this rank could write, before the ranks have agreed who does."""

    carriers: Mapping[str, carrier.Carrier]
    planner: DefaultSavePlanner
    local: SavePlan

    @staticmethod
    def of(held: Pieces, world: Axis) -> "_Proposal":
        carriers = {
            name: carrier.Carrier([chunk for piece in full for chunk in carrier.chunks(piece, carrier.MAX_CHUNK_BYTES)])
            for name, pieces in as_pieces(held).items()
            if (full := [piece for piece in pieces if not piece.is_empty])
        }
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(carriers), is_coordinator=world.is_first)
        return _Proposal(carriers, planner, planner.create_local_plan())


def _plan_of(planner: DefaultSavePlanner, by_rank: list[SavePlan], rank: int) -> Plan:
    """The plan of a rank. Raises ValueError where the boxes of all ranks do not make whole tensors."""
    try:
        plans, metadata = planner.create_global_plan(by_rank)
    except (ValueError, AssertionError) as error:
        raise ValueError(f"the parts that the ranks hold do not make whole tensors: {error}") from error
    tensors = {
        name: (tuple(found.size), found.properties.dtype)
        for name, found in metadata.state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata)
    }
    spots = []
    for item in plans[rank].items:
        assert item.index.offset is not None
        spots.append((item.index.fqn, tuple(item.index.offset)))
    return Plan(tuple(spots), tensors)
