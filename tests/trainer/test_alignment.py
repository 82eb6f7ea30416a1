"""Random numbers of the user's code agree within a replica, differ between replicas, and leave the generators alone."""

import contextlib
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lightning_megatron.mesh import Mesh
from lightning_megatron.trainer.alignment import aligned_random, batch_digest, require_equal_batches
from tests.harness.ranks import run_on_ranks
from tests.trainer.fits import parts_apart, weights
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data, Small


def drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def test_draws_are_a_function_of_the_key_and_the_generators_go_on_as_if_nothing_was() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    undisturbed = [drawn(), drawn()]
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    first = drawn()
    with aligned_random(3, "step", 5):
        inside = drawn()
    with contextlib.suppress(KeyError), aligned_random(3, "step", 6):
        other = drawn()
        raise KeyError
    assert [first, drawn()] == undisturbed
    with aligned_random(3, "step", 5):
        assert drawn() == inside
    assert all(a != b for a, b in zip(inside, other, strict=True))


def test_a_digest_sees_every_value_and_shape() -> None:
    batch = {"a": torch.arange(6.0), "b": [torch.ones(2, dtype=torch.bfloat16), "text", 3]}
    same = {"a": torch.arange(6.0), "b": [torch.ones(2, dtype=torch.bfloat16), "text", 3]}
    assert batch_digest(batch) == batch_digest(same)
    others = [
        {**batch, "a": torch.arange(6.0).view(2, 3)},
        {**batch, "a": torch.arange(6.0).double()},
        {**batch, "a": torch.tensor([0.0, 1, 2, 3, 4, 6])},
        {**batch, "b": [torch.ones(2, dtype=torch.bfloat16), "text", 4]},
        {**batch, "b": [torch.ones(2, dtype=torch.bfloat16), "other", 3]},
    ]
    assert len({batch_digest(batch), *(batch_digest(other) for other in others)}) == 6
    require_equal_batches(batch, Mesh.single().axis("pp+cp+tp"))


class Noisy(Small):
    """Adds noise before and after the model: every stage must draw the same before, and the last alone after."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise = torch.randn_like(batch[0]) + np.random.rand() + random.random()
        logits = self.logits(batch[0] + 0.1 * noise)
        logits = logits + 0.1 * torch.randn_like(logits)
        self.drawn.append(noise.sum().item())
        return functional.cross_entropy(logits, batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        self.drawn.append(torch.rand(()).item())


def noisy(layout: Layout) -> tuple[Any, list[float]]:
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    module = Noisy()
    torch.manual_seed(3)
    make_trainer(layout, max_epochs=1, limit_val_batches=0).fit(module, Data(24))
    return weights(module), module.drawn


def test_noise_in_a_step_is_that_of_one_stage() -> None:
    [(whole, _)] = run_on_ranks(1, noisy, Layout(microbatches=2), init=False)
    ran = run_on_ranks(2, noisy, Layout(world=2, pp=2, microbatches=2), init=False)
    for parts, _ in ran:
        assert parts_apart(parts, whole) < 1e-11
    # Around the steps, too, both stages drew alike: the generators were put back.
    hooks = [drawn[-1] for _, drawn in ran]
    assert hooks[0] == hooks[1]


def test_replicas_draw_different_noise() -> None:
    (_, first), (_, second) = run_on_ranks(2, noisy, Layout(world=2, microbatches=2), init=False)
    assert first[0] != second[0]
