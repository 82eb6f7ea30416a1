"""The entries of a vocabulary, cut over `tp`, that a rank holds."""

from torch import Tensor

from lightning_megatron.mesh import Axis


def num_own(vocab_size: int, local_length: int, tp: Axis) -> int:
    """Number of entries that this rank holds, padding not counted; may be 0."""
    return max(0, min(vocab_size - tp.rank * local_length, local_length))


def own_entries(ids_T: Tensor, vocab_size: int, local_length: int, tp: Axis) -> tuple[Tensor, Tensor | None]:
    """Local row of each id [T] (any row for ids of other ranks), and whether another rank holds it [T]; None where this
    rank holds every entry.

    An id outside of the vocabulary gets an index that is no row, so that the look-up which follows fails on every rank.
    """
    num = num_own(vocab_size, local_length, tp)
    if num == vocab_size:
        # Rows beyond the entries are padding, which a look-up would take.
        return ids_T if num == local_length else ids_T.masked_fill(ids_T >= num, -1), None
    first = tp.rank * local_length
    nearest_T = ids_T.clamp(first, first + max(num, 1) - 1)
    is_unknown_T = ids_T.clamp(0, vocab_size - 1) != ids_T
    return (nearest_T - first).masked_fill_(is_unknown_T, -1), nearest_T != ids_T


def zero_foreign_(values_T: Tensor, is_foreign_T: Tensor | None) -> Tensor:
    """The values [T] with zeros for entries of other ranks, in place."""
    return values_T if is_foreign_T is None else values_T.masked_fill_(is_foreign_T, 0.0)
