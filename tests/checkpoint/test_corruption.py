"""Errors name the damaged file of a checkpoint; no wrong value is loaded and no code is run.

Two files are for other tools, and nothing here reads them: every load sees their size, a full check their bytes.
"""

import io
import itertools
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed as dist

from lightning_megatron.checkpoint import DamagedError, load, read_meta, save
from lightning_megatron.checkpoint.chunk_file import read_bytes
from lightning_megatron.checkpoint.manifest import MANIFEST_FILE, read_manifest
from lightning_megatron.checkpoint.verify import verify
from lightning_megatron.mesh import Sizes
from tests.checkpoint.small_model import mesh_of
from tests.checkpoint.steps import ALONE, meta_of
from tests.harness.ranks import on_ranks
from tests.harness.sample import WHOLE

DATA, META, INDEX, REST = "__0_0.distcp", "meta.pt", ".metadata", "__rest.distcp"
FILES = (DATA, META, MANIFEST_FILE, INDEX, REST)
UNREAD = (INDEX, REST)


def small_state(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randn(2, 3, generator=generator), "optimizer.0.w.exp_avg": torch.full((2, 3), float(step))}


def saved(path: Path, step: int) -> Path:
    save(path, small_state(step), meta_of(step), world=ALONE)
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return saved(tmp_path / "some.ckpt", 1)


def read_all(path: Path) -> None:
    """What a training reads: metadata, weights, moments. Raises AssertionError where any of it is wrong."""
    meta = read_meta(path)
    found = {name: torch.full_like(tensor, -7.0) for name, tensor in small_state(1).items()}
    load(path, found, world=ALONE)
    assert meta == meta_of(1)
    for name, tensor in small_state(1).items():
        assert torch.equal(found[name], tensor), name


def check_all(path: Path) -> None:
    """Every byte of every file against the manifest."""
    for place in read_manifest(path).locations():
        with open(path / place.file, "rb") as stream:
            read_bytes(stream, place)


def require_named(path: Path, *names: str) -> None:
    """The reading of everything fails, and the error names one of the files."""
    with pytest.raises((ValueError, RuntimeError)) as error:
        read_all(path)
    assert str(path) in str(error.value)
    assert any(name in str(error.value) for name in names), f"{names}: {error.value}"


def require_found(path: Path, name: str) -> None:
    """As `require_named`; of a file that nobody reads, by the full check."""
    if name not in UNREAD:
        require_named(path, name)
        return
    read_all(path)
    with pytest.raises(DamagedError, match=name.replace(".", r"\.")):
        check_all(path)


def test_an_untouched_checkpoint_is_read_and_checked(checkpoint: Path) -> None:
    assert set(os.listdir(checkpoint)) == set(FILES)
    read_all(checkpoint)
    check_all(checkpoint)


@pytest.mark.matrix
@pytest.mark.parametrize("name", FILES)
def test_every_flipped_byte_is_found(checkpoint: Path, name: str) -> None:
    """Under --whole every byte, else one in eleven: headers, lengths and contents have longer parts than that."""
    file = checkpoint / name
    with open(file, "r+b", buffering=0) as stream:
        flipped = list(enumerate(file.read_bytes()))[:: 1 if WHOLE in os.environ else 11]
        for position, byte in flipped:
            os.pwrite(stream.fileno(), bytes([byte ^ (1 << position % 8)]), position)
            require_found(checkpoint, name)
            os.pwrite(stream.fileno(), bytes([byte]), position)
    read_all(checkpoint)
    check_all(checkpoint)


@pytest.mark.parametrize("name", FILES)
def test_several_bytes_that_changed_are_found(checkpoint: Path, name: str) -> None:
    data = (checkpoint / name).read_bytes()
    chance = random.Random(name)
    for _ in range(100):
        start = chance.randrange(len(data))
        length = chance.randint(1, min(64, len(data) - start))
        garbage = chance.choice([bytes(length), b"\xff" * length, chance.randbytes(length), data[:length]])
        changed = data[:start] + garbage + data[start + length :]
        if changed == data:
            continue
        (checkpoint / name).write_bytes(changed)
        require_found(checkpoint, name)


@pytest.mark.parametrize("name", FILES)
def test_every_other_length_is_reported_at_load(checkpoint: Path, name: str) -> None:
    data = (checkpoint / name).read_bytes()
    for length in range(0, len(data), 1 if len(data) < 1000 else 7):
        (checkpoint / name).write_bytes(data[:length])
        require_named(checkpoint, name)
    for more in (b"\n", b"\0", b" ", bytes(4096), data):
        (checkpoint / name).write_bytes(data + more)
        require_named(checkpoint, name)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_gone_is_reported_at_load(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    require_named(checkpoint, name)
    (checkpoint / name).mkdir()
    require_named(checkpoint, name)


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(FILES, 2)))
def test_two_files_that_changed_places_are_reported_at_load(checkpoint: Path, one: str, other: str) -> None:
    (checkpoint / one).rename(checkpoint / "aside")
    (checkpoint / other).rename(checkpoint / one)
    (checkpoint / "aside").rename(checkpoint / other)
    require_named(checkpoint, one, other)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_save_is_found(checkpoint: Path, tmp_path: Path, name: str) -> None:
    other = saved(tmp_path / "other.ckpt", 2)
    assert (other / name).read_bytes() != (checkpoint / name).read_bytes()
    assert (other / name).stat().st_size == (checkpoint / name).stat().st_size or name == MANIFEST_FILE
    shutil.copy(other / name, checkpoint / name)
    if name == MANIFEST_FILE:
        # It is as sound as the other files: none of them is its own.
        require_named(checkpoint, META)
        with pytest.raises(DamagedError, match=DATA):
            load(checkpoint, small_state(1), world=ALONE)
    else:
        require_found(checkpoint, name)


def test_all_files_but_one_of_another_save_are_found(checkpoint: Path, tmp_path: Path) -> None:
    """As a copy that was broken off leaves them."""
    other = saved(tmp_path / "other.ckpt", 2)
    for name in FILES:
        mixed = tmp_path / "mixed.ckpt"
        shutil.copytree(other, mixed)
        shutil.copy(checkpoint / name, mixed / name)
        with pytest.raises((ValueError, RuntimeError)):
            check_all(mixed)
        if name not in UNREAD:
            require_named(mixed, *FILES)
        shutil.rmtree(mixed)


class Harm:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.mark),)


def torch_bytes(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def forms_of(value: Any) -> Iterator[bytes]:
    """What someone could write in place of a file."""
    yield pickle.dumps(value)
    yield torch_bytes(value)
    yield torch_bytes({"step": 1, "x": value})
    yield torch_bytes(value, _use_new_zipfile_serialization=False)


def signed(checkpoint: Path, name: str, data: bytes) -> None:
    """Puts the bytes in place of the file's only, or first, chunk, with a manifest that says so, checksums included."""
    body = json.loads((checkpoint / MANIFEST_FILE).read_bytes())
    del body["checksum"]
    number = sorted(file for file, _ in body["files"]).index(name)
    places = [(place, 0) for place in body["whole"].values()]
    places += [(chunk, 2) for tensor in body["tensors"].values() for chunk in tensor["chunks"]]
    own = sorted(((p, i) for p, i in places if p[i] == number), key=lambda pair: pair[0][pair[1] + 1])
    rest = (checkpoint / name).read_bytes()[own[0][0][own[0][1] + 2] :]
    shift = len(data) - own[0][0][own[0][1] + 2]
    for place, at in own[1:]:
        place[at + 1] += shift
    place, at = own[0]
    place[at + 2 : at + 4] = [len(data), crc32(data)]
    body["files"] = [[file, size + shift * (file == name)] for file, size in body["files"]]
    (checkpoint / name).write_bytes(data + rest)
    text = json.dumps(body, separators=(",", ":")).encode()
    whole = json.dumps(body | {"checksum": f"{crc32(text):08x}"}, separators=(",", ":")).encode()
    (checkpoint / MANIFEST_FILE).write_bytes(whole)


@pytest.mark.parametrize("is_signed", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_code_in_any_file_is_never_run(checkpoint: Path, tmp_path: Path, name: str, is_signed: bool) -> None:
    """Even where someone wrote the checksums that fit."""
    mark, original = tmp_path / "harm", shutil.copytree(checkpoint, tmp_path / "original")
    for data in forms_of(Harm(mark)):
        shutil.copytree(original, checkpoint, dirs_exist_ok=True)
        if is_signed and name != MANIFEST_FILE:
            signed(checkpoint, name, data)
            assert read_manifest(checkpoint)
        else:
            (checkpoint / name).write_bytes(data)
        if is_signed and name in UNREAD:
            read_all(checkpoint)
            check_all(checkpoint)
        else:
            require_named(checkpoint, name)
        assert not mark.exists()
    # It would run.
    pickle.loads(pickle.dumps(Harm(mark)))
    assert mark.exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"w": torch.zeros(2, 3)}, "is a dict, not a tensor"),
        (torch.zeros(3, 3), "of shape (3, 3)"),
        (torch.zeros(2, 2), "of shape (2, 2)"),
        (torch.zeros(6), "of shape (6,)"),
        (torch.zeros(2, 3, dtype=torch.float64), "torch.float64"),
    ],
)
def test_a_chunk_that_is_not_what_the_manifest_says_is_reported(checkpoint: Path, value: Any, message: str) -> None:
    signed(checkpoint, DATA, torch_bytes(value))
    require_named(checkpoint, DATA)
    with pytest.raises(DamagedError) as error:
        load(checkpoint, small_state(1), world=ALONE)
    assert message in str(error.value)


@pytest.mark.parametrize("name", [META, DATA])
def test_made_up_bytes_with_right_checksums_end_in_an_error_that_names_the_file(
    checkpoint: Path, tmp_path: Path, name: str
) -> None:
    original = shutil.copytree(checkpoint, tmp_path / "original")
    chunk = next(chunk for chunk in read_manifest(original).locations() if (chunk.file, chunk.offset) == (name, 0))
    data = (original / name).read_bytes()[: chunk.num_bytes]
    chance = random.Random(name)
    messages = []
    for _ in range(300):
        start = chance.randrange(min(700, len(data)))  # the pickle is at the front
        changed = data[:start] + chance.randbytes(chance.randint(1, 8)) + data[start + 8 :]
        shutil.copytree(original, checkpoint, dirs_exist_ok=True)
        signed(checkpoint, name, changed)
        found = {key: torch.zeros_like(tensor) for key, tensor in small_state(1).items()}
        try:
            read_meta(checkpoint)
            load(checkpoint, found, world=ALONE)
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert all(name in message for message in messages)


@pytest.mark.parametrize(
    ("shape", "offset", "words"),
    [
        ([4, 3], 0, r"tensor w: its chunks have 6 of the 12 elements of \(4, 3\)"),
        # As many elements as the tensor has, and not where the tensor is.
        ([2, 3], 1, r"tensor w: the chunk at \[1, 0\] of \[2, 3\].* is not within its shape \(2, 3\)"),
    ],
)
def test_a_manifest_that_leaves_a_part_of_a_tensor_out_is_reported_before_a_weight_is_read(
    checkpoint: Path, shape: list[int], offset: int, words: str
) -> None:
    manifest, w = read_manifest(checkpoint), torch.full(tuple(shape), -1.0)
    body = json.loads(manifest.to_bytes())
    del body["checksum"]
    body["tensors"]["w"]["shape"] = shape
    body["tensors"]["w"]["chunks"][0][0][0] = offset
    text = json.dumps(body, separators=(",", ":")).encode()
    whole = json.dumps(body | {"checksum": f"{crc32(text):08x}"}, separators=(",", ":")).encode()
    (checkpoint / MANIFEST_FILE).write_bytes(whole)
    with pytest.raises(DamagedError, match=words):
        load(checkpoint, {"w": w}, world=ALONE, strict=False)
    assert (w == -1).all()
    assert re.search(words, "\n".join(verify(checkpoint)))


@on_ranks(2)
def test_ranks_that_see_different_saves_of_one_layout_are_reported(tmp_path: Path) -> None:
    """As on disks of their own, where one of the copies is older."""
    rank, world = dist.get_rank(), mesh_of(Sizes(world=2)).world
    own = saved(tmp_path / str(rank) / "a.ckpt", rank)
    found = {name: torch.zeros_like(tensor) for name, tensor in small_state(0).items()}
    # The manifest is the first rank's.
    with pytest.raises(DamagedError, match=r"rank 1: DamagedError: .*of another checkpoint"):
        load(own, found, world=world)
