"""A run under the strategy is to the planner what it is to the strategy, and what it does not know is reported."""

from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch

from lightning_megatron import (
    MegatronStrategy,
    MoEConfig,
    OptimizerConfig,
    PipelineConfig,
    RecomputeConfig,
    RouterConfig,
)
from lightning_megatron.lightning_modules import BertModule, GPTModule, LlavaModule, T5Module
from lightning_megatron.mesh import Sizes
from lightning_megatron.models import BertConfig, GPTConfig, GPTModel, LlavaConfig, LlavaModel, T5Config
from lightning_megatron.models.vision import VisionConfig
from lightning_megatron.pipeline.ragged import Ragged
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.trainable import Trainable
from lightning_megatron.trainer.callbacks.plan_adapter import NotPlanned, planned_run, seen_by
from lightning_megatron.transformer.lora import LoraConfig, add_lora
from tests.trainer.layouts import QUIET
from tests.trainer.modules import Small

pytestmark = pytest.mark.filterwarnings(QUIET)
SHAPE: dict[str, Any] = {"num_layers": 8, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
GPT = GPTConfig(**SHAPE, max_sequence_length=16)
# Of a data-parallel rank.
TOKENS = torch.zeros(8, 16, dtype=torch.int64)


def trainer_of(module: L.LightningModule, world: int = 8, precision: Any = "bf16-mixed", **options: Any) -> L.Trainer:
    strategy = options.pop("strategy", None) or MegatronStrategy(**options)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        precision=precision,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.strategy._lightning_module = module
    module.trainer = trainer
    return trainer


def planned(trainer: L.Trainer, batch: Any) -> Run:
    return planned_run(trainer, [seen_by(trainer, batch)])


def test_sizes_batch_and_settings_are_the_strategys() -> None:
    recompute, optimizer = RecomputeConfig(granularity="full"), OptimizerConfig(kind="distributed")
    trainer = trainer_of(
        GPTModule(GPT),
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        num_microbatches=4,
        recompute=recompute,
        optimizer=optimizer,
    )
    found = planned(trainer, {"tokens": TOKENS})
    assert found == Run(
        model=GPT,
        lengths=SequenceLengths(sequence=16),
        sizes=Sizes(world=8, tp=2, pp=2, vp=2, sequence_parallel=True),
        global_batch_size=16,
        micro_batch_size=2,
        precision="bf16-mixed",
        recompute=recompute,
        optimizer=optimizer,
    )
    assert found.num_microbatches == 4


def test_a_schedule_and_the_rows_of_a_microbatch_are_taken_over() -> None:
    pipeline = PipelineConfig(schedule="zb_v")
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    trainer = trainer_of(GPTModule(GPT), world=2, microbatch_size=2, pipeline=pipeline, **sizes)
    # A batch need not be a dict.
    found = planned(trainer, TOKENS)
    assert (found.schedule.name, found.num_microbatches, found.micro_batch_size) == ("zb_v", 4, 2)
    rows = [trainer_of(GPTModule(GPT), world=1, microbatch_size=size) for size in (0, 8)]
    assert [planned(trainer, TOKENS).cuts_by_rows for trainer in rows] == [False, True]


def test_a_step_that_runs_once_for_all_microbatches_is_taken_over() -> None:
    class Manual(GPTModule):
        automatic_optimization = False

    collective = PipelineConfig(mode="collective")
    for module, pipeline in ((GPTModule(GPT), collective), (Manual(GPT), PipelineConfig())):
        for pp, is_cut in ((2, True), (1, False)):
            trainer = trainer_of(
                module,
                world=2,
                pipeline=pipeline,
                pipeline_model_parallel_size=pp,
                num_microbatches=4 if is_cut else 1,
            )
            found = planned(trainer, {"tokens": TOKENS})
            assert (found.is_collective, found.num_microbatches) == (is_cut, 4 if is_cut else 1)


def test_overlapped_forwards_and_backwards_are_taken_over() -> None:
    moe = replace(GPT, moe=MoEConfig(router=RouterConfig(num_experts=4)))
    for does in (False, True):
        pipeline = PipelineConfig(overlap_expert_exchange=does)
        trainer = trainer_of(
            GPTModule(moe), world=4, expert_model_parallel_size=2, num_microbatches=4, pipeline=pipeline
        )
        assert planned(trainer, {"tokens": TOKENS}).schedule.is_overlapped == does


def test_bert_and_t5_have_texts_of_their_own() -> None:
    bert = trainer_of(BertModule(BertConfig(**SHAPE, max_sequence_length=16)), world=1)
    assert planned(bert, {"tokens": TOKENS}).lengths == SequenceLengths(sequence=16)
    t5 = trainer_of(T5Module(T5Config(**SHAPE, num_decoder_layers=4)), world=1)
    batch = {"encoder_tokens": TOKENS, "decoder_tokens": TOKENS[:, :5]}
    assert planned(t5, batch).lengths == SequenceLengths(sequence=16, decoder_sequence=5)
    segments = {"encoder_segments": TOKENS, "decoder_segments": TOKENS[:, :5]}
    assert planned(t5, batch | segments).lengths == SequenceLengths(sequence=16, decoder_sequence=5, are_packed=True)
    with pytest.raises(NotPlanned, match="has not encoder_tokens and decoder_tokens"):
        planned(t5, {"encoder_tokens": TOKENS})


def test_a_plan_is_of_the_batch_of_the_requested_rank() -> None:
    trainer = trainer_of(GPTModule(GPT), world=2, microbatch_size=2)
    ranks = [seen_by(trainer, {"tokens": TOKENS}), seen_by(trainer, {"tokens": TOKENS[:4, :8]})]
    for rank, (length, rows) in enumerate(((16, 8), (8, 4))):
        found = planned_run(trainer, ranks, rank=rank)
        assert (found.lengths, found.global_batch_size) == (SequenceLengths(sequence=length), 2 * rows)
    packed = planned(trainer, {"tokens": TOKENS, "segments": torch.zeros_like(TOKENS)})
    assert packed.lengths == SequenceLengths(sequence=16, are_packed=True)


def lora_of(dropout: float) -> LoraConfig:
    return LoraConfig(rank=4, dropout=dropout, targets=("attention.qkv", "mlp.down"))


def finetuned(*configs: LoraConfig) -> L.LightningModule:
    """A module whose model has the paths of the first, and in its last layer those of the second, if any."""
    module = GPTModule(GPT)
    module.model = GPTModel(GPT, seed=0)
    add_lora(module.model, configs[0], seed=0)
    for config in configs[1:]:
        last = module.model.get_submodule("layers.7")
        for linear in (last.attention.qkv, last.mlp.down):
            linear.lora = None
        add_lora(last, config, seed=0)
    return module


def test_lora_adapters_are_planned_as_they_are() -> None:
    found = planned(trainer_of(finetuned(lora_of(0.1)), world=1), {"tokens": TOKENS})
    # Targets have no order.
    assert found.trained == Trainable(lora=LoraConfig(rank=4, dropout=0.1, targets=("attention.qkv", "mlp.down")))
    with pytest.raises(NotPlanned, match="differ in rank or dropout"):
        planned(trainer_of(finetuned(lora_of(0.1), lora_of(0.0)), world=1), {"tokens": TOKENS})
    partly = finetuned(lora_of(0.0))
    partly.model.get_submodule("layers.0").attention.qkv.weight.requires_grad_(True)
    with pytest.raises(NotPlanned, match="with weights that are trained"):
        planned(trainer_of(partly, world=1), {"tokens": TOKENS})
    # Of a name in some layers alone; elsewhere another stage has those without.
    fewer = finetuned(lora_of(0.1))
    fewer.model.get_submodule("layers.0").mlp.down.lora = None
    with pytest.raises(NotPlanned, match=r"^mlp\.down has LoRA adapters in some layers and none in others"):
        planned(trainer_of(fewer, world=1), {"tokens": TOKENS})
    trainer = trainer_of(finetuned(LoraConfig(targets=("mlp.down",))), world=1)
    other = seen_by(trainer_of(finetuned(LoraConfig(targets=("attention.qkv",))), world=1), {"tokens": TOKENS})
    with pytest.raises(NotPlanned, match=r"^attention\.qkv, mlp\.down has"):
        planned_run(trainer, [seen_by(trainer, {"tokens": TOKENS}), other])


def llava() -> LlavaModule:
    vision = VisionConfig(num_layers=2, hidden_size=16, num_attention_heads=2, image_size=8, patch_size=4)
    module = LlavaModule(LlavaConfig(**SHAPE, max_sequence_length=16, vision=vision, image_token=5))
    module.model = LlavaModel(module.config, seed=0)
    return module


def test_images_are_counted_in_every_form_that_a_model_takes() -> None:
    module = llava()
    trainer, images = trainer_of(module, world=1), torch.zeros(12, 3, 8, 8)
    rows = [images[:2], None, images[:3], *[images[:1]] * 5]
    for form, number in (
        (None, 0),
        (images[:8].view(8, 1, 3, 8, 8), 1),
        (rows, 2),
        (Ragged(images, [5, 7, *[0] * 6]), 2),
        ([None] * 8, 0),
    ):
        found = planned(trainer, {"tokens": TOKENS, "images": form})
        assert found.lengths == SequenceLengths(sequence=16, images=number) and found.global_batch_size == 8
    by_image = {"tokens": TOKENS, "images": images, "image_rows": torch.arange(12) % 8}
    assert planned(trainer, by_image).lengths == SequenceLengths(sequence=16, images=2)
    for form in (images, rows[:3], [rows[0][0]] * 8):
        batch = {"tokens": TOKENS, "images": form}
        with pytest.raises(NotPlanned, match="images"):
            planned(trainer, batch)
        assert seen_by(trainer_of(module, world=1, strategy="auto"), batch).lengths is None


def test_layers_that_never_run_need_no_lora_adapters() -> None:
    module = llava()
    add_lora(module.model, LoraConfig(targets=("attention.qkv",)), seed=0)
    found = planned(trainer_of(module, world=1), {"tokens": TOKENS})
    assert found.trained.lora == LoraConfig(targets=("attention.qkv",))


def test_frozen_parts_are_planned_where_each_is_frozen_as_a_whole() -> None:
    module = llava()
    trainer = trainer_of(module, world=1)
    # What never runs is not trained, and is no frozen part.
    assert planned(trainer, {"tokens": TOKENS}).trained == Trainable()
    module.model.freeze("vision", "language")
    assert planned(trainer, {"tokens": TOKENS}).trained == Trainable(frozen=("vision", "language"))
    other = seen_by(trainer, {"tokens": TOKENS})
    module.model.get_submodule("layers.0").attention.qkv.weight.requires_grad_(True)
    with pytest.raises(NotPlanned, match="no whole part of a LLaVA"):
        planned(trainer, {"tokens": TOKENS})
    # Another rank has the rest of a part.
    module.model.requires_grad_(False)
    module.model.get_submodule("layers").requires_grad_(True)
    with pytest.raises(NotPlanned, match="no whole part of a LLaVA"):
        planned_run(trainer, [seen_by(trainer, {"tokens": TOKENS}), other])


def test_why_a_run_is_not_planned_is_reported() -> None:
    batch = {"tokens": TOKENS}
    frozen = Small()
    frozen.config = GPT
    frozen.after.bias.requires_grad_(False)
    for trainer, shown in (
        (trainer_of(GPTModule(GPT), world=1, strategy="auto"), "under SingleDeviceStrategy"),
        (trainer_of(Small(), world=1), "Small has not exactly one configuration"),
        (trainer_of(frozen, world=1), "weights are frozen"),
    ):
        with pytest.raises(NotPlanned, match=shown):
            planned(trainer, batch)
