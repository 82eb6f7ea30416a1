"""Argmax over logits whose vocabulary is cut over `tp`; no rank ever holds a full row.

Dims: T tokens, V vocabulary columns of this rank, padding included.
"""

import torch
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis
from lightning_megatron.tensor.vocabulary import num_own


def vocab_parallel_argmax(logits_TV: Tensor, *, tp: Axis, vocab_size: int) -> Tensor:
    """Id of the largest logit of each row, ties to the lowest id, as torch.argmax of the full row: int64 [T].

    Padded columns take no part. A row with a NaN gives `vocab_size`, no token. Waits for `tp` twice.
    """
    length = logits_TV.shape[1]
    valid = num_own(vocab_size, length, tp)
    max_T = logits_TV.new_full((len(logits_TV),), -torch.inf)
    index_T = torch.zeros(len(logits_TV), dtype=torch.int64, device=logits_TV.device)
    if valid:
        max_T, index_T = logits_TV.narrow(1, 0, valid).max(dim=1)
    is_largest_T = max_T == collectives.all_reduce(max_T, tp, "max")
    return collectives.all_reduce(torch.where(is_largest_T, tp.rank * length + index_T, vocab_size), tp, "min")
