"""Two ranks that share a device: what travels while it computes changes no number.

NCCL's kernels and the products run on streams of one GPU, and a buffer that is read before its message is there shows
as another loss. On the CPU the same fits run over gloo.
"""

from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_megatron import KernelConfig, MegatronStrategy
from lightning_megatron.optim.config import OptimizerConfig
from tests.gpu.devices import each_device
from tests.gpu.test_fits_on_device import CONFIGS, MICROBATCHES, NUM_STEPS, Model, make_loader
from tests.harness import device as harness_device
from tests.harness.ranks import run_on_ranks

OVERLAPPING = OptimizerConfig(kind="distributed", bucket_size=4000, overlap_grad_reduce=True, overlap_param_gather=True)
LAYOUTS: dict[str, dict[str, Any]] = {
    "sums and weights of ZeRO-1": {"optimizer": OVERLAPPING},
    "weights of ZeRO-3": {"optimizer": OptimizerConfig(kind="distributed_parameters", gather_for_hooks=False)},
    "chunks of tokens": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "kernels": KernelConfig(num_tp_overlap_chunks=2),
    },
    "messages of stages": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "keys of a ring": {"context_parallel_size": 2},
}


class Logged(Model):
    """Losses as they are logged: of the whole batch, on every rank."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))


def losses(device: str, world: int, strategy: dict[str, Any]) -> list[float]:
    """The losses of a fit of global batches of 8 rows."""
    torch.manual_seed(11)
    # Two stages on each of two ranks take a layer each.
    model = Logged(replace(CONFIGS[device], num_layers=4), has_own_dropout=False)
    trainer = L.Trainer(
        **harness_device.trainer_devices(world),
        strategy=MegatronStrategy(num_microbatches=MICROBATCHES, timeout_seconds=60, **strategy),
        max_epochs=1,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    assert trainer.strategy.root_device.type == device
    # A sampler deals rows to data-parallel ranks in turn.
    has_replicas = world > 1 and "optimizer" in strategy
    trainer.fit(model, make_loader(CONFIGS[device], rows=4 if has_replicas else 8))
    return model.losses


@each_device
def test_what_travels_while_a_device_computes_changes_no_number(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ranks read it as they start.
    monkeypatch.setenv(harness_device.CHOICE, device)
    [expected] = run_on_ranks(1, losses, device, 1, {}, init=False, timeout=200)
    assert len(expected) == NUM_STEPS and expected[-1] < expected[0] - 0.1
    # On the CPU other tests run all of them.
    for name, strategy in list(LAYOUTS.items())[:: 1 if device == "cuda" else 4]:
        for found in run_on_ranks(2, losses, device, 2, strategy, init=False, timeout=200):
            # Ranks add in another order, in float32.
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=0, msg=name)
