"""`verify` names every byte that is not the one that was written, and chunks that do not make full tensors."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.checkpoint import save_plan
from lightning_megatron.checkpoint import verify as module
from lightning_megatron.checkpoint.chunk_file import ChunkLocation
from lightning_megatron.checkpoint.manifest import MANIFEST_FILE, Manifest, read_manifest
from lightning_megatron.checkpoint.tensor_entry import Chunk, TensorEntry, cover_faults
from lightning_megatron.checkpoint.verify import verify
from lightning_megatron.sharding import Box
from tests.checkpoint.folders import saved


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of several chunks, read in small blocks."""
    monkeypatch.setattr(save_plan, "MAX_CHUNK_BYTES", 400)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 64)
    return saved(tmp_path / "a.ckpt", 1, v=torch.randn(30, 20), scalar=torch.tensor(2.0))


def flip(path: Path, position: int) -> None:
    """Changes one bit of a file."""
    with open(path, "r+b") as stream:
        stream.seek(position)
        [byte] = stream.read(1)
        stream.seek(position)
        stream.write(bytes([byte ^ 1]))


def test_a_sound_checkpoint_has_no_faults(path: Path) -> None:
    assert verify(path) == []


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_one_wrong_bit_anywhere_in_any_file_is_one_fault_that_names_file_and_bytes(path: Path, share: float) -> None:
    for name, num_bytes in read_manifest(path).files.items():
        position = int(share * (num_bytes - 1))
        flip(path / name, position)
        [fault] = verify(path)
        found = re.fullmatch(r"(?P<file>[^,]+), bytes (?P<start>\d+) to (?P<end>\d+)\b.*", fault)
        assert found is not None and found["file"] == name
        assert int(found["start"]) <= position < int(found["end"])
        flip(path / name, position)
    assert verify(path) == []


def test_the_faults_of_a_file_are_one_line_that_counts_them(path: Path) -> None:
    places = [chunk.location for chunk in read_manifest(path).entries["v"].chunks]
    assert len(places) > 5
    for place in places:
        flip(path / place.file, place.offset + place.num_bytes // 2)
    manifest = read_manifest(path)
    num_chunks = sum(place.file == places[0].file for place in set(manifest.locations()))
    [fault] = verify(path)
    name = re.escape(places[0].file)
    assert re.match(rf"{len(places)} of the {num_chunks} chunks of {name} are not .*; first, {name}, bytes", fault)


def test_a_wrong_bit_of_the_manifest_is_a_fault(path: Path) -> None:
    for position in range(0, (path / MANIFEST_FILE).stat().st_size, 37):
        flip(path / MANIFEST_FILE, position)
        [fault] = verify(path)
        assert MANIFEST_FILE in fault or "layout" in fault
        flip(path / MANIFEST_FILE, position)


def test_missing_and_cut_files_are_faults_with_those_of_others(path: Path) -> None:
    os.truncate(path / "__0_0.distcp", 100)
    os.unlink(path / "meta.pt")
    flip(path / ".metadata", 3)
    faults = verify(path)
    assert any("meta.pt is missing" in fault for fault in faults)
    assert sum("__0_0.distcp" in fault for fault in faults) == 1
    assert any(re.match(r"__0_0\.distcp has 100 bytes .*; \d+ of the \d+ chunks", fault) for fault in faults)
    assert any(fault.startswith(".metadata, bytes 0 to") for fault in faults)
    assert any("ends after" in fault for fault in faults)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        verify(tmp_path / "none.ckpt")


def test_chunks_that_do_not_make_full_tensors_are_a_fault_though_every_byte_is_sound(path: Path) -> None:
    manifest = read_manifest(path)
    entries = dict(manifest.entries)
    entries["v"] = replace(entries["v"], shape=(31, 20))
    (path / MANIFEST_FILE).write_bytes(replace(manifest, entries=entries).to_bytes())
    assert verify(path) == ["tensor v: its chunks have 600 of the 620 elements of (31, 20)"]
    assert isinstance(manifest, Manifest)


def entry_of(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> TensorEntry:
    chunks = [Chunk(Box(*box), ChunkLocation("f", 1000 * number, 1000, 0)) for number, box in enumerate(boxes)]
    return TensorEntry(shape, torch.float32, tuple(chunks))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (entry_of((4, 4), ((0, 0), (4, 2))), "8 of the 16 elements"),
        (entry_of((4, 4), ((0, 0), (4, 3)), ((0, 2), (4, 2))), "overlap"),
        # As many elements as the tensor, and yet a hole and an overlap.
        (entry_of((4, 4), ((0, 0), (4, 2)), ((2, 0), (2, 4))), "overlap"),
        (entry_of((4, 4), ((0, 0), (4, 4)), ((0, 0), (4, 4))), "overlap"),
        (entry_of((4, 4), ((0, 0), (4, 2)), ((0, 2), (4, 3))), "not within its shape"),
        (entry_of((4, 4), ((0,), (4,))), "not within its shape"),
        (entry_of(()), "0 of the 1 elements"),
        (entry_of((), ((), ()), ((), ())), "overlap"),
        (entry_of((4, 4), ((0, 0), (4, 4)), ((0, 0), (-1, 4))), "not within its shape"),
        # Less in the file than a reader would allocate.
        (entry_of((10**6, 10**6), ((0, 0), (10**6, 10**6))), "fewer in the file"),
    ],
)
def test_holes_overlaps_and_chunks_that_stand_out_are_reported(entry: TensorEntry, words: str) -> None:
    [fault] = cover_faults(entry)
    assert words in fault


def test_full_covers_have_no_fault() -> None:
    assert cover_faults(entry_of((0, 3))) == []
    assert cover_faults(entry_of((), ((), ()))) == []
    assert cover_faults(entry_of((4, 4), ((0, 0), (4, 2)), ((0, 2), (1, 2)), ((1, 2), (3, 2)))) == []


@given(st.data())
def test_any_grid_is_a_cover_and_any_grid_with_a_cell_moved_is_none(data: st.DataObject) -> None:
    cuts = [sorted({0, 6, *data.draw(st.lists(st.integers(1, 5)))}) for _ in range(2)]
    boxes = [
        ((a, b), (c - a, d - b))
        for a, c in zip(cuts[0], cuts[0][1:], strict=False)
        for b, d in zip(cuts[1], cuts[1][1:], strict=False)
    ]
    boxes = data.draw(st.permutations(boxes))
    assert cover_faults(entry_of((6, 6), *boxes)) == []
    (row, column), sizes = boxes[0]
    assert cover_faults(entry_of((6, 6), ((row - 1, column), sizes), *boxes[1:])) != []
    assert cover_faults(entry_of((6, 6), *boxes[1:])) != []
