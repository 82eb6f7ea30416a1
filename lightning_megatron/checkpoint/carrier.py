"""A rank's part of a global tensor, as the planner of torch.distributed.checkpoint understands it.

The planner asks a tensor which boxes it writes, which it wants and where their memory is, by three methods; with them
the stock `save` writes every box once and the stock `load` reads what overlaps, on whatever mesh.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_megatron.checkpoint.state import Piece
from lightning_megatron.sharding import Box

# A reader that needs any part of a saved chunk reads all of it.
MAX_CHUNK_BYTES = 256 * 2**20


class Carrier(Tensor):
    """A tensor of the global shape that holds only this rank's pieces of it, one at least, none empty."""

    pieces: tuple[Piece, ...]

    @staticmethod
    def __new__(cls, pieces: Sequence[Piece]) -> "Carrier":
        first = pieces[0]
        carrier: Carrier = Tensor._make_wrapper_subclass(
            cls, first.global_shape, dtype=first.tensor.dtype, device=first.tensor.device
        )
        carrier.pieces = tuple(pieces)
        return carrier

    # The signature of Tensor's own constructor does not matter: __new__ takes the pieces.
    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise RuntimeError(f"{func} on a checkpoint's carrier, which is not a tensor to compute with")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Carrier({tuple(self.shape)}, {self.dtype}, {[piece.box for piece in self.pieces]})"

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, piece.box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(piece.box), properties=TensorProperties(dtype=self.dtype), size=self.shape
                ),
            )
            for piece in self.pieces
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(piece.box) for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        wanted = tuple(index.offset)
        return next(piece.tensor.detach() for piece in self.pieces if piece.box.offsets == wanted)


def chunks(piece: Piece, max_bytes: int) -> Iterator[Piece]:
    """The piece in parts of at most `max_bytes`, cut along its first dims; the same for every replica."""
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


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
