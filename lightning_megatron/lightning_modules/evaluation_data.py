"""`EvaluationDataModule`: a text in windows, of which every token but the first is predicted exactly once."""

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_megatron.data.collate import Sample
from lightning_megatron.data.packed_rows import IGNORE_INDEX
from lightning_megatron.lightning_modules.loaders import evaluation_loader
from lightning_megatron.trainer.setup.replica import Replica


class TextWindows(Dataset[Sample]):
    """Windows of `sequence_length` tokens [num_tokens], side by side; the last one is filled up without labels."""

    def __init__(self, ids: Tensor, sequence_length: int) -> None:
        if len(ids) < 2 or sequence_length < 1:
            raise ValueError(
                f"a text of {len(ids)} tokens in windows of {sequence_length} has nothing to predict; give more text"
            )
        self._ids, self._length = ids, sequence_length

    @property
    def num_predicted(self) -> int:
        """Tokens that are predicted."""
        return len(self._ids) - 1

    def __len__(self) -> int:
        return -(-self.num_predicted // self._length)

    def __getitem__(self, index: int) -> Sample:
        """`tokens`, `labels` and `loss_mask`, each [sequence_length]."""
        window = self._ids[index * self._length : (index + 1) * self._length + 1]
        num_valid = len(window) - 1
        tokens = torch.zeros(self._length, dtype=torch.int64)
        labels = torch.full((self._length,), IGNORE_INDEX)
        tokens[:num_valid], labels[:num_valid] = window[:-1], window[1:]
        return {"tokens": tokens, "labels": labels, "loss_mask": (labels != IGNORE_INDEX).float()}


class EvaluationDataModule(L.LightningDataModule):
    """Global batches of windows for `Trainer.validate`; each data-parallel rank takes its part."""

    def __init__(self, windows: TextWindows, global_batch_size: int) -> None:
        super().__init__()
        self._windows, self._global_batch_size = windows, global_batch_size

    def val_dataloader(self) -> DataLoader[Sample]:
        assert self.trainer is not None
        return evaluation_loader(
            self._windows,
            len(self._windows),
            global_batch_size=self._global_batch_size,
            replica=Replica.under(self.trainer.strategy),
            num_workers=0,
        )
