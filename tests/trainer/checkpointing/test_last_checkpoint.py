"""After a run that was killed, `ckpt_path="last"` is the last complete checkpoint, and what is left out is named."""

import os
import shutil
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron import ConfigurationError
from lightning_megatron.checkpoint import is_checkpoint, read_meta
from lightning_megatron.checkpoint.atomic_directory import REPLACED, UNFINISHED, AtomicDirectory
from lightning_megatron.checkpoint.folder import is_remote
from lightning_megatron.trainer.checkpointing.last_checkpoint import prepared
from tests.checkpoint.folders import left, saved
from tests.checkpoint.object_store import emptied, failing
from tests.harness.ranks import RankFailed, run_on_ranks
from tests.trainer.checkpointing.test_checkpoint_dict import TOLERANCE, Language, Texts
from tests.trainer.fits import weights
from tests.trainer.layouts import Layout, make_trainer

TP2 = Layout(world=2, tp=2)


def linking(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=2, save_last="link")


def fitted(folder: Path, killed_at: str, ckpt_path: str | None) -> dict[str, Any]:
    """Eight steps with a save after every second; ends itself where the save of that name is about to be in place."""
    put_in_place = AtomicDirectory.put_in_place

    def place(self: AtomicDirectory, manifest: bytes) -> None:
        if killed_at and self.path.endswith(killed_at):
            os.kill(os.getpid(), signal.SIGKILL)
        put_in_place(self, manifest)

    AtomicDirectory.put_in_place = place  # type: ignore[method-assign]
    module, steps = Language(), Steps()
    trainer = make_trainer(TP2, callbacks=[linking(folder), steps], enable_checkpointing=True)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        trainer.fit(module, Texts(), ckpt_path=ckpt_path)
    return {"weights": weights(module), "first": steps.first, "told": [str(one.message) for one in shown]}


class Steps(L.Callback):
    """Remembers after how many steps a run began."""

    first = -1

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.first = trainer.global_step


def test_a_killed_run_goes_on_from_the_last_complete_checkpoint(tmp_path: Path) -> None:
    whole = run_on_ranks(2, fitted, tmp_path / "whole", "", None, init=False)
    folder = tmp_path / "killed"
    with pytest.raises(RankFailed, match="SIGKILL"):
        run_on_ranks(2, fitted, folder, "step=6.ckpt", None, init=False)
    assert os.readlink(folder / "last.ckpt") == "step=4.ckpt" and not (folder / "step=6.ckpt").exists()
    # As if it had been killed a moment later, when Lightning had made the link.
    os.remove(folder / "last.ckpt")
    os.symlink("step=6.ckpt", folder / "last.ckpt")
    found = run_on_ranks(2, fitted, folder, "", "last", init=False)
    for ours, wanted in zip(found, whole, strict=True):
        assert ours["first"] == 4
        for name, (_, part) in ours["weights"].items():
            assert torch.allclose(part, wanted["weights"][name][1], rtol=0, atol=TOLERANCE), name
    shown = "\n".join(line for ours in found for line in ours["told"])
    assert f"the save of {folder / 'step=6.ckpt'} ended before it was complete and is left out" in shown
    assert "last.ckpt led to step=6.ckpt, which is not complete; it leads to step=4.ckpt now" in shown
    # The second run saved the sixth step again, and the link leads to its last.
    assert is_checkpoint(folder / "step=6.ckpt") and os.readlink(folder / "last.ckpt") == "step=8.ckpt"


def trainer_of(*callbacks: L.Callback, **options: Any) -> L.Trainer:
    return make_trainer(Layout(), callbacks=list(callbacks), enable_checkpointing=True, **options)


@pytest.fixture
def address() -> Iterator[str]:
    """A folder in this process's memory, at a remote address."""
    memory = fsspec.filesystem("memory")
    memory.makedirs("/runs/one")
    yield "memory://runs/one"
    memory.rm("/runs", recursive=True)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty:UserWarning")
def test_at_a_remote_address_a_run_goes_on_from_the_newest_and_writes_over_a_partial_last(address: str) -> None:
    def first_step(num_steps: int, ckpt_path: str | None = "last") -> int:
        callback = ModelCheckpoint(address, "{step}", save_top_k=-1, every_n_train_steps=2, save_last=True)
        steps = Steps()
        trainer_of(callback, steps, max_steps=num_steps).fit(Language(), Texts(), ckpt_path=ckpt_path)
        assert read_meta(f"{address}/last.ckpt")["global_step"] == num_steps
        return steps.first

    assert first_step(2, None) == 0
    assert first_step(4) == 2
    fsspec.filesystem("memory").rm_file("/runs/one/last.ckpt/manifest.json")
    with (
        pytest.warns(UserWarning, match=r"the save of memory://runs/one/last\.ckpt ended before it was complete"),
        pytest.warns(UserWarning, match="step=4.ckpt, the newest: there is none of that name"),
    ):
        assert first_step(6) == 4


def test_at_a_remote_address_what_is_taken_is_what_is_taken_on_a_disk(address: str) -> None:
    def taken() -> tuple[Any, ...]:
        return prepared(trainer_of(ModelCheckpoint(address, save_last=True)), ("last",))

    assert taken() == ("last",)
    saved(f"{address}/step=3.ckpt", 3)
    with pytest.warns(UserWarning, match="there is none of that name"):
        assert taken() == (f"{address}/step=3.ckpt",)
    saved(f"{address}/last.ckpt", 3)
    assert taken() == (f"{address}/last.ckpt",)
    saved(f"{address}/step=6.ckpt", 6)
    assert taken() == (f"{address}/step=6.ckpt",)
    fsspec.filesystem("memory").pipe_file("/runs/one/last-v1.ckpt/weights", b"of another tool")
    with pytest.warns(UserWarning, match=r"last-v1\.ckpt has no manifest\.json"):
        assert taken() == (f"{address}/step=6.ckpt",)


@pytest.mark.parametrize("place", ["", "step=6.ckpt", "step=6.ckpt/manifest.json", "last.ckpt/manifest.json"])
def test_what_cannot_be_read_now_is_refused_and_not_passed_over(place: str) -> None:
    with emptied() as folder:
        for name, step in (("step=3", 3), ("step=6", 6), ("last", 3)):
            saved(f"{folder}/{name}.ckpt", step)
        trainer = trainer_of(ModelCheckpoint(folder, save_last=True))
        with (
            failing(lambda request, path: path.endswith(f"bucket/runs/{place}".rstrip("/"))),
            pytest.raises(ConfigurationError, match=r"runs cannot be read now \(OSError: 503 SlowDown.*start"),
        ):
            prepared(trainer, ("last",))


@pytest.mark.parametrize("is_main_on_disk", [True, False])
@pytest.mark.parametrize("is_on_disk", [True, False])
def test_what_was_saved_on_an_exception_is_taken_where_it_is_the_newest(
    tmp_path: Path, is_main_on_disk: bool, is_on_disk: bool
) -> None:
    with emptied() as folder:
        main = str(tmp_path / "main") if is_main_on_disk else f"{folder}/main"
        callback = ModelCheckpoint(main, save_last=True)
        aside = OnExceptionCheckpoint(tmp_path / "elsewhere" if is_on_disk else f"{folder}/elsewhere")
        last, path = f"{main}/last.ckpt", aside.ckpt_path

        def taken(*callbacks: L.Callback) -> str:
            return prepared(trainer_of(*callbacks), ("last",))[0]

        def save(path: str, step: int) -> None:
            saved(path if is_remote(path) else Path(path), step)

        save(last, 6)
        assert taken(callback, aside) == ("last" if is_main_on_disk else last)
        save(path, 5)
        assert taken(callback, aside) == last
        save(path, 7)
        assert taken(callback, aside) == ("last" if is_main_on_disk and is_on_disk else path)
        assert taken(aside) == ("last" if is_on_disk else path)
        # A run that went on from it and further, whatever was put there last.
        save(last, 9)
        save(path, 7)
        assert taken(callback, aside) == last
        fs, root = fsspec.core.url_to_fs(path)
        fs.rm_file(f"{root}/manifest.json")
        with pytest.warns(UserWarning, match=r"something else of that name is not complete: .*on_exception\.ckpt"):
            assert taken(callback, aside) == last


def test_links_at_a_remote_address_are_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigurationError, match=r"dirpath memory://runs\) there are none; use save_last=True"):
        trainer_of(ModelCheckpoint("memory://runs", save_last="link")).fit(Language(), Texts())


def looks_for_its_own(folder: Path) -> str:
    """How a run ends of which each rank looks for checkpoints in a folder of its own."""
    callback = linking(folder / os.environ["RANK"])
    with pytest.raises(ConfigurationError) as refused:
        make_trainer(TP2, callbacks=[callback], enable_checkpointing=True).fit(Language(), Texts(), ckpt_path="last")
    return str(refused.value)


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available:UserWarning")
def test_a_checkpoint_that_some_ranks_do_not_find_is_refused_on_all(tmp_path: Path) -> None:
    found = saved(tmp_path / "1" / "last.ckpt", 3)
    for shown in run_on_ranks(2, looks_for_its_own, tmp_path, init=False, timeout=60):
        assert f"ckpt_path leads to {found} (rank 1), but to nothing on ranks 0;" in shown


def test_arguments_that_are_not_about_checkpoints_stay_as_they_are(tmp_path: Path) -> None:
    arguments = (Language(), None, None, None, None, None)
    assert prepared(trainer_of(linking(tmp_path)), arguments) == arguments
    assert prepared(trainer_of(linking(tmp_path / "none")), (None, "last")) == (None, "last")
    saved(tmp_path / "last.ckpt", 3)
    assert prepared(trainer_of(linking(tmp_path)), ("last",)) == ("last",)


def test_the_newest_is_taken_where_a_link_was_taken_away_and_not_made_yet(tmp_path: Path) -> None:
    saved(tmp_path / "step=3.ckpt", 3)
    saved(tmp_path / "step=6.ckpt", 6)
    with pytest.warns(UserWarning, match=r"last\" is .*step=6\.ckpt, the newest"):
        assert prepared(trainer_of(linking(tmp_path)), ("last",)) == (str(tmp_path / "step=6.ckpt"),)
    # A run without one starts from the beginning, as under plain Lightning.
    assert prepared(trainer_of(ModelCheckpoint(tmp_path)), ("last",)) == ("last",)


def test_the_newest_other_is_taken_where_the_last_is_damaged_and_both_are_named(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").mkdir()
    saved(tmp_path / "step=3.ckpt", 3)
    saved(tmp_path / "step=6.ckpt", 6)
    with pytest.warns(UserWarning, match=r"last\" is .*step=6\.ckpt: .*last\.ckpt is an empty directory"):
        assert prepared(trainer_of(linking(tmp_path)), ("last",)) == (str(tmp_path / "step=6.ckpt"),)
    # So are others of that name, where they have no fewer steps.
    for version, step, taken in ((1, 2, "step=6"), (2, 6, "last-v2")):
        path = saved(tmp_path / f"last-v{version}.ckpt", step)
        os.utime(path, (version, version))
        with pytest.warns(UserWarning, match=rf"is .*{taken}\.ckpt: something else"):
            assert prepared(trainer_of(linking(tmp_path)), ("last",)) == (str(tmp_path / f"{taken}.ckpt"),)


def test_a_newer_checkpoint_is_taken_instead_of_a_sound_older_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path / "step=3.ckpt", 3)
    os.symlink("step=3.ckpt", tmp_path / "last.ckpt")
    assert prepared(trainer_of(linking(tmp_path)), ("last",)) == ("last",)
    saved(tmp_path / "step=6.ckpt", 6)
    caplog.set_level("INFO", "lightning.pytorch")
    assert prepared(trainer_of(linking(tmp_path)), ("last",)) == (str(tmp_path / "step=6.ckpt"),)
    assert "step=6.ckpt, the newest: it is of step 6, and" in caplog.text and "last.ckpt of step 3" in caplog.text


def test_what_a_later_run_left_behind_or_has_no_optimizers_is_not_taken_for_the_newest(tmp_path: Path) -> None:
    first, second, anew = [("a", 0)], [("a", 0), ("b", 2)], [("c", 0)]
    full: dict[str, Any] = {"optimizers": []}

    def add(name: str, step: int, fits: Any, at: int, **meta: Any) -> None:
        path = saved(tmp_path / f"{name}.ckpt", step, meta={"lightning_megatron_fits": fits} | meta)
        os.utime(path / "manifest.json", (at, at))

    def taken() -> tuple[Any, ...]:
        return prepared(trainer_of(linking(tmp_path)), ("last",))

    add("step=6", 6, first, 1, **full)
    add("last", 4, second, 2, **full)
    assert taken() == ("last",)
    add("step=9", 9, second, 3)
    assert taken() == ("last",)
    add("step=5", 5, second, 4, **full)
    assert taken() == ("last",)
    shutil.rmtree(tmp_path / "step=9.ckpt")
    assert taken() == (str(tmp_path / "step=5.ckpt"),)
    # A run that began from scratch is another one.
    add("last", 1, anew, 5, **full)
    assert taken() == ("last",)
    # It goes on from the other, whatever the clock says.
    add("step=8", 8, [*anew, ("d", 1)], 4, **full)
    assert taken() == (str(tmp_path / "step=8.ckpt"),)


def test_a_last_whose_files_are_cut_is_not_taken(tmp_path: Path) -> None:
    os.truncate(saved(tmp_path / "last.ckpt", 9) / "__0_0.distcp", 4)
    saved(tmp_path / "step=3.ckpt", 3)
    with pytest.warns(UserWarning, match=r"__0_0\.distcp has 4 bytes"):
        assert prepared(trainer_of(linking(tmp_path)), ("last",)) == (str(tmp_path / "step=3.ckpt"),)


def test_nothing_but_damaged_ones_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").mkdir()
    with pytest.raises(ConfigurationError, match=r"finds no complete checkpoint: .*remove .*last\.ckpt to start anew"):
        trainer_of(linking(tmp_path)).fit(Language(), Texts(), ckpt_path="last")


def test_one_that_was_set_aside_is_back_before_its_path_is_looked_for(tmp_path: Path) -> None:
    aside = left(tmp_path / "mine.ckpt", REPLACED, "1", is_complete=True)
    with pytest.warns(UserWarning, match=r"mine\.ckpt had been set aside"):
        prepared(trainer_of(linking(tmp_path / "other")), (None, tmp_path / "mine.ckpt"))
    assert is_checkpoint(tmp_path / "mine.ckpt") and not aside.exists()


@pytest.mark.parametrize("has_logger", [True, False])
def test_the_folder_of_a_callback_that_names_none_is_the_one_that_lightning_takes(
    tmp_path: Path, has_logger: bool
) -> None:
    logger = CSVLogger(tmp_path, name="runs", version=3) if has_logger else False
    folder = tmp_path / ("runs/version_3/checkpoints" if has_logger else "checkpoints")
    folder.mkdir(parents=True)
    left(folder / "a.ckpt", UNFINISHED, "1", is_complete=False)
    callback = ModelCheckpoint()
    trainer = trainer_of(callback, logger=logger, default_root_dir=tmp_path, max_steps=1)
    with pytest.warns(UserWarning, match=r"the save of .*a\.ckpt ended before it was complete"):
        prepared(trainer, ("last",))
    assert callback._ModelCheckpoint__resolve_ckpt_dir(trainer) == str(folder)  # type: ignore[attr-defined]
