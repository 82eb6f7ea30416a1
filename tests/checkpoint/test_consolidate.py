"""A run saved on any layout, consolidated, goes on under plain Lightning to the weights of a run without a break."""

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.checkpoint.consolidate import write_consolidated
from lightning_megatron.models import GPTModel
from tests.harness.ranks import run_on_ranks
from tests.trainer.checkpointing.test_checkpoint_dict import CONFIG, TOLERANCE, Language, Texts, saver
from tests.trainer.fits import parts_apart, weights
from tests.trainer.layouts import PLAIN, Layout, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning")
SPLIT = Layout(world=4, tp=2, pp=2, sp=True, microbatches=2)


class Dry(Language):
    """Without dropout: under plain Lightning nobody tells a model at which step its masks go on."""

    def __init__(self) -> None:
        super().__init__(note=None)

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPTModel(replace(CONFIG, hidden_dropout=0.0, attention_dropout=0.0), seed=2)


def whole(folder: Path) -> dict[str, Any]:
    """Eight steps without a break, by Lightning's own strategy."""
    module = Dry()
    trainer = make_trainer(PLAIN)
    trainer.fit(module, Texts())
    return weights(module)


def split(layout: Layout, folder: Path) -> None:
    """The same eight steps, with saves after the third and the sixth."""
    trainer = make_trainer(layout, callbacks=[saver(folder)], enable_checkpointing=True)
    trainer.fit(Dry(), Texts())


def resumed(path: Path) -> dict[str, Any]:
    module = Dry()
    trainer = make_trainer(PLAIN, callbacks=[saver(path.parent / "again")], enable_checkpointing=True)
    trainer.fit(module, Texts(), ckpt_path=path)
    assert trainer.global_step == 8
    states = trainer.optimizers[0].state.values()
    assert {tuple(state["step"].shape) for state in states} == {()}
    assert {float(state["step"]) for state in states} == {8.0}
    return {"weights": weights(module), "seen": int(module.seen), "loaded": module.loaded}


def run_lightnings_own_tool(*arguments: str) -> None:
    """Its command, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["consolidate_checkpoint", *arguments])
        runpy.run_module("lightning.pytorch.utilities.consolidate_checkpoint", run_name="__main__")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    run_on_ranks(4, split, SPLIT, folder, init=False)
    return folder


@pytest.fixture(scope="module")
def without_a_break(folder: Path) -> dict[str, Any]:
    [found] = run_on_ranks(1, whole, folder, init=False)
    return found


@pytest.mark.parametrize("step", [3, 6])
def test_plain_lightning_goes_on_from_a_consolidated_checkpoint(
    step: int, folder: Path, without_a_break: dict[str, Any], tmp_path: Path
) -> None:
    write_consolidated(folder / f"epoch={step // 4}-step={step}.ckpt", tmp_path / "one.ckpt")
    [found] = run_on_ranks(1, resumed, tmp_path / "one.ckpt", init=False)
    assert parts_apart(found["weights"], without_a_break) < TOLERANCE
    assert found["seen"] == 8
    assert found["loaded"]["of the user"] == {"a list": [1, 2.5, "three"]}


def test_lightnings_own_tool_makes_a_file_that_plain_lightning_goes_on_from(
    folder: Path, without_a_break: dict[str, Any], tmp_path: Path
) -> None:
    path, saved = tmp_path / "one.ckpt", folder / "epoch=0-step=3.ckpt"
    run_on_ranks(1, run_lightnings_own_tool, str(saved), "--output_file", str(path), init=False)
    [found] = run_on_ranks(1, resumed, path, init=False)
    assert parts_apart(found["weights"], without_a_break) < TOLERANCE
