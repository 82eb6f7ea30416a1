"""Calls of rows as long share their positions and angles, whatever they run under; others get their own."""

import copy
from typing import Any

import pytest
import torch

from lightning_megatron.comm.rng import Draws
from lightning_megatron.context.documents import documents_of
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.transformer.config import Position, TransformerConfig
from lightning_megatron.transformer.position_cache import PositionCache
from lightning_megatron.transformer.tokens import Tokens, stream_of

CONFIG = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, position="rotary")
CP = Sizes(world=2, cp=2)


def stream(cache: PositionCache, length: int, mesh: Mesh | None = None, *, batch: int = 1, **options: object) -> Tokens:
    return stream_of(
        (batch, length),
        positions=cache,
        mesh=Mesh.single() if mesh is None else mesh,
        draws=Draws(seed=1),
        device=torch.device("cpu"),
        **options,  # type: ignore[arg-type]
    )


def test_calls_of_rows_as_long_share_positions_and_tables() -> None:
    cache = PositionCache(CONFIG)
    first, second = stream(cache, 8), stream(cache, 8, batch=3)
    assert first.positions_1N is second.positions_1N and first.layout is second.layout
    assert first.rotary_tables(torch.float32)[0] is second.rotary_tables(torch.float32)[0]
    assert first.masks is not second.masks and first.shared is not second.shared


def test_other_rows_ranks_and_orders_have_positions_of_their_own() -> None:
    cache = PositionCache(CONFIG)
    ranks = [Mesh.imagine(rank, CP) for rank in range(2)]
    found = [
        stream(cache, 8).positions_1N.tolist(),
        stream(cache, 12).positions_1N.tolist(),
        stream(cache, 8, ranks[0]).positions_1N.tolist(),
        stream(cache, 8, ranks[1]).positions_1N.tolist(),
        stream(cache, 8, ranks[1], is_causal=False).positions_1N.tolist(),
    ]
    assert found == [[[*range(8)]], [[*range(12)]], [[0, 1, 6, 7]], [[2, 3, 4, 5]], [[4, 5, 6, 7]]]
    cos = stream(cache, 8, ranks[0]).rotary_cos_1NR
    assert torch.equal(cos, stream(cache, 8).rotary_cos_1NR[:, [0, 1, 6, 7]])


def test_documents_are_not_kept() -> None:
    cache = PositionCache(CONFIG)
    torn, rows = torch.tensor([[0, 0, 0, 1, 1]]), torch.tensor([[0, 0, 0, 0, 0]])
    positions = [stream(cache, 5, documents=documents_of(segments)).positions_1N for segments in (torn, rows)]
    assert [one.tolist() for one in positions] == [[[0, 1, 2, 0, 1]], [[0, 1, 2, 3, 4]]]
    assert stream(cache, 5).positions_1N.tolist() == [[0, 1, 2, 3, 4]]


def test_what_is_kept_does_not_grow_with_the_number_of_lengths() -> None:
    cache = PositionCache(CONFIG)
    for length in range(1, 40):
        stream(cache, length)
    last = stream(cache, 39)
    assert last.positions_1N is stream(cache, 39).positions_1N
    assert len(cache._kept) == 4


@pytest.mark.parametrize("position", ["rotary", "learned"])
def test_a_model_trains_on_what_an_evaluation_made(position: Position) -> None:
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    config = GPTConfig(**sizes, max_sequence_length=8, position=position)
    losses, gradients = [], []
    for is_evaluated_first in (False, True):
        model, tokens = GPTModel(config, mesh=Mesh.single(), seed=1), torch.arange(8)[None]
        if is_evaluated_first:
            with torch.inference_mode():
                model.eval()(tokens)
        loss = model.train()(tokens, labels=tokens)
        loss.backward()
        losses.append(loss.item())
        gradients.append(model.get_parameter("layers.0.attention.qkv.weight").grad)
    assert losses[0] == losses[1]
    assert gradients[0] is not None and torch.equal(gradients[0], gradients[1])


def test_a_copy_of_a_cache_is_empty() -> None:
    cache = PositionCache(CONFIG)
    kept = stream(cache, 8).positions_1N
    copied = stream(copy.deepcopy(cache), 8).positions_1N
    assert copied is not kept and torch.equal(copied, kept)
