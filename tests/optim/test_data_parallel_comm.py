"""A step waits for the weights that it is about to use and no others, and the end of training leaves plain weights."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.optim.config import OptimizerConfig, OptimizerKind
from lightning_megatron.optim.data_parallel_comm import DataParallelComm
from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.master_weights import MasterWeights
from lightning_megatron.optim.part_gathers import ModelParts
from tests.harness.ranks import run_on_ranks
from tests.optim.test_gradients import group
from tests.pipeline.meshes import make_mesh

CPU = torch.device("cpu")
NAMES = ("a", "b", "outside")


class Steps:
    """Three matrices, each in a bucket of its own, of which two are waited for in parts; SGD with rate 1."""

    def __init__(self, mesh: Mesh, *, low: torch.dtype | None = None, **options: Any) -> None:
        self.named = {name: nn.Parameter(torch.full((2, 8), float(i))) for i, name in enumerate(NAMES, 1)}
        self.optimizer = torch.optim.SGD(self.named.values(), lr=1.0)
        config = OptimizerConfig(bucket_size=1, **options)
        gradients = Gradients(self.named.items(), set(), mesh, group, CPU, config=config, low=low)
        has_master_weights = config.shards_states or low is not None
        self.master_weights = MasterWeights(gradients, [self.optimizer]) if has_master_weights else None
        parts = {("", name): [self.named[name]] for name in "ab"}
        sharded = [] if self.master_weights is None else self.master_weights.sharded
        gathered = ModelParts.of(sharded, parts, [list(parts)], []) if sharded else None
        # Hooks read weights after each step.
        self.dp_comm = DataParallelComm(
            gradients, self.master_weights, parts, parts=gathered, hooks_read=("late",) if sharded else ()
        )

    def step(self) -> None:
        """Every weight falls by the sum of ones over the data-parallel ranks."""
        self.optimizer.zero_grad()
        self.dp_comm.gather_all()
        self.dp_comm.gradients.free(dropped=False)
        self.dp_comm.begin_backwards()
        self.dp_comm.expect(0)
        loss: Tensor = sum(p.float().sum() for p in self.named.values())  # type: ignore[assignment]
        loss.backward()
        self.dp_comm.complete(0)
        self.dp_comm.gradients.reduce(outside_over_stages=False)
        self.dp_comm.prepare_step()
        self.optimizer.step()
        self.dp_comm.update_params()

    def in_flight(self) -> list[str]:
        assert self.master_weights is not None
        return sorted(param.name for bucket in self.master_weights._in_flight for param in bucket.members)

    def values(self) -> list[float]:
        return [p.detach().double().mean().item() for p in self.named.values()]


def waits(overlaps: bool) -> list[Any]:
    steps = Steps(make_mesh(Sizes(world=2)), kind="distributed", overlap_param_gather=overlaps)
    steps.step()
    found: list[Any] = [steps.in_flight()]
    steps.dp_comm.enter_part(("", "b"))
    found.append(steps.in_flight())
    steps.dp_comm.gather(0)
    found.append(steps.in_flight())
    steps.dp_comm.gather_all()
    return [*found, steps.in_flight(), steps.values()]


def test_with_overlap_each_wait_is_for_the_weights_that_are_needed() -> None:
    for found in run_on_ranks(2, waits, True):
        # A step that is entered may use what no part has.
        assert found[:4] == [["a", "b", "outside"], ["a", "outside"], ["a"], []]
        assert found[4] == [-1, 0, 1]


def test_without_overlap_parameters_are_gathered_when_the_update_returns() -> None:
    for found in run_on_ranks(2, waits, False):
        assert found == [[], [], [], [], [-1, 0, 1]]


def steps_twice(kind: str) -> list[float]:
    steps = Steps(make_mesh(Sizes(world=2)), kind=kind, overlap_param_gather=kind != "replicated")
    steps.step()
    steps.step()
    steps.dp_comm.synchronize()
    return steps.values()


@pytest.mark.parametrize("kind", get_args(OptimizerKind))
def test_synchronized_parameters_have_the_values_of_all_steps(kind: str) -> None:
    assert run_on_ranks(2, steps_twice, kind) == [[-3, -2, -1]] * 2


def changed_by_hand() -> tuple[list[float], list[float]]:
    """Somebody writes to a parameter in 16 bits between two steps: its master weight follows, others do not."""
    steps = Steps(Mesh.single(), low=torch.bfloat16)
    steps.step()
    with torch.no_grad():
        steps.named["a"].fill_(10.0)
        for shard in steps.dp_comm.gradients.param_shards:
            if shard.param.name == "b":
                # Less than 16 bits see.
                shard.tensor.add_(2.0**-12)
    steps.step()
    by_name = {shard.param.name: shard.tensor.mean().item() for shard in steps.dp_comm.gradients.param_shards}
    return [by_name[name] for name in NAMES], steps.values()


def test_a_step_begins_from_what_somebody_wrote_and_has_what_16_bits_do_not_hold() -> None:
    mains, values = changed_by_hand()
    assert mains == [9.0, 2.0**-12, 1.0]
    assert values == [9.0, pytest.approx(2.0**-12), 1.0]


def test_an_optimizer_that_was_given_a_parameter_later_is_refused_before_its_step() -> None:
    steps = Steps(Mesh.single(), low=torch.bfloat16)
    steps.optimizer.add_param_group({"params": [steps.named["a"]]})
    with pytest.raises(RuntimeError, match="param group 1 of SGD got a parameter after training began"):
        steps.step()


@pytest.mark.parametrize("overlaps", [False, True])
def test_backwards_open_the_sender_only_where_gradients_leave_early(
    overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, opened = Steps(Mesh.single(), overlap_grad_reduce=overlaps), []
    monkeypatch.setattr(steps.dp_comm.gradients.reducer, "open", lambda: opened.append(True))
    steps.dp_comm.begin_backwards()
    assert opened == [True] * overlaps


def test_a_parameter_has_a_grad_view_and_a_stranger_has_none() -> None:
    steps = Steps(Mesh.single())
    grad_view = steps.dp_comm.grad_view(steps.named["a"])
    assert grad_view is not None and grad_view.shape == (2, 8)
    assert steps.dp_comm.grad_view(nn.Parameter(torch.zeros(1))) is None


def released(kind: str, low: torch.dtype | None) -> list[Any]:
    steps = Steps(make_mesh(Sizes(world=2)), kind=kind, low=low)
    during = steps.named["a"].dtype
    steps.step()
    with torch.no_grad():
        # A callback's last word.
        steps.named["b"].fill_(5.0)
    has_shards = steps.dp_comm.has_shards
    steps.dp_comm.release()
    grad_views = [steps.dp_comm.grad_view(p) for p in steps.named.values()]
    for parameter in steps.named.values():
        parameter.grad = None
    (steps.named["a"] * 2).sum().backward()
    is_watched = any(p.grad is grad_view for p, grad_view in zip(steps.named.values(), grad_views, strict=True))
    return [has_shards, during, {p.dtype for p in steps.named.values()}, steps.values(), is_watched]


@pytest.mark.parametrize("kind", get_args(OptimizerKind))
@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_released_parameters_have_the_dtype_of_before_and_the_values_of_now(kind: str, low: torch.dtype | None) -> None:
    for has_shards, during, dtypes, values, is_watched in run_on_ranks(2, released, kind, low):
        assert has_shards == (kind != "replicated")
        assert during == (low or torch.float32) and dtypes == {torch.float32}
        assert values == [-1, 5, 1] and not is_watched


def test_without_master_weights_nothing_is_waited_for() -> None:
    steps = Steps(Mesh.single())
    steps.step()
    steps.dp_comm.gather_all()
    steps.dp_comm.gather(0)
    steps.dp_comm.enter_part(("", "a"))
    assert steps.master_weights is None and steps.values() == [0, 1, 2]


def test_a_single_data_parallel_rank_has_no_shards() -> None:
    assert not Steps(Mesh.single(), kind="distributed").dp_comm.has_shards
