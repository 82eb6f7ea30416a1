"""LoRA under the Trainer: losses, gradients, norms and weights of one device in plain torch, on every layout."""

import functools
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_megatron import Fp8Config, MegatronStrategy, PipelineConfig, RecomputeConfig
from lightning_megatron.comm.rng import Draws
from lightning_megatron.mesh import Mesh
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.sharding import Initial, sharded_parameters
from lightning_megatron.transformer.init import fill_initial_
from lightning_megatron.transformer.lora import LoraConfig, add_lora
from tests.certificate.cases import BATCH, NUM_STEPS, Layout, batches, config_of
from tests.certificate.runs import SEED, Data, Module, Outcome, Parts, Recorder, Step, make_optimizer
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.reference.lora import ReferenceLora

LORAS = {
    "llama": LoraConfig(rank=3, alpha=6.0, dropout=0.2),
    # Only the adapters have dropout: the model has no keys for its own sake.
    "gpt2": LoraConfig(rank=2, alpha=3.0, targets=("attention.projection", "mlp.up")),
}
LAYOUTS = {
    "cp2": Layout(world=2, cp=2, microbatches=2),
    "one": Layout(world=1, microbatches=3),
    "tp2+sp": Layout(world=2, tp=2, sp=True, microbatches=2),
    "tp2": Layout(world=2, tp=2),
    "pp2 ZB-H1": Layout(world=2, pp=2, microbatches=4, schedule="zb_h1"),
    "pp2": Layout(world=2, pp=2, microbatches=3),
    "pp2 ZB-V tp2+sp": Layout(world=4, tp=2, sp=True, pp=2, vp=2, microbatches=4, schedule="zb_v", clip=0.05),
    "dp2": Layout(world=2),
    "ZeRO dp2 overlap": Layout(world=2, microbatches=2, distributed=True, overlap=True),
    "tp2 pp2": Layout(world=4, tp=2, pp=2, microbatches=3),
    "ZeRO-3 dp2 tp2+sp": Layout(world=4, tp=2, sp=True, microbatches=2, params="gathered"),
    "recompute selective, tp2+sp": Layout(
        world=2,
        tp=2,
        sp=True,
        recompute=RecomputeConfig(granularity="selective", parts=("core_attention", "norm", "activation")),
    ),
    "recompute mlp": Layout(world=1, recompute=RecomputeConfig(granularity="selective", parts=("mlp",))),
    "recompute norm and mlp, tp2": Layout(
        world=2, tp=2, recompute=RecomputeConfig(granularity="selective", parts=("norm", "mlp"))
    ),
    "recompute full, tp2 pp2": Layout(
        world=4, tp=2, pp=2, microbatches=2, recompute=RecomputeConfig(granularity="full", shard_saved_inputs=True)
    ),
}
TOLERANCE = 1e-10  # float64


def build(variant: str, mesh: Mesh | None) -> GPTModel:
    """The model with its paths; B is drawn, for with zeros A would have no gradient in the first step."""
    model = GPTModel(config_of(variant, 4), mesh=mesh, seed=SEED)
    add_lora(model, LORAS[variant], seed=SEED)
    for name, parameter, shard in sharded_parameters(model):
        if name.endswith(".lora.b"):
            fill_initial_(parameter, replace(shard, initial=Initial(std=0.3)), SEED, name)
    return model


class Tuned(Module):
    def configure_model(self) -> None:
        if self.model is None:
            self.model = build(self.variant, None)


@functools.cache
def reference(variant: str, clip: float | None) -> Outcome:
    """The steps by hand: the frozen weights never leave their values."""
    config: GPTConfig = config_of(variant, 4)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        initial = build(variant, Mesh.single())
    finally:
        torch.set_default_dtype(before)
    weights = {name: p.detach().clone() for name, p in initial.named_parameters()}
    trained = {name: w.requires_grad_() for name, w in weights.items() if ".lora." in name}
    optimizer = make_optimizer("sgd", trained.items())
    outcome = Outcome()
    for index, batch in enumerate(batches(variant, torch.float64, NUM_STEPS)):
        optimizer.zero_grad()
        loss = ReferenceLora(config, LORAS[variant], weights, Draws(seed=SEED, step=index)).loss(**batch)
        loss.backward()
        gradients = {name: w.grad.clone() for name, w in trained.items() if w.grad is not None}
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt().item()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(trained.values()), clip)
        optimizer.step()
        outcome.steps.append(Step(losses=[loss.item()], norm=norm, gradients=gradients))
    outcome.weights = {name: w.detach() for name, w in weights.items()}
    return outcome


def fit(layout: Layout, variant: str) -> Outcome:
    """What this rank saw of the same steps under a Trainer."""
    recorder = Recorder()
    strategy = MegatronStrategy(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sp,
        num_microbatches=layout.microbatches,
        virtual_pipeline_model_parallel_size=layout.vp,
        pipeline=PipelineConfig(schedule=layout.schedule),
        optimizer=OptimizerConfig(
            kind=layout.optimizer_kind,
            overlap_grad_reduce=layout.overlap,
            overlap_param_gather=layout.overlap,
            bucket_size=500,
            # The recorder gathers what it reads.
            gather_for_hooks=layout.params == "whole",
        ),
        recompute=layout.recompute,
        timeout_seconds=60,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=layout.world,
        strategy=strategy,
        precision="64-true",
        max_epochs=1,
        gradient_clip_val=layout.clip,
        limit_val_batches=0,
        use_distributed_sampler=False,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Tuned(variant, layout), Data(variant, torch.float64, layout))
    return recorder.outcome


def apart(parts: Parts, full: Tensor) -> float:
    found = 0.0
    for offsets, part in parts:
        place = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
        difference = (part - full[place]).abs()
        assert torch.isfinite(difference).all()
        found = max(found, difference.max().item() if difference.numel() else 0.0)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("variant", LORAS)
@pytest.mark.parametrize("name", every_nth(LAYOUTS, 2))
def test_training_of_the_paths_is_that_of_one_device_in_plain_torch(name: str, variant: str) -> None:
    layout = LAYOUTS[name]
    wanted = reference(variant, layout.clip)
    compared: set[tuple[str, int]] = set()
    for outcome in run_on_ranks(layout.world, fit, layout, variant, init=False, timeout=120):
        for index, (step, expected) in enumerate(zip(outcome.steps, wanted.steps, strict=True)):
            assert abs(step.losses[0] - expected.losses[0]) < TOLERANCE
            assert abs(step.norm - expected.norm) < TOLERANCE
            for parameter, parts in step.gradients.items():
                assert apart(parts, expected.gradients[parameter]) < TOLERANCE, (parameter, index)
                compared.add((parameter, index))
        for parameter, parts in outcome.weights.items():
            # What is frozen is what it was, bit by bit.
            limit = TOLERANCE if ".lora." in parameter else 1e-300
            assert apart(parts, wanted.weights[parameter]) < limit, parameter
    assert compared == {(parameter, i) for i, step in enumerate(wanted.steps) for parameter in step.gradients}
    assert all(g.abs().max() > 1e-4 for step in wanted.steps[:1] for g in step.gradients.values()), "it bites"
    assert BATCH % layout.microbatches == 0


class Losses(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def losses_in(precision: Any, layout: Layout, fp8: Fp8Config | None) -> tuple[list[float], bool]:
    """The losses of a fit in a precision, and whether frozen weights are what they were, bit by bit."""
    losses = Losses()
    strategy = MegatronStrategy(
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.sp,
        num_microbatches=2,
        optimizer=OptimizerConfig(kind="distributed" if layout.distributed else "replicated"),
        fp8=fp8,
        timeout_seconds=60,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=layout.world,
        strategy=strategy,
        precision=precision,
        # Nine steps, in which the loss falls by 0.35. What is rounded away moves weights a little further each step.
        max_epochs=3,
        limit_val_batches=0,
        use_distributed_sampler=False,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Tuned("gpt2", Layout(world=1, rule="adamw"))
    trainer.fit(module, Data("gpt2", torch.float32, layout))
    before, after = Tuned("gpt2", Layout(world=1, rule="adamw")), dict(module.named_parameters())
    with trainer.init_module():
        before.model = build("gpt2", module.model.mesh)
    kept = all(torch.equal(p, after[name]) == (".lora." not in name) for name, p in before.named_parameters())
    return losses.losses, kept


@functools.cache
def wide_losses() -> list[float]:
    """The losses of the fit in float32 on one device."""
    [(wide, kept)] = run_on_ranks(1, losses_in, "32-true", Layout(world=1), None, init=False)
    assert kept and wide[-1] < wide[0] - 0.2
    return wide


@pytest.mark.matrix
@pytest.mark.parametrize("fp8", [None, Fp8Config()], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    "layout",
    [Layout(world=1), Layout(world=2, tp=2, sp=True), Layout(world=2, distributed=True)],
    ids=["one", "tp2+sp", "ZeRO dp2"],
)
def test_narrow_numbers_train_the_paths_as_wide_ones_do(layout: Layout, fp8: Fp8Config | None) -> None:
    wide = wide_losses()
    for narrow, kept in run_on_ranks(layout.world, losses_in, "bf16-mixed", layout, fp8, init=False):
        assert kept
        assert narrow != wide and narrow == pytest.approx(wide, abs=0.005 if fp8 is None else 0.04)
