"""Replicas that share experts make each model call together, where their batches are uneven too."""

import functools
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_megatron import ConfigurationError, MegatronStrategy, PipelineConfig
from lightning_megatron.mesh import Axis
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.moe.config import AuxLoss, MoEConfig, RouterConfig
from lightning_megatron.trainer.step.uneven_inputs import join_uneven
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.harness.threads import run_on_threads
from tests.trainer.fits import Parts, parts_apart, weights
from tests.trainer.layouts import Layout, make_trainer, replica_of

CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    vocab_size=32,
    max_sequence_length=8,
    add_bias_linear=False,
    moe=MoEConfig(router=RouterConfig(num_experts=4, aux_losses=(AuxLoss(coefficient=0.3),)), ffn_hidden_size=8),
)
SIZES = {
    "one": {},
    "ep2 pp2": {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "num_microbatches": 4},
    "ep2": {"expert_model_parallel_size": 2},
    "ep2, 4 microbatches": {"expert_model_parallel_size": 2, "num_microbatches": 4},
    "ep2 pp2 collective": {
        "expert_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "num_microbatches": 4,
        "pipeline": PipelineConfig(mode="collective"),
    },
    "tp2 etp2 dp2": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
}
WORLDS = {"one": 1, "ep2": 2, "ep2, 4 microbatches": 2, "ep2 pp2": 4, "ep2 pp2 collective": 4, "tp2 etp2 dp2": 4}


class Experts(L.LightningModule):
    """A GPT with experts that is trained and validated."""

    config = CONFIG

    def __init__(self) -> None:
        super().__init__()
        self.model: GPTModel | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPTModel(self.config, seed=5)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(batch[:, :-1], labels=batch[:, 1:])
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        assert self.model is not None
        self.log("val_loss", self.model(batch[:, :-1], labels=batch[:, 1:]), on_step=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.model is not None
        logits: Tensor = self.model(batch[:, :-1])
        return logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Dealt(L.LightningDataModule):
    """Batches of so many rows for each of two dp ranks; a single one gets the rows of both."""

    def __init__(self, training: list[tuple[int, int]], evaluation: list[tuple[int, int]], has_length: bool) -> None:
        super().__init__()
        self.training, self.evaluation, self.has_length = training, evaluation, has_length

    def _batches(self, rows: list[tuple[int, int]]) -> Any:
        assert self.trainer is not None
        rank, dp_ranks = replica_of(self.trainer)
        generator = torch.Generator().manual_seed(1)
        found = []
        for parts in rows:
            batch = torch.randint(0, 32, (sum(parts), 9), generator=generator)
            own = batch if dp_ranks == 1 else batch.split(parts)[rank]
            found += [own] if len(own) else []
        return torch.utils.data.DataLoader(found, batch_size=None) if self.has_length else Endless(found)  # type: ignore[arg-type]

    def train_dataloader(self) -> Any:
        return self._batches(self.training)

    def val_dataloader(self) -> Any:
        return self._batches(self.evaluation)

    def predict_dataloader(self) -> Any:
        return self._batches(self.evaluation)


class Endless:
    """A loader that cannot tell its length."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def trainer_of(layout: str, **options: Any) -> L.Trainer:
    strategy = MegatronStrategy(timeout_seconds=60, **SIZES[layout])
    return make_trainer(Layout(world=WORLDS[layout]), strategy=strategy, max_epochs=1, **options)


# The last batch of each is smaller, and cut into fewer microbatches on one of the dp ranks.
ROWS = [(4, 4), (4, 4), (3, 1)]


def fitted(layout: str) -> tuple[Parts, float]:
    module, trainer = Experts(), trainer_of(layout)
    trainer.fit(module, Dealt(ROWS, ROWS, has_length=True))
    return weights(module), float(trainer.callback_metrics["val_loss_epoch"])


@functools.cache
def fitted_on_one() -> tuple[Parts, float]:
    [found] = run_on_ranks(1, fitted, "one", init=False)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("layout", every_nth([layout for layout in SIZES if layout != "one"], 2))
def test_dp_ranks_with_batches_of_different_rows_train_and_validate_as_one_device(layout: str) -> None:
    full, loss = fitted_on_one()
    for parts, own in run_on_ranks(WORLDS[layout], fitted, layout, init=False, timeout=120):
        assert parts_apart(parts, full) < 1e-12
        assert own == pytest.approx(loss, abs=1e-12)


def evaluated(layout: str, rows: list[tuple[int, int]], has_length: bool, step: str, limit: Any) -> str:
    trainer = trainer_of(layout, limit_val_batches=limit, limit_predict_batches=limit)
    try:
        getattr(trainer, step)(Experts(), Dealt([], rows, has_length))
    except RuntimeError as error:
        return str(error)
    return "done"


@pytest.mark.matrix
@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("step", ["validate", "predict"])
def test_a_dp_rank_with_a_batch_more_is_reported_on_all_ranks_and_none_hangs(has_length: bool, step: str) -> None:
    rows = [(2, 2), (1, 2), (2, 0)]
    for shown in run_on_ranks(2, evaluated, "ep2", rows, has_length, step, 1.0, init=False):
        assert "1 of 2 data-parallel ranks have a batch number 3 to evaluate" in shown and "limit_val_batches" in shown
    assert run_on_ranks(2, evaluated, "ep2", rows, has_length, step, 2, init=False) == ["done"] * 2


def test_dp_ranks_that_share_no_expert_may_predict_different_numbers_of_batches() -> None:
    rows = [(2, 2), (2, 0)]
    assert run_on_ranks(4, evaluated, "tp2 etp2 dp2", rows, True, "predict", 1.0, init=False) == ["done"] * 4


class Gathering(Experts):
    """Every rank takes all tokens."""

    config = replace(CONFIG, moe=replace(CONFIG.moe, dispatcher="all_gather"))


def gathered(rows: list[tuple[int, int]]) -> str:
    module, trainer = Gathering(), trainer_of("ep2")
    try:
        trainer.fit(module, Dealt(rows, [(2, 2)], has_length=True))
    except RuntimeError as error:
        return str(error)
    return "done"


def test_experts_that_take_sizes_for_known_refuse_batches_of_different_shapes() -> None:
    for shown in run_on_ranks(2, gathered, ROWS, init=False):
        assert "shapes [[(3, 9)], [(1, 9)]]" in shown and "drop_last" in shown
    assert run_on_ranks(2, gathered, ROWS[:2], init=False) == ["done"] * 2


class Dense(L.LightningModule):
    """A model without experts."""

    def configure_model(self) -> None:
        self.model = GPTModel(replace(CONFIG, moe=None))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.model(batch[:, :-1], labels=batch[:, 1:])


def validated(kind: type[L.LightningModule]) -> str:
    try:
        trainer_of("ep2").validate(kind(), Dealt([], [(2, 2)], has_length=True), verbose=False)
    except ConfigurationError as error:
        return str(error)
    return "done"


def test_expert_sizes_without_experts_are_refused() -> None:
    for shown in run_on_ranks(2, validated, Dense, init=False):
        assert "expert_tensor_parallel_size (1) cut nothing of Dense, which holds no experts" in shown
    assert run_on_ranks(2, validated, Experts, init=False) == ["done"] * 2


def test_a_loader_keeps_its_attributes_and_is_wrapped_once() -> None:
    def on_rank(world: Any) -> tuple[int, int]:
        loader = torch.utils.data.DataLoader(range(3 + 4 * world.rank()), batch_size=2)  # type: ignore[arg-type,var-annotated]
        alone, device = Axis.alone(0), torch.device("cpu")
        two = Axis("dp", 2, world.rank(), (0, 1), world)
        assert join_uneven(loader, alone, device) is loader
        wrapped = join_uneven(join_uneven(loader, two, device), two, device)
        assert wrapped.uneven is loader and join_uneven(wrapped, alone, device) is loader
        return wrapped.batch_size, len(wrapped)

    # As long as the longest, so that each dp rank checks whether it has as many.
    assert run_on_threads(2, on_rank) == [(2, 4), (2, 4)]
