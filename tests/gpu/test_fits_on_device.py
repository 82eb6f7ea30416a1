"""Fits on a GPU: what is copied while the device computes is right, and a run resumes where its generators were."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import KernelConfig, MegatronStrategy, RecomputeConfig
from lightning_megatron.checkpoint import is_module_name, load, pieces_of_module
from lightning_megatron.mesh import Axis
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.optim.config import OptimizerConfig
from tests.gpu.devices import each_device
from tests.harness.ranks import run_on_ranks

SMALL = GPTConfig(num_layers=3, hidden_size=32, num_attention_heads=4, vocab_size=64, max_sequence_length=32)
# On a GPU so wide that a copy of a layer's activations takes longer than the host takes to start it.
CONFIGS = {"cpu": SMALL, "cuda": replace(SMALL, hidden_size=1024, vocab_size=1024, max_sequence_length=512)}
NUM_STEPS, MICROBATCHES = 4, 2


class Model(L.LightningModule):
    """A GPT behind which torch's own dropout draws from the device's generator."""

    def __init__(self, config: GPTConfig, *, has_own_dropout: bool) -> None:
        super().__init__()
        self.config, self.has_own_dropout = config, has_own_dropout
        self.losses: list[float] = []

    def configure_model(self) -> None:
        self.model = GPTModel(self.config)
        self.scale = nn.Parameter(torch.ones(64))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch[0], labels=batch[0])
        if self.has_own_dropout:
            # On the device: the mask is that of its default generator.
            loss = loss + nn.functional.dropout(self.scale, 0.5).square().mean()
        return loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Save(L.Callback):
    """Saves after the second step, while the third changes what is saved."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            self.weights = {name: weight.detach().cpu().clone() for name, weight in pl_module.named_parameters()}
            trainer.save_checkpoint(self.path)


def make_loader(config: GPTConfig, rows: int = 8) -> Any:
    shape = (NUM_STEPS * 8, config.max_sequence_length)
    # Few tokens come often: there is something to learn.
    tokens = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) ** 4 * config.vocab_size).long()
    return DataLoader(TensorDataset(tokens), batch_size=rows)


def make_trainer(device: str, callbacks: Sequence[L.Callback] = (), **strategy: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        strategy=MegatronStrategy(**strategy),
        max_epochs=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fitted(
    device: str,
    *,
    callbacks: Sequence[L.Callback] = (),
    has_own_dropout: bool = False,
    path: Path | None = None,
    seed: int = 11,
    **strategy: Any,
) -> Model:
    torch.manual_seed(seed)
    model = Model(CONFIGS[device], has_own_dropout=has_own_dropout)
    trainer = make_trainer(device, callbacks, **strategy)
    assert trainer.strategy.root_device.type == device
    trainer.fit(model, make_loader(CONFIGS[device]), ckpt_path=path)
    return model


def ways_of_a_fit(device: str) -> dict[str, tuple[list[float], list[Tensor]]]:
    """Losses and weights of fits that hold activations, or optimizer states, on the device or on the host."""
    ways: dict[str, dict[str, Any]] = {
        "all on the device": {},
        "activations on the host": {"recompute": RecomputeConfig(offload=True)},
        "layers recomputed": {"recompute": RecomputeConfig(granularity="full")},
        "optimizer on the host": {"optimizer": OptimizerConfig(cpu_offload=True)},
    }
    found = {}
    for name, strategy in ways.items():
        model = fitted(device, num_microbatches=MICROBATCHES, **strategy)
        found[name] = model.losses, [weight.detach().cpu() for weight in model.parameters()]
    return found


@each_device
def test_what_waits_on_the_host_changes_no_number(device: str) -> None:
    [found] = run_on_ranks(1, ways_of_a_fit, device, init=False, timeout=200)
    losses, weights = found.pop("all on the device")
    assert len(losses) == NUM_STEPS and losses[-1] < losses[0] - 0.1
    for name, (other_losses, other_weights) in found.items():
        # The CPU's AdamW rounds otherwise than the GPU's, and all gradients after the first step follow.
        tolerance = 1e-4 if name == "optimizer on the host" else 1e-6
        torch.testing.assert_close(other_losses, losses, rtol=tolerance, atol=0, msg=name)
        for one, other in zip(weights, other_weights, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=100 * tolerance, msg=name)


def resumed(device: str, folder: Path) -> dict[str, list[float]]:
    """Losses of a run, of one that resumes it, and of one with another seed.

    Raises AssertionError where the checkpoint has other weights than those of the moment when it was saved.
    """
    save = Save(folder / "second.ckpt")
    full = fitted(device, has_own_dropout=True, callbacks=[save])
    read = Model(CONFIGS[device], has_own_dropout=True)
    read.configure_model()
    load(save.path, pieces_of_module(read.state_dict(keep_vars=True)), world=Axis.alone(0), among=is_module_name)
    stored = dict(read.named_parameters())
    assert stored.keys() == save.weights.keys()
    assert all(torch.equal(stored[name], weight) for name, weight in save.weights.items())
    assert any(not torch.equal(weight.cpu(), stored[name]) for name, weight in full.named_parameters())
    after = fitted(device, has_own_dropout=True, path=save.path, seed=12)
    other = fitted(device, has_own_dropout=True, seed=12)
    return {"full": full.losses, "resumed": after.losses, "another": other.losses}


@each_device
def test_a_run_resumes_from_memory_of_the_device_with_its_generator(device: str, tmp_path: Path) -> None:
    [found] = run_on_ranks(1, resumed, device, tmp_path, init=False, timeout=200)
    # Additions that a GPU makes in any order; another mask changes a loss by thousandths.
    torch.testing.assert_close(found["resumed"], found["full"][2:], rtol=1e-5, atol=0)
    assert all(abs(one - other) > 1e-3 for one, other in zip(found["full"], found["another"], strict=True))


def compiled(device: str) -> tuple[list[float], list[float], int]:
    """Losses without compiled layers and with them, and how many graphs were compiled."""
    plain = fitted(device, num_microbatches=MICROBATCHES)
    made = fitted(device, num_microbatches=MICROBATCHES, kernels=KernelConfig(compile_layers=True))
    return plain.losses, made.losses, counters["stats"]["unique_graphs"]


@pytest.mark.gpu
def test_kernels_that_inductor_makes_train_as_torchs_do() -> None:
    [(plain, made, num_graphs)] = run_on_ranks(1, compiled, "cuda", init=False, timeout=240)
    # Fused kernels round otherwise, in float32.
    torch.testing.assert_close(made, plain, rtol=1e-5, atol=0)
    assert num_graphs > 0
