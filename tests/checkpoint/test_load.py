"""What does not fit is reported at once and before anything is read; what fits is read to where it belongs."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_megatron.checkpoint import DamagedError, LoadReport, load, save
from lightning_megatron.checkpoint.state import Piece
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.sharding import Box
from tests.checkpoint.small_model import mesh_of
from tests.harness.ranks import on_ranks

WORLD = Mesh.single().world


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "some.ckpt"
    save(path, {name: torch.full((2, 3), float(i)) for i, name in enumerate("abc")}, {}, world=WORLD)
    return path


def test_all_misfits_are_reported_at_once_and_nothing_is_read(checkpoint: Path) -> None:
    a = torch.full((2, 3), -1.0)
    pieces = {"a": a, "b": torch.zeros(3, 3), "x": torch.zeros(1), "y": torch.zeros(1)}
    with pytest.raises(ValueError) as error:
        load(checkpoint, pieces, world=WORLD)
    for line in (
        "2 asked for but not in it: x, y",
        "1 in it but asked for by no rank: c",
        "1 of another shape: b: (2, 3) there, (3, 3) asked for",
    ):
        assert line in str(error.value)
    assert (a == -1).all()


def test_of_many_names_twenty_are_shown(checkpoint: Path) -> None:
    pieces = {f"x{i:03}": torch.zeros(1) for i in range(200)}
    with pytest.raises(ValueError, match=r"200 asked for but not in it: x000, .*x019, \.\.\.") as error:
        load(checkpoint, pieces, world=WORLD)
    assert "x020" not in str(error.value)


def test_without_strict_what_fits_is_read_and_the_rest_is_reported(checkpoint: Path) -> None:
    b, c, x = torch.full((2, 3), -1.0), torch.full((3, 3), -1.0), torch.full((1,), -1.0)
    report = load(checkpoint, {"b": b, "c": c, "x": x}, world=WORLD, strict=False)
    assert report == LoadReport(missing=("x",), unexpected=("a",), misshapen={"c": "(2, 3) there, (3, 3) asked for"})
    assert (b == 1).all()
    assert (c == -1).all()
    assert (x == -1).all()


def test_only_names_that_the_call_answers_for_are_unexpected(checkpoint: Path) -> None:
    c = torch.zeros(2, 3)
    assert load(checkpoint, {"c": c}, world=WORLD, among=lambda name: name > "b") == LoadReport()
    assert (c == 2).all()
    with pytest.raises(ValueError, match="asked for by no rank: b"):
        load(checkpoint, {"c": c}, world=WORLD, among=lambda name: name > "a")


@on_ranks(2)
def test_all_ranks_together_decide_what_fits(tmp_path: Path) -> None:
    world = mesh_of(Sizes(world=2)).world
    path = tmp_path / "two.ckpt"
    own, other = ("left", "right") if dist.get_rank() == 0 else ("right", "left")
    save(path, {own: torch.full((4,), float(dist.get_rank()))}, {}, world=world)
    # Each asks for the half that the other saved.
    target = torch.full((4,), -1.0)
    assert load(path, {other: target}, world=world) == LoadReport()
    assert (target == 1 - dist.get_rank()).all()

    with pytest.raises(ValueError, match="1 in it but asked for by no rank: right"):
        load(path, {"left": target}, world=world)
    # One rank's fault is every rank's error, or the others would wait for ever.
    pieces = {own: target} if dist.get_rank() == 0 else {own: target, "third": target}
    with pytest.raises(ValueError, match="1 asked for but not in it: third"):
        load(path, pieces, world=world)
    with pytest.raises(ValueError, match=r"nowhere\.ckpt does not exist"):
        load(tmp_path / "nowhere.ckpt", {own: target}, world=world)
    # A file system that not all ranks share.
    mine = path if dist.get_rank() == 0 else tmp_path / "nowhere.ckpt"
    with pytest.raises(RuntimeError, match=r"rank 1: FileNotFoundError: .*nowhere\.ckpt"):
        load(mine, {own: target, other: target}, world=world)


def test_values_become_the_dtype_they_are_loaded_into(tmp_path: Path) -> None:
    value = torch.randn(5, dtype=torch.float64)
    save(tmp_path / "d.ckpt", {"w": value}, {}, world=WORLD)
    target = torch.zeros(5, dtype=torch.bfloat16)
    load(tmp_path / "d.ckpt", {"w": target}, world=WORLD)
    assert torch.equal(target, value.bfloat16())


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8, torch.complex64]
)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.randint(0, 2, (3, 4)).to(dtype)
    save(tmp_path / "d.ckpt", {"w": value}, {}, world=WORLD)
    target = torch.zeros(3, 4, dtype=dtype)
    load(tmp_path / "d.ckpt", {"w": target}, world=WORLD)
    assert torch.equal(target, value)


def test_a_strided_target_and_a_parameter_are_filled_in_place(tmp_path: Path) -> None:
    value = torch.randn(3, 4)
    save(tmp_path / "s.ckpt", {"w": value.t().contiguous().t()}, {}, world=WORLD)
    memory = torch.nn.Parameter(torch.zeros(4, 8))
    load(tmp_path / "s.ckpt", {"w": Piece.unsharded(memory[:, :3].t())}, world=WORLD)
    assert torch.equal(memory[:, :3].t(), value)
    assert not memory[:, 3:].any()


def test_tensors_without_elements_come_and_go_unnoticed(tmp_path: Path) -> None:
    save(tmp_path / "e.ckpt", {"none": torch.zeros(0, 3), "w": torch.ones(1)}, {}, world=WORLD)
    padding_alone = Piece((1,), Box((1,), (0,)), torch.zeros(0))
    report = load(tmp_path / "e.ckpt", {"none": torch.zeros(0, 3), "w": padding_alone}, world=WORLD)
    assert report == LoadReport()


def test_a_shorter_tensor_file_is_reported_with_its_path(checkpoint: Path) -> None:
    (file,) = checkpoint.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"some\.ckpt: __0_0\.distcp has 100 bytes"):
        load(checkpoint, {name: torch.zeros(2, 3) for name in "abc"}, world=WORLD)


def test_a_flipped_bit_of_a_tensor_is_reported_with_its_file(checkpoint: Path) -> None:
    (file,) = checkpoint.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError, match=r"some\.ckpt could not be read: rank 0: .*__0_0\.distcp is damaged"):
        load(checkpoint, {name: torch.zeros(2, 3) for name in "abc"}, world=WORLD)
