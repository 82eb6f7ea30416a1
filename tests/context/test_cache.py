"""Attention to cached tokens equals dense attention to all tokens so far, of rows of different lengths."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.context.attention_step import RelativePositionBias
from lightning_megatron.context.cache import KeyValueCache
from lightning_megatron.context.context_layout import MaskSpec
from lightning_megatron.mesh import Mesh, Sizes
from tests.harness.threads import new_group, run_on_threads

HEADS, GROUPS, SIZE = 6, 2, 4
# For each call the tokens of each of two rows.
CALLS = ((5, 2), (1, 1), (3, 1), (1, 0), (2, 2))
TOTALS = tuple(sum(call[row] for call in CALLS) for row in (0, 1))
VIEWS = {
    "causal": MaskSpec(is_causal=True),
    "window": MaskSpec(is_causal=True, window=3),
    "both ways": MaskSpec(is_causal=False),
}


@dataclass
class Row:
    queries: Tensor
    keys: Tensor
    values: Tensor


def rows() -> list[Row]:
    generator = torch.Generator().manual_seed(2)

    def random(heads: int, length: int) -> Tensor:
        return 2.0 * torch.randn(heads, length, SIZE, generator=generator, dtype=torch.float64)

    return [Row(random(HEADS, n), random(GROUPS, n), random(GROUPS, n)) for n in TOTALS]


TABLE = torch.randn(4, HEADS, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def bucket(distance: Tensor) -> Tensor:
    return distance.abs().clamp(max=3)


def dense(row: Row, query: int, num_keys: int, mask_spec: MaskSpec, is_biased: bool) -> Tensor:
    """Output [A, D] of one query that sees the first keys, as far as the mask_spec lets it."""
    keys, values = (x[:, :num_keys].repeat_interleave(HEADS // GROUPS, dim=0) for x in (row.keys, row.values))
    scores = torch.einsum("ad,akd->ak", row.queries[:, query], keys) / SIZE**0.5
    distance = torch.arange(num_keys) - query
    if is_biased:
        scores = scores + TABLE[bucket(distance)].T
    if mask_spec.is_causal:
        scores = scores.masked_fill(distance > 0, -torch.inf)
    if mask_spec.window:
        scores = scores.masked_fill(-distance >= mask_spec.window, -torch.inf)
    return torch.einsum("ak,akd->ad", scores.softmax(dim=-1), values)


def padded(parts: list[Tensor]) -> Tensor:
    """Parts [A, N, D], large numbers after their ends, which nobody may see: [B, A, most, D]."""
    most = max(part.shape[1] for part in parts)
    return torch.stack([torch.nn.functional.pad(part, (0, 0, 0, most - part.shape[1]), value=1e3) for part in parts])


def run(world: Any, sizes: Sizes, mask_spec: MaskSpec, is_biased: bool) -> list[list[Tensor]]:
    """What the rank's queries of each call got, by call and row; those of the first call come separately."""
    cp = Mesh.build(sizes, world.rank(), new_group).cp
    cache, all_rows, found = KeyValueCache(2, cp=cp), rows(), []
    bias = RelativePositionBias(table=TABLE, bucket=bucket) if is_biased else None
    starts = [0, 0]
    for number, lengths in enumerate(CALLS):
        parts = [
            [
                getattr(row, name)[:, start : start + length]
                for row, start, length in zip(all_rows, starts, lengths, strict=True)
            ]
            for name in ("queries", "keys", "values")
        ]
        queries, keys, values = (padded(part) for part in parts)
        places = torch.arange(max(lengths))
        positions = torch.stack(
            [torch.where(places < length, places + start, -1) for length, start in zip(lengths, starts, strict=True)]
        )
        if number == 0:
            # Each rank brings its own.
            own = places[places % cp.size == cp.rank]
            own = torch.nn.functional.pad(own, (0, -(-len(places) // cp.size) - len(own)), value=len(places) - 1)
            is_own = places[places % cp.size == cp.rank]
            keys, values, positions = keys[:, :, own], values[:, :, own], positions[:, own].clone()
            positions[:, len(is_own) :] = -1
        # In two microbatches, each opened twice, as by two stages of a rank.
        outputs = []
        for row in (slice(0, 1), slice(1, 2)):
            for _ in range(2):
                call = cache.open(row, positions[row])
                call.update("layer", keys[row], values[row])
            assert call.is_first == (number == 0)
            if number:
                outputs.append(call.attend("layer", queries[row], mask_spec=mask_spec, bias=bias)[0])
        cache.close()
        if number:
            found.append([output[:, :length] for output, length in zip(outputs, lengths, strict=True)])
            for output, length in zip(outputs, lengths, strict=True):
                if mask_spec.is_causal:
                    assert (output[:, length:] == 0).all()
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    return found


@pytest.mark.parametrize("is_biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("mask_spec", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_attention_to_the_cache_is_that_to_all_tokens_so_far(cp: int, mask_spec: MaskSpec, is_biased: bool) -> None:
    results = run_on_threads(cp, run, Sizes(world=cp, cp=cp), mask_spec, is_biased)
    for result in results:
        starts = list(CALLS[0])
        for lengths, outputs in zip(CALLS[1:], result, strict=True):
            for row, (all_of_row, length, output) in enumerate(zip(rows(), lengths, outputs, strict=True)):
                end = starts[row] + length
                for i in range(length):
                    wanted = dense(all_of_row, starts[row] + i, end, mask_spec, is_biased)
                    torch.testing.assert_close(output[:, i], wanted, rtol=0, atol=1e-12)
                starts[row] = end
        for one, other in zip(result, results[0], strict=True):
            # Ranks that went on from other bits would part.
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_one_call_brought_is_read_by_calls_that_bring_nothing() -> None:
    """As cross attention does, whose keys are those of an encoder, made once."""
    row = rows()[0]
    cache = KeyValueCache(1, cp=Mesh.single().cp)
    call = cache.open(slice(0, 1), torch.arange(TOTALS[0]).unsqueeze(0))
    call.update("cross", row.keys.unsqueeze(0), row.values.unsqueeze(0))
    cache.close()
    for query in range(3):
        later = cache.read(slice(0, 1), torch.full((1, 1), query))
        assert not later.is_first
        output = later.attend("cross", row.queries[None, :, query : query + 1], mask_spec=MaskSpec(is_causal=False))
        wanted = dense(row, query, TOTALS[0], MaskSpec(is_causal=False), False)
        torch.testing.assert_close(output[0, :, 0], wanted, rtol=0, atol=1e-12)
        cache.close()
    assert cache.num_columns == TOTALS[0]
