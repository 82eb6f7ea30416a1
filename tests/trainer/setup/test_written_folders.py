"""Folders of logs and checkpoints that cannot be written are told before a run, all of them; nothing is left behind."""

from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron.trainer import ConfigurationError
from lightning_megatron.trainer.setup.written_folders import why_unwritable
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data, Small


def test_a_run_whose_folders_cannot_be_written_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fine, bad = CSVLogger(tmp_path / "new" / "logs"), CSVLogger(tmp_path / "file" / "logs")
    saves = ModelCheckpoint(dirpath=tmp_path / "file")
    trainer = make_trainer(Layout(), logger=[fine, bad], enable_checkpointing=True, callbacks=[saves], max_epochs=1)
    with pytest.raises(ConfigurationError) as refused:
        trainer.fit(Small(), Data())
    told = str(refused.value)
    assert f"save_dir ({tmp_path}/file/logs) of CSVLogger cannot be written: {tmp_path}/file: Not a directory" in told
    assert f"dirpath ({tmp_path}/file) of ModelCheckpoint cannot be written" in told and "2 faults" in told
    trainer = make_trainer(Layout(), default_root_dir=tmp_path / "file", enable_checkpointing=True)
    with pytest.raises(ConfigurationError, match=r"default_root_dir \(.*file\) of the Trainer cannot be written"):
        trainer.fit(Small(), Data())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_is_writable_where_it_can_be_made(tmp_path: Path) -> None:
    assert not why_unwritable(tmp_path / "a" / "b")
    # Not even root makes one there.
    assert "/proc: " in why_unwritable(Path("/proc/a/b"))
