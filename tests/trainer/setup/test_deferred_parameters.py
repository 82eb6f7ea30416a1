"""Fits whose models have no values until data-parallel ranks have their shards: with the numbers of any other fit."""

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock
from weakref import ref

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron.comm import rng
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.planner.memory_tracker import MemoryTracker
from lightning_megatron.sharding import is_deferred
from tests.harness import ranks
from tests.harness.ranks import RankFailed, run_on_ranks
from tests.harness.sample import every_nth
from tests.trainer.layouts import Layout, make_trainer

# Hooks of these modules read no weights.
SHARDED = OptimizerConfig(kind="distributed_parameters", gather_for_hooks=False)
WHOLE = OptimizerConfig(kind="distributed_gradients")
CONFIG = GPTConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=50, max_sequence_length=32)
MIXTRAL = replace(CONFIG, moe=MoEConfig(router=RouterConfig(num_experts=4, top_k=2), ffn_hidden_size=16))
SOON_SECONDS = 40.0
LAYOUTS: dict[str, tuple[Layout, Any, GPTConfig]] = {
    "pp2 dp2": (Layout(world=4, pp=2, microbatches=2), "32-true", CONFIG),
    "tp2 dp2": (Layout(world=4, tp=2), "64-true", CONFIG),
    "dp2, main weights": (Layout(world=2), "bf16-mixed", CONFIG),
    "ep2 dp2": (Layout(world=4, ep=2), "32-true", MIXTRAL),
    "dp2, main weights on the host": (Layout(world=2), "bf16-mixed", CONFIG),
}


class Text(L.LightningModule):
    """Next-token prediction with a model of this package and a layer of a user's own."""

    def __init__(self, config: GPTConfig, optimizer: Callable[..., torch.optim.Optimizer], lr: float) -> None:
        super().__init__()
        self.config, self.make_optimizer, self.lr = config, optimizer, lr

    def configure_model(self) -> None:
        self.model = GPTModel(self.config)
        self.own = nn.Linear(1, 1)
        self.num_deferred = sum(map(is_deferred, self.parameters()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch, labels=batch)
        return self.own(loss.view(1)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters(), lr=self.lr)


def loader() -> DataLoader[Tensor]:
    return DataLoader(torch.arange(8 * 32).view(8, 32) % 50, batch_size=4)  # type: ignore[arg-type]


def fitted(module: Text, layout: Layout, precision: Any) -> dict[str, Tensor]:
    torch.manual_seed(3)
    make_trainer(layout, max_steps=2, precision=precision).fit(module, loader())
    return {name: one.detach().clone() for name, one in module.named_parameters()}


def values_of_both(name: str) -> tuple[bool, list[str]]:
    """Whether a sharded model begins without values, and which weights are others when it has them."""
    layout, precision, config = LAYOUTS[name]
    found = []
    for kind in (SHARDED, WHOLE):
        kind = replace(kind, cpu_offload="host" in name)
        module = Text(config, torch.optim.SGD, lr=0.0)
        found.append(fitted(module, replace(layout, optimizer=kind), precision))
        are_deferred = module.num_deferred == len(found[0]) - 2
        assert are_deferred == (kind.shards_parameters)
    return len(found[0]) > 10, [name for name, one in found[0].items() if not one.equal(found[1][name])]


@pytest.mark.matrix
@pytest.mark.parametrize("name", every_nth(LAYOUTS, 3))
def test_a_fit_begins_with_the_values_of_any_other(name: str) -> None:
    for found in run_on_ranks(LAYOUTS[name][0].world, values_of_both, name, init=False):
        assert found == (True, [])


class Initialised(Text):
    """Draws weights anew as minGPT does, ties two of them, and looks at others."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.apply(draw)
        with torch.no_grad():
            self.model.get_parameter("final_norm.weight").mul_(2.0)
        self.before = self.model.get_parameter("embedding.tokens.weight").norm()
        # No module knows of it.
        self.others = [GPTModel(self.config)]
        given_up = GPTModel(self.config)
        given_up.get_parameter("final_norm.weight").mul(2.0)
        self.given_up = ref(given_up.get_parameter("final_norm.weight"))

    def on_fit_start(self) -> None:
        assert not any(is_deferred(one) for one in self.others[0].parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.before > 0.0
        gc.collect()
        assert self.given_up() is None
        return super().configure_optimizers()


def draw(module: nn.Module) -> None:
    weight = getattr(module, "weight", None)
    if isinstance(weight, nn.Parameter) and weight.dim() == 2:
        weight.data.normal_(mean=0.0, std=0.02)


def trained_by_both() -> list[str]:
    found = []
    for kind in (SHARDED, WHOLE):
        module = Initialised(CONFIG, torch.optim.Adagrad, lr=0.1)
        found.append(fitted(module, Layout(world=2, optimizer=kind), "32-true"))
    return [name for name, one in found[0].items() if not one.equal(found[1][name])]


def test_what_is_written_to_weights_before_they_have_values_is_trained() -> None:
    assert run_on_ranks(2, trained_by_both, init=False) == [[], []]


class Measured(Text):
    """Notes the most bytes that are held until the weights are in shards."""

    def configure_model(self) -> None:
        self.tracker = MemoryTracker(torch.device("cpu"))
        self.tracker.__enter__()
        super().configure_model()

    def on_fit_start(self) -> None:
        self.tracker.__exit__(None, None, None)
        self.most_bytes = sum(self.tracker.take_peak().values())


def bytes_at_start() -> tuple[int, int]:
    module = Measured(replace(CONFIG, num_layers=4, hidden_size=64, vocab_size=512), torch.optim.SGD, lr=0.1)
    # Drawing takes memory that does not grow with the model.
    with mock.patch.object(rng, "fill_normal_"):
        make_trainer(Layout(world=4, optimizer=SHARDED), max_steps=1).fit(module, loader())
    return module.most_bytes, sum(one.nbytes for one in module.parameters())


def test_no_rank_has_a_model_whole_when_a_fit_begins() -> None:
    for most_bytes, whole_bytes in run_on_ranks(4, bytes_at_start, init=False):
        # A shard of weights and one of gradients, and a part.
        assert whole_bytes // 2 < most_bytes < 0.8 * whole_bytes


def fails_on_one_stage(target: Tensor, std: float, key: int, shape: tuple[int, ...], offsets: object) -> Tensor:
    """Draws nothing; fails where positions are learned."""
    if shape == (CONFIG.max_sequence_length, CONFIG.hidden_size):
        raise OSError("the disk is gone")
    return target


def fail() -> None:
    layout = Layout(world=4, pp=2, microbatches=2, optimizer=SHARDED)
    with mock.patch.object(rng, "fill_normal_", fails_on_one_stage):
        make_trainer(layout).fit(Text(CONFIG, torch.optim.SGD, lr=0.1), loader())


def test_where_one_stage_cannot_make_its_values_all_ranks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    # The harness would end the others after two seconds; here it is the strategy that shall do it.
    monkeypatch.setattr(ranks, "GRACE_SECONDS", SOON_SECONDS)
    started_seconds = time.monotonic()
    with pytest.raises(RankFailed, match="the disk is gone") as failure:
        run_on_ranks(4, fail, init=False, timeout=2 * SOON_SECONDS)
    assert time.monotonic() - started_seconds < SOON_SECONDS
    assert "still running" not in str(failure.value)
