"""What a checkpoint says about itself, and what is said of things that are none."""

import os
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_megatron.checkpoint import is_checkpoint, load, read_entries, read_meta, read_names, save
from lightning_megatron.checkpoint.manifest import META_FILE, STAMP, TENSORS_FILE, Entry
from lightning_megatron.mesh import Mesh

WORLD = Mesh.single().world


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "some.ckpt"
    save(path, {"w": torch.zeros(3, 2), "n": torch.tensor(4)}, {"epoch": 7}, world=WORLD)
    return path


def test_shapes_and_dtypes_are_told_without_reading_tensors(checkpoint: Path) -> None:
    for file in checkpoint.glob("*.distcp"):
        file.unlink()
    assert is_checkpoint(checkpoint)
    assert read_names(checkpoint) == {"w": (3, 2), "n": ()}
    assert read_entries(checkpoint) == {"w": Entry((3, 2), torch.float32), "n": Entry((), torch.int64)}


def test_plain_data_comes_back_as_it_was(tmp_path: Path) -> None:
    meta = {
        "a": [1, 2.5, None, True, "x", b"y", (1, 2)],
        "tensor": torch.arange(3),
        "dtype": torch.bfloat16,
        3: OrderedDict(b={"c": Counter("aab")}),
    }
    save(tmp_path / "m.ckpt", {}, meta, world=WORLD)
    back = read_meta(tmp_path / "m.ckpt")
    assert back.pop(STAMP)["layout"] == 1
    assert torch.equal(back.pop("tensor"), meta.pop("tensor"))
    assert back == meta


def test_every_value_that_is_not_plain_is_named(tmp_path: Path) -> None:
    meta = {"ok": 1, "callbacks": {"mine": [0, {"path": Path("x")}]}, "best": np.float64(1), "f": lambda: 0}
    with pytest.raises(ValueError) as error:
        save(tmp_path / "m.ckpt", {}, meta, world=WORLD)
    for where in ("meta['callbacks']['mine'][1]['path'] is a pathlib", "meta['best'] is a numpy", "meta['f'] is a "):
        assert where in str(error.value)
    assert "ok" not in str(error.value)
    assert os.listdir(tmp_path) == []


def make_missing(path: Path) -> None:
    pass


def make_file(path: Path) -> None:
    torch.save({}, path)


def make_empty(path: Path) -> None:
    path.mkdir()


def make_strange(path: Path) -> None:
    path.mkdir()
    Path(path, "notes.txt").touch()


def make_half(path: Path) -> None:
    path.mkdir()
    Path(path, META_FILE).touch()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (make_missing, "does not exist; a checkpoint is a directory that holds .metadata and meta.pt"),
        (make_file, "is a plain file"),
        (make_empty, "is an empty directory"),
        (make_strange, "has no .metadata and meta.pt among notes.txt"),
        (make_half, "has no .metadata among meta.pt"),
    ],
)
def test_what_is_no_checkpoint_is_told_by_what_it_is(tmp_path: Path, make, said: str) -> None:
    path = tmp_path / "it.ckpt"
    make(path)
    assert not is_checkpoint(path)
    for read in (read_meta, read_names, read_entries, lambda path: load(path, {}, world=WORLD)):
        with pytest.raises(ValueError) as error:
            read(path)
        assert said in str(error.value)
        assert str(path) in str(error.value)


def test_damaged_files_are_value_errors(checkpoint: Path) -> None:
    for name, read in ((META_FILE, read_meta), (TENSORS_FILE, read_names)):
        file = checkpoint / name
        file.write_bytes(file.read_bytes()[:-30])
        with pytest.raises(ValueError, match="damaged"):
            read(checkpoint)


def test_a_newer_layout_is_refused_by_name(checkpoint: Path) -> None:
    meta = torch.load(checkpoint / META_FILE)
    meta[STAMP] |= {"layout": 2, "package": "9.1"}
    torch.save(meta, checkpoint / META_FILE)
    with pytest.raises(ValueError, match=r"layout 2, written by lightning_megatron 9\.1"):
        read_meta(checkpoint)


def test_code_in_the_metadata_runs_only_on_request(checkpoint: Path) -> None:
    meta = torch.load(checkpoint / META_FILE)
    torch.save(meta | {"where": Path("x")}, checkpoint / META_FILE)
    with pytest.raises(ValueError, match="weights_only=False"):
        read_meta(checkpoint)
    assert read_meta(checkpoint, weights_only=False)["where"] == Path("x")


def test_a_checkpoint_of_another_package_is_told(checkpoint: Path) -> None:
    torch.save({"epoch": 1}, checkpoint / META_FILE)
    with pytest.raises(ValueError, match="was not written by lightning_megatron"):
        read_meta(checkpoint)
