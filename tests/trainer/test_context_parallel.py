"""Under context parallelism a Trainer trains, logs and predicts as one device does, however uneven the tokens are."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_megatron import ConfigurationError, ContextConfig, MegatronStrategy
from lightning_megatron.comm.rng import Draws
from lightning_megatron.mesh import Mesh
from lightning_megatron.models import GPTConfig, GPTModel
from tests.harness.ranks import run_on_ranks
from tests.reference.gpt import ReferenceGPT

CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=64,
    max_sequence_length=16,
    init_std=0.3,
    attention_dropout=0.2,
)
SEED, SEQUENCE = 3, 8
# Two rows a dp rank: of their tokens only these have a target.
MASKS = {
    "one valid token in all": [[5], [], [], []],
    "2 and 1 valid tokens on the ranks of cp": [[], [0, 6, 3], [], []],
    "uneven over replicas too": [[0, 1, 2, 7], [4], [], [2]],
}


def batch_of(kept: list[list[int]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(64, (4, SEQUENCE + 1), generator=generator)
    mask = torch.zeros(4, SEQUENCE, dtype=torch.float64)
    for row, positions in enumerate(kept):
        mask[row, positions] = 1.0
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "loss_mask": mask}


class Module(L.LightningModule):
    """An ordinary module that adds a term of its own to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model: GPTModel | None = None
        self.counted = SumMetric()
        self.seen: dict[str, Any] = {}

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPTModel(CONFIG, seed=SEED)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(**batch)
        self.counted.update(batch["loss_mask"].sum())
        self.log("valid", batch["loss_mask"].sum(), reduce_fx="sum")
        self.log("metric", self.counted, on_step=False, on_epoch=True)
        self.log("loss", loss)
        return loss + 0.5 * _norm_weight(self.model).square().sum()

    def predict_step(self, batch: dict[str, Tensor]) -> Tensor:
        assert self.model is not None
        return self.model(batch["tokens"])  # type: ignore[no-any-return]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.model is not None
        self.seen["gradients"] = {
            name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None
        }

    def on_train_epoch_end(self) -> None:
        self.seen["reduced"] = float(self.trainer.strategy.reduce(torch.tensor(1.0), reduce_op="sum"))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _norm_weight(model: GPTModel) -> Tensor:
    return model.get_parameter("layers.0.mlp_norm.weight")


def fitted(kept: list[list[int]], kind: Any, microbatches: int) -> dict[str, Any]:
    batch = batch_of(kept)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        precision="64-true",
        strategy=MegatronStrategy(
            context_parallel_size=2,
            context=ContextConfig(comm_type=kind),
            num_microbatches=microbatches,
            timeout_seconds=60,
        ),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = Module()
    rows = Rows(batch, trainer)
    trainer.fit(module, rows)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predicted = trainer.predict(module, rows)
    assert predicted is not None
    return {**module.seen, "logged": logged, "logits": predicted[0], "replica": rows.rank}


class Rows(L.LightningDataModule):
    """Of the batch the rows of this dp rank."""

    def __init__(self, batch: dict[str, Tensor], trainer: L.Trainer) -> None:
        super().__init__()
        self.batch = batch
        self.rank = 0

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        self.rank = self.trainer.strategy.data_parallel_rank  # type: ignore[attr-defined]
        rows: Any = [{name: tensor[2 * self.rank + i] for name, tensor in self.batch.items()} for i in range(2)]
        return DataLoader(rows, batch_size=2)

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


@pytest.mark.parametrize(("kind", "microbatches"), [("ring", 1), ("all_to_all", 1), ("all_gather", 2)])
@pytest.mark.parametrize("case", MASKS)
def test_uneven_tokens_weigh_as_on_one_device(case: str, kind: str, microbatches: int) -> None:
    kept = MASKS[case]
    ranks = run_on_ranks(4, fitted, kept, kind, microbatches, init=False, timeout=120)
    torch.set_default_dtype(torch.float64)
    try:
        model = GPTModel(CONFIG, mesh=Mesh.single(), seed=SEED)
    finally:
        torch.set_default_dtype(torch.float32)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    batch = batch_of(kept)
    loss = ReferenceGPT(CONFIG, weights, Draws(seed=SEED)).loss(**batch)
    (loss + 0.5 * weights["layers.0.mlp_norm.weight"].square().sum()).backward()
    with torch.no_grad():
        logits = ReferenceGPT(CONFIG, weights).logits(batch["tokens"])
    num_valid = sum(map(len, kept))
    for rank in ranks:
        assert rank["logged"]["loss"] == pytest.approx(loss.item(), abs=1e-12)
        assert rank["logged"]["valid"] == num_valid
        assert rank["logged"]["metric"] == num_valid
        assert rank["reduced"] == 2
        for name, weight in weights.items():
            assert weight.grad is not None
            torch.testing.assert_close(rank["gradients"][name], weight.grad, rtol=0, atol=1e-12, msg=name)
        torch.testing.assert_close(rank["logits"], logits.chunk(2)[rank["replica"]], rtol=0, atol=1e-11)


class Plain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_module_that_cuts_no_sequences_is_refused_before_a_process_starts() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=MegatronStrategy(context_parallel_size=2), logger=False)
    with pytest.raises(ConfigurationError, match=r"context_parallel_size \(2\) cuts nothing of Plain"):
        trainer.fit(Plain(), DataLoader(torch.ones(2, 2), batch_size=2))


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"context_parallel_size": 0}, r"context_parallel_size \(0\) must be at least 1"),
        (
            {"context_parallel_size": 3, "context": ContextConfig(comm_type="hierarchical", ulysses_size=2)},
            r"ulysses_size \(2\).*must divide context_parallel_size \(3\); it may be 1, 3",
        ),
        (
            {"context_parallel_size": 8, "context": ContextConfig(comm_type="all_to_all")},
            r"4 / 1 = 4\) must be a multiple of .* \(8\); .*ulysses_size=...\) with 2, 4",
        ),
        ({"context": ContextConfig(kernel="flex")}, r"kernel \('flex'\) .* this run is on cpu; use 'fused'"),
    ],
)
def test_what_cannot_be_is_reported_before_anything_starts(options: dict[str, Any], shown: str) -> None:
    class Sized(Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = CONFIG

    trainer = L.Trainer(
        accelerator="cpu", devices=24, strategy=MegatronStrategy(**options), logger=False, enable_checkpointing=False
    )
    with pytest.raises(ConfigurationError, match=shown):
        trainer.fit(Sized(), DataLoader(torch.ones(2, 2)))


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"comm_type": "rings"}, "comm_type"),
        ({"comm_type": "hierarchical"}, r"ulysses_size \(0\) must be at least 2"),
        ({"ulysses_size": 2}, r"ulysses_size \(2\) is one of comm_type 'hierarchical'"),
        ({"uneven": "cut"}, "uneven"),
        ({"kernel": "triton"}, r"kernel \('triton'\) must be 'fused' or 'flex'"),
    ],
)
def test_a_config_says_what_it_cannot_be(options: dict[str, Any], shown: str) -> None:
    with pytest.raises(ValueError, match=shown):
        ContextConfig(**options)
