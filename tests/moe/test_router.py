"""Tests of the router against one that is spelled out for one device, on every cut of the tokens."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from lightning_megatron.comm import differentiable, rng
from lightning_megatron.comm.collectives import all_reduce, shard_slice
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.moe.config import AuxLoss, RouterConfig
from lightning_megatron.moe.load import RoutingReport
from lightning_megatron.moe.router import Router, Routing, end_step
from lightning_megatron.moe.sequence_groups import RoutedTokens
from lightning_megatron.sharding import Initial, shard_of
from tests.harness.threads import new_group, run_on_threads
from tests.moe.plain_router import NAME, B, Batch, E, H, Plain, S, make_batch, plain_step

# float64 sums of some hundred numbers near 1, in another order.
TOLERANCE = 1e-12
# A wrong answer must differ by this much at least.
BITE = 1e-4
# Between the rows of a stream and the padding that makes it a multiple of tp.
STREAM_PADDING = 2


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    cp: int = 1
    dp: int = 1
    num_microbatches: int = 1

    @property
    def sizes(self) -> Sizes:
        world = self.tp * self.cp * self.dp
        return Sizes(world=world, tp=self.tp, cp=self.cp)

    @property
    def microbatches_B(self) -> tuple[int, ...]:
        """The model call that each row is in."""
        rows = B // self.dp // self.num_microbatches
        return tuple(b // rows for b in range(B))


LAYOUTS = {
    "one device": Layout(),
    "4 microbatches": Layout(num_microbatches=4),
    "tp 2": Layout(tp=2),
    "tp 2, 2 microbatches": Layout(tp=2, num_microbatches=2),
    "cp 2": Layout(cp=2, num_microbatches=2),
    "dp 4": Layout(dp=4),
    "cp 2 dp 2": Layout(cp=2, dp=2, num_microbatches=2),
    "tp 2 cp 2 dp 2": Layout(tp=2, cp=2, dp=2),
}

ALL_SCOPES = (
    AuxLoss(scope="sequence", coefficient=0.3),
    AuxLoss(scope="microbatch", coefficient=0.2),
    AuxLoss(scope="global", coefficient=0.5),
)
CONFIGS = {
    "softmax after": RouterConfig(num_experts=E, top_k=2, aux_losses=ALL_SCOPES, z_loss=0.1),
    "softmax before": RouterConfig(num_experts=E, top_k=3, norm_topk_prob=False, topk_scaling_factor=2.5),
    "top 1": RouterConfig(num_experts=E, top_k=1, norm_topk_prob=False, aux_losses=ALL_SCOPES[:1], jitter=0.4),
    "sigmoid, groups, bias": RouterConfig(
        num_experts=E,
        top_k=4,
        score_function="sigmoid",
        topk_scaling_factor=2.5,
        num_groups=4,
        group_topk=2,
        bias_update_rate=0.2,
        aux_losses=ALL_SCOPES,
    ),
    "sqrt of softplus": RouterConfig(
        num_experts=E, top_k=2, score_function="sqrt_softplus", aux_losses=ALL_SCOPES, z_loss=0.2
    ),
    "sinkhorn": RouterConfig(num_experts=E, top_k=2, routing_type="sinkhorn", score_function="sigmoid", z_loss=0.1),
    "expert choice": RouterConfig(
        num_experts=E, top_k=2, routing_type="expert_choice", norm_topk_prob=False, z_loss=0.1
    ),
    "random": RouterConfig(num_experts=E, top_k=2, routing_type="random", aux_losses=ALL_SCOPES),
    "round_robin": RouterConfig(num_experts=E, top_k=3, routing_type="round_robin", norm_topk_prob=False),
}


def weight_of() -> Tensor:
    return torch.randn(E, H, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def build(config: RouterConfig, mesh: Mesh, weight_EH: Tensor) -> Router:
    router = Router(config, H, tp=mesh.tp, cut=mesh.tp, name=NAME, initial=Initial(std=1.0)).double()
    with torch.no_grad():
        router.weight.copy_(weight_EH)
    return router


def places_of(layout: Layout, mesh: Mesh) -> list[Tensor]:
    """For each model call of a rank, where its part of the stream is in [B * S], -1 for padding of the stream."""
    rows, chunk = B // layout.dp // layout.num_microbatches, S // (2 * layout.cp)
    early, late = mesh.cp.rank, 2 * layout.cp - 1 - mesh.cp.rank
    columns = torch.cat([torch.arange(chunk) + early * chunk, torch.arange(chunk) + late * chunk])
    calls = []
    for microbatch in range(layout.num_microbatches):
        first = (mesh.dp.rank * layout.num_microbatches + microbatch) * rows
        stream = (torch.arange(first, first + rows).unsqueeze(1) * S + columns).flatten()
        calls.append(shard_slice(F.pad(stream, (0, STREAM_PADDING), value=-1), mesh.tp))
    return calls


def tokens_of(batch: Batch, layout: Layout, places_T: Tensor, call: int, mesh: Mesh) -> RoutedTokens:
    """Metadata of the tokens of a rank; its documents are numbered within the call."""
    rows = B // layout.dp // layout.num_microbatches
    first = (mesh.dp.rank * layout.num_microbatches + call) * rows
    own = batch.documents_BS[first : first + rows]
    documents = own[own >= 0].unique(sorted=True).tolist()
    smallest = min(documents, default=0)
    numbers = range(int(batch.documents_BS.max()) + 1)
    weights_D = torch.tensor([batch.weight_of(number) for number in numbers], dtype=torch.float64)
    is_real_T = batch.is_real_BS.flatten()[places_T] & (places_T >= 0)
    return RoutedTokens(
        is_real_T=is_real_T,
        num_real=int(is_real_T.sum()),
        segments_T=torch.where(is_real_T, batch.documents_BS.flatten()[places_T] - smallest, 99),
        lengths=tuple(int((own == number).sum()) for number in documents),
        positions_T=batch.positions_BS.flatten()[places_T],
        make_keys=lambda: batch.keys_BS.flatten()[places_T],
        # Of padding any number.
        weights_T=torch.where(is_real_T, weights_D[batch.documents_BS.flatten()[places_T]], 7.0),
        axes=(mesh.tp, mesh.cp),
        call=call,
    )


@dataclass
class Stepped:
    """What a rank has after a step."""

    weight_grad: Tensor
    x_grads: list[tuple[Tensor, Tensor]]
    """Of each call: places, gradients."""
    report: RoutingReport


def step(router: Router, batch: Batch, layout: Layout, mesh: Mesh) -> Stepped:
    """One step as the engine makes it: the losses of cp are averaged, gradients summed and divided at the end."""
    router.weight.grad = None
    x_grads = []
    for call, places_T in enumerate(places_of(layout, mesh)):
        x_TH = batch.x_BSH.reshape(-1, H)[places_T].clone().requires_grad_()
        routing = router(x_TH, tokens_of(batch, layout, places_T, call, mesh))
        own = worth(routing, batch.out_BSE.reshape(-1, E)[places_T]) + routing.auxiliary
        # Each rank of tp goes on with its own tokens; those of cp have the loss of all, and are averaged.
        total = differentiable.reduce(differentiable.copy(own, mesh.cp), mesh.cp)
        (total / mesh.cp.size).backward()
        assert x_TH.grad is not None
        x_grads.append((places_T, x_TH.grad / batch.divisor))
    assert router.weight.grad is not None
    weight_grad = router.weight.grad
    partial = shard_of(router.weight).partial
    assert partial is not None
    for axis in (partial, mesh.axis("dp+cp")):
        weight_grad = all_reduce(weight_grad, axis)
    report = end_step([router], cut=mesh.tp, data=mesh.axis("dp+cp"))[0]
    return Stepped(weight_grad / batch.divisor, x_grads, report)


def worth(routing: Routing, out_TE: Tensor) -> Tensor:
    """The sum of the weights times what those of their experts are worth."""
    weights_TE = torch.zeros_like(out_TE).scatter_add(1, routing.expert_ids_TK.clamp(min=0), routing.probs_TK)
    return (weights_TE * out_TE).sum()


@dataclass
class Expected:
    """What one device has after a step."""

    plain: Plain
    x_grad_BSH: Tensor
    weight_grad_EH: Tensor
    bias_E: Tensor


@lru_cache(maxsize=32)
def two_plain_steps(config: RouterConfig, microbatches_B: tuple[int, ...]) -> list[Expected]:
    """Two steps on one device; the state that the first leaves is that of the second."""
    weight_EH, expected = weight_of().requires_grad_(), []
    bias_E, preferred = torch.zeros(E, dtype=torch.float32), [0] * E
    for seed in range(2):
        batch = make_batch(seed)
        x_BSH = batch.x_BSH.clone().requires_grad_()
        plain = plain_step(
            batch,
            x_BSH,
            weight_EH,
            config,
            bias=bias_E.double(),
            preferred=preferred,
            microbatches_B=microbatches_B,
        )
        x_grad_BSH, weight_grad_EH = torch.autograd.grad(plain.objective, (x_BSH, weight_EH))
        mean = sum(plain.counts) / E
        signs = torch.tensor([(mean > n) - (mean < n) for n in plain.counts], dtype=torch.float32)
        bias_E, preferred = bias_E + config.bias_update_rate * signs, plain.preferred
        expected.append(Expected(plain, x_grad_BSH.nan_to_num(), weight_grad_EH, bias_E))
    return expected


@pytest.mark.matrix
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_weights_losses_and_gradients_of_two_steps_equal_those_of_one_device(
    layout: Layout, config: RouterConfig
) -> None:
    calls = layout.microbatches_B if any(loss.scope == "microbatch" for loss in config.aux_losses) else (0,) * B
    expected = two_plain_steps(config, calls)

    def on_rank(world: Any) -> None:
        mesh = Mesh.build(layout.sizes, world.rank(), new_group) if world.size() > 1 else Mesh.single()
        router = build(config, mesh, weight_of())
        for seed, right in enumerate(expected):
            stepped = step(router, make_batch(seed), layout, mesh)
            assert stepped.report.counts_E.tolist() == right.plain.counts
            assert stepped.report.losses.keys() == right.plain.losses.keys()
            for name, loss in stepped.report.losses.items():
                assert_close(loss, right.plain.losses[name].detach(), rtol=0, atol=TOLERANCE)
            assert_close(stepped.weight_grad, right.weight_grad_EH, rtol=0, atol=TOLERANCE)
            for places_T, grad_TH in stepped.x_grads:
                wanted_TH = right.x_grad_BSH.view(-1, H)[places_T] * (places_T >= 0).unsqueeze(1)
                assert_close(grad_TH, wanted_TH, rtol=0, atol=TOLERANCE)
            if router.has_bias:
                assert router.expert_bias.dtype == torch.float32
                assert torch.equal(router.expert_bias, right.bias_E)

    run_on_threads(layout.sizes.world, on_rank)


def test_the_batches_of_this_test_bite() -> None:
    # Each loss moves the gradient, and each scope in another way; padding is there, and choices differ between steps.
    # And whose targets count how much tells, of one document nothing.
    weight_EH = weight_of().requires_grad_()
    batch, grads = make_batch(1), []
    assert batch.weight_of(1) == 0.0 and len({batch.weight_of(number) for number in range(5)}) == 5
    variants: list[dict[str, Any]] = [{}, {"z_loss": 0.1}]
    variants += [{"aux_losses": (AuxLoss(scope=loss.scope, coefficient=0.1),)} for loss in ALL_SCOPES]
    for variant in variants:
        config = RouterConfig(num_experts=E, top_k=2, **variant)
        plain = plain_step(
            batch,
            batch.x_BSH,
            weight_EH,
            config,
            bias=torch.zeros(E),
            preferred=[5, 0, 1, 2, 3, 4, 5, 6],
            microbatches_B=(0, 0, 1, 1),
        )
        grads.append(torch.autograd.grad(plain.objective, weight_EH)[0])
    for one in range(len(grads)):
        for other in range(one):
            assert (grads[one] - grads[other]).abs().max() > BITE


def single(config: RouterConfig, weight_EH: Tensor) -> Router:
    return build(config, Mesh.single(), weight_EH)


def plain_tokens(num_tokens: int, *, call: int = 0) -> RoutedTokens:
    """One sequence without padding."""
    return RoutedTokens(
        is_real_T=torch.ones(num_tokens, dtype=torch.bool),
        num_real=num_tokens,
        segments_T=torch.zeros(num_tokens, dtype=torch.int64),
        lengths=(num_tokens,),
        positions_T=torch.arange(num_tokens),
        make_keys=lambda: rng.bits(7, torch.arange(num_tokens)),
        weights_T=torch.ones(num_tokens, dtype=torch.float64),
        axes=(),
        call=call,
    )


@settings(max_examples=12)
@given(seed=st.integers(0, 1000), num_padding=st.integers(0, 5))
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_where_a_token_lies_in_the_stream_changes_nothing(config: RouterConfig, seed: int, num_padding: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mesh, layout = Mesh.single(), Layout()
    in_order_T = torch.arange(B * S)
    shuffled_T = torch.cat([in_order_T, torch.full((num_padding,), -1)])
    shuffled_T = shuffled_T[torch.randperm(len(shuffled_T), generator=generator)]
    batch, routings, grads = make_batch(seed), [], []
    for places_T in (in_order_T, shuffled_T):
        router = build(config, mesh, weight_of())
        routing = router(batch.x_BSH.view(-1, H)[places_T], tokens_of(batch, layout, places_T, 0, mesh))
        (worth(routing, batch.out_BSE.view(-1, E)[places_T]) + routing.auxiliary).backward()
        routings.append(routing)
        assert router.weight.grad is not None
        grads.append(router.weight.grad)
    before, after = routings
    assert torch.equal(after.expert_ids_TK[shuffled_T >= 0], before.expert_ids_TK[shuffled_T[shuffled_T >= 0]])
    assert bool((after.expert_ids_TK[shuffled_T < 0] == -1).all())
    assert_close(after.probs_TK[shuffled_T >= 0], before.probs_TK[shuffled_T[shuffled_T >= 0]], rtol=0, atol=TOLERANCE)
    # Gradients are those of sums, before what divides them at the end of a step.
    assert_close(grads[1], grads[0], rtol=0, atol=batch.divisor * TOLERANCE)


def test_softmax_after_the_choice_is_softmax_before_it_divided_by_the_sum_of_the_chosen() -> None:
    x_TH, tokens = torch.randn(S, H, dtype=torch.float64), plain_tokens(S)
    after = single(RouterConfig(num_experts=E, top_k=3), weight_of())(x_TH, tokens)
    before = single(RouterConfig(num_experts=E, top_k=3, norm_topk_prob=False), weight_of())(x_TH, tokens)
    assert torch.equal(after.expert_ids_TK, before.expert_ids_TK)
    ratio = before.probs_TK / before.probs_TK.sum(1, keepdim=True)
    assert_close(after.probs_TK, ratio, rtol=0, atol=TOLERANCE)
    assert (after.probs_TK - before.probs_TK).abs().max() > BITE


def test_weights_fall_from_the_first_chosen_to_the_last() -> None:
    routing = single(RouterConfig(num_experts=E, top_k=3), weight_of())(
        torch.randn(S, H, dtype=torch.float64), plain_tokens(S)
    )
    for one, next_one in pairwise(routing.probs_TK.unbind(1)):
        assert bool((one >= next_one).all())


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize(("wanted", "tolerance"), [("float32", 1e-6), ("float64", 1e-14)])
def test_scores_of_half_inputs_are_as_wide_as_configured(is_autocast: bool, wanted: Any, tolerance: float) -> None:
    config = RouterConfig(num_experts=E, top_k=2, dtype=wanted)
    router = single(config, weight_of()).bfloat16()
    x_TH = torch.randn(64, H).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
        routing = router(x_TH, plain_tokens(64))
    assert routing.probs_TK.dtype == getattr(torch, wanted)
    logits_TE = x_TH.double() @ router.weight.detach().double().T
    best = logits_TE.sort(1, descending=True)
    assert torch.equal(routing.expert_ids_TK, best.indices[:, :2])
    exact = best.values[:, :2].softmax(1)
    assert_close(routing.probs_TK.double(), exact, rtol=0, atol=tolerance)
    in_half = (x_TH @ router.weight.detach().T).double().sort(1, descending=True).values[:, :2].softmax(1)
    assert (in_half - exact).abs().max() > 100 * tolerance


def test_a_cast_of_the_module_leaves_the_state_of_balance_as_it_is() -> None:
    config = RouterConfig(num_experts=E, bias_update_rate=0.001, aux_losses=(AuxLoss(scope="global"),))
    router = single(config, weight_of())
    router.expert_bias.copy_(1 + torch.arange(E) * 0.001)
    router.global_tokens_per_expert.copy_(torch.arange(E) + 12345678)
    router.bfloat16()
    assert router.weight.dtype == torch.bfloat16
    assert torch.equal(router.expert_bias, 1 + torch.arange(E) * 0.001)
    assert torch.equal(router.global_tokens_per_expert, torch.arange(E) + 12345678)
    assert set(router.state_dict()) == {"weight", "expert_bias", "global_tokens_per_expert"}
    assert set(single(RouterConfig(num_experts=E), weight_of()).state_dict()) == {"weight"}


def test_a_call_that_is_recomputed_for_the_backward_counts_once() -> None:
    config = RouterConfig(num_experts=E, aux_losses=ALL_SCOPES, bias_update_rate=0.1, jitter=0.2)
    x_TH, out_TE = torch.randn(S, H, dtype=torch.float64), torch.randn(S, E, dtype=torch.float64)
    grads, reports, biases = [], [], []
    for is_recomputed in (False, True):
        router = single(config, weight_of())
        for call in range(2):
            tokens = plain_tokens(S, call=call)

            def forward(x: Tensor, tokens: RoutedTokens = tokens, router: Router = router) -> Tensor:
                routing = router(x, tokens)
                return worth(routing, out_TE) + routing.auxiliary

            x = x_TH + call
            loss = torch_checkpoint.checkpoint(forward, x, use_reentrant=False) if is_recomputed else forward(x)
            loss.backward()
        mesh = Mesh.single()
        reports.append(end_step([router], cut=mesh.tp, data=mesh.dp)[0])
        assert router.weight.grad is not None
        grads.append(router.weight.grad)
        biases.append(router.expert_bias)
    assert int(reports[0].counts_E.sum()) == 2 * S * config.top_k
    assert torch.equal(reports[0].counts_E, reports[1].counts_E)
    assert torch.equal(grads[0], grads[1]) and torch.equal(biases[0], biases[1])
    assert reports[0].losses == reports[1].losses


def test_half_inputs_have_their_auxiliary_losses_in_float32() -> None:
    config = RouterConfig(num_experts=E, top_k=2, aux_losses=ALL_SCOPES, z_loss=0.5)
    router = single(config, weight_of()).bfloat16()
    x_TH = torch.randn(64, H).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = router(x_TH, plain_tokens(64))
    assert routing.auxiliary.dtype == torch.float32
    logits_TE = x_TH.double() @ router.weight.detach().double().T
    z = logits_TE.logsumexp(1).square().mean()
    report = end_step([router], cut=Mesh.single().tp, data=Mesh.single().dp)[0]
    assert abs(float(report.losses["z"] - z)) < 1e-5 * float(z)


def test_evaluation_neither_jitters_nor_counts_nor_plans() -> None:
    x_TH = torch.randn(S, H, dtype=torch.float64)
    top = single(RouterConfig(num_experts=E), weight_of()).eval()(x_TH, plain_tokens(S))
    for config in (
        RouterConfig(num_experts=E, jitter=0.5, aux_losses=ALL_SCOPES),
        RouterConfig(num_experts=E, routing_type="sinkhorn"),
    ):
        router = single(config, weight_of())
        in_training = router(x_TH, plain_tokens(S))
        assert not torch.equal(in_training.probs_TK, top.probs_TK)
        router.records.forget()
        routing = router.eval()(x_TH, plain_tokens(S))
        assert torch.equal(routing.expert_ids_TK, top.expert_ids_TK) and torch.equal(routing.probs_TK, top.probs_TK)
        assert not router.records.counts and not router.records.accepted and float(routing.auxiliary) == 0.0


def test_the_losses_of_a_call_without_a_real_token_are_zero() -> None:
    config = RouterConfig(num_experts=E, aux_losses=ALL_SCOPES, z_loss=1.0)
    router = single(config, weight_of())
    tokens = plain_tokens(S)
    padding = RoutedTokens(
        is_real_T=torch.zeros(S, dtype=torch.bool),
        num_real=0,
        segments_T=tokens.segments_T,
        lengths=(),
        positions_T=tokens.positions_T,
        make_keys=tokens.make_keys,
        weights_T=tokens.weights_T,
        axes=(),
    )
    routing = router(torch.full((S, H), torch.nan, dtype=torch.float64), padding)
    assert bool((routing.expert_ids_TK == -1).all()) and bool((routing.probs_TK == 0).all())
    assert float(routing.auxiliary.detach()) == 0.0
    (routing.probs_TK.sum() + routing.auxiliary).backward()
    assert router.weight.grad is not None and bool((router.weight.grad == 0).all())
    report = end_step([router], cut=Mesh.single().tp, data=Mesh.single().dp)[0]
    assert all(float(loss) == 0 for loss in report.losses.values()) and int(report.counts_E.sum()) == 0
