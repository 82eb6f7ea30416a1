"""A linear that each rank holds whole, as `nn.Linear` has it, and that multiplies by a `gemm` as the parallel ones do.

T tokens, I features in, O features out.
"""

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_megatron.mesh import Axis
from lightning_megatron.precision.gemm import Gemm
from lightning_megatron.tensor.gemm import TORCH_GEMM
from lightning_megatron.tensor.linear import column_parallel_linear
from lightning_megatron.tensor.weight_gradients import WeightGradients

# An axis of this rank alone: what is cut over it is unsharded.
_ALONE = Axis.alone(0)


class WholeLinear(nn.Linear):
    """A linear [*, I] to [*, O] that every rank holds whole, and that multiplies by its `gemm`."""

    gemm: Gemm = TORCH_GEMM
    hook: RemovableHandle | None = None
    """The hook of an `nn.Linear` that is one for a time."""

    def forward(self, input: Tensor) -> Tensor:
        x_TI = input.reshape(-1, input.shape[-1])
        # Autograd gets the weight's gradient: these are never opened.
        gradients = WeightGradients()
        y_TO = column_parallel_linear(
            x_TI, self.weight, self.bias, tp=_ALONE, sp=_ALONE, gradients=gradients, gemm=self.gemm
        )
        return y_TO.view(*input.shape[:-1], y_TO.shape[-1])


def lend_gemm(linear: nn.Linear, gemm: Gemm) -> None:
    """Makes a linear, which stays what it is with its weights and hooks, multiply by a gemm."""
    if not isinstance(linear, WholeLinear):
        # By its class and not by another module: code, hooks and optimizers hold this one.
        linear.__class__ = WholeLinear
        assert isinstance(linear, WholeLinear)
        linear.hook = linear.register_forward_pre_hook(as_a_call)
    linear.gemm = gemm


def take_gemm_back(linear: nn.Linear) -> None:
    """Makes a linear multiply as it did before `lend_gemm`."""
    assert isinstance(linear, WholeLinear)
    linear.gemm = TORCH_GEMM
    if linear.hook is not None:
        linear.hook.remove()
        del linear.gemm, linear.hook
        linear.__class__ = nn.Linear  # type: ignore[assignment]


def as_a_call(module: nn.Module, args: tuple[Any, ...]) -> None:
    """A hook that does nothing: with one torch's transformer layers call their linears in evaluation, too, and do not
    take the weights, of which a rank may have slices, into a kernel of their own."""
