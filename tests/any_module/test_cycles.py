"""A step of a network that ranks have cut leaves no tensor behind that only a search for garbage would free."""

import gc
from typing import Any

import lightning as L
import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy, RecomputeConfig
from tests.any_module.model_families import Causal, batches
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import QUIET, Layout, make_trainer

pytestmark = pytest.mark.filterwarnings(QUIET)

LAYOUTS = {
    "cp2": Layout(world=2, cp=2),
    "pp2tp2-sp": Layout(world=4, tp=2, sp=True, pp=2, microbatches=2),
}


class Garbage(L.Callback):
    """Shapes of the tensors in cycles that each step leaves."""

    def __init__(self) -> None:
        self.found: list[list[tuple[int, ...]]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)

    def on_train_batch_end(self, *_: Any) -> None:
        gc.collect()
        self.found.append([tuple(one.shape) for one in gc.garbage if isinstance(one, Tensor)])
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


class Cyclic(Causal):
    """Holds its loss in a cycle."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        cycle: list[Any] = [loss.detach()]
        cycle.append(cycle)
        return loss


def garbage_of(layout: Layout, kind: type[Causal]) -> list[list[tuple[int, ...]]]:
    garbage, strategy = Garbage(), layout.strategy()
    assert isinstance(strategy, MegatronStrategy)
    if layout.pp > 1:
        strategy.recompute = RecomputeConfig(granularity="full")
    trainer = make_trainer(layout, strategy=strategy, max_steps=2, max_epochs=-1, callbacks=[garbage])
    loader: Any = DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(kind("llama"), loader)
    return garbage.found


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_tensor_waits_for_the_collector(name: str) -> None:
    for _, second in run_on_ranks(LAYOUTS[name].world, garbage_of, LAYOUTS[name], Causal, init=False):
        # The first step makes what is made once.
        assert second == []


def test_a_cycle_of_a_user_s_own_is_seen() -> None:
    for _, second in run_on_ranks(2, garbage_of, LAYOUTS["cp2"], Cyclic, init=False):
        assert second == [()]
