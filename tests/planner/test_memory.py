"""What a rank holds in closed form, by kind: the bytes of a parameter, and what layouts make of activations."""

from dataclasses import replace

import pytest

from lightning_megatron.mesh import Sizes
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.planner.framework_profile import FULLY_SHARDED, MEGATRON
from lightning_megatron.planner.memory import memory_of, parameters_of_rank, rank_memory
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.presets import PRESETS
from lightning_megatron.planner.run import Run
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.transformer.recompute import RecomputeConfig

GPT3 = PRESETS["gpt3_175b"]


def run_of(**changes: object) -> Run:
    fields = {
        "model": GPT3.model,
        "lengths": GPT3.lengths,
        "sizes": Sizes(world=64, tp=8, pp=8, sequence_parallel=True),
        "global_batch_size": 64,
    }
    return Run(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("precision", "kind", "grad_dtype", "expected"),
    [
        ("32-true", "replicated", "auto", 16.0),
        ("32-true", "distributed", "auto", 8 + 8 / 4),
        ("bf16-mixed", "replicated", "auto", 18.0),
        ("bf16-mixed", "distributed", "auto", 6 + 12 / 4),
        ("bf16-mixed", "distributed", "bfloat16", 4 + 12 / 4),
        ("bf16-true", "replicated", "auto", 8.0),
    ],
)
def test_a_parameter_costs_the_bytes_of_the_optimizer_s_table(
    precision: str, kind: str, grad_dtype: str, expected: float
) -> None:
    optimizer = OptimizerConfig(kind=kind, grad_dtype=grad_dtype)  # type: ignore[arg-type]
    sizes = Sizes(world=64, tp=8, pp=2, cp=2, sequence_parallel=True)
    run = run_of(sizes=sizes, precision=precision, optimizer=optimizer)
    dense, experts = parameters_of_rank(run, 0)
    assert experts == 0
    assert rank_memory(run, 0).static == pytest.approx(expected * dense)


def test_states_of_experts_are_sharded_over_edp() -> None:
    preset = PRESETS["mixtral_8x7b"]
    sizes = Sizes(world=64, tp=2, ep=8, sequence_parallel=True)
    optimizer = OptimizerConfig(kind="distributed")
    run = Run(model=preset.model, lengths=preset.lengths, sizes=sizes, global_batch_size=64, optimizer=optimizer)
    dense, experts = parameters_of_rank(run, 0)
    assert sizes.dp == 32 and sizes.edp == 8 and experts > dense
    assert rank_memory(run, 0).static == pytest.approx((6 + 12 / 32) * dense + (6 + 12 / 8) * experts)


def test_an_early_stage_keeps_more_microbatches_and_the_last_has_the_logits() -> None:
    memory = memory_of(run_of())
    inner = [rank.activations for rank in memory[1:-1]]
    assert inner == sorted(inner, reverse=True) and inner[0] > 5 * memory[-1].activations
    columns = -(-GPT3.model.vocab_size // 8)
    assert memory[-1].activations - inner[-1] / 2 > 0.9 * 2048 * columns * 6


def test_activations_of_a_large_model_are_34_sbh_over_t_with_dropout() -> None:
    model = replace(GPT3.model, hidden_dropout=0.1)
    [saved] = {rank.activations for rank in memory_of(run_of(model=model, framework=MEGATRON))[3:4]}
    each = 34 * 2048 * 12288 / 8
    assert saved == pytest.approx(5 * 12 * each, rel=0.01)


def test_full_recomputation_keeps_inputs_and_one_layer() -> None:
    run = run_of(recompute=RecomputeConfig(granularity="full"), framework=MEGATRON)
    token_bytes = 2048 * 12288 / 8
    assert rank_memory(run, 3).activations == pytest.approx((5 * 12 * 2 + 30) * token_bytes, rel=0.01)


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallelism_divides_activations(cp: int) -> None:
    plain = rank_memory(run_of(sizes=Sizes(world=64, tp=8, pp=2, sequence_parallel=True)), 0)
    cut = rank_memory(run_of(sizes=Sizes(world=64 * cp, tp=8, pp=2, cp=cp, sequence_parallel=True)), 0)
    assert cut.activations == pytest.approx(plain.activations / cp, rel=0.01)


def test_fp8_keeps_less_of_a_layer_and_a_copy_of_its_weights() -> None:
    plain, cast = (rank_memory(run_of(fp8=fp8, framework=MEGATRON), 3) for fp8 in (None, Fp8Config()))
    token_bytes = 2048 * 12288 / 8
    # Of both norms and of the activation one byte less, of what attention gives one more: 1 + 1 + 4 - 1.
    assert plain.activations - cast.activations == pytest.approx(5 * 12 * 5 * token_bytes, rel=0.01)
    weights = 2 * parameters_of_rank(run_of(), 3)[0]
    assert cast.buffers - plain.buffers == pytest.approx(weights, rel=0.01)
    # With scales of blocks linears save what they save in 16 bits, and a weight has a byte of scale for 32.
    blocks = rank_memory(run_of(fp8=Fp8Config(scaling="mxfp8"), framework=MEGATRON), 3)
    assert blocks.activations == plain.activations
    assert blocks.buffers - plain.buffers == pytest.approx(weights * 33 / 32, rel=0.01)


def test_weights_that_dp_ranks_share_are_held_once() -> None:
    sizes = Sizes(world=64)
    full = rank_memory(run_of(sizes=sizes), 0)
    shared = rank_memory(run_of(sizes=sizes, framework=FULLY_SHARDED), 0)
    # The low weights are there for a layer at a time alone.
    assert shared.static == pytest.approx((full.static - full.weights) / 64)
    assert shared.buffers > rank_memory(run_of(sizes=sizes, framework=MEGATRON), 0).buffers


def test_the_total_is_what_is_allocated_and_the_overhead() -> None:
    memory = rank_memory(run_of(), 0)
    assert memory.total == pytest.approx(sum(memory.by_kind().values()))
    assert memory.overhead > 1e9


def test_a_t5_s_decoder_keeps_what_its_cross_attention_reads() -> None:
    preset = PRESETS["t5_11b"]
    sizes = Sizes(world=8, tp=8, sequence_parallel=True)
    fields = {"model": preset.model, "sizes": sizes, "global_batch_size": 8}
    short = Run(lengths=SequenceLengths(sequence=512, decoder_sequence=114), **fields)  # type: ignore[arg-type]
    long = Run(lengths=SequenceLengths(sequence=512, decoder_sequence=228), **fields)  # type: ignore[arg-type]
    assert rank_memory(long, 0).activations > rank_memory(short, 0).activations * 1.1
