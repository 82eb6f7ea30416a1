"""`--ckpt_path` of a directory restores hyper-parameters by MegatronCLI, and of a file by LightningCLI too; where that
does not, it is told."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint import CheckpointConfig, pieces_of_module, save
from lightning_megatron.cli import MegatronCLI
from lightning_megatron.mesh import Mesh
from lightning_megatron.trainer import ConfigurationError

TEST = (
    "test",
    "--trainer.strategy=lightning_megatron.MegatronStrategy",
    "--trainer.strategy.num_microbatches=1",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.logger=false",
    "--trainer.limit_test_batches=1",
    "--trainer.enable_progress_bar=false",
)
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Mine(BoringModel):
    def __init__(self, rate: float = 0.1, names: tuple[str, ...] = ("a",), width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()


class Other(Mine):
    def __init__(self, depth: int = 4, **options: Any) -> None:
        super().__init__(**options)
        self.save_hyperparameters()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["script"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    return tmp_path


def saved(path: Path, hyper_parameters: dict[str, Any]) -> str:
    meta = {"hyper_parameters": hyper_parameters, "epoch": 0, "global_step": 1, "pytorch-lightning_version": "2.6.0"}
    save(path, pieces_of_module(Mine().state_dict(keep_vars=True)), meta, world=Mesh.single().world)
    return str(path)


def built(kind: type[LightningCLI], module: type[Mine] | None, *options: str) -> dict[str, Any]:
    return dict(
        kind(module, args=[*TEST, *options], seed_everything_default=0, save_config_callback=None).model.hparams
    )


def test_the_module_is_built_as_that_of_the_checkpoint(folder: Path) -> None:
    path = saved(folder / "a.ckpt", {"rate": 0.5, "names": ["x", "y"], "width": 7, "_instantiator": "of Lightning"})
    found = built(MegatronCLI, Mine, f"--ckpt_path={path}")
    assert (found["rate"], list(found["names"]), found["width"]) == (0.5, ["x", "y"], 7)
    # Without a checkpoint the options count.
    assert built(MegatronCLI, Mine, "--model.width=5")["width"] == 5
    note = {"_class_path": f"{__name__}.Other", "_instantiator": "of Lightning"}
    path = saved(folder / "b.ckpt", {"depth": 9, "rate": 0.25, **note})
    found = built(MegatronCLI, None, f"--model={__name__}.Other", f"--ckpt_path={path}")
    assert (found["depth"], found["rate"], found["width"]) == (9, 0.25, 3)


@pytest.mark.parametrize("kind", [LightningCLI, MegatronCLI])
def test_a_file_restores_hyper_parameters_under_either(kind: type[LightningCLI], folder: Path) -> None:
    strategy = MegatronStrategy(checkpoint=CheckpointConfig(kind="file"))
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=1, limit_val_batches=0, **QUIET)
    trainer.fit(Mine(rate=0.5, names=("x", "y"), width=7))
    trainer.save_checkpoint(folder / "a.ckpt")
    assert (folder / "a.ckpt").is_file()
    found = built(kind, Mine, "--trainer.strategy.checkpoint.kind=file", f"--ckpt_path={folder / 'a.ckpt'}")
    assert (found["rate"], list(found["names"]), found["width"]) == (0.5, ["x", "y"], 7)


def test_lightnings_own_warns_of_what_differs(folder: Path) -> None:
    path = saved(folder / "a.ckpt", {"rate": 0.5, "names": ["a"], "width": 3})
    with pytest.warns(UserWarning, match=r"rate = 0\.5 \(the checkpoint\) and 0\.1 \(the module\).*MegatronCLI"):
        assert built(LightningCLI, Mine, f"--ckpt_path={path}")["rate"] == 0.1


def test_a_damaged_checkpoint_is_told(folder: Path) -> None:
    path = saved(folder / "a.ckpt", {"rate": 0.5})
    (folder / "a.ckpt" / "meta.pt").unlink()
    with pytest.raises(ConfigurationError, match=r"ckpt_path \(.*a\.ckpt\) cannot be read .* meta\.pt is missing"):
        built(MegatronCLI, Mine, f"--ckpt_path={path}")
