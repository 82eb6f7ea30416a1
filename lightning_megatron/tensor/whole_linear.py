"""A linear that each rank holds whole, as `nn.Linear` has it, and that multiplies by a `gemm` as the parallel ones do.

T tokens, I features in, O features out.
"""

from typing import Any

from torch import Tensor, nn

from lightning_megatron.mesh import Axis
from lightning_megatron.precision.gemm import Gemm
from lightning_megatron.tensor.gemm import TORCH_GEMM
from lightning_megatron.tensor.linear import column_parallel_linear
from lightning_megatron.tensor.weight_gradients import WeightGradientLayer, WeightGradients

# An axis of this rank alone: what is cut over it is unsharded.
_ALONE = Axis.alone(0)


class WholeLinear(WeightGradientLayer, nn.Linear):
    """A linear [*, I] to [*, O] that every rank holds whole: it multiplies by its `gemm`, and its weight gradient goes
    where its `weight_gradients` says."""

    gemm: Gemm = TORCH_GEMM
    num_lenders: int = 0
    """How many made an `nn.Linear` one for a time."""

    def forward(self, input: Tensor) -> Tensor:
        x_TI = input.reshape(-1, input.shape[-1])
        y_TO = column_parallel_linear(
            x_TI, self.weight, self.bias, tp=_ALONE, sp=_ALONE, gradients=self.weight_gradients, gemm=self.gemm
        )
        return y_TO.view(*input.shape[:-1], y_TO.shape[-1])


def lend(linear: nn.Linear) -> WholeLinear:
    """Makes a linear, which stays what it is with its weights and hooks, a whole linear until `take_back`."""
    if not isinstance(linear, WholeLinear):
        # By its class and not by another module: code, hooks and optimizers hold this one.
        linear.__class__ = WholeLinear
        assert isinstance(linear, WholeLinear)
        linear.weight_gradients = WeightGradients()
        linear.__dict__["_call_hook"] = linear.register_forward_pre_hook(as_a_call)
        linear.num_lenders = 0
    if "_call_hook" in linear.__dict__:
        linear.num_lenders += 1
    return linear


def take_back(linear: nn.Linear) -> None:
    """Makes a linear what it was before `lend`."""
    assert isinstance(linear, WholeLinear)
    if "_call_hook" not in linear.__dict__:
        return
    linear.num_lenders -= 1
    if not linear.num_lenders:
        linear.__dict__.pop("_call_hook").remove()
        del linear.num_lenders, linear.weight_gradients
        linear.__class__ = nn.Linear  # type: ignore[assignment]


def lend_gemm(linear: nn.Linear, gemm: Gemm) -> None:
    """Makes a linear multiply by a gemm."""
    lend(linear).gemm = gemm


def take_gemm_back(linear: nn.Linear) -> None:
    """Makes a linear multiply as it did before `lend_gemm`."""
    assert isinstance(linear, WholeLinear)
    del linear.gemm
    take_back(linear)


def as_a_call(module: nn.Module, args: tuple[Any, ...]) -> None:
    """A hook that does nothing: with one torch's transformer layers call their linears in evaluation, too, and do not
    take the weights, of which a rank may have slices, into a kernel of their own."""
