"""Conversion of a model call's images, in any form that the caller has them, to one `Ragged` in the order of rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_megatron.pipeline.ragged import Ragged

Images = Tensor | Ragged | Sequence[Tensor | None]
"""See `images_by_row`."""


def images_by_row(images: Images | None, image_rows: Tensor | None, num_rows: int) -> Ragged | None:
    """The images of each of the batch's rows; None where there are none at all.

    They come as a sequence with the images [images, channels, height, width] of each row, or None where it has none; as
    a `Ragged`; as [rows, images, channels, height, width], of as many for each row; or as [images, channels, height,
    width] with `image_rows` (int64 [images]), the row that each belongs to. Raises ValueError for anything else.
    """
    if images is None and image_rows is None:
        return None
    if image_rows is not None:
        return _sorted(images, image_rows, num_rows)
    if isinstance(images, Tensor) and images.dim() != 5:
        raise ValueError(
            f"images {tuple(images.shape)} do not tell which row each belongs to; give image_rows with them, a list "
            "of the images of each row, or [rows, images, channels, height, width]"
        )
    assert images is not None
    given = images.num_rows if isinstance(images, Ragged) else len(images)
    if given != num_rows:
        raise ValueError(
            f"images are of {given} rows and tokens of {num_rows}; give those of each row, or None where it has none"
        )
    return images if isinstance(images, Ragged) else _joined(list(images))


def _sorted(images: Images | None, rows_N: Tensor, num_rows: int) -> Ragged:
    if not isinstance(images, Tensor) or images.dim() != 4 or rows_N.shape != images.shape[:1]:
        raise ValueError(
            f"image_rows {tuple(rows_N.shape)} must have the row of each of images [images, channels, height, width]"
        )
    if rows_N.is_floating_point() or not bool(((rows_N >= 0) & (rows_N < num_rows)).all()):
        raise ValueError(
            f"image_rows ({rows_N.tolist()}) must be whole numbers from 0 to {num_rows - 1}, the last row of the "
            "batch; where batches are cut into microbatches put the images into them as a Ragged"
        )
    order_N = rows_N.argsort(stable=True).to(images.device)
    return Ragged(images.index_select(0, order_N), torch.bincount(rows_N, minlength=num_rows).tolist())


def _joined(rows: Sequence[Tensor | None]) -> Ragged | None:
    wrong = [i for i, row in enumerate(rows) if row is not None and (not isinstance(row, Tensor) or row.dim() != 4)]
    if wrong:
        raise ValueError(
            f"the images of row {wrong[0]} must be a tensor [images, channels, height, width], or None; stack those of "
            "a row"
        )
    kinds = {f"{tuple(row.shape[1:])} of {row.dtype}" for row in rows if row is not None}
    if len(kinds) > 1:
        raise ValueError(f"images are {' and '.join(sorted(kinds))}; all must be of one shape and dtype")
    found = [row for row in rows if row is not None]
    return Ragged(torch.cat(found), [0 if row is None else len(row) for row in rows]) if found else None
