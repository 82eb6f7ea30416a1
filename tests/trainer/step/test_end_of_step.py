"""What routers learn is learnt once for each optimizer step, from the calls that taught the model, on any layout."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import Tensor
from torch.optim.swa_utils import get_ema_avg_fn

from lightning_megatron import MegatronStrategy, RecomputeConfig
from lightning_megatron.models import GPTModel
from lightning_megatron.moe.load import RoutingReport
from lightning_megatron.optim.config import OptimizerConfig
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.trainer.layouts import PLAIN, QUIET, Layout, make_trainer
from tests.trainer.small_experts import BIAS_RATE, CONFIG, Language, Rows, Seen, fit, model_of

pytestmark = pytest.mark.filterwarnings(QUIET)
ALONE = Layout()
SKIPPING = OptimizerConfig(on_nonfinite="skip")
# Sums of a few hundred numbers of order 1 in another order, over a few steps.
TOLERANCE = 1e-10
LAYOUTS = {
    "microbatches": Layout(microbatches=2),
    "pp2": Layout(world=2, pp=2, microbatches=2),
    "pp2 vp2": Layout(world=2, pp=2, vp=2, microbatches=2),
    "pp2 collective": Layout(world=2, pp=2, microbatches=2, collective=True),
    "dp2": Layout(world=2),
    "tp2": Layout(world=2, tp=2),
    "cp2": Layout(world=2, cp=2),
}


def num_chosen(reports: Mapping[str, RoutingReport]) -> list[int]:
    return [int(report.counts_E.sum()) for report in reports.values()]


def require_equal(found: Seen, wanted: Seen) -> None:
    """The same state of the routers after every batch, and the same weights at the end, for what the rank holds."""
    assert len(found.biases) == len(wanted.biases) > 0
    for after, expected in zip(found.biases, wanted.biases, strict=True):
        assert all(torch.equal(bias, expected[name]) for name, bias in after.items())
    for after, expected in zip(found.shares, wanted.shares, strict=True):
        assert all(torch.equal(shares, expected[name]) for name, shares in after.items())
    for reports, expected_reports in zip(found.reports, wanted.reports, strict=True):
        assert list(reports) == list(expected_reports) == ["layers.2", "layers.3"]
        for name, report in reports.items():
            expected = expected_reports[name]
            assert torch.equal(report.counts_E, expected.counts_E) and torch.equal(
                report.accepted_E, expected.accepted_E
            )
            assert {*report.losses} == {"sequence", "global", "z"}
            for loss, value in report.losses.items():
                assert abs(float(value) - float(expected.losses[loss])) < TOLERANCE


def fit_accumulated(layout: Layout) -> Seen:
    return fit(layout, accumulate_grad_batches=2, val_check_interval=1, num_sanity_val_steps=1)


@pytest.fixture(scope="module")
def plain() -> Seen:
    return run_on_ranks(1, fit_accumulated, PLAIN, init=False)[0]


def test_accumulated_batches_are_one_step_and_validations_none(plain: Seen) -> None:
    # Two steps of 2 x 4 rows of 8 tokens, each with two experts; the bias moves at the end of each.
    after = [biases["layers.2"] for biases in plain.biases]
    assert not after[0].any() and torch.equal(after[1], after[2])
    assert set(after[1].abs().tolist()) <= {0.0, BIAS_RATE} and after[1].any() and not torch.equal(after[3], after[1])
    trained = [num_chosen(report) for report in plain.reports]
    assert trained == [[0, 0], [128, 128], [128, 128], [128, 128]]
    assert all(0 < float(report.dropped_share) < 0.5 for report in plain.reports[1].values())


@pytest.mark.parametrize("layout", every_nth(LAYOUTS, 2))
def test_all_layouts_learn_what_one_device_does(layout: str, plain: Seen) -> None:
    for seen in run_on_ranks(LAYOUTS[layout].world, fit_accumulated, LAYOUTS[layout], init=False, timeout=120):
        require_equal(seen, plain)
        # A validation sees what the step before it has taught.
        assert len(seen.validations) == len(plain.validations) == 4 + 1
        assert all(abs(a - b) < TOLERANCE for a, b in zip(seen.validations, plain.validations, strict=True))


class Leaving(Language):
    """Its second step is left out."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_a_step_that_is_left_out_teaches_nothing() -> None:
    [seen] = run_on_ranks(1, fit, ALONE, Leaving, init=False)
    after = [biases["layers.2"] for biases in seen.biases]
    assert torch.equal(after[0], after[1]) and not torch.equal(after[1], after[2])
    assert [num_chosen(reports)[0] for reports in seen.reports] == [64, 0, 64, 64]


class Overflowing(Language):
    """The gradients of its second step are no numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        return loss * (float("inf") if batch_idx == 1 else 1.0)


@pytest.mark.parametrize(
    "layout",
    [Layout(optimizer=SKIPPING), Layout(world=2, pp=2, microbatches=2, optimizer=SKIPPING)],
    ids=["alone", "pp2"],
)
def test_a_step_skipped_for_its_gradients_teaches_nothing(layout: Layout) -> None:
    for seen in run_on_ranks(layout.world, fit, layout, Overflowing, init=False):
        assert [num_chosen(reports)[0] for reports in seen.reports] == [64, 0, 64, 64]
        assert all(torch.equal(bias, seen.biases[1][name]) for name, bias in seen.biases[0].items())
        assert all(torch.equal(shares, seen.shares[1][name]) for name, shares in seen.shares[0].items())
        assert not any(torch.equal(bias, seen.biases[2][name]) for name, bias in seen.biases[1].items())


class ByHand(Language):
    """Two optimizers share the model, and each batch does two steps of the first and one of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.moves: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        assert self.model is not None
        bias = self.model.routers["layers.2"].expert_bias
        for optimizers in ([first], [first, second]):
            loss = self.loss(batch)
            self.manual_backward(loss)
            for optimizer in optimizers:
                before = bias.clone()
                optimizer.step()
                self.moves.append((bias - before).abs().max())
            first.zero_grad()
        second.zero_grad()

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() == 1]
        return [torch.optim.SGD(matrices, lr=0.05), torch.optim.AdamW(others, lr=0.05)]

    def on_train_end(self) -> None:
        # Twice a batch, and not where the second optimizer steps after no call of its own.
        assert [float(move) for move in self.moves[:3]] == [BIAS_RATE, BIAS_RATE, 0.0]


@pytest.mark.parametrize("layout", [PLAIN, ALONE, Layout(world=2)], ids=["plain", "alone", "dp2"])
def test_a_model_of_two_optimizers_learns_once_a_call(layout: Layout) -> None:
    for seen in run_on_ranks(layout.world, fit, layout, ByHand, init=False):
        assert [num_chosen(reports)[0] for reports in seen.reports] == [64] * 4


class TwoModels(Language):
    """A judge that is trained by an optimizer of its own, and a teacher that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge: GPTModel | None = None
        self.teacher: GPTModel | None = None

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.judge, self.teacher = GPTModel(CONFIG, seed=6), GPTModel(CONFIG, seed=7).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.model is not None and self.judge is not None and self.teacher is not None
        optimizer, judging = self.optimizers()  # type: ignore[misc]
        with torch.no_grad():
            self.loss(batch, self.teacher)
        for own, models in ((optimizer, (self.model, self.judge, self.teacher)), (judging, (self.judge,))):
            self.manual_backward(torch.stack([self.loss(batch, model) for model in models]).sum())
            own.step()
            own.zero_grad()
        chosen = {
            name: num_chosen(model.routing_reports)
            for name, model in (("model", self.model), ("judge", self.judge), ("teacher", self.teacher))
        }
        # The judge is asked twice before its step; the teacher learns nothing, and keeps nothing of what it saw.
        assert chosen == {"model": [64, 64], "judge": [128, 128], "teacher": []}
        assert not self.teacher.routers["layers.2"].expert_bias.any()
        assert not self.teacher.routers["layers.2"].records.counts
        assert batch_idx or self.judge.routers["layers.2"].expert_bias.any()
        return {"loss_weight": 1}

    def configure_optimizers(self) -> Any:
        assert self.model is not None and self.judge is not None
        return [torch.optim.SGD(model.parameters(), lr=0.05) for model in (self.model, self.judge)]


def fit_two(layout: Layout) -> int:
    trainer = make_trainer(layout, max_epochs=1)
    trainer.fit(TwoModels(), Rows())
    return trainer.global_step


@pytest.mark.parametrize("layout", [ALONE, Layout(world=2)], ids=["alone", "dp2"])
def test_a_model_learns_when_its_own_weights_are_stepped(layout: Layout) -> None:
    assert run_on_ranks(layout.world, fit_two, layout, init=False) == [8] * layout.world


class SelfTaught(Language):
    """Asks its model once more, without gradients, before it learns."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        with torch.no_grad():
            self.loss(batch)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("layout", [PLAIN, ALONE, Layout(microbatches=2)], ids=["plain", "alone", "microbatches"])
def test_calls_without_gradients_do_not_count(layout: Layout) -> None:
    [seen] = run_on_ranks(1, fit, layout, SelfTaught, init=False)
    [wanted] = run_on_ranks(1, fit, ALONE, init=False)
    require_equal(seen, wanted)


def fit_recomputed(granularity: str) -> Seen:
    parts: Any = {"parts": ("moe",)} if granularity == "selective" else {}
    recompute = RecomputeConfig(granularity=granularity, **parts)  # type: ignore[arg-type]
    return fit(ALONE, strategy=MegatronStrategy(recompute=recompute, num_microbatches=2))


@pytest.mark.parametrize("granularity", ["selective", "full"])
def test_a_recomputed_call_counts_once(granularity: str) -> None:
    [seen] = run_on_ranks(1, fit_recomputed, granularity, init=False)
    [wanted] = run_on_ranks(1, fit, ALONE, init=False)
    require_equal(seen, wanted)


class Frozen(Language):
    """Its routers are not trained."""

    def configure_model(self) -> None:
        super().configure_model()
        assert self.model is not None
        for router in self.model.routers.values():
            router.requires_grad_(False)


def test_the_bias_of_a_frozen_router_is_frozen() -> None:
    [seen] = run_on_ranks(1, fit, ALONE, Frozen, init=False)
    assert not any(bias.any() for after in seen.biases for bias in after.values())
    assert num_chosen(seen.reports[-1]) == [64, 64]


def unbroken_and_resumed(layout: Layout, folder: str) -> tuple[int, Seen, Seen]:
    """Two epochs of three steps; and their end again, from a checkpoint after the number of steps that comes first.

    Under Lightning's own strategy a loader cannot go on in the middle of an epoch.
    """
    options: dict[str, Any] = {"num_rows": 12, "max_epochs": 2, "val_check_interval": 3}
    at_end: dict[str, Any] = {"every_n_epochs": 1, "save_on_train_epoch_end": True}
    saver = ModelCheckpoint(
        folder, save_top_k=-1, filename="{step}", **(at_end if layout.is_plain else {"every_n_train_steps": 4})
    )
    num_before = 3 if layout.is_plain else 4
    unbroken = fit(layout, callbacks=(saver,), enable_checkpointing=True, **options)
    resumed = fit(layout, ckpt_path=str(Path(folder) / f"step={num_before}.ckpt"), **options)
    return num_before, unbroken, resumed


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
@pytest.mark.parametrize(
    "layout", every_nth([Layout(world=2, pp=2, microbatches=2), PLAIN, ALONE, Layout(world=2)], 3), ids=str
)
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(layout: Layout, tmp_path: Path) -> None:
    runs = run_on_ranks(layout.world, unbroken_and_resumed, layout, str(tmp_path), init=False)
    for num_before, unbroken, resumed in runs:
        assert len(unbroken.biases) == 6 and len(resumed.biases) == 6 - num_before
        for after, wanted in zip(resumed.biases, unbroken.biases[num_before:], strict=True):
            assert all(torch.equal(bias, wanted[name]) for name, bias in after.items())
        for after, wanted in zip(resumed.shares, unbroken.shares[num_before:], strict=True):
            assert all(torch.equal(shares, wanted[name]) for name, shares in after.items())
        assert resumed.losses == unbroken.losses[num_before:]
        assert resumed.weights and all(torch.equal(v, unbroken.weights[name]) for name, v in resumed.weights.items())


class Averaging(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(use_buffers=True, avg_fn=get_ema_avg_fn(0.5))


def fit_averaged(layout: Layout) -> tuple[Seen, dict[str, Tensor]]:
    averaging = Averaging()
    # Lightning keeps averages in float32, and weights stay there while it validates.
    seen = fit(layout, callbacks=(averaging,), val_check_interval=1, precision="32-true")
    return seen, {name: value for name, value in seen.weights.items() if "router" in name}


def fit_single(layout: Layout) -> Seen:
    return fit(layout, precision="32-true")


@pytest.mark.parametrize("layout", [PLAIN, ALONE], ids=["plain", "alone"])
def test_averaged_weights_have_the_average_of_the_bias_and_leave_training_alone(layout: Layout) -> None:
    [(seen, averaged)] = run_on_ranks(1, fit_averaged, layout, init=False)
    [wanted] = run_on_ranks(1, fit_single, layout, init=False)
    require_equal(seen, wanted)
    # At the end of the fit the averages take the place of the weights.
    history = [after["layers.2"] for after in wanted.biases]
    average = history[0]
    for bias in history[1:]:
        average = (average + bias) / 2
    assert torch.allclose(averaged["model.layers.2.moe.router.expert_bias"], average)
    assert not torch.equal(average, history[-1])


def fit_low(layout: Layout) -> list[tuple[torch.dtype, torch.dtype, float]]:
    module = Language(replace(CONFIG, moe=_slow()))
    fit(layout, lambda: module, precision="bf16-true")
    routers = model_of(module).routers.values()
    return [(r.expert_bias.dtype, r.global_tokens_per_expert.dtype, float(r.expert_bias.abs().max())) for r in routers]


def _slow() -> Any:
    assert CONFIG.moe is not None
    # Less than bfloat16 has between 1 and the next number: what it would lose.
    return replace(CONFIG.moe, router=replace(CONFIG.moe.router, bias_update_rate=0.001))


@pytest.mark.parametrize("layout", [PLAIN, ALONE], ids=["plain", "alone"])
def test_the_bias_stays_wide_in_a_module_of_bfloat16(layout: Layout) -> None:
    [kinds] = run_on_ranks(1, fit_low, layout, init=False)
    for bias, counts, largest in kinds:
        assert bias == torch.float32 and counts == torch.int64
        # Whole multiples of the rate, as bfloat16 would not have them.
        assert largest > 0 and abs(largest / 0.001 - round(largest / 0.001)) < 1e-3


def test_a_copy_of_a_model_learns_by_itself_and_a_model_by_hand_on_request() -> None:
    model = GPTModel(CONFIG, seed=5)
    tokens = torch.arange(16).view(2, 8)

    def step(trained: GPTModel) -> None:
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        trained(tokens, labels=tokens).backward()
        optimizer.step()

    step(model)
    twin = copy.deepcopy(model)
    before = [model.routers["layers.2"].expert_bias.clone(), twin.routers["layers.2"].expert_bias.clone()]
    assert torch.equal(*before) and before[0].any()
    step(twin)
    assert torch.equal(model.routers["layers.2"].expert_bias, before[0])
    assert not torch.equal(twin.routers["layers.2"].expert_bias, before[1])
    model(tokens, labels=tokens).backward()
    assert num_chosen(model.routing_reports) == [32, 32]
    model.end_step(is_skipped=True)
    assert model.routing_reports == {} and num_chosen(model.all_routing_reports()) == [0, 0]
    assert torch.equal(model.routers["layers.2"].expert_bias, before[0])


def test_a_dense_checkpoint_shows_what_a_model_of_experts_misses() -> None:
    dense = GPTModel(replace(CONFIG, moe=None), seed=5)
    model = GPTModel(CONFIG, seed=5)
    with pytest.raises(RuntimeError, match=r"Missing key.*layers\.2\.moe\.router\.weight"):
        model.load_state_dict(dense.state_dict())


class Dense(Language):
    def __init__(self) -> None:
        super().__init__(replace(CONFIG, moe=None))


def load_dense(folder: str) -> str:
    path = Path(folder) / "dense.ckpt"

    class Saver(L.Callback):
        def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            trainer.save_checkpoint(path)

    trainer = make_trainer(ALONE, max_epochs=1, callbacks=[Saver()])
    trainer.fit(Dense(), Rows(4))
    with pytest.raises(ValueError) as raised:
        make_trainer(ALONE, max_epochs=1).validate(Language(), Rows(4), ckpt_path=str(path), weights_only=False)
    return str(raised.value)


def test_a_dense_checkpoint_directory_shows_what_a_model_of_experts_misses(tmp_path: Path) -> None:
    [message] = run_on_ranks(1, load_dense, str(tmp_path), init=False)
    assert "layers.2.moe.router.weight" in message and "layers.2.moe.router.expert_bias" in message
