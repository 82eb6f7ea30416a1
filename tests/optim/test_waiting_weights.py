"""Weights that wait for their cut: a device gets its shards, and in the end the host the whole, bucket by bucket."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron.mesh import Sizes
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.master_weights import MasterWeights
from lightning_megatron.planner.fake_process_group import fake_mesh
from lightning_megatron.planner.memory_tracker import MemoryTracker
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import Layout, make_trainer

# The device of these tests, whose memory is counted beside that of the host.
DEVICE = torch.device("meta")
D, NUM_MATRICES, WIDTH = 4, 8, 128
BUCKET = WIDTH * WIDTH * 4
CONFIG = OptimizerConfig(kind="distributed_parameters", bucket_size=WIDTH * WIDTH, gather_for_hooks=False)


def test_a_device_never_has_more_than_its_shards_and_a_bucket() -> None:
    weights = [nn.Parameter(torch.full((WIDTH, WIDTH), float(i))) for i in range(NUM_MATRICES)]
    named = [(f"net.{i}", weight) for i, weight in enumerate(weights)]
    with fake_mesh(Sizes(world=D), 0) as (mesh, new_group), MemoryTracker(DEVICE) as tracker:
        optimizer = torch.optim.SGD(weights)
        gradients = Gradients(
            named,
            set(),
            mesh,
            new_group,
            DEVICE,
            config=CONFIG,
            part_of=lambda one: ("net", str(next(i for i, weight in enumerate(weights) if weight is one))),
        )
        master_weights = MasterWeights(gradients, [optimizer])
        # Shards of weights and of gradients, and a number of each bucket that stands for absent weights.
        own = 2 * NUM_MATRICES * BUCKET // D + NUM_MATRICES * 512
        assert own < sum(tracker.take_peak().values()) <= own + BUCKET
        assert {weight.device for weight in weights} == {DEVICE}
        held = sum(tracker.held.values())
        master_weights.release()
        assert sum(tracker.take_peak().values()) <= held + BUCKET
    assert [weight.device.type for weight in weights] == ["cpu"] * NUM_MATRICES


def gpt() -> GPTConfig:
    return GPTConfig(num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=512, max_sequence_length=32)


class Text(L.LightningModule):
    """A model of this package; notes the most memory until it trains, and what the model takes."""

    def configure_model(self) -> None:
        self.tracker = MemoryTracker(torch.device("cpu"))
        self.tracker.__enter__()
        self.model = GPTModel(gpt())

    def on_fit_start(self) -> None:
        self.tracker.__exit__(None, None, None)
        self.peak_bytes = sum(self.tracker.take_peak().values())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch, labels=batch)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Tensor]:
    return DataLoader(torch.zeros(8, 32, dtype=torch.int64), batch_size=2)  # type: ignore[arg-type]


def bytes_at_start(config: OptimizerConfig) -> tuple[int, int]:
    """The most that is held before the first step, and the bytes of the model, which is whole in the end."""
    module = Text()
    make_trainer(Layout(world=D, optimizer=config), max_steps=1).fit(module, loader())
    return module.peak_bytes, sum(one.nbytes for one in module.parameters() if one.isfinite().all())


def test_no_rank_has_a_model_of_this_package_whole_when_a_fit_begins() -> None:
    for peak_bytes, whole_bytes in run_on_ranks(D, bytes_at_start, CONFIG, init=False):
        assert whole_bytes // D < peak_bytes < whole_bytes
