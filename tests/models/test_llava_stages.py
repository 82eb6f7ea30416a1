"""LlavaModel in stages equals the one in a piece: loss, logits and every gradient, with microbatches of few images."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.pipeline.collective import CollectiveCall
from tests.harness.ranks import run_on_ranks
from tests.models.small_llava import COUNTS, LLAVA, batch_of, model_of
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
