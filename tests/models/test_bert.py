"""BertModel equals a BERT in plain torch: loss, logits and every gradient, on one device, any tp, sp and cp, in stages
and in microbatches."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import BertConfig, BertModel
from lightning_megatron.rules.cross_config import Facts, faults
from lightning_megatron.sharding import sharded_parameters
from lightning_megatron.transformer.mlp import MLP
from tests.harness.threads import new_group, run_on_threads
from tests.models.test_gpt import largest_difference
from tests.reference.bert import ReferenceBert
from tests.reference.unsplit import unsplit_gradients, unsplit_weights

# Sums of a few hundred float64 numbers of order 1, in another order.
TOLERANCE = 1e-12
SEED = 7
POST = BertConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=8,
    ffn_hidden_size=48,
    vocab_size=131,
    max_sequence_length=16,
    # Large, so that a wrong layer moves the loss by much.
    init_std=0.3,
    norm_epsilon=1e-5,
)
PRE = replace(POST, norm_placement="pre", embedding_norm=False)
VARIANTS = {
    "post-norm": POST,
    "pre-norm": PRE,
    "pre-norm, untied, no binary head, tanh": replace(
        PRE, tie_embeddings=False, add_binary_head=False, activation="gelu_tanh"
    ),
    "post-norm, no types, key groups, padded rows": replace(
        POST, num_token_types=0, num_query_groups=2, vocab_multiple=16, embedding_norm=False
    ),
}
DROPPING = replace(POST, hidden_dropout=0.2, attention_dropout=0.2, ffn_dropout=0.2)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp4 sp": {"tp": 4, "sequence_parallel": True},
    "ring of 2": {"cp": 2},
    "all-gather of 2": {"cp": 2, "cp_exchange": "all_gather"},
    "all-to-all of 2": {"cp": 2, "cp_ulysses": 2},
    "ring of 3": {"cp": 3},
    "ring of 2, tp2 sp": {"cp": 2, "tp": 2, "sequence_parallel": True},
}
each_variant = pytest.mark.parametrize("variant", VARIANTS)
each_padding = pytest.mark.parametrize("is_padded", [False, True], ids=["whole rows", "padded"])


def batch_of(config: BertConfig, is_padded: bool, batch: int = 4, sequence: int = 7) -> dict[str, Tensor]:
    """A batch whose samples have different lengths and numbers of targets, one of them no token if padded."""
    generator = torch.Generator().manual_seed(3)
    shape = (batch, sequence)
    labels = torch.randint(131, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.4] = -100
    mask = torch.rand(shape, generator=generator, dtype=torch.float64)
    mask[0, :4] = 0.0
    found = {"tokens": torch.randint(131, shape, generator=generator), "labels": labels, "loss_mask": mask}
    if config.num_token_types:
        found["token_types"] = torch.randint(config.num_token_types, shape, generator=generator)
    if config.add_binary_head:
        found["sentence_order_labels"] = torch.tensor([1, 0, -100, 1])[:batch]
    if is_padded:
        lengths = torch.tensor([sequence - 3, sequence, 1, 0])[:batch]
        found["padding_mask"] = (torch.arange(sequence) < lengths.unsqueeze(1)).long()
    return found


def inputs_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the model takes to give logits."""
    return {name: batch[name] for name in ("tokens", "token_types", "padding_mask") if name in batch}


def model_of(config: BertConfig, mesh: Mesh | None = None) -> BertModel:
    """A model in float64 whose biases and norms are not at their initial zeros and ones."""
    model = BertModel(config, mesh=mesh, seed=SEED).double()
    with torch.no_grad():
        for name, parameter, shard in sharded_parameters(model):
            if shard.initial.std == 0.0:
                generator = torch.Generator().manual_seed(sum(name.encode()))
                values = 0.2 * torch.randn(shard.global_shape, generator=generator, dtype=torch.float64)
                for dim, (offset, size) in enumerate(zip(shard.box.offsets, shard.box.sizes, strict=True)):
                    values = values.narrow(dim, offset, size)
                shard.valid(parameter).add_(values)
    return model


def square(tokens: Tensor, order: Tensor | None) -> Tensor:
    """A number that depends on all logits."""
    return tokens.pow(2).mean() + (0 if order is None else order.pow(3).sum())


def wanted(config: BertConfig, batch: dict[str, Tensor]) -> dict[str, Any]:
    """What the reference makes of a batch: loss, logits, and the gradients of either."""
    leaves = {name: weight.requires_grad_() for name, weight in unsplit_weights(model_of(config)).items()}
    reference = ReferenceBert(config, leaves)
    loss = reference.loss(**batch)
    tokens, order = reference.logits(**inputs_of(batch))

    def gradients(of: Tensor) -> dict[str, Tensor]:
        found = torch.autograd.grad(of, list(leaves.values()), retain_graph=True, allow_unused=True)
        pairs = zip(leaves.items(), found, strict=True)
        return {name: torch.zeros_like(leaf) if grad is None else grad for (name, leaf), grad in pairs}

    of_logits = square(tokens, order if config.add_binary_head else None)
    return {
        "loss": loss.item(),
        "grads": gradients(loss),
        "tokens": tokens.detach(),
        "order": order.detach(),
        "of_logits": gradients(of_logits),
    }


def found_by(model: BertModel, batch: dict[str, Tensor]) -> dict[str, Any]:
    cp = model.mesh.cp

    def gradients() -> dict[str, Tensor]:
        # Losses of the ranks of cp are averaged as over data-parallel ranks.
        return {name: collectives.all_reduce(g, cp) / cp.size for name, g in unsplit_gradients(model).items()}

    loss = model(**batch)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    found: dict[str, Any] = {"loss": loss.item(), "grads": gradients()}
    model.zero_grad()
    model.draws.step = 0
    tokens, order = model(**inputs_of(batch))
    square(tokens, order).backward()
    return {**found, "tokens": tokens.detach(), "order": order, "of_logits": gradients()}


def require_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert abs(found["loss"] - expected["loss"]) < TOLERANCE
    assert largest_difference(found["grads"], expected["grads"]) < TOLERANCE
    torch.testing.assert_close(found["tokens"], expected["tokens"], rtol=0, atol=1e-11)
    if found["order"] is not None:
        torch.testing.assert_close(found["order"].detach(), expected["order"], rtol=0, atol=1e-11)
    assert largest_difference(found["of_logits"], expected["of_logits"]) < 1e-10


@each_padding
@each_variant
def test_loss_logits_and_every_gradient_equal_the_reference(variant: str, is_padded: bool) -> None:
    config = VARIANTS[variant]
    batch = batch_of(config, is_padded)
    expected = wanted(config, batch)
    require_equal(found_by(model_of(config), batch), expected)
    assert min(float(grad.abs().max()) for grad in expected["grads"].values()) > 1e-6
    # Every input is seen by the comparison.
    for name in batch.keys() - {"tokens", "labels"}:
        others = {key: value for key, value in batch.items() if key != name}
        assert abs(model_of(config)(**others).item() - expected["loss"]) > 1e-3, name


def on_mesh(world: Any, sizes: Sizes, config: BertConfig, batch: dict[str, Tensor]) -> dict[str, Any]:
    return found_by(model_of(config, Mesh.build(sizes, world.rank(), new_group)), batch)


@pytest.mark.matrix
@each_padding
@each_variant
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_equals_the_reference(layout: str, variant: str, is_padded: bool) -> None:
    config, options = VARIANTS[variant], LAYOUTS[layout]
    if config.num_query_groups == 2 and options.get("tp") == 4:
        config = replace(config, num_query_groups=4)
    sizes = Sizes(world=options.get("tp", 1) * options.get("cp", 1), **options)
    batch = batch_of(config, is_padded)
    expected = wanted(config, batch)
    for found in run_on_threads(sizes.world, on_mesh, sizes, config, batch):
        require_equal(found, expected)


@each_padding
@pytest.mark.parametrize("layout", ["tp4 sp", "all-to-all of 2", "ring of 3"])
def test_dropout_is_that_of_one_device(layout: str, is_padded: bool) -> None:
    options = LAYOUTS[layout]
    sizes = Sizes(world=options.get("tp", 1) * options.get("cp", 1), **options)
    batch = batch_of(DROPPING, is_padded)
    alone = found_by(model_of(DROPPING), batch)
    assert abs(alone["loss"] - wanted(DROPPING, batch)["loss"]) > 1e-3
    for found in run_on_threads(sizes.world, on_mesh, sizes, DROPPING, batch):
        assert abs(found["loss"] - alone["loss"]) < TOLERANCE
        assert largest_difference(found["grads"], alone["grads"]) < TOLERANCE


@pytest.mark.parametrize("variant", ["post-norm", "pre-norm, untied, no binary head, tanh"])
@pytest.mark.parametrize(("pp", "vp"), [(2, 1), (3, 1), (2, 2)])
def test_stages_in_turn_equal_the_reference(variant: str, pp: int, vp: int) -> None:
    config = replace(VARIANTS[variant], num_layers=4)
    batch = batch_of(config, True)
    expected = wanted(config, batch)
    sizes = Sizes(world=pp, pp=pp, vp=vp)
    ranks = [model_of(config, Mesh.imagine(rank, sizes)) for rank in range(pp)]
    by_stage = {stage: model for model in ranks for stage in model.mesh.own_stages}
    hidden: Any = None
    for stage in range(sizes.num_stages):
        first, context = by_stage[stage].prepare(**batch)
        hidden = by_stage[stage].run_stage(stage, first if stage == 0 else hidden, context)
    assert abs(hidden.item() - expected["loss"]) < TOLERANCE
    hidden.backward()
    grads: dict[str, Tensor] = {}
    for model in ranks:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            grads[name] = grads[name] + parameter.grad if name in grads else parameter.grad
    assert largest_difference(grads, expected["grads"]) < TOLERANCE


# The loss


@each_padding
def test_microbatches_weighed_by_their_loss_weight_add_up_to_the_batch(is_padded: bool) -> None:
    """With several targets in one sample and few in another, where a mean of means is another number."""
    batch = batch_of(POST, is_padded)
    model = model_of(POST)
    expected = wanted(POST, batch)
    total, num, means = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), []
    for rows in (slice(0, 1), slice(1, 4)):
        loss = model(**{name: value[rows] for name, value in batch.items()})
        assert model.loss_weight is not None
        total, num = total + loss * model.loss_weight, num + model.loss_weight
        means.append(loss.item())
    (total / num).backward()
    assert abs((total / num).item() - expected["loss"]) < TOLERANCE
    assert largest_difference(unsplit_gradients(model), expected["grads"]) < TOLERANCE
    assert abs(sum(means) / 2 - expected["loss"]) > 1e-3


def test_with_equally_many_targets_in_each_sample_the_order_loss_is_a_mean_over_samples() -> None:
    model = model_of(POST)
    batch = batch_of(POST, False)
    del batch["loss_mask"]
    batch["labels"] = torch.where(torch.arange(7) < 3, batch["tokens"], -100)
    batch["sentence_order_labels"] = torch.tensor([1, 0, 0, 1])
    both = model(**batch)
    tokens, order = model(**inputs_of(batch))
    of_tokens = torch.nn.functional.cross_entropy(tokens.transpose(1, 2), batch["labels"])
    of_samples = torch.nn.functional.cross_entropy(order, batch["sentence_order_labels"])
    assert abs(both.item() - of_tokens.item() - of_samples.item()) < TOLERANCE
    assert of_samples.item() > 0.1


@pytest.mark.parametrize("layout", ["tp4 sp", "ring of 2"])
def test_a_batch_of_nothing_has_loss_zero_and_zero_gradients(layout: str) -> None:
    options = LAYOUTS[layout]
    sizes = Sizes(world=options.get("tp", 1) * options.get("cp", 1), **options)
    batch = batch_of(POST, False)
    nothing = [{**batch, "labels": torch.full((4, 7), -100)}, {**batch, "padding_mask": torch.zeros(4, 7)}]

    def step(world: Any) -> None:
        model = model_of(POST, Mesh.build(sizes, world.rank(), new_group))
        for empty in nothing:
            model.zero_grad()
            loss = model(**empty)
            loss.backward()
            assert loss.item() == 0.0 and model.loss_weight is not None and model.loss_weight.item() == 0.0
            assert all(p.grad is not None and p.grad.abs().max() == 0.0 for p in model.parameters())

    run_on_threads(sizes.world, step)


def test_without_sentence_order_labels_the_binary_head_has_gradients_of_zero() -> None:
    model = model_of(POST)
    batch = batch_of(POST, True)
    del batch["sentence_order_labels"]
    model(**batch).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if "sentence_order" in name}
    assert len(grads) == 4 and all(grad is not None and grad.abs().max() == 0.0 for grad in grads.values())


# What nobody may see


def test_padding_changes_nothing() -> None:
    model = model_of(POST).eval()
    batch = batch_of(POST, True)
    is_padding = batch["padding_mask"] == 0
    changed = {**batch, "tokens": torch.where(is_padding, 5, batch["tokens"])}
    changed["labels"] = torch.where(is_padding, 7, batch["labels"])
    assert model(**changed).item() == model(**batch).item()
    assert torch.equal(model(**inputs_of(changed)).tokens, model(**inputs_of(batch)).tokens)
    del changed["padding_mask"]
    assert abs(model(**changed).item() - model(**batch).item()) > 1e-3


def test_every_token_sees_those_after_it_and_no_other_row() -> None:
    model = model_of(PRE).eval()
    batch = inputs_of(batch_of(PRE, False))
    changed = batch["tokens"].clone()
    changed[1, -1] = (changed[1, -1] + 1) % 131
    before, after = model(**batch).tokens, model(**{**batch, "tokens": changed}).tokens
    assert (before - after)[1].abs().amax(dim=-1).min() > 1e-3
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]])


# Names and faults


def test_names_of_the_parameters_are_those_of_checkpoints() -> None:
    shapes = {
        name: tuple(shard.global_shape)
        for name, _, shard in sharded_parameters(BertModel(replace(PRE, num_layers=1, embedding_norm=True), seed=1))
    }
    assert {name: shape for name, shape in shapes.items() if not name.startswith("layers")} == {
        "embedding.tokens.weight": (131, 32),
        "embedding.positions.weight": (16, 32),
        "embedding.token_types.weight": (2, 32),
        "embedding.norm.weight": (32,),
        "embedding.norm.bias": (32,),
        "final_norm.weight": (32,),
        "final_norm.bias": (32,),
        "head.masked_tokens.dense.weight": (32, 32),
        "head.masked_tokens.dense.bias": (32,),
        "head.masked_tokens.norm.weight": (32,),
        "head.masked_tokens.norm.bias": (32,),
        "head.masked_tokens.bias": (131,),
        "head.sentence_order.pooler.weight": (32, 32),
        "head.sentence_order.pooler.bias": (32,),
        "head.sentence_order.output.weight": (2, 32),
        "head.sentence_order.output.bias": (2,),
    }
    of_layers = {
        place: {name for name, _ in BertModel(config, seed=1).named_parameters() if name.startswith("layers")}
        for place, config in (("pre", PRE), ("post", POST))
    }
    assert of_layers["pre"] == of_layers["post"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(2, 7, dtype=torch.long)}, "labels .* shape of tokens"),
        ({"token_types": torch.zeros(2, dtype=torch.long)}, "token_types .* shape of tokens"),
        ({"sentence_order_labels": torch.zeros(2, dtype=torch.long)}, "sentence_order_labels needs labels"),
        ({"loss_mask": torch.ones(2, 8)}, "loss_mask needs labels"),
        ({"padding_mask": torch.tensor([[1] * 8, [1, 0] * 4])}, "row 1 has padding before a token"),
        ({"tokens": torch.zeros(2, 8)}, "integers of shape"),
        ({"tokens": torch.zeros(2, 17, dtype=torch.long)}, "max_sequence_length"),
    ],
)
def test_wrong_inputs_are_reported(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BertModel(POST, seed=1)(**{"tokens": torch.zeros(2, 8, dtype=torch.long), **change})


def test_inputs_for_what_the_model_has_not_are_reported() -> None:
    config = replace(POST, add_binary_head=False, num_token_types=0)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    with pytest.raises(ValueError, match="no binary head"):
        BertModel(config, seed=1)(tokens, labels=tokens, sentence_order_labels=tokens[:, 0])
    with pytest.raises(ValueError, match="token_types are given"):
        BertModel(config, seed=1)(tokens, token_types=tokens)


def test_every_fault_of_a_configuration_is_reported_at_once() -> None:
    with pytest.raises(ValueError) as raised:
        replace(POST, norm_placement="both", num_token_types=-1, activation="swiglu", sliding_window=3)
    text = str(raised.value)
    for word in ("norm_placement ('both')", "num_token_types (-1)", "activation ('swiglu')", "sliding_window (3)"):
        assert word in text


def test_rows_that_cp_does_not_divide_are_refused_on_request() -> None:
    model = BertModel(POST, mesh=Mesh.imagine(0, Sizes(world=2, cp=2, pads_uneven=False)), seed=1)
    with pytest.raises(ValueError, match="7 tokens, are no multiples of 2 "):
        model(torch.zeros(1, 7, dtype=torch.long))


@pytest.mark.parametrize("layout", ["ring of 2", "all-gather of 2", "all-to-all of 2", "ring of 3"])
def test_rows_that_cp_divides_once_need_no_padding_and_equal_the_reference(layout: str) -> None:
    """Of causal attention each rank would have two pieces, and 6 tokens of 2 ranks, or 9 of 3, would be refused."""
    cp = LAYOUTS[layout]["cp"]
    batch = batch_of(POST, False, sequence=3 * cp)
    sizes = Sizes(world=cp, pads_uneven=False, **LAYOUTS[layout])
    assert faults(Facts(sizes=sizes, model=POST, sequence_length=3 * cp)) == []
    expected = wanted(POST, batch)
    for found in run_on_threads(cp, on_mesh, sizes, POST, batch):
        require_equal(found, expected)


def test_each_rank_of_cp_holds_one_piece_of_a_row() -> None:
    model = BertModel(POST, mesh=Mesh.imagine(1, Sizes(world=2, cp=2)), seed=1)
    _, inputs = model.prepare(torch.zeros(1, 8, dtype=torch.long))
    assert inputs.tokens.positions_1N.tolist() == [[4, 5, 6, 7]]


def test_layers_drop_each_their_own_features_between_the_linears() -> None:
    keys = {module.dropout.key for module in BertModel(DROPPING, seed=1).modules() if isinstance(module, MLP)}
    assert len(keys) == DROPPING.num_layers
