"""A dry run against one of all microbatches, and against the same code on real tensors."""

import gc
import os
import weakref
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_megatron import MoEConfig, RouterConfig
from lightning_megatron.context.config import ContextConfig
from lightning_megatron.mesh import Sizes
from lightning_megatron.models import BertConfig, GPTConfig, LlavaConfig, T5Config
from lightning_megatron.models.vision import VisionConfig
from lightning_megatron.moe.capacity import ExpertCapacity
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.planner.dry_rank import FullModel, build_rank
from lightning_megatron.planner.dry_run import DryRun, DryRuns, dry_run, global_rank, num_needed, shown_ranks
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.run import Run, faults_of
from lightning_megatron.planner.trainable import Trainable
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.precision.kernels import KernelConfig
from lightning_megatron.transformer.lora import LoraConfig
from lightning_megatron.transformer.recompute import RecomputeConfig
from tests.harness.sample import WHOLE, each_setting, every_nth

SIZES: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 32768}
GPT = GPTConfig(num_layers=8, max_sequence_length=2048, **SIZES)
GATED: dict[str, Any] = {
    "num_layers": 8,
    "max_sequence_length": 2048,
    "position": "rotary",
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "num_query_groups": 4,
    "ffn_hidden_size": 2816,
    "tie_embeddings": False,
}
DROPS = replace(GPT, attention_dropout=0.1, hidden_dropout=0.1)
LLAMA = GPTConfig(**SIZES, **GATED)
SHALLOW = replace(LLAMA, num_layers=4, vocab_size=8192)
EXPERTS = MoEConfig(router=RouterConfig(num_experts=8, top_k=2), ffn_hidden_size=1408)
MIXTRAL = GPTConfig(**SIZES, **GATED, moe=EXPERTS)
SHARED = GPTConfig(**SIZES, **GATED, moe=replace(EXPERTS, shared_expert_intermediate_size=1408))
BERT = BertConfig(num_layers=8, max_sequence_length=512, **SIZES)
T5 = T5Config(num_layers=8, num_decoder_layers=8, max_sequence_length=512, max_decoder_sequence_length=128, **SIZES)
VISION = VisionConfig(num_layers=4, hidden_size=512, num_attention_heads=8, image_size=224, patch_size=14)
LLAVA = LlavaConfig(**SIZES, **GATED, vision=VISION, image_token=5)
DISTRIBUTED = OptimizerConfig(kind="distributed")


def run_of(
    model: Any, sizes: Sizes, *, samples: int = 8, lengths: SequenceLengths | None = None, **changes: Any
) -> Run:
    lengths = SequenceLengths(sequence=2048) if lengths is None else lengths
    run = Run(model=model, lengths=lengths, sizes=sizes, global_batch_size=sizes.dp * samples, **changes)
    assert faults_of(run) == []
    return run


def selective(*parts: str) -> RecomputeConfig:
    return RecomputeConfig(granularity="selective", parts=parts)  # type: ignore[arg-type]


def lora(*targets: str) -> Trainable:
    return Trainable(lora=LoraConfig(targets=targets))  # type: ignore[arg-type]


SHORT, PAIRS = SequenceLengths(sequence=512), SequenceLengths(sequence=512, decoder_sequence=128)
PACKED_PAIRS = replace(PAIRS, are_packed=True)
IMAGES = SequenceLengths(sequence=1024, images=1)
RUNS = {
    "one rank": run_of(GPT, Sizes()),
    "tp without sp": run_of(GPT, Sizes(world=4, tp=4)),
    "tp, sp, pp": run_of(GPT, Sizes(world=16, tp=2, pp=4, sequence_parallel=True), optimizer=DISTRIBUTED),
    "gated, groups, untied": run_of(LLAMA, Sizes(world=4, pp=2), optimizer=DISTRIBUTED),
    "gated with tp and sp": run_of(LLAMA, Sizes(world=4, tp=2, sequence_parallel=True), optimizer=DISTRIBUTED),
    "full recomputation": run_of(GPT, Sizes(world=4, pp=4), recompute=RecomputeConfig(granularity="full")),
    "norm and activation recomputed": run_of(LLAMA, Sizes(world=2, pp=2), recompute=selective("norm", "activation")),
    "norm and mlp recomputed": run_of(LLAMA, Sizes(world=2, pp=2), recompute=selective("norm", "mlp")),
    "interleaved": run_of(GPT, Sizes(world=4, pp=4, vp=2)),
    "zb-h1": run_of(GPT, Sizes(world=4, pp=4), schedule_name="zb_h1"),
    "zb-h1 with tp and sp": run_of(
        GPT,
        Sizes(world=4, tp=2, pp=2, sequence_parallel=True),
        schedule_name="zb_h1",
        recompute=RecomputeConfig(granularity="full"),
    ),
    "zb-v": run_of(GPT, Sizes(world=4, pp=4, vp=2, placement="v"), schedule_name="zb_v"),
    "dualpipe-v": run_of(GPT, Sizes(world=4, pp=4, vp=2, placement="v"), schedule_name="dualpipe_v"),
    "dualpipe-v, gated, untied": run_of(
        LLAMA,
        Sizes(world=4, pp=2, vp=2, placement="v"),
        schedule_name="dualpipe_v",
        optimizer=DISTRIBUTED,
    ),
    "zb-h1, blocks recomputed": run_of(
        GPT,
        Sizes(world=4, pp=4),
        lengths=SHORT,
        micro_batch_size=2,
        schedule_name="zb_h1",
        recompute=RecomputeConfig(granularity="full", method="block", num_layers=1),
    ),
    "all forwards first, two chunks": run_of(
        replace(GPT, num_layers=4), Sizes(world=2, pp=2, vp=2), lengths=SHORT, schedule_name="gpipe"
    ),
    "saved inputs cut over tp": run_of(
        GPT,
        Sizes(world=8, tp=8),
        recompute=RecomputeConfig(granularity="full", shard_saved_inputs=True),
        micro_batch_size=8,
    ),
    "zb-v, ReLU, norms recomputed": run_of(
        replace(GPT, activation="relu"),
        Sizes(world=4, pp=4, vp=2, placement="v"),
        lengths=SHORT,
        micro_batch_size=4,
        schedule_name="zb_v",
        recompute=selective("norm"),
    ),
    "zb-v, dropped attention recomputed": run_of(
        replace(GPT, attention_dropout=0.1),
        Sizes(world=2, pp=2, vp=2, placement="v"),
        lengths=SHORT,
        micro_batch_size=2,
        schedule_name="zb_v",
        recompute=RecomputeConfig(granularity="full"),
    ),
    "cp": run_of(LLAMA, Sizes(world=4, cp=2, pp=2)),
    "loss and messages in chunks": run_of(
        LLAMA,
        Sizes(world=4, tp=2, pp=2, sequence_parallel=True),
        micro_batch_size=2,
        kernels=KernelConfig(loss_chunk_tokens=1024, num_tp_overlap_chunks=4),
    ),
    "bf16-true": run_of(GPT, Sizes(world=2), precision="bf16-true"),
    "float32": run_of(GPT, Sizes(world=2), precision="32-true", optimizer=DISTRIBUTED),
    "float64": run_of(SHALLOW, Sizes(world=2, pp=2), lengths=SHORT, precision="64-true"),
    "gradients in 16 bits": run_of(
        GPT, Sizes(world=4), optimizer=OptimizerConfig(kind="distributed", grad_dtype="bfloat16")
    ),
    "BERT": run_of(BERT, Sizes(world=4, tp=2, pp=2, sequence_parallel=True), lengths=SHORT, micro_batch_size=4),
    "BERT with dropout": run_of(
        replace(BERT, attention_dropout=0.1, hidden_dropout=0.1),
        Sizes(world=2, pp=2),
        lengths=SHORT,
        micro_batch_size=4,
    ),
    "BERT, zb-v": run_of(
        replace(BERT, vocab_size=4096),
        Sizes(world=8, tp=2, pp=4, vp=2, placement="v"),
        lengths=SHORT,
        micro_batch_size=4,
        schedule_name="zb_v",
    ),
    "post-norm BERT": run_of(replace(BERT, norm_placement="post"), Sizes(world=2), lengths=SHORT, micro_batch_size=4),
    "T5": run_of(T5, Sizes(world=4, pp=4), lengths=PAIRS, micro_batch_size=4),
    "T5, both look-ups on a stage": run_of(
        replace(T5, num_layers=2, num_decoder_layers=2, vocab_size=16384),
        Sizes(world=2, pp=2),
        lengths=PAIRS,
        micro_batch_size=4,
        samples=16,
        precision="bf16-true",
    ),
    "T5 of few layers": run_of(
        replace(T5, num_layers=2, num_decoder_layers=2), Sizes(world=2, pp=2), lengths=PAIRS, micro_batch_size=2
    ),
    "T5, zb-h1, ReLU recomputed": run_of(
        replace(T5, num_layers=4, num_decoder_layers=4, vocab_size=4096),
        Sizes(world=4, pp=4),
        lengths=PAIRS,
        samples=4,
        micro_batch_size=2,
        schedule_name="zb_h1",
        recompute=selective("activation"),
    ),
    "BERT in float32": run_of(BERT, Sizes(), lengths=SHORT, micro_batch_size=4, precision="32-true"),
    "T5 in float32": run_of(T5, Sizes(world=2, pp=2), lengths=PAIRS, micro_batch_size=4, precision="32-true"),
    "grouped queries in float32": run_of(LLAMA, Sizes(world=2, pp=2), precision="32-true"),
    "cp of four": run_of(replace(GPT, num_layers=4), Sizes(world=8, pp=2, cp=4), micro_batch_size=4),
    "cp of four, gathered": run_of(
        replace(GPT, num_layers=4), Sizes(world=8, pp=2, cp=4, cp_exchange="all_gather"), micro_batch_size=4
    ),
    "cp of four, zb-h1": run_of(
        replace(GPT, num_layers=4), Sizes(world=8, pp=2, cp=4), micro_batch_size=4, schedule_name="zb_h1"
    ),
    "cp of four in float32": run_of(
        replace(GPT, num_layers=4), Sizes(world=8, pp=2, cp=4), micro_batch_size=4, precision="32-true"
    ),
    "heads exchanged over cp, zb-v": run_of(
        replace(GPT, num_layers=4, vocab_size=8192),
        Sizes(world=4, pp=2, vp=2, cp=2, cp_ulysses=2, placement="v"),
        context=ContextConfig(comm_type="all_to_all"),
        schedule_name="zb_v",
        micro_batch_size=4,
    ),
    "cp in float32": run_of(LLAMA, Sizes(world=2, cp=2), precision="32-true"),
    "LLaVA, all recomputed": run_of(
        LLAVA, Sizes(world=2, pp=2), lengths=IMAGES, recompute=RecomputeConfig(granularity="full"), micro_batch_size=2
    ),
    "LLaVA, layers recomputed": run_of(
        LLAVA,
        Sizes(),
        lengths=IMAGES,
        recompute=RecomputeConfig(granularity="full", method="block", num_layers=5),
        micro_batch_size=2,
    ),
    "LLaVA": run_of(LLAVA, Sizes(world=2, tp=2, sequence_parallel=True), lengths=IMAGES),
    "a frozen tower": run_of(
        LLAVA, Sizes(world=2, pp=2), lengths=IMAGES, trained=Trainable(frozen=("vision",)), optimizer=DISTRIBUTED
    ),
    "a frozen tower over four stages": run_of(
        LLAVA, Sizes(world=4, pp=4), lengths=IMAGES, trained=Trainable(frozen=("vision",)), optimizer=DISTRIBUTED
    ),
    "frozen language": run_of(
        LLAVA, Sizes(world=4, pp=4), lengths=IMAGES, trained=Trainable(frozen=("language",)), optimizer=DISTRIBUTED
    ),
    "frozen language, zb-v": run_of(
        replace(LLAVA, num_layers=4),
        Sizes(world=2, pp=2, vp=2, placement="v"),
        lengths=IMAGES,
        trained=Trainable(frozen=("language",)),
        schedule_name="zb_v",
    ),
    "LoRA adapters": run_of(
        LLAMA,
        Sizes(world=4, tp=2, sequence_parallel=True),
        trained=Trainable(lora=LoraConfig(rank=16)),
        micro_batch_size=2,
    ),
    "LoRA adapters, norms recomputed": run_of(
        LLAMA,
        Sizes(world=2, pp=2),
        trained=Trainable(lora=LoraConfig(rank=16)),
        recompute=selective("norm"),
        micro_batch_size=2,
    ),
    "LoRA adapters in FP8": run_of(
        LLAMA, Sizes(world=2, pp=2), trained=Trainable(lora=LoraConfig(rank=16)), fp8=Fp8Config(), micro_batch_size=2
    ),
    "LoRA adapters, all recomputed": run_of(
        LLAMA,
        Sizes(world=2, pp=2),
        trained=Trainable(lora=LoraConfig(rank=16)),
        recompute=RecomputeConfig(granularity="full"),
        micro_batch_size=2,
    ),
    "LoRA adapters, dropout": run_of(
        replace(SHALLOW, hidden_size=512, num_attention_heads=8, ffn_hidden_size=1408),
        Sizes(world=2, pp=2),
        lengths=SequenceLengths(sequence=1024),
        trained=Trainable(lora=LoraConfig(rank=16, dropout=0.1)),
        micro_batch_size=4,
    ),
    "LoRA adapters, pairs of layers recomputed": run_of(
        SHALLOW,
        Sizes(),
        trained=Trainable(lora=LoraConfig(rank=16)),
        recompute=RecomputeConfig(granularity="full", num_layers=2),
        micro_batch_size=2,
    ),
    "LoRA adapters, zb-v": run_of(
        SHALLOW,
        Sizes(world=2, pp=2, vp=2, placement="v"),
        trained=Trainable(lora=LoraConfig(rank=16)),
        schedule_name="zb_v",
        micro_batch_size=2,
    ),
    "LoRA adapters in a T5": run_of(
        T5,
        Sizes(world=2, pp=2),
        lengths=PAIRS,
        micro_batch_size=4,
        trained=Trainable(lora=LoraConfig(targets=("attention.qkv", "cross_attention.key_value"))),
    ),
    "a LoRA adapter of cross-attention queries": run_of(
        replace(T5, num_layers=4, num_decoder_layers=4),
        Sizes(world=4, pp=4),
        lengths=PAIRS,
        micro_batch_size=4,
        trained=lora("cross_attention.query"),
    ),
    "a LoRA adapter after cross-attention": run_of(
        replace(T5, num_layers=1, num_decoder_layers=1, vocab_size=8192),
        Sizes(),
        lengths=SequenceLengths(sequence=128, decoder_sequence=512),
        micro_batch_size=4,
        precision="32-true",
        trained=lora("cross_attention.projection"),
    ),
    "a LoRA adapter after attention dropout": run_of(
        replace(DROPS, num_layers=2), Sizes(), micro_batch_size=2, trained=lora("attention.projection")
    ),
    "a LoRA adapter at the end of a layer": run_of(
        replace(LLAMA, num_layers=2, vocab_size=8192), Sizes(), micro_batch_size=2, trained=lora("mlp.down")
    ),
    "a LoRA adapter in a post-norm BERT": run_of(
        replace(BERT, num_layers=4, norm_placement="post"),
        Sizes(world=2, pp=2),
        lengths=SHORT,
        micro_batch_size=4,
        trained=lora("mlp.down"),
    ),
    "LoRA adapters with packed documents": run_of(
        GPT,
        Sizes(world=2, pp=2),
        lengths=SequenceLengths(sequence=2048, are_packed=True),
        trained=Trainable(lora=LoraConfig(targets=("attention.qkv",))),
    ),
    "LoRA adapters with experts": run_of(
        replace(SHARED, moe=replace(EXPERTS, shared_expert_intermediate_size=1408, shared_expert_gate=True)),
        Sizes(world=4, tp=2, ep=2, sequence_parallel=True),
        trained=Trainable(lora=LoraConfig(rank=16, targets=("attention.qkv", "shared.down"))),
        micro_batch_size=4,
    ),
    "LoRA adapters with experts, all recomputed": run_of(
        replace(MIXTRAL, num_layers=2, vocab_size=4096),
        Sizes(world=4, ep=4),
        lengths=SHORT,
        trained=lora("attention.qkv", "attention.projection"),
        recompute=RecomputeConfig(granularity="full"),
        precision="32-true",
        micro_batch_size=4,
    ),
    "LoRA adapters, experts recomputed": run_of(
        MIXTRAL,
        Sizes(world=8, ep=4, pp=2),
        trained=Trainable(lora=LoraConfig(rank=16, targets=("attention.qkv",))),
        recompute=selective("moe"),
        micro_batch_size=4,
    ),
    "FP8": run_of(replace(GPT, num_layers=4), Sizes(world=2, pp=2), samples=4, fp8=Fp8Config(), schedule_name="gpipe"),
    "MXFP8": run_of(
        replace(GPT, num_layers=4),
        Sizes(world=4, pp=2, tp=2, sequence_parallel=True),
        fp8=Fp8Config(scaling="mxfp8", format="e4m3"),
    ),
    "MXFP8, frozen but for adapters": run_of(
        LLAMA,
        Sizes(world=2, pp=2),
        trained=Trainable(lora=LoraConfig(rank=16)),
        fp8=Fp8Config(scaling="mxfp8"),
        micro_batch_size=2,
    ),
    "window": run_of(replace(LLAMA, sliding_window=512), Sizes(world=2, pp=2)),
    "dropout": run_of(DROPS, Sizes(world=4, pp=2, tp=2, sequence_parallel=True)),
    "features dropped in the MLP": run_of(replace(LLAMA, ffn_dropout=0.1), Sizes(world=2, pp=2), micro_batch_size=2),
    "dropout, attention recomputed": run_of(
        DROPS, Sizes(world=2, pp=2), recompute=selective("core_attention"), micro_batch_size=2
    ),
    "dropout in float32": run_of(
        replace(SHALLOW, attention_dropout=0.1), Sizes(), lengths=SHORT, precision="32-true", micro_batch_size=4
    ),
    "LLaVA with dropout, layers recomputed": run_of(
        replace(LLAVA, num_layers=4, vocab_size=4096, attention_dropout=0.1, hidden_dropout=0.1),
        Sizes(),
        samples=2,
        lengths=IMAGES,
        recompute=RecomputeConfig(granularity="full", method="block", num_layers=5),
        micro_batch_size=2,
    ),
    "experts recomputed": run_of(
        SHARED, Sizes(world=8, ep=4, pp=2), optimizer=DISTRIBUTED, recompute=selective("moe"), micro_batch_size=4
    ),
    "experts, norms recomputed": run_of(
        replace(MIXTRAL, vocab_size=4096),
        Sizes(world=8, ep=8),
        samples=16,
        lengths=SHORT,
        optimizer=DISTRIBUTED,
        recompute=selective("norm"),
        micro_batch_size=16,
    ),
    "experts in bf16-true, zb-h1": run_of(
        replace(MIXTRAL, num_layers=4, vocab_size=4096),
        Sizes(world=8, ep=4, pp=2),
        precision="bf16-true",
        schedule_name="zb_h1",
        micro_batch_size=4,
    ),
    "experts without gates": run_of(
        replace(MIXTRAL, num_layers=2, vocab_size=4096, activation="gelu"), Sizes(world=2, ep=2), micro_batch_size=4
    ),
    "many small experts": run_of(
        replace(
            MIXTRAL,
            num_layers=2,
            vocab_size=4096,
            moe=replace(EXPERTS, router=RouterConfig(num_experts=32, top_k=8), ffn_hidden_size=256),
        ),
        Sizes(world=4, ep=4),
        precision="bf16-true",
        micro_batch_size=4,
    ),
    "experts of few tokens": run_of(
        replace(MIXTRAL, num_layers=2, vocab_size=1024),
        Sizes(world=4),
        lengths=SequenceLengths(sequence=256),
        precision="bf16-true",
        optimizer=DISTRIBUTED,
    ),
    "experts in FP8": run_of(MIXTRAL, Sizes(world=8, ep=4, pp=2), optimizer=DISTRIBUTED, fp8=Fp8Config()),
    "experts in MXFP8": run_of(
        MIXTRAL, Sizes(world=8, ep=4, pp=2), optimizer=DISTRIBUTED, fp8=Fp8Config(scaling="mxfp8")
    ),
    "experts in FP8 on one rank": run_of(
        replace(
            MIXTRAL,
            num_layers=4,
            moe=replace(EXPERTS, router=RouterConfig(num_experts=4, top_k=2)),
            tie_embeddings=True,
            vocab_size=8192,
        ),
        Sizes(world=16, tp=4, pp=4, sequence_parallel=True),
        samples=4,
        lengths=SequenceLengths(sequence=1024),
        optimizer=DISTRIBUTED,
        fp8=Fp8Config(),
    ),
    "experts, padded capacity": run_of(
        replace(MIXTRAL, moe=replace(EXPERTS, capacity=ExpertCapacity(factor=2.0, pad_to_capacity=True))),
        Sizes(world=8, ep=2, cp=2, pp=2),
        optimizer=DISTRIBUTED,
        fp8=Fp8Config(),
        micro_batch_size=2,
    ),
    "experts, most choices dropped": run_of(
        replace(MIXTRAL, moe=replace(EXPERTS, capacity=ExpertCapacity(factor=0.25))),
        Sizes(world=4, ep=4),
        micro_batch_size=2,
    ),
    "a large vocabulary": run_of(replace(GPT, num_layers=2), Sizes(world=2, pp=2), lengths=SHORT),
    "accumulated": run_of(GPT, Sizes(world=4, pp=2), num_accumulated=3, optimizer=DISTRIBUTED),
    "accumulated without a schedule": run_of(GPT, Sizes(), num_accumulated=3, samples=4, micro_batch_size=4),
    "packed documents": run_of(
        LLAMA, Sizes(world=2, tp=2, sequence_parallel=True), lengths=SequenceLengths(sequence=2048, are_packed=True)
    ),
    "packed documents in FP8": run_of(
        replace(LLAMA, num_layers=4, vocab_size=2048),
        Sizes(),
        lengths=SequenceLengths(sequence=1024, are_packed=True),
        fp8=Fp8Config(),
        micro_batch_size=8,
        optimizer=DISTRIBUTED,
    ),
    "packed T5": run_of(
        replace(T5, position="learned"), Sizes(world=4, pp=4), lengths=PACKED_PAIRS, micro_batch_size=4
    ),
    "packed T5, dropout": run_of(
        replace(T5, num_layers=2, num_decoder_layers=2, attention_dropout=0.1, hidden_dropout=0.1),
        Sizes(),
        samples=4,
        lengths=PACKED_PAIRS,
        micro_batch_size=4,
    ),
    "images shared out over cp": run_of(
        replace(LLAVA, num_layers=2, vocab_size=2048),
        Sizes(world=2, cp=2),
        lengths=replace(IMAGES, images=3),
        micro_batch_size=3,
        samples=6,
    ),
    "packed LLaVA": run_of(LLAVA, Sizes(world=2, pp=2), lengths=replace(IMAGES, are_packed=True)),
    "Transformer Engine": run_of(
        GPT,
        Sizes(world=4, pp=2, tp=2, sequence_parallel=True),
        precision="bf16-true",
        fp8=Fp8Config(engine="transformer_engine", scaling="delayed"),
    ),
    "experts": run_of(MIXTRAL, Sizes(world=4, ep=4), optimizer=DISTRIBUTED),
    "experts, overlapped": run_of(MIXTRAL, Sizes(world=8, ep=4, pp=2), optimizer=DISTRIBUTED, is_overlapped=True),
    "experts with materialised scores, overlapped": run_of(
        replace(MIXTRAL, num_layers=4, vocab_size=8192),
        Sizes(world=4, pp=2, ep=2),
        precision="32-true",
        is_overlapped=True,
    ),
    "some experts, overlapped in chunks": run_of(
        replace(SHARED, moe=replace(EXPERTS, layer_freq=2, shared_expert_intermediate_size=1408)),
        Sizes(world=4, ep=2, pp=2, vp=2),
        samples=6,
        is_overlapped=True,
    ),
    "experts on one rank, overlapped": run_of(MIXTRAL, Sizes(), is_overlapped=True),
    "experts, one shared": run_of(
        SHARED, Sizes(world=8, tp=2, pp=2, ep=2, sequence_parallel=True), optimizer=DISTRIBUTED
    ),
}


def stage_rank(run: Run, index: int) -> int:
    """The first global rank of a pipeline rank."""
    return (run.sizes.pp - 1 - index) * (run.sizes.world // run.sizes.pp)


def factors_of(name: str) -> dict[str, Hashable]:
    """Properties of runs that change what a microbatch does."""
    run = RUNS[name]
    return {
        "model": (type(run.model), getattr(run.model, "moe", None) is not None),
        "schedule": (run.sizes.vp > 1, run.schedule_name),
        "precision": run.precision,
        "recompute": run.recompute.granularity,
        "trained": (run.trained.lora is not None, bool(run.trained.frozen)),
        "fp8": run.fp8.scaling if run.fp8 is not None else None,
        "packed": run.lengths.are_packed,
    }


# Those with few stages come first: each of them is walked through.
BY_STAGES = sorted(RUNS, key=lambda name: RUNS[name].sizes.num_stages)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", list(RUNS) if WHOLE in os.environ else each_setting(BY_STAGES, factors_of))
def test_few_microbatches_and_equal_stages_stand_for_a_whole_step(name: str) -> None:
    run, full_model = with_more_microbatches(RUNS[name]), FullModel(RUNS[name])
    some, whole = (DryRuns(run, full_model, is_whole=is_whole) for is_whole in (False, True))
    for index in range(run.sizes.pp):
        found, expected = (runs.of(global_rank(run, index, 0)) for runs in (some, whole))
        assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=1e-3), f"pipeline rank {index}"
        assert found.flops == expected.flops and found.messages == expected.messages, f"pipeline rank {index}"


def with_more_microbatches(run: Run) -> Run:
    """The run with more microbatches than have to be walked through."""
    number = max(run.num_microbatches, (4 if run.sizes.pp == 1 else num_needed(run)) + 1)
    return replace(run, global_batch_size=run.sizes.dp * run.micro_batch_size * number)


SMALL = GPTConfig(num_layers=8, hidden_size=64, num_attention_heads=4, vocab_size=256, max_sequence_length=64)


SMALL_EXPERTS = replace(EXPERTS, ffn_hidden_size=64)


def small(sizes: Sizes, samples: int, model: GPTConfig = SMALL, **changes: Any) -> Run:
    return run_of(model, sizes, samples=samples, lengths=SequenceLengths(sequence=64), **changes)


@pytest.mark.parametrize(
    ("sizes", "schedule"),
    every_nth(
        [
            (Sizes(world=4, pp=2, tp=2, sequence_parallel=True), "1f1b"),
            (Sizes(world=2, pp=2), "zb_h1"),
            (Sizes(world=2, pp=2, vp=2), "interleaved"),
            (Sizes(world=2, pp=2, vp=2, placement="v"), "zb_v"),
            (Sizes(world=2, pp=2, vp=2, placement="v"), "dualpipe_v"),
        ],
        2,
    ),
)
def test_some_microbatches_stand_for_all(sizes: Sizes, schedule: str) -> None:
    # These schedules need seven microbatches at most, so nine are more than are needed.
    run = small(sizes, 9, replace(SMALL, num_layers=4), schedule_name=schedule, optimizer=DISTRIBUTED)
    full_model = FullModel(run)
    for rank in shown_ranks(run):
        some, everything = (
            dry_run(run, rank, full_model=full_model),
            dry_run(run, rank, full_model=full_model, is_whole=True),
        )
        assert some.num_run <= num_needed(run) < everything.num_run == 9
        assert some.peak_bytes == everything.peak_bytes and some.peak_by_kind == everything.peak_by_kind
        assert some.flops == everything.flops
        assert some.messages == everything.messages and some.messages


def test_a_collective_step_runs_few_layers_and_all_microbatches() -> None:
    sizes = Sizes(world=4, pp=2, tp=2, sequence_parallel=True)
    run = small(sizes, 5, replace(SMALL, num_layers=10), is_collective=True)
    several = replace(run, num_accumulated=3)
    in_turn = DryRuns(replace(run, is_collective=False, schedule_name="gpipe"))
    # Each asks for the first stage first, which hears of the last one.
    few, whole, accumulated = DryRuns(run), DryRuns(run, is_whole=True), DryRuns(several)
    for index in range(2):
        rank = global_rank(run, index, 0)
        found, expected, alike = few.of(rank), whole.of(rank), in_turn.of(rank)
        assert found.peak_bytes == expected.peak_bytes > alike.peak_bytes and found.num_run == 5
        assert found.flops == expected.flops == alike.flops and found.messages == expected.messages
        assert found.messages["pp", "broadcast"].number == 2
        assert [one.flops for one in found.passes] == [one.flops for one in alike.passes]
        assert accumulated.of(rank).flops == {kind: 3 * number for kind, number in found.flops.items()}


def test_the_code_on_real_tensors_holds_and_multiplies_as_much() -> None:
    run = replace(
        RUNS["one rank"],
        model=replace(SMALL, num_layers=4, hidden_size=256),
        lengths=SequenceLengths(sequence=64),
        micro_batch_size=4,
    )
    run = replace(run, global_batch_size=16)
    for precision in ("32-true", "bf16-mixed"):
        one = replace(run, precision=precision)
        dry, real = dry_run(one, 0), dry_run(one, 0, device=torch.device("cpu"))
        assert dry.peak_bytes == pytest.approx(real.peak_bytes, rel=0.02)
        assert dry.flops == real.flops and sum(real.flops.values()) > 0


def test_what_runs_side_by_side_is_counted_where_it_belongs() -> None:
    model = replace(SMALL, num_layers=2, moe=SMALL_EXPERTS, add_bias_linear=False)
    run = small(Sizes(world=4, pp=2, ep=2), 7, model=model, optimizer=DISTRIBUTED)
    full_model, joint, rank = FullModel(run), replace(run, is_overlapped=True), stage_rank(run, 0)
    in_turn, overlap = (dry_run(one, rank, full_model=full_model) for one in (run, joint))
    assert overlap.flops == in_turn.flops and overlap.messages == in_turn.messages
    # Dispatched tokens, their probabilities and combined tokens, forward and backward, of a layer a stage.
    assert overlap.messages["dp+cp=ep", "all-to-all"].number == 7 * 6
    all_in_turn, all_overlap = (dry_run(one, rank, full_model=full_model, is_whole=True) for one in (run, joint))
    # Routers keep a few numbers of each microbatch.
    of_each = (all_in_turn.peak_bytes - in_turn.peak_bytes) / (7 - num_needed(run))
    assert 0 < of_each < 5000 and all_overlap.peak_bytes - overlap.peak_bytes == of_each * (7 - num_needed(joint))
    assert overlap.peak_bytes > in_turn.peak_bytes + of_each * (num_needed(joint) - num_needed(run))


def test_a_packed_t5_runs_dry_document_by_document() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}
    model = T5Config(num_layers=2, num_decoder_layers=1, max_sequence_length=512, position="learned", **sizes)
    run = run_of(model, Sizes(), lengths=PAIRS, samples=4, micro_batch_size=4)
    plain, packed = dry_run(run, 0), dry_run(replace(run, lengths=PACKED_PAIRS), 0)
    # The attention output of two encoder layers, saved by head and by token.
    assert packed.peak_bytes - plain.peak_bytes > 2 * 4 * 512 * 64 * 2
    assert packed.flops == plain.flops


def messages_of(one: DryRun, axis: str, kind: str) -> tuple[int, float]:
    found = one.messages[axis, kind]
    return found.number, found.tensor_bytes


def test_messages_are_those_of_the_layers_and_the_optimizer() -> None:
    run = small(Sizes(world=8, tp=2, pp=2, sequence_parallel=True), 21, optimizer=DISTRIBUTED)
    first = dry_run(run, stage_rank(run, 0))
    # A hidden state of 64 tokens over tp, in bfloat16, of each microbatch.
    assert messages_of(first, "pp", "send") == (21, 21 * 64 * 64 * 2 / 2)
    # Each layer has two reduce-scatters in the forward and two in the backward, and the embedding has one.
    assert messages_of(first, "tp", "reduce-scatter") == (21 * (4 * 4 + 1), 21 * (4 * 4 + 1) * 64 * 64 * 2)
    _, padded = messages_of(first, "dp+cp", "reduce-scatter")
    assert 4 * first.parameters <= padded < 4.1 * first.parameters
    # Each batch of a step has its own; gradients are summed once.
    of_three = dry_run(replace(run, num_accumulated=3), stage_rank(run, 0))
    assert messages_of(of_three, "pp", "send") == (3 * 21, 3 * 21 * 64 * 64 * 2 / 2)
    assert of_three.messages["dp+cp", "reduce-scatter"] == first.messages["dp+cp", "reduce-scatter"]
    held = dict(first.peak_by_kind)
    assert held["moments"] == pytest.approx(8 * first.parameters / 2, rel=0.05)


def test_a_rank_that_was_measured_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: list[weakref.ref[Any]] = []

    def noted(*args: Any) -> Any:
        own = build_rank(*args)
        ranks.append(weakref.ref(own.module))
        return own

    monkeypatch.setattr("lightning_megatron.planner.dry_run.build_rank", noted)
    # As in a process that has frozen nothing.
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    for num_layers in (1, 2):
        dry_run(run_of(replace(SHALLOW, num_layers=num_layers), Sizes(world=1)), 0)
    gc.freeze()
    assert [rank() for rank in ranks] == [None, None]
