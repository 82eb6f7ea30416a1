"""A run under the strategy is to the planner what it is to the strategy, and what the planner does not know is told."""

from typing import Any

import lightning as L
import pytest
import torch

from lightning_megatron import MegatronStrategy, OptimizerConfig, PipelineConfig, RecomputeConfig
from lightning_megatron.lightning_modules import BertModule, GPTModule, T5Module
from lightning_megatron.mesh import Sizes
from lightning_megatron.models import BertConfig, GPTConfig, T5Config
from lightning_megatron.planner.anatomy import Texts
from lightning_megatron.planner.run import Run
from lightning_megatron.trainer.planned import NotPlanned, has_frozen_weights, planned_run
from tests.trainer.layouts import QUIET
from tests.trainer.modules import Small

pytestmark = pytest.mark.filterwarnings(QUIET)
SHAPE: dict[str, Any] = {"num_layers": 8, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
GPT = GPTConfig(**SHAPE, max_sequence_length=16)
TOKENS = torch.zeros(8, 16, dtype=torch.int64)
# of a replica


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
    found = planned_run(trainer, {"tokens": TOKENS}, has_frozen=False)
    assert found == Run(
        model=GPT,
        texts=Texts(sequence=16),
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
    found = planned_run(trainer, TOKENS, has_frozen=False)
    assert (found.schedule.name, found.num_microbatches, found.micro_batch_size) == ("zb_v", 4, 2)


def test_bert_and_t5_have_texts_of_their_own() -> None:
    bert = trainer_of(BertModule(BertConfig(**SHAPE, max_sequence_length=16)), world=1)
    assert planned_run(bert, {"tokens": TOKENS}, has_frozen=False).texts == Texts(sequence=16)
    t5 = trainer_of(T5Module(T5Config(**SHAPE, num_decoder_layers=4)), world=1)
    batch = {"encoder_tokens": TOKENS, "decoder_tokens": TOKENS[:, :5]}
    assert planned_run(t5, batch, has_frozen=False).texts == Texts(sequence=16, decoder_sequence=5)
    with pytest.raises(NotPlanned, match="has not encoder_tokens and decoder_tokens"):
        planned_run(t5, {"encoder_tokens": TOKENS}, has_frozen=False)


def test_why_a_run_is_not_planned_is_told() -> None:
    batch = {"tokens": TOKENS}
    for trainer, has_frozen, told in (
        (trainer_of(GPTModule(GPT), world=1, strategy="auto"), False, "under SingleDeviceStrategy"),
        (trainer_of(Small(), world=1), False, "Small has not exactly one configuration"),
        (trainer_of(GPTModule(GPT), world=1), True, "weights are frozen"),
        (trainer_of(GPTModule(GPT), pipeline=PipelineConfig(mode="collective")), False, "keeps all microbatches"),
        (trainer_of(GPTModule(GPT), world=1, precision="64-true"), False, "precision .'64-true'. must be one of"),
    ):
        with pytest.raises(NotPlanned, match=told):
            planned_run(trainer, batch, has_frozen=has_frozen)
    assert not has_frozen_weights(Small())
    frozen = Small()
    frozen.after.bias.requires_grad_(False)
    assert has_frozen_weights(frozen)
