"""A step takes longer where more is done or sent, and the parts of its time add up."""

from dataclasses import replace

import pytest

from lightning_megatron import MoEConfig, RouterConfig
from lightning_megatron.mesh import Sizes, StageLayout
from lightning_megatron.optim.config import GradientDtype, OptimizerConfig
from lightning_megatron.planner.collective_time import Group, exchange_seconds, gather_seconds, groups_of, hop_seconds
from lightning_megatron.planner.constants import Constants, fitted
from lightning_megatron.planner.estimate import estimate
from lightning_megatron.planner.flops import step_flops
from lightning_megatron.planner.framework_profile import FULLY_SHARDED, OURS, AttentionKernel, FrameworkProfile, Hiding
from lightning_megatron.planner.hardware import Gpu, gpu_of
from lightning_megatron.planner.layer_work import LayerWork, layer_work_of
from lightning_megatron.planner.presets import PRESETS
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.step_time import StepTime, step_time
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.transformer.recompute import RecomputeConfig

H100 = gpu_of("h100")
LLAMA = PRESETS["llama3_70b"]
CONSTANTS = Constants()
FIRST = RecomputeConfig(granularity="full", method="block")


def run_of(**changes: object) -> Run:
    fields = {
        "model": LLAMA.model,
        "lengths": LLAMA.lengths,
        "sizes": Sizes(world=64, tp=4, pp=4, sequence_parallel=True),
        "global_batch_size": 64,
        "optimizer": OptimizerConfig(kind="distributed", overlap_grad_reduce=True, overlap_param_gather=True),
    }
    return Run(**(fields | changes))  # type: ignore[arg-type]


def time_of(run: Run) -> StepTime:
    return step_time(run, H100, CONSTANTS)


def test_the_parts_of_a_step_add_up_and_none_is_negative() -> None:
    time = time_of(run_of())
    parts = [time.compute, *time.exposed.values(), time.bubble, time.optimizer, time.other]
    assert sum(parts) == pytest.approx(time.total) and min(parts) >= 0


def test_dispatch_overlaps_compute_where_a_forward_overlaps_a_backward() -> None:
    mixtral = PRESETS["mixtral_8x7b"]
    run = run_of(model=mixtral.model, lengths=mixtral.lengths, sizes=Sizes(world=8, ep=8), global_batch_size=64)
    m, joint = run.num_microbatches, replace(run, is_overlapped=True)
    in_turn, overlap = time_of(run), time_of(joint)
    # Nothing overlaps the first forward and the last backward, and routing is no message.
    assert overlap.exposed["routing"] == in_turn.exposed["routing"] > 0
    shown = in_turn.exposed["ep"] / m
    assert m == 8 and overlap.exposed["ep"] == pytest.approx(shown) != pytest.approx(in_turn.exposed["ep"])
    assert overlap.total < in_turn.total and overlap.compute == in_turn.compute and overlap.bubble == pytest.approx(0)
    # Of what takes longer than all compute that much is hidden.
    slow = replace(CONSTANTS, link_share=CONSTANTS.link_share / 1e3)
    in_turn, overlap = step_time(run, H100, slow), step_time(joint, H100, slow)
    hidden = in_turn.exposed["ep"] - overlap.exposed["ep"]
    assert hidden == pytest.approx((m - 1) / m * in_turn.compute)


def test_no_product_is_faster_than_the_measured_ceiling() -> None:
    run = run_of()
    flops = 6 * run.model_parts.parameters() * run.num_tokens / 64
    assert time_of(run).compute > flops / H100.matmul_flops("half")


@pytest.mark.parametrize(
    ("slower", "quicker"),
    [
        (run_of(recompute=RecomputeConfig(granularity="full")), run_of()),
        (run_of(), run_of(fp8=Fp8Config())),
        (run_of(), run_of(sizes=Sizes(world=64, tp=4, pp=4, vp=5, sequence_parallel=True))),
        # So many samples that bubbles, which are smaller in shorter pipelines, do not decide.
        (
            run_of(sizes=Sizes(world=64, tp=8, pp=2, sequence_parallel=True), global_batch_size=1024),
            run_of(global_batch_size=1024),
        ),
        (run_of(optimizer=OptimizerConfig(kind="distributed")), run_of()),
        (run_of(global_batch_size=128), run_of()),
        (run_of(recompute=RecomputeConfig(granularity="selective", parts=("mlp",))), run_of()),
    ],
    ids=["recompute", "half", "one chunk", "more tp", "no overlap", "more samples", "mlp again"],
)
def test_more_work_or_more_messages_take_longer(slower: Run, quicker: Run) -> None:
    assert time_of(slower).total > 1.001 * time_of(quicker).total


def test_accumulated_batches_are_summed_once_and_late() -> None:
    one, two = time_of(run_of()), time_of(run_of(num_accumulated=2))
    assert two.compute == 2 * one.compute and two.bubble == pytest.approx(2 * one.bubble)
    assert two.exposed["tp"] == 2 * one.exposed["tp"] and two.optimizer == one.optimizer
    late = time_of(run_of(optimizer=OptimizerConfig(kind="distributed", overlap_param_gather=True)))
    assert two.exposed["dp"] == late.exposed["dp"] > one.exposed["dp"]
    assert step_flops(run_of(num_accumulated=2)) == 2 * step_flops(run_of())
    assert run_of(num_accumulated=2).num_tokens == 2 * run_of().num_tokens
    # Rows of a microbatch put every batch under a schedule, one of a single microbatch too.
    whole = {"sizes": Sizes(world=64, tp=8), "global_batch_size": 8, "num_accumulated": 2}
    assert [run_of(**whole, cuts_by_rows=rows).sets_gradients_aside for rows in (False, True)] == [False, True]


def test_backwards_hide_a_reduction_of_all_gradients_whole() -> None:
    # Messages take a small part of the backward that they go beside.
    sizes = Sizes(world=8, tp=4, sequence_parallel=True)
    late, early = (
        time_of(run_of(sizes=sizes, optimizer=OptimizerConfig(overlap_grad_reduce=early))).exposed["dp"]
        for early in (False, True)
    )
    assert early == pytest.approx(CONSTANTS.exposed_gather * late)


def test_gradients_that_each_backward_reduces_hide_behind_it() -> None:
    one, two, many = (
        time_of(
            run_of(
                sizes=Sizes(world=8, tp=4, sequence_parallel=True),
                global_batch_size=2 * num_microbatches,
                optimizer=OptimizerConfig(kind="distributed_gradients", overlap_param_gather=True),
            )
        ).exposed["dp"]
        for num_microbatches in (1, 2, 32)
    )
    assert many - one == pytest.approx(31 * (two - one)) and two > one


def test_full_recomputation_costs_a_forward() -> None:
    plain, recomputed = time_of(run_of()), time_of(run_of(recompute=RecomputeConfig(granularity="full")))
    head = plain.forwards[-1] - plain.forwards[1]
    assert recomputed.backwards[1] - plain.backwards[1] == pytest.approx(plain.forwards[1], rel=0.05)
    assert head > 0


def test_the_first_layers_of_each_stage_cost_a_forward_of_their_own() -> None:
    plain, recomputed = time_of(run_of()), time_of(run_of(recompute=RecomputeConfig(granularity="full")))
    grouped = time_of(run_of(recompute=RecomputeConfig(granularity="full", num_layers=3)))
    assert (grouped.backwards, grouped.exposed) == (recomputed.backwards, recomputed.exposed)
    first = time_of(run_of(recompute=FIRST))
    # One of a rank's twenty layers, on each of its stages.
    for rank in range(4):
        layer = (recomputed.backwards[rank] - plain.backwards[rank]) / 20
        assert first.backwards[rank] - plain.backwards[rank] == pytest.approx(layer) and layer > 0
    all_messages, messages = (time.exposed["tp"] - plain.exposed["tp"] for time in (recomputed, first))
    assert messages == pytest.approx(all_messages / 20) and messages > 0
    sizes = Sizes(world=64, tp=4, pp=4, vp=5, sequence_parallel=True)
    chunks, chunk_layers = time_of(run_of(sizes=sizes)), time_of(run_of(sizes=sizes, recompute=FIRST))
    assert chunk_layers.backwards[1] - chunks.backwards[1] == pytest.approx(5 * layer)


def test_of_stages_with_equal_layers_those_are_recomputed_that_come_first() -> None:
    moe = MoEConfig(router=RouterConfig(num_experts=4), ffn_hidden_size=3 * 14336, layer_freq=2)
    model = replace(PRESETS["llama3_8b"].model, num_layers=6, moe=moe)
    # A layer of experts comes first of all.
    sizes = Sizes(world=6, pp=6, stage_layout=StageLayout(text="E|tt|t|tt|t|L"))
    plain, recomputed, first = (
        time_of(run_of(model=model, sizes=sizes, global_batch_size=6, recompute=recompute)).backwards
        for recompute in (RecomputeConfig(), RecomputeConfig(granularity="full"), FIRST)
    )
    experts, dense = recomputed[2] - plain[2], recomputed[4] - plain[4]
    assert first[1] - plain[1] == pytest.approx(experts) and first[3] - plain[3] == pytest.approx(dense)
    assert experts > 1.5 * dense > 0


def inner_layer(run: Run, num_layers: int = 20) -> tuple[LayerWork, int]:
    """What an inner layer does, and how many of them a rank of `run_of()` has."""
    [part] = {part for part in run.model_parts.parts if part.symbol == "t"}
    return layer_work_of(part, run.model_parts, run.sizes, run.micro_batch_size, run.bytes_per_element), num_layers


def inner_rank(run: Run, **changes: float) -> tuple[float, float]:
    """Seconds of a forward and of a backward of a rank without ends."""
    time = step_time(run, H100, replace(CONSTANTS, **changes))
    return time.forwards[1], time.backwards[1]


def test_attention_is_slower_where_a_query_has_few_keys() -> None:
    run = run_of()
    work, layers = inner_layer(run)
    longer = 330 / 8192 * work.flash_flops / (H100.matmul_flops("half") * CONSTANTS.attention_share("hopper", "second"))
    (forward, backward), (even, evenly) = inner_rank(run), inner_rank(run, flash_edge=0.0)
    assert forward - even == pytest.approx(layers * longer)
    assert backward - evenly == pytest.approx(2.5 * layers * longer)


def test_attention_that_sees_both_ways_fills_its_kernel_sooner_than_causal_attention() -> None:
    # Ends of a published figure without a mask, TFLOP/s at 512 and at 16,384 keys, of two kernels.
    edge = CONSTANTS.both_ways_edge
    for slow, quick in ((309, 370), (497, 595)):
        assert (1 + edge / 512) / (1 + edge / 16384) == pytest.approx(quick / slow, rel=0.001)
    preset = PRESETS["bert_large"]
    run = Run(
        model=replace(preset.model, attention_dropout=0.0), lengths=preset.lengths, sizes=Sizes(), global_batch_size=8
    )
    assert inner_seconds(run, flash_edge=0.0) == inner_seconds(run)
    assert inner_seconds(run, both_ways_edge=0.0) < inner_seconds(run)


def inner_seconds(run: Run, **changes: float) -> float:
    return step_time(run, H100, replace(CONSTANTS, layer_seconds=0.0, **changes)).total


def test_elementwise_kernels_of_a_backward_move_more_by_a_fixed_share() -> None:
    run = run_of()
    work, layers = inner_layer(run)
    moved = layers * work.moved_bytes / H100.memory_bytes_per_second
    (forward, backward), (slow, slowly) = (
        inner_rank(run),
        inner_rank(run, unfused_traffic=CONSTANTS.unfused_traffic + 1),
    )
    assert slow - forward == pytest.approx(moved) and slowly - backward == pytest.approx(1.4 * moved)


def test_attention_that_lays_its_weights_out_moves_them_six_times_and_nine_times() -> None:
    run = run_of(model=replace(LLAMA.model, attention_dropout=0.1))
    work, layers = inner_layer(run)
    (forward, backward), (slow, slowly) = inner_rank(run), inner_rank(run, traffic=CONSTANTS.traffic + 1)
    pairs = layers * work.num_pairs / H100.memory_bytes_per_second
    assert slow - forward == pytest.approx(13 * pairs) and slowly - backward == pytest.approx(19 * pairs)


# No messages but a hop between stages, and nothing between kernels.
BARE = {
    "edge": 0.0,
    "flash_edge": 0.0,
    "unfused_traffic": 0.0,
    "traffic": 0.0,
    "layer_seconds": 0.0,
    "hop_seconds": 0.0,
}


@pytest.mark.parametrize(
    ("gpu", "fp8", "layer_tflops", "plain_tflops", "attention_tflops"),
    [
        # The share of the peak that 16 bits reach; three products of TF32 at half of their rate, by the first kernels.
        (H100, None, 67 * 794.5 / 989.4, 67 * 794.5 / 989.4, 794.5 / 6 * 0.75 * 0.56 * 0.5),
        (H100, Fp8Config(), 1402.6, 67 * 794.5 / 989.4, 794.5 / 6 * 0.75 * 0.56 * 0.5),
        (gpu_of("a100"), None, 18.7, 18.7, 271.2 / 6 * 0.75 * 0.5),
        # No tensor core of Volta's multiplies float32.
        (gpu_of("v100"), None, 15.7 * 108.7 / 125, 15.7 * 108.7 / 125, 15.7 * 108.7 / 125 * 0.75 * 0.5),
        # Where its peak is not known, rates of 16 bits stand for it.
        (replace(H100, full_tflops=0.0), None, 794.5, 794.5, 794.5 * 0.75 * 0.56),
    ],
    ids=["h100", "FP8 beside it", "a100", "v100", "unknown"],
)
def test_products_in_float32_have_no_tensor_cores_but_in_attention(
    gpu: Gpu, fp8: Fp8Config | None, layer_tflops: float, plain_tflops: float, attention_tflops: float
) -> None:
    model = replace(LLAMA.model, num_query_groups=64)
    run = run_of(model=model, sizes=Sizes(world=64, pp=4), precision="32-true", fp8=fp8)
    constants = replace(CONSTANTS, exposed_hop=0.0, cast_traffic=0.0, **BARE)
    time = step_time(run, gpu, constants)
    work, layers = inner_layer(run)
    products = layers * work.product_flops / (layer_tflops * 1e12 * 0.85)
    attention = layers * work.flash_flops / (attention_tflops * 1e12)
    assert time.forwards[1] == pytest.approx(products + attention)
    assert time.backwards[1] == pytest.approx(2 * products + 2.5 * attention)
    head = layer_work_of(run.model_parts.parts[-1], run.model_parts, run.sizes, 1, 4)
    ended = time.forwards[-1] - time.forwards[1]
    assert ended == pytest.approx(head.head_flops / (plain_tflops * 1e12 * 0.85))


def test_a_share_of_the_peak_in_float32_is_of_that_peak() -> None:
    found = estimate(run_of(precision="32-true"), H100, CONSTANTS)
    assert found.share_of_peak() == pytest.approx(found.flops_per_second() / 67e12) and found.timed_as == "full"
    unknown = estimate(run_of(precision="32-true"), replace(H100, full_tflops=0.0), CONSTANTS)
    assert unknown.share_of_peak() == pytest.approx(unknown.flops_per_second() / 989.4e12)
    assert unknown.timed_as == "half"
    assert found.step_seconds > 5 * unknown.step_seconds


def test_grouped_queries_in_float32_lay_their_scores_out() -> None:
    run = run_of(precision="32-true")
    work, layers = inner_layer(run)
    assert (work.flash_flops, work.num_pairs) == (0.0, 0.0) and work.num_grouped_pairs == 8192**2 * 64 / 4
    multiplied = 2 * 2 * 128 * work.num_grouped_pairs
    assert work.materialised_flops == multiplied
    (forward, backward), (slow, slowly) = (
        inner_rank(run),
        inner_rank(run, traffic=CONSTANTS.traffic + 1),
    )
    pairs = layers * 4 * work.num_grouped_pairs / H100.memory_bytes_per_second
    assert slow - forward == pytest.approx(9.5 * pairs) and slowly - backward == pytest.approx(7 * pairs)
    slow, slowly = inner_rank(run, materialised_share=CONSTANTS.materialised_share / 2)
    seconds = layers * multiplied / (H100.matmul_flops("full") * CONSTANTS.materialised_share)
    assert slow - forward == pytest.approx(seconds) and slowly - backward == pytest.approx(2 * seconds)
    # Only dropout has scores recomputed.
    recomputed = RecomputeConfig(granularity="selective", parts=("core_attention",))
    assert inner_rank(replace(run, recompute=recomputed)) == (forward, backward)


def test_gates_of_experts_that_are_clamped_move_their_rows_once_more() -> None:
    model = replace(PRESETS["mixtral_8x7b"].model, add_bias_linear=True)
    run = run_of(model=model, lengths=PRESETS["mixtral_8x7b"].lengths, sizes=Sizes(world=64, pp=4, ep=8))
    forward, backward = inner_rank(run)
    bounded, bounded_back = inner_rank(replace(run, framework=replace(OURS, bounds_gates=True)))
    # Two of eight experts for a token; both halves and the bias, in 16 bits.
    moved = 8 * 4096 * 2 * (8 * 14336 + 4 * 4096) * 2 * CONSTANTS.traffic / H100.memory_bytes_per_second
    assert bounded - forward == pytest.approx(moved) and bounded_back - backward == pytest.approx(1.4 * moved)
    bare = replace(run, model=replace(model, add_bias_linear=False))
    less = inner_rank(replace(bare, framework=replace(OURS, bounds_gates=True)))[0] - inner_rank(bare)[0]
    assert less == pytest.approx(moved * 8 * 14336 / (8 * 14336 + 4 * 4096))


def test_weights_are_gathered_and_stepped_in_the_bytes_that_they_have() -> None:
    free = replace(CONSTANTS, exposed_gather=1.0, link_seconds=1e-12, network_seconds=1e-12)

    def seconds(precision: str, framework: FrameworkProfile) -> tuple[float, float]:
        time = step_time(run_of(sizes=Sizes(world=64), precision=precision, framework=framework), H100, free)
        return time.exposed["dp"], time.optimizer

    (narrow, mixed), (wide, plain), (_, low) = (
        seconds(precision, FULLY_SHARDED) for precision in ("bf16-mixed", "32-true", "bf16-true")
    )
    # Weights twice and gradients in four bytes once.
    assert wide / narrow == pytest.approx((2 * 4 + 4) / (2 * 2 + 4))
    # Master weight, two moments and a gradient; there is no low weight to write.
    assert plain / mixed == pytest.approx((4 * 7) / (4 * 7 + 2))
    # All of them are in 16 bits where there are no master weights.
    assert low / plain == pytest.approx(1 / 2) and seconds("16-mixed", FULLY_SHARDED)[1] == mixed


@pytest.mark.parametrize(
    ("hides", "passes"),
    [("nowhere", 2.0), ("forward", 1.3), ("backward", 1.3), ("everywhere", 0.6)],
)
def test_messages_of_tensor_parallelism_are_hidden_by_the_products_of_the_framework(
    hides: Hiding, passes: float
) -> None:
    run = run_of(sizes=Sizes(world=8, tp=8, sequence_parallel=True), framework=replace(OURS, hides_tensor=hides))
    work, layers = inner_layer(run, 80)
    each = gather_seconds(work.tensor_bytes / 4, Group(size=8), H100, CONSTANTS)
    # Embedding and head have one each.
    assert time_of(run).exposed["tp"] == pytest.approx(run.schedule.microbatches * passes * (4 * layers + 2) * each)


def test_what_is_gathered_for_products_in_fp8_travels_in_one_byte() -> None:
    free = replace(CONSTANTS, link_seconds=1e-12)
    sizes = Sizes(world=8, tp=8, sequence_parallel=True)
    wide, narrow = (step_time(run_of(sizes=sizes, fp8=fp8), H100, free).exposed["tp"] for fp8 in (None, Fp8Config()))
    assert narrow / wide == pytest.approx((3 / 4 * 320 + 2) / 322)
    blocks = step_time(run_of(sizes=sizes, fp8=Fp8Config(scaling="mxfp8")), H100, free)
    assert blocks.exposed["tp"] == wide
    whole = Sizes(world=8, tp=8)
    wide, narrow = (step_time(run_of(sizes=whole, fp8=fp8), H100, free).exposed["tp"] for fp8 in (None, Fp8Config()))
    assert narrow == wide


def test_hops_that_are_split_send_once_what_each_rank_would_send() -> None:
    run = run_of(sizes=Sizes(world=64, tp=4, pp=4))
    groups, num_bytes = groups_of(run.sizes), 8192 * LLAMA.model.hidden_size * 2
    split = hop_seconds(num_bytes / 4, groups["pp"], H100, CONSTANTS) + gather_seconds(
        num_bytes, groups["tp"], H100, CONSTANTS
    )
    saved = hop_seconds(num_bytes, groups["pp"], H100, CONSTANTS) - split
    whole = time_of(run).exposed["pp"] - time_of(replace(run, framework=replace(OURS, splits_hops=True))).exposed["pp"]
    assert whole == pytest.approx(2 * run.schedule.microbatches * CONSTANTS.exposed_hop * saved) and saved > 0


def test_a_framework_that_recomputes_products_does_so_in_its_backward() -> None:
    run = run_of()
    work, layers = inner_layer(run)
    forward, backward = inner_rank(run)
    attention = 1 + 330 / 8192
    attention *= work.flash_flops / (H100.matmul_flops("half") * CONSTANTS.attention_share("hopper", "second"))
    tensor = 4 * gather_seconds(work.tensor_bytes / 4, groups_of(run.sizes)["tp"], H100, CONSTANTS)
    hop = hop_seconds(8192 * 8192 * 2 / 4, groups_of(run.sizes)["pp"], H100, CONSTANTS)
    rest = forward - layers * (attention + tensor) - CONSTANTS.exposed_hop * hop - CONSTANTS.hop_seconds
    recomputed = {
        name: inner_rank(replace(run, framework=replace(OURS, recomputes=name)))[1] - backward
        for name in ("products", "second products")
    }
    moved = CONSTANTS.unfused_traffic * layers * work.moved_bytes / H100.memory_bytes_per_second
    assert recomputed["products"] == pytest.approx(rest)
    share = work.second_flops / work.product_flops
    assert recomputed["second products"] == pytest.approx(share * (rest - moved) + moved) and 0.3 < share < 0.6
    full = replace(run, recompute=RecomputeConfig(granularity="full"))
    assert inner_rank(full) == inner_rank(replace(full, framework=replace(OURS, recomputes="products")))


def test_sharded_gradients_in_16_bits_are_half_of_the_message() -> None:
    wide, narrow = (
        time_of(
            run_of(
                sizes=Sizes(world=64),
                framework=FULLY_SHARDED,
                optimizer=OptimizerConfig(kind="replicated", overlap_grad_reduce=True, grad_dtype=dtype),
            )
        ).exposed["dp"]
        for dtype in ("float32", "bfloat16")
    )
    assert narrow < 0.9 * wide


@pytest.mark.parametrize("framework", [OURS, FULLY_SHARDED], ids=["ours", "sharded"])
def test_gradients_travel_in_the_numbers_in_which_they_are_added_up(framework: FrameworkProfile) -> None:
    def waited(precision: str, dtype: GradientDtype) -> float:
        optimizer = OptimizerConfig(kind="distributed", grad_dtype=dtype)
        return time_of(
            run_of(sizes=Sizes(world=64), precision=precision, framework=framework, optimizer=optimizer)
        ).exposed["dp"]

    assert waited("bf16-true", "auto") == waited("bf16-true", "bfloat16") < 0.9 * waited("bf16-true", "float32")
    assert waited("bf16-mixed", "auto") == waited("bf16-mixed", "float32") == waited("bf16-true", "float32")


def test_attention_keeps_less_of_its_ceiling_on_gpus_younger_than_its_kernel() -> None:
    def share(family: str, kernel: AttentionKernel) -> float:
        return CONSTANTS.attention_share(family, kernel)

    assert share("volta", "second") == share("ampere", "second") == share("ada", "second")
    # Of FlashAttention-2's own figures: TFLOP/s over the ceilings of H100 and A100.
    kept = (335 / 794.5) / (205 / 271.2)
    assert share("hopper", "second") / share("ampere", "second") == pytest.approx(kept, abs=0.005)
    assert share("blackwell", "second") == share("", "second") < share("hopper", "second")
    assert share("hopper", "first") == share("hopper", "second") / 2
    assert share("ampere", "vendor") == share("blackwell", "vendor") == CONSTANTS.vendor_flash_share


def test_ada_multiplies_by_the_instructions_of_ampere() -> None:
    constants = replace(CONSTANTS, ampere_share=0.5)
    shares = [constants.product_share(family, is_fp8=False) for family in ("volta", "ampere", "ada")]
    assert shares == [0.5, 0.5, 0.5] != [constants.product_share("hopper", is_fp8=False)] * 3


def test_a_group_of_neighbours_shares_a_node_and_one_of_stages_does_not() -> None:
    groups = groups_of(Sizes(world=64, tp=4, pp=4, sequence_parallel=True))
    assert groups["tp"].is_on_one_node(H100) and not groups["pp"].is_on_one_node(H100)
    assert groups["dp_cp"] == Group(size=4, stride=4) and groups["dp_cp"].per_node(H100) == 2
    assert groups["pp"].stride == 16


def test_a_ring_over_nodes_uses_the_ports_of_all_its_ranks_on_a_node() -> None:
    free = replace(CONSTANTS, link_share=1.0, network_share=1.0, link_seconds=1e-12, network_seconds=1e-12)
    num_bytes = 1e9
    alone = gather_seconds(num_bytes, Group(size=8, stride=8), H100, free)
    paired = gather_seconds(num_bytes, Group(size=8, stride=4), H100, free)
    inside = gather_seconds(num_bytes, Group(size=8), H100, free)
    assert alone == pytest.approx(7 / 8 / 50) and paired == pytest.approx(7 / 8 / 100)
    assert inside == pytest.approx(7 / 8 / 450)


def test_one_hop_between_nodes_holds_all_stages_up() -> None:
    free = replace(CONSTANTS, link_share=1.0, network_share=1.0, link_seconds=1e-12, network_seconds=1e-12)
    assert hop_seconds(1e9, Group(size=4, stride=2), H100, free) == pytest.approx(1 / 450)
    assert hop_seconds(1e9, Group(size=8, stride=2), H100, free) == pytest.approx(1 / 50)
    assert hop_seconds(1e9, Group(size=1, stride=8), H100, free) == 0.0
    # Of 128 ranks in two domains of NVLink.
    assert hop_seconds(1e9, Group(size=8, stride=16), gpu_of("gb200"), free) == pytest.approx(1 / 50)


def test_an_exchange_sends_over_the_network_what_leaves_the_node() -> None:
    free = replace(CONSTANTS, link_share=1.0, exchange_share=1.0, link_seconds=1e-12, network_seconds=1e-12)
    assert exchange_seconds(1e9, Group(size=8), H100, free) == pytest.approx(7 / 8 / 450)
    assert exchange_seconds(1e9, Group(size=32), H100, free) == pytest.approx(24 / 32 / 50)


def test_a_rank_without_companions_sends_nothing() -> None:
    assert gather_seconds(1e9, Group(size=1), H100, CONSTANTS) == 0.0
    assert exchange_seconds(1e9, Group(size=1), H100, CONSTANTS) == 0.0


def test_fitted_constants_are_within_their_meaning() -> None:
    constants = fitted()
    for family in ("volta", "ampere", "hopper", "blackwell"):
        assert 0.5 < constants.product_share(family, is_fp8=False) < 1
    assert 0 < constants.step_seconds < 0.3 and 0 < constants.straggling < 0.02
