"""`ExpertMonitor`: load of the experts and dropped tokens, in loggers and as a picture."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn

from lightning_megatron.metrics.expert_load import (
    LoadHistory,
    numbers_of,
    picture_of,
    write_picture,
)
from lightning_megatron.metrics.figure import matplotlib_faults
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.trainer.config import ConfigurationError


class ExpertMonitor(L.Callback):
    """Logs, under `experts/`, the balance losses, the z-loss, the largest and smallest load and the dropped share.

    Values cover the global batch of an optimizer step and all layers, and are equal on every rank; under other
    strategies a process counts its own tokens only. Skipped steps log nothing. A load of 1 is the mean of its layer;
    losses are before their coefficients.

    The picture, `experts.png`, is the load of each expert over the steps, also written at the end of training and given
    to TensorBoard loggers; it needs the extra `plot`. Of several models each name begins with the model's.
    """

    def __init__(
        self,
        every_n_steps: int = 0,
        per_layer: bool = False,
        per_expert: bool = False,
        picture_every_n_steps: int = 0,
        picture_folder: str = "",
    ) -> None:
        """Raises ValueError for settings that make no sense.

        Args:
            every_n_steps: Optimizer steps between two logs; 0 logs as often as the Trainer's log_every_n_steps.
            per_layer: Whether the numbers of each layer are logged as well as their means.
            per_expert: Whether the share of tokens of each expert is logged.
            picture_every_n_steps: Optimizer steps between two writings of `experts.png`; 0 is never.
            picture_folder: Folder of the picture; empty is where the Trainer logs.
        """
        faults = [
            f"{name} ({value}) must be at least 0"
            for name, value in (("every_n_steps", every_n_steps), ("picture_every_n_steps", picture_every_n_steps))
            if value < 0
        ]
        if picture_folder and not picture_every_n_steps:
            faults.append(f"picture_folder ({picture_folder!r}) needs a picture; set picture_every_n_steps above 0")
        if faults:
            raise ValueError("\n".join(faults))
        self.every_n_steps = every_n_steps
        self.per_layer = per_layer
        self.per_expert = per_expert
        self.picture_every_n_steps = picture_every_n_steps
        self.picture_folder = picture_folder
        # Histories by the name of the model.
        self._histories: dict[str, LoadHistory] = {}
        # Optimizer steps before this batch.
        self._steps_before = 0
        # Step of the last picture.
        self._last_drawn = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        faults = self._faults(trainer, pl_module)
        if faults:
            raise ConfigurationError(faults)
        self._histories = {name: LoadHistory() for name in _models_with_experts(pl_module)}
        self._last_drawn = -1

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._steps_before = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._steps_before:
            return
        # Lightning counts batches that stepped, as its loggers do: with two optimizers global_step goes up by two.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        log_every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        every = self.every_n_steps or log_every
        is_logged = every > 0 and step % every == 0
        is_drawn = self.picture_every_n_steps > 0
        if not (is_logged or is_drawn):
            return
        models = _models_with_experts(pl_module)
        for name, model in models.items():
            reports = model.all_routing_reports()
            numbers = numbers_of(reports, per_layer=self.per_layer, per_expert=self.per_expert)
            if numbers and is_drawn:
                self._histories[name].add(step, reports)
            prefix = f"experts/{name}/" if len(models) > 1 else "experts/"
            for key, value in numbers.items() if is_logged else ():
                pl_module.log(prefix + key, value, prog_bar=key == "max_load")
        if is_drawn and step % self.picture_every_n_steps == 0:
            self._draw(trainer, step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.picture_every_n_steps:
            self._draw(trainer, trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _faults(self, trainer: L.Trainer, module: L.LightningModule) -> list[str]:
        faults = []
        if not _models_with_experts(module):
            faults.append(
                f"ExpertMonitor has nothing to look at: no GPTModel of {type(module).__name__} has experts; give its "
                "config moe=MoEConfig(...), or leave the callback out"
            )
        log_every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self.every_n_steps and log_every and trainer.loggers and self.every_n_steps % log_every:
            nearest = max(self.every_n_steps // log_every, 1) * log_every
            faults.append(
                f"every_n_steps of ExpertMonitor ({self.every_n_steps}) must be a multiple of the Trainer's "
                f"log_every_n_steps ({log_every}), which is the interval of loggers; it may be {nearest} or "
                f"{nearest + log_every}, or 0 for as often as that"
            )
        if self.picture_every_n_steps:
            faults += [f"{fault}, or set picture_every_n_steps=0" for fault in matplotlib_faults()]
        return faults

    def _draw(self, trainer: L.Trainer, step: int) -> None:
        if step == self._last_drawn:
            return
        self._last_drawn = step
        # Every rank asks: the Trainer broadcasts the first rank's folder.
        folder = Path(self.picture_folder or trainer.log_dir or trainer.default_root_dir)
        if not trainer.is_global_zero:
            return
        for name, history in self._histories.items():
            if not history.counts:
                continue
            own = f"experts_{name}" if len(self._histories) > 1 else "experts"
            write_picture(history, folder / f"{own}.png")
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_figure(own, picture_of(history), step)


def _models_with_experts(module: nn.Module) -> dict[str, GPTModel]:
    """The models with experts in a module, by attribute name; the same on every rank."""
    models = ((name, child) for name, child in module.named_modules() if isinstance(child, GPTModel))
    return {name: model for name, model in models if model.config.moe is not None}
