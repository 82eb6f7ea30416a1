"""Reads for the load planner of torch.distributed.checkpoint, from the manifest in place of a pickle."""

from collections import defaultdict
from collections.abc import Mapping
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from typing_extensions import override

from lightning_megatron.checkpoint.chunk_file import DamagedError, Place, read_chunk, where
from lightning_megatron.checkpoint.folder import Address, Folder
from lightning_megatron.checkpoint.manifest import Chunk, Entry


class ChunkReader(StorageReader):
    """Reads the chunks that a plan names, each once, and holds each against its checksum."""

    def __init__(self, path: Address, entries: Mapping[str, Entry]) -> None:
        self._folder = Folder(path)
        self._entries = entries

    @override
    def reset(self, checkpoint_id: Any = None) -> None:
        """The planner starts; nothing is kept between loads."""

    @override
    def read_metadata(self) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=entry.dtype),
                    size=torch.Size(entry.shape),
                    chunks=[
                        ChunkStorageMetadata(torch.Size(chunk.box.offsets), torch.Size(chunk.box.sizes))
                        for chunk in entry.chunks
                    ],
                )
                for name, entry in self._entries.items()
            }
        )

    @override
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing to set up."""

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_place: dict[Place, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_place[self._chunk(item.storage_index).place].append(item)
        by_file: dict[str, list[Place]] = defaultdict(list)
        for place in by_place:
            by_file[place.file].append(place)
        for file, places in by_file.items():
            with self._folder.open(file) as stream:
                for place in sorted(places, key=lambda place: place.offset):
                    tensor = self._read(stream, place, by_place[place][0].storage_index)
                    for item in by_place[place]:
                        _hand_over(tensor, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def _chunk(self, index: MetadataIndex) -> Chunk:
        chunks = self._entries[index.fqn].chunks
        # The planner's hint is the chunk's number; the offsets are what counts.
        if index.index is not None and chunks[index.index].box.offsets == index.offset:
            return chunks[index.index]
        return next(chunk for chunk in chunks if chunk.box.offsets == index.offset)

    def _read(self, stream: IO[bytes], place: Place, index: MetadataIndex) -> torch.Tensor:
        tensor = read_chunk(stream, place)
        sizes, dtype = tuple(self._chunk(index).box.sizes), self._entries[index.fqn].dtype
        if (tuple(tensor.shape), tensor.dtype) != (sizes, dtype):
            raise DamagedError(
                f"{where(place)} is a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}, not of {sizes} and "
                f"{dtype} as a part of {index.fqn}: {place.file} is not as it was written"
            )
        return tensor


def _hand_over(chunk: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    part = chunk
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        part = part.narrow(dim, start, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(part)
    planner.commit_tensor(item, target)
