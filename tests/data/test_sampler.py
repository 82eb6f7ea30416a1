"""The sampler gives every layout the same global batches, and resumes on another."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from lightning_megatron.data import GlobalBatchSampler

B = 12
LAYOUTS = (1, 2, 3, 4)


def samplers(num_samples: int, dp: int, **options: int | bool) -> list[GlobalBatchSampler]:
    return [
        GlobalBatchSampler(range(num_samples), global_batch_size=B, num_replicas=dp, rank=rank, **options)  # type: ignore[arg-type]
        for rank in range(dp)
    ]


def global_batches(dp_size: list[GlobalBatchSampler]) -> list[list[int]]:
    """What the dp ranks yield, put together batch by batch in the order of their ranks."""
    size = B // len(dp_size)
    taken = [list(dp_rank) for dp_rank in dp_size]
    starts = range(0, len(taken[0]), size)
    return [list(itertools.chain(*(samples[start : start + size] for samples in taken))) for start in starts]


@pytest.mark.parametrize("dp", LAYOUTS)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_global_batches_are_the_same_on_every_layout(dp: int, shuffle: bool, drop_last: bool) -> None:
    alone, together = (samplers(100, n, shuffle=shuffle, drop_last=drop_last) for n in (1, dp))
    epochs = []
    for epoch in range(2):
        for dp_rank in (*alone, *together):
            dp_rank.set_epoch(epoch)
        epochs.append(global_batches(together))
        assert epochs[-1] == global_batches(alone)
        assert len(epochs[-1]) == (8 if drop_last else 9)
        assert all(len(dp_rank) == len(list(dp_rank)) for dp_rank in together)
    assert (epochs[0] != epochs[1]) == shuffle
    assert (epochs[0][0] == list(range(B))) == (not shuffle)


def test_an_epoch_takes_no_sample_twice() -> None:
    taken = list(itertools.chain(*global_batches(samplers(100, 2))))
    assert len(set(taken)) == len(taken) == 96
    assert set(taken) <= set(range(100))


def test_the_last_batch_is_filled_from_the_start_of_the_order_when_it_is_kept() -> None:
    taken = list(itertools.chain(*global_batches(samplers(100, 2, drop_last=False))))
    assert set(taken) == set(range(100))
    assert taken[100:] == taken[:8]
    few = list(itertools.chain(*global_batches(samplers(5, 2, drop_last=False, shuffle=False))))
    assert few == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


@given(
    before=st.sampled_from(LAYOUTS),
    after=st.sampled_from(LAYOUTS),
    num_steps=st.integers(0, 20),
    seed=st.integers(0, 5),
)
def test_training_resumed_on_another_layout_goes_on_where_it_stopped(
    before: int, after: int, num_steps: int, seed: int
) -> None:
    uninterrupted = []
    stopped = samplers(100, before, seed=seed)
    for epoch in range(4):
        for dp_rank in stopped:
            dp_rank.set_epoch(epoch)
        uninterrupted += global_batches(stopped)
    for dp_rank in stopped:
        dp_rank.consumed_samples = num_steps * B

    resumed = samplers(100, after, seed=seed)
    for dp_rank in resumed:
        dp_rank.load_state_dict(stopped[0].state_dict())
    going_on = []
    first_epoch = resumed[0].epoch
    assert first_epoch == num_steps // 8
    for epoch in range(first_epoch, 4):
        for dp_rank in resumed:
            dp_rank.set_epoch(epoch)  # as Lightning does before each epoch
        going_on += global_batches(resumed)
    assert going_on == uninterrupted[num_steps:]


def test_the_length_stays_that_of_the_epoch_when_it_is_resumed_midway() -> None:
    (sampler,) = samplers(100, 1)
    sampler.load_state_dict({"consumed_samples": 5 * B})
    assert len(list(sampler)) == 3 * B
    assert len(sampler) == 8 * B


def test_an_earlier_epoch_is_complete_when_repeated() -> None:
    (sampler,) = samplers(100, 1)
    first = list(sampler)
    sampler.consumed_samples = 8 * B
    assert list(sampler) == first
    sampler.set_epoch(3)
    assert len(list(sampler)) == 8 * B


def test_another_batch_size_goes_on_with_the_next_sample() -> None:
    sampler = GlobalBatchSampler(range(96), global_batch_size=16, num_replicas=2, rank=0)
    order = sampler.epoch_order(0).tolist()
    sampler.load_state_dict({"consumed_samples": 2 * B})
    assert list(sampler)[:16] == [*order[24:32], *order[40:48]]


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    (sampler,) = samplers(100, 1, seed=3)
    torch.manual_seed(1)
    order = sampler.epoch_order(2)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(sampler.epoch_order(2), order)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(sampler.epoch_order(1), order)
    (neighbour,) = samplers(100, 1, seed=4)
    assert not torch.equal(neighbour.epoch_order(1), order)


def test_a_loader_sees_the_dp_ranks_part_of_each_global_batch() -> None:
    for rank, sampler in enumerate(samplers(100, 3, shuffle=False)):
        batches = [batch.tolist() for batch in DataLoader(range(100), sampler.num_replica_samples, sampler=sampler)]  # type: ignore[arg-type]
        assert batches[1] == list(range(B + rank * 4, B + rank * 4 + 4))
        assert len(batches) == 8


def test_lightning_takes_it_for_a_distributed_sampler() -> None:
    assert isinstance(samplers(100, 1)[0], DistributedSampler)


def test_a_batch_size_that_dp_does_not_divide_is_refused_with_those_that_would_do() -> None:
    with pytest.raises(ValueError, match=r"global_batch_size \(12\) .* data-parallel size \(5\); 10 or 15 would do"):
        GlobalBatchSampler(range(100), global_batch_size=12, num_replicas=5, rank=0)
    with pytest.raises(ValueError, match=r"global_batch_size \(2\) .* data-parallel size \(4\); 4 would do"):
        GlobalBatchSampler(range(100), global_batch_size=2, num_replicas=4, rank=0)


@pytest.mark.parametrize(("num_samples", "drop_last"), [(11, True), (0, False)])
def test_too_few_samples_for_a_batch_are_refused(num_samples: int, drop_last: bool) -> None:
    with pytest.raises(ValueError, match=rf"samples \({num_samples}\) are too few .* global_batch_size \(12\)"):
        samplers(num_samples, 1, drop_last=drop_last)


def test_a_negative_position_in_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match=r"consumed_samples \(-12\) must not be negative"):
        samplers(100, 1)[0].load_state_dict({"consumed_samples": -12})
