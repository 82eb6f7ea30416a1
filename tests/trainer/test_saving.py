"""Saves behind training: those that follow each other closely do not meet."""

import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron.checkpoint import read_meta
from lightning_megatron.checkpoint.draft import Draft
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.test_checkpoints import Language, Texts


class Slow(Language):
    """A step takes longer than the first rank needs to write."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.5)


def slowly_saved(folder: Path) -> None:
    """A save after each of two steps; when the second begins, one rank has written the first, the other has not."""
    create = Draft.create

    def create_slowly(self: Draft, name: str) -> AbstractContextManager[IO[bytes]]:
        if dist.get_rank() == 1:
            time.sleep(1.5)
        return create(self, name)

    Draft.create = create_slowly  # type: ignore[method-assign]
    callback = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = make_trainer(Layout(world=2, tp=2), max_steps=2, callbacks=[callback], enable_checkpointing=True)
    trainer.fit(Slow(), Texts())


def test_a_save_begins_when_the_one_before_is_in_place(tmp_path: Path) -> None:
    """Both talk over one process group."""
    run_on_ranks(2, slowly_saved, tmp_path, init=False, timeout=40)
    steps = {path.name: read_meta(path)["global_step"] for path in tmp_path.iterdir()}
    assert steps == {"step=1.ckpt": 1, "step=2.ckpt": 2}
