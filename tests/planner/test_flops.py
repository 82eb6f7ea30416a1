"""Recomputed FLOPs equal the additional FLOPs of a backward under recomputation, counted as it runs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import GPTConfig, GPTModel, LlavaConfig
from lightning_megatron.models.vision import VisionConfig
from lightning_megatron.planner.dry_run import dry_run
from lightning_megatron.planner.flops import (
    BY_PARAMETERS,
    HARDWARE,
    HARDWARE_ALL_PAIRS,
    MODEL,
    batch_flops,
    recomputed_flops,
    step_flops,
)
from lightning_megatron.planner.model_parts import SequenceLengths, model_parts_of, part_flops
from lightning_megatron.planner.run import Run
from lightning_megatron.transformer import cost, recompute
from lightning_megatron.transformer.recompute import RecomputeConfig

ROWS, SEQUENCE = 2, 12
CONFIG = GPTConfig(
    num_layers=4, hidden_size=16, num_attention_heads=2, vocab_size=40, max_sequence_length=SEQUENCE, ffn_hidden_size=48
)
CASES = {
    "mlp": RecomputeConfig(granularity="selective", parts=("mlp",)),
    "attention that drops": RecomputeConfig(granularity="selective", parts=("core_attention",)),
    "attention and mlp": RecomputeConfig(granularity="selective", parts=("core_attention", "mlp")),
    "full": RecomputeConfig(granularity="full"),
    "full, groups of two": RecomputeConfig(granularity="full", num_layers=2),
    "full, three layers of a stage": RecomputeConfig(granularity="full", method="block", num_layers=3),
}
# Attention that lays its weights out is two products that torch counts, of all pairs.
DROPS = replace(CONFIG, attention_dropout=0.1)


def counted(config: GPTConfig, how: RecomputeConfig) -> int:
    """FLOPs of a forward and a backward, as torch counts them."""
    torch.manual_seed(0)
    model = GPTModel(config, mesh=Mesh.single())
    recompute.set_recomputed(model, how)
    model.runner = recompute.RecomputeRunner(how, tp=Mesh.single().tp, sp=Mesh.single().sp)
    tokens = torch.randint(config.vocab_size, (ROWS, SEQUENCE))
    # Torch would omit the last recomputed product, whose output no backward reads; the convention counts it.
    with set_checkpoint_early_stop(False), FlopCounterMode(display=False) as counter:
        loss: Any = model(tokens, labels=tokens)
        loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", CASES)
def test_recomputation_is_what_torch_counts_more(name: str) -> None:
    more = counted(DROPS, CASES[name]) - counted(DROPS, RecomputeConfig())
    model_parts = model_parts_of(DROPS, SequenceLengths(sequence=SEQUENCE))
    assert more > 0
    assert recomputed_flops(model_parts, ROWS, CASES[name], counts_all_pairs=True) == more


@pytest.mark.parametrize("name", CASES)
def test_hardware_flops_are_model_flops_and_those(name: str) -> None:
    model_parts = model_parts_of(DROPS, SequenceLengths(sequence=SEQUENCE))
    recomputed = recomputed_flops(model_parts, ROWS, CASES[name])
    assert (
        batch_flops(model_parts, ROWS, HARDWARE, CASES[name])
        == batch_flops(model_parts, ROWS, MODEL, CASES[name]) + recomputed
    )
    # Of causal attention a half is needed.
    all_pairs = batch_flops(model_parts, ROWS, HARDWARE_ALL_PAIRS, CASES[name])
    assert batch_flops(model_parts, ROWS, HARDWARE, CASES[name]) < all_pairs


def test_by_parameters_recomputation_is_a_third_of_its_layers() -> None:
    model_parts, recomputed = (
        model_parts_of(CONFIG, SequenceLengths(sequence=SEQUENCE)),
        replace(BY_PARAMETERS, counts_recompute=True),
    )
    once = batch_flops(model_parts, ROWS, BY_PARAMETERS, CASES["full"])
    assert batch_flops(model_parts, ROWS, recomputed, CASES["full"]) == pytest.approx(once * 4 / 3)
    # Three of four layers, or, of a stage that has no more, two each.
    block = CASES["full, three layers of a stage"]
    assert batch_flops(model_parts, ROWS, recomputed, block) == pytest.approx(once * 5 / 4)
    assert batch_flops(model_parts, ROWS, recomputed, block, Sizes(world=2, pp=2)) == pytest.approx(once * 4 / 3)
    assert batch_flops(model_parts, ROWS, recomputed, CASES["mlp"]) == once


def test_attention_in_one_kernel_is_not_recomputed_and_a_vision_tower_is() -> None:
    attention = RecomputeConfig(granularity="selective")
    assert recomputed_flops(model_parts_of(CONFIG, SequenceLengths(sequence=SEQUENCE)), ROWS, attention) == 0
    assert recomputed_flops(model_parts_of(DROPS, SequenceLengths(sequence=SEQUENCE)), ROWS, attention) > 0
    vision = VisionConfig(num_layers=3, hidden_size=16, num_attention_heads=2, image_size=16, patch_size=8)
    llava = LlavaConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=40,
        max_sequence_length=SEQUENCE,
        ffn_hidden_size=48,
        vision=vision,
        image_token=1,
    )
    full, mlp = CASES["full"], CASES["mlp"]
    with_images, without = (
        model_parts_of(llava, SequenceLengths(sequence=SEQUENCE, images=images)) for images in (2, 0)
    )
    tower = [part for part in with_images.parts if part.component == "vision" and part.is_layer]
    # The last of its three layers never runs.
    assert len(tower) == 2
    recomputed_parts = sum(part_flops(part, llava, batch=1) for part in tower)
    assert recomputed_flops(with_images, 1, full) == recomputed_flops(without, 1, full) + recomputed_parts
    assert recomputed_flops(with_images, 1, mlp) > recomputed_flops(without, 1, mlp)


def test_layers_that_predict_further_multiply_as_they_are_counted() -> None:
    config, lengths = replace(CONFIG, num_mtp_layers=2), SequenceLengths(sequence=SEQUENCE)
    run = Run(model=config, lengths=lengths, sizes=Sizes(), global_batch_size=2 * ROWS)
    assert step_flops(run) == cost.training_flops(config, batch=2 * ROWS, sequence=SEQUENCE)
    assert sum(dry_run(run, 0).flops.values()) == step_flops(run)
