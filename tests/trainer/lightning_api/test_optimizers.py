"""Optimizers and schedulers in every shape that Lightning takes step as they step on one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.nn import functional

from tests.harness.sample import diagonal
from tests.trainer.layouts import PLAIN, Layout, make_trainer
from tests.trainer.lightning_api.test_ledger import LAYOUTS, Case, Record, discrepancies, fit, ran
from tests.trainer.modules import NUM_CLASSES, Data, Parallel, Scheduled, Small

# --- manual optimization ----------------------------------------------------------------------------------------------


class Adversaries(Small):
    """Two optimizers in turn: one for the model, one for a critic; each has a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(NUM_CLASSES, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(first)
        loss = functional.cross_entropy(self.logits(batch[0]), batch[1])
        loss = loss + 0.1 * self.critic(self.logits(batch[0])).mean()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)

        self.toggle_optimizer(second)
        judged = functional.softplus(-self.critic(self.logits(batch[0]).detach())).mean()
        self.manual_backward(judged)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
            scheduler.step()
        self.log_dict({"train_loss": loss, "judged": judged}, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        own = [*self.before.parameters(), *self.net.parameters(), *self.after.parameters()]
        first = torch.optim.SGD(own, lr=0.2, momentum=0.9)
        second = torch.optim.SGD(self.critic.parameters(), lr=0.1)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (first, second)]


class ManualAccumulation(Small):
    """Steps after every second batch, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = functional.cross_entropy(self.logits(batch[0]), batch[1]) / 2
        self.manual_backward(loss)
        if batch_idx % 2:
            optimizer.step()  # type: ignore[union-attr]
            optimizer.zero_grad()  # type: ignore[union-attr]


class ManualClosure(Small):
    """Gives its optimizer a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = functional.cross_entropy(self.logits(batch[0]), batch[1])
            optimizer.zero_grad()  # type: ignore[union-attr]
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)  # type: ignore[union-attr]


class ManualTorch(Small):
    """Steps torch's optimizer itself, past Lightning's."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(functional.cross_entropy(self.logits(batch[0]), batch[1]))
        optimizer.step()


# --- overridden hooks of the optimizer --------------------------------------------------------------------------------


class ZeroesSeldom(Small):
    """Keeps its gradients from batch to batch, and zeroes them at every second one."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad(set_to_none=False)


class OwnStep(Small):
    """Warms its rate up in `optimizer_step`, leaves a step out, clips by itself and changes gradients in hooks."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (self.trainer.global_step + 1)
        if batch_idx == 1:
            # The closure alone: forward and backward with no step.
            optimizer_closure()
            return
        optimizer.step(closure=optimizer_closure)

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if self.trainer.global_step % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class ClosureFirst(Small):
    """Runs the closure by itself, and then steps without one."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step()


class TorchStep(Small):
    """Hands the closure to torch's optimizer, past Lightning's."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.optimizer.step(closure=optimizer_closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)


class OwnBackward(Small):
    """Differentiates twice the loss it returns."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(2 * loss, *args, **kwargs)


class Groups(Small):
    """Groups of parameters with rates of their own, of which a stage may hold none."""

    def configure_optimizers(self) -> Any:
        decayed = [p for n, p in self.named_parameters() if n.endswith("weight") and n.startswith("net.0")]
        ids = {id(p) for p in decayed}
        rest = [p for p in self.parameters() if id(p) not in ids]
        return torch.optim.SGD([{"params": decayed, "lr": 0.5, "weight_decay": 0.1}, {"params": rest}], lr=0.1)


class NoOptimizer(Small):
    def configure_optimizers(self) -> None:
        return None


class With(Small):
    """With an optimizer by name; each treats a parameter by itself."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.name, self.options = name, options

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.name)(self.parameters(), **self.options)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    # The gradient of a bias before a norm is zero but for rounding, which Adam would scale up; hence `eps`.
    "AdamW": {"lr": 0.01, "eps": 1e-3},
    "Adagrad": {"lr": 0.01, "eps": 1e-3},
    "RMSprop": {"lr": 0.01, "eps": 1e-3},
    "Adafactor": {"lr": 0.01, "eps": (1e-3, 1e-3)},
}

# --- schedulers -------------------------------------------------------------------------------------------------------


class OneCycle(Small):
    """Asks for the number of steps to come."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Plateau(Small):
    """Lowers its rate by what the validation says, or the training."""

    def __init__(self, monitor: str, interval: str = "epoch", frequency: int = 1) -> None:
        super().__init__()
        self.monitor, self.interval, self.frequency = monitor, interval, frequency

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        # A threshold that no improvement reaches: the rate falls at each look.
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=9.0, threshold_mode="abs"
        )
        rate = {"scheduler": scheduler, "monitor": self.monitor, "interval": self.interval, "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": rate}

    def on_train_epoch_end(self) -> None:
        self.log("rate", float(self.trainer.optimizers[0].param_groups[0]["lr"]))


class OwnSchedule(Scheduled):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.9


class Newton(Small):
    """Runs its closure as often as it likes, and looks at all parameters at once."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, history_size=3, line_search_fn="strong_wolfe")


class Factored(Parallel):
    """Keeps one number for each row and column of a weight, and so needs whole rows and columns."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.01)


class Orthogonal(Parallel):
    """Makes the step of each matrix orthogonal, and so needs the whole matrix."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([p for n, p in self.named_parameters() if n.endswith("weight")], lr=0.01)


# --- the tuner --------------------------------------------------------------------------------------------------------


class Rated(Small):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def finds_rate(layout: Layout, folder: Path) -> Record:
    module = Rated()
    trainer = make_trainer(layout, max_epochs=9, default_root_dir=folder)
    found = Tuner(trainer).lr_find(module, datamodule=Data(), num_training=24, min_lr=1e-3, max_lr=0.5)
    assert found is not None and module.lr != 0.1
    left = [path.name for path in folder.glob("*")] if folder.exists() else []
    results = {name: [float(entry) for entry in entries] for name, entries in found.results.items()}
    return {"results": results, "suggestion": found.suggestion(), "taken": module.lr, "left": left} | fit(
        layout, module
    )


CASES: dict[str, Case] = {
    "two optimizers": lambda layout, _: fit(layout, Adversaries()),
    "accumulation by hand": lambda layout, _: fit(layout, ManualAccumulation()),
    "a closure": lambda layout, _: fit(layout, ManualClosure()),
    "gradients kept from batch to batch": lambda layout, _: fit(layout, ZeroesSeldom()),
    "hooks of its own": lambda layout, _: fit(layout, OwnStep()),
    "the closure first": lambda layout, _: fit(layout, ClosureFirst()),
    "torch's optimizer": lambda layout, _: fit(layout, TorchStep()),
    "torch's optimizer, by hand": lambda layout, _: fit(layout, ManualTorch()),
    "a backward of its own": lambda layout, _: fit(layout, OwnBackward()),
    "groups": lambda layout, _: fit(layout, Groups()),
    "no optimizer": lambda layout, _: fit(layout, NoOptimizer(), max_epochs=1),
    **{
        name: lambda layout, _, n=name: fit(layout, With(n, **OPTIMIZERS[n]))  # type: ignore[misc]
        for name in OPTIMIZERS
    },
    "one cycle": lambda layout, _: fit(layout, OneCycle(), accumulate_grad_batches=2),
    "plateau by validation": lambda layout, _: fit(layout, Plateau("val_loss")),
    "plateau by training steps": lambda layout, _: fit(layout, Plateau("train_loss", "step", 2)),
    "a schedule of its own": lambda layout, _: fit(layout, OwnSchedule()),
    "accumulation that changes": lambda layout, _: fit(
        layout, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})], max_epochs=3
    ),
    "a search for the rate": finds_rate,
    "newton": lambda layout, _: fit(layout, Newton(), max_epochs=1),
    "newton, accumulating": lambda layout, _: fit(layout, Newton(), max_epochs=1, accumulate_grad_batches=2),
    "factored": lambda layout, _: fit(layout, Factored(), max_epochs=1),
    "orthogonal": lambda layout, _: fit(layout, Orthogonal(), max_epochs=1),
}


# What needs more than a rank holds: where ranks hold parts it must be refused.
NEEDS_WHOLE_MODELS = {"newton": "LBFGS looks at all parameters at once", "newton, accumulating": "LBFGS looks at all"}
OF_CUT_MATRICES = {"factored", "orthogonal"}


CHOSEN = ("tp2", "pp2", "dp2")


def names_for(layout: str) -> list[str]:
    chosen = LAYOUTS[layout]
    without: set[str] = set()
    if chosen.pp > 1:
        # The modules with cut matrices hold no chain.
        without |= set(NEEDS_WHOLE_MODELS) | OF_CUT_MATRICES
    if chosen.tp > 1:
        without |= set(NEEDS_WHOLE_MODELS)
    return [case for case in CASES if case not in without]


CELLS = diagonal([(layout, case) for layout in CHOSEN for case in names_for(layout)])


@pytest.mark.matrix
@pytest.mark.parametrize(("layout", "case"), CELLS)
def test_an_optimizer_steps_as_on_one_device(layout: str, case: str) -> None:
    names = [name for chosen, name in CELLS if chosen == layout]
    assert discrepancies(__name__, names, LAYOUTS[layout], case, list(CASES)) == []


def test_an_optimizer_that_needs_more_than_a_rank_holds_is_refused() -> None:
    for found in ran(__name__, list(NEEDS_WHOLE_MODELS), LAYOUTS["pp2"]):
        for case, message in NEEDS_WHOLE_MODELS.items():
            assert message in found[case]["raised"]


class Answers(torch.optim.SGD):
    """Returns something of its own from its step."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return 5.0


class KeepsAnswers(ManualClosure):
    """Steps by hand, with a closure and without, and keeps what each step returned."""

    def __init__(self, kind: type[torch.optim.SGD]) -> None:
        super().__init__()
        self.kind, self.kept = kind, list[Any]()

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            loss = functional.cross_entropy(self.logits(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        self.kept += [float(torch.as_tensor(optimizer.step(closure=closure)).detach()), optimizer.step()]


@pytest.mark.parametrize("kind", [torch.optim.SGD, Answers])
def test_a_step_by_hand_returns_what_it_returns_on_one_device(kind: type[torch.optim.SGD]) -> None:
    kept = []
    for layout in (PLAIN, Layout(world=1)):
        torch.manual_seed(0)
        module = KeepsAnswers(kind)
        make_trainer(layout, max_steps=2).fit(module, Data())
        kept.append(module.kept)
    assert kept[0] == kept[1]
    assert kept[0][1] == (5.0 if kind is Answers else None)
