"""A layer's experts, from router to shared expert, equal plain loops over tokens and experts: output and gradients."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.comm.rng import Draws
from lightning_megatron.context.documents import documents_of
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.moe.capacity import ExpertCapacity
from lightning_megatron.moe.config import AuxLoss, MoEConfig, RouterConfig
from lightning_megatron.moe.experts import ExpertAxes
from lightning_megatron.moe.router import end_step
from lightning_megatron.moe.sequence_groups import RoutedTokens
from lightning_megatron.moe.token_dispatcher import DispatchWork
from lightning_megatron.sharding import shard_of
from lightning_megatron.tensor.activation import Activation
from lightning_megatron.transformer import recompute
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.init import initialise
from lightning_megatron.transformer.layer import ExpertLayer
from lightning_megatron.transformer.moe import MoELayer
from lightning_megatron.transformer.position_cache import PositionCache
from lightning_megatron.transformer.recompute import RecomputeConfig
from lightning_megatron.transformer.tokens import Tokens, stream_of
from tests.harness.threads import new_group, run_on_threads
from tests.moe.plain_capacity import E, drop_by_hand
from tests.tensor.plain import fill, part_of

# float64 sums of some hundred numbers near 1, in another order.
TOLERANCE = 1e-11
# A wrong answer must differ by this much at least.
BITE = 1e-3

B, S, H, FFN, SHARED = 4, 7, 8, 12, 16
# No token comes to it.
IDLE = 2
# Packed: documents of uneven lengths, padding between and after, a row of padding alone.
PACKED = torch.tensor(
    [[0, 0, 0, 0, 1, 2, 2], [0, 0, -1, 1, 1, 1, 1], [-1] * 7, [0, 0, 0, 0, 0, 0, -1]], dtype=torch.int64
)
ROWS = torch.zeros(B, S, dtype=torch.int64)

TOP_2 = MoEConfig(
    router=RouterConfig(
        num_experts=E,
        top_k=2,
        aux_losses=(AuxLoss(coefficient=0.7), AuxLoss(scope="global", coefficient=0.4)),
        z_loss=0.3,
    ),
    ffn_hidden_size=FFN,
    shared_expert_intermediate_size=SHARED,
    shared_expert_gate=True,
)
TOP_1 = MoEConfig(
    router=RouterConfig(num_experts=E, top_k=1, norm_topk_prob=False, aux_losses=(AuxLoss(coefficient=0.7),)),
    ffn_hidden_size=FFN,
    capacity=ExpertCapacity(factor=0.75),
    expert_gemm="sequential",
)
VARIANTS: dict[str, tuple[MoEConfig, Activation]] = {
    "top 2, shared with a gate": (TOP_2, "swiglu"),
    "top 1, capacity": (TOP_1, "gelu"),
    "shared without a gate, capacity by position, padded": (
        replace(
            TOP_2,
            shared_expert_gate=False,
            capacity=ExpertCapacity(factor=0.5, drop_policy="position", pad_to_capacity=True),
        ),
        "gelu_tanh",
    ),
}
LAYOUTS = {
    "one device": Sizes(),
    "tp 2": Sizes(world=2, tp=2),
    "tp 4, etp 2": Sizes(world=4, tp=4, etp=2),
    "tp 2 sp, ep 2": Sizes(world=2, tp=2, sequence_parallel=True, ep=2),
    "ep 2": Sizes(world=2, ep=2),
    "etp 2": Sizes(world=2, etp=2),
    "cp 2, ep 2": Sizes(world=2, cp=2, ep=2),
    "cp 2 tp 2 sp, ep 2 etp 2": Sizes(world=4, cp=2, tp=2, sequence_parallel=True, ep=2, etp=2),
    "tp 2 sp dp 2, ep 4": Sizes(world=4, tp=2, sequence_parallel=True, ep=4),
    "dp 4, ep 2": Sizes(world=4, ep=2),
}
on_every_layout = pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS)
either_batch = pytest.mark.parametrize("is_packed", [False, True], ids=["rows", "packed"])


def config_of(moe: MoEConfig, activation: Activation = "gelu") -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=H,
        num_attention_heads=2,
        activation=activation,
        add_bias_linear=False,
        init_std=0.5,
        moe=moe,
    )


@dataclass
class Problem:
    """A batch and weights, and what one device makes of them."""

    hidden: Tensor
    # [B * S, H]
    out_grad: Tensor
    targets_BS: Tensor
    segments_BS: Tensor
    weights: dict[str, Tensor]
    output: Tensor
    num_accepted: int
    num_chosen: int


@lru_cache(maxsize=8)
def problem(variant: str, is_packed: bool) -> Problem:
    moe, activation = VARIANTS[variant]
    generator = torch.Generator().manual_seed(len(variant))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    width = (2,) if activation == "swiglu" else ()
    weights = {
        "router.weight": random(E, H),
        "experts.up": random(E, *width, FFN, H),
        "experts.down": random(E, H, FFN),
    }
    if moe.shared_expert_intermediate_size:
        weights |= {"shared.up.weight": random(*width, SHARED, H), "shared.down.weight": random(H, SHARED)}
    if moe.shared_expert_gate:
        weights["shared.gate"] = random(1, H)
    hidden = random(B * S, H)
    # The idle expert dislikes a feature that all tokens have.
    hidden[:, 0] = 2.0
    weights["router.weight"][:, 0] = 0.0
    weights["router.weight"][IDLE, 0] = -50.0
    targets_BS = torch.rand(B, S, generator=generator, dtype=torch.float64)
    targets_BS[1] = 0.0
    made = Problem(
        hidden=hidden.requires_grad_(),
        out_grad=random(B * S, H),
        targets_BS=targets_BS,
        segments_BS=PACKED if is_packed else ROWS,
        weights={name: weight.requires_grad_() for name, weight in weights.items()},
        output=torch.zeros(B * S, H, dtype=torch.float64),
        num_accepted=0,
        num_chosen=0,
    )
    run_plainly(made, moe, activation)
    return made


def run_plainly(made: Problem, moe: MoEConfig, activation: Activation) -> None:
    """The output by loops; the gradients of output and auxiliary losses are on the leaves."""
    w, router = made.weights, moe.router
    numbers = [(place // S, number) for place, number in enumerate(made.segments_BS.flatten().tolist())]
    real = [place for place, (_, number) in enumerate(numbers) if number >= 0]
    names = list(dict.fromkeys(numbers[place] for place in real))
    segments = [names.index(numbers[place]) if place in real else -1 for place in range(B * S)]
    logits = made.hidden @ w["router.weight"].T
    scores = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
    chosen = logits.detach().topk(router.top_k, dim=1).indices
    weights = scores.gather(1, chosen)
    if router.norm_topk_prob:
        weights = weights / weights.sum(1, keepdim=True)
    chosen = torch.where((torch.tensor(segments) >= 0)[:, None], chosen, -1)
    experts_of = chosen.tolist()
    if moe.capacity is not None:
        factor, drop_policy = str(moe.capacity.factor), moe.capacity.drop_policy
        # The places of a row are in the order of positions.
        experts_of = drop_by_hand(
            chosen, weights.detach(), segments, list(range(B * S)), factor, router.top_k, drop_policy
        )
    made.num_chosen = int((chosen >= 0).sum())
    made.num_accepted = sum(each >= 0 for row in experts_of for each in row)
    objective = torch.zeros((), dtype=torch.float64)
    for place in real:
        x, out = made.hidden[place], torch.zeros(H, dtype=torch.float64)
        for k, expert in enumerate(experts_of[place]):
            if expert >= 0:
                out = out + weights[place, k] * mlp(x, w["experts.up"][expert], w["experts.down"][expert], activation)
        if "shared.up.weight" in w:
            shared = mlp(x, w["shared.up.weight"], w["shared.down.weight"], activation)
            out = out + (shared * torch.sigmoid(w["shared.gate"] @ x) if "shared.gate" in w else shared)
        made.output[place] = out.detach()
        objective = objective + (out * made.out_grad[place]).sum()
        own = [other for other in real if segments[other] == segments[place]]
        weight = float(made.targets_BS.flatten()[own].sum()) / len(own)
        for loss in router.aux_losses:
            # Before the first step the shares of the global batch are taken as equal.
            busy = torch.ones(E, dtype=torch.float64)
            if loss.scope == "sequence":
                busy = torch.bincount(chosen[own].flatten(), minlength=E).double() * E / (len(own) * router.top_k)
            objective = objective + loss.coefficient * weight * (scores[place] * busy).sum()
        objective = objective + router.z_loss * weight * torch.log(torch.exp(logits[place]).sum()) ** 2
    leaves = [made.hidden, *w.values()]
    for leaf, grad in zip(leaves, torch.autograd.grad(objective, leaves), strict=True):
        leaf.grad = grad
    assert not (chosen == IDLE).any() and not w["experts.up"].grad[IDLE].any()  # type: ignore[index]


def mlp(x: Tensor, up: Tensor, down: Tensor, activation: Activation) -> Tensor:
    y = up @ x
    if activation == "swiglu":
        return down @ (F.silu(y[0]) * y[1])
    return down @ F.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")


def layer_of(made: Problem, moe: MoEConfig, activation: Activation, mesh: Mesh) -> MoELayer:
    axes = ExpertAxes.of(mesh)
    layer = MoELayer(
        config_of(moe, activation), moe, tp=mesh.tp, sp=mesh.sp, experts=axes, name="layers.0.moe"
    ).double()
    parameters = dict(layer.named_parameters())
    assert parameters.keys() == made.weights.keys()
    for name, parameter in parameters.items():
        fill(parameter, made.weights[name].detach())
    return layer


def call_of(made: Problem, moe: MoEConfig, mesh: Mesh) -> tuple[Tokens, RoutedTokens, Tensor]:
    """Arguments of a data-parallel rank's layer, and which of all tokens its stream [T/sp] is, -1 for padding."""
    rows = B // mesh.dp.size
    own = slice(mesh.dp.rank * rows, (mesh.dp.rank + 1) * rows)
    segments = made.segments_BS[own]
    tokens = stream_of(
        (rows, S),
        positions=PositionCache(config_of(moe)),
        mesh=mesh,
        draws=Draws(seed=1),
        device=torch.device("cpu"),
        documents=None if made.segments_BS is ROWS else documents_of(segments),
    )
    ids_T = tokens.shard(tokens.flat(torch.arange(B * S).view(B, S)[own], padding=-1))
    return tokens, tokens.routed(made.targets_BS[own], mesh.tp, 1), ids_T


def rows_of(full: Tensor, ids_T: Tensor, padding: float) -> Tensor:
    return torch.where((ids_T >= 0)[:, None], full.detach()[ids_T], padding)


def summed_gradient(parameter: Tensor, mesh: Mesh) -> Tensor:
    """As the engine sums it, of ranks whose losses are those of their own tokens."""
    shard, grad = shard_of(parameter), parameter.grad
    assert grad is not None
    if shard.partial is not None:
        grad = collectives.all_reduce(grad, shard.partial)
    return collectives.all_reduce(grad, mesh.axis("dp+cp") if shard.data is None else shard.data)


def known_rows(layer: MoELayer) -> list[int | None]:
    """How many rows the host knows of in each call to come; asserts that there are as many."""
    known, dispatch = list[int | None](), layer.dispatcher.dispatch

    def recording(hidden_TH: Tensor, expert_ids_TK: Tensor, *given: Any) -> DispatchWork:
        known.append(given[2])
        assert known[-1] in (None, int((expert_ids_TK >= 0).sum()))
        return dispatch(hidden_TH, expert_ids_TK, *given)

    layer.dispatcher.dispatch = recording  # type: ignore[method-assign]
    return known


@either_batch
@pytest.mark.parametrize(("layout", "is_whole"), [("one device", True), ("dp 4, ep 2", True), ("tp 2", False)])
def test_experts_that_choose_make_a_known_number_of_rows_of_whole_sequences(
    layout: str, is_whole: bool, is_packed: bool
) -> None:
    sizes, moe = (
        LAYOUTS[layout],
        replace(TOP_2, router=RouterConfig(num_experts=E, routing_type="expert_choice", norm_topk_prob=False)),
    )
    made = problem("top 2, shared with a gate", is_packed)

    def on_rank(world: Any) -> None:
        mesh = Mesh.build(sizes, world.rank(), new_group)
        layer = layer_of(made, moe, "swiglu", mesh)
        _, routed, ids_T = call_of(made, moe, mesh)
        known = known_rows(layer)
        layer(rows_of(made.hidden, ids_T, 5.0), routed)
        assert [each is not None for each in known] == [is_whole]

    run_on_threads(sizes.world, on_rank)


@on_every_layout
@either_batch
@pytest.mark.parametrize("variant", VARIANTS)
def test_output_and_every_gradient_equal_plain_loops(sizes: Sizes, is_packed: bool, variant: str) -> None:
    moe, activation = VARIANTS[variant]
    made = problem(variant, is_packed)
    assert (made.num_accepted < made.num_chosen) == (moe.capacity is not None)

    def on_rank(world: Any) -> None:
        mesh = Mesh.build(sizes, world.rank(), new_group)
        layer = layer_of(made, moe, activation, mesh)
        _, routed, ids_T = call_of(made, moe, mesh)
        # What padding holds is anything.
        hidden = rows_of(made.hidden, ids_T, 5.0).requires_grad_()
        known = known_rows(layer)
        output, auxiliary = layer(hidden, routed)
        assert (known == [None]) == (moe.capacity is not None)
        torch.autograd.backward([output, auxiliary], [rows_of(made.out_grad, ids_T, 0.0), torch.ones_like(auxiliary)])
        is_real = ids_T >= 0
        torch.testing.assert_close(output[is_real], made.output[ids_T[is_real]], rtol=0, atol=TOLERANCE)
        assert hidden.grad is not None and made.hidden.grad is not None
        torch.testing.assert_close(hidden.grad, rows_of(made.hidden.grad, ids_T, 0.0), rtol=0, atol=TOLERANCE)
        for name, parameter in layer.named_parameters():
            full, shard = made.weights[name].grad, shard_of(parameter)
            assert full is not None and full.abs().max() > BITE
            grad = summed_gradient(parameter, mesh)
            torch.testing.assert_close(shard.valid(grad), part_of(full, shard), rtol=0, atol=TOLERANCE)
        report = end_step([layer.router], cut=mesh.tp, data=mesh.axis("dp+cp"))[0]
        assert int(report.counts_E.sum()) == made.num_chosen and int(report.accepted_E.sum()) == made.num_accepted
        assert int(report.counts_E[IDLE]) == 0

    run_on_threads(sizes.world, on_rank)


@either_batch
@pytest.mark.parametrize("layout", ["ep 2", "cp 2, ep 2", "tp 2 sp, ep 2"])
def test_rows_that_are_filled_up_give_what_rows_that_are_not_give(layout: str, is_packed: bool) -> None:
    sizes = LAYOUTS[layout]
    variant = "shared without a gate, capacity by position, padded"
    moe, activation = VARIANTS[variant]
    assert moe.capacity is not None
    bare = replace(moe, capacity=replace(moe.capacity, pad_to_capacity=False))
    made = problem(variant, is_packed)

    def on_rank(world: Any) -> bool:
        mesh = Mesh.build(sizes, world.rank(), new_group)
        outputs, capacities = [], []
        for each in (moe, bare):
            layer = layer_of(made, each, activation, mesh)
            dispatch = layer.dispatcher.dispatch

            def recording(*given: Any, dispatch: Any = dispatch) -> Any:
                capacities.append(given[3])
                return dispatch(*given)

            layer.dispatcher.dispatch = recording  # type: ignore[method-assign]
            _, routed, ids_T = call_of(made, each, mesh)
            outputs.append(layer(rows_of(made.hidden, ids_T, 5.0), routed)[0])
        torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=TOLERANCE)
        assert capacities[1] is None
        return capacities[0] is not None

    # Where data-parallel ranks with other documents share experts, what may come is not known in advance.
    assert run_on_threads(2, on_rank) == [not (is_packed and layout == "ep 2")] * 2


@pytest.mark.parametrize("layout", ["ep 2", "cp 2 tp 2 sp, ep 2 etp 2"])
def test_gathering_all_tokens_gives_what_sending_them_gives(layout: str) -> None:
    sizes, variant = LAYOUTS[layout], "top 2, shared with a gate"
    moe = replace(TOP_2, dispatcher="all_gather")
    for is_packed in (False, True):
        made = problem(variant, is_packed)

        def on_rank(world: Any, made: Problem = made, is_packed: bool = is_packed) -> None:
            mesh = Mesh.build(sizes, world.rank(), new_group)
            layer = layer_of(made, moe, "swiglu", mesh)
            _, routed, ids_T = call_of(made, moe, mesh)
            hidden = rows_of(made.hidden, ids_T, 5.0)
            if is_packed and mesh.dp.size > 1:
                with pytest.raises(ValueError, match=r"'all_gather' needs as many tokens on each of the 2 ranks"):
                    layer(hidden, routed)
                return
            output, is_real = layer(hidden, routed)[0], ids_T >= 0
            torch.testing.assert_close(output[is_real], made.output[ids_T[is_real]], rtol=0, atol=TOLERANCE)

        run_on_threads(sizes.world, on_rank)


@pytest.mark.parametrize("parts", [("moe",), ("moe", "norm"), ("norm",)])
def test_a_layer_whose_experts_are_recomputed_gives_the_same_and_is_recorded_once(parts: Any) -> None:
    moe = replace(TOP_2, capacity=ExpertCapacity(factor=0.75), router=replace(TOP_2.router, jitter=0.2))
    config, mesh, made = config_of(moe, "swiglu"), Mesh.single(), problem("top 2, shared with a gate", False)
    results = []
    for recomputed in (RecomputeConfig(), RecomputeConfig(granularity="selective", parts=parts)):
        layer = ExpertLayer(config, moe, tp=mesh.tp, sp=mesh.sp, experts=ExpertAxes.of(mesh), name="layers.0").double()
        initialise(layer, seed=3)
        recompute.set_recomputed(layer, recomputed)
        calls: list[int] = []
        layer.moe.router.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        for _ in range(2):
            tokens, routed, _ = call_of(made, moe, mesh)
            output, auxiliary = layer(made.hidden.detach(), tokens, replace(routed, call=len(calls)))
            ((output * made.out_grad).sum() + auxiliary).backward()
        # Twice in each of two steps, where it is recomputed.
        assert len(calls) == (4 if "moe" in recomputed.parts else 2)
        report = end_step([layer.moe.router], cut=mesh.tp, data=mesh.dp)[0]
        assert int(report.counts_E.sum()) == 2 * B * S * moe.router.top_k
        assert 0 < float(report.dropped_share) < 1
        grads = [parameter.grad for parameter in layer.parameters()]
        results.append([output, auxiliary, report.counts_E, report.accepted_E, *grads])
    for one, other in zip(*results, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


def test_evaluation_has_no_auxiliary_losses_and_records_nothing() -> None:
    made, mesh = problem("top 1, capacity", False), Mesh.single()
    layer = layer_of(made, TOP_1, "gelu", mesh).eval()
    _, routed, ids_T = call_of(made, TOP_1, mesh)
    output, auxiliary = layer(rows_of(made.hidden, ids_T, 0.0), routed)
    torch.testing.assert_close(output, made.output[ids_T], rtol=0, atol=TOLERANCE)
    records = layer.router.records
    assert float(auxiliary) == 0.0 and not records.counts and not records.sums and not records.accepted
