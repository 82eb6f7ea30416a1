"""Delayed scales follow the amaxes of earlier steps, agreed over ranks, and nothing counts twice."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.comm.collectives import all_reduce
from lightning_megatron.precision.cast import E4M3, E5M2, largest, scale_of
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.precision.scaling import AmaxHistory, CurrentScaling, DelayedScaling
from tests.harness.threads import run_on_threads
from tests.precision.decast import decast
from tests.tensor.plain import thread_mesh

CPU = torch.device("cpu")


def alone(amax: Tensor) -> Tensor:
    return amax


def history_of(**options: Any) -> AmaxHistory:
    config = Fp8Config(scaling="delayed", **options)
    return AmaxHistory(["a", "b"], [E4M3, E5M2], config, CPU)


def delayed(history: AmaxHistory, slot: int = 0, dtype: torch.dtype = E4M3) -> DelayedScaling:
    return DelayedScaling(dtype, 0, alone, history, slot)


def wanted_scale(amax: float, dtype: torch.dtype = E4M3, margin: int = 0) -> float:
    return float(scale_of(torch.tensor(amax), largest(dtype), margin))


def steps(history: AmaxHistory, amaxes: list[float], slot: int = 0) -> None:
    for amax in amaxes:
        history.record(slot, torch.tensor(amax))
        history.end_step(alone)


def test_the_largest_of_the_history_or_the_latest_counts() -> None:
    for amax_from, wanted in (("max", 100.0), ("most_recent", 2.0)):
        history = history_of(amax_history_length=3, amax_from=amax_from)
        steps(history, [100.0, 3.0, 2.0])
        assert history.scale(0).item() == wanted_scale(wanted)


def test_a_history_forgets_what_is_older_than_its_length() -> None:
    history = history_of(amax_history_length=2)
    steps(history, [100.0, 3.0])
    assert history.scale(0).item() == wanted_scale(100.0)
    steps(history, [2.0])
    assert history.scale(0).item() == wanted_scale(3.0)


def test_a_margin_leaves_powers_of_two_free() -> None:
    history = history_of(margin=3)
    steps(history, [5.0])
    assert history.scale(0).item() == wanted_scale(5.0) / 8
    x = torch.tensor([[5.0, -1.0]])
    scaled = CurrentScaling(E4M3, 3, alone).cast(x, is_training=True)
    assert scaled.inverse_scale is not None and scaled.inverse_scale.item() == 8 / wanted_scale(5.0)


def test_the_first_step_scales_by_the_tensor_itself_and_the_next_by_what_was_seen() -> None:
    history = history_of()
    scaling = delayed(history)
    first = scaling.cast(torch.full((2, 16), 7.0), is_training=True)
    assert first.inverse_scale is not None and first.inverse_scale.item() == 1 / wanted_scale(7.0)
    history.end_step(alone)
    # Larger than anything seen: it is cut off at what the scale leaves room for.
    second = scaling.cast(torch.full((2, 16), 1000.0), is_training=True)
    assert second.inverse_scale is not None and second.inverse_scale.item() == 1 / wanted_scale(7.0)
    assert decast(second, E4M3).max().item() == 448.0 / wanted_scale(7.0)


def test_casts_of_one_step_count_as_one_tensor_and_change_no_scale_within_it() -> None:
    history = history_of(amax_history_length=2)
    scaling = delayed(history)
    steps(history, [100.0])
    for amax in (2.0, 9.0, 2.0, 9.0):
        # Twice each: as under recomputation, and as the microbatches of a step.
        operand = scaling.cast(torch.full((1, 16), amax), is_training=True)
        assert operand.inverse_scale is not None and operand.inverse_scale.item() == 1 / wanted_scale(100.0)
    history.end_step(alone)
    # One entry, the largest of the step: the 100 is still looked back on.
    assert history.state_dict()["a"].tolist() == [9.0, 100.0]


def test_what_is_not_training_counts_nothing() -> None:
    history = history_of()
    delayed(history).cast(torch.full((1, 16), 50.0), is_training=False)
    history.end_step(alone)
    assert not history.is_known(0)


@pytest.mark.parametrize("amax", [0.0, float("inf"), float("nan")])
def test_a_step_of_zeros_or_of_an_overflow_leaves_the_history_alone(amax: float) -> None:
    history = history_of(amax_history_length=2)
    steps(history, [3.0, amax])
    assert history.state_dict()["a"].tolist() == [3.0, 0.0]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_comes_out_as_nan_and_is_not_hidden_by_the_cut(bad: float) -> None:
    history = history_of()
    steps(history, [3.0])
    operand = delayed(history).cast(torch.tensor([[1.0, bad]]), is_training=True)
    assert decast(operand, E4M3).isnan().any()


def test_a_tensor_first_seen_in_a_later_step_is_scaled_by_itself_then() -> None:
    history = history_of()
    steps(history, [3.0], slot=0)
    assert history.is_known(0) and not history.is_known(1)
    operand = delayed(history, 1, E5M2).cast(torch.full((1, 16), 1e-6), is_training=True)
    assert decast(operand, E5M2)[0, 0].item() == pytest.approx(1e-6, rel=0.15)


def test_a_history_that_is_saved_and_loaded_goes_on_alike() -> None:
    history, other = history_of(amax_history_length=4), history_of(amax_history_length=2)
    steps(history, [100.0, 3.0])
    other.load_state_dict(history.state_dict() | {"of another stage": torch.zeros(4)})
    assert other.is_known(0) and not other.is_known(1)
    assert other.scale(0).item() == history.scale(0).item() == wanted_scale(100.0)
    assert other.state_dict()["a"].tolist() == [3.0, 100.0]


def test_ranks_agree_on_the_scales_of_a_tensor_that_each_holds_a_part_of() -> None:
    full = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0] * 8 + [64.0] * 8)

    def on_rank(world: Any) -> None:
        tp = thread_mesh(world, False).tp
        part = full.chunk(2, dim=1)[tp.rank]

        def agree(amax: Tensor) -> Tensor:
            return all_reduce(amax, tp, "max")

        together = CurrentScaling(E4M3, 0, alone).cast(full, is_training=True)
        values = together.values.chunk(2, dim=1)[tp.rank]
        history = history_of()
        for scaling in (CurrentScaling(E4M3, 0, agree), DelayedScaling(E4M3, 0, agree, history, 0)):
            assert torch.equal(scaling.cast(part, is_training=True).values, values)
        # Alone the rank of small numbers would scale otherwise.
        own = CurrentScaling(E4M3, 0, alone).cast(part, is_training=True).values
        assert torch.equal(own, values) == (tp.rank == 1)
        history.end_step(agree)
        assert torch.equal(history.scale(0), scale_of(full.abs().max(), largest(E4M3), 0))

    run_on_threads(2, on_rank)
