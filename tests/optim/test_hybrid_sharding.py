"""Shards over some data-parallel ranks and copies over the others: one device's numbers, and gathers among few."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.reductions import divided
from lightning_megatron.planner.dry_run import dry_run
from lightning_megatron.planner.memory import rank_memory
from lightning_megatron.rules.cross_config import Facts, faults
from lightning_megatron.testing import certify
from tests.any_module import networks
from tests.any_module.model_families import Causal, batches
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.optim.test_gradients import no_group
from tests.optim.test_sharded_gradients import run_of
from tests.optim.test_sharded_parameters import READS, saved_while_sharded

CASES: list[tuple[Any, Any, str]] = [
    (networks.TrainsOverTensor, networks.batches, "dp4m2-zero3-hybrid"),
    (networks.TrainsOverTensor, networks.batches, "dp4m2-zero2-hybrid"),
    (functools.partial(Causal, "qwen3_moe"), batches, "dp4ep2m2-zero3-hybrid"),
    (networks.TrainsOverTensor, networks.batches, "dp4-zero-hybrid"),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("module", "given", "layout"), every_nth(CASES, 4))
def test_numbers_are_those_of_one_device(module: Any, given: Any, layout: str) -> None:
    certify(module, given, layouts=(layout,), steps=3).assert_equal()


@READS
def test_a_checkpoint_has_each_shard_once(tmp_path: Path) -> None:
    config = OptimizerConfig(kind="distributed_parameters", bucket_size=700, shard_size=2)
    assert run_on_ranks(4, saved_while_sharded, tmp_path, config, 4, init=False) == [(True, True)] * 4


def test_ranks_next_to_each_other_share_and_those_in_one_place_hold_copies() -> None:
    for rank in range(16):
        # Tp is 2: the data-parallel ranks are every second.
        axis = Mesh.imagine(rank, Sizes(world=16, tp=2)).axis("dp+cp")
        inner, outer = divided(axis, 4, no_group)
        first = rank // 8 * 8 + rank % 2
        assert inner.ranks == (first, first + 2, first + 4, first + 6) and inner.ranks[inner.rank] == rank
        assert outer.ranks == (rank % 8, rank % 8 + 8) and outer.ranks[outer.rank] == rank
        for size in (0, 8, 16):
            assert divided(axis, size, no_group)[0] is axis and divided(axis, size, no_group)[1].size == 1


def test_a_dry_run_and_the_closed_form_know_it() -> None:
    full = run_of("distributed_parameters")
    run = replace(full, optimizer=replace(full.optimizer, shard_size=4))
    found, of_all = dry_run(run, 0), dry_run(full, 0)
    for kind in ("gradients", "master weights", "moments"):
        assert found.peak_by_kind[kind] == pytest.approx(2 * of_all.peak_by_kind[kind], rel=0.01)
    own, sent = found.parameters / 4, {kind: m for (axis, kind), m in found.messages.items() if axis == "dp+cp"}
    # Every rank sends 3/4 of what it gathers, and among the copies, once a step, half of its shard twice.
    assert sent["all-gather"].sent_bytes == pytest.approx(0.75 * sent["all-gather"].tensor_bytes)
    assert sent["all-reduce"].sent_bytes == pytest.approx(4 * own, rel=0.01)
    assert rank_memory(run, 0).moments == pytest.approx(8 * own, rel=0.01)


def test_a_size_that_does_not_divide_is_refused() -> None:
    facts = Facts(sizes=Sizes(world=12), optimizer=OptimizerConfig(kind="distributed", shard_size=5))
    [fault, *_] = faults(facts)
    assert "shard_size (5) must divide the data-parallel x context-parallel size (12)" in fault
    assert not faults(replace(facts, optimizer=replace(facts.optimizer, shard_size=6)))
    for wrong in (1, -2):
        with pytest.raises(ValueError, match=rf"shard_size \({wrong}\) must be 2 or more"):
            OptimizerConfig(kind="distributed", shard_size=wrong)
    with pytest.raises(ValueError, match=r"shard_size \(2\) needs a distributed kind"):
        OptimizerConfig(shard_size=2)
