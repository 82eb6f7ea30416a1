"""GEMMs of many experts at once: the rows of each expert times that expert's weight.

    forward  y_e = x_e W_e^T + b_e      input gradient  dx_e = dy_e W_e      weight gradient  dW_e = dy_e^T x_e

`SequentialGemm` loops over the experts. `GroupedGemm` is one kernel for all of them, torch's own, where that takes the
tensors, the loop elsewhere. `moe.grouped_gemm_fp8` multiplies in float8. Without rows a gradient is zeros.

The kernel reads on the device where each expert's rows end. A loop needs their numbers on the host, and reads them
where the dispatcher did not.

R rows sorted by expert, L own experts, I features in, O features out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.precision.cast import Operand
from lightning_megatron.tensor.linear import as_gemm_input
from lightning_megatron.tensor.weight_gradients import WeightGradientMode, WeightGradients, add_gradient, product_in

_KERNEL_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16,),
    # A meta tensor stands for one on a GPU.
    "meta": (torch.bfloat16,),
}
# The kernel needs rows that begin at multiples of so many bytes.
_ALIGNED_BYTES = 16
# From this compute capability on the weight gradient of an expert without rows is what the kernel's accumulators held.
# Before, it is zeros. Source: https://github.com/NVIDIA/cutlass/issues/2674.
_UNDEFINED_CAPABILITY = (10, 0)


@dataclass(frozen=True, eq=False)
class ExpertGroups:
    """Numbers of rows of this rank's experts, on the device, and on the host for those who ask."""

    num_rows: int
    """Rows of all experts."""
    sizes_L: Tensor
    """Rows of each expert on the device: int64."""
    read: Callable[[], tuple[int, ...]]
    """Reads the rows of each expert: the host may wait for the device."""

    @staticmethod
    def known(sizes: tuple[int, ...], sizes_L: Tensor) -> "ExpertGroups":
        """Groups whose sizes are on the host already."""
        return ExpertGroups(sum(sizes), sizes_L, lambda: sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each expert on the host."""
        return self.read()

    @cached_property
    def ends_L(self) -> Tensor:
        """End of each expert's rows on the device: int32."""
        return self.sizes_L.cumsum(0, dtype=torch.int32)

    @cached_property
    def experts_R(self) -> Tensor:
        """Expert of each row on the device: int64."""
        rows_R = torch.arange(self.num_rows, dtype=torch.int32, device=self.sizes_L.device)
        return torch.searchsorted(self.ends_L, rows_R, right=True)

    def spans(self) -> Iterator[tuple[int, slice]]:
        """Each expert with rows, and the slice of its rows."""
        start = 0
        for expert, size in enumerate(self.sizes):
            if size:
                yield expert, slice(start, start + size)
            start += size


class ExpertGemm(Protocol):
    """GEMM of experts. Operands come from `cast_input` and `cast_gradient`; a weight is [L, *outputs, I]."""

    def cast_input(self, x_RI: Tensor, *, is_training: bool) -> Operand:
        """The rows as they are saved for backward."""
        ...

    def cast_gradient(self, grad_RO: Tensor) -> Operand:
        """The gradient of the output as the GEMM takes it."""
        ...

    def forward(
        self, x_RI: Operand, weight: Tensor, groups: ExpertGroups, dtype: torch.dtype, *, is_training: bool
    ) -> Tensor:
        """Output [R, O] in `dtype`, a new tensor."""
        ...

    def input_gradient(self, grad_RO: Operand, weight: Tensor, groups: ExpertGroups, dtype: torch.dtype) -> Tensor:
        """Gradient of the input, [R, I], in `dtype`."""
        ...

    def weight_gradient(self, grad_RO: Operand, x_RI: Operand, weight: Tensor, groups: ExpertGroups) -> Tensor:
        """Gradient of the weight, [L, O, I], in the dtype in which it was summed."""
        ...

    def add_weight_gradient(
        self, weight: Tensor, grad_RO: Operand, x_RI: Operand, groups: ExpertGroups, grad_view: Tensor | None
    ) -> None:
        """Adds it to the weight's `.grad`, which is made at `grad_view` where there is none yet."""
        ...


class SequentialGemm:
    """One GEMM for each expert in turn."""

    def cast_input(self, x_RI: Tensor, *, is_training: bool) -> Operand:
        return Operand(x_RI, None)

    def cast_gradient(self, grad_RO: Tensor) -> Operand:
        return Operand(grad_RO, None)

    def forward(
        self, x_RI: Operand, weight: Tensor, groups: ExpertGroups, dtype: torch.dtype, *, is_training: bool
    ) -> Tensor:
        x, weight_LOI = x_RI.values, _flat(weight, dtype)
        y_RO = x.new_empty(len(x), weight_LOI.shape[1])
        for expert, rows in groups.spans():
            torch.mm(x[rows], weight_LOI[expert].t(), out=y_RO[rows])
        return y_RO

    def input_gradient(self, grad_RO: Operand, weight: Tensor, groups: ExpertGroups, dtype: torch.dtype) -> Tensor:
        grad, weight_LOI = grad_RO.values, _flat(weight, dtype)
        grad_RI = grad.new_empty(len(grad), weight_LOI.shape[2])
        for expert, rows in groups.spans():
            torch.mm(grad[rows], weight_LOI[expert], out=grad_RI[rows])
        return grad_RI

    def weight_gradient(self, grad_RO: Operand, x_RI: Operand, weight: Tensor, groups: ExpertGroups) -> Tensor:
        grad, x = grad_RO.values, x_RI.values
        grad_LOI = x.new_empty(len(weight), grad.shape[1], x.shape[1])
        for expert, rows in groups.spans():
            torch.mm(grad[rows].t(), x[rows], out=grad_LOI[expert])
        return _without_rows_zero(grad_LOI, groups)

    def add_weight_gradient(
        self, weight: Tensor, grad_RO: Operand, x_RI: Operand, groups: ExpertGroups, grad_view: Tensor | None
    ) -> None:
        grad, x, out = grad_RO.values, x_RI.values, grad_view if weight.grad is None else weight.grad
        if out is None or out.dtype != grad.dtype or not out.is_contiguous():
            add_gradient(weight, self.weight_gradient(grad_RO, x_RI, weight, groups), grad_view)
            return
        # Each GEMM adds to `.grad`: a tensor of its own would be written, read and thrown away.
        out_LOI = out.flatten(1, -2)
        for expert, rows in groups.spans():
            out_LOI[expert].addmm_(grad[rows].t(), x[rows], beta=0 if weight.grad is None else 1)
        if weight.grad is None:
            _without_rows_zero(out_LOI, groups)
            weight.grad = out


class GroupedGemm(SequentialGemm):
    """One kernel for all experts; the loop where the kernel cannot run (float64, unaligned rows, no rows)."""

    def forward(
        self, x_RI: Operand, weight: Tensor, groups: ExpertGroups, dtype: torch.dtype, *, is_training: bool
    ) -> Tensor:
        if not _is_for_kernel(x_RI.values, weight.shape[-1]):
            return super().forward(x_RI, weight, groups, dtype, is_training=is_training)
        return F.grouped_mm(x_RI.values, _flat(weight, dtype).transpose(1, 2), offs=groups.ends_L)

    def input_gradient(self, grad_RO: Operand, weight: Tensor, groups: ExpertGroups, dtype: torch.dtype) -> Tensor:
        if not _is_for_kernel(grad_RO.values, weight.shape[-1]):
            return super().input_gradient(grad_RO, weight, groups, dtype)
        return F.grouped_mm(grad_RO.values, _flat(weight, dtype), offs=groups.ends_L)

    def weight_gradient(self, grad_RO: Operand, x_RI: Operand, weight: Tensor, groups: ExpertGroups) -> Tensor:
        if not _is_for_kernel(grad_RO.values, weight.shape[-1]):
            return super().weight_gradient(grad_RO, x_RI, weight, groups)
        grad_LOI = F.grouped_mm(grad_RO.values.t(), x_RI.values, offs=groups.ends_L)
        if _leaves_undefined(grad_LOI.device):
            grad_LOI.masked_fill_((groups.sizes_L == 0)[:, None, None], 0)
        return grad_LOI

    def add_weight_gradient(
        self, weight: Tensor, grad_RO: Operand, x_RI: Operand, groups: ExpertGroups, grad_view: Tensor | None
    ) -> None:
        # The kernel cannot accumulate. On a CPU it is a loop itself, and our loop can.
        if grad_RO.values.device.type == "cpu":
            super().add_weight_gradient(weight, grad_RO, x_RI, groups, grad_view)
        else:
            add_gradient(weight, self.weight_gradient(grad_RO, x_RI, weight, groups), grad_view)


SEQUENTIAL_GEMM: ExpertGemm = SequentialGemm()
GROUPED_GEMM: ExpertGemm = GroupedGemm()
"""The fused GEMM. Both are stateless, so all layers share them."""


class GroupedBias(NamedTuple):
    """Bias of each expert's rows."""

    values: Tensor
    """Bias of each expert: [L, *outputs]."""
    probs_R: Tensor | None = None
    """Factor on the bias of each row; None is 1."""
    is_own: bool = True
    """Whether this rank adds the bias to its partial sum; the others only compute its gradient."""


def grouped_linear(
    x_RI: Tensor,
    weight: Tensor,
    groups: ExpertGroups,
    *,
    gradients: WeightGradients,
    gemm: ExpertGemm,
    bias: GroupedBias | None = None,
) -> Tensor:
    """Output [R, *weight.shape[1:-1]] of the rows [R, I] of each expert; the weight is [L, *outputs, I].

    The gradient of the weight goes where `gradients` says.
    """
    values, probs_R, is_own = bias if bias is not None else (None, None, False)
    x_RI = as_gemm_input(x_RI)
    # Inside the Function gradients are off, whatever the mode outside.
    is_training = torch.is_grad_enabled()
    y_RO: Tensor = _GroupedLinear.apply(x_RI, weight, values, probs_R, groups, gradients, gemm, is_own, is_training)
    return y_RO.view(y_RO.shape[0], *weight.shape[1:-1])


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        probs_R: Tensor | None,
        groups: ExpertGroups,
        gradients: WeightGradients,
        gemm: ExpertGemm,
        is_own: bool,
        is_training: bool,
    ) -> Tensor:
        ctx.groups, ctx.gradients, ctx.gemm, ctx.is_own, ctx.dtype = groups, gradients, gemm, is_own, x.dtype
        # The weight itself, as in `tensor.linear`: what autograd saved of it may come back as another tensor.
        ctx.owner = weight
        saved = gemm.cast_input(x, is_training=is_training)
        ctx.save_for_backward(*(saved if ctx.needs_input_grad[1] else (None, None)), weight, bias, probs_R)
        y_RO = gemm.forward(saved, weight, groups, x.dtype, is_training=is_training)
        if bias is not None and is_own:
            _add_bias(y_RO, bias.flatten(1), probs_R, groups)
        return y_RO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:
        values, inverse_scale, weight, bias, probs_R = ctx.saved_tensors
        groups: ExpertGroups = ctx.groups
        gradients: WeightGradients = ctx.gradients
        gemm: ExpertGemm = ctx.gemm
        owner: Tensor = ctx.owner
        grad_RO = grad_RO.contiguous()
        needs_x, needs_weight, needs_bias, needs_weights = ctx.needs_input_grad[:4]
        x_RI, grad = Operand(values, inverse_scale), gemm.cast_gradient(grad_RO)
        grad_x = gemm.input_gradient(grad, weight, groups, ctx.dtype) if needs_x else None
        grad_weight = grad_bias = grad_weights = None
        if needs_weight:
            mode = gradients.mode(owner)
            x_RI = x_RI.without_graph()

            # A deferred weight gradient runs where gradients are on.
            @torch.no_grad()
            def add() -> None:
                gemm.add_weight_gradient(owner, grad, x_RI, groups, gradients.grad_view(owner))

            if mode is WeightGradientMode.DEFER:
                gradients.defer(owner, add)
            elif mode is WeightGradientMode.ADD:
                add()
            else:
                grad_weight = gemm.weight_gradient(grad, x_RI, weight, groups).view(weight.shape).to(weight.dtype)
        if needs_bias:
            # Every rank of a partial sum has the gradient, whether it added the bias or not.
            grad_bias = _bias_gradient(grad_RO, bias, probs_R, groups)
        if needs_weights:
            grad_weights = torch.zeros_like(probs_R)
            if ctx.is_own:
                bias_RO = bias.flatten(1).index_select(0, groups.experts_R)
                grad_weights.copy_((_wide(grad_RO, probs_R) * _wide(bias_RO, probs_R)).sum(1))
        return grad_x, grad_weight, grad_bias, grad_weights, None, None, None, None, None


def _add_bias(y_RO: Tensor, bias_LO: Tensor, probs_R: Tensor | None, groups: ExpertGroups) -> None:
    bias_RO = bias_LO.index_select(0, groups.experts_R)
    y_RO += bias_RO if probs_R is None else _wide(bias_RO, probs_R) * probs_R[:, None]


def _bias_gradient(grad_RO: Tensor, bias: Tensor, probs_R: Tensor | None, groups: ExpertGroups) -> Tensor:
    """Gradient of the bias: the sum over each expert's rows. A product with ones has one order of sums, additions by
    index have none."""
    experts_L1 = torch.arange(len(bias), device=grad_RO.device)[:, None]
    factors_LR = (groups.experts_R == experts_L1).to(grad_RO.dtype)
    if probs_R is not None:
        grad_RO = _wide(grad_RO, probs_R)
        factors_LR = factors_LR.to(grad_RO.dtype) * probs_R
    return product_in(bias.dtype, factors_LR, grad_RO).view(bias.shape)


def _wide(x: Tensor, probs_R: Tensor) -> Tensor:
    """`x` in float32 or wider, at least as wide as the probabilities."""
    return x.to(torch.promote_types(torch.promote_types(x.dtype, probs_R.dtype), torch.float32))


def _without_rows_zero(grad_LOI: Tensor, groups: ExpertGroups) -> Tensor:
    """The gradients with zeros for experts without rows."""
    for expert, size in enumerate(groups.sizes):
        if not size:
            grad_LOI[expert].zero_()
    return grad_LOI


def _flat(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [L, O, I] in the dtype of the rows, as under autocast."""
    return weight.to(dtype).flatten(1, -2)


def _is_for_kernel(one_R: Tensor, other_length: int) -> bool:
    """Whether torch's kernel takes these rows with an operand of the same dtype and this row length."""
    return (
        one_R.dtype in _KERNEL_DTYPES.get(one_R.device.type, ())
        and len(one_R) > 0
        and all(length * one_R.element_size() % _ALIGNED_BYTES == 0 for length in (one_R.shape[-1], other_length))
    )


def _leaves_undefined(device: torch.device) -> bool:
    """Whether torch's kernel does not define the weight gradient of an expert without rows."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _UNDEFINED_CAPABILITY
