"""Heads are cut so that ranks together hold each query head once, and each with the keys and values of its group."""

from typing import Any

import pytest
import torch

from lightning_megatron.comm.rng import Draws
from lightning_megatron.context.context_layout import MaskSpec
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.transformer import rotary
from lightning_megatron.transformer.attention import SelfAttention, _SplitHeads, local_heads
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.init import initialise
from lightning_megatron.transformer.position_cache import PositionCache
from lightning_megatron.transformer.tokens import stream_of

SIZE = 4


def config_of(groups: int, **changes: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=8, num_query_groups=groups, head_dim=SIZE, **changes
    )


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_each_query_head_is_on_one_rank_in_order_with_its_group(groups: int, tp: int) -> None:
    config = config_of(groups)
    rows = groups * (config.heads_per_group + 2) * SIZE
    # The value of a feature is its row in the fused weight.
    fused = torch.arange(rows, dtype=torch.float64).view(1, rows)
    empty = torch.zeros(1, 1, 0)
    heads = []
    for rank in range(tp):
        axis = Mesh.imagine(rank, Sizes(world=tp, tp=tp)).tp
        own = fused.chunk(tp, dim=1)[rank] if groups % tp == 0 else fused
        queries, keys, values = _SplitHeads.apply(own, empty, empty, 1, 1, local_heads(config, axis))
        assert queries.shape == (1, 8 // tp, 1, SIZE)
        for i in range(queries.shape[1]):
            group = i * keys.shape[1] // queries.shape[1]
            heads.append([int(part[0, j, 0, 0]) for part, j in ((queries, i), (keys, group), (values, group))])
    per_group = config.heads_per_group
    expected = []
    for head in range(8):
        first = head // per_group * (per_group + 2)
        expected.append([(first + i) * SIZE for i in (head % per_group, per_group, per_group + 1)])
    assert heads == expected


@pytest.mark.matrix
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("pairs", [0, 1, 2])
def test_the_gradient_of_the_split_is_that_of_autograd(groups: int, tp: int, pairs: int) -> None:
    config = config_of(groups)
    heads = local_heads(config, Mesh.imagine(tp - 1, Sizes(world=tp, tp=tp)).tp)
    cos, sin = rotary.angles(torch.arange(3)[None], rotary.frequencies(pairs, 100.0, None))
    # Two tokens of padding after 2 * 3 real ones.
    fused = torch.randn(8, heads.groups * (heads.queries + 2) * SIZE, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: _SplitHeads.apply(x, cos, sin, 2, 3, heads), (fused,))


@pytest.mark.parametrize(("is_causal", "window"), [(True, 0), (False, 0), (True, 1), (True, 4)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_token_sees_the_tokens_before_it_all_or_those_of_a_window(
    is_causal: bool, window: int, dropout: float
) -> None:
    mesh = Mesh.single()
    config = config_of(2, attention_dropout=dropout, init_std=1.0)
    attention = SelfAttention(
        config, tp=mesh.tp, sp=mesh.sp, name="attention", mask_spec=MaskSpec(is_causal=is_causal, window=window)
    ).double()
    initialise(attention, seed=1)
    tokens = stream_of(
        (2, 5), positions=PositionCache(config_of(2)), mesh=mesh, draws=Draws(seed=1), device=torch.device("cpu")
    )
    hidden = torch.randn(10, 32, dtype=torch.float64)
    changed = hidden.clone()
    changed[3 if window != 4 else 0] += 1.0  # the fourth or first token of the first sequence
    moved = (attention(changed, tokens) - attention(hidden, tokens)).abs().amax(dim=1) > 1e-9
    seen_by = {0: [False] * 3 + [True] * 2, 1: [False] * 3 + [True, False], 4: [True] * 4 + [False]}
    assert moved[:5].tolist() == (seen_by[window] if is_causal else [True] * 5)
    assert not moved[5:].any()


def test_weights_materialised_for_dropout_equal_those_that_are_not() -> None:
    mesh = Mesh.single()
    tokens = stream_of(
        (2, 6), positions=PositionCache(config_of(2)), mesh=mesh, draws=Draws(seed=1), device=torch.device("cpu")
    )
    hidden = torch.randn(12, 32, dtype=torch.float64)
    outputs = []
    for probability in (0.0, 1e-18):  # the second takes the other path, and drops nothing
        config = config_of(2, attention_dropout=probability, init_std=1.0)
        attention = SelfAttention(config, tp=mesh.tp, sp=mesh.sp, name="attention").double()
        outputs.append(initialise(attention, seed=1)(hidden, tokens))
    assert (outputs[0] - outputs[1]).abs().max() < 1e-12 * outputs[0].abs().max()
