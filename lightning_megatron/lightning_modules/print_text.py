"""A callback that prints what a language model says in `Trainer.predict`."""

from typing import Any

import lightning as L
from torch import Tensor

from lightning_megatron.lightning_modules.gpt_data import GPTDataModule


class PrintText(L.Callback):
    """Prints each predicted row as text, once: on global rank 0. Needs a data module that has the tokenizer."""

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not trainer.is_global_zero or not isinstance(data, GPTDataModule) or not isinstance(outputs, Tensor):
            return
        assert data.tokenizer is not None
        for row in outputs:
            # On lines of its own, below a progress bar.
            print(f"\n--- text {batch_idx} ---\n{data.tokenizer.decode(row.tolist())}", flush=True)
