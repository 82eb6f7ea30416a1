"""What a checkpoint says about itself, and errors about things that are none."""

import json
import os
import pickle
from collections import Counter, OrderedDict
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch

from lightning_megatron.checkpoint import DamagedError, is_checkpoint, load, read_entries, read_meta, save
from lightning_megatron.checkpoint.manifest import MANIFEST_FILE, META_FILE, Manifest, read_manifest
from lightning_megatron.mesh import Mesh

WORLD = Mesh.single().world


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "some.ckpt"
    save(path, {"w": torch.zeros(3, 2), "n": torch.tensor(4)}, {"epoch": 7}, world=WORLD)
    return path


def test_shapes_and_dtypes_are_reported_without_reading_tensors(checkpoint: Path) -> None:
    for file in checkpoint.glob("*.distcp"):
        # As long as before, and nothing of what was in it.
        file.write_bytes(b"x" * file.stat().st_size)
    assert is_checkpoint(checkpoint)
    assert {name: entry.shape for name, entry in read_entries(checkpoint).items()} == {"w": (3, 2), "n": ()}
    found = {name: (entry.shape, entry.dtype, entry.num_bytes) for name, entry in read_entries(checkpoint).items()}
    assert found == {"w": ((3, 2), torch.float32, 24), "n": ((), torch.int64, 8)}


def test_a_manifest_comes_back_from_its_bytes(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    assert manifest.entries["w"].chunks
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_plain_data_comes_back_as_it_was(tmp_path: Path) -> None:
    meta = {
        "a": [1, 2.5, None, True, "x", b"y", (1, 2)],
        "tensor": torch.arange(3),
        "dtype": torch.bfloat16,
        3: OrderedDict(b={"c": Counter("aab")}),
    }
    save(tmp_path / "m.ckpt", {}, meta, world=WORLD)
    back = read_meta(tmp_path / "m.ckpt")
    assert torch.equal(back.pop("tensor"), meta.pop("tensor"))
    assert back == meta


def test_every_value_that_is_not_plain_is_named(tmp_path: Path) -> None:
    meta = {"ok": 1, "callbacks": {"mine": [0, {"path": slice(1)}]}, "best": np.array([[]], object), "f": lambda: 0}
    with pytest.raises(ValueError) as error:
        save(tmp_path / "m.ckpt", {}, meta, world=WORLD)
    for where in (
        "meta['callbacks']['mine'][1]['path'] is a builtins.slice",
        "meta['best'] is a numpy",
        "meta['f'] is a builtins.function",
    ):
        assert where in str(error.value)
    assert "ok" not in str(error.value)
    assert os.listdir(tmp_path) == []


def make_missing(path: Path) -> None:
    pass


def make_file(path: Path) -> None:
    torch.save({}, path)


def make_text(path: Path) -> None:
    path.write_text("not one")


def make_folder_of_files(path: Path) -> None:
    path.mkdir()
    torch.save({}, path / "step=4.ckpt")


def make_empty(path: Path) -> None:
    path.mkdir()


def make_strange(path: Path) -> None:
    path.mkdir()
    Path(path, "notes.txt").touch()


def make_dangling(path: Path) -> None:
    path.symlink_to("gone.ckpt")


def make_half(path: Path) -> None:
    path.mkdir()
    Path(path, META_FILE).touch()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_missing, "does not exist; a checkpoint is a directory that holds manifest.json"),
        (make_file, "look at it with torch.load("),
        (make_text, "is a plain file that torch.save did not write; a checkpoint is a directory"),
        (make_folder_of_files, "is a folder with step=4.ckpt in it;"),
        (make_empty, "is an empty directory"),
        (make_strange, "has no manifest.json among notes.txt"),
        (make_dangling, "is a link to gone.ckpt, which is not there"),
        (make_half, "has no manifest.json among meta.pt"),
    ],
)
def test_what_is_no_checkpoint_is_reported_by_what_it_is(tmp_path: Path, make, message: str) -> None:
    path = tmp_path / "it.ckpt"
    make(path)
    assert not is_checkpoint(path)
    for read in (read_meta, read_entries, lambda path: load(path, {}, world=WORLD)):
        with pytest.raises(ValueError) as error:
            read(path)
        assert message in str(error.value)
        assert str(path) in str(error.value)


def edited(checkpoint: Path, **changes: object) -> None:
    """Another manifest with a right checksum, as someone who means harm would write it."""
    manifest = read_manifest(checkpoint)
    body = json.loads(manifest.to_bytes())
    del body["checksum"]
    text = json.dumps(body | changes, separators=(",", ":")).encode()
    signed = json.dumps(body | changes | {"checksum": f"{crc32(text):08x}"}, separators=(",", ":"))
    Path(checkpoint, MANIFEST_FILE).write_bytes(signed.encode())


def test_a_newer_layout_is_refused_by_name(checkpoint: Path) -> None:
    edited(checkpoint, layout=3, package="9.1")
    with pytest.raises(ValueError, match=r"layout 3, written by lightning_megatron 9\.1"):
        read_meta(checkpoint)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "something else"},
        {"files": [["../../etc/passwd", 10]]},
        {"files": 3},
        {"tensors": {"w": {"shape": [3], "dtype": "load", "chunks": []}}},
        {"tensors": {"w": {"shape": ["a"], "dtype": "float32", "chunks": []}}},
        {"tensors": {"w": {"shape": [1], "dtype": "float32", "chunks": [[[0], [1], 99, 0, 1, 1]]}}},
        {"whole": {"meta": [0, -5, 1, 1]}},
        {"whole": []},
        {"layout": -1},
        {"tensors": {"w": {"shape": [1] * 200, "dtype": "float32", "chunks": []}}},
    ],
)
def test_a_crafted_manifest_is_refused(checkpoint: Path, changes: dict[str, object]) -> None:
    edited(checkpoint, **changes)
    with pytest.raises(DamagedError, match=r"some\.ckpt: manifest\.json"):
        read_manifest(checkpoint)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (b"[" * 200_000, "is nested too deeply to be one that this package writes"),
        (b'{"checksum": "0", "layout": NaN}', "is not one that this package writes: a number in it is not finite"),
        (b'{"checksum": "0", "layout": 1e999}', "is not one that this package writes: a number in it is not finite"),
    ],
)
def test_a_manifest_of_another_writer_is_told_without_the_words_of_python(
    checkpoint: Path, written: bytes, words: str
) -> None:
    Path(checkpoint, MANIFEST_FILE).write_bytes(written)
    with pytest.raises(DamagedError, match=rf"some\.ckpt: manifest\.json {words}$"):
        read_manifest(checkpoint)


def test_code_in_the_metadata_is_never_run(checkpoint: Path, tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "harm"),)

    torch.save({"x": Harm()}, checkpoint / META_FILE)
    data = Path(checkpoint, META_FILE).read_bytes()
    manifest = read_manifest_of(checkpoint, data, crc32(data))
    Path(checkpoint, MANIFEST_FILE).write_bytes(manifest)
    with pytest.raises(DamagedError, match=r"meta\.pt cannot be read as plain data"):
        read_meta(checkpoint)
    assert not (tmp_path / "harm").exists()


def read_manifest_of(checkpoint: Path, data: bytes, checksum: int) -> bytes:
    """A manifest that fits another metadata file."""
    manifest = Manifest.from_bytes(Path(checkpoint, MANIFEST_FILE).read_bytes())
    place = manifest.whole["meta"]
    whole = dict(manifest.whole) | {"meta": type(place)(place.file, 0, len(data), checksum)}
    files = dict(manifest.files) | {place.file: len(data)}
    return Manifest.of(manifest.save_id, files, whole, manifest.entries).to_bytes()


def test_code_in_torchs_own_index_is_never_run(checkpoint: Path, tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "harm"),)

    Path(checkpoint, ".metadata").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(DamagedError, match=r"\.metadata has .* bytes and was written with"):
        load(checkpoint, {}, world=WORLD, strict=False)
    assert not (tmp_path / "harm").exists()


def test_every_flipped_byte_of_the_manifest_is_found(checkpoint: Path) -> None:
    file = Path(checkpoint, MANIFEST_FILE)
    data = file.read_bytes()
    for position in range(0, len(data), 7):
        file.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(ValueError, match=r"manifest\.json"):
            read_manifest(checkpoint)
