"""Rows of text that have different lengths and grow: their lengths, and their part that a call gets.

B rows, L tokens of the longest row and room after it, S tokens of a call.
"""

import torch
from torch import Tensor


def slice_rows(text_BL: Tensor, starts_B: Tensor, lengths_B: Tensor) -> Tensor:
    """Tokens of each row from its start on, as many columns as the longest needs; anything after them: [B, S]."""
    # One at least: ranks that share experts call for each other when no row of their own goes on.
    places_BS = starts_B.unsqueeze(1) + torch.arange(max(1, int(lengths_B.max())))
    return text_BL.gather(1, places_BS.clamp(max=text_BL.shape[1] - 1).to(text_BL.device))


def row_lengths(tokens: Tensor, lengths: Tensor | None) -> Tensor:
    """Lengths of the rows of `tokens` [batch, sequence], on the host: as `lengths` says, or as wide as they are.

    Raises ValueError for a row without a token.
    """
    batch, sequence = tokens.shape
    lengths_B = torch.full((batch,), sequence) if lengths is None else lengths.cpu().long()
    if lengths_B.shape != (batch,):
        raise ValueError(f"lengths {tuple(lengths_B.shape)} must be [{batch}], one for each row of tokens")
    bad = ((lengths_B < 1) | (lengths_B > sequence)).nonzero().flatten()
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"the prompt of row {row} has {int(lengths_B[row])} tokens; it must have 1 to {sequence}, the "
            "columns of tokens; an empty prompt may be the end of a text"
        )
    return lengths_B
