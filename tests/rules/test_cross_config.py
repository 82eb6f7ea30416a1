"""Every rule says the thing, its value and what would do, and all faults come at once."""

from dataclasses import replace

import pytest

from lightning_megatron import ContextConfig, CostModel, DynamicContextConfig, Fp8Config, KernelConfig, RecomputeConfig
from lightning_megatron.mesh import Sizes, StageLayout
from lightning_megatron.models import BertConfig, GPTConfig, LlavaConfig, T5Config, VisionConfig
from lightning_megatron.moe.capacity import ExpertCapacity
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.rules.cross_config import Facts, faults
from tests.precision import engine_stub


def model(**changes: object) -> GPTConfig:
    sizes = {"num_layers": 4, "hidden_size": 48, "num_attention_heads": 6, "vocab_size": 100, "max_sequence_length": 64}
    return GPTConfig(**(sizes | changes))  # type: ignore[arg-type]


def test_a_sound_run_has_no_fault() -> None:
    sizes = Sizes(world=12, tp=3, pp=2, sequence_parallel=True)
    sound = Facts(sizes=sizes, num_microbatches=2, model=model(), global_batch_size=8, sequence_length=64)
    assert faults(sound) == []


def test_all_faults_are_reported_at_once_with_the_values_that_would_do() -> None:
    shown = faults(
        Facts(
            sizes=Sizes(world=20, tp=4, pp=5),
            num_microbatches=0,
            model=model(),
            global_batch_size=7,
            sequence_length=65,
        )
    )
    text = "\n".join(shown)
    assert "num_microbatches (0) must be at least 1" in text
    assert "num_attention_heads (6)" in text and "layers (4)" in text
    assert "sequence_length (65)" in text and "(64)" in text
    assert len(shown) >= 4


def test_numbers_that_no_run_has_are_reported_alone() -> None:
    experts = MoEConfig(router=RouterConfig(num_experts=65_537))
    sizes = Sizes(world=5 * 10**12, pp=128, vp=129)
    facts = Facts(
        sizes=sizes,
        num_microbatches=100_001,
        model=model(num_layers=4097, moe=experts),
        global_batch_size=7,
        sequence_length=10**8 + 1,
        decoder_sequence_length=10**9,
    )
    shown = faults(facts)
    assert [fault.partition(" (")[0] for fault in shown] == [
        "num_layers",
        "moe.router.num_experts",
        "world size",
        "pipeline_model_parallel_size x virtual_pipeline_model_parallel_size",
        "num_microbatches",
        "sequence_length",
        "decoder_sequence_length",
    ]
    assert shown[0].startswith("num_layers (4097) must be at most 4,096, which is far above what is trained")
    [alone] = faults(Facts(sizes=Sizes(), global_batch_size=10**5000))
    assert "global_batch_size (of about 4983 digits) must be at most 1,000,000,000,000" in alone
    most = replace(facts, sizes=Sizes(world=10**12), num_microbatches=100_000, model=model(num_layers=4096))
    most = replace(most, global_batch_size=10**17, sequence_length=64, decoder_sequence_length=None)
    assert [fault.partition(" (")[0] for fault in faults(most)] == ["global_batch_size"]


def test_what_cuts_experts_is_for_models_that_have_some() -> None:
    facts = Facts(sizes=Sizes(world=4, ep=2, etp=2), model=model())
    assert [fault.partition(";")[0] for fault in faults(facts)] == [
        "expert_model_parallel_size (2) cuts experts, and the model has none",
        "expert_tensor_parallel_size (2) cuts experts, and the model has none",
    ]
    experts = MoEConfig(router=RouterConfig(num_experts=4))
    assert faults(replace(facts, model=model(moe=experts))) == faults(replace(facts, model=None)) == []


def test_a_world_that_does_not_divide_names_the_sizes_that_would() -> None:
    [shown] = faults(Facts(sizes=Sizes(world=6, tp=2, pp=2)))
    assert "world size (6)" in shown and "4 or 8" in shown


@pytest.mark.parametrize("world", [3, 6])
def test_what_sizes_break_in_a_model_is_reported_whatever_the_world(world: int) -> None:
    # Six ranks are as many as dense layers need, and no multiple of what experts need.
    sizes = Sizes(world=world, tp=1, pp=6, ep=2, stage_layout=StageLayout(text="Et|L"))
    experts = MoEConfig(router=RouterConfig(num_experts=3))
    schedule = Schedule(name="interleaved", pp=6, chunks=1, microbatches=7, group_size=4)
    facts = Facts(sizes=sizes, model=model(moe=experts), schedule=schedule, fp8=Fp8Config(num_last_layers_bf16=4))
    of_world = sizes.faults()
    shown, in_another = faults(facts), faults(replace(facts, sizes=replace(sizes, world=12)))
    assert of_world and shown == [*of_world, *in_another]
    text = "\n".join(in_another)
    assert "'Et|L'" in text and "num_last_layers_bf16" in text and "microbatch_group_size (4)" in text
    assert "expert_model_parallel_size (2)" in text


def test_a_sequence_is_reported_whatever_the_world() -> None:
    facts = Facts(sizes=Sizes(world=3, tp=4, cp=4, pads_uneven=False), model=model(), sequence_length=63)
    text = "\n".join(faults(facts))
    assert "world size (3)" in text and "num_attention_heads (6)" in text and "sequence_length (63)" in text
    # Sizes that are none cut nothing.
    assert len(faults(replace(facts, sizes=Sizes(world=4, tp=4, cp=0)))) == 1


@pytest.mark.parametrize(("batch", "is_sound"), [(8, True), (12, True), (6, False), (0, False)])
def test_a_global_batch_divides_by_dp_ranks_times_microbatches(batch: int, is_sound: bool) -> None:
    shown = faults(Facts(sizes=Sizes(world=2), num_microbatches=2, global_batch_size=batch))
    assert (shown == []) is is_sound
    if not is_sound:
        assert f"global_batch_size ({batch})" in shown[0] and "2 x 2 = 4" in shown[0]


def test_chunks_of_tokens_are_refused_where_nothing_would_be_sent_in_them() -> None:
    in_chunks = KernelConfig(num_tp_overlap_chunks=4)
    facts = Facts(sizes=Sizes(world=2, tp=2, sequence_parallel=True), kernels=in_chunks)
    assert faults(facts) == faults(replace(facts, fp8=Fp8Config())) == []
    for sizes, tp, sp in ((Sizes(world=2, tp=2), 2, False), (Sizes(world=2, sequence_parallel=True), 1, True)):
        [fault] = faults(replace(facts, sizes=sizes))
        assert f"none with tensor_model_parallel_size ({tp}) and sequence_parallel ({sp}); set" in fault
        assert faults(Facts(sizes=sizes)) == []
    [fault] = faults(replace(facts, kernels=replace(in_chunks, compile_layers=True)))
    assert "collectives in layers that are compiled wait at once" in fault
    found = faults(replace(facts, fp8=Fp8Config(engine="transformer_engine")))
    assert any("engine ('transformer_engine') those of Transformer Engine run" in one for one in found)
    with pytest.raises(ValueError, match=r"num_tp_overlap_chunks \(0\) must be at least 1"):
        KernelConfig(num_tp_overlap_chunks=0)


def test_symmetric_memory_is_refused_where_it_would_fuse_nothing() -> None:
    fused = KernelConfig(symmetric_memory=True)
    facts = Facts(sizes=Sizes(world=2, tp=2, sequence_parallel=True), kernels=fused)
    assert faults(facts) == []
    [fault] = faults(replace(facts, sizes=Sizes(world=2, tp=2)))
    assert fault.startswith("symmetric_memory (True) of KernelConfig hides gathers and scatters")
    [fault] = faults(replace(facts, fp8=Fp8Config()))
    assert "multiplies without float8" in fault
    with pytest.raises(ValueError, match=r"symmetric_memory \(True\) and num_tp_overlap_chunks \(4\) hide the same"):
        KernelConfig(symmetric_memory=True, num_tp_overlap_chunks=4)


def test_sequence_parallel_without_tensor_parallel_is_harmless() -> None:
    assert faults(Facts(sizes=Sizes(world=2, sequence_parallel=True), model=model())) == []


def test_a_schedule_and_a_layout_of_stages_that_do_not_fit_are_reported_by_their_full_names() -> None:
    sizes = Sizes(world=4, pp=4, vp=3, placement="v", stage_layout=StageLayout(text="Ett|t|tL"))
    schedule = Schedule(name="zb_v", pp=4, chunks=3, microbatches=4, group_size=2)
    shown = faults(Facts(sizes=sizes, num_microbatches=4, model=model(), schedule=schedule))
    text = "\n".join(shown)
    assert "virtual_pipeline_model_parallel_size (3) must be 2 for schedule zb_v" in text
    assert "microbatch_group_size (2) belongs to schedule interleaved" in text
    assert "'Ett|t|tL' has 3 stages" in text and "is 12" in text
    [alone] = faults(Facts(sizes=Sizes(world=2, vp=2)))
    assert "virtual_pipeline_model_parallel_size (2) needs pipeline_model_parallel_size above 1" in alone


def test_only_learned_positions_bound_the_sequence() -> None:
    long = {"sizes": Sizes(), "sequence_length": 65}
    assert faults(Facts(**long, model=model()))  # type: ignore[arg-type]
    assert not faults(Facts(**long, model=model(position="rotary")))  # type: ignore[arg-type]


def test_saved_inputs_are_not_sharded_where_transformer_engine_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_stub.install(monkeypatch)
    fp8, sharded = Fp8Config(engine="transformer_engine"), RecomputeConfig(granularity="full", shard_saved_inputs=True)
    facts = Facts(sizes=Sizes(), fp8=fp8, recompute=sharded, precision="bf16-mixed")
    [fault] = faults(facts)
    assert "recompute shard_saved_inputs (True)" in fault and "use the engine 'torch'" in fault
    assert faults(replace(facts, recompute=RecomputeConfig(granularity="full"))) == []
    assert faults(replace(facts, fp8=Fp8Config())) == []


def test_experts_want_a_transformer_engine_that_multiplies_them_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_stub.install(monkeypatch, version=engine_stub.OLDEST)
    fp8, experts = Fp8Config(engine="transformer_engine"), MoEConfig(router=RouterConfig(num_experts=4))
    wide = model(hidden_size=64, num_attention_heads=4, ffn_hidden_size=64, moe=experts)
    facts = Facts(sizes=Sizes(), fp8=fp8, model=wide, precision="bf16-mixed")
    [fault] = faults(facts)
    assert "needs Transformer Engine 2.3 or later" in fault
    assert faults(replace(facts, model=replace(wide, moe=None))) == []
    engine_stub.install(monkeypatch)
    assert faults(facts) == []


def test_a_sequence_that_ranks_cannot_share_evenly_is_a_fault_on_request_alone() -> None:
    def shown(sequence: int, **sizes: object) -> list[str]:
        facts = Facts(sizes=Sizes(world=4, cp=4, **sizes), model=model(), sequence_length=sequence)  # type: ignore[arg-type]
        return faults(facts)

    assert shown(60) == [] == shown(56, pads_uneven=False)
    [fault] = shown(60, pads_uneven=False)
    assert "sequence_length (60) must be a multiple of 8" in fault and "use 56 or 64" in fault
    # Ranks that exchange heads take any equal parts.
    assert shown(60, pads_uneven=False, cp_ulysses=2, cp_exchange="all_gather")[0].count("multiple of 8")


def test_sizes_below_one_are_faults_and_not_divided_by() -> None:
    [fault] = faults(Facts(sizes=Sizes(world=4, tp=0), model=model(), global_batch_size=8))
    assert "tensor_model_parallel_size (0) must be at least 1" in fault


def test_faults_of_dynamic_context_parallelism_are_reported_with_what_would_do() -> None:
    config = DynamicContextConfig(max_tokens_per_rank=16)
    sizes = Sizes(world=8, cp=2, pp=2)
    sound = Facts(sizes=sizes, model=model(num_attention_heads=4), sequence_length=64, dynamic_context=config)
    assert faults(sound) == []
    [shown] = faults(replace(sound, model=None, sequence_length=65))
    assert "sequence_length (65) must be at most max_tokens_per_rank (16) x the largest group (4 ranks) = 64" in shown
    assert "set max_tokens_per_rank to 17" in shown
    wrong = replace(
        sound,
        num_microbatches=2,
        model=model(),
        sizes=replace(sizes, pads_uneven=False),
        context=ContextConfig(comm_type="all_to_all"),
    )
    text = "\n".join(faults(wrong))
    assert "num_microbatches (2) must be 1" in text and "uneven='pad'" in text
    assert "(6) must be a multiple of the largest group of dynamic_context (4)" in text and "one of 1, 2" in text
    hierarchical = ContextConfig(comm_type="hierarchical", ulysses_size=2)
    assert any("'hierarchical'" in shown for shown in faults(replace(sound, context=hierarchical)))
    [shown] = faults(replace(sound, dynamic_context=replace(config, max_group_size=8)))
    assert "max_group_size (8)" in shown and "1, 2, 4" in shown
    fp8 = replace(sound, fp8=Fp8Config(), precision="bf16-mixed")
    assert any("give them: DynamicContextConfig(cost=" in shown for shown in faults(fp8))
    costly = replace(config, cost=CostModel(seconds_per_token=1.0))
    assert not any("cost=" in shown for shown in faults(replace(fp8, dynamic_context=costly)))


def test_a_forward_that_overlaps_a_backward_is_refused_with_recomputed_experts_and_with_nothing_else() -> None:
    def found(recompute: RecomputeConfig, is_overlapped: bool = True) -> list[str]:
        schedule = Schedule(name="1f1b", pp=2, chunks=1, microbatches=4, is_overlapped=is_overlapped)
        return faults(Facts(sizes=Sizes(world=2, pp=2), num_microbatches=4, schedule=schedule, recompute=recompute))

    full, experts = RecomputeConfig(granularity="full"), RecomputeConfig(granularity="selective", parts=("moe",))
    assert [len(found(recompute)) for recompute in (full, experts)] == [1, 1]
    assert "overlap_expert_exchange" in found(full)[0] and "'moe'" in found(experts)[0]
    assert not found(full, is_overlapped=False) and not found(experts, is_overlapped=False)
    assert not found(RecomputeConfig()) and not found(RecomputeConfig(granularity="selective", parts=("norm",)))


def test_faults_of_experts_on_a_layout_are_reported_with_what_would_do() -> None:
    experts = MoEConfig(router=RouterConfig(num_experts=6), ffn_hidden_size=50, shared_expert_intermediate_size=25)
    sound = Facts(sizes=Sizes(world=12, tp=1, ep=3, etp=2, pp=2), model=model(moe=experts))
    assert faults(sound) == []
    wrong = replace(sound, sizes=Sizes(world=16, tp=2, ep=4, etp=4))
    shown = faults(wrong)
    assert len(shown) == 4
    text = "\n".join(shown)
    assert "number of experts (6) must be a multiple of expert_model_parallel_size (4)" in text
    assert "expert_model_parallel_size may be 1, 2, 3, 6" in text
    assert "ffn_hidden_size of an expert (50) must be a multiple of expert_tensor_parallel_size (4)" in text
    assert "shared_expert_intermediate_size (25) must be a multiple of tensor_model_parallel_size (2)" in text
    assert "expert_model_parallel_size (4) with tensor_model_parallel_size (2) needs sequence_parallel" in text
    assert len(faults(replace(wrong, sizes=replace(wrong.sizes, sequence_parallel=True)))) == 3
    [world] = faults(replace(sound, sizes=Sizes(world=12, pp=2, ep=2, etp=2)))
    assert "world size (12) must be a multiple of pipeline x expert x expert tensor parallel size (8)" in world
    assert "use 8 or 16 processes" in world


def test_dynamic_context_parallelism_takes_experts_that_ask_each_time_how_many_tokens_come() -> None:
    config = DynamicContextConfig(max_tokens_per_rank=32)
    experts = MoEConfig(router=RouterConfig(num_experts=4), capacity=ExpertCapacity(factor=1.0))
    sound = Facts(sizes=Sizes(world=4, ep=2), model=model(moe=experts), dynamic_context=config)
    assert faults(sound) == []
    known = replace(experts, dispatcher="all_gather", capacity=ExpertCapacity(factor=1.0, pad_to_capacity=True))
    wrong = replace(sound, model=model(moe=known))
    assert ["all_gather" in shown or "pad_to_capacity" in shown for shown in faults(wrong)] == [True, True]
    assert faults(replace(wrong, sizes=Sizes(world=4))) == []


TOWER = VisionConfig(num_layers=3, hidden_size=32, num_attention_heads=4, image_size=28, patch_size=14)
SIZES_OF_MODEL = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}


def t5(**changes: object) -> T5Config:
    return T5Config(**(SIZES_OF_MODEL | changes))  # type: ignore[arg-type]


def bert(**changes: object) -> BertConfig:
    return BertConfig(**(SIZES_OF_MODEL | changes))  # type: ignore[arg-type]


def llava(tower: VisionConfig = TOWER, **changes: object) -> LlavaConfig:
    return LlavaConfig.of(GPTConfig(**(SIZES_OF_MODEL | changes)), vision=tower, image_token=99)  # type: ignore[arg-type]


def test_what_keeps_a_t5_from_its_ranks_is_reported_with_all_other_faults() -> None:
    sizes = Sizes(world=4, tp=4)
    assert faults(Facts(sizes=sizes, model=t5())) == []
    narrow = t5(num_query_groups=1, head_dim=5, ffn_hidden_size=66)
    shown = "\n".join(faults(Facts(sizes=sizes, model=narrow, num_microbatches=0)))
    for fault in (
        "the rows of the key-value weight of cross attention (10 = num_query_groups * 2 * head_dim) must be a multiple "
        "of tensor_model_parallel_size (4)",
        "the rows of the query-key-value weight (30",
        "ffn_hidden_size (66)",
        "num_microbatches (0)",
    ):
        assert fault in shown
    stages = faults(Facts(sizes=Sizes(world=9, pp=9), model=t5()))
    assert len(stages) == 1 and "layers (8)" in stages[0]


def test_what_keeps_a_llava_from_its_ranks_is_reported_with_all_other_faults() -> None:
    sizes = Sizes(world=8, tp=2, cp=4, cp_ulysses=2)
    assert faults(Facts(sizes=sizes, model=llava())) == []
    # Images are not cut over cp, so ranks that exchange heads ask nothing of the tower's.
    assert faults(Facts(sizes=sizes, model=llava(replace(TOWER, num_attention_heads=2, num_query_groups=2)))) == []
    tower = replace(TOWER, num_attention_heads=3, num_query_groups=3, head_dim=8)
    shown = faults(Facts(sizes=sizes, model=llava(tower, hidden_size=63, head_dim=16), global_batch_size=0))
    assert len(shown) == 4
    text = "\n".join(shown)
    assert "vision: num_attention_heads (3) must be a multiple of tensor_model_parallel_size (2)" in text
    assert "vision: num_query_groups (3) must be a multiple or a divisor" in text
    assert "hidden_size (63), the features between the linears of the projector" in text
    assert "global_batch_size (0)" in text


def test_sequences_that_see_both_ways_are_cut_into_one_piece_for_each_rank() -> None:
    def shown(model: object, sequence: int, decoder: int | None = None, **sizes: object) -> list[str]:
        cut = Sizes(world=4, cp=4, pads_uneven=False, **sizes)  # type: ignore[arg-type]
        return faults(Facts(sizes=cut, model=model, sequence_length=sequence, decoder_sequence_length=decoder))  # type: ignore[arg-type]

    for sizes in ({}, {"cp_ulysses": 2}, {"cp_ulysses": 4}):
        assert shown(bert(), 60, **sizes) == [] == shown(t5(), 60, **sizes)
        [fault] = shown(bert(), 62, **sizes)
        assert "sequence_length (62) must be a multiple of 4" in fault and "use 60 or 64" in fault
    # A decoder sees what came before alone: each rank has two pieces.
    assert shown(t5(), 60, 56) == []
    [fault] = shown(t5(), 60, 60)
    assert fault.startswith("decoder_sequence_length (60) must be a multiple of 8") and "use 56 or 64" in fault
    assert len(shown(t5(), 61, 60)) == 2
    assert shown(t5(), 60, 60, cp_ulysses=4) == []


def test_learned_positions_bound_the_sequence_of_each_stack() -> None:
    model = t5(position="learned", max_sequence_length=32, max_decoder_sequence_length=16)
    sound = Facts(sizes=Sizes(), model=model, sequence_length=32, decoder_sequence_length=16)
    assert faults(sound) == []
    shown = faults(replace(sound, sequence_length=33, decoder_sequence_length=17))
    assert shown[0].startswith("sequence_length (33) must be at most the model's max_sequence_length (32)")
    assert shown[1].startswith(
        "decoder_sequence_length (17) must be at most the model's max_decoder_sequence_length (16)"
    )
    assert faults(replace(sound, model=t5(), sequence_length=33, decoder_sequence_length=999)) == []


@pytest.mark.parametrize("model", [t5(), bert(), llava()], ids=["t5", "bert", "llava"])
def test_dynamic_context_parallelism_takes_gpts_alone_and_names_the_model(model: object) -> None:
    config = DynamicContextConfig(max_tokens_per_rank=16)
    sound = Facts(sizes=Sizes(world=4, cp=2), model=GPTConfig(**SIZES_OF_MODEL), dynamic_context=config)  # type: ignore[arg-type]
    assert faults(sound) == []
    [shown] = faults(replace(sound, model=model))  # type: ignore[arg-type]
    assert f"the model ({type(model).__name__}) must be a GPT's (GPTConfig) with dynamic_context" in shown
    assert "leave dynamic_context out: context_parallel_size" in shown
    # Beside what is wrong with its own settings.
    both = faults(replace(sound, model=model, dynamic_context=replace(config, max_group_size=8)))  # type: ignore[arg-type]
    assert len(both) == 2 and "max_group_size (8)" in both[1]


def test_a_gather_in_float8_asks_for_weights_that_are_gathered() -> None:
    facts = Facts(sizes=Sizes(world=2), fp8=Fp8Config(param_gather="float8"), precision="bf16-mixed")
    for kind in ("replicated", "distributed_gradients"):
        [shown] = faults(replace(facts, optimizer=OptimizerConfig(kind=kind)))
        assert shown.startswith("fp8 param_gather ('float8') acts with") and f"the kind is {kind!r}" in shown
    assert faults(replace(facts, optimizer=OptimizerConfig(kind="distributed_parameters"))) == []


def test_fp8_asks_for_norms_before_the_linears_of_a_bert() -> None:
    facts = Facts(sizes=Sizes(), model=bert(), fp8=Fp8Config(), precision="bf16-mixed")
    [shown] = faults(facts)
    assert shown.startswith("norm_placement ('post') must be 'pre' for fp8")
    assert "BertConfig(norm_placement='pre'), or leave fp8 out" in shown
    assert faults(replace(facts, model=bert(norm_placement="pre"))) == []
    assert faults(replace(facts, fp8=None)) == []


def test_tiles_of_cross_attention_and_of_a_tower_are_reported() -> None:
    facts = Facts(sizes=Sizes(world=2, tp=2), fp8=Fp8Config(), precision="bf16-mixed")
    assert faults(replace(facts, model=t5())) == [] == faults(replace(facts, model=llava()))
    # 4 heads and 1 group of 8: 48 rows of queries, keys and values, and 16 of keys and values.
    narrow = t5(num_query_groups=1, head_dim=8, ffn_hidden_size=64)
    cross = [fault for fault in faults(replace(facts, model=narrow)) if "cross attention" in fault]
    assert len(cross) == 1 and "(16) must be a multiple of 16 x tensor_model_parallel_size (16 x 2 = 32)" in cross[0]
    [shown] = faults(replace(facts, model=llava(replace(TOWER, ffn_hidden_size=72))))
    assert shown.startswith("vision: ffn_hidden_size (72) must be a multiple of 16 x tensor_model_parallel_size")
    # That no layer of the tower is left for fp8 is nobody's fault.
    kept = Fp8Config(num_first_layers_bf16=3)
    assert faults(replace(facts, model=llava(), fp8=kept)) == []
