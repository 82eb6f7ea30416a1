"""Gradients of a family's model are those of transformers, and on layouts a step is that of one device."""

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_megatron.hf.families import FAMILIES
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.testing import certify
from tests.hf.tiny import CASES, VOCABULARY, ours, saved, theirs, tokens

CASES_OF_GRADIENTS = (
    "gemma2",
    "gemma3",
    "glm4",
    "gpt_oss, stretched waves, other windows",
    "olmo2",
    "phi3, a part of each head turns",
    "qwen2_moe",
)


@pytest.mark.parametrize("case", CASES_OF_GRADIENTS)
def test_gradients_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    saved(case, tmp_path / "weights")
    model, wanted = ours(tmp_path / "weights", torch.float64), theirs(case).double()
    if "experts" in "".join(name for name, _ in wanted.named_parameters()):
        # Their grouped product takes no float64.
        wanted.set_experts_implementation("eager")
    model(tokens()[:, :-1], labels=tokens()[:, 1:]).backward()
    wanted(tokens(), labels=tokens()).loss.backward()
    with torch.no_grad():
        for weight in wanted.parameters():
            weight.copy_(weight.grad if weight.grad is not None else torch.zeros_like(weight))
    # Read as weights, gradients of theirs get the names and places of ours.
    wanted.save_pretrained(tmp_path / "gradients")
    of_theirs = dict(ours(tmp_path / "gradients", torch.float64).named_parameters())
    for name, weight in model.named_parameters():
        found = torch.zeros_like(weight) if weight.grad is None else weight.grad
        # transformers norms and turns in float32.
        assert (found - of_theirs[name]).abs().max() < 5e-6 * of_theirs[name].abs().max(), name
        assert of_theirs[name].abs().max() > 1e-4


class Trains(L.LightningModule):
    """Trains a new model of a case."""

    def __init__(self, case: str) -> None:
        super().__init__()
        kind, fields = CASES[case]
        config: Any = FAMILIES[kind].config({**fields, "model_type": kind, "initializer_range": 0.2})
        self.config: GPTConfig = config
        self.model: GPTModel | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPTModel(self.config, seed=1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(batch["tokens"], labels=batch["labels"], loss_mask=batch["loss_mask"])
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches() -> list[dict[str, Tensor]]:
    """Three batches of eight rows, with masks that are uneven."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(3):
        ids = torch.randint(VOCABULARY, (8, 15), generator=generator)
        mask = (torch.rand(8, 14, generator=generator) < torch.linspace(0.3, 1.0, 8).unsqueeze(1)).double()
        made.append({"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": mask})
    return made


@pytest.mark.parametrize("case", CASES_OF_GRADIENTS)
def test_a_step_on_layouts_is_that_of_one_device(case: str) -> None:
    found = certify(functools.partial(Trains, case), batches, layouts=("tp2pp2m2",), steps=2)
    found.assert_equal()
    assert all(value < 1e-10 for result in found.results for value in result.largest.values())
