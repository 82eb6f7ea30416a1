"""Checks of the batches of a user's own data module, before they reach the model.

Only batches on the host are checked: reading numbers on a device would synchronise with it in each step. There a wrong
number ends in the device's own error, that an index is out of range.
"""

from torch import Tensor

from lightning_megatron.data.packed_rows import IGNORE_INDEX


def require_within(name: str, values: Tensor, num_kinds: int, way_out: str, *, may_be_none: bool = False) -> None:
    """Raises ValueError for numbers outside 0 to below `num_kinds`; with `may_be_none`, -100 is allowed too."""
    if values.device.type != "cpu":
        return
    outside = (values < 0) | (values >= num_kinds)
    if may_be_none:
        outside &= values != IGNORE_INDEX
    if outside.any():
        place = outside.nonzero()[0].tolist()
        most = f"from 0 to {num_kinds - 1}" + (f", or {IGNORE_INDEX} for none" if may_be_none else "")
        raise ValueError(f"{name}{place} is {values[tuple(place)].item()}, and must be {most}; {way_out}")


def require_no_gap(name: str, is_token: Tensor) -> None:
    """Raises ValueError where padding stands between two tokens of a row [batch, sequence]."""
    if is_token.device.type != "cpu":
        return
    is_token = is_token.bool()
    is_after = is_token.cummax(dim=1).values
    is_before = is_token.flip(1).cummax(dim=1).values.flip(1)
    gaps = is_after & is_before & ~is_token
    if gaps.any():
        row, place = gaps.nonzero()[0].tolist()
        raise ValueError(
            f"{name} of row {row} has padding at {place}, between two tokens; it must be 1 for the tokens of a row and"
            " 0 for the padding before or after them: put the padding at an end"
        )
