"""A loss tells what it is a mean over, with a graph and without."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.any_module.loss_count import CountedMeans, mean_count
from tests.any_module import networks
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import Layout, make_trainer

LOGITS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CLASSES = torch.tensor([0, 1, -100, 2, 3, -100])
WEIGHTS = torch.tensor([1.0, 2.0, 1.0, 1.0], dtype=torch.float64)
LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], float | None]] = {
    "valid targets": (lambda x: F.cross_entropy(x, CLASSES), 4),
    "a module": (lambda x: nn.CrossEntropyLoss()(x, CLASSES), 4),
    "weights of classes": (lambda x: F.cross_entropy(x, CLASSES, weight=WEIGHTS), 5),
    "log-probabilities": (lambda x: F.nll_loss(F.log_softmax(x, -1), CLASSES), 4),
    "elements": (lambda x: F.mse_loss(x, torch.zeros_like(x)), 24),
    "elements of a binary loss": (lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)), 24),
    "another dtype": (lambda x: F.cross_entropy(x, CLASSES).float(), 4),
    "a sum": (lambda x: F.cross_entropy(x, CLASSES, reduction="sum"), None),
    "a mean of what may be means": (lambda x: x.mean(), None),
    "two terms": (lambda x: F.cross_entropy(x, CLASSES) + F.mse_loss(x, torch.zeros_like(x)), None),
    "a product": (lambda x: F.cross_entropy(x, CLASSES) * 2, None),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_with_a_graph_tells(case: str) -> None:
    made, count = LOSSES[case]
    found: Any = mean_count(made(LOGITS.clone().requires_grad_()))
    assert found == count


@pytest.mark.parametrize("case", ["valid targets", "a module", "weights of classes", "elements"])
def test_a_loss_without_a_graph_tells_inside_the_block(case: str) -> None:
    made, count = LOSSES[case]
    with torch.no_grad(), CountedMeans():
        loss = made(LOGITS)
        found: Any = mean_count(loss)
    assert found == count and not loss.requires_grad
    assert torch.equal(loss, made(LOGITS))
    with torch.no_grad():
        assert mean_count(made(LOGITS)) is None
    # As Lightning validates, but under gloo.
    with torch.inference_mode(), CountedMeans():
        loss = made(LOGITS * 1)
        found = mean_count(loss)
    assert found == count and torch.equal(loss, made(LOGITS))


def validated(layout: Layout) -> float:
    options: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": True}
    trainer = make_trainer(layout, **options)
    loader = networks.loader(networks.ROWS // layout.dp)
    trainer.fit(networks.Validates(), loader, loader)
    return float(trainer.callback_metrics["validation"])


def test_a_validated_loss_is_that_of_one_device() -> None:
    [wanted] = run_on_ranks(1, validated, Layout(is_plain=True), init=False)
    for layout in (Layout(world=2), Layout(world=2, pp=2, microbatches=2)):
        for found in run_on_ranks(2, validated, layout, init=False):
            assert found == pytest.approx(wanted, rel=1e-12)
