"""A run says at its end where its logs and its checkpoint are, and a short one has a checkpoint, too."""

from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron.cli.written_files import written_files
from lightning_megatron.lightning_modules import GPTDataConfig, GPTDataModule
from lightning_megatron.lightning_modules.export import ExportPretrained
from lightning_megatron.lightning_modules.final_checkpoint import FinalCheckpoint
from tests.harness.ranks import run_on_ranks
from tests.trainer.fits import Parts, parts_apart, weights
from tests.trainer.layouts import PLAIN, Layout, make_trainer
from tests.trainer.modules import Data, Small


def fitted(folder: Path, layout: Layout, period: int = 5, max_steps: int = 4, save_top_k: int = -1) -> L.Trainer:
    saves = ModelCheckpoint(folder / "saves", filename="{step}", every_n_train_steps=period, save_top_k=save_top_k)
    logger = CSVLogger(folder, name="logs", version=0)
    callbacks = [saves, FinalCheckpoint()]
    trainer = make_trainer(layout, max_steps=max_steps, enable_checkpointing=True, callbacks=callbacks, logger=logger)
    trainer.fit(Small(), Data())
    return trainer


@pytest.mark.parametrize(("period", "names"), [(2, ["step=2.ckpt", "step=4.ckpt"]), (5, ["step=4.ckpt"])])
def test_the_files_that_are_named_are_there(period: int, names: list[str], tmp_path: Path) -> None:
    logs, checkpoint = written_files(fitted(tmp_path, PLAIN, period))
    assert logs == f"Logs: {tmp_path}/logs/version_0" and (tmp_path / "logs/version_0/metrics.csv").is_file()
    assert checkpoint == f"Checkpoint: {tmp_path}/saves/step=4.ckpt"
    assert sorted(path.name for path in (tmp_path / "saves").iterdir()) == names


def test_who_asks_for_no_checkpoint_gets_none(tmp_path: Path) -> None:
    assert len(written_files(fitted(tmp_path, PLAIN, save_top_k=0))) == 1
    assert not (tmp_path / "saves").exists()


def test_a_run_that_ends_before_its_first_validation_saves_too(tmp_path: Path) -> None:
    # Lightning's own ModelCheckpoint, which saves after a validation here.
    options = {"enable_checkpointing": True, "check_val_every_n_epoch": None, "max_steps": 3}
    for interval, names in ((100, ["epoch=0-step=3.ckpt"]), (2, ["epoch=0-step=2.ckpt"])):
        callbacks, folder = [FinalCheckpoint()], tmp_path / str(interval)
        trainer = make_trainer(
            PLAIN, val_check_interval=interval, callbacks=callbacks, default_root_dir=folder, **options
        )
        trainer.fit(Small(), Data())
        [told] = written_files(trainer)
        assert [path.name for path in Path(told.removeprefix("Checkpoint: ")).parent.iterdir()] == names
        trainer.callbacks.append(ExportPretrained("tuned"))
        assert written_files(trainer) == [told, "Exported model: tuned"]


def test_a_tokenizer_that_was_trained_is_named() -> None:
    trainer = make_trainer(PLAIN)
    trainer.datamodule = data = GPTDataModule(GPTDataConfig(global_batch_size=1, sequence_length=8, vocab_size=300))
    assert written_files(trainer) == []
    data.trained_tokenizer = Path("runs/data/tokenizer.json")
    assert written_files(trainer) == ["Tokenizer: runs/data/tokenizer.json"]


def gone_on(folder: Path, max_steps: int, ckpt_path: str | None) -> tuple[Parts, list[str]]:
    layout = Layout(world=2, pp=2, microbatches=2)
    # As the configuration that the first run was started with has one.
    callbacks = [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5), FinalCheckpoint()]
    trainer = make_trainer(layout, max_steps=max_steps, enable_checkpointing=True, callbacks=callbacks)
    module = Small()
    trainer.fit(module, Data(), ckpt_path=ckpt_path)
    return weights(module), written_files(trainer)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
@pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning")
def test_a_run_goes_on_from_a_final_checkpoint_as_if_it_had_never_ended(tmp_path: Path) -> None:
    run_on_ranks(2, gone_on, tmp_path / "first", 2, None, init=False)
    path = str(tmp_path / "first" / "step=2.ckpt")
    resumed = run_on_ranks(2, gone_on, tmp_path / "second", 4, path, init=False)
    whole = run_on_ranks(2, gone_on, tmp_path / "whole", 4, None, init=False)
    for (own, written), (other, _) in zip(resumed, whole, strict=True):
        assert parts_apart(own, other) == 0
        # Not that of the first run, of which the callback knows.
        assert written == [f"Checkpoint: {tmp_path}/second/step=4.ckpt"]
    assert (tmp_path / "second" / "step=4.ckpt").is_dir()
