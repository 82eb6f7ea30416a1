"""The likeliest token of cut logits is torch.argmax of full rows, ties and padding included."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.comm.collectives import shard_slice
from lightning_megatron.sharding import cut_length
from lightning_megatron.tensor.vocab_parallel_argmax import vocab_parallel_argmax
from lightning_megatron.tensor.vocabulary import num_own
from tests.harness.threads import run_on_threads
from tests.tensor.plain import thread_mesh

T = 40


def rows(vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Of few different numbers, so that nearly every row has its largest several times."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-3, 4, (T, vocab_size), generator=generator).to(dtype)
    logits[0], logits[1, -1] = -torch.inf, 9.0
    return logits


def found_on(world: Any, full: Tensor, multiple: int) -> Tensor:
    tp, vocab_size = thread_mesh(world, False).tp, full.shape[1]
    length = cut_length(vocab_size, tp, multiple)
    # What stands in the padding must not matter.
    padded = torch.nn.functional.pad(full, (0, length * tp.size - vocab_size), value=99.0)
    logits = shard_slice(padded, tp, dim=1)
    assert logits.shape[1] == length
    seen.append(num_own(vocab_size, length, tp))
    return vocab_parallel_argmax(logits, tp=tp, vocab_size=vocab_size)


seen: list[int] = []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "multiple"), [(131, 1), (5, 4), (12, 1)])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_it_is_the_argmax_of_full_rows(num_ranks: int, vocab_size: int, multiple: int, dtype: torch.dtype) -> None:
    full = rows(vocab_size, dtype)
    wanted = full.argmax(dim=1)
    seen.clear()
    for found in run_on_threads(num_ranks, found_on, full, multiple):
        assert torch.equal(found, wanted)
    last = vocab_size - 1 - full.flip(1).argmax(dim=1)
    assert (last != wanted).sum() > T / 5, "ties: the last of equal ones would not do"
    if vocab_size == 5 and num_ranks == 4:
        assert min(seen) == 0, "a rank that holds nothing but padding"


def test_a_row_with_a_nan_has_no_likeliest_token() -> None:
    def on_rank(world: Any) -> list[int]:
        full = rows(8, torch.float64)
        full[3, 6] = torch.nan
        return found_on(world, full, 1)[2:4].tolist()

    [first, second] = run_on_threads(2, on_rank)
    assert first == second and first[0] < 8 and first[1] == 8
