"""Every hook of the LightningModule, of a Callback and of a LightningDataModule runs when it runs on one device, with
the same counters, and finds what it finds there."""

import inspect
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from tests.harness.sample import diagonal
from tests.trainer import modules
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.lightning_api.test_ledger import LAYOUTS, Case, Record, discrepancies
from tests.trainer.modules import Data

Line = tuple[Any, ...]

# A deprecated hook raises when it is overridden, and data is prepared by one process of a machine.
NOT_RECORDED = {"configure_sharded_model", "prepare_data"}
DATA_HOOKS = ["setup", "teardown", "state_dict", "load_state_dict", "train_dataloader", "val_dataloader"]
LOADERS = {"train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"}
STEPS_AND_CONFIGURATION = [
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
    "configure_optimizers",
    "configure_callbacks",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "backward",
]


def hooks_of(*kinds: type) -> list[str]:
    names = {name for kind in kinds for name, value in vars(kind).items() if inspect.isfunction(value)}
    return sorted(name for name in names if not name.startswith("_") and name not in NOT_RECORDED)


def recorded(kind: type, who: str, names: list[str], lines: list[Line]) -> type:
    """A subclass of `kind` whose methods of these names write a line before they do what they do."""

    def wrap(name: str) -> Any:
        inner = getattr(kind, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            trainer = args[0] if args and isinstance(args[0], L.Trainer) else getattr(self, "_trainer", None)
            if trainer is None and isinstance(self, L.LightningDataModule):
                trainer = self.trainer
            lines.append((who, name, *state_of(trainer), *plain(args), *plain(tuple(sorted(kwargs.items())))))
            return inner(self, *args, **kwargs)

        method.__name__ = name
        return method

    return type(f"Recorded{kind.__name__}", (kind,), {name: wrap(name) for name in names})


def state_of(trainer: L.Trainer | None) -> Line:
    if trainer is None:
        return ("no trainer",)
    stage = trainer.state.stage.value if trainer.state.stage is not None else "no stage"
    return (str(trainer.state.fn), stage, trainer.current_epoch, trainer.global_step)


def plain(values: tuple[Any, ...]) -> Line:
    """The arguments that a hook got: small values as they are, of the others what they are."""
    return tuple(
        value if isinstance(value, (int, float, str)) or value is None else shape_of(value) for value in values
    )


def shape_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor {value.dim()}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {[shape_of(entry) for entry in value]}"
    return "dict" if isinstance(value, dict) else "object"


class Full(modules.Scheduled):
    """What it records has something to do: it accumulates, clips, schedules and saves."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        super().validation_step(batch, batch_idx)
        return {"y": self.logits(batch[0])}


class FullOfParts(modules.OwnPipeline, Full):
    """The same with a PipelineModule of named parts."""


class Finds(L.Callback):
    """Writes what hooks between a backward and the step find: the values of losses, gradients and weights.

    Within a window of accumulated batches ranks hold parts, summed after the window's last backward.
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, float]] = []

    def _write(self, name: str, value: Any) -> None:
        self.found.append((name, float(value)))

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self._write("before zero_grad", gradient(module))

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self._write("before backward", loss)
        if trainer.fit_loop.batch_idx % 2 == 0:
            self._write("zeroed", gradient(module))

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if trainer.fit_loop.batch_idx % 2:
            self._write("after backward", gradient(module))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self._write("before step", gradient(module))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._write("outputs", outputs["loss"])
        self._write("weight", module.after.weight.abs().sum())


def gradient(module: Any) -> float:
    """Of a layer that every rank holds, so that all can be compared; -1 where there is none."""
    grad = module.after.weight.grad
    return -1.0 if grad is None else float(grad.abs().sum())


def every_hook(layout: Layout, folder: Path, kind: type, **options: Any) -> Record:
    lines: list[Line] = []
    # With a data module Lightning does not ask the module for loaders, but it looks whether it has some.
    module_hooks = [name for name in hooks_of(ModelHooks, DataHooks, CheckpointHooks) if name not in LOADERS]
    module_hooks += STEPS_AND_CONFIGURATION
    module = recorded(kind, "module", module_hooks, lines)()
    callback = recorded(L.Callback, "callback", hooks_of(L.Callback), lines)()
    data = recorded(Data, "data", sorted({*hooks_of(DataHooks), *DATA_HOOKS}), lines)()
    finds = Finds()
    settings: dict[str, Any] = {"num_sanity_val_steps": 1, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    trainer = make_trainer(layout, callbacks=[callback, finds], **(settings | options))
    trainer.fit(module, data)
    trainer.save_checkpoint(folder / "a.ckpt")
    trainer.validate(module, data, verbose=False)
    trainer.test(module, data, verbose=False)
    trainer.predict(module, data)
    # Lightning would round the checkpoint to a module's float32 before it converts the module.
    again = recorded(kind, "module", module_hooks, lines)().double()
    for part in getattr(again, "parts", {}).values():
        part.double()
    longer = make_trainer(layout, callbacks=[callback, finds], **(settings | options | {"max_epochs": 3}))
    longer.fit(again, data, ckpt_path=folder / "a.ckpt")
    return {"lines": comparable(lines, layout), "found": finds.found}


def comparable(lines: list[Line], layout: Layout) -> list[Line]:
    """The lines without what a schedule of several microbatches or stages is documented to do its own way: it enters
    the step and the module's `backward` once per microbatch. The hooks around both stay."""
    kept: list[Line] = []
    for line in lines:
        # A microbatch is what the step gets; the order of stages decides who calls `backward`.
        if line[1] == "backward":
            continue
        if line[1] == "training_step" and kept and kept[-1][:3] == line[:3] and kept[-1] == line:
            continue
        kept.append(line)
    return kept


def backwards(layout: Layout, _: Path) -> Record:
    """All lines, `backward` too: where a step is entered once on every rank nothing may be missing."""
    lines: list[Line] = []
    module = recorded(Full, "module", [*hooks_of(ModelHooks), *STEPS_AND_CONFIGURATION], lines)()
    make_trainer(layout, max_epochs=1, accumulate_grad_batches=2).fit(module, Data())
    return {"lines": lines}


CASES: dict[str, Case] = {
    "a chain": lambda layout, folder: every_hook(layout, folder, Full),
    "named parts": lambda layout, folder: every_hook(layout, folder, FullOfParts),
    "with backward": backwards,
}
CHOSEN = ("one", "tp2", "pp2", "pp2 collective", "dp2")
ALIKE = ("one", "tp2", "pp2 collective", "dp2")


def names_for(layout: str) -> list[str]:
    return [case for case in CASES if case != "with backward" or layout in ALIKE]


CELLS = diagonal([(layout, case) for layout in CHOSEN for case in names_for(layout)])


@pytest.mark.matrix
@pytest.mark.parametrize(("layout", "case"), CELLS)
def test_hooks_run_in_the_order_of_one_device_and_find_the_same(layout: str, case: str) -> None:
    names = [case for name, case in CELLS if name == layout]
    assert discrepancies(__name__, names, LAYOUTS[layout], case, list(CASES)) == []
