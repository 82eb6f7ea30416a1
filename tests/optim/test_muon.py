"""Muon on weights that axes cut, beside Muon on whole ones, and beside torch's."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.optim import muon
from lightning_megatron.optim.muon import Muon, muon_groups
from lightning_megatron.optim.owners import spread
from lightning_megatron.sharding import Fused, Initial, shard_of, shard_parameter
from tests.harness.threads import new_group, run_on_threads
from tests.reference.muon import orthogonalised

NUM_STEPS, RATE, DECAY, MOMENTUM = 3, 0.1, 0.05, 0.9
HEADS = Fused(shape=(2, 4, 3), dim=1, sizes=(2, 1, 1))
# Shape, dim that is cut, matrices.
WEIGHTS: dict[str, tuple[tuple[int, ...], int | None, Fused | None]] = {
    "columns": ((8, 6), 0, None),
    "rows": ((6, 8), 1, None),
    "a dim that two ranks do not divide": ((7, 6), 0, None),
    "replicated": ((6, 5), None, None),
    "gate and up": ((2, 8, 6), 1, Fused(shape=(2, 8), dim=0, sizes=(1, 1))),
    "queries, keys, values": ((24, 6), 0, HEADS),
    "another": ((10, 6), 0, None),
    "all of it on one rank": ((1, 6), 0, None),
}


def drawn(step: int, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    return torch.randn(WEIGHTS[name][0], dtype=torch.float64, generator=generator)


def parts_of(name: str, weight: Tensor, by_head: bool) -> list[Tensor]:
    if name == "gate and up":
        return [weight[0], weight[1]]
    if name == "queries, keys, values":
        groups = weight.view(2, 4, 3, 6)
        kinds = [groups[:, :2], groups[:, 2], groups[:, 3]]
        return [groups[g, h] for g in range(2) for h in range(4)] if by_head else kinds
    return [weight]


def whole_steps(name: str, by_head: bool = False) -> Tensor:
    """The weight after steps on one device, by singular values."""
    weight, velocity = drawn(0, name), torch.zeros(WEIGHTS[name][0], dtype=torch.float64)
    for step in range(1, NUM_STEPS + 1):
        gradient = drawn(step, name)
        velocity = MOMENTUM * velocity + (1 - MOMENTUM) * gradient
        update = (1 - MOMENTUM) * gradient + MOMENTUM * velocity
        weight *= 1 - RATE * DECAY
        for own, source in zip(parts_of(name, weight, by_head), parts_of(name, update, by_head), strict=True):
            matrix = source.reshape(-1, source.shape[-1])
            factor = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
            own -= RATE * factor * orthogonalised(matrix).view(own.shape)
    return weight


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("fused_heads", ["projections", "heads"])
def test_weights_that_are_cut_step_as_whole_ones(num_ranks: int, fused_heads: Any) -> None:
    expected = {name: whole_steps(name, fused_heads == "heads") for name in WEIGHTS}

    def on_rank(world: Any) -> None:
        mesh = Mesh.build(Sizes(world=world.size(), tp=world.size()), world.rank(), new_group)
        weights: dict[str, Tensor] = {}
        for name, (shape, dim, fused) in WEIGHTS.items():
            axis = None if dim is None else mesh.tp
            weight = shard_parameter(shape, initial=Initial(), dim=dim, axis=axis, fused=fused)
            weight.data = torch.zeros(weight.shape, dtype=torch.float64)
            shard_of(weight).valid(weight.data).copy_(shard_of(weight).part_of(drawn(0, name)))
            weights[name] = weight
        optimizer = Muon(weights.values(), lr=RATE, weight_decay=DECAY, momentum=MOMENTUM, fused_heads=fused_heads)
        for step in range(1, NUM_STEPS + 1):
            for name, weight in weights.items():
                weight.grad = torch.zeros_like(weight)
                shard_of(weight).valid(weight.grad).copy_(shard_of(weight).part_of(drawn(step, name)))
            optimizer.step()
        for name, weight in weights.items():
            shard = shard_of(weight)
            # Singular values are small where a polynomial is steep, which makes 500 times of a rounding.
            assert_close(shard.valid(weight.detach()), shard.part_of(expected[name]), rtol=0, atol=1e-12)
            assert weight.detach().count_nonzero() == shard.valid(weight.detach()).count_nonzero()

    run_on_threads(num_ranks, on_rank)


def test_a_part_by_itself_steps_otherwise() -> None:
    part = torch.nn.Parameter(drawn(0, "columns")[:4])
    optimizer = Muon([part], lr=RATE, weight_decay=DECAY, momentum=MOMENTUM)
    for step in range(1, NUM_STEPS + 1):
        part.grad = drawn(step, "columns")[:4]
        optimizer.step()
    assert (part.detach() - whole_steps("columns")[:4]).abs().max() > 1e-2
    heads = whole_steps("queries, keys, values", by_head=True)
    assert (whole_steps("queries, keys, values") - heads).abs().max() > 1e-2


def test_weights_in_pieces_step_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "_PIECE_BYTES", 500)
    test_weights_that_are_cut_step_as_whole_ones(2, "projections")


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
def test_steps_of_plain_matrices_are_those_of_torch(adjust_lr_fn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch multiplies in bfloat16 always.
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    names = ("columns", "rows", "replicated")
    own, theirs = ([torch.nn.Parameter(drawn(0, name)) for name in names] for _ in range(2))
    settings: dict[str, Any] = {"lr": RATE, "weight_decay": DECAY, "momentum": MOMENTUM, "adjust_lr_fn": adjust_lr_fn}
    optimizers = Muon(own, **settings), torch.optim.Muon(theirs, **settings)
    for step in range(1, NUM_STEPS + 1):
        for name, one, other in zip(names, own, theirs, strict=True):
            one.grad, other.grad = drawn(step, name), drawn(step, name)
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(own, theirs, strict=True):
        assert_close(one, other, rtol=0, atol=1e-12)


def test_float32_matrices_are_orthogonalised_in_bfloat16_as_torch_does() -> None:
    matrix = drawn(1, "columns").float()
    own, exact, theirs = (torch.nn.Parameter(matrix.clone()) for _ in range(3))
    settings: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0}
    for weight in (own, exact, theirs):
        weight.grad = drawn(2, "columns").float()
    Muon([own], **settings).step()
    Muon([exact], **settings, ns_dtype="float32").step()
    torch.optim.Muon([theirs], **settings).step()
    # Roundings of bfloat16, 2^-8 each, of five steps.
    assert_close(own, theirs, rtol=0, atol=0.1)
    precise = matrix - orthogonalised(0.0975 * drawn(2, "columns")).float() * (8 / 6) ** 0.5
    assert_close(exact.detach(), precise, rtol=0, atol=1e-5)
    assert (own - exact).abs().max() > 1e-4


def test_the_rest_steps_as_under_adamw() -> None:
    vectors = [torch.nn.Parameter(torch.linspace(-1, 1, 7, dtype=torch.float64)) for _ in range(2)]
    own = Muon([{"params": vectors[:1], "use_muon": False}], lr=0.1, weight_decay=0.2, betas=(0.8, 0.9))
    theirs = torch.optim.AdamW(vectors[1:], lr=0.1, weight_decay=0.2, betas=(0.8, 0.9))
    for step in range(3):
        for vector in vectors:
            vector.grad = torch.full_like(vector, 0.5 - step)
        own.step()
        theirs.step()
    assert_close(vectors[0], vectors[1], rtol=0, atol=1e-15)


def test_groups_are_matrices_of_layers_other_weights_and_the_rest() -> None:
    shapes = {
        "embedding.weight": (8, 4),
        "layers.0.attention.qkv.weight": (12, 4),
        "layers.0.attention.qkv.bias": (12,),
        "layers.0.mlp.up.bias": (2, 4),
        "layers.0.attention_norm.weight": (4,),
        "layers.0.experts.up": (2, 8, 4),
        "layers.0.experts.up_bias": (2, 8),
        "layers.0.shared.up.weight": (8, 4),
        "layers.0.multihead_attn.out_proj.weight": (4, 4),
        "layers.0.relative_bias.weight": (8, 4),
        "head.weight": (8, 4),
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (8, 4),
        "model.shared.weight": (8, 4),
        "lm_head.weight": (8, 4),
        "score.weight": (2, 4),
        "layers.0.mixer.A_log": (8, 4),
    }
    named = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    groups = muon_groups(named.items(), weight_decay=0.1)
    names = {parameter: name for name, parameter in named.items()}
    assert [[names[one] for one in group["params"]] for group in groups] == [
        [
            "layers.0.attention.qkv.weight",
            "layers.0.experts.up",
            "layers.0.shared.up.weight",
            "layers.0.multihead_attn.out_proj.weight",
        ],
        [
            "embedding.weight",
            "layers.0.relative_bias.weight",
            "head.weight",
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            "model.shared.weight",
            "lm_head.weight",
            "score.weight",
            "layers.0.mixer.A_log",
        ],
        [
            "layers.0.attention.qkv.bias",
            "layers.0.mlp.up.bias",
            "layers.0.attention_norm.weight",
            "layers.0.experts.up_bias",
        ],
    ]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]
    own = muon_groups(named.items(), weight_decay=0.1, adamw=("*",))
    assert own[0]["params"] == []


def test_matrices_are_spread_by_their_flops() -> None:
    load: list[float] = []
    assert spread([8.0, 1.0, 1.0, 6.0, 2.0], 2, load) == [0, 0, 1, 1, 1]
    # What follows goes on with what each has.
    assert load == [9.0, 9.0] and spread([1.0, 3.0], 2, load) == [1, 0]
    assert spread([], 2, load) == [] and load == [12.0, 10.0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": -1.0}, "lr (-1.0) must be at least 0"),
        ({"momentum": 1.0}, "momentum (1.0) must be at least 0 and below 1"),
        ({"ns_dtype": "float16"}, "ns_dtype ('float16') must be one of bfloat16, float32"),
        ({"ns_steps": 0}, "ns_steps (0) must be at least 1"),
        ({"adjust_lr_fn": "no"}, "adjust_lr_fn ('no') must be one of original, match_rms_adamw"),
        ({"fused_heads": "no"}, "fused_heads ('no') must be one of projections, heads"),
    ],
)
def test_wrong_settings_are_errors(settings: Any, words: str) -> None:
    with pytest.raises(ValueError, match="must be") as error:
        Muon([torch.nn.Parameter(torch.zeros(2, 2))], **settings)
    assert words in str(error.value)


def test_a_vector_is_no_matrix() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\) is no matrix; give it to a group with use_muon False"):
        Muon([torch.nn.Parameter(torch.zeros(3))])


def test_a_group_that_comes_later_is_checked() -> None:
    optimizer = Muon([torch.nn.Parameter(torch.zeros(2, 2))])
    vector = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"momentum \(-3\) must be") as error:
        optimizer.add_param_group({"params": vector, "momentum": -3})
    assert "is no matrix" in str(error.value)
    optimizer.add_param_group({"params": vector, "use_muon": False})
    assert len(optimizer.param_groups) == 2


def test_heads_that_no_weight_has_are_told() -> None:
    # As in a model of transformers, whose projections are apart.
    apart = torch.nn.Linear(4, 4).weight
    with pytest.warns(UserWarning, match=r"fused_heads \('heads'\) does nothing here"):
        Muon([apart], fused_heads="heads")
    model = GPTModel(GPTConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=8, max_sequence_length=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Muon([apart])
        Muon(muon_groups(model.named_parameters(), weight_decay=0.1), fused_heads="heads")
