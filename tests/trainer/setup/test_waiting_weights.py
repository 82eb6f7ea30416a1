"""Tests of weights that wait until data-parallel ranks cut them: where they are, and that nobody writes to them."""

import warnings
import weakref
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.trainer.setup.waiting_weights import move_others
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import Layout, make_trainer

DEVICE = torch.device("meta")


def test_weights_that_may_be_cut_stay_where_they_are_and_all_else_moves() -> None:
    module = L.LightningModule()
    module.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    module.mean = MeanMetric()
    module.quantised = nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
    weights = list(module.net.parameters())
    move_others(module, DEVICE)
    assert module.device == DEVICE and module.mean.device == DEVICE
    assert {one.device for one in module.buffers()} == {module.quantised.device} == {DEVICE}
    assert all(one is before for one, before in zip(module.net.parameters(), weights, strict=True))
    assert {one.device.type for one in weights} == {"cpu"}


class Writes(L.LightningModule):
    """Writes to a weight that has no values, looks at a gradient that will be another's, and refers to a weight that
    will be another tensor."""

    def configure_model(self) -> None:
        size = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16, "max_sequence_length": 8}
        self.model = GPTModel(GPTConfig(**size))  # type: ignore[arg-type]
        nn.init.zeros_(self.model.get_parameter("final_norm.weight"))
        self.model.get_parameter("final_norm.bias").register_hook(lambda grad: grad)
        self.reference = weakref.ref(self.model.get_parameter("embedding.tokens.weight"))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        raise AssertionError("it never comes here")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def refused() -> str:
    warnings.filterwarnings("ignore", "hooks on the gradients of")
    layout = Layout(world=2, optimizer=OptimizerConfig(kind="distributed_parameters"))
    try:
        tokens = DataLoader(torch.zeros(4, 8, dtype=torch.int64), batch_size=2)  # type: ignore[arg-type]
        make_trainer(layout).fit(Writes(), tokens)
    except (ConfigurationError, RuntimeError) as error:
        return str(error)
    return "trained"


def test_what_would_be_lost_of_weights_without_values_is_refused() -> None:
    # A rank that hears of the other's failure first tells that.
    said = "".join(run_on_ranks(2, refused, init=False))
    assert "weights were written to before they have values (model.final_norm.weight)" in said
    assert "weights were given hooks before they have values (model.final_norm.bias)" in said
    assert "weights were referred to weakly before they have values (model.embedding.tokens.weight)" in said
