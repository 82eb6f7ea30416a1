"""Losses that couple the rows of a batch are told of once, whatever makes them so; no other loss is."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.testing import assert_close
from torch.utils.data import DataLoader

from lightning_megatron.trainer.step.coupled_rows import RowCheck, coupling_rows
from lightning_megatron.trainer.step.operation_record import (
    MAX_NUMBERS,
    OperationRecord,
    history,
    run_again,
    widened,
)
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data, Small, samples

# Weights and tokens too are multiples of the rows, and none of them is taken for rows.
ROWS, TOKENS, WIDTH = 4, 4, 8


class Network(nn.Module):
    """What the losses below are made of: numbers [4, 8] of rows, and [4, 4, 8] of their tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.words, self.norm = nn.Embedding(12, WIDTH), nn.LayerNorm(WIDTH)
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.log_std = nn.Parameter(torch.zeros(WIDTH))
        self.low, self.high = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2))
        self.normed = weight_norm(nn.Linear(WIDTH, WIDTH, bias=False))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, dim_feedforward=WIDTH, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.batch_norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.register_buffer("prompts", torch.randn(ROWS, WIDTH))
        # Neither a buffer nor a parameter.
        self.class_ids, self.directions = torch.arange(ROWS), torch.randn(ROWS, WIDTH, requires_grad=True)
        self.of_losses = nn.Parameter(torch.ones(2))
        # Attributes of a module are no part of a batch.
        self.batch = SimpleNamespace(inputs=torch.randn(ROWS, TOKENS, WIDTH), ids=torch.randint(0, 12, (ROWS, TOKENS)))

    @property
    def inputs(self) -> Tensor:
        return self.batch.inputs  # type: ignore[no-any-return]

    @property
    def ids(self) -> Tensor:
        return self.batch.ids  # type: ignore[no-any-return]

    @property
    def rows(self) -> Tensor:
        """Numbers [4, 8]."""
        return self.query(self.inputs[:, 0])  # type: ignore[no-any-return]

    @property
    def others(self) -> Tensor:
        """Numbers [4, 8] of a second network."""
        return self.key(self.inputs[:, 1])  # type: ignore[no-any-return]

    @property
    def tokens(self) -> Tensor:
        """Numbers [4, 4, 8]."""
        return self.norm(self.words(self.ids))  # type: ignore[no-any-return]


class Whole(L.LightningModule):
    """A module that has a network."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network


def negatives(of: Network) -> Tensor:
    alike = functional.normalize(of.rows, dim=-1) @ functional.normalize(of.others, dim=-1).T
    return functional.cross_entropy(alike * of.log_scale.exp(), torch.arange(ROWS))


def both_views(of: Network) -> Tensor:
    """Two views of each sample, one batch of them behind the other."""
    found = of.query(torch.cat([of.inputs[:, 0], of.inputs[:, 1]]))
    alike = (found @ found.T).fill_diagonal_(-1e9)
    return functional.cross_entropy(alike, torch.arange(2 * ROWS).roll(ROWS))


def pooled_negatives(of: Network) -> Tensor:
    found = of.tokens.mean(1)
    return functional.cross_entropy(found @ found.T, torch.arange(ROWS))


def triplets(of: Network) -> Tensor:
    return functional.triplet_margin_loss(of.rows, of.others, of.others.roll(1, 0), margin=5.0)


def standardised(of: Network) -> Tensor:
    return ((of.rows - of.rows.mean(0)) / of.rows.std(0) - of.inputs[:, 2]).square().mean()


class OneDerivative(torch.autograd.Function):
    """An operation that has no second derivative, as fast kernels have none."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor) -> Tensor:
        return numbers.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("this operation has no second derivative")
        return grad


def with_an_earlier_term(of: Network) -> Tensor:
    """A term of numbers that the last weights' own are made of."""
    early = of.rows
    found = of.key(OneDerivative.apply(early))
    return functional.cross_entropy(found @ found.T, torch.arange(ROWS)) + early.square().mean()


def root_of_mean(of: Network) -> Tensor:
    return functional.mse_loss(of.rows, of.others).sqrt()


def hardest(of: Network) -> Tensor:
    """Each row against the nearest of the others, whose distances have no second derivatives in torch."""
    far = torch.cdist(of.rows, of.others)
    return functional.relu(1 + far.diagonal() - (far + 9 * torch.eye(ROWS)).amin(1)).mean()


def of_the_worst(of: Network) -> Tensor:
    """The mean over half of the rows, whose own losses are the largest."""
    losses: Tensor = functional.cross_entropy(of.rows, torch.arange(ROWS), reduction="none")
    return losses.topk(ROWS // 2).values.mean()


def by_detached_shares(of: Network) -> Tensor:
    losses = functional.cross_entropy(of.rows, torch.arange(ROWS), reduction="none")
    return (losses * (losses / losses.sum()).detach()).sum()


def in_place(of: Network) -> Tensor:
    """Similarities that are written into a tensor of zeros, row by row."""
    alike, found = torch.zeros(ROWS, ROWS), of.rows
    for row in range(ROWS):
        alike[row] = found @ found[row]
    alike.fill_diagonal_(-9).mul_(2)
    alike += torch.ones(ROWS).mul_(found[:, 0])
    return functional.cross_entropy(alike, torch.arange(ROWS))


def in_half(of: Network) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return negatives(of)


def mapped(of: Network) -> Tensor:
    found = of.others
    logsumexp: Callable[[Tensor], Tensor] = torch.func.vmap(lambda row: (found @ row).logsumexp(0))
    return logsumexp(of.rows).mean()


def of_a_compiled_network(of: Network) -> Tensor:
    found: Tensor = torch.compile(of.query, backend="aot_eager")(of.inputs[:, 0])
    return functional.cross_entropy(found @ found.T, torch.arange(ROWS))


def batch_norm(of: Network) -> Tensor:
    of.batch_norm.double()
    return functional.mse_loss(of.batch_norm(of.rows.double()), of.batch_norm(of.others.double()))


def of_generated(of: Network) -> Tensor:
    """Numbers that a network makes of noise."""
    found: Tensor = of.query(torch.randn(ROWS, WIDTH))
    return found.mean(0).square().sum()


def changed_in_place(of: Network) -> Tensor:
    """Shares of a batch, of numbers that were changed where they are."""
    found = of.query(20 * of.inputs[:, 0]).exp_()
    shares: Tensor = found / found.sum(0)
    return shares.square().sum()


def by_learned_weights(of: Network) -> Tensor:
    """Two losses with a weight each, which are the last weights of all."""
    return (torch.stack([classes(of), negatives(of)]) * of.of_losses.exp()).sum()


def beside_many_numbers(of: Network) -> Tensor:
    """A term of more numbers than are kept, and one of negatives."""
    many = of.query(of.inputs.repeat(1, MAX_NUMBERS // of.inputs.numel() + 1, 1))
    return functional.mse_loss(many, torch.ones_like(many)) + negatives(of)


def classes(of: Network) -> Tensor:
    return functional.cross_entropy(of.rows, torch.arange(ROWS))


def masked_tokens(of: Network) -> Tensor:
    labels = of.ids.clamp(max=WIDTH - 1).masked_fill(of.ids > 7, -100)
    return functional.cross_entropy(of.tokens.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def weighted(of: Network) -> Tensor:
    losses = (of.rows - of.others).square().sum(-1)
    weights = torch.rand(ROWS)
    return (losses * weights).sum() / weights.sum()


def own_pairs(of: Network) -> Tensor:
    """Each sample's two views, one behind the other, and those of no other sample."""
    first, second = of.query(torch.cat([of.inputs[:, 0], of.inputs[:, 1]])).chunk(2)
    return 1 - functional.cosine_similarity(first, second).mean()


def of_own_tokens(of: Network) -> Tensor:
    """Tokens that look at those of their sample."""
    found = functional.scaled_dot_product_attention(of.tokens, of.tokens, of.tokens)
    return functional.cross_entropy(found.mean(1), torch.arange(ROWS))


def penalised(of: Network) -> Tensor:
    return classes(of) + 0.1 * of.query.weight.norm()


def normed_classes(of: Network) -> Tensor:
    """Directions of classes, as in ArcFace."""
    cosines = functional.linear(functional.normalize(of.rows), functional.normalize(of.key.weight))
    return functional.cross_entropy(8 * cosines, torch.arange(ROWS))


def actions(of: Network) -> Tensor:
    """A policy whose deviations are weights, as in PPO."""
    taken = torch.distributions.Normal(of.rows, of.log_std.exp())
    return -(taken.log_prob(of.inputs[:, 2]).sum(-1) * torch.rand(ROWS)).mean()


def of_normed_weight(of: Network) -> Tensor:
    return functional.cross_entropy(of.normed(of.rows), torch.arange(ROWS))


def of_low_rank(of: Network) -> Tensor:
    return functional.cross_entropy(functional.linear(of.rows, of.key.weight + of.high @ of.low), torch.arange(ROWS))


def of_a_table(of: Network) -> Tensor:
    return functional.cross_entropy(of.rows @ of.words.weight[:8].T, torch.arange(ROWS))


def mixture(of: Network) -> Tensor:
    """Logarithms of shares, which are weights."""
    return -(of.log_std.log_softmax(0) - (of.rows - of.inputs[:, 2]).square()).logsumexp(-1).mean()


def preferred(of: Network) -> Tensor:
    """Chosen answers behind each other, and rejected ones behind them, as in DPO."""
    ids = torch.cat([of.ids, of.ids.roll(1, 1)])
    logits = of.query(of.words(ids))
    of_rows = logits.log_softmax(-1).amax(-1).sum(-1)
    return -functional.logsigmoid(of_rows[:ROWS] - of_rows[ROWS:]).mean()


def of_computed_classes(of: Network) -> Tensor:
    """As many classes as rows, from what stands for them by a weight."""
    return functional.cross_entropy(of.rows @ of.key(of.prompts).T, torch.arange(ROWS))


def of_attributes(of: Network) -> Tensor:
    """As many classes as rows, from attributes of a module."""
    return functional.cross_entropy(of.rows @ of.words(of.class_ids).T + of.rows @ of.directions.T, torch.arange(ROWS))


def of_learned_weights(of: Network) -> Tensor:
    losses = torch.stack([classes(of), functional.mse_loss(of.rows, of.inputs[:, 2])])
    return (losses * of.of_losses.exp() - of.of_losses).sum()


def of_many_numbers(of: Network) -> Tensor:
    """Tokens of more numbers than are kept."""
    many = of.query(of.inputs.repeat(1, MAX_NUMBERS // of.inputs.numel() + 1, 1)).flatten(0, 1)
    return functional.cross_entropy(many, torch.arange(len(many)) % WIDTH) + classes(of)


def of_scaled_weights(of: Network) -> Tensor:
    """Weights times numbers that are tensors."""
    found = of.rows @ (of.key.weight * torch.tensor(0.5)) + of.query.bias * torch.tensor(2.0).sqrt()
    return functional.mse_loss(found, of.inputs[:, 2])


def noisy(of: Network) -> Tensor:
    found = functional.dropout(of.rows, 0.5) + torch.randn(ROWS, WIDTH)
    return functional.cross_entropy(found * torch.rand(ROWS, 1), torch.arange(ROWS))


def in_place_of_rows(of: Network) -> Tensor:
    logits = torch.empty(ROWS, WIDTH)
    logits[:, :4], logits[:, 4:] = of.rows[:, 4:], of.rows[:, :4]
    logits /= 2
    logits[:, 0].add_(1)
    return functional.cross_entropy(logits, torch.arange(ROWS))


def of_own_tokens_in_half(of: Network) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.cross_entropy(of.query(of.tokens).mean(1).float(), torch.arange(ROWS))


def of_masked_mean(of: Network) -> Tensor:
    is_seen = of.ids > 5
    return (functional.mse_loss(of.tokens, of.inputs, reduction="none").mean(-1) * is_seen).sum() / is_seen.sum()


def of_a_condition(of: Network) -> Tensor:
    """One of two functions, which torch takes as an operation of its own."""
    with warnings.catch_warnings():
        # torch reads the gradient of what it is given.
        warnings.simplefilter("ignore")
        found = torch.cond(torch.tensor(True), lambda rows: rows * 2, lambda rows: rows + 1, (of.rows,))
    return functional.cross_entropy(found, torch.arange(ROWS))


def of_three_sequences(of: Network) -> Tensor:
    """Tokens come first, and for each of three networks rows could lie in five ways."""
    found = of.inputs.repeat(1, 4, 1).transpose(0, 1)
    heads = (of.query, of.key, nn.Linear(WIDTH, WIDTH))
    losses = [functional.cross_entropy(head(found).mean(0), torch.arange(ROWS)) for head in heads]
    return torch.stack(losses).sum()


def of_masked_weight(of: Network) -> Tensor:
    mask = torch.rand(WIDTH, WIDTH).round()
    return functional.cross_entropy(functional.linear(of.rows, of.key.weight * mask), torch.arange(ROWS))


def of_noisy_weight(of: Network) -> Tensor:
    """Weights of a distribution, as in Bayes by backprop."""
    weight = torch.distributions.Normal(of.key.weight, functional.softplus(of.query.weight)).rsample()
    return functional.cross_entropy(functional.linear(of.inputs[:, 0], weight), torch.arange(ROWS))


def sequences_first(of: Network) -> Tensor:
    found = of.encoder(of.inputs.transpose(0, 1)).mean(0)
    return functional.cross_entropy(found, torch.arange(ROWS))


def two_heads(of: Network) -> Tensor:
    """The second head reads the first."""
    found = of.rows
    return functional.mse_loss(of.key(found.tanh()), of.inputs[:, 2]) + functional.cross_entropy(
        found, torch.arange(ROWS)
    )


COUPLING = [negatives, both_views, pooled_negatives, triplets, standardised, root_of_mean, with_an_earlier_term]
COUPLING += [hardest, of_the_worst, by_detached_shares, in_place, in_half, mapped, of_a_compiled_network, batch_norm]
COUPLING += [of_generated, changed_in_place, by_learned_weights, beside_many_numbers]
OF_ROWS = [classes, masked_tokens, weighted, own_pairs, of_own_tokens, penalised, two_heads, normed_classes, actions]
OF_ROWS += [of_normed_weight, of_low_rank, of_a_table, mixture, preferred, sequences_first]
OF_ROWS += [of_computed_classes, noisy, in_place_of_rows, of_own_tokens_in_half, of_masked_mean, of_a_condition]
OF_ROWS += [of_three_sequences, of_masked_weight, of_noisy_weight, of_attributes, of_learned_weights, of_many_numbers]
OF_ROWS += [of_scaled_weights]


def recording(network: Network) -> OperationRecord:
    check = RowCheck(Whole(network), (), "training_step")
    return check.recording(vars(network.batch), ROWS, num_parts=2)  # type: ignore[return-value]


def couples_rows(record: OperationRecord, number: Tensor) -> bool:
    return bool(coupling_rows(record, {"loss": number}))


def looked_at(loss: Callable[[Network], Tensor]) -> bool:
    network = Network()
    torch.manual_seed(1)
    wanted = loss(network)
    network = Network()
    torch.manual_seed(1)
    with recording(network) as record:
        found = loss(network)
    random, buffers = torch.get_rng_state(), [buffer.clone() for buffer in network.buffers()]
    is_coupled = couples_rows(record, found)
    if loss is not noisy:
        value = record.value_of(found)
        assert value is not None
        sources, operations = history([value])
        numbers = {source: widened(source.numbers) for source in sources if source.numbers is not None}
        again = run_again([value], operations, numbers)
        assert_close(
            again[0].to(found.dtype), found, rtol=1e-2 if loss.__name__.endswith("in_half") else 1e-5, atol=1e-6
        )
    # Neither the record nor the look moves anything.
    assert torch.equal(found, wanted)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(map(torch.equal, network.buffers(), buffers))
    found.backward()
    assert any(weight.grad is not None for weight in network.parameters())
    return is_coupled


@pytest.mark.parametrize("loss", COUPLING)
def test_losses_that_couple_rows_are_found(loss: Callable[[Network], Tensor]) -> None:
    assert looked_at(loss)


@pytest.mark.parametrize("loss", OF_ROWS)
def test_losses_of_rows_by_themselves_are_not(loss: Callable[[Network], Tensor]) -> None:
    assert not looked_at(loss)


IS_COUNTED, WEIGHTS = torch.tensor([True, True, False, True]), torch.tensor([1.0, 0.0, 2.0, 1.0])
LABELS = torch.tensor([[0, 1, -100, -100], [2, 3, 4, -100], [1, 2, 3, 4], [0, 1, 2, 3]])
EQUAL = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 1], [1, 0, 0, 1], [0, 0, 1, 1]])
# Not in the batch.
OF_CLASSES = torch.tensor([1.0, 5.0, 0.2, 1.0])


def by_weights(of: Network) -> Tensor:
    losses = of.rows.square().mean(1)
    return (losses * of.batch.weights).sum() / of.batch.weights.sum().clamp(min=1)


def counted_rows(of: Network) -> Tensor:
    return of.rows.square().mean(1)[of.batch.is_counted].mean()


def by_shares(of: Network) -> Tensor:
    return (of.rows.square().mean(1) * (of.batch.weights / of.batch.weights.sum())).sum()


def hits_of_labels(of: Network) -> Tensor:
    is_counted = of.batch.labels != -100
    return ((of.tokens.argmax(-1) == of.batch.labels) & is_counted).sum() / is_counted.sum()


def of_standardised_rows(of: Network) -> Tensor:
    wanted = of.inputs.mean(1)
    return functional.mse_loss(of.rows, (wanted - wanted.mean(0)) / wanted.std(0))


def by_a_filled_mask(of: Network) -> Tensor:
    mask = torch.zeros(ROWS)
    mask[of.batch.is_counted] = 1.0
    return (of.rows.square().mean(1) * mask).sum() / mask.sum()


def hits(of: Network) -> Tensor:
    return (of.rows.argmax(1) == of.batch.labels[:, 0]).float().mean()


def over_all_rows(of: Network) -> Tensor:
    return (of.rows.square().mean(1) * of.batch.weights).sum() / len(of.batch.weights)


def weighted_by_class(of: Network) -> Tensor:
    return (of.rows.square().mean(1) * OF_CLASSES[of.batch.labels[:, 0]]).mean()


def of_rows_own_labels(of: Network) -> Tensor:
    is_counted = of.batch.labels != -100
    return ((of.tokens.square().mean(-1) * is_counted).sum(1) / is_counted.sum(1)).mean()


def valid_classes(of: Network) -> Tensor:
    return functional.cross_entropy(of.rows, of.batch.labels[:, 0])


def by_equal_weights(of: Network) -> Tensor:
    """Of each row as many count as of any other."""
    return (of.tokens.square().mean(-1) * of.batch.equal).sum() / of.batch.equal.sum()


MASKED = [by_weights, counted_rows, by_shares, hits_of_labels, of_standardised_rows, by_a_filled_mask]
MEANS = [hits, over_all_rows, weighted_by_class, of_rows_own_labels, valid_classes, by_equal_weights]


@pytest.mark.parametrize(("value", "is_told"), [*((one, True) for one in MASKED), *((one, False) for one in MEANS)])
def test_a_mean_over_a_mask_of_the_batch_is_found_and_none_over_rows(
    value: Callable[[Network], Tensor], is_told: bool
) -> None:
    network = Network()
    vars(network.batch).update(weights=WEIGHTS, is_counted=IS_COUNTED, labels=LABELS, equal=EQUAL)
    # As a validation runs.
    with torch.inference_mode():
        with recording(network) as record:
            found = value(network)
        assert coupling_rows(record, {"value": found}) == []
        assert bool(coupling_rows(record, {"value": found}, ["value"])) == is_told


def test_a_mask_that_is_the_same_in_all_rows_of_a_batch_is_found_beside_those_of_another() -> None:
    network = Network()
    check = RowCheck(Whole(network), (), "validation_step")
    for weight in (1.0, 0.0):
        network.batch.weights = torch.full((ROWS,), weight)
        with check.recording(vars(network.batch), ROWS, num_parts=2) as record:
            found = by_weights(network)
        assert record is not None
        assert bool(coupling_rows(record, {"value": found}, ["value"])) == (weight == 0)


def nested_teacher(of: Network) -> Tensor:
    """A frozen encoder, whose fast path makes nested tensors."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True)
    teacher, is_padding = nn.TransformerEncoder(layer, 1).eval(), torch.zeros(ROWS, TOKENS, dtype=torch.bool)
    is_padding[0, 2:] = True
    with torch.no_grad(), warnings.catch_warnings():
        # torch says that nested tensors may change.
        warnings.simplefilter("ignore")
        wanted = teacher(of.inputs, src_key_padding_mask=is_padding)
    return functional.mse_loss(of.query(of.inputs) * ~is_padding[..., None], wanted)


def as_many_as_are_positive(of: Network) -> Tensor:
    """Of other numbers there are others, and the loop was of these."""
    found = of.rows.flatten()
    return torch.stack([one.square() for one in found[found > 0]]).mean()


def by_computed_places(of: Network) -> Tensor:
    """Other numbers than these have no place in the table."""
    with torch.no_grad():
        places = (of.rows * 2 + 4).long().clamp(0, WIDTH - 1)
        table = torch.zeros(int(places.max()) + 1)
    return (of.others - table[places]).square().mean()


@pytest.mark.parametrize("loss", [nested_teacher, as_many_as_are_positive, by_computed_places])
def test_a_loss_that_cannot_run_again_ends_no_run(loss: Callable[[Network], Tensor]) -> None:
    network = Network()
    with recording(network) as record:
        found = loss(network)
    couples_rows(record, found)
    found.backward()
    assert network.query.weight.grad is not None or network.key.weight.grad is not None


def test_numbers_of_the_same_rows_are_looked_at_together_and_each_by_itself() -> None:
    network = Network()
    with recording(network) as record:
        rows = network.query(network.inputs[:, 0])
        places = rows.square().long()
        table = torch.zeros(int(places.max()) + 1)
        named = {
            "mean": rows.square().mean(),
            "root": rows.square().mean().sqrt(),
            "other rows": network.key(network.inputs[:, 0]).std(),
            "given": network.inputs.std(),
        }
        # Other numbers lead it out of the table, with those of the same rows in one run.
        lost = table[places].sum() + rows.std()
    assert coupling_rows(record, named) == ["root", "other rows"]
    assert coupling_rows(record, {"lost": lost, **named}) == ["root", "other rows"]


def test_the_oldest_numbers_are_given_up_where_there_are_too_many() -> None:
    network = Network()
    with recording(network) as record:
        part = network.inputs.repeat(1, MAX_NUMBERS // network.inputs.numel() // 3, 1)
        parts = [network.query(part) for _ in range(5)]
        values = [value for part in parts if (value := record.value_of(part)) is not None]
    known = [source.numbers is not None for value in values for source in history([value])[0]]
    assert known == [False, False, True, True, True]


def test_a_loss_of_very_many_operations_is_not_looked_at() -> None:
    network, found = Network(), {}
    for num_operations in (10, 1000):
        with recording(network) as record:
            loss = negatives(network)
            for _ in range(num_operations):
                loss = loss + 1
        found[num_operations] = couples_rows(record, loss)
    assert found == {10: True, 1000: False}


class Negatives(Small):
    """Each row is to be told from all others of the batch, by a loss of torch's that knows what it counts."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = self.logits(batch[0])
        return functional.cross_entropy(found @ found.T, torch.arange(len(found)))


class OfTheWorst(Small):
    """Learns from the half of its rows on which it is worst."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = functional.cross_entropy(self.logits(batch[0]), batch[1], reduction="none")
        return losses.topk(len(losses) // 2).values.mean()


class Confirmed(Negatives):
    """Says that each part may stand for itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "loss_reduction": "mean"}


class Logged(Small):
    """Learns from each row alone, and logs what is no mean over rows among what is."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = self.logits(batch[0])
        losses = functional.cross_entropy(found, batch[1], reduction="none")
        loss = losses.mean()
        is_right = found.argmax(1) == batch[1]
        self.log_dict({"loss": loss, "hits": is_right.float().mean(), "temperature": 0.1 * batch_idx})
        self.log_dict({"perplexity": loss.detach().exp(), "widest": found.std()}, on_epoch=True)
        self.log("worst", losses.max(), reduce_fx="max")
        self.log("rows", losses.sum(), reduce_fx="sum")
        return {"loss": loss, "half_hits": 0.5 * is_right.float().mean(), "norm": found.detach().norm()}


class Gathered(Negatives):
    """Tells each row from those of all data-parallel ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = self.logits(batch[0])
        gathered = self.all_gather(found, sync_grads=True)
        assert isinstance(gathered, Tensor)
        rows = gathered.reshape(-1, found.shape[1])
        own = torch.arange(len(found)) + len(found) * self.global_rank
        return functional.cross_entropy(found @ rows.T, own)


class Teacher(Small):
    """A layer without gradients, which follows the model in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 8).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.before.weight, 0.1)
        return super().training_step(batch, batch_idx)


class TeacherByData(Teacher):
    """The same, in a way that torch does not count."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.teacher.weight.data.mul_(0.9).add_(self.before.weight.data, alpha=0.1)
        return Small.training_step(self, batch, batch_idx)


class Frozen(Teacher):
    """A layer without gradients that stays as it is."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return Small.training_step(self, batch, batch_idx)


class FrozenKinds(Small):
    """Frozen weights of all kinds, which stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (torch.empty(0), torch.ones(3, 3).to(torch.float8_e4m3fn), torch.ones(5, dtype=torch.complex64))
        others = (torch.ones(3, dtype=torch.uint8), torch.ones(4, 6).T, torch.ones(()), torch.eye(4).to_sparse())
        self.kinds = nn.ParameterList(nn.Parameter(one, requires_grad=False) for one in (*kinds, *others))


class Shuffled(Negatives):
    """Notes which rows it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.firsts: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.firsts.append(float(batch[0][0, 0]))
        return super().training_step(batch, batch_idx)


class Evaluated(Small):
    """Logs means over rows, those that say what they count, and others; its test says what all of them count."""

    def __init__(self) -> None:
        super().__init__()
        self.hits = torchmetrics.classification.MulticlassAccuracy(4, average="micro")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found = self.logits(batch[0])
        losses = functional.cross_entropy(found, batch[1], reduction="none")
        is_counted = batch[1] > 1
        masked = losses[is_counted].mean()
        is_right = found.argmax(1) == batch[1]
        self.log_dict({"val_loss": functional.cross_entropy(found, batch[1]), "accuracy": is_right.double().mean()})
        self.log("hits", self.hits(found, batch[1]))
        self.log("sized", masked, batch_size=int(is_counted.sum()))
        self.log_dict({"masked": masked, "perplexity": losses.mean().exp()})

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        is_counted = batch[1] > 1
        masked = functional.cross_entropy(self.logits(batch[0]), batch[1], reduction="none")[is_counted].mean()
        self.log("masked", masked)
        return {"loss": masked, "loss_weight": is_counted.sum()}


class SaysLess(Evaluated):
    """Does not say what its test counts."""

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return super().test_step(batch, batch_idx)["loss"]


M2, DP2 = Layout(microbatches=2), Layout(world=2)
PP2, DP2PP2 = Layout(world=2, pp=2, microbatches=2), Layout(world=4, pp=2, microbatches=2)
COLLECTIVE = Layout(world=2, pp=2, microbatches=2, collective=True)
DP2COLLECTIVE = Layout(world=4, pp=2, microbatches=2, collective=True)
COUPLED, NO_MEANS, MOVED = (
    "the loss of training_step seems to couple the rows",
    "what training_step logs as perplexity, widest, norm seems to be no mean over rows",
    "training_step moves teacher.weight, once for each of ",
)


def told(layout: Layout, kind: type[L.LightningModule]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make_trainer(layout, max_epochs=2, limit_val_batches=0).fit(kind(), Data(24))
    return [
        str(one.message)
        for one in found
        if str(one.message).startswith((COUPLED, NO_MEANS[:30], "training_step moves"))
    ]


@pytest.mark.parametrize(
    ("kind", "layout", "shown"),
    [
        (Negatives, M2, COUPLED),
        (Negatives, DP2, COUPLED),
        (Negatives, PP2, COUPLED),
        (Negatives, DP2PP2, COUPLED),
        (Negatives, DP2COLLECTIVE, COUPLED),
        # There the step has all rows, and the model's calls alone are cut.
        (Negatives, COLLECTIVE, ""),
        (Negatives, Layout(world=2, pp=2), ""),
        (Negatives, Layout(world=2, tp=2), ""),
        (Negatives, Layout(world=4, tp=2), COUPLED),
        (OfTheWorst, M2, COUPLED),
        (OfTheWorst, DP2PP2, COUPLED),
        (Confirmed, DP2, ""),
        (Gathered, DP2, ""),
        (Logged, DP2PP2, NO_MEANS),
        (Logged, M2, NO_MEANS),
        (Logged, Layout(world=2, tp=2), ""),
        (Small, DP2PP2, ""),
        (Teacher, M2, MOVED),
        (TeacherByData, DP2, MOVED),
        (Teacher, Layout(world=2, tp=2), ""),
        (Frozen, DP2PP2, ""),
        (FrozenKinds, M2, ""),
    ],
    ids=str,
)
def test_a_run_tells_once(kind: type[L.LightningModule], layout: Layout, shown: str) -> None:
    *silent, found = sorted(run_on_ranks(layout.world, told, layout, kind, init=False), key=len)
    assert not any(silent)
    assert len(found) == bool(shown) and all(text.startswith(shown) for text in found), found


def told_in_evaluation(layout: Layout, kind: type[L.LightningModule]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer, module = make_trainer(layout, max_epochs=2, limit_train_batches=1), kind()
        trainer.fit(module, Data(24))
        trainer.test(module, Data(24), verbose=False)
    return [
        text.partition(" seems")[0] for one in found if (text := str(one.message)).startswith(("what ", "the loss"))
    ]


VALIDATED, TESTED = "what validation_step logs as masked, perplexity", "what test_step logs as masked"


@pytest.mark.parametrize(
    ("kind", "layout", "shown"),
    [
        (Evaluated, DP2, [VALIDATED]),
        (Evaluated, DP2PP2, [VALIDATED]),
        (SaysLess, DP2, [VALIDATED, TESTED]),
        # An evaluation is not cut into microbatches.
        (SaysLess, PP2, []),
        (SaysLess, Layout(world=2, tp=2), []),
    ],
    ids=str,
)
def test_an_evaluation_tells_once_of_what_is_no_mean_over_rows(
    kind: type[L.LightningModule], layout: Layout, shown: list[str]
) -> None:
    *silent, found = sorted(run_on_ranks(layout.world, told_in_evaluation, layout, kind, init=False), key=len)
    assert not any(silent)
    assert found == shown


def rows_read(layout: Layout) -> list[float]:
    L.seed_everything(7, verbose=False)
    module = Shuffled()
    loader: Any = DataLoader(samples(16), batch_size=8, shuffle=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(layout, max_epochs=3, limit_val_batches=0).fit(module, loader)
    return module.firsts


def test_the_look_changes_no_rows_of_later_epochs() -> None:
    [wanted] = run_on_ranks(1, rows_read, Layout(is_plain=True), init=False)
    for found in run_on_ranks(2, rows_read, PP2, init=False):
        # The first rows of both microbatches of six batches.
        assert found[::2] == wanted and len(found) == 12
