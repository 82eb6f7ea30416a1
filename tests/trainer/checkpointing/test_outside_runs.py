"""What Lightning's users ask of a strategy outside of a run, on one device: it works as with Lightning's own."""

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.states import TrainerFn

from lightning_megatron import CheckpointConfig, MegatronStrategy
from tests.harness.ranks import run_on_ranks

OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_steps": 2,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "limit_val_batches": 0,
}


class Copies(L.Callback):
    """Copies all callbacks within a fit, of which some are the strategy's own."""

    number = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        type(self).number = len(copy.deepcopy(callbacks))


def connected(config: CheckpointConfig) -> L.Trainer:
    """A Trainer with a module, before any run."""
    trainer = L.Trainer(strategy=MegatronStrategy(checkpoint=config), **OPTIONS)
    trainer.strategy.connect(module := BoringModel())
    trainer.strategy._lightning_module = module
    module.trainer = trainer
    trainer._data_connector.attach_data(module)
    return trainer


def outside(kind: Any, folder: Path) -> list[str]:
    local = {"local_folder": str(folder / "local"), "local_every_n_steps": 1} if kind == "directory" else {}
    config = CheckpointConfig(kind=kind, **local)
    fitted = L.Trainer(strategy=MegatronStrategy(checkpoint=config), callbacks=[Copies()], **OPTIONS)
    fitted.fit(BoringModel())
    assert Copies.number == (3 if local else 2)
    fitted.save_checkpoint(folder / "after.ckpt")
    assert isinstance(pickle.loads(pickle.dumps(fitted)).strategy, MegatronStrategy)
    bare = L.Trainer(strategy=MegatronStrategy(checkpoint=config), **OPTIONS)
    bare.strategy.connect(BoringModel())
    bare.save_checkpoint(folder / "bare.ckpt")
    before = connected(config)
    before.save_checkpoint(folder / "before.ckpt", weights_only=True)
    loaded = [
        fitted.strategy.load_checkpoint(folder / "after.ckpt"),
        before.strategy.load_checkpoint(folder / "after.ckpt"),
        # By one that was given a module, which has no Trainer.
        bare.strategy.load_checkpoint(folder / "after.ckpt"),
        # By a strategy that has no module.
        MegatronStrategy().load_checkpoint(folder / "after.ckpt"),
    ]
    weight = fitted.lightning_module.layer.weight
    for checkpoint in loaded:
        assert checkpoint["global_step"] == 2 and torch.equal(checkpoint["state_dict"]["layer.weight"], weight)
        # An ordinary loader has no state of its own, as on one device.
        assert "combined_loader" not in checkpoint["loops"]["fit_loop"]["state_dict"]
    # The fit goes on as if nothing had been loaded meanwhile.
    fitted.fit_loop.epoch_loop.max_steps = 4
    fitted.fit(fitted.lightning_module)
    assert fitted.global_step == 4
    before.state.fn, before.training = TrainerFn.FITTING, True
    before.fit_loop.setup_data()
    assert before.num_training_batches == 64
    return sorted(path.name for path in folder.glob("*.ckpt"))


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_checkpoints_loaders_and_copies_need_no_run(kind: str, tmp_path: Path) -> None:
    assert run_on_ranks(1, outside, kind, tmp_path, init=False) == [["after.ckpt", "bare.ckpt", "before.ckpt"]]
