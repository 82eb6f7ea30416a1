"""A model with experts that was made of a dense one computes what that did, at first."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.models.upcycle import Upcycling
from lightning_megatron.moe.capacity import ExpertCapacity
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from lightning_megatron.moe.router import Routing
from lightning_megatron.sharding import Box, shard_of

DENSE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "vocab_size": 31,
    "ffn_hidden_size": 24,
    "position": "rotary",
    "add_bias_linear": False,
    "init_std": 0.3,
}


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def way(
    width: int = 0, activation: Any = "swiglu", layers: tuple[int, ...] = (), *, has_bias: bool = False, **router: Any
) -> Upcycling:
    moe = MoEConfig(router=RouterConfig(**router), ffn_hidden_size=width, layers=layers)
    return Upcycling(dense=GPTConfig(**{**DENSE, "add_bias_linear": has_bias}, activation=activation), moe=moe)


def filled(found: Upcycling, dense: GPTModel, mesh: Mesh) -> tuple[GPTModel, int]:
    """This rank's part of the model with experts, and how many elements of the dense one were read for it."""
    weights, model = dict(dense.named_parameters()), GPTModel(found.config, mesh=mesh, seed=9)
    num_read = 0

    def read(name: str, box: Box, out: Tensor) -> None:
        nonlocal num_read
        num_read += math.prod(box.sizes)
        slices = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
        out.copy_(weights[name].detach()[slices])

    for name, parameter in model.named_parameters():
        shard = shard_of(parameter)
        found.read(name, shard.box, shard.valid(parameter.detach()), read)
    return model, num_read


@torch.no_grad()
def difference(found: Upcycling) -> tuple[float, list[Routing]]:
    """Between the logits of the two models, and where tokens went."""
    dense = GPTModel(found.dense, mesh=Mesh.single(), seed=3).eval()
    model, _ = filled(found, dense, Mesh.single())
    routings: list[Routing] = []
    for router in model.routers.values():
        router.register_forward_hook(lambda module, inputs, output: routings.append(output))
    tokens = torch.randint(31, (2, 40), generator=torch.Generator().manual_seed(1))
    wanted = dense(tokens)
    assert wanted.std() > 0.1
    return float((model.eval()(tokens) - wanted).abs().max()), routings


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize(("num_experts", "top_k", "width"), [(8, 2, 0), (8, 4, 12), (9, 6, 8)])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_biases_of_the_dense_model_are_shared_out(
    activation: str, num_experts: int, top_k: int, width: int, norm_topk_prob: bool
) -> None:
    found = way(
        width,
        activation,
        has_bias=True,
        num_experts=num_experts,
        top_k=top_k,
        norm_topk_prob=norm_topk_prob,
        topk_scaling_factor=1.7,
    )
    dense = GPTModel(found.dense, mesh=Mesh.single(), seed=3).eval()
    with torch.no_grad():
        # Born as zeros.
        for name, parameter in dense.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
        model, _ = filled(found, dense, Mesh.single())
        tokens = torch.randint(31, (2, 40), generator=torch.Generator().manual_seed(1))
        wanted = dense(tokens)
        assert float((model.eval()(tokens) - wanted).abs().max()) < (1e-12 if norm_topk_prob else 1e-11)
        for name, parameter in dense.named_parameters():
            if ".mlp." in name and name.endswith("bias"):
                parameter.zero_()
        assert float((dense(tokens) - wanted).abs().max()) > 0.1


@pytest.mark.matrix
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize(("num_experts", "top_k", "width"), [(8, 2, 0), (8, 2, 12), (8, 4, 12), (8, 4, 6), (9, 6, 8)])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_the_output_is_the_dense_models(
    activation: str, num_experts: int, top_k: int, width: int, score_function: str, norm_topk_prob: bool
) -> None:
    found = way(
        width,
        activation,
        num_experts=num_experts,
        top_k=top_k,
        score_function=score_function,
        norm_topk_prob=norm_topk_prob,
        topk_scaling_factor=1.7,
    )
    most, routings = difference(found)
    assert most < 1e-12
    # Tokens go different ways, in each of two layers.
    assert len(routings) == 2
    for routing in routings:
        assert len({tuple(sorted(row)) for row in routing.expert_ids_TK.tolist()}) > 1


def test_one_expert_of_a_token_is_enough() -> None:
    assert difference(way(num_experts=8, top_k=1, norm_topk_prob=False))[0] < 1e-12


def test_layers_that_stay_dense_are_as_they_were() -> None:
    found = way(12, layers=(1,), num_experts=4, top_k=2)
    most, routings = difference(found)
    assert most < 1e-12 and len(routings) == 1


def test_groups_of_experts_may_limit_the_choice() -> None:
    grouped = {"num_experts": 8, "top_k": 4, "num_groups": 4, "group_topk": 2}
    assert difference(way(12, **grouped))[0] < 1e-12


def test_a_wrong_scale_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = way(12, num_experts=8, top_k=4).scale
    monkeypatch.setattr(Upcycling, "scale", scale * (1 + 1e-9))
    assert difference(way(12, num_experts=8, top_k=4))[0] > 1e-12


@pytest.mark.parametrize("sizes", [Sizes(world=2, ep=2), Sizes(world=4, ep=2, etp=2), Sizes(world=4, ep=4)])
def test_each_rank_takes_its_part_and_reads_no_more(sizes: Sizes) -> None:
    found = way(6, num_experts=8, top_k=4)
    dense = GPTModel(found.dense, mesh=Mesh.single(), seed=3)
    unsplit = dict(filled(found, dense, Mesh.single())[0].named_parameters())
    held = sum(parameter.numel() for name, parameter in dense.named_parameters())
    for rank in range(sizes.world):
        model, num_read = filled(found, dense, Mesh.imagine(rank, sizes))
        for name, parameter in model.named_parameters():
            box = shard_of(parameter).box
            slices = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
            assert torch.equal(parameter, unsplit[name][slices]), name
        assert num_read <= held


def test_router_rows_are_one_for_each_whole_mlp() -> None:
    found = way(6, num_experts=8, top_k=4)
    dense = GPTModel(found.dense, mesh=Mesh.single(), seed=3)
    rows = filled(found, dense, Mesh.single())[0].get_parameter("layers.1.moe.router.weight")
    assert torch.equal(rows[:4], rows[:1].expand(4, -1)) and torch.equal(rows[4:], rows[4:5].expand(4, -1))
    assert not torch.equal(rows[0], rows[4])
    assert 0.15 < rows.std() < 0.6
    other = filled(replace(found, seed=1), dense, Mesh.single())[0].get_parameter("layers.1.moe.router.weight")
    assert not torch.equal(rows, other)


ROUTER = RouterConfig(num_experts=8, top_k=2)


@pytest.mark.parametrize(
    ("dense", "moe", "words"),
    [
        ({"moe": MoEConfig(router=ROUTER)}, {}, "has 8 experts already"),
        (
            {},
            {"ffn_hidden_size": 7},
            "ffn_hidden_size of an expert (7) must divide the dense (24); it may be 24, 12, 8",
        ),
        ({}, {"ffn_hidden_size": 48}, "ffn_hidden_size of an expert (48) must divide the dense (24)"),
        ({}, {"ffn_hidden_size": 8}, "num_experts (8) must be a multiple of the parts of a dense MLP (3 = 24 / 8)"),
        ({}, {"ffn_hidden_size": 6}, "top_k (2) must be a multiple of the parts of a dense MLP (4 = 24 / 6)"),
        ({}, {"shared_expert_intermediate_size": 6}, "shared_expert_intermediate_size (6) must be 0"),
        ({}, {"capacity": ExpertCapacity(factor=1.0)}, "capacity must be None"),
        ({}, {"router": replace(ROUTER, routing_type="sinkhorn")}, "routing_type ('sinkhorn') must be 'top_k'"),
        ({}, {"layers": (2,)}, "moe layers 2 must be from 0"),
        (
            {},
            {"router": RouterConfig(num_experts=6, top_k=2, num_groups=2), "ffn_hidden_size": 12},
            "the experts of a group (3) must be a multiple of the parts of a dense MLP (2 = 24 / 12)",
        ),
    ],
)
def test_what_cannot_compute_the_same_is_refused(dense: dict[str, Any], moe: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as raised:
        Upcycling(dense=GPTConfig(**{**DENSE, **dense}), moe=MoEConfig(**{"router": ROUTER, **moe}))
    assert words in str(raised.value)


def test_all_that_is_wrong_is_reported_at_once() -> None:
    moe = MoEConfig(
        router=replace(ROUTER, routing_type="round_robin"), ffn_hidden_size=3, shared_expert_intermediate_size=1
    )
    with pytest.raises(ValueError) as raised:
        Upcycling(dense=GPTConfig(**DENSE), moe=moe)
    assert [line.split()[1] for line in str(raised.value).splitlines()] == [
        "shared_expert_intermediate_size",
        "routing_type",
        "top_k",
    ]
