"""What Lightning says at every save is left out, and what it says of a run is not."""

import logging
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities import seed
from lightning.fabric.utilities.distributed import _init_dist_connection

from lightning_megatron.cli.lightning_lines import _NO_NEWS, leave_out_what_is_no_news
from tests.trainer.layouts import PLAIN, make_trainer
from tests.trainer.modules import Data, Small


class Kept(logging.Handler):
    """Keeps the texts of all records."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def test_a_save_says_nothing_of_every_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger, kept = logging.getLogger("lightning.pytorch.trainer.connectors.checkpoint_connector"), Kept()
    # A recipe in this process may have left filters there, and other tests read what Lightning says.
    for name in _NO_NEWS:
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    monkeypatch.setattr(logger, "handlers", [kept])
    trainer = make_trainer(PLAIN, max_steps=1, max_epochs=-1)
    trainer.fit(Small(), Data())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert [text for text in kept.texts if "weights_only" in text]
    kept.texts.clear()
    leave_out_what_is_no_news()
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    logger.info("of this run")
    assert kept.texts == ["of this run"]


def test_one_rank_says_which_seed_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, kept = logging.getLogger("lightning.fabric.utilities.seed"), Kept()
    for name in _NO_NEWS:
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    monkeypatch.setattr(logger, "handlers", [kept])
    leave_out_what_is_no_news()
    for rank in (None, 0, 1, 12):
        monkeypatch.setattr(seed, "_get_rank", lambda rank=rank: rank)
        seed.seed_everything(3)
    assert kept.texts == ["Seed set to 3", "[rank: 0] Seed set to 3"]


def test_one_rank_says_that_a_group_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, kept = logging.getLogger("lightning.fabric.utilities.distributed"), Kept()
    for name in _NO_NEWS:
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    monkeypatch.setattr(logger, "handlers", [kept])
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    leave_out_what_is_no_news()
    for rank in (0, 1, 12):
        with monkeypatch.context() as changed:
            for variable in ("MASTER_ADDR", "MASTER_PORT"):
                changed.setenv(variable, "0")
            _init_dist_connection(LightningEnvironment(), "gloo", global_rank=rank, world_size=16)
    assert kept.texts == ["Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/16"]


def test_a_trainer_says_nothing_of_chips_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, kept = logging.getLogger("lightning.pytorch.utilities.rank_zero"), Kept()
    for name in _NO_NEWS:
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    monkeypatch.setattr(logger, "handlers", [kept])
    make_trainer(PLAIN)
    assert [text for text in kept.texts if "TPU" in text]
    kept.texts.clear()
    leave_out_what_is_no_news()
    make_trainer(PLAIN)
    assert any("GPU available" in text for text in kept.texts) and not any("TPU" in text for text in kept.texts)
