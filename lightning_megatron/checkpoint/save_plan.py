"""The plan of a save: which rank writes which box of which tensor.

torch's own planner spreads boxes that several ranks hold over those ranks, and finds holes. It asks a tensor for its
boxes by three methods, which `ShardedTensorProxy` has; with them the stock planners save and load on any mesh. Planning
needs communication of all ranks, so the plan is cached: while every rank holds the boxes of the last save, it costs a
vote.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from lightning_megatron.checkpoint.state import Piece, Pieces, as_pieces
from lightning_megatron.comm.collectives import all_reduce, gather_on_first, scatter_objects
from lightning_megatron.comm.raise_on_all_ranks import raise_on_all_ranks
from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import Box

# A reader that needs any part of a saved chunk reads all of it.
MAX_CHUNK_BYTES = 256 * 2**20

ChunkKey = tuple[str, tuple[int, ...]]
"""Name of a tensor and offsets of a box of it."""


@dataclass(frozen=True)
class ChunkToWrite:
    """A box of a tensor that this rank writes."""

    name: str
    box: Box
    tensor: Tensor

    @property
    def key(self) -> ChunkKey:
        return self.name, self.box.offsets


class ShardedTensorProxy(Tensor):
    """A tensor of the global shape that holds only this rank's pieces of it, one at least, none empty."""

    pieces: tuple[Piece, ...]

    @staticmethod
    def __new__(cls, pieces: Sequence[Piece]) -> "ShardedTensorProxy":
        first = pieces[0]
        proxy: ShardedTensorProxy = Tensor._make_wrapper_subclass(
            cls, first.global_shape, dtype=first.tensor.dtype, device=first.tensor.device
        )
        proxy.pieces = tuple(pieces)
        return proxy

    # The signature of Tensor's own constructor does not matter: __new__ takes the pieces.
    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise RuntimeError(f"{func} on a checkpoint's proxy of a sharded tensor, which is not a tensor to compute with")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedTensorProxy({tuple(self.shape)}, {self.dtype}, {[piece.box for piece in self.pieces]})"

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, piece.box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk_metadata(piece.box), properties=TensorProperties(dtype=self.dtype), size=self.shape
                ),
            )
            for piece in self.pieces
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk_metadata(piece.box) for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        wanted = tuple(index.offset)
        return next(piece.tensor.detach() for piece in self.pieces if piece.box.offsets == wanted)


class SavePlanner:
    """The plans of one world, of which the last is cached."""

    def __init__(self, world: Axis) -> None:
        self._world = world
        self._local: SavePlan | None = None
        self._keys: list[ChunkKey] = []
        self.tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {}
        """Shape and dtype of every tensor that any rank writes by the last plan, on the first rank."""

    def chunks(self, held: Pieces) -> list[ChunkToWrite]:
        """The chunks that this rank writes, each of a bounded size. Collective.

        Raises on every rank, with the message of each that found it: ValueError where the pieces are not what they
        should be, or the boxes of all ranks do not make full tensors; RuntimeError for anything else.
        """
        world = self._world
        proxies, planner, local = raise_on_all_ranks(lambda: _local_plan(held, world), world)
        is_known = torch.tensor(int(self._local is not None and self._local.items == local.items))
        if not int(all_reduce(is_known, world, "min")):
            by_rank = gather_on_first(local, world)
            keys, self.tensors = raise_on_all_ranks(lambda: _global_plan(planner, by_rank), world)
            self._keys = scatter_objects(keys, world)
            self._local = local
        pieces = {(name, piece.box.offsets): piece for name, proxy in proxies.items() for piece in proxy.pieces}
        return [ChunkToWrite(key[0], pieces[key].box, pieces[key].tensor.detach()) for key in self._keys]


def chunk_metadata(box: Box) -> ChunkStorageMetadata:
    """The box as torch's planner describes it."""
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def chunks(piece: Piece, max_bytes: int) -> Iterator[Piece]:
    """The piece in parts of at most `max_bytes`, cut along its first dims; equal on every rank that holds the piece."""
    num_bytes = piece.tensor.numel() * piece.tensor.element_size()
    dim = next((dim for dim, size in enumerate(piece.box.sizes) if size > 1), None)
    if num_bytes <= max_bytes or dim is None:
        yield piece
        return
    size = piece.box.sizes[dim]
    length = math.ceil(size / math.ceil(num_bytes / max_bytes))
    for start in range(0, size, length):
        part = piece.tensor.narrow(dim, start, min(length, size - start))
        offsets = list(piece.box.offsets)
        offsets[dim] += start
        yield from chunks(Piece(piece.global_shape, Box(tuple(offsets), tuple(part.shape)), part), max_bytes)


def _local_plan(held: Pieces, world: Axis) -> tuple[dict[str, ShardedTensorProxy], DefaultSavePlanner, SavePlan]:
    """The boxes that this rank holds, proposed for writing before the ranks agree who writes them."""
    proxies = {
        name: ShardedTensorProxy([chunk for piece in full for chunk in chunks(piece, MAX_CHUNK_BYTES)])
        for name, pieces in as_pieces(held).items()
        if (full := [piece for piece in pieces if not piece.is_empty])
    }
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(proxies), is_coordinator=world.is_first)
    return proxies, planner, planner.create_local_plan()


def _global_plan(
    planner: DefaultSavePlanner, by_rank: list[SavePlan]
) -> tuple[list[list[ChunkKey]], dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """The chunks that each rank writes, and shape and dtype of every tensor; nothing of no plans. Raises ValueError
    where the boxes of all ranks do not make full tensors."""
    if not by_rank:
        return [], {}
    try:
        plans, metadata = planner.create_global_plan(by_rank)
    except (ValueError, AssertionError) as error:
        raise ValueError(f"the parts that the ranks hold do not make whole tensors: {error}") from error
    tensors = {
        name: (tuple(found.size), found.properties.dtype)
        for name, found in metadata.state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata)
    }
    return [[_key_of(item) for item in plan.items] for plan in plans], tensors


def _key_of(item: WriteItem) -> ChunkKey:
    assert item.index.offset is not None
    return item.index.fqn, tuple(item.index.offset)
