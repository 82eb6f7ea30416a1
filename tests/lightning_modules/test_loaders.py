"""Prompts are dealt so that dp ranks together have each of them once, in order."""

import pytest
import torch

from lightning_megatron.lightning_modules.loaders import COPY, prompt_loader
from lightning_megatron.trainer.setup.replica import Replica


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize(("num_prompts", "global_batch_size"), [(1, 1), (1, 4), (5, 2), (6, 3), (7, 4), (12, 4)])
def test_dp_ranks_share_the_prompts_of_each_global_batch_in_order(
    num_prompts: int, global_batch_size: int, num_replicas: int
) -> None:
    prompts = [torch.full((1 + number % 3,), number) for number in range(num_prompts)]
    loaders = [prompt_loader(prompts, global_batch_size, Replica(rank, num_replicas)) for rank in range(num_replicas)]
    numbers = []
    # Equally many batches of equally many rows.
    for batches in zip(*loaders, strict=True):
        assert len({len(batch["samples"]) for batch in batches}) == 1
        dealt = torch.cat([batch["samples"] for batch in batches]).tolist()
        asked = [number for number in dealt if number != COPY]
        assert len(asked) <= global_batch_size and len(dealt) - len(asked) < num_replicas
        numbers += asked
        for batch in batches:
            for tokens, length, number in zip(batch["tokens"], batch["lengths"], batch["samples"], strict=True):
                assert tokens[:length].tolist() == prompts[0 if number == COPY else number].tolist()
    assert numbers == list(range(num_prompts))


def test_one_dp_rank_gets_no_copies() -> None:
    [batch] = prompt_loader([torch.tensor([3])] * 3, 8)
    assert batch["samples"].tolist() == [0, 1, 2]
