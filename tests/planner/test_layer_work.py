"""What ranks do adds up to the FLOPs of the unsplit model, and what they send is what layouts ask for."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_megatron.mesh import Sizes
from lightning_megatron.models import BertConfig, GPTConfig, T5Config
from lightning_megatron.moe.capacity import ExpertCapacity
from lightning_megatron.planner.dry_run import dry_run
from lightning_megatron.planner.layer_work import LayerWork, layer_work_of
from lightning_megatron.planner.model_parts import (
    Model,
    SequenceLengths,
    model_parts_of,
    part_flops,
    shared_over_context,
)
from lightning_megatron.planner.presets import PRESETS
from lightning_megatron.planner.run import Run

LLAMA = PRESETS["llama3_8b"]


def layer_work(sizes: Sizes, name: str = "llama3_8b") -> LayerWork:
    preset = PRESETS[name]
    model_parts = model_parts_of(preset.model, preset.lengths)
    [part] = {part for part in model_parts.parts if part.symbol == "t"}
    return layer_work_of(part, model_parts, sizes, 1, 2)


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("name", ["gpt3_175b", "llama3_8b", "mixtral_8x7b", "bert_large", "t5_11b", "llava_7b"])
def test_the_flops_of_all_ranks_are_those_of_the_model(name: str, tp: int, cp: int) -> None:
    preset = PRESETS[name]
    model_parts = model_parts_of(preset.model, preset.lengths)
    sizes = Sizes(world=tp * cp, tp=tp, cp=cp, sequence_parallel=tp > 1)
    for part in set(model_parts.parts):
        if any(not product.is_cut for product in part.products):
            continue
        # Of two images each of two ranks of cp has one.
        work = layer_work_of(shared_over_context(part, preset.lengths.images, 2, cp), model_parts, sizes, 2, 2)
        done = (work.product_flops + work.flash_flops + work.head_flops) * tp
        # A vocabulary that tp does not divide is padded.
        assert done * cp == pytest.approx(part_flops(part, model_parts.config, batch=2), rel=1e-3)


def test_a_layer_gathers_and_scatters_its_stream_twice_each() -> None:
    assert layer_work(Sizes()).tensor_bytes == 0
    work = layer_work(Sizes(world=4, tp=4, sequence_parallel=True))
    assert work.num_tensor_messages == 4 and work.tensor_bytes == 4 * 8192 * 4096 * 2


def test_ranks_that_share_a_sequence_exchange_keys_and_values_of_their_part() -> None:
    assert layer_work(Sizes()).key_bytes == layer_work(Sizes()).query_bytes == 0
    work = layer_work(Sizes(world=8, cp=4, tp=2, sequence_parallel=True))
    assert work.key_bytes == 2 * 2048 * 4 * 128 * 2 and work.query_bytes == 2048 * 16 * 128 * 2


def test_inputs_of_products_are_cast_once_and_before_they_are_gathered() -> None:
    tokens, hidden, ffn = 8192, 4096, 14336
    assert layer_work(Sizes()).cast_bytes == 3 * tokens * (3 * hidden + ffn)
    cut = layer_work(Sizes(world=4, tp=4, sequence_parallel=True))
    assert cut.cast_bytes == 3 * tokens * (3 * hidden + ffn) / 4
    # Without sequence parallelism each rank has all of what its column-parallel products read.
    assert layer_work(Sizes(world=4, tp=4)).cast_bytes == 3 * tokens * (2 * hidden + (hidden + ffn) / 4)


def test_of_seven_products_every_second_is_of_keys_attention_and_up() -> None:
    work = layer_work(Sizes())
    assert work.second_flops == 2 * 8192 * 4096 * (1024 + 4096 + 14336)
    assert layer_work(Sizes(world=2, tp=2)).second_flops == work.second_flops / 2


def test_attention_fills_its_kernel_by_the_keys_of_one_call() -> None:
    def keys(sizes: Sizes, model: GPTConfig) -> float:
        model_parts = model_parts_of(model, SequenceLengths(sequence=4096))
        [part] = {part for part in model_parts.parts if part.symbol == "t"}
        work = layer_work_of(part, model_parts, sizes, 1, 2)
        return work.flash_flops / work.flash_edge_flops

    plain = GPTConfig(num_layers=2, hidden_size=256, num_attention_heads=4, max_sequence_length=4096, vocab_size=512)
    assert keys(Sizes(), plain) == pytest.approx(4096)
    assert keys(Sizes(), replace(plain, sliding_window=128)) == pytest.approx(128)
    assert keys(Sizes(), replace(plain, sliding_window=8192)) == pytest.approx(4096)
    assert keys(Sizes(world=4, cp=4), plain) == pytest.approx(1024)
    assert keys(Sizes(world=4, cp=4, cp_ulysses=2), plain) == pytest.approx(2048)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_decoder_attends_twice_by_the_keys_of_each(dropout: float) -> None:
    model = T5Config(num_layers=2, hidden_size=256, num_attention_heads=4, vocab_size=512, attention_dropout=dropout)
    model_parts = model_parts_of(model, SequenceLengths(sequence=512, decoder_sequence=128))
    encoder, decoder = dict.fromkeys(replace(part, sharded=0) for part in model_parts.parts if part.symbol == "t")
    of_encoder, of_decoder = (
        layer_work_of(part, model_parts, Sizes(world=2, cp=2), 1, 2) for part in (encoder, decoder)
    )
    # A rank has half of the queries, and in one call half of the keys.
    pairs = {"encoder": 256 * 512, "own": 64 * 128, "memory": 64 * 512}
    flops = {name: 4 * number * 256 for name, number in pairs.items()}
    if dropout:
        assert of_encoder.materialised_flops == flops["encoder"]
        assert of_decoder.materialised_flops == flops["own"] + flops["memory"]
        edges = [of_encoder.flash_edge_flops, of_encoder.both_ways_edge_flops]
        edges += [of_decoder.flash_edge_flops, of_decoder.both_ways_edge_flops]
        assert edges == [0.0] * 4
    else:
        assert of_decoder.flash_flops == flops["own"] / 2 + flops["memory"] and of_decoder.materialised_flops == 0
        assert (of_encoder.flash_edge_flops, of_encoder.both_ways_edge_flops) == (0.0, flops["encoder"] / 256)
        assert of_decoder.flash_edge_flops == flops["own"] / 2 / 64
        assert of_decoder.both_ways_edge_flops == flops["memory"] / 256


def test_attention_with_dropout_lays_out_a_pair_for_each_query_and_key() -> None:
    assert layer_work(Sizes()).num_pairs == 0
    model = replace(PRESETS["gpt3_175b"].model, attention_dropout=0.1)
    model_parts = model_parts_of(model, SequenceLengths(sequence=2048))
    [part] = {part for part in model_parts.parts if part.symbol == "t"}
    work = layer_work_of(part, model_parts, Sizes(world=8, tp=8, sequence_parallel=True), 2, 2)
    assert work.num_pairs == 2 * 2048 * 2048 * 96 / 8 and work.flash_flops == work.flash_edge_flops == 0


def test_tokens_go_to_their_experts_and_back() -> None:
    work = layer_work(Sizes(world=8, tp=2, ep=4, sequence_parallel=True), "mixtral_8x7b")
    assert work.expert_bytes == 2 * (4096 / 2) * 2 * 4096 * 2 and work.num_expert_layers == 1


def test_experts_have_as_many_rows_as_tokens_choose_whatever_the_layout() -> None:
    alone = layer_work(Sizes(), "mixtral_8x7b")
    spread = layer_work(Sizes(world=8, ep=8), "mixtral_8x7b")
    assert spread.product_flops == pytest.approx(alone.product_flops)
    # A rank with one expert multiplies all its tokens at once.
    assert spread.grouped_edge_flops < alone.grouped_edge_flops


@pytest.mark.parametrize(
    ("factor", "pads", "cp", "are_packed", "rows"),
    # Of a rank, of 2 choices a token: the padded capacity is that of the whole sequence.
    [
        (2.0, False, 1, False, 2),
        (2.0, True, 1, False, 4),
        (0.5, False, 1, False, 1),
        (0.5, True, 1, False, 1),
        (0.5, False, 2, False, 1),
        (0.5, True, 2, False, 2),
        # Replicas that share the experts have other documents.
        (2.0, True, 1, True, 2),
    ],
)
def test_a_capacity_bounds_the_rows_of_experts_and_fills_them_up(
    factor: float, pads: bool, cp: int, are_packed: bool, rows: int
) -> None:
    plain = PRESETS["mixtral_8x7b"]
    assert plain.model.moe is not None
    capacity, lengths = (
        ExpertCapacity(factor=factor, pad_to_capacity=pads),
        replace(plain.lengths, are_packed=are_packed),
    )
    model = replace(plain.model, moe=replace(plain.model.moe, capacity=capacity))
    work, without = (
        layer_work_of(model_parts.parts[1], model_parts, Sizes(world=8 * cp, ep=8, cp=cp), 1, 2)
        for model_parts in (model_parts_of(each, lengths) for each in (model, plain.model))
    )
    assert work.expert_bytes == without.expert_bytes * rows / 2
    experts = without.mlp_flops - 2 * 4096 / cp * 4096 * 8
    assert work.mlp_flops - without.mlp_flops == pytest.approx(experts * (rows / 2 - 1))


TINY = GPTConfig(
    num_layers=1,
    hidden_size=64,
    num_attention_heads=8,
    num_query_groups=2,
    vocab_size=64,
    max_sequence_length=64,
    position="rotary",
)
TINY_BERT = BertConfig(
    num_layers=1,
    hidden_size=64,
    num_attention_heads=8,
    num_query_groups=2,
    vocab_size=64,
    max_sequence_length=64,
    add_binary_head=False,
)
TINY_T5 = T5Config(
    num_layers=1, num_decoder_layers=1, hidden_size=64, num_attention_heads=8, num_query_groups=2, vocab_size=64
)


@pytest.mark.parametrize(
    ("model", "changes", "is_materialised"),
    [
        (TINY, {}, True),
        (TINY, {"precision": "bf16-mixed"}, False),
        (replace(TINY, num_query_groups=8), {}, False),
        (TINY, {"sizes": Sizes(world=4, tp=4)}, True),
        (TINY, {"sizes": Sizes(world=8, tp=8)}, False),
        (TINY, {"sizes": Sizes(world=2, cp=2)}, False),
        (TINY, {"lengths": SequenceLengths(sequence=64, are_packed=True)}, False),
        (replace(TINY, sliding_window=16), {}, False),
        (replace(TINY, sliding_window=64), {}, True),
        (TINY_BERT, {}, False),
        # Each of its own streams, and not attention to the encoder.
        (replace(TINY_T5, position="learned"), {"lengths": SequenceLengths(sequence=64, decoder_sequence=32)}, True),
    ],
    ids=["groups", "half", "heads", "tp", "one head", "cp", "packed", "window", "wide window", "BERT", "T5"],
)
def test_scores_are_materialised_where_the_code_finds_no_kernel(
    model: Model, changes: dict[str, Any], is_materialised: bool
) -> None:
    fields = {
        "lengths": SequenceLengths(sequence=64),
        "sizes": Sizes(),
        "global_batch_size": 1,
        "precision": "32-true",
    } | changes
    run = Run(model=model, **fields)
    parts = run.model_parts.parts
    works = [layer_work_of(part, run.model_parts, run.sizes, 1, run.bytes_per_element) for part in parts]
    assert any(work.materialised_flops for work in works) == is_materialised
    multiplied = sum(work.product_flops + work.head_flops + work.materialised_flops for work in works)
    found = dry_run(run, 0).flops
    assert found["products"] == 3 * multiplied
    # Blocks of a window compute some pairs that they hide.
    attended = 3 * sum(work.flash_flops for work in works)
    assert found.get("attention", 0) == attended or run.model.sliding_window == 16
