"""A BertModel under `Trainer.fit` and `validate`: the losses, weights and metrics of one device, on any layout."""

from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_megatron.models import BertConfig, BertLogits, BertModel
from tests.harness.ranks import run_on_ranks
from tests.trainer.fits import Parts, parts_apart, weights
from tests.trainer.layouts import Layout, make_trainer, replica_of

LAYOUTS = {
    "tp2 sp": Layout(world=2, tp=2, sp=True),
    "pp2": Layout(world=2, pp=2, microbatches=3),
    "pp2 vp2": Layout(world=2, pp=2, vp=2, microbatches=2),
    "cp2": Layout(world=2, cp=2, microbatches=2),
    "dp2": Layout(world=2),
    "pp2 collective": Layout(world=2, pp=2, microbatches=2, collective=True),
}
CONFIG = BertConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=2,
    max_sequence_length=8,
    vocab_size=37,
    init_std=0.2,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
# Sums in another order, over three steps.
TOLERANCE = 1e-10


class Samples(Dataset[dict[str, Tensor]]):
    """Twelve padded samples with different numbers of targets, some without an order."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(37, (8,), generator=generator)
        length = 8 - index % 5
        is_target = torch.arange(8) < 1 + index % 4
        return {
            "tokens": tokens,
            "token_types": (torch.arange(8) >= 4).long(),
            "padding_mask": (torch.arange(8) < length).long(),
            "labels": torch.where(is_target, tokens, -100),
            "sentence_order_labels": torch.tensor((-100, 0, 1)[index % 3]),
        }


class Encoder(L.LightningModule):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.model: BertModel | None = None
        self.losses: list[float] = []
        self.weights: Parts = {}
        self.logits: list[BertLogits] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = BertModel(self.config, seed=1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(**batch)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self) -> None:
        self.weights = weights(self)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        assert self.model is not None
        shown = {name: batch[name] for name in ("tokens", "token_types", "padding_mask")}
        self.logits.append(self.model(**shown))
        # Last: the weight by which what is logged is averaged is that of the last call.
        self.log("val_loss", self.model(**batch))

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """This dp rank's rows of each global batch of six."""
        rank, size = replica_of(self.trainer)
        own = 6 // size
        places = [start + rank * own + row for start in (0, 6) for row in range(own)]
        return DataLoader(Subset(Samples(), places), batch_size=own)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self.train_dataloader()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


Run = tuple[list[float], float, Parts, list[BertLogits]]


def fit(layout: Layout, config: BertConfig) -> Run:
    module = Encoder(config)
    trainer = make_trainer(layout, max_epochs=1, limit_val_batches=1, precision="64-true", num_sanity_val_steps=0)
    trainer.fit(module)
    return module.losses, float(trainer.callback_metrics["val_loss"]), module.weights, module.logits


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_fit_is_that_of_one_device(name: str) -> None:
    layout = LAYOUTS[name]
    config = CONFIG if name != "pp2" else replace(CONFIG, norm_placement="pre")
    losses, val_loss, full, logits = run_on_ranks(1, fit, Layout(), config, init=False, timeout=120)[0]
    assert len(set(losses)) == len(losses) == 2
    for found in run_on_ranks(layout.world, fit, layout, config, init=False, timeout=180):
        assert max(abs(a - b) for a, b in zip(found[0], losses, strict=True)) < TOLERANCE
        assert abs(found[1] - val_loss) < TOLERANCE
        assert parts_apart(found[2], full) < TOLERANCE
        if layout.dp == 1:
            for ours, theirs in zip(found[3], logits, strict=True):
                assert (ours.tokens - theirs.tokens).abs().max() < TOLERANCE
                assert ours.sentence_order is not None and theirs.sentence_order is not None
                assert (ours.sentence_order - theirs.sentence_order).abs().max() < TOLERANCE
