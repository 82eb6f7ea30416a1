"""Random runs of each kind of model: the few layers and microbatches that a plan measures tell of all of a step."""

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from lightning_megatron import MoEConfig, RouterConfig
from lightning_megatron.mesh import Sizes
from lightning_megatron.models import BertConfig, GPTConfig, LlavaConfig, T5Config
from lightning_megatron.models.vision import VisionConfig
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.planner.dry_run import DryRuns, global_rank, num_needed
from lightning_megatron.planner.measured import measured_rank
from lightning_megatron.planner.memory import WORKSPACE_BYTES
from lightning_megatron.planner.model_parts import Model, SequenceLengths
from lightning_megatron.planner.run import Run, faults_of
from lightning_megatron.planner.trainable import Trainable
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.transformer.lora import LoraConfig
from lightning_megatron.transformer.recompute import RecomputeConfig
from tests.harness.sample import WHOLE

NUM_RUNS = 30
# Sizes of tensors cost nothing, and layers and microbatches do.
SIZES: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 16384}
VISION = VisionConfig(num_layers=4, hidden_size=512, num_attention_heads=8, image_size=224, patch_size=14)


def gpt(draw: Random, num_layers: int) -> GPTConfig:
    return GPTConfig(
        **SIZES,
        num_layers=num_layers,
        max_sequence_length=2048,
        num_query_groups=draw.choice((0, 4)),
        activation=draw.choice(("gelu", "relu", "swiglu")),
        normalization=draw.choice(("layernorm", "rmsnorm")),
        add_bias_linear=draw.random() < 0.5,
        position=draw.choice(("learned", "rotary")),
        sliding_window=draw.choice((0, 0, 256)),
        hidden_dropout=draw.choice((0.0, 0.1)),
        attention_dropout=draw.choice((0.0, 0.0, 0.1)),
        tie_embeddings=draw.random() < 0.5,
        num_mtp_layers=draw.choice((0, 0, 1, 2)),
    )


def experts(draw: Random, num_layers: int) -> GPTConfig:
    moe = MoEConfig(
        router=RouterConfig(num_experts=8, top_k=draw.choice((2, 4))),
        ffn_hidden_size=512,
        layer_freq=draw.choice((1, 1, 2)),
        shared_expert_intermediate_size=draw.choice((0, 512)),
    )
    return replace(gpt(draw, num_layers), add_bias_linear=False, moe=moe)


def bert(draw: Random, num_layers: int) -> BertConfig:
    return BertConfig(
        **SIZES,
        num_layers=num_layers,
        norm_placement=draw.choice(("pre", "post")),
        hidden_dropout=draw.choice((0.0, 0.1)),
        attention_dropout=draw.choice((0.0, 0.1)),
        add_binary_head=draw.random() < 0.5,
    )


def t5(draw: Random, num_layers: int) -> T5Config:
    return T5Config(
        **SIZES,
        num_layers=num_layers,
        num_decoder_layers=num_layers,
        position=draw.choice(("relative", "learned")),
        max_decoder_sequence_length=128,
        hidden_dropout=draw.choice((0.0, 0.1)),
        tie_embeddings=draw.random() < 0.5,
        share_embeddings=draw.random() < 0.5,
    )


def llava(draw: Random, num_layers: int) -> LlavaConfig:
    return LlavaConfig(
        **SIZES,
        num_layers=num_layers,
        max_sequence_length=2048,
        position="rotary",
        normalization="rmsnorm",
        activation="swiglu",
        add_bias_linear=False,
        vision=VISION,
        image_token=5,
    )


KINDS: dict[str, tuple[Callable[[Random, int], Model], SequenceLengths]] = {
    "gpt": (gpt, SequenceLengths(sequence=1024)),
    "experts": (experts, SequenceLengths(sequence=1024)),
    "bert": (bert, SequenceLengths(sequence=512)),
    "t5": (t5, SequenceLengths(sequence=512, decoder_sequence=128)),
    "llava": (llava, SequenceLengths(sequence=1024, images=1)),
}


RECOMPUTES = (
    RecomputeConfig(),
    RecomputeConfig(),
    RecomputeConfig(granularity="selective"),
    RecomputeConfig(granularity="selective", parts=("norm", "activation")),
    RecomputeConfig(granularity="selective", parts=("mlp",)),
    RecomputeConfig(granularity="selective", parts=("moe",)),
    RecomputeConfig(granularity="full"),
    RecomputeConfig(granularity="full", method="block"),
)


def drawn(kind: str, draw: Random) -> Run:
    """A run of this kind, which may have errors."""
    make, lengths = KINDS[kind]
    pp, tp, cp = draw.choice((1, 2, 2, 4)), draw.choice((1, 1, 2)), draw.choice((1, 1, 1, 2))
    ep = draw.choice((1, 2, 4)) if kind == "experts" else 1
    schedules = {1: ["1f1b"]}.get(pp, ["1f1b", "interleaved", "zb_h1", "zb_v", "gpipe"])
    schedule = draw.choice(schedules)
    vp = 2 if schedule in ("interleaved", "zb_v") else 1
    sizes = Sizes(
        world=pp * tp * cp * max(ep, 2),
        tp=tp,
        pp=pp,
        vp=vp,
        cp=cp,
        ep=ep,
        placement="v" if schedule == "zb_v" else "loop",
        sequence_parallel=tp > 1 and draw.random() < 0.8,
    )
    micro = draw.choice((1, 2))
    run = Run(
        model=make(draw, pp * vp * draw.choice((1, 2, 3, 5))),
        lengths=replace(lengths, are_packed=kind == "gpt" and draw.random() < 0.2),
        sizes=sizes,
        global_batch_size=sizes.dp * micro,
        micro_batch_size=micro,
        num_accumulated=draw.choice((1, 1, 1, 3)),
        precision=draw.choice(("bf16-mixed", "bf16-mixed", "bf16-true", "32-true")),
        fp8=Fp8Config() if draw.random() < 0.2 else None,
        optimizer=OptimizerConfig(kind=draw.choice(("replicated", "distributed", "distributed_gradients"))),
        schedule_name=schedule,
        recompute=draw.choice(RECOMPUTES),
        trained=Trainable(
            frozen=draw.choice(((), ("vision",), ("language",))) if kind == "llava" else (),
            lora=LoraConfig(rank=16) if kind in ("gpt", "llava") and draw.random() < 0.15 else None,
        ),
    )
    # More microbatches than have to be walked through.
    number = max(num_needed(run), 3) + 1
    number = -(-number // pp) * pp if schedule == "interleaved" else number
    return replace(run, global_batch_size=sizes.dp * micro * number)


def random_run(kind: str, seed: int) -> Run:
    """The first of the random runs without errors."""
    draw = Random(f"{kind} {seed}")
    return next(run for run in (drawn(kind, draw) for _ in range(1000)) if not faults_of(run))


RUNS = [(kind, seed) for kind in KINDS for seed in range(NUM_RUNS)]
# With one whose backwards are split, and find gradients of others in their buckets.
SAMPLE = [*((kind, 0) for kind in KINDS), ("bert", 11)]


@pytest.fixture
def cycles_are_not_freed() -> Iterator[None]:
    """A tensor in a cycle of references would be held to the end of the step."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("cycles_are_not_freed")
def test_stages_that_do_the_same_in_other_orders_are_measured_each_by_itself() -> None:
    run = replace(
        random_run("bert", 11),
        model=BertConfig(**SIZES, num_layers=8, hidden_dropout=0.0),
        sizes=Sizes(world=8, pp=4),
        global_batch_size=40,
    )
    assert not faults_of(run)
    ranks, middle = DryRuns(run), [global_rank(run, index, 0) for index in (1, 2)]
    both = [ranks.of(rank).peak_bytes for rank in middle]
    assert both == [DryRuns(run).of(rank).peak_bytes for rank in middle]
    assert both[0] != both[1]


@pytest.mark.matrix
@pytest.mark.usefixtures("cycles_are_not_freed")
@pytest.mark.parametrize(("kind", "seed"), RUNS if WHOLE in os.environ else SAMPLE)
def test_a_plan_s_memory_is_that_of_a_whole_step(kind: str, seed: int) -> None:
    run = random_run(kind, seed)
    pp_rank = seed % run.sizes.pp
    planned, whole = measured_rank(run, pp_rank), DryRuns(run, is_whole=True).of(global_rank(run, pp_rank, 0))
    assert planned.allocated - WORKSPACE_BYTES == pytest.approx(whole.peak_bytes, rel=1e-3)
