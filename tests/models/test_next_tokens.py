"""Layers that predict tokens beyond the next learn as in plain torch, on any layout, and change nothing else."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron import hf
from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Mesh, Sizes, StageLayout
from lightning_megatron.models import BertConfig, GPTConfig, GPTModel
from lightning_megatron.pipeline.registry import placement_of
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.testing import certify
from tests.harness.sample import every_nth
from tests.harness.threads import new_group, run_on_threads
from tests.hf.test_gradients import Trains, batches
from tests.hf.tiny import ours, saved
from tests.models.scheduled import mailbox_of, run_step, summed
from tests.models.test_context import segments_of
from tests.models.test_gpt import LATENT, LLAMA, TOLERANCE, batch_of, largest_difference, model_of, reference_of
from tests.reference.unsplit import unsplit_gradients, unsplit_weights

VARIANTS = {
    "two more, dropout": replace(
        LLAMA, num_mtp_layers=2, mtp_loss_weight=0.7, hidden_dropout=0.1, attention_dropout=0.1, scales_embedding=True
    ),
    "one more, tied, latents": replace(
        LLAMA, num_query_groups=8, head_dim=10, latent=LATENT, num_mtp_layers=1, tie_embeddings=True
    ),
}
SIZES = {
    "one device": Sizes(),
    "tp2": Sizes(world=2, tp=2),
    "tp4 sp": Sizes(world=4, tp=4, sequence_parallel=True),
    "cp2": Sizes(world=2, cp=2),
    "tp2 sp, cp2": Sizes(world=4, tp=2, cp=2, sequence_parallel=True),
}


def on_mesh(world: Any, sizes: Sizes, config: GPTConfig, is_packed: bool) -> dict[str, Any]:
    model = model_of(config, Mesh.build(sizes, world.rank(), new_group))
    model.draws.step = 5
    segments = segments_of(3, 13) if is_packed else None
    loss = model(*batch_of(3, 13), segments)
    loss.backward()
    cp = model.mesh.cp
    grads = {name: collectives.all_reduce(g, cp) / cp.size for name, g in unsplit_gradients(model).items()}
    model.eval()
    return {"loss": loss.item(), "grads": grads, "evaluated": model(*batch_of(3, 13), segments).item()}


@functools.cache
def expected_of(variant: str, is_packed: bool) -> dict[str, Any]:
    config = VARIANTS[variant]
    segments = segments_of(3, 13) if is_packed else None
    reference, leaves = reference_of(config, unsplit_weights(model_of(config)), 5)
    loss = reference.loss(*batch_of(3, 13), segments)
    loss.backward()
    return {"loss": loss.item(), "grads": {name: leaf.grad for name, leaf in leaves.items()}}


@pytest.mark.matrix
@pytest.mark.parametrize("is_packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", SIZES)
def test_loss_and_gradients_equal_the_reference(layout: str, variant: str, is_packed: bool) -> None:
    sizes, config = SIZES[layout], VARIANTS[variant]
    expected = expected_of(variant, is_packed)
    assert expected["grads"]["mtp.0.projection.weight"].abs().max() > 1e-3
    for found in run_on_threads(sizes.world, on_mesh, sizes, config, is_packed):
        assert abs(found["loss"] - expected["loss"]) < TOLERANCE
        assert largest_difference(found["grads"], expected["grads"]) < TOLERANCE


def test_neither_the_value_of_the_loss_nor_logits_know_of_them() -> None:
    tokens, labels, mask = batch_of(3, 13)
    with_them, without = (model_of(replace(LLAMA, num_mtp_layers=number, hidden_dropout=0.0)) for number in (2, 0))
    loss, plain = with_them(tokens, labels, mask), without(tokens, labels, mask)
    assert loss.item() == plain.item() and torch.equal(with_them(tokens), without(tokens))
    loss.backward()
    plain.backward()
    # But the embedding and the head learn from them.
    for name in ("embedding.tokens.weight", "head.weight"):
        of_both = [model.get_parameter(name).grad for model in (with_them, without)]
        assert of_both[0] is not None and of_both[1] is not None
        assert (of_both[0] - of_both[1]).abs().max() > 1e-3


SCHEDULES = {
    "pp2": Schedule(name="1f1b", pp=2, chunks=1, microbatches=3),
    "pp2 vp2": Schedule(name="interleaved", pp=2, chunks=2, microbatches=4),
    "pp2 zero bubble": Schedule(name="zb_h1", pp=2, chunks=1, microbatches=3),
    "pp2 zb_v": Schedule(name="zb_v", pp=2, chunks=2, microbatches=3),
}


def stepped(world: Any, sizes: Sizes, schedule: Schedule, config: GPTConfig) -> dict[str, Any]:
    model = model_of(config, Mesh.build(sizes, world.rank(), new_group))
    model.draws.step = 5
    tokens, labels, mask = batch_of(2 * schedule.microbatches, 13)
    batch = {"tokens": tokens, "labels": labels, "loss_mask": mask}
    total = mask.masked_fill(labels == -100, 0.0).sum()
    loss = run_step(model, schedule, batch, total, mailbox_of(model.mesh))
    return {"loss": loss, "grads": unsplit_gradients(model)}


@pytest.mark.matrix
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_makes_the_loss_and_the_gradients_of_one_device(name: str, tp: int, variant: str) -> None:
    schedule, config = SCHEDULES[name], replace(VARIANTS[variant], num_layers=4)
    model = model_of(config)
    model.draws.step = 5
    loss = model(*batch_of(2 * schedule.microbatches, 13))
    loss.backward()
    expected = unsplit_gradients(model)
    sizes = Sizes(
        world=2 * tp,
        tp=tp,
        pp=2,
        vp=schedule.chunks,
        sequence_parallel=tp > 1,
        placement=placement_of(schedule.name),
    )
    found = run_on_threads(sizes.world, stepped, sizes, schedule, config)
    assert abs(sum(result["loss"] for result in found[::tp]) - loss.item()) < TOLERANCE
    assert largest_difference(summed([result["grads"] for result in found[::tp]]), expected) < TOLERANCE


def test_the_head_may_be_on_a_stage_of_its_own() -> None:
    schedule, config = SCHEDULES["pp2"], VARIANTS["two more, dropout"]
    model = model_of(config)
    model.draws.step = 5
    model(*batch_of(2 * schedule.microbatches, 13)).backward()
    layers = "t" * config.num_layers
    sizes = Sizes(world=2, pp=2, stage_layout=StageLayout(text=f"E{layers}|L"))
    found = run_on_threads(2, stepped, sizes, schedule, config)
    assert largest_difference(summed([one["grads"] for one in found]), unsplit_gradients(model)) < TOLERANCE


class TrainsFurther(Trains):
    """Trains a DeepSeek-V3 of four layers that predicts two more tokens."""

    def __init__(self) -> None:
        super().__init__("deepseek_v3", 4)
        self.config = replace(self.config, num_mtp_layers=2)


LAYOUTS = [
    *("tp2pp2m2", "pp2vp2m4", "tp2-sp", "cp2", "pp2m4-zb_h1", "dp2pp2m2-zero3", "pp2vp2m4-zb_v", "dp2pp2m4-zero"),
    *("ep2", "tp2cp2-sp", "dp4ep2m2-zero2", "pp2ep2m2", "pp2-collective"),
]


@pytest.mark.matrix
@pytest.mark.parametrize("layout", every_nth(LAYOUTS, 5))
def test_steps_on_layouts_are_those_of_one_device(layout: str) -> None:
    found = certify(TrainsFurther, batches, layouts=(layout,), steps=2)
    found.assert_equal()
    assert all(value < 1e-10 for result in found.results for value in result.largest.values())


def test_files_have_none_of_them(tmp_path: Path) -> None:
    saved("deepseek_v3", tmp_path / "theirs")
    plain = ours(tmp_path / "theirs")
    model = GPTModel(replace(plain.config, num_mtp_layers=1), seed=1)
    model.load_state_dict(plain.state_dict(), strict=False)
    hf.save_pretrained(model, tmp_path / "ours", family="deepseek_v3")
    again = dict(ours(tmp_path / "ours").named_parameters())
    assert all(torch.equal(again[name], weight) for name, weight in plain.named_parameters())


def test_models_that_have_none_refuse_them() -> None:
    with pytest.raises(ValueError, match=r"num_mtp_layers \(1\) must be 0: multi-token prediction is built for GPTs"):
        BertConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=9, num_mtp_layers=1)
    with pytest.raises(ValueError, match=r"mtp_loss_weight \(-1.0\) must be at least 0"):
        replace(LLAMA, num_mtp_layers=1, mtp_loss_weight=-1.0)
