"""A callback that lets the model write during training, behind each validation."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn

from lightning_megatron.lightning_modules.loaders import COPY
from lightning_megatron.lightning_modules.print_text import texts_of_all_dp_ranks
from lightning_megatron.lightning_modules.text_data import TextDataModule
from lightning_megatron.trainer.config import ConfigurationError

FILE = "samples.jsonl"
"""Name of the file with all texts, in the folder of the run's logs."""


class SampleText(L.Callback):
    """Prints what the model writes behind the data's `prompts` after each validation of a fit, on any layout.

    What `predict` would write: by the module's own `predict_step` and its generation. Global rank 0 prints, and appends
    step, number and text to `samples.jsonl` in the folder of the run's logs. Training goes on as without it.

    Args:
        every_n_validations: Validations from one sample to the next.
    """

    def __init__(self, every_n_validations: int = 1) -> None:
        if every_n_validations < 1:
            raise ValueError(f"every_n_validations ({every_n_validations}) must be at least 1")
        self.every_n_validations = every_n_validations
        self._num_validations = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if faults := self._faults(trainer):
            raise ConfigurationError(faults)

    def _faults(self, trainer: L.Trainer) -> list[str]:
        """One sentence for each thing that keeps the model from writing."""
        if trainer.state.fn != TrainerFn.FITTING:
            return []
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, TextDataModule):
            return ["SampleText takes prompts and tokenizer of a data module of text of this package; leave it out"]
        if not data.config.prompts:
            return ["SampleText has no prompts; give some, as --data.prompts '[\"Who are you?\"]'"]
        if data.config.tokenizer is None and not data._has_text:
            return ["SampleText needs the text of tokens, which token files alone do not say; give data.tokenizer"]
        return []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        self._num_validations += 1
        if self._num_validations % self.every_n_validations:
            return
        data, strategy = trainer.datamodule, trainer.strategy  # type: ignore[attr-defined]
        texts: dict[int, list[int]] = {}
        pl_module.on_predict_epoch_start()
        with torch.no_grad():
            for index, batch in enumerate(data.predict_dataloader()):
                moved: Any = strategy.batch_to_device(batch)
                # A step of evaluation, in which a call of the model waits for all stages.
                outputs = strategy.predict_step(moved, index)
                numbers = batch["samples"][batch["samples"] != COPY].tolist()
                own = dict(zip(numbers, outputs, strict=True))
                texts |= texts_of_all_dp_ranks(own, len(batch["samples"]), pl_module, strategy)
        # Asking for it is a broadcast.
        log_dir = trainer.log_dir
        if trainer.is_global_zero:
            rows = [
                {"step": trainer.global_step, "number": number, "text": data.text_of(ids)}
                for number, ids in sorted(texts.items())
            ]
            _tell(rows, log_dir)

    def state_dict(self) -> dict[str, Any]:
        return {"num_validations": self._num_validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_validations = state_dict["num_validations"]


def _tell(rows: Sequence[Mapping[str, Any]], log_dir: str | None) -> None:
    for row in rows:
        # On lines of its own, below a progress bar.
        print(f"\n--- step {row['step']}, text {row['number']} ---\n{row['text']}", flush=True)
    if log_dir is None:
        return
    Path(log_dir).mkdir(parents=True, exist_ok=True)
    with Path(log_dir, FILE).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
