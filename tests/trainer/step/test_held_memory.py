"""What a rank holds is counted tensor by tensor, and an error of used-up memory says it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.sharding import Initial, deferring, is_deferred, shard_parameter
from lightning_megatron.trainer.step.held_memory import held_bytes, storage_bytes, tell_what_was_held
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import QUIET, Layout, make_trainer
from tests.trainer.modules import Data, Small

pytestmark = pytest.mark.filterwarnings(QUIET)


def test_a_storage_of_several_tensors_counts_once() -> None:
    flat = torch.zeros(100)
    views = [flat[:10], flat[10:60].view(5, 10), torch.zeros(3, dtype=torch.float64), torch.zeros(0)]
    assert sum(storage_bytes(views).values()) == 512 + 512
    assert sum(storage_bytes([flat, *views]).values()) == 512 + 512


def test_weights_without_values_get_none_to_be_counted() -> None:
    module = nn.Module()
    with deferring():
        module.weight = shard_parameter((1000,), initial=Initial())
    held = held_bytes(module, [torch.optim.AdamW(module.parameters())])
    assert held["weights"] == 512 and held["master_weights"] == 0
    assert is_deferred(module.weight)


class Greedy(Small):
    """Asks in its third step for more memory than there is."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            torch.empty(2**60, dtype=torch.uint8)


def notes(layout: Layout) -> tuple[str, dict[str, int]]:
    """The notes of the error, and what was counted."""
    module = Greedy()
    trainer = make_trainer(layout, max_epochs=1)
    with pytest.raises(RuntimeError, match="allocate") as raised:
        trainer.fit(module, Data())
    return "\n".join(raised.value.__notes__), held_bytes(module, trainer.optimizers)


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(world=2, optimizer=OptimizerConfig(kind="distributed"))], ids=["one", "distributed"]
)
def test_an_error_of_used_up_memory_says_what_was_held(layout: Layout) -> None:
    for rank, (told, held) in enumerate(run_on_ranks(layout.world, notes, layout, init=False)):
        assert f"rank {rank} held from step to step, in GB: weights " in told
        assert "OptimizerConfig(kind='distributed')" in told
        assert held["weights"] > 0


def test_another_error_is_left_as_it_is() -> None:
    error = RuntimeError("no luck")
    tell_what_was_held(error, torch.nn.Linear(2, 2), [], 0)
    assert not hasattr(error, "__notes__")


def test_kinds_are_counted_once_each() -> None:
    layer = torch.nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=False)
    layer(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    held = held_bytes(layer, [optimizer])
    # An allocator takes blocks of 512 bytes; the number of steps is on the host beside a GPU.
    assert held == {"weights": 512, "gradients": 512, "master_weights": 0, "moments": 2 * 512}
    grad: Tensor | None = layer.weight.grad
    assert grad is not None
    master = torch.nn.Parameter(layer.weight.detach().clone())
    optimizer.param_groups[0]["params"] = [master]
    assert held_bytes(layer, [optimizer])["master_weights"] == 512
    assert held_bytes(layer, [optimizer], gradient_bytes=7)["gradients"] == 7
