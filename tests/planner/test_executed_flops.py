"""What a plan says is executed, against what the code executes, for runs that conventions count otherwise."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_megatron import Fp8Config, MoEConfig, RouterConfig
from lightning_megatron.mesh import Sizes
from lightning_megatron.models import BertConfig, GPTConfig, LlavaConfig, T5Config
from lightning_megatron.models.vision import VisionConfig
from lightning_megatron.moe.capacity import ExpertCapacity
from lightning_megatron.planner.dry_rank import FullModel
from lightning_megatron.planner.dry_run import dry_run
from lightning_megatron.planner.flops import EXECUTED, HARDWARE, MODEL, step_flops
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.run import Run, faults_of
from lightning_megatron.planner.trainable import Trainable
from lightning_megatron.transformer.lora import LoraConfig
from lightning_megatron.transformer.recompute import RecomputeConfig
from tests.harness.sample import every_nth

SIZES: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "vocab_size": 1024}
GPT = GPTConfig(num_layers=2, max_sequence_length=1024, **SIZES)
GATED: dict[str, Any] = {"num_layers": 2, "max_sequence_length": 1024, "activation": "swiglu", "num_query_groups": 2}
LLAMA = GPTConfig(**SIZES, **GATED)
WINDOW = replace(LLAMA, sliding_window=192)
DROPS = replace(GPT, attention_dropout=0.1)
EXPERTS = MoEConfig(router=RouterConfig(num_experts=4, top_k=2), ffn_hidden_size=256)
MIXTRAL = GPTConfig(**SIZES, **GATED, add_bias_linear=False, moe=EXPERTS)
SHARED = replace(MIXTRAL, moe=replace(EXPERTS, shared_expert_intermediate_size=256))
T5 = T5Config(num_layers=2, num_decoder_layers=2, max_sequence_length=256, max_decoder_sequence_length=1024, **SIZES)
BERT = BertConfig(num_layers=2, max_sequence_length=256, **SIZES)
VISION = VisionConfig(num_layers=2, hidden_size=256, num_attention_heads=4, image_size=224, patch_size=14)
LLAVA = LlavaConfig(**SIZES, **GATED, vision=VISION, image_token=5)
FULL = RecomputeConfig(granularity="full")
FIRST = RecomputeConfig(granularity="full", method="block")
SP, CP = Sizes(world=2, tp=2, sequence_parallel=True), Sizes(world=2, cp=2)
PAIRS, LONG_PAIRS = (
    SequenceLengths(sequence=256, decoder_sequence=64),
    SequenceLengths(sequence=256, decoder_sequence=1024),
)
IMAGES = SequenceLengths(sequence=384, images=1)
PADDED = MoEConfig(
    router=RouterConfig(num_experts=4, top_k=2), capacity=ExpertCapacity(factor=1.5, pad_to_capacity=True)
)


def run_of(model: Any, sizes: Sizes, lengths: SequenceLengths | None = None, **changes: Any) -> Run:
    lengths = SequenceLengths(sequence=1024) if lengths is None else lengths
    run = Run(model=model, lengths=lengths, sizes=sizes, global_batch_size=sizes.pp * sizes.dp, **changes)
    assert faults_of(run) == []
    return run


def selective(*parts: str) -> RecomputeConfig:
    return RecomputeConfig(granularity="selective", parts=parts)  # type: ignore[arg-type]


def adapters(*targets: str, rank: int = 64) -> Trainable:
    return Trainable(lora=LoraConfig(rank=rank, targets=targets))  # type: ignore[arg-type]


RUNS = {
    "a window of blocks": run_of(WINDOW, Sizes()),
    "a window of more than half": run_of(replace(WINDOW, sliding_window=600), Sizes()),
    "a window over cp": run_of(WINDOW, CP),
    "a window over the parts of several ranks": run_of(
        replace(WINDOW, num_layers=1, sliding_window=500), Sizes(world=4, cp=4)
    ),
    "a window over cp in float32": run_of(WINDOW, CP, precision="32-true"),
    "a window in packed documents": run_of(WINDOW, Sizes(), SequenceLengths(sequence=1024, are_packed=True)),
    "a window and dropout": run_of(replace(WINDOW, attention_dropout=0.1), Sizes()),
    "dropout over cp": run_of(DROPS, CP, recompute=selective("core_attention")),
    "dropout in packed documents": run_of(DROPS, SP, SequenceLengths(sequence=1024, are_packed=True)),
    "dropout, all recomputed": run_of(DROPS, Sizes(), recompute=FULL),
    "dropout, two parts recomputed": run_of(DROPS, Sizes(), recompute=selective("core_attention", "mlp")),
    "grouped queries in float32": run_of(LLAMA, Sizes(), precision="32-true"),
    "the first layers of chunks recomputed": run_of(
        replace(GPT, num_layers=4), Sizes(world=2, pp=2, vp=2), recompute=FIRST, schedule_name="interleaved"
    ),
    "dense layers recomputed, experts not": run_of(
        replace(MIXTRAL, num_layers=4, moe=replace(EXPERTS, layer_freq=2)), Sizes(world=2, pp=2), recompute=FIRST
    ),
    "a T5 of long answers": run_of(T5, SP, LONG_PAIRS),
    "a T5 over cp": run_of(T5, CP, LONG_PAIRS),
    "a T5 with dropout, all recomputed": run_of(replace(T5, attention_dropout=0.1), Sizes(), PAIRS, recompute=FULL),
    "a T5 without tables, with dropout": run_of(
        replace(T5, position="none", attention_dropout=0.1), Sizes(), PAIRS, recompute=selective("core_attention")
    ),
    "adapters at a T5's keys": run_of(T5, Sizes(), PAIRS, trained=adapters("cross_attention.key_value")),
    "adapters at a T5's queries, stages": run_of(
        T5, Sizes(world=2, pp=2), PAIRS, trained=adapters("attention.qkv", "cross_attention.query")
    ),
    "adapters at a T5's projections": run_of(T5, Sizes(), PAIRS, trained=adapters("cross_attention.projection")),
    "adapters at projections": run_of(LLAMA, SP, trained=adapters("attention.projection")),
    "adapters at the end of layers": run_of(LLAMA, Sizes(world=2, tp=2), trained=adapters("mlp.down")),
    "adapters that are recomputed": run_of(
        LLAMA, Sizes(world=2, tp=2), trained=adapters("attention.qkv", "mlp.up", "mlp.down"), recompute=selective("mlp")
    ),
    "adapters and layers recomputed": run_of(LLAMA, Sizes(), trained=adapters("mlp.down"), recompute=FULL),
    "adapters with experts": run_of(SHARED, Sizes(), trained=adapters("attention.projection", "shared.up")),
    "adapters with shared experts alone, experts recomputed": run_of(
        SHARED, Sizes(), trained=adapters("shared.up"), recompute=selective("moe")
    ),
    "a padded capacity": run_of(replace(MIXTRAL, moe=PADDED), Sizes(world=4, ep=2, cp=2)),
    "BERT without sequence parallelism": run_of(BERT, Sizes(world=2, tp=2), SequenceLengths(sequence=256)),
    "LLaVA over cp": run_of(LLAVA, CP, IMAGES),
    "images shared out over cp": run_of(LLAVA, CP, SequenceLengths(sequence=1024, images=3)),
    "LLaVA, rows that fill up ranks": run_of(LLAVA, Sizes(world=4, tp=4, sequence_parallel=True), IMAGES),
    "LLaVA without sequence parallelism": run_of(LLAVA, Sizes(world=2, tp=2), IMAGES),
    "a frozen tower, recomputed": run_of(LLAVA, Sizes(), IMAGES, trained=Trainable(frozen=("vision",)), recompute=FULL),
    "a projector alone": run_of(LLAVA, Sizes(), IMAGES, trained=Trainable(frozen=("vision", "language"))),
    "a padded vocabulary": run_of(replace(GPT, vocab_size=1030), SP),
    "tiles in FP8": run_of(SHARED, Sizes(world=2, tp=2), SequenceLengths(sequence=100), fp8=Fp8Config()),
}


def executed(run: Run) -> float:
    """By the code, on tensors without numbers; ranks of tp and dp do alike, and those of cp, but for windows."""
    sizes, full_model = run.sizes, FullModel(run)
    each = sizes.world // sizes.pp
    num_parts = sizes.cp if run.model.sliding_window else 1
    found = [
        sum(dry_run(run, stage * each + part * sizes.tp, full_model=full_model).flops.values())
        for stage in range(sizes.pp)
        for part in range(num_parts)
    ]
    return sum(found) * each / num_parts


@pytest.mark.matrix
@pytest.mark.parametrize("name", every_nth(RUNS, 3))
def test_a_plan_knows_what_is_executed(name: str) -> None:
    # The little that no product of all tokens is: BERT's of whole samples, and what a class token has no pixels for.
    assert step_flops(RUNS[name], EXECUTED) == pytest.approx(executed(RUNS[name]), rel=0.001)


def test_hardware_flops_count_the_first_layers_of_a_stage() -> None:
    # Of a LLaVA a tower's layers come first.
    plain = run_of(LLAVA, Sizes(world=2, pp=2), IMAGES)
    recomputed = replace(plain, recompute=FIRST)
    more = step_flops(recomputed, HARDWARE) - step_flops(plain, HARDWARE)
    assert more == pytest.approx(executed(recomputed) - executed(plain), rel=0.001)


def test_conventions_do_not_count_it() -> None:
    # Else what is above would hold of them too.
    far = {name for name, run in RUNS.items() if abs(step_flops(run, HARDWARE) / step_flops(run, EXECUTED) - 1) > 0.002}
    assert len(far) > 0.8 * len(RUNS)
    plain = run_of(GPT, Sizes(world=4, tp=2, cp=2, sequence_parallel=True))
    assert step_flops(plain, EXECUTED) == pytest.approx(step_flops(plain, MODEL), rel=1e-12)
