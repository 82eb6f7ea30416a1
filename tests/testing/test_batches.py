"""Global batches are joined from small batches and divided from large ones, in the order of the data."""

import lightning as L
import pytest
import torch

from lightning_megatron.testing.batches import read_global_batches
from lightning_megatron.testing.subject import Subject, SubjectError
from tests.testing.modules import Right
from tests.trainer.layouts import PLAIN, make_trainer


@pytest.mark.parametrize(
    ("sizes", "firsts"),
    [
        # Of 19 rows 3 are left over, and are no part of the next batch.
        ((19, 9), (0, 8, 19)),
        ((4, 4, 3, 3, 3), (0, 8)),
        ((8, 8), (0, 8)),
    ],
)
def test_global_batches_have_the_rows_of_the_data_in_order(sizes: tuple[int, ...], firsts: tuple[int, ...]) -> None:
    subject = Subject(module=Right(), data=torch.arange(sum(sizes)).split(sizes))
    trainer: L.Trainer = make_trainer(PLAIN)

    def read(number: int) -> list[list[int]]:
        batches, _ = read_global_batches(subject, trainer, number=number, num_validated=0, rows=8)
        return [batch.tolist() for batch in batches]

    wanted = [list(range(first, first + 8)) for first in firsts]
    assert read(len(firsts)) == wanted and read(1) == wanted[:1]
    with pytest.raises(SubjectError, match=f"the data ends after {len(firsts)} global batches of 8 rows"):
        read(len(firsts) + 1)
