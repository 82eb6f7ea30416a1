"""A folder that a killed run left is put in order, by however many ranks at once."""

import os
import threading
from pathlib import Path

from lightning_megatron.checkpoint import is_checkpoint
from lightning_megatron.checkpoint.atomic_directory import REPLACED, UNFINISHED
from lightning_megatron.checkpoint.manifest import read_meta
from lightning_megatron.checkpoint.repair import Repairs, repair
from tests.checkpoint.folders import left, saved
from tests.harness.ranks import on_ranks


def killed_folder(folder: Path) -> Path:
    """The link was made before the save of step 9 was in place; step 6 was to be replaced just then."""
    saved(folder / "step=3.ckpt", 3)
    os.renames(saved(folder / "step=6.ckpt", 6), folder / REPLACED / "6" / "step=6.ckpt")
    left(folder / "step=9.ckpt", UNFINISHED, "9", is_complete=False)
    (folder / "last.ckpt").symlink_to("step=9.ckpt")
    return folder


def test_the_folder_of_a_killed_run_is_put_in_order_and_all_of_it_is_reported(tmp_path: Path) -> None:
    repairs = repair(killed_folder(tmp_path))
    assert repairs.unfinished == (tmp_path / "step=9.ckpt",)
    back, relinked = repairs.done
    assert "step=6.ckpt had been set aside" in back
    assert "last.ckpt led to step=9.ckpt, which is not complete; it leads to step=6.ckpt now" in relinked
    assert os.readlink(tmp_path / "last.ckpt") == "step=6.ckpt"
    assert read_meta(tmp_path / "last.ckpt")["global_step"] == 6
    assert sorted(os.listdir(tmp_path)) == [UNFINISHED, "last.ckpt", "step=3.ckpt", "step=6.ckpt"]


def test_a_second_repair_finds_nothing_to_do(tmp_path: Path) -> None:
    repair(killed_folder(tmp_path))
    assert repair(tmp_path) == Repairs(unfinished=(tmp_path / "step=9.ckpt",))


def test_a_sound_folder_is_left_as_it_is(tmp_path: Path) -> None:
    saved(tmp_path / "a.ckpt", 1)
    saved(tmp_path / "b.ckpt", 2)
    saved(tmp_path / "elsewhere" / "c.ckpt", 3)
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    (tmp_path / "other.ckpt").symlink_to("elsewhere/gone.ckpt")
    (tmp_path / "file.ckpt").touch()
    (tmp_path / "of a file.ckpt").symlink_to("file.ckpt")
    left(tmp_path / "b.ckpt", REPLACED, "1", is_complete=True)
    # A link that was replaced by another, and not yet removed.
    (tmp_path / REPLACED / "2").mkdir()
    (tmp_path / REPLACED / "2" / "last.ckpt").symlink_to("b.ckpt")
    before = {path: os.readlink(path) for path in tmp_path.iterdir() if path.is_symlink()}
    assert repair(tmp_path) == Repairs()
    assert {path: os.readlink(path) for path in tmp_path.iterdir() if path.is_symlink()} == before
    assert read_meta(tmp_path / "b.ckpt")["global_step"] == 2


def test_a_link_stays_where_no_checkpoint_is_complete(tmp_path: Path) -> None:
    left(tmp_path / "a.ckpt", UNFINISHED, "1", is_complete=False)
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    assert repair(tmp_path) == Repairs(unfinished=(tmp_path / "a.ckpt",))
    assert os.readlink(tmp_path / "last.ckpt") == "a.ckpt"


def test_there_is_nothing_to_do_where_there_is_no_folder(tmp_path: Path) -> None:
    assert repair(tmp_path / "none") == Repairs()


def test_many_at_once_leave_what_one_would_and_each_thing_is_reported(tmp_path: Path) -> None:
    for attempt in range(20):
        folder = killed_folder(tmp_path / str(attempt))
        found: list[Repairs] = []
        start = threading.Barrier(8)

        def run(folder: Path = folder, start: threading.Barrier = start, found: list[Repairs] = found) -> None:
            start.wait()
            found.append(repair(folder))

        threads = [threading.Thread(target=run) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert sorted(os.listdir(folder)) == [UNFINISHED, "last.ckpt", "step=3.ckpt", "step=6.ckpt"]
        assert is_checkpoint(folder / "last.ckpt")
        sentences = [sentence for repairs in found for sentence in repairs.done]
        assert len([sentence for sentence in sentences if "set aside" in sentence]) == 1
        assert any("last.ckpt led to step=9.ckpt" in sentence for sentence in sentences)


@on_ranks(4)
def test_ranks_at_once_leave_what_one_would(tmp_path: Path) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        killed_folder(tmp_path)
    dist.barrier()
    repair(tmp_path)
    assert is_checkpoint(tmp_path / "last.ckpt")
    dist.barrier()
    assert sorted(os.listdir(tmp_path)) == [UNFINISHED, "last.ckpt", "step=3.ckpt", "step=6.ckpt"]
