"""The entries of a vocabulary, cut over `tp`, that a rank holds."""

from torch import Tensor

from lightning_megatron.mesh import Axis


def num_own(vocab_size: int, local_length: int, tp: Axis) -> int:
    """Number of entries that this rank holds, padding not counted; may be 0."""
    return max(0, min(vocab_size - tp.rank * local_length, local_length))


def own_entries(ids_T: Tensor, vocab_size: int, local_length: int, tp: Axis) -> tuple[Tensor, Tensor]:
    """Local row of each id [T] (any row for ids of other ranks), and whether another rank holds it [T].

    An id outside of the vocabulary gets index -1, so that the look-up which follows fails on every rank.
    """
    first = tp.rank * local_length
    nearest_T = ids_T.clamp(first, first + max(num_own(vocab_size, local_length, tp), 1) - 1)
    is_unknown_T = ids_T.clamp(0, vocab_size - 1) != ids_T
    return (nearest_T - first).masked_fill_(is_unknown_T, -1), nearest_T != ids_T
