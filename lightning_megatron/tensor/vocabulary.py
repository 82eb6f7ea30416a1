"""The entries of a vocabulary, cut over `tp`, that a rank holds."""

import torch
from torch import Tensor

from lightning_megatron.mesh import Axis


def num_own(vocab_size: int, local_length: int, tp: Axis) -> int:
    """Number of entries that this rank holds, padding not counted; may be 0."""
    return max(0, min(vocab_size - tp.rank * local_length, local_length))


def own_entries(ids_T: Tensor, vocab_size: int, local_length: int, tp: Axis) -> tuple[Tensor, Tensor]:
    """Local row of each id [T] (0 for ids of other ranks), and whether this rank holds it [T].

    An id outside of the vocabulary gets index -1, so that the look-up which follows fails on every rank.
    """
    local_T = ids_T - tp.rank * local_length
    is_own_T = (local_T >= 0) & (local_T < num_own(vocab_size, local_length, tp))
    is_known_T = (ids_T >= 0) & (ids_T < vocab_size)
    return torch.where(is_own_T, local_T, is_known_T.to(ids_T.dtype) - 1), is_own_T
