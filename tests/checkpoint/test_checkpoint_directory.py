"""What a folder of checkpoints holds is distinguished: complete, damaged, linked, unfinished, left over."""

import os
from pathlib import Path

import pytest

from lightning_megatron.checkpoint import save
from lightning_megatron.checkpoint.atomic_directory import REMOVED, REPLACED, UNFINISHED
from lightning_megatron.checkpoint.checkpoint_directory import leads_to, scan_directory
from lightning_megatron.checkpoint.folder import Folder
from lightning_megatron.checkpoint.manifest import read_manifest
from tests.checkpoint.folders import WORLD, begun, left, saved


def test_the_newest_is_that_of_the_most_steps_and_then_the_last_saved(tmp_path: Path) -> None:
    for name, step, moment in (("a", 10, 5), ("b", 9, 9), ("c", 10, 4), ("d", 2, 8)):
        path = saved(tmp_path / f"{name}.ckpt", step)
        os.utime(path / "manifest.json", (moment, moment))
    assert [Path(one.path).stem for one in scan_directory(tmp_path).complete] == ["d", "b", "c", "a"]
    assert scan_directory(tmp_path).complete[-1].saved_seconds == 5


def test_what_is_not_complete_is_reported_with_the_reason_and_is_no_checkpoint_to_load(tmp_path: Path) -> None:
    saved(tmp_path / "sound.ckpt", 1)
    os.truncate(saved(tmp_path / "cut.ckpt", 9) / "__0_0.distcp", 5)
    (tmp_path / "empty.ckpt").mkdir()
    (tmp_path / "file.ckpt").write_text("of Lightning")
    (tmp_path / "logs").mkdir()
    contents = scan_directory(tmp_path)
    assert [one.name for one in contents.complete] == ["sound.ckpt"]
    faults = {one.name: one.fault for one in contents.checkpoints if not one.is_complete}
    assert faults.keys() == {"cut.ckpt", "empty.ckpt"}
    assert "__0_0.distcp has 5 bytes" in faults["cut.ckpt"]
    assert "is an empty directory" in faults["empty.ckpt"]


def test_links_are_distinguished_from_what_they_lead_to(tmp_path: Path) -> None:
    saved(tmp_path / "a.ckpt", 1)
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    (tmp_path / "gone.ckpt").symlink_to("nothing.ckpt")
    (tmp_path / "notes").symlink_to(tmp_path)
    contents = scan_directory(tmp_path)
    assert [one.name for one in contents.checkpoints] == ["a.ckpt"]
    assert {link.name: leads_to(link).name for link in contents.links} == {
        "gone.ckpt": "nothing.ckpt",
        "last.ckpt": "a.ckpt",
    }


def test_an_unfinished_save_is_distinguished_from_an_old_checkpoint_being_removed(tmp_path: Path) -> None:
    """After names were exchanged, what was replaced lies where the draft lay."""
    place = tmp_path / "a.ckpt"
    half = left(place, UNFINISHED, "half", is_complete=False)
    old = left(place, UNFINISHED, "exchanged", is_complete=True)
    replaced = left(place, REPLACED, "replaced", is_complete=True)
    removed = left(place, REMOVED, "removed", is_complete=False)
    # All of a draft is there, and only the last step is missing: its manifest has the id of its folder.
    whole = left(place, UNFINISHED, "whole", is_complete=True)
    os.rename(whole.parent, tmp_path / UNFINISHED / read_manifest(whole).save_id)
    is_unfinished = {Path(one.path).parent.name: one.is_unfinished for one in scan_directory(tmp_path).leftovers}
    names = {path.parent.name for path in (half, old, replaced, removed)}
    assert [name for name in names if is_unfinished[name]] == ["half"]
    assert [is_unfinished[name] for name in is_unfinished.keys() - names] == [True]
    assert {one.final_path for one in scan_directory(tmp_path).leftovers} == {place}
    assert scan_directory(tmp_path).checkpoints == ()


def test_a_checkpoint_that_tells_no_step_is_older_than_all_that_do(tmp_path: Path) -> None:
    saved(tmp_path / "with_step.ckpt", 0)
    save(tmp_path / "without_step.ckpt", {}, {}, world=WORLD)
    assert [(one.name, one.step) for one in scan_directory(tmp_path).complete] == [
        ("without_step.ckpt", -1),
        ("with_step.ckpt", 0),
    ]


def test_at_an_address_a_save_without_a_manifest_is_unfinished_and_what_is_no_save_is_damaged(
    tmp_path: Path,
) -> None:
    folder = f"file://{tmp_path}"
    for step in (9, 10):
        saved(f"{folder}/step={step}.ckpt", step)
    begun(f"{folder}/last.ckpt")
    (tmp_path / "other.ckpt").mkdir()
    (tmp_path / "other.ckpt" / "weights").touch()
    (tmp_path / "logs").mkdir()
    contents = scan_directory(folder)
    assert [one.path for one in contents.complete] == [f"{folder}/step={step}.ckpt" for step in (9, 10)]
    manifest = tmp_path / "step=10.ckpt" / "manifest.json"
    assert contents.complete[-1].saved_seconds == pytest.approx(manifest.stat().st_mtime, abs=1e-3)
    assert [one.name for one in contents.checkpoints if not one.is_complete] == ["other.ckpt"]
    assert [(one.final_path, one.is_unfinished, one.num_bytes) for one in contents.leftovers] == [
        (f"{folder}/last.ckpt", True, 4)
    ]
    assert scan_directory(f"{folder}/nowhere").checkpoints == ()


def test_what_vanishes_at_an_address_while_it_is_looked_at_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = f"file://{tmp_path}"
    begun(f"{folder}/b.ckpt")
    monkeypatch.setattr(Folder, "folders", lambda _: ["a.ckpt", "b.ckpt"])
    contents = scan_directory(folder)
    assert contents.checkpoints == () and [one.name for one in contents.leftovers] == ["b.ckpt"]

    def gone(folder: Folder, name: str) -> float:
        raise FileNotFoundError(name)

    monkeypatch.setattr(Folder, "changed_seconds", gone)
    assert scan_directory(folder).leftovers == ()


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_there_is_nothing_where_there_is_no_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    contents = scan_directory(tmp_path / name)
    assert contents.checkpoints == contents.leftovers == contents.links == ()
