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
from tests.harness.sample import every_nth
from tests.hf.tiny import CASES, VOCABULARY, ours, saved, theirs, tokens

CASES_OF_GRADIENTS = (
    "deepseek_v3",
    "deepseek_v3, whole queries, one group, stretched waves",
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

    def __init__(self, case: str, num_layers: int = 0) -> None:
        super().__init__()
        kind, fields = CASES[case]
        own: dict[str, Any] = {"num_hidden_layers": num_layers} if num_layers else {}
        if num_layers and "layer_types" in fields:
            own["layer_types"] = (fields["layer_types"] * num_layers)[:num_layers]
        config: Any = FAMILIES[kind].config({**fields, **own, "model_type": kind, "initializer_range": 0.2})
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


# Of latent attention with experts chosen by group and bias.
LAYOUTS = [
    *("tp2-sp", "tp4-sp", "cp2", "cp4", "pp2m4", "pp2vp2m4", "dp2pp2m4-zero-zb_h1", "pp2vp2m4-zb_v", "dp2-zero", "ep2"),
    *("tp2cp2-sp", "dp2tp2-sp-zero2", "pp2ep2m2", "dp4ep2m2-zero2"),
]


@pytest.mark.matrix
@pytest.mark.parametrize("layout", every_nth(LAYOUTS, 5))
def test_latent_attention_trains_as_on_one_device(layout: str) -> None:
    found = certify(functools.partial(Trains, "deepseek_v3", 4), batches, layouts=(layout,), steps=2)
    found.assert_equal()
    assert all(value < 1e-10 for result in found.results for value in result.largest.values())
