"""The shape of torch's grouped product, of any dtype: torch's own shape function knows bfloat16 alone, and kernels of
CPUs and GPUs take other dtypes too.

S rows of all groups, G groups, H and F features.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

GROUPED_PRODUCT = "_grouped_mm"


def grouped_shape(
    x: Tensor, y: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """A tensor without numbers, as a product of x [S, H] and y [G, H, F] is, [S, F], or one of x [H, S] and y [S, F],
    [G, H, F]; of x [G, S, H] with y alike, [G, S, F]."""
    if x.dim() == y.dim() == 2:
        assert offs is not None, "groups have ends"
        return x.new_empty((len(offs), x.shape[0], y.shape[1]), dtype=out_dtype)
    return x.new_empty((*x.shape[:-1], y.shape[-1]), dtype=out_dtype)


@contextmanager
def of_any_dtype() -> Iterator[None]:
    """A block in which grouped products of tensors without numbers have a shape in every dtype."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl(GROUPED_PRODUCT, grouped_shape, "Meta", allow_override=True)
        yield
    finally:
        library._destroy()
