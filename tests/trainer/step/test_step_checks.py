"""Steps that one device allows and parts of a model or a batch do not: right, told once, or refused with a way out."""

import warnings
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import grad_norm as named_norms
from torch import Tensor, nn
from torch.nn import functional

from lightning_megatron import grad_norm, weight_norm
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.trainer.step import step_checks
from tests.harness.ranks import RankFailed, run_on_ranks
from tests.trainer.fits import Case, Trace, difference
from tests.trainer.layouts import PLAIN, Layout, make_trainer
from tests.trainer.modules import Data, Small

TP2, DP2 = Layout(world=2, tp=2), Layout(world=2)
PP2 = Layout(world=2, pp=2, microbatches=2)
COLLECTIVE = Layout(world=2, pp=2, microbatches=2, collective=True)
ZERO = Layout(world=2, optimizer=OptimizerConfig(kind="distributed"))
DP2_M2 = Layout(world=2, microbatches=2)


class Penalised(Small):
    """A term over its own parameters in the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss + 0.01 * torch.stack([p.square().sum() for p in self.parameters()]).sum()


class PenalisedByModules(Small):
    """The same term, over what its layers hold, of which the last stage has one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        weights = [layer.weight for layer in self.modules() if isinstance(layer, nn.Linear)]
        return loss + 0.01 * torch.stack([weight.square().sum() for weight in weights]).sum()


class PenalisedFirst(Small):
    """A term over a weight of the first stage."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss + 0.01 * (self.net[0].weight - torch.eye(8).double()).square().sum()  # type: ignore[union-attr,operator]


class FailsBefore(Small):
    """A mistake that has nothing to do with stages."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise TypeError("no luck")


class Held:
    """An output that no library takes apart."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class HandsAnObject(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return Held(super().forward(x))


class OutputInAnObject(Small):
    """The last layer of the chain hands the tensor in an object."""

    def __init__(self) -> None:
        super().__init__()
        assert isinstance(self.net, nn.Sequential)
        last = HandsAnObject(8, 8)
        last.load_state_dict(self.net[6].state_dict())
        self.net[6] = last

    def logits(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.after(self.cut(self.net(self.before(inputs)).hidden))
        return output


class Drawn(Small):
    """A random number of each rank's own in the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss * (1 + self.global_rank)


class Looks(Small):
    """Goes over its parameters and differentiates nothing by that."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert next(self.parameters()).dtype == torch.float64
        with torch.no_grad():
            self.log("size", float(sum(p.numel() for p in self.parameters())))
        return super().training_step(batch, batch_idx)  # type: ignore[no-any-return]


class Hooked(Small):
    """Clips each gradient by itself, where autograd has it."""

    def __init__(self) -> None:
        super().__init__()
        self.before.weight.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))


class HooksOutputs(Small):
    """Clips the gradients of its outputs, number by number."""

    def logits(self, inputs: Tensor) -> Tensor:
        logits = super().logits(inputs)
        if logits.requires_grad:
            logits.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
        return logits


class HooksBackward(Small):
    """Looks at the gradients of a layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.after.register_full_backward_hook(lambda module, given, gotten: None)


class Manual(Small):
    """Manual optimization, by a loss that counts each row alike: halves of terms, as of a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def loss(self, batch: Any) -> Tensor:
        """The mean of a loss of torch's and of one by hand."""
        logits = self.logits(batch[0])
        return (functional.cross_entropy(logits, batch[1]) + logits.square().mean()) / 2

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class ManualSum(Manual):
    """The sum over the rows."""

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.logits(batch[0]), batch[1], reduction="sum")


class ManualMasked(Manual):
    """The mean over rows of some classes."""

    def loss(self, batch: Any) -> Tensor:
        losses, mask = functional.cross_entropy(self.logits(batch[0]), batch[1], reduction="none"), batch[1] > 1
        return (losses * mask).sum() / mask.sum().clamp(min=1)


class GradientByInput(Small):
    """Asks for a gradient of the output by the input."""

    create_graph = False

    def logits(self, inputs: Tensor) -> Tensor:
        # Layers that are cut over tp have no gradient of a gradient.
        output: Tensor = self.after(self.net(self.before(inputs)))
        return output

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = batch[0].requires_grad_()
        loss = functional.cross_entropy(self.logits(inputs), batch[1])
        [slope] = torch.autograd.grad(loss, inputs, retain_graph=True, create_graph=self.create_graph)
        return loss + (slope.square().sum() if self.create_graph else 0.0)


class Penalty(GradientByInput):
    """Has the size of that gradient in the loss."""

    create_graph = True


class Tied(Small):
    """A layer of the chain once more, outside of it."""

    def __init__(self) -> None:
        super().__init__()
        assert isinstance(self.net, nn.Sequential)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.net[2].weight  # type: ignore[assignment]


class TiedBefore(Small):
    """A layer of the chain once more, declared before it."""

    def __init__(self) -> None:
        super().__init__()
        self.again, net = nn.Linear(8, 8), self.net
        del self.net
        self.net = net
        assert isinstance(net, nn.Sequential)
        net[2].weight = self.again.weight


class SumByHand(Small):
    """Says under manual optimization that its loss is a sum."""

    automatic_optimization = False  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        return {"loss": loss, "loss_reduction": "sum"}


class AsksInSchedule(Small):
    """Takes a norm of all ranks where the last stage alone comes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        weight_norm(self)
        return loss


class Normed(Small):
    """A batch norm, and a buffer of its own that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("average", torch.zeros(()))

    def logits(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.average.mul_(0.9).add_(0.1 * inputs.mean().detach())
        return super().logits(inputs) + self.norm(self.before(inputs)).mean()


class FirstNorm(Small):
    """A batch norm at the beginning of the chain, whose stage is not that of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        assert isinstance(self.net, nn.Sequential)
        self.net[0] = nn.BatchNorm1d(8)


class More(Small):
    """Returns more than its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "accuracy": loss.detach() * 2, "rows": float(len(batch[0])), "classes": batch[1]}


class OwnBackward(Small):
    """Runs a backward for the gradient of its input, which leaves gradients of weights, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        functional.cross_entropy(self.logits(batch[0]), batch[1]).backward()
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss


class ManualOwnBackward(Manual):
    """Leaves out the strategy's backward."""

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


def norm_of_gradients(module: nn.Module) -> float:
    return float(sum(p.grad.norm() for p in module.parameters() if p.grad is not None))


class ReadsLate(Small):
    """Keeps norms of gradients when they have been stepped by, of a hook of its optimizer's too."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[list[float]] = []

    def norms(self) -> list[float]:
        return [float(norm) for norm in named_norms(self, 2).values()]

    def on_train_batch_end(self, *_: Any) -> None:
        self.kept.append(self.norms())

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: self.kept.append([norm_of_gradients(self)]))
        return optimizer


class ReadsBeforeZero(ReadsLate):
    """Keeps norms before they are zeroed, and none before."""

    def on_train_batch_end(self, *_: Any) -> None:
        grad_norm(self)

    def on_before_zero_grad(self, *_: Any) -> None:
        self.kept.append(self.norms())

    configure_optimizers = Small.configure_optimizers


class ReadsParts(Small):
    """Looks at the gradients of each accumulated batch."""

    def on_after_backward(self) -> None:
        norm_of_gradients(self)


def told(layout: Layout, kind: type[L.LightningModule], num_accumulated: int = 1) -> list[str]:
    """What this package warns of in a fit."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        options = {"accumulate_grad_batches": num_accumulated}
        make_trainer(layout, max_epochs=2, limit_val_batches=0, **options).fit(kind(), Data(24))
    names = ("batch norms", "training_step", "the loss of", "hooks on", "a loss that", "Reads")
    return sorted(str(one.message) for one in found if str(one.message).startswith(names))


OWN_BACKWARD = (
    "training_step ran a backward by itself, or a hook, as loss.backward() does, which made a gradient of after.bias: "
)
ON_ONE_STAGE = "their weights have no values (device meta): it may use what the call returns"
MANUAL = "a loss that {} gives to manual_backward is taken for a mean over the rows of its batch, of which 2 data-"
ROWS = "the loss of {}.training_step is taken for a mean over the rows of its batch, of which a step has 2 parts"


@pytest.mark.parametrize(
    ("layout", "kind", "shown"),
    [
        (TP2, Penalised, "computed different losses (rank 0: "),
        (PP2, Penalised, "training_step went over all parameters of Penalised"),
        (PP2, PenalisedByModules, "the loss has a term over 6.weight, a weight of the pipelined model"),
        (PP2, PenalisedFirst, ON_ONE_STAGE),
        (COLLECTIVE, Penalised, "computed different losses (rank 0: "),
        (TP2, Drawn, "computed different losses (rank 0: "),
        (PP2, GradientByInput, "asked for a gradient through a pipelined model, by its input"),
        (PP2, Penalty, "asked for a gradient through a pipelined model, by its input"),
        (COLLECTIVE, GradientByInput, "a second backward through the stages of a pipelined model"),
        (COLLECTIVE, Penalty, "a gradient of a gradient through the stages of a pipelined model"),
        (PP2, Tied, "again.weight (net.2.weight) of Tied is a weight of its pipelined model"),
        (PP2, TiedBefore, "again.weight (net.2.weight) of TiedBefore is a weight of its pipelined model"),
        (DP2, SumByHand, 'returned loss_reduction ("sum") under manual optimization'),
        (PP2, AsksInSchedule, "a norm of weights was called inside training_step while a pipeline schedule runs"),
        (COLLECTIVE, Tied, "again.weight (net.2.weight) of Tied is a weight of its pipelined model"),
        (ZERO, OwnBackward, OWN_BACKWARD),
        (DP2_M2, OwnBackward, OWN_BACKWARD),
        (DP2, ManualOwnBackward, OWN_BACKWARD),
        (ZERO, ManualOwnBackward, OWN_BACKWARD),
    ],
)
def test_what_would_be_wrong_is_refused(layout: Layout, kind: type[L.LightningModule], shown: str) -> None:
    with pytest.raises(RankFailed) as failed:
        run_on_ranks(2, told, layout, kind, init=False)
    assert shown in str(failed.value)


def test_an_error_before_the_model_s_call_is_left_as_it_is() -> None:
    with pytest.raises(RankFailed, match="no luck") as failed:
        run_on_ranks(2, told, PP2, FailsBefore, init=False)
    assert ON_ONE_STAGE not in str(failed.value)


OUTPUTS = "training_step sets hooks on the gradients of what it computed: they run once for each microbatch"


@pytest.mark.parametrize(
    ("layout", "kind", "shown"),
    [
        # The mean of `cross_entropy` tells what it counts.
        (PP2, Looks, []),
        (DP2, Looks, []),
        (TP2, Looks, []),
        (DP2, GradientByInput, [ROWS.format("GradientByInput")]),
        (DP2, Penalty, [ROWS.format("Penalty")]),
        (
            DP2,
            Normed,
            [
                "batch norms (norm) normalise each microbatch of each data-parallel rank",
                "training_step moves average",
            ],
        ),
        (TP2, Normed, []),
        (PP2, FirstNorm, ["batch norms (net.0) normalise each microbatch of each data-parallel rank"]),
        (COLLECTIVE, FirstNorm, ["batch norms (net.0) normalise each microbatch of each data-parallel rank"]),
        (PP2, More, ["training_step returned 'classes' beside the loss"]),
        (DP2, Hooked, ["hooks on the gradients of before.weight run once for each microbatch"]),
        (TP2, Hooked, []),
        (PP2, HooksOutputs, [OUTPUTS]),
        (DP2, HooksOutputs, [OUTPUTS]),
        (TP2, HooksOutputs, []),
        (PP2, HooksBackward, ["hooks on the gradients of after run once for each microbatch"]),
        (DP2, Manual, []),
        (TP2, ManualSum, []),
        (DP2, ManualSum, [MANUAL.format("ManualSum")]),
        (DP2, ManualMasked, [MANUAL.format("ManualMasked")]),
    ],
)
def test_what_may_be_meant_is_told_once(layout: Layout, kind: type[L.LightningModule], shown: list[str]) -> None:
    *silent, found = sorted(run_on_ranks(2, told, layout, kind, init=False), key=len)
    assert silent == [[]]
    assert len(found) == len(shown), found
    assert all(text.startswith(start) for text, start in zip(found, shown, strict=True)), found


class Summed(Small):
    """A loss that is a sum, and says so."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = functional.cross_entropy(self.logits(batch[0]), batch[1], reduction="none")
        loss = losses.sum() / 50
        self.log_dict(
            {"train_loss": loss, "detached": loss.detach(), "mean": losses.mean()}, on_step=True, on_epoch=True
        )
        return {"loss": loss, "loss_reduction": "sum", "largest": losses.detach().mean()}


def held(layout: Layout) -> Trace:
    # A validation could not join what the microbatches hand.
    return Case(module=OutputInAnObject, trainer={"limit_val_batches": 0}).run(layout)


def test_an_output_that_cannot_be_taken_apart_is_no_term_over_weights() -> None:
    [wanted] = run_on_ranks(1, held, PLAIN, init=False)
    for trace in run_on_ranks(2, held, PP2, init=False):
        assert difference(trace, wanted) < 1e-12


def summed(layout: Layout) -> Trace:
    return Case(module=Summed).run(layout)


@pytest.mark.parametrize("layout", [DP2, PP2, COLLECTIVE, Layout(world=4, pp=2, microbatches=2)], ids=str)
def test_a_sum_is_that_of_one_device(layout: Layout) -> None:
    [wanted] = run_on_ranks(1, summed, PLAIN, init=False)
    for trace in run_on_ranks(layout.world, summed, layout, init=False):
        assert difference(trace, wanted) < 1e-12


class SaysTwice(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "loss_weight": 3, "loss_reduction": "sum"}


class SaysOther(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "loss_reduction": "total"}


def test_a_loss_is_said_in_one_way() -> None:
    with pytest.raises(ValueError, match=r"loss_reduction \('total'\) of training_step must be 'mean' or 'sum'"):
        make_trainer(Layout(microbatches=2), max_epochs=1).fit(SaysOther(), Data())
    with pytest.raises(ValueError, match=r"both loss_reduction \('sum'\) and loss_weight"):
        make_trainer(Layout(microbatches=2), max_epochs=1).fit(SaysTwice(), Data())


def own_backward(layout: Layout) -> Trace:
    return Case(module=OwnBackward).run(layout)


@pytest.mark.parametrize("layout", [DP2, TP2])
def test_a_backward_of_its_own_is_that_of_one_device_where_weights_are_stepped_themselves(layout: Layout) -> None:
    [wanted] = run_on_ranks(1, own_backward, PLAIN, init=False)
    for trace in run_on_ranks(2, own_backward, layout, init=False):
        assert difference(trace, wanted) < 1e-12


def kept(layout: Layout, kind: type[ReadsLate]) -> list[list[float]]:
    module = kind()
    make_trainer(layout, max_epochs=2, limit_val_batches=0).fit(module, Data(24))
    return module.kept


@pytest.mark.parametrize("kind", [ReadsLate, ReadsBeforeZero])
def test_gradients_are_seen_after_the_step_as_on_one_device(kind: type[ReadsLate]) -> None:
    [wanted] = run_on_ranks(1, kept, PLAIN, kind, init=False)
    for found in run_on_ranks(2, kept, ZERO, kind, init=False):
        assert len(found) == len(wanted) and found[-1]
        assert all(one == pytest.approx(other, rel=1e-12) for one, other in zip(found, wanted, strict=True))


def test_gradients_that_are_gone_or_parts_are_told_of() -> None:
    [gone], nothing = run_on_ranks(2, told, replace(ZERO, microbatches=2), ReadsBeforeZero, init=False)
    assert gone.startswith("ReadsBeforeZero.on_before_zero_grad reads .grad where it is None")
    [parts], _ = run_on_ranks(2, told, DP2, ReadsParts, 3, init=False)
    assert parts.startswith("ReadsParts.on_after_backward runs after the backward of each accumulated batch")
    silent = [run_on_ranks(2, told, *one, init=False) for one in ((DP2_M2, ReadsBeforeZero), (TP2, ReadsParts, 3))]
    assert [nothing, *silent] == [[], [[], []], [[], []]]


class PenalisedLate(Penalised):
    """Has the term from the third step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        is_late = self.global_step > 1
        return super().training_step(batch, batch_idx) if is_late else Small.training_step(self, batch, batch_idx)


def told_of_late_terms() -> list[str]:
    step_checks.NUM_CHECKED, step_checks._EVERY = 1, 4
    return told(TP2, PenalisedLate)


def test_a_term_that_comes_late_is_found_when_losses_are_looked_at_again() -> None:
    with pytest.raises(RankFailed, match="computed different losses"):
        run_on_ranks(2, told_of_late_terms, init=False)
