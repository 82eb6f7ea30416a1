"""Tallies of models in evaluation are what plain torch counts on full logits, on every layout."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.pipeline.collective import CollectiveCall
from tests.harness.ranks import run_on_ranks
from tests.harness.threads import new_group, run_on_threads
from tests.models import small_llava, test_bert, test_gpt, test_t5
from tests.models.test_generation import TOP_2
from tests.pipeline.meshes import make_mailbox, make_mesh

# Sums of a few dozen float64 numbers of order 10, in another order.
TOLERANCE = 1e-10
SMOOTHED = {"label_smoothing": 0.3}
CONFIGS: dict[str, Any] = {
    "gpt": replace(test_gpt.GPT2, num_layers=4, **SMOOTHED),
    "soft caps": replace(
        test_gpt.LLAMA, num_layers=4, logit_softcap=0.5, attention_softcap=1.0, scales_embedding=True, **SMOOTHED
    ),
    "packed llama": replace(test_gpt.LLAMA, num_layers=4),
    "experts": replace(test_gpt.LLAMA, moe=TOP_2, vocab_multiple=16),
    "bert": replace(test_bert.POST, num_layers=4),
    "t5": replace(test_t5.T5, **SMOOTHED),
    "llava": replace(small_llava.LLAVA, num_layers=4),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "tp 2": {"tp": 2},
    "tp 4, sp": {"tp": 4, "sequence_parallel": True},
    "cp 2": {"cp": 2},
    "cp 2, tp 2, sp": {"cp": 2, "tp": 2, "sequence_parallel": True},
}
STAGES: dict[str, tuple[dict[str, Any], int]] = {
    "pp 2": ({"pp": 2}, 3),
    "vp 2, pp 2": ({"pp": 2, "vp": 2}, 2),
    "pp 2, tp 2": ({"pp": 2, "tp": 2}, 1),
}


def model_of(name: str, mesh: Mesh | None = None) -> Any:
    module: Any = {"bert": test_bert, "t5": test_t5, "llava": small_llava}.get(name, test_gpt)
    return module.model_of(CONFIGS[name], mesh).eval()


def inputs_of(name: str) -> dict[str, Any]:
    """A batch of 4 rows, or of 3."""
    if name == "bert":
        return test_bert.batch_of(CONFIGS[name], is_padded=True)
    if name == "t5":
        return test_t5.batch_of("padded")
    if name == "llava":
        return small_llava.batch_of(CONFIGS[name], small_llava.COUNTS["some"])
    tokens, labels, mask = test_gpt.batch_of(4, 12)
    batch = {"tokens": tokens, "labels": labels, "loss_mask": mask}
    if name == "packed llama":
        batch["segments"] = torch.tensor([[0] * 5 + [1] * 7, [0] * 12, [0, 1] + [2] * 6 + [-1] * 4, [0] * 11 + [-1]])
    return batch


@functools.cache
def batch_and_wanted(name: str) -> tuple[dict[str, Any], dict[str, float]]:
    """A batch in which about half of the labels are the likeliest tokens, and what plain torch counts in it."""
    batch, model = inputs_of(name), model_of(name)
    with torch.no_grad():
        logits = model(**{n: v for n, v in batch.items() if n not in ("labels", "loss_mask", "sentence_order_labels")})
    logits, order = (logits.tokens, logits.sentence_order) if name == "bert" else (logits, None)
    likeliest, labels = logits.argmax(dim=-1), batch["labels"]
    is_hit = torch.rand(labels.shape, generator=torch.Generator().manual_seed(4)) < 0.6
    batch["labels"] = labels = torch.where(is_hit & (labels != -100), likeliest, labels)
    counts = labels != -100
    if "segments" in batch:
        counts &= batch["segments"] >= 0
    if "padding_mask" in batch:
        counts &= batch["padding_mask"] == 1
    if name == "llava":
        counts &= labels != small_llava.IMAGE
    weights = torch.where(counts, batch["loss_mask"], 0.0)
    surprise = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    of_order = {}
    if order is not None and "sentence_order_labels" in batch:
        # A sample counts where it has a label, and a token that does.
        samples = (batch["sentence_order_labels"] != -100) & (weights.sum(1) > 0)
        right = samples & (order.argmax(dim=-1) == batch["sentence_order_labels"])
        of_order = {"sentence_order_correct": float(right.sum()), "sentence_order_samples": float(samples.sum())}
    return batch, of_order | {
        "correct": float((weights * (likeliest == labels)).sum()),
        "negative_log_likelihood": float((weights * surprise).sum()),
        "weight": float(weights.sum()),
    }


def tallies_of(model: Any, batch: dict[str, Any]) -> dict[str, float]:
    with torch.no_grad():
        model(**batch)
    found: dict[str, Tensor] = {**model.tallies, "weight": model.loss_weight}
    assert all(value.dtype == torch.float64 and value.shape == () for value in found.values())
    return {name: float(value) for name, value in found.items()}


def require_equal(found: dict[str, float], wanted: dict[str, float]) -> None:
    assert found == pytest.approx(wanted, abs=TOLERANCE)


@pytest.mark.parametrize("name", CONFIGS)
def test_some_labels_are_hit_and_some_are_not(name: str) -> None:
    _, wanted = batch_and_wanted(name)
    assert 0.3 < wanted["correct"] / wanted["weight"] < 0.8
    assert wanted["negative_log_likelihood"] > 0.5 * wanted["weight"]


def on_mesh(world: Any, sizes: Sizes, name: str, batch: dict[str, Any]) -> dict[str, float]:
    return tallies_of(model_of(name, Mesh.build(sizes, world.rank(), new_group)), batch)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tallies_are_those_of_full_logits(layout: str, name: str) -> None:
    options = LAYOUTS[layout]
    batch, wanted = batch_and_wanted(name)
    sizes = Sizes(world=options.get("tp", 1) * options.get("cp", 1), **options)
    for found in run_on_threads(sizes.world, on_mesh, sizes, name, batch):
        require_equal(found, wanted)


def test_experts_spread_over_ranks_change_nothing() -> None:
    batch, wanted = batch_and_wanted("experts")
    for found in run_on_threads(2, on_mesh, Sizes(world=2, cp=2, ep=2), "experts", batch):
        require_equal(found, wanted)


def on_stages(sizes: Sizes, num_microbatches: int, name: str, batch: dict[str, Any]) -> list[dict[str, float]]:
    model = model_of(name, make_mesh(sizes))
    model.driver = CollectiveCall(
        model.mesh.pp, make_mailbox(model.mesh), torch.device("cpu"), lambda rows: min(rows, num_microbatches)
    )
    # Twice: nothing of the first call may be left in the second.
    return [tallies_of(model, batch), tallies_of(model, batch)]


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["gpt", "packed llama", "bert", "t5", "llava"])
@pytest.mark.parametrize("layout", STAGES)
def test_every_stage_gets_the_tallies_of_all_microbatches(layout: str, name: str) -> None:
    options, num_microbatches = STAGES[layout]
    batch, wanted = batch_and_wanted(name)
    sizes = Sizes(world=2 * options.get("tp", 1), **options)
    for calls in run_on_ranks(sizes.world, on_stages, sizes, num_microbatches, name, batch):
        for found in calls:
            require_equal(found, wanted)


def test_nothing_is_counted_where_gradients_are_wanted_and_nothing_old_is_left() -> None:
    batch, _ = batch_and_wanted("gpt")
    model = model_of("gpt")
    tallies_of(model, batch)
    assert model.tallies
    model.train()(**batch)
    assert model.tallies == {}
    tallies_of(model.eval(), batch)
    assert model.tallies
    with torch.no_grad():
        model(batch["tokens"])
    assert model.tallies == {}


@pytest.mark.parametrize("name", ["gpt", "bert", "t5"])
def test_a_batch_of_nothing_adds_up_to_nothing(name: str) -> None:
    batch = inputs_of(name)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    assert set(tallies_of(model_of(name), batch).values()) == {0.0}
