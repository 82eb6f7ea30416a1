"""`prune` removes what it says and nothing else; never what a link leads to, nor the only complete checkpoint."""

import os
from pathlib import Path

import pytest

from lightning_megatron.checkpoint import is_checkpoint, read_meta
from lightning_megatron.checkpoint.atomic_directory import REMOVED, REPLACED, UNFINISHED
from lightning_megatron.checkpoint.prune import plan_of, prune
from tests.checkpoint.folders import begun, left, saved
from tests.checkpoint.object_store import emptied


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize(("keep", "stay"), [(1, "3"), (2, "23"), (3, "123"), (9, "123"), (0, "123")])
def test_the_newest_stay(tmp_path: Path, keep: int, stay: str) -> None:
    for step in (2, 3, 1):
        saved(tmp_path / f"{step}.ckpt", step)
    prune(plan_of(tmp_path, keep=keep))
    assert names(tmp_path) == [f"{step}.ckpt" for step in stay]
    assert all(is_checkpoint(tmp_path / name) for name in names(tmp_path))


def test_what_a_link_leads_to_stays_and_so_do_damaged_ones_and_files(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saved(tmp_path / f"{step}.ckpt", step)
    (tmp_path / "last.ckpt").symlink_to("1.ckpt")
    (tmp_path / "empty.ckpt").mkdir()
    (tmp_path / "file.ckpt").touch()
    planned = plan_of(tmp_path, keep=1)
    assert {removal.name for removal in planned if not removal.is_kept} == {"2.ckpt"}
    assert {removal.name: removal.reason.split(",")[0] for removal in planned if removal.is_kept} == {
        "1.ckpt": "last.ckpt leads to it",
        "empty.ckpt": "damaged",
    }
    prune(planned)
    assert names(tmp_path) == ["1.ckpt", "3.ckpt", "empty.ckpt", "file.ckpt", "last.ckpt"]


def test_the_newest_is_the_newest_of_those_that_are_complete(tmp_path: Path) -> None:
    saved(tmp_path / "1.ckpt", 1)
    os.unlink(saved(tmp_path / "9.ckpt", 9) / "meta.pt")
    prune(plan_of(tmp_path, keep=1))
    assert names(tmp_path) == ["1.ckpt", "9.ckpt"]


def test_at_an_address_old_ones_and_interrupted_saves_go(tmp_path: Path) -> None:
    folder = f"file://{tmp_path}"
    for step in (1, 2, 3):
        saved(f"{folder}/{step}.ckpt", step)
    begun(f"{folder}/4.ckpt")
    (tmp_path / "other.ckpt").mkdir()
    prune(plan_of(folder, keep=1))
    assert names(tmp_path) == ["3.ckpt", "4.ckpt", "other.ckpt"]
    [one] = (tmp_path / "4.ckpt").iterdir()
    os.utime(one, (1.0, one.stat().st_mtime - 4000))
    prune(plan_of(folder, keep=1))
    assert names(tmp_path) == ["3.ckpt", "other.ckpt"]


def test_at_an_address_a_save_that_ends_meanwhile_stays_and_so_does_what_another_one_writes() -> None:
    with emptied() as folder:
        begun(f"{folder}/a.ckpt")
        planned = plan_of(folder, takes_young=True)
        begun(f"{folder}/a.ckpt")
        prune(planned)
        [left_of] = plan_of(folder, takes_young=True)
        assert len(left_of.files) == 1 and left_of.files != planned[0].files
        saved(f"{folder}/a.ckpt", 3)
        with pytest.raises(RuntimeError, match=r"a\.ckpt is a complete checkpoint by now and stays"):
            prune([left_of])
        assert read_meta(f"{folder}/a.ckpt")["global_step"] == 3 and plan_of(folder, takes_young=True) == []


def test_left_overs_go_and_their_folders_with_them(tmp_path: Path) -> None:
    place = saved(tmp_path / "a.ckpt", 1)
    left(place, UNFINISHED, "1", is_complete=False, age_seconds=4000)
    left(place, UNFINISHED, "2", is_complete=True, age_seconds=4000)
    left(place, REPLACED, "3", is_complete=True)
    left(place, REMOVED, "4", is_complete=False)
    (tmp_path / REMOVED / "5").mkdir()
    (tmp_path / REMOVED / "5" / "last.ckpt").symlink_to(place)
    planned = plan_of(tmp_path)
    assert names(tmp_path) == [REMOVED, REPLACED, UNFINISHED, "a.ckpt"]
    assert len(planned) == 5
    prune(planned)
    assert names(tmp_path) == ["a.ckpt"]
    assert is_checkpoint(place)


def test_a_young_unfinished_save_stays_unless_it_is_selected(tmp_path: Path) -> None:
    half = left(tmp_path / "a.ckpt", UNFINISHED, "1", is_complete=False, age_seconds=3500)
    [removal] = plan_of(tmp_path)
    assert removal.is_kept
    assert "58 minutes" in removal.reason
    prune(plan_of(tmp_path))
    assert half.exists()
    prune(plan_of(tmp_path, takes_young=True))
    assert names(tmp_path) == []


def test_one_that_is_written_to_is_young_however_old_its_folder_is(tmp_path: Path) -> None:
    half = left(tmp_path / "a.ckpt", UNFINISHED, "1", is_complete=False, age_seconds=4000)
    os.utime(half / "__0_0.distcp")
    assert [removal.is_kept for removal in plan_of(tmp_path)] == [True]


def test_what_was_set_aside_stays_while_its_place_is_empty(tmp_path: Path) -> None:
    aside = left(tmp_path / "a.ckpt", REPLACED, "1", is_complete=True, age_seconds=9999)
    prune(plan_of(tmp_path, takes_young=True, keep=1))
    assert is_checkpoint(aside)
