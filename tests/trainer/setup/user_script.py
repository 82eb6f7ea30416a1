"""A script as a user writes it, for the tests that start it by a launcher; each rank leaves a file of what it found."""

import json
import sys
from pathlib import Path

import torch

import lightning_megatron  # noqa: F401 - makes the strategy's name known
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data, Small

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    trainer = make_trainer(Layout(world=2, pp=2, microbatches=2), max_epochs=1)
    trainer.fit(Small(), Data())
    rank = trainer.global_rank
    told = {"val_loss": float(trainer.callback_metrics["val_loss"]), "world": trainer.world_size, "rank": rank}
    (folder / f"{rank}.json").write_text(json.dumps(told))
