"""Metadata of tokens for routers agree with the caller's batch on every layout."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lightning_megatron.comm.collectives import shard_slice
from lightning_megatron.comm.rng import Draws
from lightning_megatron.context.documents import documents_of
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.moe.sequence_groups import RoutedTokens
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.position_cache import PositionCache
from lightning_megatron.transformer.tokens import Tokens, stream_of

CONFIG = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
B, S = 3, 7
LAYOUTS = {
    "one device": Sizes(),
    "tp 2": Sizes(world=2, tp=2),
    "tp 4 sp": Sizes(world=4, tp=4, sequence_parallel=True),
    "cp 2": Sizes(world=2, cp=2),
    "cp 4, heads exchanged": Sizes(world=4, cp=4, cp_ulysses=4),
    "cp 2 tp 2 sp": Sizes(world=4, cp=2, tp=2, sequence_parallel=True),
    "cp 3, heads exchanged, tp 2": Sizes(world=6, cp=3, cp_ulysses=3, tp=2),
}
on_every_layout = pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS)
# Documents of one token and more, a gap before one, padding after another, and a row of padding alone.
PACKED = torch.tensor([[0, 0, 0, 1, 2, 2, 2], [0, -1, 1, 1, 1, -1, -1], [-1] * 7])
# Documents that are all of the batch.
FULL = torch.tensor([[0, 0, 0, 1, 2, 2, 2], [0, 0, 1, 1, 1, 1, 1], [0] * 7])
ROWS = torch.zeros(B, S, dtype=torch.int64)
every_batch = pytest.mark.parametrize("segments", [ROWS, PACKED, FULL], ids=["rows", "packed", "full"])
# How much targets count; those of a whole document (1 of row 0) and of a whole row (2) not at all.
WEIGHTS = torch.rand(B, S, generator=torch.Generator().manual_seed(1)).masked_fill(torch.arange(S) % 3 == 0, 0.0)
WEIGHTS[0, 3] = 0.0
WEIGHTS[2] = 0.0


def stream(mesh: Mesh, segments: Tensor) -> Tokens:
    documents = None if segments is ROWS else documents_of(segments)
    draws, cpu = Draws(seed=1), torch.device("cpu")
    return stream_of((B, S), positions=PositionCache(CONFIG), mesh=mesh, draws=draws, device=cpu, documents=documents)


def routed_on(mesh: Mesh, segments: Tensor, call: int = 0) -> tuple[RoutedTokens, Tensor]:
    """Metadata on one rank, and which of the caller's tokens each is, -1 for padding."""
    tokens = stream(mesh, segments)
    ids_T = tokens.flat(torch.arange(B * S).view(B, S), padding=-1)
    missing = -len(ids_T) % mesh.tp.size
    ids_T = torch.cat([ids_T, ids_T.new_full((missing,), -1)])
    return tokens.routed(WEIGHTS, mesh.tp, call), shard_slice(ids_T, mesh.tp)


@on_every_layout
@every_batch
def test_each_token_has_its_sequence_its_position_and_its_share_of_the_weights(sizes: Sizes, segments: Tensor) -> None:
    flat = [(row, number) for row in range(B) for number in segments[row].tolist()]
    sequences = list(dict.fromkeys(each for each in flat if each[1] >= 0))
    keys = stream(Mesh.single(), segments).keys_BX
    ids_of_keys = stream(Mesh.single(), segments).flat(torch.arange(B * S).view(B, S)).tolist()
    key_of = dict(zip(ids_of_keys, keys.flatten().tolist(), strict=True))
    seen = []
    for rank in range(sizes.world):
        routed, ids_T = routed_on(Mesh.imagine(rank, sizes), segments, call=5)
        assert routed.call == 5 and routed.is_packed == (segments is not ROWS)
        assert routed.lengths == tuple(flat.count(each) for each in sequences)
        assert [axis.size for axis in routed.axes] == [sizes.tp, sizes.cp]
        assert torch.equal(routed.is_real_T, ids_T >= 0) and routed.num_real == int((ids_T >= 0).sum())
        for t, place in enumerate(ids_T.tolist()):
            if place < 0:
                continue
            own = [other for other, each in enumerate(flat) if each == flat[place]]
            assert sequences[int(routed.segments_T[t])] == flat[place]
            assert int(routed.positions_T[t]) == own.index(place)
            assert int(routed.keys_T[t]) == key_of[place]
            share = sum(float(WEIGHTS.flatten()[other]) for other in own) / len(own)
            assert_close(float(routed.weights_T[t]), share, rtol=0, atol=1e-7)
            seen.append(place)
    assert sorted(seen) == [place for place, each in enumerate(flat) if each[1] >= 0]


@on_every_layout
@every_batch
def test_the_weights_of_all_tokens_sum_up_to_those_of_the_targets(sizes: Sizes, segments: Tensor) -> None:
    total = 0.0
    for rank in range(sizes.world):
        routed, _ = routed_on(Mesh.imagine(rank, sizes), segments)
        total += float(torch.where(routed.is_real_T, routed.weights_T, 0.0).sum())
    assert_close(total, float(WEIGHTS[segments >= 0].double().sum()), rtol=0, atol=1e-12)
    assert bool((WEIGHTS[PACKED < 0] > 0).any())


@on_every_layout
def test_of_a_batch_without_documents_no_token_is_real(sizes: Sizes) -> None:
    for rank in range(sizes.world):
        routed, _ = routed_on(Mesh.imagine(rank, sizes), torch.full((B, S), -1))
        assert routed.lengths == () and not routed.is_real_T.any() and routed.num_real == 0
        assert routed.sequence_groups.num_groups == 1 and not routed.sequence_groups.is_real_T.any()
        parts = (routed.segments_T, routed.positions_T, routed.keys_T, routed.weights_T, routed.sequence_groups.ids_T)
        assert {len(part) for part in parts} == {len(routed.is_real_T)}
