"""Collation: samples become one batch of stacked tensors."""

import pytest
import torch

from lightning_megatron.data import collate_tokens


def test_entries_are_stacked_in_the_order_of_the_samples() -> None:
    samples = [{"tokens": torch.arange(4) + 10 * i, "loss_mask": torch.full((4,), float(i))} for i in range(3)]
    batch = collate_tokens(samples)
    assert list(batch) == ["tokens", "loss_mask"]
    assert batch["tokens"].tolist() == [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]]
    assert batch["tokens"].dtype == torch.int64
    assert batch["loss_mask"][2].tolist() == [2.0] * 4


@pytest.mark.parametrize("odd", [{"tokens": torch.arange(5)}, {"labels": torch.arange(4)}])
def test_samples_that_differ_are_refused(odd: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=r"sample 1 of a batch holds .* sample 0 holds .*\(4,\)"):
        collate_tokens([{"tokens": torch.arange(4)}, odd])
