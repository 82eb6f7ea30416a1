"""Every document reaches every rank of its group, once, with all its values; what cannot be exchanged is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.context.balance import CostModel, DynamicContextConfig, RankGroup, StepPlan, plan
from lightning_megatron.context.document_exchange import (
    DocumentRoute,
    PlannedMicrobatch,
    exchange_documents,
    loaded_documents,
)
from lightning_megatron.mesh import Mesh, Sizes
from tests.harness.threads import new_group, run_on_threads

COST = CostModel(seconds_per_token=1.0, seconds_per_square=0.5, fixed_seconds=1.0)
CONFIG = DynamicContextConfig(max_tokens_per_rank=10, cost=COST)
NARROW = DynamicContextConfig(max_tokens_per_rank=5, cost=COST)
ROWS, SEQUENCE = 6, 10


def batch_of(dp_rank: int, *, is_packed: bool = True) -> dict[str, Tensor]:
    """Tokens that say where they are; labels that follow from them; documents of 1 token and more."""
    tokens = torch.arange(ROWS * SEQUENCE).view(ROWS, SEQUENCE) + 1000 * (dp_rank + 1)
    batch = {"tokens": tokens, "loss_mask": tokens.float() / 7, "is_odd": tokens % 2 == 1, "labels": tokens.int() * 3}
    if is_packed:
        generator = torch.Generator().manual_seed(dp_rank)
        rows = []
        for _ in range(ROWS):
            lengths = torch.randint(1, 9, (SEQUENCE,), generator=generator)
            row = torch.arange(SEQUENCE).repeat_interleave(lengths)[:SEQUENCE].clone()
            row[SEQUENCE - int(torch.randint(0, 3, (), generator=generator)) :] = -1
            rows.append(row)
        rows[dp_rank].fill_(-1)
        batch["segments"] = torch.stack(rows)
    return batch


def run(world: Any, sizes: Sizes, is_packed: bool, made: StepPlan | None = None) -> list[PlannedMicrobatch]:
    mesh = Mesh.build(sizes, world.rank(), new_group)
    line = mesh.axis("dp+cp")
    held = loaded_documents(batch_of(mesh.dp.rank, is_packed=is_packed))
    gathered = collectives.gather_objects((held.lengths, held.names_D2.tolist()), line)[:: sizes.cp]
    lengths = [own for own, _ in gathered]
    names = torch.tensor([[dp_rank * ROWS + row, n] for dp_rank, (_, own) in enumerate(gathered) for row, n in own])
    made = made or plan(
        [length for own in lengths for length in own], line.size, COST, CONFIG if world.size() == 1 else NARROW
    )
    route = DocumentRoute.of(made, lengths, sizes.cp)
    return exchange_documents(held, sum(map(len, lengths[: mesh.dp.rank])), names, route, line)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize(("world", "cp", "tp"), [(1, 1, 1), (2, 1, 1), (4, 2, 1), (4, 4, 1), (6, 3, 1), (4, 1, 2)])
def test_the_ranks_of_a_group_get_its_full_documents_and_no_token_runs_twice(
    world: int, cp: int, tp: int, is_packed: bool
) -> None:
    sizes = Sizes(world=world, cp=cp, tp=tp)
    by_rank = run_on_threads(world, run, sizes, is_packed)
    seen: list[int] = []
    for rank, parts in enumerate(by_rank):
        if rank % tp:
            continue
        for part in parts:
            batch = part.batch
            tokens = batch["tokens"][batch["segments"] >= 0]
            assert torch.equal(batch["loss_mask"][batch["segments"] >= 0], tokens.float() / 7)
            assert torch.equal(batch["is_odd"][batch["segments"] >= 0], tokens % 2 == 1)
            assert torch.equal(batch["labels"][batch["segments"] >= 0], tokens.int() * 3)
            assert batch["is_odd"].dtype == torch.bool and batch["labels"].dtype == torch.int32
            for document, (row, number) in enumerate(part.names_D2.tolist()):
                own = batch["tokens"][batch["segments"] == document]
                full = batch_of(row // ROWS, is_packed=is_packed)
                wanted = full["tokens"][row % ROWS]
                assert torch.equal(own, wanted[full["segments"][row % ROWS] == number] if is_packed else wanted)
            if rank // tp == part.group.first:
                seen += tokens.tolist()
    batches = [batch_of(dp_rank, is_packed=is_packed) for dp_rank in range(sizes.dp)]
    wanted_tokens = [batch["tokens"][batch["segments"] >= 0] if is_packed else batch["tokens"] for batch in batches]
    assert sorted(seen) == sorted(token for tokens in wanted_tokens for token in tokens.flatten().tolist())
    assert world == 1 or any(part.group.size > 1 for parts in by_rank for part in parts)


def test_a_group_without_documents_gets_one_token_of_none() -> None:
    lengths = loaded_documents(batch_of(0)).lengths + loaded_documents(batch_of(1)).lengths
    made = StepPlan(2, ((RankGroup(0, 1, tuple(range(len(lengths)))), RankGroup(1, 1, ())),), 0.0, 0.0)
    _, [empty] = run_on_threads(2, run, Sizes(world=2), True, made)
    assert {key: value.tolist() for key, value in empty.batch.items()} == {
        "tokens": [[0]],
        "loss_mask": [[0.0]],
        "is_odd": [[False]],
        "labels": [[0]],
        "segments": [[-1]],
    }
    assert empty.names_D2.shape == (0, 2)


def test_the_cp_ranks_of_a_data_parallel_rank_share_the_sending() -> None:
    made = plan([5] * 16, 4, COST, CONFIG)
    route = DocumentRoute.of(made, [[5] * 8, [5] * 8], 2)
    assert [sum(sender == rank for sender in route.senders) for rank in range(4)] == [4, 4, 4, 4]
    other = replace(route, senders=(0,) * 16)
    assert sum(route.num_tokens(0, rank) for rank in range(4)) < sum(other.num_tokens(0, rank) for rank in range(4))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([torch.zeros(2, 3)], r"this is list"),
        ({}, r"this is dict"),
        ({"tokens": torch.zeros(2, 3), "name": "x"}, r"'name' is str"),
        ({"tokens": torch.zeros(2, 3), "label": torch.zeros(2)}, r"'label' is a tensor \(2,\)"),
        ({"tokens": torch.zeros(2, 3), "a": torch.zeros(2, 4), "b": 1}, r"\(2, 3\), and 'a' is .*\(2, 4\), 'b' is int"),
        ({"tokens": torch.zeros(2, 3, 1)}, r"'tokens' is a tensor \(2, 3, 1\)"),
    ],
)
def test_a_batch_that_is_not_given_token_by_token_is_refused_by_key(batch: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loaded_documents(batch)
