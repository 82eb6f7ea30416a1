"""The memory and the FLOPs of a plan are those of dry runs, in which every layer and every microbatch runs."""

from dataclasses import replace

import pytest

from lightning_megatron.mesh import Sizes
from lightning_megatron.models import GPTConfig, LlavaConfig
from lightning_megatron.models.vision import VisionConfig
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.planner.dry_run import DryRuns, global_rank
from lightning_megatron.planner.estimate import estimate
from lightning_megatron.planner.framework_profile import MEGATRON
from lightning_megatron.planner.hardware import gpu_of
from lightning_megatron.planner.measured import measured, measured_rank
from lightning_megatron.planner.memory import WORKSPACE_BYTES, memory_of
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.trainable import Trainable
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.transformer.lora import LoraConfig
from lightning_megatron.transformer.recompute import RecomputeConfig

GPT = GPTConfig(num_layers=12, hidden_size=64, num_attention_heads=4, vocab_size=256, max_sequence_length=64)
OVERLAPPED = OptimizerConfig(kind="distributed", overlap_grad_reduce=True, overlap_param_gather=True)
EVEN = Run(
    model=GPT,
    lengths=SequenceLengths(sequence=64),
    sizes=Sizes(world=8, tp=2, pp=2, sequence_parallel=True),
    global_batch_size=12,
    optimizer=OVERLAPPED,
)
INTERLEAVED = replace(EVEN, sizes=Sizes(world=4, pp=2, vp=2), global_batch_size=16)
RUNS = {
    "1f1b": EVEN,
    "interleaved": INTERLEAVED,
    "blocks recomputed": replace(
        INTERLEAVED, recompute=RecomputeConfig(granularity="full", method="block", num_layers=4)
    ),
    "adapters": replace(EVEN, trained=Trainable(lora=LoraConfig(rank=4)), num_accumulated=2),
    "a tower": replace(
        EVEN,
        model=LlavaConfig.of(
            replace(GPT, max_sequence_length=64),
            vision=VisionConfig(num_layers=8, hidden_size=32, num_attention_heads=2, image_size=16, patch_size=4),
            image_token=5,
        ),
        lengths=SequenceLengths(sequence=64, images=1),
        trained=Trainable(frozen=("vision",)),
    ),
    "layers out of FP8": replace(EVEN, fp8=Fp8Config(num_first_layers_bf16=3, num_last_layers_bf16=1)),
    "windows by turns": replace(
        EVEN, model=replace(GPT, position="rotary", sliding_window=16, full_attention_layers=tuple(range(0, 12, 2)))
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_few_layers_and_microbatches_stand_for_all(name: str) -> None:
    run = RUNS[name]
    found, whole = measured(run), DryRuns(run, is_whole=True)
    ranks = [whole.of(global_rank(run, index, 0)) for index in range(run.sizes.pp)]
    for index, (memory, one) in enumerate(zip(found.memory, ranks, strict=True)):
        assert memory.allocated - WORKSPACE_BYTES == pytest.approx(one.peak_bytes, rel=1e-3)
        assert memory == measured_rank(run, index)
    assert found.flops == sum(sum(one.flops.values()) for one in ranks) * run.sizes.world / run.sizes.pp > 0


def test_ranks_of_a_context_group_that_see_other_keys_are_measured_each() -> None:
    windowed = replace(GPT, position="rotary", sliding_window=16)
    run = replace(EVEN, model=windowed, sizes=Sizes(world=2, cp=2), global_batch_size=4)
    shared, alone = DryRuns(run), [DryRuns(run).of(rank).flops for rank in range(2)]
    assert [shared.of(rank).flops for rank in range(2)] == alone and alone[0] != alone[1]


def test_what_is_saved_grows_with_the_microbatches_and_what_a_backward_holds_does_not() -> None:
    first, last = measured(EVEN).memory
    assert 1.5 * last.activations < first.activations and min(first.buffers, last.buffers) > WORKSPACE_BYTES


def test_other_frameworks_are_estimated_in_closed_form() -> None:
    theirs, gpu = replace(EVEN, framework=MEGATRON), gpu_of("h100")
    assert estimate(theirs, gpu).memory == memory_of(theirs) and estimate(theirs, gpu).executed_flops is None
    assert estimate(EVEN, gpu).memory == measured(EVEN).memory != memory_of(EVEN)
