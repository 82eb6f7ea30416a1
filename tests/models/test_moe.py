"""GPTModel with layers of experts equals one in plain torch, whose objective has its auxiliary losses written out."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.comm.rng import Draws
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.moe.capacity import ExpertCapacity
from lightning_megatron.moe.config import AuxLoss, MoEConfig, RouterConfig
from lightning_megatron.sharding import sharded_parameters
from tests.harness.threads import new_group, run_on_threads
from tests.models.test_context import segments_of
from tests.models.test_gpt import LLAMA, SEED, TOLERANCE, batch_of, largest_difference, model_of
from tests.moe.plain_capacity import E
from tests.reference.gpt import ReferenceGPT
from tests.reference.moe import RouterState
from tests.reference.unsplit import unsplit_gradients, unsplit_weights

TOP_2 = MoEConfig(
    router=RouterConfig(
        num_experts=E,
        top_k=2,
        aux_losses=(AuxLoss(coefficient=0.5), AuxLoss(scope="global", coefficient=0.4)),
        z_loss=0.2,
    ),
    ffn_hidden_size=24,
    shared_expert_intermediate_size=16,
    shared_expert_gate=True,
)
TOP_1 = MoEConfig(
    router=RouterConfig(num_experts=E, top_k=1, norm_topk_prob=False, aux_losses=(AuxLoss(coefficient=0.6),)),
    layer_freq=2,
    capacity=ExpertCapacity(factor=0.75),
)
VARIANTS = {"top 2, shared": replace(LLAMA, moe=TOP_2), "top 1, capacity, one dense": replace(LLAMA, moe=TOP_1)}
each_variant = pytest.mark.parametrize("variant", VARIANTS)
LAYOUTS = {
    "one device": Sizes(),
    "tp 2": Sizes(world=2, tp=2),
    "tp 2 sp, ep 2": Sizes(world=2, tp=2, sequence_parallel=True, ep=2),
    "cp 2, ep 2": Sizes(world=2, cp=2, ep=2),
    "cp 2, etp 2": Sizes(world=2, cp=2, etp=2),
}
on_every_layout = pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS)
either_batch = pytest.mark.parametrize("is_packed", [False, True], ids=["rows", "packed"])


def without_losses(config: GPTConfig) -> GPTConfig:
    assert config.moe is not None
    return replace(config, moe=replace(config.moe, router=replace(config.moe.router, aux_losses=(), z_loss=0.0)))


def gradients(model: GPTModel) -> dict[str, Tensor]:
    """Gradients of data-parallel ranks whose losses are averaged, with the names of the unsplit model."""
    cp, shards = model.mesh.cp, {name: shard for name, _, shard in sharded_parameters(model)}
    # Experts have data-parallel ranks of their own.
    return {
        name: collectives.all_reduce(grad, shards[name].data or cp) / cp.size
        for name, grad in unsplit_gradients(model).items()
    }


@pytest.mark.matrix
@on_every_layout
@either_batch
@each_variant
def test_the_loss_is_that_of_tokens_and_every_gradient_that_of_the_written_out_objective(
    sizes: Sizes, is_packed: bool, variant: str
) -> None:
    config = VARIANTS[variant]
    tokens, labels, mask = batch_of(3, 9)
    # A row without a target, whose tokens do not count in the auxiliary losses either.
    labels[1] = -100
    segments = segments_of(3, 9) if is_packed else None
    leaves = {name: weight.requires_grad_() for name, weight in unsplit_weights(model_of(config)).items()}
    assert config.moe is not None
    losses, found = [], []
    for each in (config, without_losses(config)):
        assert each.moe is not None
        routers = {i: RouterState.initial(each.moe.router) for i in range(each.num_layers) if each.has_experts(i)}
        reference = ReferenceGPT(each, leaves, Draws(seed=SEED), routers)
        losses.append(reference.loss(tokens, labels, mask, segments))
        grads = torch.autograd.grad(losses[-1], list(leaves.values()))
        found.append(dict(zip(leaves, grads, strict=True)))
        num_dropped = sum(int((router.seen.counts[1] - router.seen.counts[2]).sum()) for router in routers.values())
        assert (num_dropped > 0) == (config.moe.capacity is not None)
    expected, (right, bare) = losses[0], found
    assert all(float((right[name] - bare[name]).abs().max()) > 1e-3 for name in right if "router" in name)

    def on_rank(world: Any) -> None:
        mesh = Mesh.build(sizes, world.rank(), new_group)
        # What one does with the loss, one does with all of it.
        for factor in (1, 3):
            model = model_of(config, mesh)
            loss = model(tokens, labels, mask, segments)
            (factor * loss).backward()
            assert abs(loss.item() - expected.item()) < TOLERANCE
            scaled = {name: factor * grad for name, grad in right.items()}
            assert largest_difference(gradients(model), scaled) < 1e-11

    run_on_threads(sizes.world, on_rank)


@each_variant
def test_auxiliary_losses_leave_the_value_of_the_loss_to_the_bit(variant: str) -> None:
    tokens, labels, mask = batch_of(3, 9)
    with_them, without = (model_of(config) for config in (VARIANTS[variant], without_losses(VARIANTS[variant])))
    losses = [model(tokens, labels, mask) for model in (with_them, without)]
    assert losses[0].item() == losses[1].item()
    for loss in losses:
        loss.backward()
    assert largest_difference(unsplit_gradients(with_them), unsplit_gradients(without)) > 1e-3


def test_logits_without_labels_have_no_auxiliary_losses_in_their_gradient() -> None:
    tokens, _, _ = batch_of(2, 9)
    config = VARIANTS["top 2, shared"]
    grads = []
    for each in (config, without_losses(config)):
        model = model_of(each)
        logits = model(tokens)
        assert logits.shape == (2, 9, 131)
        logits.pow(2).mean().backward()
        grads.append(unsplit_gradients(model))
    assert largest_difference(*grads) == 0.0


def test_a_batch_without_a_target_has_zero_gradients() -> None:
    tokens, labels, _ = batch_of(2, 9)
    model = model_of(VARIANTS["top 2, shared"])
    loss = model(tokens, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_the_losses_of_a_report_are_means_by_the_weights_of_targets() -> None:
    config = VARIANTS["top 2, shared"]
    model = model_of(config)
    tokens, labels, mask = batch_of(3, 9)
    reports = []
    # Rows that weigh nothing do not count; together rows count by their weights.
    for rows in (mask, mask * torch.tensor([[0.0], [0.0], [1.0]])):
        model(tokens, labels, rows)
        model.end_step(is_skipped=False)
        reports.append(model.routing_reports["layers.1"].losses)
    alone = model_of(config)
    alone(tokens[2:], labels[2:], mask[2:])
    alone.end_step(is_skipped=False)
    for name in ("sequence", "z"):
        third = alone.routing_reports["layers.1"].losses[name]
        assert abs(float(reports[1][name] - third)) < TOLERANCE
        assert abs(float(reports[0][name] - third)) > 1e-4


def learning(rate: float = 0.25) -> GPTConfig:
    router = replace(TOP_2.router, bias_update_rate=rate)
    return replace(LLAMA, moe=replace(TOP_2, router=router))


def test_a_model_that_runs_alone_learns_from_all_its_calls_when_its_weights_are_stepped() -> None:
    model = model_of(learning())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, labels, mask = batch_of(3, 9)
    router = model.routers["layers.0"]
    assert list(model.routers) == ["layers.0", "layers.1"]
    for num_calls in (1, 3):
        before = router.expert_bias.clone()
        for _ in range(num_calls):
            model(tokens, labels, mask).backward()
        assert torch.equal(router.expert_bias, before)
        torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
        assert torch.equal(router.expert_bias, before), "it learnt from the step of others"
        optimizer.step()
        counts_E = model.routing_reports["layers.0"].counts_E
        assert int(counts_E.sum()) == num_calls * tokens.numel() * 2
        mean = counts_E.sum() / E
        step = 0.25 * ((counts_E < mean).float() - (counts_E > mean).float())
        assert step.any() and torch.equal(router.expert_bias, before + step)


def test_evaluation_and_calls_that_nobody_learns_from_leave_no_trace() -> None:
    model = model_of(learning())
    tokens, labels, mask = batch_of(3, 9)
    model(tokens, labels, mask)
    state = copy.deepcopy(model.state_dict())
    model.eval()
    first = model(tokens, labels, mask)
    assert torch.equal(first, model(tokens, labels, mask))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.train()
    model.end_step(is_skipped=True)
    with torch.no_grad():
        # No step comes of it.
        model(tokens, labels, mask)
    model.end_step(is_skipped=False)
    assert not model.routing_reports
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("is_pickled", [False, True])
def test_a_copy_of_a_model_in_training_goes_on_as_the_model_does(is_pickled: bool) -> None:
    model = model_of(learning())
    batch = batch_of(3, 9)
    model(*batch).backward()
    other = pickle.loads(pickle.dumps(model)) if is_pickled else copy.deepcopy(model)
    losses = []
    for each in (model, other):
        each.zero_grad()
        loss = each(*batch)
        loss.backward()
        losses.append(loss.item())
        # Each learns of the first call, before the copy was made, and of its own second.
        torch.optim.SGD(each.parameters(), lr=0.0).step()
    assert losses[0] == losses[1]
    assert largest_difference(unsplit_gradients(model), unsplit_gradients(other)) == 0.0
    assert torch.equal(model.routers["layers.1"].expert_bias, other.routers["layers.1"].expert_bias)
    assert other.routers["layers.1"].expert_bias.any()


WITHIN_SEQUENCES = {
    "dropless": TOP_2,
    "capacity": replace(TOP_2, capacity=ExpertCapacity(factor=0.5)),
    "capacity by position, padded": replace(
        TOP_2, capacity=ExpertCapacity(factor=0.5, drop_policy="position", pad_to_capacity=True)
    ),
    "expert choice": MoEConfig(
        router=RouterConfig(num_experts=E, routing_type="expert_choice", norm_topk_prob=False), ffn_hidden_size=24
    ),
    "sinkhorn": MoEConfig(router=RouterConfig(num_experts=E, routing_type="sinkhorn"), ffn_hidden_size=24),
}


@on_every_layout
@pytest.mark.parametrize("moe", WITHIN_SEQUENCES.values(), ids=WITHIN_SEQUENCES)
def test_a_document_that_changes_changes_no_logit_of_another(sizes: Sizes, moe: MoEConfig) -> None:
    tokens, _, _ = batch_of(2, 13)
    segments = segments_of(2, 13)
    is_changed = segments == 1
    changed = torch.where(is_changed, (tokens + 1) % 131, tokens)

    def logits(world: Any) -> tuple[Tensor, Tensor]:
        # In training, where plans are made.
        model = model_of(replace(LLAMA, moe=moe), Mesh.build(sizes, world.rank(), new_group))
        with torch.no_grad():
            return model(tokens, segments=segments), model(changed, segments=segments)

    for before, after in run_on_threads(sizes.world, logits):
        # Products of other numbers of rows may be added up in another order.
        torch.testing.assert_close(before[~is_changed], after[~is_changed], rtol=0, atol=1e-11)
        assert (before - after)[is_changed].abs().amax(dim=-1).min() > 1e-3


# The compiler looks at everything that a layer holds.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.slow
def test_compiled_layers_of_experts_compute_the_same() -> None:
    batch = batch_of(3, 9)
    model, compiled = model_of(learning()), model_of(learning())
    for name in ("layers.0", "layers.1"):
        compiled.get_submodule(name).compile(backend="aot_eager")
    losses = []
    for each in (model, compiled):
        loss = each(*batch)
        loss.backward()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) < TOLERANCE
    assert largest_difference(unsplit_gradients(model), unsplit_gradients(compiled)) < TOLERANCE
