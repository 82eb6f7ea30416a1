"""A callback that prints the texts that `Trainer.predict` generates."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_megatron.lightning_modules.loaders import COPY
from lightning_megatron.lightning_modules.text_data import TextDataModule


class PrintText(L.Callback):
    """Prints the predicted texts of all data-parallel ranks in the order of the prompts, on global rank 0.

    Needs a data module that has the tokenizer and whose loader numbers the prompts, as `prompt_loader` does.
    """

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
        if not isinstance(data, TextDataModule) or not isinstance(outputs, list):
            return
        numbers = batch["samples"][batch["samples"] != COPY].tolist()
        texts = texts_of_all_dp_ranks(
            dict(zip(numbers, outputs, strict=True)), len(batch["samples"]), pl_module, trainer.strategy
        )
        if trainer.is_global_zero:
            for number, text in sorted(texts.items()):
                # On lines of its own, below a progress bar.
                print(f"\n--- text {number} ---\n{data.text_of(text)}", flush=True)


def texts_of_all_dp_ranks(
    texts: dict[int, Tensor], num_rows: int, module: L.LightningModule, strategy: Strategy
) -> dict[int, list[int]]:
    """The texts of all data-parallel ranks by number; each rank has at most `num_rows`."""
    longest = torch.tensor(max((len(text) for text in texts.values()), default=0), device=module.device)
    columns = 2 + int(strategy.all_gather(longest).max())
    # Of each text its number, its length, and its tokens.
    table = torch.full((num_rows, columns), COPY, device=module.device)
    for row, (number, text) in enumerate(texts.items()):
        table[row, :2] = torch.tensor([number, len(text)])
        table[row, 2 : 2 + len(text)] = text
    rows = strategy.all_gather(table).reshape(-1, columns).tolist()
    return {row[0]: row[2 : 2 + row[1]] for row in rows if row[0] != COPY}
