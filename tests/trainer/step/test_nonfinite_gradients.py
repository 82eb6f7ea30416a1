"""A number that is none, on one rank, ends, skips or scales the step of all; copies that differ are found."""

import time
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from lightning_megatron import MegatronStrategy
from lightning_megatron.optim.config import LossScaleConfig, OptimizerConfig
from lightning_megatron.trainer.precision import MegatronPrecision
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data, Scheduled


class Injured(Scheduled):
    """The gradient of one weight, on one rank, is no number in the batches named."""

    def __init__(self, rank: int, batches: tuple[int, ...], value: float) -> None:
        super().__init__()
        self.rank, self.batches, self.value = rank, batches, value
        self.batch = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batch = batch_idx

    def logits(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.net(self.before(inputs.to(self.before.bias.dtype)))
        weight = self.after.weight * 1
        if weight.requires_grad and self.global_rank == self.rank and self.batch in self.batches:
            weight.register_hook(lambda gradient: gradient * self.value)
        return torch.nn.functional.linear(hidden, weight, self.after.bias)


class Watch(L.Callback):
    """What each batch left: the weights' sum, the rate, the loss scale."""

    def __init__(self) -> None:
        self.sums: list[float] = []
        self.rates: list[float] = []
        self.factors: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        self.sums.append(sum(float(p.detach().double().sum()) for p in module.parameters()))
        # The schedulers have stepped by then, or not; after the last batch that of the epoch too.
        self.rates.append(float(trainer.optimizers[0].param_groups[0]["lr"]))
        plugin = trainer.precision_plugin
        assert isinstance(plugin, MegatronPrecision)
        self.factors.append(0.0 if plugin.loss_scale is None else plugin.loss_scale.factor)


def injured(
    config: OptimizerConfig, layout: Layout, batches: tuple[int, ...], half: bool, rank: int = 1
) -> dict[str, Any]:
    module, watch = Injured(rank, batches, float("inf")), Watch()
    strategy = MegatronStrategy(
        optimizer=config,
        loss_scale=LossScaleConfig(initial=1024.0, hysteresis=1, window=2),
        pipeline_model_parallel_size=layout.pp,
        num_microbatches=layout.microbatches,
        timeout_seconds=60,
    )
    options: dict[str, Any] = {"callbacks": [watch], "strategy": strategy, "max_epochs": 1, "limit_val_batches": 0}
    if half:
        options |= {"plugins": [MixedPrecision("16-mixed", "cpu")], "precision": None}
    trainer = make_trainer(layout, **options)
    started = time.monotonic()
    try:
        trainer.fit(module, Data(40))
    except RuntimeError as error:
        return {"error": str(error), "seconds": time.monotonic() - started}
    finite = all(bool(p.isfinite().all()) for p in module.parameters())
    return {"sums": watch.sums, "rates": watch.rates, "factors": watch.factors, "finite": finite}


DP2, PP2 = Layout(world=2), Layout(world=2, pp=2, microbatches=2)
KINDS: dict[str, OptimizerConfig] = {
    "replicated": OptimizerConfig(bucket_size=1),
    "distributed": OptimizerConfig(kind="distributed", bucket_size=50),
    "distributed, overlapping": OptimizerConfig(
        kind="distributed", bucket_size=50, overlap_grad_reduce=True, overlap_param_gather=True
    ),
}
RATES = [0.3 * 0.7**n for n in range(6)]


@pytest.mark.parametrize("kind", list(KINDS))
def test_in_float16_all_ranks_leave_out_a_step_and_lower_the_scale(kind: str) -> None:
    by_rank = run_on_ranks(2, injured, KINDS[kind], DP2, (1, 3), True, init=False)
    for found in by_rank:
        assert found["factors"] == [1024, 512, 512, 256, 256] and found["finite"]
        assert found["rates"][:4] == pytest.approx([RATES[n] for n in (1, 1, 2, 2)])
    if "overlapping" not in kind:
        sums = by_rank[0]["sums"]
        assert sums == by_rank[1]["sums"]
        assert sums[0] == sums[1] != sums[2] == sums[3] != sums[4]


def test_in_float16_the_scale_grows_again() -> None:
    for found in run_on_ranks(2, injured, KINDS["replicated"], DP2, (0,), True, init=False):
        assert found["factors"] == [512, 512, 1024, 1024, 2048]


def test_in_float16_stages_skip_together() -> None:
    # The last stage, on rank 0, has the layer after the chain.
    by_rank = run_on_ranks(2, injured, KINDS["distributed"], PP2, (1,), True, 0, init=False)
    for found in by_rank:
        assert found["factors"] == [1024, 512, 512, 1024, 1024] and found["finite"]
        assert found["rates"][:4] == pytest.approx([RATES[n] for n in (1, 1, 2, 3)])
        assert found["sums"][0] == found["sums"][1] != found["sums"][2]


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_bad_gradient_ends_the_run_on_all_ranks_and_says_whose_it_is(kind: str) -> None:
    for found in run_on_ranks(2, injured, KINDS[kind], DP2, (2,), False, init=False):
        assert "NaN or Inf in gradients at step 2:\n  - rank 1: after.weight\n" in found["error"]
        assert 'on_nonfinite="skip"' in found["error"]
        # Less than a time-out of the process group.
        assert found["seconds"] < 45


class DifferentlyInjured(Scheduled):
    """In the third batch each of two ranks makes a bad number of its own in a parameter of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        name, value = (("before.weight", float("nan")), ("net.2.bias", float("inf")))[self.global_rank]
        loss: Tensor = super().training_step(batch, batch_idx)
        handles = []
        parameter = dict(self.named_parameters())[name]

        def injure(gradient: Tensor) -> Tensor:
            handles[0].remove()
            return gradient * value

        if batch_idx == 2:
            handles.append(parameter.register_hook(injure))
        return loss


def differently_injured(kind: str, overlaps: bool) -> str:
    # All of it in one bucket.
    config = OptimizerConfig(kind=kind, overlap_grad_reduce=overlaps)  # type: ignore[arg-type]
    try:
        make_trainer(Layout(world=2, optimizer=config), max_epochs=1, limit_val_batches=0).fit(
            DifferentlyInjured(), Data(40)
        )
    except RuntimeError as error:
        return str(error)
    return "not found"


@pytest.mark.parametrize(("kind", "overlaps"), [("replicated", False), ("distributed", False), ("distributed", True)])
def test_two_ranks_with_bad_gradients_in_one_bucket_are_reported_with_their_own(kind: str, overlaps: bool) -> None:
    for shown in run_on_ranks(2, differently_injured, kind, overlaps, init=False):
        assert "at step 2:\n  - rank 0: before.weight\n  - rank 1: net.2.bias\nlower the" in shown


@pytest.mark.parametrize("kind", ["replicated", "distributed"])
def test_a_bad_step_is_skipped_on_all_ranks_and_the_next_one_is_not(kind: str) -> None:
    config = OptimizerConfig(kind=kind, on_nonfinite="skip", bucket_size=50)  # type: ignore[arg-type]
    by_rank = run_on_ranks(2, injured, config, DP2, (2,), False, init=False)
    for found in by_rank:
        sums = found["sums"]
        assert found["finite"] and sums == by_rank[0]["sums"]
        assert sums[0] != sums[1] == sums[2] != sums[3] != sums[4]
        assert found["rates"][:4] == pytest.approx([RATES[n] for n in (1, 2, 2, 3)])


def test_who_ignores_it_steps_with_it() -> None:
    for found in run_on_ranks(2, injured, OptimizerConfig(on_nonfinite="ignore"), DP2, (2,), False, init=False):
        assert not found["finite"]


class ManualAndInjured(Injured):
    """Two backwards a step, of which the first is the bad one; and a layer whose gradient comes in one batch only."""

    def __init__(self, second: bool) -> None:
        super().__init__(1, (1,), float("nan"))
        self.automatic_optimization = False
        self.second = second

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = torch.nn.functional.cross_entropy(self.logits(batch[0]), batch[1])
        self.manual_backward(loss)
        if self.second:
            self.manual_backward(self.before(batch[0]).square().mean() + self.after.weight.square().sum())
        optimizer.step()  # type: ignore[union-attr]
        optimizer.zero_grad(set_to_none=False)  # type: ignore[union-attr]


def by_hand(second: bool) -> tuple[bool, list[float]]:
    layout = Layout(world=2, optimizer=OptimizerConfig(on_nonfinite="skip", bucket_size=1))
    module, watch = ManualAndInjured(second), Watch()
    make_trainer(layout, callbacks=[watch], max_epochs=1, limit_val_batches=0).fit(module, Data(32))
    return all(bool(p.isfinite().all()) for p in module.parameters()), watch.sums


@pytest.mark.parametrize("second", [False, True])
def test_a_bad_backward_is_seen_after_a_good_one_and_no_longer_than_it_counts(second: bool) -> None:
    for is_finite, sums in run_on_ranks(2, by_hand, second, init=False):
        assert is_finite and sums[0] == sums[1]
        # Zeroed in place, NaN is gone.
        assert sums[1] != sums[2] != sums[3]


class Disturbed(Scheduled):
    """One rank's copy of a weight changes by its lowest bit after the second step."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 1 and self.trainer.global_step == 2:
            with torch.no_grad():
                self.before.weight.view(-1).view(torch.int64)[3] ^= 1


def disturbed(every: int) -> str:
    config = OptimizerConfig(check_replicas_every_n_steps=every)
    try:
        make_trainer(Layout(world=2, optimizer=config), max_epochs=1).fit(Disturbed(), Data(32))
    except RuntimeError as error:
        return str(error)
    return "not found"


def test_a_copy_that_changed_on_one_rank_is_found_at_the_next_look() -> None:
    for shown in run_on_ranks(2, disturbed, 2, init=False):
        assert "weights that several ranks hold differ after step 4:\n  - before.weight on ranks 0, 1\n" in shown
    for shown in run_on_ranks(2, disturbed, 0, init=False):
        assert "differ after step 3:" in shown
    for shown in run_on_ranks(2, disturbed, -1, init=False):
        assert shown == "not found"


class SteppedByTorch(Injured):
    """Steps torch's own optimizer, past Lightning's."""

    def __init__(self) -> None:
        super().__init__(1, (1,), float("nan"))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers().optimizer  # type: ignore[union-attr]
        self.manual_backward(torch.nn.functional.cross_entropy(self.logits(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()


def stepped_by_torch(policy: str) -> str:
    layout = Layout(world=2, optimizer=OptimizerConfig(on_nonfinite=policy))  # type: ignore[arg-type]
    try:
        make_trainer(layout, max_epochs=1, limit_val_batches=0).fit(SteppedByTorch(), Data(32))
    except RuntimeError as error:
        return str(error)
    return "not found"


@pytest.mark.parametrize(
    ("policy", "shown"),
    [
        ("stop", "NaN or Inf in gradients at step 0:\n  - rank 1: after.weight\n"),
        ("skip", "at step 0, which training_step took by torch's own SGD and which cannot be skipped"),
    ],
)
def test_a_step_of_torchs_own_optimizer_is_checked_too(policy: str, shown: str) -> None:
    for found in run_on_ranks(2, stepped_by_torch, policy, init=False):
        assert shown in found
