"""Checkpoint hooks of a module, as plain Lightning allows them: right on every layout, or refused in words."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint import CheckpointConfig
from lightning_megatron.checkpoint.consolidate import write_consolidated
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import PLAIN, Layout, make_trainer
from tests.trainer.modules import Data, Small

TP2, PP2 = Layout(world=2, tp=2), Layout(world=2, pp=2, microbatches=2)
# Lightning loads into a module in float32 before it makes that double, and so rounds.
ROUNDED = 1e-7


class LeavesOut(Small):
    """Saves no frozen weights, and puts them back."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in [name for name in checkpoint["state_dict"] if name.startswith("frozen.")]:
            del checkpoint["state_dict"][name]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert not any(name.startswith("frozen.") for name in checkpoint["state_dict"])
        checkpoint["state_dict"] |= {f"frozen.{name}": one for name, one in self.frozen.state_dict().items()}


class Renames(Small):
    """Has layers under other names than the checkpoint, of which tensor parallelism cuts one."""

    def __init__(self) -> None:
        super().__init__()
        self.last = self.after
        del self.after

    def configure_model(self) -> None:
        if not hasattr(self, "middle"):
            super().configure_model()
            self.middle = self.cut
            del self.cut

    def logits(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.last(self.middle(self.net(self.before(inputs))))
        return output

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for old, new in (("cut.", "middle."), ("after.", "last.")):
            weights = checkpoint["state_dict"].items()
            checkpoint["state_dict"] = {n.replace(old, new, 1) if n.startswith(old) else n: one for n, one in weights}


class LeavesNames(Renames):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        pass


class SetsRate(Small):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        [state] = checkpoint["optimizer_states"]
        assert state["param_groups"][0]["lr"] == 0.3
        state["param_groups"][0]["lr"] = 0.001


class ReadsStates(Small):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = len(checkpoint["optimizer_states"][0]["state"])


class DropsStates(Small):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []


class SavesStates(Small):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["num"] = len(checkpoint["optimizer_states"][0]["state"])


class SavesNoStates(Small):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []


class SavesOthers(Small):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = {"state": 1}


class Shrinks(Small):
    """Leaves a weight of another shape, of the first stage."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "net.0.weight" in checkpoint["state_dict"]:
            checkpoint["state_dict"]["net.0.weight"] = torch.zeros(1, 1)


def trainer_of(layout: Layout, kind: Any, **options: Any) -> Any:
    strategy = layout.strategy()
    if isinstance(strategy, MegatronStrategy):
        strategy.checkpoint = CheckpointConfig(kind=kind)
    return make_trainer(layout, strategy=strategy, limit_val_batches=0, **options)


def save(layout: Layout, kind: Any, module: type[Small], path: Path) -> None:
    trainer = trainer_of(layout, kind, max_epochs=1)
    trainer.fit(module(), Data())
    trainer.save_checkpoint(path)


def resumed(layout: Layout, module: type[Small], path: Path) -> list[float]:
    """The rate, and the sum of the weights of one layer, at the end of a second epoch."""
    built = module()
    trainer = trainer_of(layout, "directory")
    trainer.fit(built, Data(), ckpt_path=path, weights_only=False)
    return [trainer.optimizers[0].param_groups[0]["lr"], float(built.before.weight.detach().double().abs().sum())]


def resumed_all(layout: Layout, kind: Any, folder: Path) -> list[list[float]]:
    save(layout, kind, Small, folder / "small.ckpt")
    save(layout, kind, LeavesOut, folder / "left out.ckpt")
    pairs = [(Small, "small"), (LeavesOut, "left out"), (SetsRate, "small")]
    if kind == "file":
        # In a directory the states of a weight keep its name.
        pairs.append((Renames, "small"))
    return [resumed(layout, module, folder / f"{name}.ckpt") for module, name in pairs]


def validated(layout: Layout, path: Path) -> float:
    trainer = make_trainer(layout)
    [values] = trainer.validate(Renames(), Data(), ckpt_path=path, verbose=False, weights_only=False)
    return values["val_loss"]


@pytest.mark.parametrize("layout", [TP2, PP2])
def test_hooks_change_what_is_loaded_as_on_one_device(layout: Layout, tmp_path: Path) -> None:
    kinds = ("plain", "file", "directory")
    folders = {kind: tmp_path / kind for kind in kinds}
    plain = run_on_ranks(1, resumed_all, PLAIN, "file", folders["plain"], init=False)[0]
    # The rate is another one, and nothing else is.
    assert plain[1] == plain[3] == plain[0] != plain[2] and plain[2][0] == 0.001
    for kind in ("file", "directory"):
        for found in run_on_ranks(2, resumed_all, layout, kind, folders[kind], init=False):
            for own, wanted in zip(found, plain, strict=False):
                assert own == pytest.approx(wanted, rel=ROUNDED)
    [wanted] = run_on_ranks(1, validated, PLAIN, folders["plain"] / "small.ckpt", init=False)
    losses = run_on_ranks(2, validated, layout, folders["directory"] / "small.ckpt", init=False)
    assert losses == pytest.approx([wanted] * 2, rel=ROUNDED)
    write_consolidated(folders["directory"] / "small.ckpt", tmp_path / "one.ckpt")
    for found in run_on_ranks(2, resumed, layout, Renames, tmp_path / "one.ckpt", init=False):
        assert found == pytest.approx(plain[0], rel=ROUNDED)


def refused(kind: Any, folder: Path) -> list[str]:
    path, messages = folder / "small.ckpt", []
    save(TP2, kind, Small, path)

    def take(act: Any, *args: Any) -> None:
        try:
            act(*args)
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))

    for loading in (LeavesNames, ReadsStates, DropsStates, *([Renames] if kind == "directory" else [])):
        take(resumed, TP2, loading, path)
    for saving in (SavesStates, SavesNoStates, SavesOthers):
        take(save, TP2, kind, saving, folder / "other.ckpt")
    return messages


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_a_hook_cannot_do_is_refused_in_words(kind: str, tmp_path: Path) -> None:
    for messages in run_on_ranks(2, refused, kind, tmp_path, init=False):
        words = [
            "on_load_checkpoint of LeavesNames left weights that are not those of the module:\n  6 asked for",
            "leave all of its optimizer_states in on_load_checkpoint",
            "on_save_checkpoint cannot read checkpoint['optimizer_states']",
            "on_save_checkpoint changed checkpoint['optimizer_states']",
            "on_save_checkpoint changed checkpoint['optimizer_states']",
        ]
        if kind == "directory":
            words.insert(1, "on_load_checkpoint cannot read the 'state' of checkpoint['optimizer_states']")
            words.insert(3, "go on from the file that `lightning-megatron checkpoint consolidate` writes")
        assert [word in message for word, message in zip(words, messages, strict=True)] == [True] * len(words), messages


def misfit(path: Path) -> str:
    save(PP2, "directory", Small, path)
    with pytest.raises(ValueError, match="on_load_checkpoint of Shrinks left weights") as raised:
        resumed(PP2, Shrinks, path)
    return str(raised.value)


def test_a_misfit_of_one_stage_is_an_error_on_all(tmp_path: Path) -> None:
    for message in run_on_ranks(2, misfit, tmp_path / "small.ckpt", init=False):
        assert "1 of another shape: net.0.weight: (1, 1) there, " in message
