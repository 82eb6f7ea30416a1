"""The manifest: the contents of a checkpoint, known without reading its tensors.

    manifest.json       the save's id, every file, and of every tensor its shape, dtype and chunks with their checksums
    __{rank}_0.distcp   the chunks that a rank wrote
    meta.pt             plain data: what the caller saves besides the tensors
    .metadata, __rest.distcp   only for torch's and Lightning's own tools (`torch_index`); nothing here reads them

The manifest is written last. A directory without one is no checkpoint; if the manifest does not match its own
checksum, the checkpoint is damaged. On a file system without renames all other names begin with the save's id.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_megatron.checkpoint import safe_metadata
from lightning_megatron.checkpoint.chunk_file import ChunkLocation, DamagedError, checksum_of, gaps, read_bytes
from lightning_megatron.checkpoint.folder import Address, Folder, is_torch_file
from lightning_megatron.checkpoint.tensor_entry import Chunk, TensorEntry, cover_faults
from lightning_megatron.sharding import Box
from lightning_megatron.version import VERSION

MANIFEST_FILE = "manifest.json"
META_FILE = "meta.pt"
SUFFIX = ".ckpt"
# Version of the files' layout; a reader refuses a newer one.
LAYOUT_VERSION = 2
_FORMAT = "lightning_megatron checkpoint"
# Several million chunks.
_MOST_BYTES = 512 * 2**20
# Sizes of tensors have 64 bits, of which one is the sign.
_MOST_ELEMENTS = 2**63 - 1
# Many of torch's operations take no more.
_MOST_DIMS = 64


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of a checkpoint."""

    save_id: str
    """Random id of the save."""
    layout: int
    """Version of the files' layout."""
    package: str
    """Version of lightning_megatron that wrote it."""
    torch: str
    """Version of torch that wrote it."""
    files: Mapping[str, int]
    """Bytes of each file, without the manifest."""
    whole: Mapping[str, ChunkLocation]
    """Locations of data that are no tensors, by role ("meta", "index", ...)."""
    entries: Mapping[str, TensorEntry]
    """Tensors by name."""

    @staticmethod
    def of(
        save_id: str, files: Mapping[str, int], whole: Mapping[str, ChunkLocation], entries: Mapping[str, TensorEntry]
    ) -> "Manifest":
        """The manifest of a checkpoint that this version writes."""
        return Manifest(
            save_id=save_id,
            layout=LAYOUT_VERSION,
            package=VERSION,
            torch=str(torch.__version__),
            files=files,
            whole=whole,
            entries=entries,
        )

    def to_bytes(self) -> bytes:
        """Content of the manifest file; equal manifests have equal bytes."""
        names = sorted(self.files)
        numbers = {name: number for number, name in enumerate(names)}

        def packed(location: ChunkLocation) -> list[int]:
            return [numbers[location.file], location.offset, location.num_bytes, location.checksum]

        body = {
            "format": _FORMAT,
            "layout": self.layout,
            "save_id": self.save_id,
            "package": self.package,
            "torch": self.torch,
            "files": [[name, self.files[name]] for name in names],
            "whole": {role: packed(location) for role, location in self.whole.items()},
            "tensors": {
                name: {
                    "shape": list(entry.shape),
                    "dtype": str(entry.dtype).removeprefix("torch."),
                    "chunks": [
                        [list(chunk.box.offsets), list(chunk.box.sizes), *packed(chunk.location)]
                        for chunk in entry.chunks
                    ],
                }
                for name, entry in self.entries.items()
            },
        }
        return _signed(body)

    @staticmethod
    def from_bytes(data: bytes) -> "Manifest":
        """Parses a manifest. Raises DamagedError for one that is damaged, ValueError for one of a newer layout."""
        try:
            body = json.loads(data)
            del body["checksum"]
            is_sound = _signed(body) == data
            layout, package = int(body["layout"]), str(body["package"])
        except RecursionError:
            raise DamagedError(f"{MANIFEST_FILE} is nested too deeply to be one that this package writes") from None
        except ValueError as error:
            raise DamagedError(f"{MANIFEST_FILE} is not one that this package writes: {error}") from error
        except (TypeError, KeyError, AttributeError) as error:
            raise DamagedError(f"{MANIFEST_FILE} is not one that this package writes: {error!r}") from error
        if body.get("format") != _FORMAT or not is_sound:
            raise DamagedError(f"{MANIFEST_FILE} does not sum up to its own checksum: it is damaged")
        if layout < 1:
            raise DamagedError(f"{MANIFEST_FILE} has layout {layout}, and the first one has number 1")
        if layout > LAYOUT_VERSION:
            raise ValueError(
                f"it has layout {layout}, written by lightning_megatron {package}; this version reads layouts up to "
                f"{LAYOUT_VERSION}: install that version or a newer one"
            )
        try:
            return _unpacked(body)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise DamagedError(f"{MANIFEST_FILE} is not one that this package writes: {error!r}") from error

    def locations(self) -> Iterator[ChunkLocation]:
        """Locations of all chunks."""
        yield from self.whole.values()
        for entry in self.entries.values():
            for chunk in entry.chunks:
                yield chunk.location

    def faults(self, sizes: Mapping[str, int]) -> list[str]:
        """Faults of files of these sizes and of the tensors in them, one line each, before any is read."""
        return ["; ".join(lines) for lines in self.file_faults(sizes).values()] + self.tensor_faults()

    def tensor_faults(self) -> list[str]:
        """Faults of the tensors' chunks, one line each, as `cover_faults` finds them."""
        return [f"tensor {name}: {fault}" for name, entry in self.entries.items() for fault in cover_faults(entry)]

    def file_faults(self, sizes: Mapping[str, int]) -> dict[str, list[str]]:
        """Faults of files of these sizes, by file; a file without a fault is left out."""
        faults: dict[str, list[str]] = {}
        by_file: dict[str, list[ChunkLocation]] = {name: [] for name in self.files}
        for location in self.locations():
            by_file[location.file].append(location)
        for name, num_bytes in sorted(self.files.items()):
            if name not in sizes:
                faults[name] = [f"{name} is missing"]
            elif sizes[name] != num_bytes:
                faults[name] = [f"{name} has {sizes[name]} bytes and was written with {num_bytes}"]
            elif found := list(gaps(by_file[name], num_bytes)):
                faults[name] = found
        return faults


def is_checkpoint(path: Address) -> bool:
    """Whether there is a checkpoint directory with a manifest at the path."""
    return Folder(path).has(MANIFEST_FILE)


def require_checkpoint(folder: Folder) -> None:
    """Raises ValueError, saying what is at the path, unless it is a checkpoint."""
    if folder.has(MANIFEST_FILE):
        return
    expected = f"a checkpoint is a directory that holds {MANIFEST_FILE}, or one file that torch.save wrote"
    kind = folder.kind()
    if kind == "file" and is_torch_file(folder.path):
        raise ValueError(
            f"checkpoint {folder.path} is a plain file, as torch.save and CheckpointConfig(kind='file') write it, and "
            f"this reads directories that hold {MANIFEST_FILE}; look at it with torch.load({folder.path!r}, "
            "weights_only=True)"
        )
    if kind == "file":
        raise ValueError(f"checkpoint {folder.path} is a plain file that torch.save did not write; {expected}")
    if kind == "link":
        raise ValueError(f"checkpoint {folder.path} is a link to {folder.target()}, which is not there; {expected}")
    if kind == "device":
        raise ValueError(f"checkpoint {folder.path} is a pipe or a device, but {expected}")
    if kind == "nothing":
        raise ValueError(f"checkpoint {folder.path} does not exist; {expected}")
    found = sorted(folder.sizes())
    if (other := Folder(f"{folder.path.rstrip('/')}/{MANIFEST_FILE}").kind()) != "nothing":
        what = {"device": "pipe or device", "link": "link to what is not there"}.get(other, other)
        raise ValueError(f"checkpoint {folder.path} has a {what} of the name {MANIFEST_FILE}, and no file; {expected}")
    if inside := sorted([*folder.folders(), *(name for name in found if name.endswith(SUFFIX))]):
        raise ValueError(
            f"checkpoint {folder.path} is a folder with {', '.join(inside[:5])} in it; {expected}: give one of them"
        )
    if not found:
        raise ValueError(f"checkpoint {folder.path} is an empty directory; {expected}")
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    raise ValueError(f"checkpoint {folder.path} has no {MANIFEST_FILE} among {', '.join(found[:5])}{more}; {expected}")


def read_manifest(path: Address) -> Manifest:
    """The manifest of the checkpoint at the path.

    Raises ValueError when the path is no checkpoint, when the manifest is damaged, or when files are missing or of
    another size than they were written with.
    """
    manifest = read_stored_manifest(path)
    if faults := manifest.faults(Folder(path).sizes()):
        raise DamagedError(f"checkpoint {path}: {'; '.join(faults[:20])}")
    return manifest


def read_stored_manifest(path: Address) -> Manifest:
    """The manifest as by `read_manifest`, without a check of the files that it lists."""
    folder = Folder(path)
    require_checkpoint(folder)
    try:
        with folder.open(MANIFEST_FILE) as stream:
            data = stream.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise DamagedError(f"{MANIFEST_FILE} has more than {_MOST_BYTES:,} bytes: it is damaged")
        return Manifest.from_bytes(data)
    except ValueError as error:
        raise type(error)(f"checkpoint {path}: {error}") from error


def read_meta(path: Address) -> dict[str, Any]:
    """Metadata with which the checkpoint was saved. Raises ValueError when the path is no checkpoint."""
    location = read_manifest(path).whole["meta"]
    try:
        with Folder(path).open(location.file) as stream:
            meta = safe_metadata.from_bytes(read_bytes(stream, location))
        return dict(meta)
    except Exception as error:
        # Forged bytes can raise any error in the unpickler.
        raise DamagedError(f"checkpoint {path}: {location.file} cannot be read as plain data: {error}") from error


def read_entries(path: Address) -> dict[str, TensorEntry]:
    """Entries of all tensors in the checkpoint, by name. Raises ValueError when the path is no checkpoint."""
    return dict(read_manifest(path).entries)


def _signed(body: Mapping[str, Any]) -> bytes:
    """The body as JSON, with the checksum of the rest at its end."""
    return _json({**body, "checksum": f"{checksum_of(_json(body)):08x}"})


def _json(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        raise ValueError("a number in it is not finite") from error


def _unpacked(body: Mapping[str, Any]) -> Manifest:
    files = {str(name): int(num_bytes) for name, num_bytes in body["files"]}
    if strangers := [name for name in files if os.path.basename(name) != name or name in ("", ".", "..")]:
        raise ValueError(f"{strangers} are not names of files in the directory")
    names = sorted(files)

    def location(number: int, offset: int, num_bytes: int, checksum: int) -> ChunkLocation:
        if min(number, offset, num_bytes) < 0:
            raise ValueError("a location before the start")
        return ChunkLocation(names[number], int(offset), int(num_bytes), int(checksum))

    entries = {}
    for name, tensor in body["tensors"].items():
        dtype = getattr(torch, tensor["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{tensor['dtype']!r} is no dtype")
        chunks = tuple(
            Chunk(Box(tuple(map(int, offsets)), tuple(map(int, sizes))), location(*where))
            for offsets, sizes, *where in tensor["chunks"]
        )
        if max(map(int, tensor["shape"]), default=0) > _MOST_ELEMENTS or len(tensor["shape"]) > _MOST_DIMS:
            raise ValueError(f"no tensor has the shape {tensor['shape']}")
        entries[name] = TensorEntry(tuple(map(int, tensor["shape"])), dtype, chunks)
    return Manifest(
        save_id=str(body["save_id"]),
        layout=int(body["layout"]),
        package=str(body["package"]),
        torch=str(body["torch"]),
        files=files,
        whole={role: location(*where) for role, where in body["whole"].items()},
        entries=entries,
    )
