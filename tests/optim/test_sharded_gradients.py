"""Gradients that each backward reduce-scatters: one device's numbers, and a part of the bytes between backwards."""

import functools
import time
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.mesh import Sizes
from lightning_megatron.models import GPTConfig
from lightning_megatron.optim.bucket import Bucket
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.master_weights import MasterWeights
from lightning_megatron.planner.dry_run import dry_run
from lightning_megatron.planner.memory import rank_memory
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.run import Run
from lightning_megatron.testing import certify
from tests.any_module import networks
from tests.any_module.model_families import Causal, batches
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.optim.test_gradients import no_group
from tests.pipeline.meshes import make_mesh
from tests.trainer.layouts import Layout, make_trainer

SHARDED = OptimizerConfig(kind="distributed_gradients", bucket_size=2000)
LAYOUTS = ["dp2m2-zero2", "dp2pp2vp2-zero2", "dp2pp2m4-zero2-zb_h1", "dp2pp2-zero2-collective", "dp2tp2-sp-zero2"]


@pytest.mark.matrix
@pytest.mark.parametrize("layout", every_nth(LAYOUTS, 3))
def test_numbers_are_those_of_one_device(layout: str) -> None:
    certify(networks.TrainsOverTensor, networks.batches, layouts=(layout,), steps=3).assert_equal()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout", every_nth(["ep2m2-zero2", "dp4ep2m2-zero2", "dp2pp2vp2m4-zero2-zb_v", "cp2-zero2"], 2)
)
def test_experts_and_context_ranks_have_their_own_axes(layout: str) -> None:
    certify(functools.partial(Causal, "qwen3_moe"), batches, layouts=(layout,), steps=3).assert_equal()


class Halves(networks.TrainsOverTensor):
    """Changes its gradients, and looks at them twice."""

    def on_after_backward(self) -> None:
        for name, weight in self.named_parameters():
            if weight.grad is not None and "up" in name:
                weight.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for weight in self.parameters():
            if weight.grad is not None:
                weight.grad.add_(weight.detach(), alpha=0.01)


def test_hooks_see_and_change_whole_gradients() -> None:
    certify(Halves, networks.batches, layouts=("dp2m2-zero2", "dp2pp2-zero2"), steps=3).assert_equal()


class Twice(networks.TrainsDiffusion):
    """Sums the gradients of two backwards itself, of a mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for _ in range(2):
            self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_backwards_of_manual_optimization_add_up() -> None:
    certify(Twice, networks.batches, layouts=("dp2-zero2",), steps=3).assert_equal()


def peaks(config: OptimizerConfig) -> tuple[int, int, int]:
    """The most bytes of whole gradients at a time, the bytes of what lasts on a rank that trains, and the largest
    bucket's."""
    most, largest, reduce = [0], [0], Bucket.reduce
    module: Any = networks.TrainsOverTensor()

    def noted(bucket: Bucket, **options: Any) -> None:
        held = [one._gradient for one in buckets() if one._gradient is not None]
        most[0] = max(most[0], sum(one.nbytes for one in held))
        largest[0] = max(largest[0], bucket.gradient.nbytes)
        reduce(bucket, **options)

    def buckets() -> list[Bucket]:
        found: list[Bucket] = module.trainer.strategy._require_run().dp_comm.gradients.buckets
        return found

    lasting: list[int] = []
    module.on_train_batch_end = lambda *_: lasting.append(sum(one.nbytes for b in buckets() for one in b.held))
    layout = Layout(world=4, microbatches=2, optimizer=config)
    Bucket.reduce = noted  # type: ignore[method-assign]
    try:
        make_trainer(layout, max_epochs=1, limit_train_batches=2).fit(module, networks.loader())
    finally:
        Bucket.reduce = reduce  # type: ignore[method-assign]
    return most[0], lasting[-1], largest[0]


def test_between_backwards_a_rank_holds_its_part_and_within_them_few_buckets() -> None:
    usual = OptimizerConfig(kind="distributed", bucket_size=SHARDED.bucket_size)
    [(all_bytes, lasting, _), *_] = run_on_ranks(4, peaks, usual, init=False)
    assert lasting == all_bytes
    for most, own, largest in run_on_ranks(4, peaks, SHARDED, init=False):
        assert own == all_bytes / 4
        # The embedding's, which the head fills first, one that is full, and one that fills.
        assert largest <= most <= 3 * largest < all_bytes / 2


CONFIG = GPTConfig(
    num_layers=12,
    hidden_size=1024,
    num_attention_heads=16,
    vocab_size=16384,
    max_sequence_length=1024,
    tie_embeddings=False,
)


def run_of(kind: Any) -> Run:
    return Run(
        model=CONFIG,
        lengths=SequenceLengths(sequence=1024),
        sizes=Sizes(world=16, tp=2, sequence_parallel=True),
        global_batch_size=32,
        precision="bf16-mixed",
        optimizer=OptimizerConfig(kind=kind, bucket_size=10_000_000),
    )


def test_a_dry_run_and_the_closed_form_know_it() -> None:
    found = {kind: dry_run(run_of(kind), 0) for kind in ("distributed", "distributed_gradients")}
    whole, part = (one.peak_by_kind["gradients"] for one in found.values())
    assert whole / 8 <= part < 1.01 * whole / 8
    # A bucket of float32 in flight, one that fills, and that of all vectors.
    saved = found["distributed"].peak_bytes - found["distributed_gradients"].peak_bytes
    assert whole * 7 / 8 - 3 * 4 * 10_000_000 <= saved <= whole * 7 / 8
    assert saved > 0.4 * whole
    closed = {kind: rank_memory(run_of(kind), 0) for kind in found}
    assert closed["distributed_gradients"].gradients == pytest.approx(part, rel=0.01)
    assert closed["distributed_gradients"].total < closed["distributed"].total
    # Each of two microbatches sends them.
    sent = [sum(m.sent_bytes for (_, k), m in one.messages.items() if k == "reduce-scatter") for one in found.values()]
    assert sent[1] > 1.5 * sent[0]


def freed_in_flight(is_complete: bool) -> tuple[list[str], float]:
    """Names of parameters whose bucket is freed when a second gradient was made while the reduction of the first is on
    its way, or complete; and the sum of its numbers on this rank."""
    named = {name: nn.Parameter(torch.ones(size)) for name, size in (("a", 8), ("other", 8), ("b", 16))}
    config = OptimizerConfig(kind="distributed_gradients", bucket_size=16)
    gradients = Gradients(named.items(), set(), make_mesh(Sizes(world=2)), no_group, torch.device("cpu"), config=config)
    reducer, buckets = gradients.reducer, {bucket.members[0].name: bucket for bucket in gradients.buckets}
    MasterWeights(gradients, [torch.optim.SGD(named.values(), lr=1.0)])
    reducer.watch()
    reducer.open()
    reducer.expect(0)
    (named["b"] * 2.0).sum().backward()
    pending = buckets["b"].pending
    assert pending is not None
    while not pending.is_complete:
        time.sleep(0.001)
    if not is_complete:
        # As of a message that takes longer.
        pending.work = type("Work", (), {"wait": pending.work.wait, "is_completed": lambda: False})  # type: ignore[union-attr, assignment]
    named["a"].sum().backward()
    freed = [name for name, bucket in buckets.items() if bucket.was_reduced]
    reducer.end_backward()
    return freed, float(buckets["b"].own.sum())


def test_a_bucket_is_freed_before_the_next_one_fills_if_its_reduction_is_complete() -> None:
    for is_complete in (True, False):
        found = run_on_ranks(2, freed_in_flight, is_complete)
        assert [freed for freed, _ in found] == [["b"] if is_complete else []] * 2
        assert sum(total for _, total in found) == 16 * 2 * 2.0


def late() -> str:
    named = {"a": nn.Parameter(torch.ones(8)), "b": nn.Parameter(torch.ones(8))}
    mesh = make_mesh(Sizes(world=2))
    gradients = Gradients(named.items(), set(), mesh, no_group, torch.device("cpu"), config=SHARDED)
    MasterWeights(gradients, [torch.optim.SGD(named.values(), lr=1.0)])
    gradients.reducer.open()
    gradients.reducer.expect(0)
    (named["a"].sum() + named["b"].sum()).backward()
    gradients.reducer.end_backward()
    named["b"].grad = torch.ones(8)
    try:
        gradients.reduce(outside_over_stages=False)
    except RuntimeError as error:
        return str(error)
    return "summed"


def test_a_gradient_that_comes_after_its_sum_is_refused_by_name() -> None:
    for said in run_on_ranks(2, late):
        assert "a gradient of 'b' was made after its sum over ranks had begun" in said
        assert 'no kind "distributed_gradients"' in said
