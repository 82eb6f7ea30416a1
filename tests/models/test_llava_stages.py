"""LlavaModel in stages equals the one in a piece: loss, logits and every gradient, with microbatches of few images."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import LlavaModel
from lightning_megatron.pipeline.collective import CollectiveCall
from lightning_megatron.pipeline.registry import placement_of
from lightning_megatron.pipeline.schedule_spec import Schedule
from tests.harness.ranks import run_on_ranks
from tests.harness.threads import new_group, run_on_threads
from tests.models.scheduled import mailbox_of, run_step, summed
from tests.models.small_llava import COUNTS, IMAGE, LLAVA, VISION, batch_of, model_of
from tests.pipeline.meshes import make_mailbox, make_mesh
from tests.reference.unsplit import unsplit_gradients

# Sums of a few hundred float64 numbers of order 1, in another order.
TOLERANCE = 1e-12


def run(mesh: Mesh, case: str, frozen: tuple[str, ...]) -> dict[str, Any]:
    model = model_of(LLAVA, mesh)
    model.freeze(*frozen)
    batch = batch_of(LLAVA, COUNTS[case])
    if mesh.pp.size > 1:
        model.driver = CollectiveCall(mesh.pp, make_mailbox(mesh), torch.device("cpu"), lambda rows: rows)
    loss = model(**batch)
    loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    grads = {name: grad for name, grad in unsplit_gradients(model).items() if name in trained}
    missing = {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}
    with torch.no_grad():
        logits = model(batch["tokens"], images=batch["images"])
    return {"loss": loss.item(), "logits": logits, "grads": grads, "missing": missing}


def on_stages(sizes: Sizes, case: str, frozen: tuple[str, ...]) -> dict[str, Any]:
    return run(make_mesh(sizes), case, frozen)


@pytest.mark.parametrize(
    ("sizes", "case", "frozen"),
    [
        (Sizes(world=2, pp=2), "some", ()),
        (Sizes(world=2, pp=2), "none", ()),
        (Sizes(world=4, pp=2, tp=2, sequence_parallel=True), "some", ()),
        (Sizes(world=2, pp=2), "some", ("vision", "language")),
    ],
)
def test_stages_compute_what_the_unsplit_model_computes(sizes: Sizes, case: str, frozen: tuple[str, ...]) -> None:
    expected = run(Mesh.single(), case, frozen)
    covered: set[str] = set()
    for found in run_on_ranks(sizes.world, on_stages, sizes, case, frozen):
        assert abs(found["loss"] - expected["loss"]) < TOLERANCE
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=0, atol=1e-11)
        assert found["missing"] == set()
        for name, grad in found["grads"].items():
            wanted: Tensor = expected["grads"][name]
            assert (grad - wanted).abs().max() < TOLERANCE * wanted.abs().max().clamp(min=1)
        covered |= found["grads"].keys()
    assert covered == expected["grads"].keys()


# --- under a schedule -------------------------------------------------------------------------------------------------

DEEP = replace(LLAVA, num_layers=4, hidden_dropout=0.1, vision=replace(VISION, hidden_dropout=0.1))
# Of three to four microbatches of two rows each: some have no image, and so has one whole microbatch.
MIXED = (1, 0, 0, 0, 2, 1, 0, 2)
SCHEDULES = {
    "pp2": Schedule(name="1f1b", pp=2, chunks=1, microbatches=3),
    "pp2 vp2": Schedule(name="interleaved", pp=2, chunks=2, microbatches=4),
    "pp2 zero bubble": Schedule(name="zb_h1", pp=2, chunks=1, microbatches=3),
    "pp2 zb_v": Schedule(name="zb_v", pp=2, chunks=2, microbatches=3),
}


def stepped(world: Any, sizes: Sizes, schedule: Schedule, frozen: tuple[str, ...]) -> dict[str, Any]:
    model = LlavaModel(DEEP, mesh=Mesh.build(sizes, world.rank(), new_group), seed=7).double()
    model.freeze(*frozen)
    model.draws.step = 5
    batch = batch_of(DEEP, MIXED[: 2 * schedule.microbatches])
    loss = run_step(model, schedule, batch, weight_of(batch), mailbox_of(model.mesh))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = {name: grad for name, grad in unsplit_gradients(model).items() if name in trained}
    return {"loss": loss, "grads": grads, "missing": {name for name, p in trained.items() if p.grad is None}}


def weight_of(batch: dict[str, Any]) -> Tensor:
    counts = (batch["labels"] != -100) & (batch["labels"] != IMAGE)
    return torch.where(counts, batch["loss_mask"], 0.0).sum()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("frozen", [(), ("vision", "language")], ids=["all trained", "the projector alone"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_makes_the_loss_and_the_gradients_of_one_device(name: str, frozen: tuple[str, ...], tp: int) -> None:
    schedule = SCHEDULES[name]
    alone = LlavaModel(DEEP, seed=7).double()
    alone.freeze(*frozen)
    alone.draws.step = 5
    loss = alone(**batch_of(DEEP, MIXED[: 2 * schedule.microbatches]))
    loss.backward()
    trained = {name for name, p in alone.named_parameters() if p.requires_grad}
    expected = {name: grad for name, grad in unsplit_gradients(alone).items() if name in trained}
    assert min(float(grad.abs().max()) for grad in expected.values()) > 1e-6
    sizes = Sizes(
        world=2 * tp,
        pp=2,
        vp=schedule.chunks,
        tp=tp,
        sequence_parallel=tp > 1,
        placement=placement_of(schedule.name),
    )
    found = run_on_threads(sizes.world, stepped, sizes, schedule, frozen)
    assert sum(result["loss"] for result in found[::tp]) == pytest.approx(loss.item(), abs=TOLERANCE)
    assert all(result["missing"] == set() for result in found)
    grads = summed([result["grads"] for result in found[::tp]])
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert (grad - expected[name]).abs().max() < TOLERANCE * expected[name].abs().max().clamp(min=1), name
