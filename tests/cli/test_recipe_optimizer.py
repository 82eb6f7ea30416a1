"""`--optimizer` and `--lr_scheduler` of a recipe."""

from typing import Any

import pytest
import torch

from lightning_megatron.optim.muon import Muon
from lightning_megatron.trainer import ConfigurationError
from tests.recipes.parsed import parse
from tests.trainer.layouts import PLAIN, make_trainer

SMALL = ("--model.config.num_layers=1", "--model.config.hidden_size=32")
SGD = ("--optimizer=torch.optim.SGD", "--optimizer.lr=0.5")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # LightningCLI warns of options of pytest's beside those that it is given.
    monkeypatch.setattr("sys.argv", ["recipe.py"])
    # It sets these; monkeypatch takes them back.
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


def configured(*options: str) -> Any:
    """What the module of a recipe returns from configure_optimizers."""
    module = parse("toy.yaml", *SMALL, *options).model
    module.configure_model()
    module.trainer = make_trainer(PLAIN, max_steps=10)
    return module.configure_optimizers()


def test_without_the_options_a_module_has_its_own() -> None:
    assert type(configured()["optimizer"]) is torch.optim.AdamW


def test_any_optimizer_takes_its_place() -> None:
    optimizer = configured(*SGD)
    assert type(optimizer) is torch.optim.SGD
    [group] = optimizer.param_groups
    assert group["lr"] == 0.5 and len(group["params"]) > 10


@pytest.mark.parametrize("weight_decay", [0.25, 0.0])
def test_weight_decay_acts_on_matrices_alone(weight_decay: float) -> None:
    optimizer = configured(*SGD, f"--optimizer.weight_decay={weight_decay}")
    decays = {(one.dim() > 1, group["weight_decay"]) for group in optimizer.param_groups for one in group["params"]}
    assert decays == {(True, weight_decay), (False, 0.0)}


def test_a_default_weight_decay_counts() -> None:
    optimizer = configured("--optimizer=torch.optim.AdamW", "--optimizer.lr=0.5")
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]


def test_muon_gets_its_groups() -> None:
    optimizer = configured("--optimizer=lightning_megatron.optim.muon.Muon", "--optimizer.lr=0.5")
    assert type(optimizer) is Muon
    assert [(group["use_muon"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (True, 0.1),
        (False, 0.1),
        (False, 0.0),
    ]


def test_a_scheduler_is_stepped_once_per_optimizer_step() -> None:
    cosine = ("--lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR", "--lr_scheduler.T_max=7")
    found = configured(*SGD, *cosine)
    scheduler = found["lr_scheduler"]["scheduler"]
    assert found["lr_scheduler"]["interval"] == "step"
    assert (scheduler.optimizer, scheduler.T_max) == (found["optimizer"], 7)


def test_a_scheduler_that_watches_a_metric_is_stepped_once_per_epoch() -> None:
    plateau = ("--lr_scheduler=lightning.pytorch.cli.ReduceLROnPlateau", "--lr_scheduler.monitor=val_loss")
    found = configured(*SGD, *plateau)["lr_scheduler"]
    assert found["monitor"] == "val_loss" and "interval" not in found


def test_a_scheduler_alone_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--lr_scheduler .* needs an --optimizer"):
        configured("--lr_scheduler=torch.optim.lr_scheduler.ConstantLR")


def test_what_an_optimizer_says_to_its_settings_is_the_error() -> None:
    with pytest.raises(ConfigurationError, match=r"torch.optim.SGD cannot be made: Invalid learning rate: -1"):
        configured("--optimizer=torch.optim.SGD", "--optimizer.lr=-1")
