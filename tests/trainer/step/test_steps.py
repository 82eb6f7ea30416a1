"""What a step may not do is refused at once, and the way out is named; the weight of its loss is right."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import ConfigurationError
from lightning_megatron.pipeline.module import Part, PipelineModule
from tests.harness.ranks import RankFailed, run_on_ranks
from tests.trainer import modules
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data, Small

PP2 = Layout(world=2, pp=2, microbatches=2)


def fit(module: L.LightningModule, layout: Layout = PP2) -> None:
    make_trainer(layout, max_epochs=1, limit_val_batches=0).fit(module, Data(num_rows=16))


# --- refusals that only one stage can see: each ends a run of its own -------------------------------------------------


class BareExcept(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        try:
            return super().training_step(batch, batch_idx)
        except:  # noqa: E722
            return torch.zeros((), requires_grad=True)


class NoLoss(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class ReadsTrainerAfterwards(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.trainer.strategy.barrier()
        return loss


class NeverCalls(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.before(batch[0]).sum()


class BarrierBefore(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.strategy.barrier()
        return super().training_step(batch, batch_idx)


class HandsOnTwo(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Doubles(), Doubles(), nn.Linear(8, 8), nn.Linear(8, 8))


class Doubles(nn.Module):
    def forward(self, hidden: Any) -> Any:
        return hidden, hidden


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CalledTwice", 'calls a pipelined model more than once.*mode="collective"'),
        ("BareExcept", "training_step went on after the model call on stage 0 of 2: a bare `except:`"),
        ("NoLoss", "training_step returned no loss"),
        ("ReadsTrainerAfterwards", "strategy.barrier was called inside training_step while a pipeline schedule runs"),
        ("NeverCalls", "training_step ended on stage . of 2 without calling the pipelined model"),
        ("BarrierBefore", "strategy.barrier was called inside training_step while a pipeline schedule runs"),
        ("HandsOnTwo", "a stage hands tuple to the next; it must hand a tensor or a dict of tensors"),
    ],
)
def test_what_a_schedule_cannot_do_is_refused_by_the_stage_that_sees_it(name: str, message: str) -> None:
    with pytest.raises(RankFailed, match=f"(?s){message}"):
        run_on_ranks(2, fit_named, name, init=False)


def fit_named(name: str) -> None:
    fit((globals().get(name) or getattr(modules, name))())


# --- refusals that every rank sees: one run for all -------------------------------------------------------------------


class TwoModels(Small):
    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = PipelineModule.from_modules(dict(modules.chain().named_children()))
            self.other = PipelineModule.from_modules(dict(modules.chain().named_children()))


class NoChain(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8)


class ShortChain(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8))


class OtherDataPerRank(L.LightningDataModule):
    """What goes wrong where a loader shuffles with a seed of its own on every rank."""

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        generator = torch.Generator().manual_seed(self.trainer.global_rank)
        rows = torch.randn(8, modules.WIDTH, generator=generator)
        classes, weights = torch.zeros(8, dtype=torch.long), torch.ones(8)
        return DataLoader(TensorDataset(rows, classes, weights), batch_size=4)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def refused(run: Callable[[], Any]) -> str:
    try:
        run()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def refusals() -> dict[str, str]:
    quiet: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0}
    return {
        "two models": refused(lambda: fit(TwoModels())),
        "no chain": refused(lambda: fit(NoChain())),
        "short chain": refused(lambda: fit(ShortChain())),
        "other data": refused(lambda: make_trainer(PP2, **quiet).fit(Small(), OtherDataPerRank())),
        "batch size": refused(
            lambda: make_trainer(Layout(world=2, pp=2, microbatches=3), **quiet).fit(Small(), Data(batch=8))
        ),
        "outside": refused(called_outside),
    }


def called_outside() -> None:
    module = modules.OwnPipeline()
    fit(module)
    module.net(torch.zeros(2, 8, dtype=torch.float64))


REFUSALS = {
    "two models": r'holds 2 pipelined models \(net, other\); a schedule runs one; use PipelineConfig\(mode="collective',
    "no chain": "NoChain cannot be pipelined over 2 stages.*nn.Sequential of at least 2 children",
    "short chain": "ShortChain cannot be pipelined over 2 stages",
    "other data": r"ranks of one model replica got different batches: \[[01]\] / \[[01]\]",
    "batch size": r"ConfigurationError.*batch_size \(8, per data-parallel rank\) must be a multiple of "
    r"num_microbatches \(3\); use batch_size 6 or 9, or num_microbatches 1, 2, 4, 8",
    "outside": "this model holds stage . of 2 and was called outside of Trainer.fit",
}


def test_what_every_rank_can_see_is_refused_on_every_rank() -> None:
    for found in run_on_ranks(2, refusals, init=False, timeout=90):
        for name, pattern in REFUSALS.items():
            with pytest.raises(Exception, match=f"(?s){pattern}"):
                raise RuntimeError(found[name])


# --- what a loss is a mean over ---------------------------------------------------------------------------------------


class TokenMean(PipelineModule):
    """A model that computes its own loss and says over how many rows."""

    def __init__(self) -> None:
        super().__init__([Part(name="layer", build=partial(nn.Linear, modules.WIDTH, modules.NUM_CLASSES), cost=1.0)])

    def forward(self, inputs: Tensor, classes: Tensor, weights: Tensor) -> Tensor:
        self.loss_weight = weights.sum()
        losses = functional.cross_entropy(self.layer(inputs), classes, reduction="none")
        return (losses * weights).sum() / weights.sum().clamp(min=1)


class OneOfTwoLosses(Small):
    """Two models that know what their losses are means over, in one step."""

    def __init__(self, says: bool) -> None:
        super().__init__()
        self.says = says
        self.first, self.second = TokenMean(), TokenMean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.first(*batch) + self.second(batch[0], batch[1], torch.ones_like(batch[2]))
        return {"loss": loss, "loss_weight": len(batch[0])} if self.says else loss


def two_losses() -> list[str]:
    layout = Layout(world=2)
    return [refused(partial(fit, OneOfTwoLosses(says=says), layout)) for says in (False, True)]


def test_two_losses_with_weights_of_their_own_must_be_distinguished() -> None:
    for silent, shown in run_on_ranks(2, two_losses, init=False):
        assert "2 models computed losses in one step" in silent and '"loss_weight": number of' in silent
        assert shown == "not refused"


def test_faults_of_sizes_and_batches_are_reported_before_a_process_starts() -> None:
    trainer = make_trainer(Layout(world=2, pp=2, tp=2, microbatches=0))
    with pytest.raises(ConfigurationError) as error:
        trainer.fit(Small(), Data())
    shown = str(error.value)
    assert "world size (2) must be a multiple of pipeline x context x tensor parallel size (4)" in shown
    assert "num_microbatches (0)" in shown


@pytest.mark.parametrize(
    ("module", "collective", "shown"),
    [
        (Small, True, ['PipelineConfig(mode="collective") where', 'or PipelineConfig(mode="auto")']),
        (modules.Manual, False, ["the manual optimization of Manual where", "or automatic_optimization=True"]),
        (
            modules.Manual,
            True,
            [
                'PipelineConfig(mode="collective") and the manual optimization of Manual where',
                'or PipelineConfig(mode="auto") and automatic_optimization=True',
            ],
        ),
    ],
)
def test_microbatches_that_nothing_would_cut_are_reported_with_all_other_faults(
    module: type[Small], collective: bool, shown: list[str]
) -> None:
    trainer = make_trainer(Layout(world=3, tp=2, microbatches=4, collective=collective))
    with pytest.raises(ConfigurationError) as error:
        trainer.fit(module(), Data())
    for sentence in (
        "has 2 faults",
        "world size (3)",
        "num_microbatches (4) must be 1 with",
        "num_microbatches=1",
        *shown,
    ):
        assert sentence in str(error.value)


def test_microbatches_are_refused_only_where_a_training_would_ignore_them() -> None:
    uncut = {"world": 1, "microbatches": 4, "collective": True}
    fit(modules.Manual(), Layout(collective=True))
    make_trainer(Layout(**uncut)).validate(Small(), Data(), verbose=False)
    with pytest.raises(ConfigurationError, match=r"num_microbatches \(4\)"):
        fit(Small(), Layout(**uncut))
    # Stages cut each of their calls.
    run_on_ranks(2, fit, modules.Manual(), Layout(world=2, pp=2, microbatches=2), init=False)
