"""A model must be built for the ranks it runs on."""

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_megatron import ConfigurationError
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.trainer.setup_model import pipeline_plain_sequential
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import Layout, make_trainer

CONFIG = GPTConfig(num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=32, max_sequence_length=8)


class TooEarly(L.LightningModule):
    """Builds its model before anyone knows the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPTModel(CONFIG)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch[:, :-1], labels=batch[:, 1:])
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(layout: Layout) -> str:
    loader = torch.utils.data.DataLoader(torch.randint(0, 32, (8, 9)), batch_size=4)
    trainer = make_trainer(layout, max_epochs=1, limit_val_batches=0)
    try:
        trainer.fit(TooEarly(), loader)
    except ConfigurationError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("layout", [Layout(world=2, tp=2), Layout(world=2, pp=2, microbatches=2)], ids=str)
def test_a_model_built_in_init_is_refused_where_it_would_be_whole_on_every_rank(layout: Layout) -> None:
    for told in run_on_ranks(2, fit, layout, init=False):
        assert "build it in configure_model" in told


def test_a_model_built_in_init_trains_where_each_rank_holds_it_whole() -> None:
    assert run_on_ranks(2, fit, Layout(world=2), init=False) == ["trained", "trained"]


class Reused(L.LightningModule):
    """A chain in which one activation stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        act = torch.nn.Tanh()
        self.chain = torch.nn.Sequential(torch.nn.Linear(2, 2), act, torch.nn.Linear(2, 2), act)


def test_a_module_that_stands_twice_in_a_chain_keeps_both_places() -> None:
    module, mesh = Reused(), Mesh.imagine(0, Sizes(world=2, pp=2))
    assert pipeline_plain_sequential(module, mesh)
    assert module.chain.part_names == ("0", "1", "2", "3")
