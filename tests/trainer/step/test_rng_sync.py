"""Random numbers of the user's code agree within a model replica, differ over dp, and leave the generators alone."""

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import register_pytree_node

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.trainer.step.batch_checks import batch_digest, require_equal_batches, require_equal_shapes
from lightning_megatron.trainer.step.rng_sync import aligned_random
from tests.harness.ranks import RankFailed, run_on_ranks
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
    # Names of a set come in another order in another process.
    assert batch_digest(batch) == batch_digest(dict(reversed(same.items())))
    others = [
        {**batch, "a": torch.arange(6.0).view(2, 3)},
        {**batch, "a": torch.arange(6.0).double()},
        {**batch, "a": torch.tensor([0.0, 1, 2, 3, 4, 6])},
        {**batch, "b": [torch.ones(2, dtype=torch.bfloat16), "text", 4]},
        {**batch, "b": [torch.ones(2, dtype=torch.bfloat16), "other", 3]},
        {"c": batch["a"], "b": batch["b"]},
        {**batch, "b": tuple(batch["b"])},
        {**batch, "b": OwnPair(batch["b"], 0)},
        {**batch, "b": OwnPair(batch["b"], 1)},
    ]
    assert len({batch_digest(batch), *(batch_digest(other) for other in others)}) == 10
    require_equal_batches(batch, Mesh.single().axis("pp+cp+tp"))


class OwnPair:
    """A class of a user's that pytree knows how to take apart, and names no parts of."""

    def __init__(self, first: Any, second: Any) -> None:
        self.both = (first, second)


register_pytree_node(OwnPair, lambda pair: (list(pair.both), None), lambda both, context: OwnPair(*both))


def test_shapes_are_compared_by_names() -> None:
    batch = {"tokens": torch.zeros(2, 8), "labels": torch.zeros(2)}
    other = dict(reversed(batch.items()))
    run_on_ranks(2, compare_shapes, [batch, other])
    with pytest.raises(RankFailed, match="got batches of the shapes"):
        run_on_ranks(2, compare_shapes, [batch, {"tokens": torch.zeros(2), "labels": torch.zeros(2, 8)}])


def compare_shapes(batches: list[dict[str, Tensor]]) -> None:
    dp = Mesh.build(Sizes(world=2), dist.get_rank(), lambda ranks: dist.group.WORLD).dp
    require_equal_shapes(batches[dp.rank], dp)


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
    [(full, _)] = run_on_ranks(1, noisy, Layout(microbatches=2), init=False)
    ran = run_on_ranks(2, noisy, Layout(world=2, pp=2, microbatches=2), init=False)
    for parts, _ in ran:
        assert parts_apart(parts, full) < 1e-11
    # Around the steps, too, both stages drew alike: the generators were put back.
    hooks = [drawn[-1] for _, drawn in ran]
    assert hooks[0] == hooks[1]


def test_dp_ranks_draw_different_noise() -> None:
    (_, first), (_, second) = run_on_ranks(2, noisy, Layout(world=2, microbatches=2), init=False)
    assert first[0] != second[0]


class NoisyEvaluation(Small):
    """Draws once in every batch of every evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.drawn.append(torch.rand(()).item())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.drawn.append(torch.rand(()).item())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.drawn.append(torch.rand(()).item())
        return self.logits(batch[0])


def drawn_in_evaluation(layout: Layout) -> list[float]:
    module, data = NoisyEvaluation(), Data(24)
    trainer = make_trainer(layout, num_sanity_val_steps=2)
    trainer.fit(module, data)
    trainer.validate(module, data, verbose=False)
    trainer.test(module, data, verbose=False)
    trainer.predict(module, data)
    return module.drawn


def test_no_two_batches_of_evaluation_draw_the_same() -> None:
    layout = Layout(world=4, pp=2, microbatches=2)
    first, second, *other_stage = run_on_ranks(4, drawn_in_evaluation, layout, init=False)
    assert other_stage == [first, second]
    # Of 2 batches to check, 3 in each of 2 epochs, and 3 to validate, to test and to predict.
    assert len(first) == 17
    assert len({*first, *second}) == 34
