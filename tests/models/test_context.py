"""GPTModel equals a GPT in plain torch where ranks share sequences and documents share a row."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import GPTConfig
from tests.harness.threads import new_group, run_on_threads
from tests.models.test_gpt import (
    LLAMA,
    TOLERANCE,
    VARIANTS,
    batch_of,
    largest_difference,
    model_of,
    reference_of,
)
from tests.reference.unsplit import unsplit_gradients, unsplit_weights

EXCHANGES: dict[str, dict[str, Any]] = {
    "ring of 2": {"cp": 2},
    "all-gather of 2": {"cp": 2, "cp_exchange": "all_gather"},
    "all-to-all of 2": {"cp": 2, "cp_ulysses": 2},
    "ring of 4": {"cp": 4},
    "hierarchical of 4": {"cp": 4, "cp_ulysses": 2},
    "ring of 2, tp2": {"cp": 2, "tp": 2},
    "all-to-all of 2, tp2 with sequence parallelism": {"cp": 2, "cp_ulysses": 2, "tp": 2, "sequence_parallel": True},
    "ring of 2, tp2 with sequence parallelism": {"cp": 2, "tp": 2, "sequence_parallel": True},
}


def segments_of(batch: int, sequence: int) -> Tensor:
    """Documents of 1 token and more, padding at the end of some rows, and a last row of nothing but padding."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for _ in range(batch):
        lengths = torch.randint(1, 6, (sequence,), generator=generator)
        row = torch.arange(sequence).repeat_interleave(lengths)[:sequence].clone()
        row[sequence - int(torch.randint(0, 3, (), generator=generator)) :] = -1
        rows.append(row)
    if batch > 2:
        rows[-1].fill_(-1)
    return torch.stack(rows)


def on_mesh(world: Any, sizes: Sizes, config: GPTConfig, batch: int, sequence: int, is_packed: bool) -> dict[str, Any]:
    model = model_of(config, Mesh.build(sizes, world.rank(), new_group))
    model.draws.step = 5
    tokens, labels, mask = batch_of(batch, sequence)
    segments = segments_of(batch, sequence) if is_packed else None
    loss = model(tokens, labels, mask, segments)
    loss.backward()
    cp = model.mesh.cp
    # Losses of the ranks of cp are averaged as over data-parallel ranks.
    grads = {name: collectives.all_reduce(g, cp) / cp.size for name, g in unsplit_gradients(model).items()}
    model.draws.step = 5
    model.zero_grad()
    logits = model(tokens, segments=segments)
    logits.pow(2).mean().backward()
    of_logits = {name: collectives.all_reduce(g, cp) / cp.size for name, g in unsplit_gradients(model).items()}
    assert model.loss_weight is None
    return {"loss": loss.item(), "grads": grads, "logits": logits.detach(), "of_logits": of_logits}


@functools.cache
def expected_of(variant: str, batch: int, sequence: int, is_packed: bool) -> dict[str, Any]:
    """What the reference makes of the batch of `on_mesh`."""
    config = VARIANTS[variant]
    tokens, labels, mask = batch_of(batch, sequence)
    segments = segments_of(batch, sequence) if is_packed else None
    reference, leaves = reference_of(config, unsplit_weights(model_of(config)), 5)
    loss = reference.loss(tokens, labels, mask, segments)
    loss.backward()
    grads = {name: leaf.grad.clone() for name, leaf in leaves.items() if leaf.grad is not None}
    for leaf in leaves.values():
        leaf.grad = None
    logits = reference.logits(tokens, segments)
    logits.pow(2).mean().backward()
    of_logits = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"loss": loss.item(), "grads": grads, "logits": logits.detach(), "of_logits": of_logits}


@pytest.mark.matrix
@pytest.mark.parametrize("is_packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_loss_logits_and_gradients_equal_the_reference(exchange: str, variant: str, is_packed: bool) -> None:
    config = VARIANTS[variant]
    options = EXCHANGES[exchange]
    sizes = Sizes(world=options["cp"] * options.get("tp", 1), **options)
    batch, sequence = 3, 13
    results = run_on_threads(sizes.world, on_mesh, sizes, config, batch, sequence, is_packed)
    expected = expected_of(variant, batch, sequence, is_packed)
    for result in results:
        assert abs(result["loss"] - expected["loss"]) < TOLERANCE
        assert largest_difference(result["grads"], expected["grads"]) < TOLERANCE
        torch.testing.assert_close(result["logits"], expected["logits"], rtol=0, atol=1e-11)
        assert largest_difference(result["of_logits"], expected["of_logits"]) < 1e-10


@pytest.mark.parametrize("options", [{}, *EXCHANGES.values()], ids=["one device", *EXCHANGES])
def test_a_document_that_changes_changes_no_logit_of_another(options: dict[str, Any]) -> None:
    sizes = Sizes(world=options.get("cp", 1) * options.get("tp", 1), **options)
    tokens, _, _ = batch_of(2, 13)
    segments = segments_of(2, 13)
    is_changed = segments == 1
    assert is_changed.any()
    changed = torch.where(is_changed, (tokens + 1) % 131, tokens)

    def logits(world: Any) -> tuple[Tensor, Tensor]:
        model = model_of(LLAMA, Mesh.build(sizes, world.rank(), new_group)).eval()
        with torch.no_grad():
            return model(tokens, segments=segments), model(changed, segments=segments)

    for before, after in run_on_threads(sizes.world, logits):
        assert torch.equal(before[~is_changed], after[~is_changed])
        assert (before - after)[is_changed].abs().amax(dim=-1).min() > 1e-3


def test_without_bounds_a_document_does_change_the_logits_of_another() -> None:
    tokens, _, _ = batch_of(1, 13)
    changed = tokens.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 131
    model = model_of(LLAMA).eval()
    assert (model(tokens) - model(changed))[0, 1:].abs().amax(dim=-1).min() > 1e-6


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([[0, 0, 1, 1, 0]], "document 0 of row 0 after document 1"),
        ([[0, -1, 0, 1, 1]], "document 0 of row 0 after document 0"),
        ([[0, -2, 1, 1, 1]], "-2"),
        ([[0.0, 0, 1, 1, 1]], "integers"),
        ([[0, 0, 1, 1]], "segments"),
    ],
)
def test_bounds_that_do_not_hold_are_refused(segments: list[list[float]], message: str) -> None:
    model = model_of(LLAMA)
    with pytest.raises(ValueError, match=message):
        model(torch.zeros(1, 5, dtype=torch.int64), segments=torch.tensor(segments))


def test_a_sequence_that_cp_does_not_divide_is_refused_on_request() -> None:
    sizes = Sizes(world=2, cp=2, pads_uneven=False)
    with pytest.raises(ValueError, match=r"13 tokens, are no multiples of 4.*12 or 16"):
        model_of(LLAMA, Mesh.imagine(0, sizes))(torch.zeros(1, 13, dtype=torch.int64))


@pytest.mark.matrix
@pytest.mark.parametrize("variant", ["gpt2 dropout", "llama"])
@pytest.mark.parametrize("options", [{}, *EXCHANGES.values()], ids=["one device", *EXCHANGES])
def test_a_batch_without_documents_has_loss_zero_and_zero_gradients(options: dict[str, Any], variant: str) -> None:
    sizes = Sizes(world=options.get("cp", 1) * options.get("tp", 1), **options)
    tokens, labels, mask = batch_of(2, 5)

    def step(world: Any) -> None:
        model = model_of(VARIANTS[variant], Mesh.build(sizes, world.rank(), new_group))
        nothing = torch.full((2, 5), -1)
        loss = model(tokens, labels, mask, nothing)
        loss.backward()
        assert loss.item() == 0.0 and model.loss_weight is not None and model.loss_weight.item() == 0.0
        assert all(p.grad is not None and p.grad.abs().max() == 0.0 for p in model.parameters())
        assert (model(tokens, segments=nothing) == 0.0).all()

    run_on_threads(sizes.world, step)
