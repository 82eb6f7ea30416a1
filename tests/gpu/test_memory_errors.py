"""A GPU whose memory is used up says what held it."""

import re
from typing import Any

import pytest
import torch

from lightning_megatron.transformer import cost
from tests.gpu.devices import each_device
from tests.gpu.test_fits_on_device import CONFIGS, Model, make_loader, make_trainer
from tests.harness.ranks import run_on_ranks


class Greedy(Model):
    """Asks in its third step for more memory than there is."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            torch.empty(2**60, dtype=torch.uint8, device=self.device)


def notes(device: str) -> tuple[str, str]:
    """Kind of the error, and its notes."""
    config = CONFIGS[device]
    with pytest.raises(RuntimeError, match="allocate") as raised:
        make_trainer(device).fit(Greedy(config, has_own_dropout=False), make_loader(config))
    return type(raised.value).__name__, "\n".join(raised.value.__notes__)


@each_device
def test_an_error_of_used_up_memory_says_what_held_it(device: str) -> None:
    [(kind, told)] = run_on_ranks(1, notes, device, init=False)
    assert kind == ("OutOfMemoryError" if device == "cuda" else "RuntimeError")
    found = re.search(r"rank 0 held from step to step, in GB: weights (\S+), gradients (\S+), moments (\S+);", told)
    assert found is not None, told
    weights, gradients, moments = map(float, found.groups())
    # An allocator takes blocks of 512 bytes for each.
    parameters = cost.model_parameters(CONFIGS[device])
    assert weights == pytest.approx(4e-9 * parameters, rel=0.2) and moments == pytest.approx(2 * weights, rel=0.1)
    assert gradients == pytest.approx(weights, rel=0.1)
