"""Kernels of tensors without numbers have the shapes, and the gradients, of those with numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.planner.meta_kernels import KERNELS

Q, NARROW, GROUPS = (2, 4, 6, 12), (2, 4, 6, 8), (2, 2, 6, 12)


def attended(device: str, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """Shape and dtype of the output and of the gradients, that of a mask in the last place where there is one."""
    leaves = [torch.ones(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
    output: Tensor = scaled_dot_product_attention(*leaves, **options)
    output.sum().backward()
    return [(tuple(one.shape), one.dtype) for one in (output, *(leaf.grad for leaf in leaves)) if one is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ((Q, Q, Q), {"is_causal": True}),
        ((Q, Q, NARROW), {"is_causal": True}),
        ((Q, Q, Q, (6, 6)), {}),
        ((Q, GROUPS, GROUPS), {"enable_gqa": True}),
        ((Q[1:], Q[1:], Q[1:]), {}),
        ((Q, (2, 1, 6, 12), (2, 1, 6, 12)), {}),
    ],
    ids=["plain", "narrow values", "a mask that trains", "groups", "three dims", "one head of keys"],
)
def test_attention_without_numbers_returns_what_attention_does(
    shapes: tuple[tuple[int, ...], ...], options: dict[str, Any], dtype: torch.dtype
) -> None:
    # They are there as long as their library is.
    assert KERNELS.ns == "aten"
    assert attended("meta", shapes, dtype, options) == attended("cpu", shapes, dtype, options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_rms_norm_without_numbers_is_one_kernel_each_way(dtype: torch.dtype) -> None:
    def normed(device: str) -> tuple[list[Any], list[str]]:
        x = torch.ones(3, 5, 8, device=device, dtype=dtype, requires_grad=True)
        weight = torch.ones(8, device=device, dtype=dtype, requires_grad=True)
        with _Named() as names:
            output = torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)
            output.sum().backward()
        return [(tuple(one.shape), one.dtype) for one in (output, x.grad, weight.grad) if one is not None], names.found

    found, names = normed("meta")
    assert found == normed("cpu")[0] and len(found) == 3
    kept = [name for name in names if "norm" in name or name in ("mul", "pow", "mean")]
    # The kernels of a layer norm stand for it.
    assert kept == ["native_layer_norm", "native_layer_norm_backward"]


class _Named(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
