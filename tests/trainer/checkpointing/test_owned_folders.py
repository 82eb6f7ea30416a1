"""A fit is refused, on all ranks, where another live run saves into one of its folders."""

from pathlib import Path

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_megatron.checkpoint.owner_lock import FolderOwner
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import Layout, make_trainer


def fitted(folder: Path) -> str:
    saving = ModelCheckpoint(folder, "{step}")
    trainer = make_trainer(
        Layout(world=2), callbacks=[saving], enable_checkpointing=True, max_steps=2, precision="32-true"
    )
    try:
        trainer.fit(BoringModel())
    except ValueError as error:
        return str(error)
    return ""


def test_a_folder_of_another_live_run_is_refused_before_a_step_and_free_after_it(tmp_path: Path) -> None:
    other = FolderOwner.take(tmp_path)
    assert other is not None
    for message in run_on_ranks(2, fitted, tmp_path, init=False):
        assert "is saved into by another run that still lives" in message and "ModelCheckpoint(dirpath=...)" in message
    assert not list(tmp_path.glob("*.ckpt"))
    other.release()
    assert run_on_ranks(2, fitted, tmp_path, init=False) == ["", ""]
    assert [path.name for path in tmp_path.iterdir()] == ["step=2.ckpt"]
