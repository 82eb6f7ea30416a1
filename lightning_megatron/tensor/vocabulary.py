"""Which entries of a vocabulary that is cut over `tp` a rank holds: what the embedding and the loss both ask."""

import torch
from torch import Tensor

from lightning_megatron.mesh import Axis


def num_own(vocab_size: int, local_length: int, tp: Axis) -> int:
    """Entries that this rank holds, without the padding that follows them; may be 0."""
    return max(0, min(vocab_size - tp.rank * local_length, local_length))


def own_entries(ids_T: Tensor, vocab_size: int, local_length: int, tp: Axis) -> tuple[Tensor, Tensor]:
    """Local place of each id [T] (0 for what other ranks hold), and whether it is here [T].

    An id outside of the vocabulary gets place -1, so that the look-up which follows fails on every rank.
    """
    local_T = ids_T - tp.rank * local_length
    is_own_T = (local_T >= 0) & (local_T < num_own(vocab_size, local_length, tp))
    is_known_T = (ids_T >= 0) & (ids_T < vocab_size)
    return torch.where(is_own_T, local_T, is_known_T.to(ids_T.dtype) - 1), is_own_T
