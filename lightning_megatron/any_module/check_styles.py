"""Whether modules whose linears are cut over `tp` compute what they compute with whole ones: tried in their first call.

The code between two cut linears sees a part of the features, and may be written for all of them: heads counted by a
number of the configuration would be others, in silence. So the first module of each kind runs its forward twice more in
its first call, without dropout: with its cut linears, and with whole ones of gathered weights.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_megatron.any_module.cut_error import CutError
from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis
from lightning_megatron.tensor.linear import ColumnParallelLinear, RowParallelLinear

# Largest relative deviation that sums in another order explain.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}

# What modules call their number of heads, and the features of all heads.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "all_head_size", "embed_dim")


class StyleChecks:
    """The checks of one network's modules, of which one of each kind is tried."""

    def __init__(self, tp: Axis) -> None:
        self._tp = tp
        self._tried: set[str] = set()
        # Numbers of heads of all ranks.
        self._heads: dict[nn.Module, dict[str, int]] = {}

    def count_heads(self, module: nn.Module) -> None:
        """Makes the numbers of heads that a module keeps those of a rank, where the ranks divide them."""
        found = {name: value for name in _HEADS if isinstance(value := getattr(module, name, None), int)}
        if found and not any(value % self._tp.size for value in found.values()):
            self._heads[module] = found
            module.__dict__.update({name: value // self._tp.size for name, value in found.items()})

    def watch(self, name: str, parent: nn.Module, kind: str) -> None:
        """Looks at a module with cut linears in its first call, if it is the first of its kind."""
        # A module that takes a part of the features as its input has no whole one here.
        bases = [getattr(child, "base_layer", child) for child in parent.children()]
        # Gathered outputs, a head's, are whole for whatever code reads them.
        if not any(
            isinstance(base, ColumnParallelLinear) and not getattr(base, "gathers_output", False) for base in bases
        ):
            return

        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            handle.remove()
            if kind not in self._tried:
                self._tried.add(kind)
                self._require_alike(name, module, args, kwargs)

        handle = parent.register_forward_hook(look, with_kwargs=True)

    @torch.no_grad()
    def _require_alike(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A cache would grow by each of these calls.
        kwargs = {key: None if "past" in key else value for key, value in kwargs.items()}
        modes = {child: child.training for child in module.modules()}
        module.eval()
        try:
            cut = module.forward(*args, **kwargs)
            with self._whole(module):
                whole = module.forward(*args, **kwargs)
        finally:
            for child, mode in modes.items():
                child.training = mode
        deviations = [self._deviation(one, other) for one, other in zip(_tensors(cut), _tensors(whole), strict=False)]
        if wrong := [deviation for deviation in deviations if deviation]:
            raise CutError(
                f"{name} ({type(module).__name__}) computes other numbers with the features of a rank ({wrong[0]}): "
                "its code is written for all of them, such as a number of heads from the configuration. Let view and "
                "reshape find that number out (-1), leave its linears out of the plan's styles, or use "
                "tensor_model_parallel_size=1"
            )

    @contextmanager
    def _whole(self, module: nn.Module) -> Iterator[None]:
        """Inside the block the linears of a module are whole, and so are its numbers of heads."""
        with ExitStack() as stack:
            for owner in list(module.modules()):
                if heads := self._heads.get(owner):
                    stack.enter_context(_exchanged(owner.__dict__, heads))
                cut = {
                    name: _gathered(child, self._tp)
                    for name, child in owner._modules.items()
                    if isinstance(child, (ColumnParallelLinear, RowParallelLinear))
                }
                stack.enter_context(_exchanged(owner._modules, cut))
            yield

    def _deviation(self, cut: Tensor, whole: Tensor) -> str:
        """What differs, in words; empty where nothing does, or sums in another order explain it."""
        if not whole.is_floating_point():
            return ""
        if cut.shape != whole.shape and cut.dim() == whole.dim():
            for dim in range(whole.dim()):
                if cut.shape[dim] * self._tp.size == whole.shape[dim]:
                    whole = collectives.shard_slice(whole, self._tp, dim)
        if cut.shape != whole.shape:
            return f"a tensor {list(cut.shape)} in place of {list(whole.shape)}"
        return relative_deviation(cut, whole)


def relative_deviation(found: Tensor, wanted: Tensor) -> str:
    """The deviation relative to the largest value, in words; empty where sums in another order explain it."""
    if not wanted.numel():
        return ""
    scale = max(float(wanted.abs().max()), torch.finfo(wanted.dtype).tiny)
    deviation = float((found - wanted).abs().max()) / scale
    return "" if deviation <= _TOLERANCES.get(wanted.dtype, 1e-1) else f"off by {deviation:.0e} of the largest"


def _gathered(linear: ColumnParallelLinear | RowParallelLinear, tp: Axis) -> nn.Linear:
    """The whole linear of which ranks have slices."""
    is_column = isinstance(linear, ColumnParallelLinear)
    weight = collectives.all_gather(linear.weight.detach(), tp, 0 if is_column else 1)
    bias: nn.Parameter | None = linear.bias
    if bias is not None and is_column:
        bias = nn.Parameter(collectives.all_gather(bias.detach(), tp, 0))
    whole = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    whole.weight = nn.Parameter(weight)
    whole.register_parameter("bias", bias)
    return whole


@contextmanager
def _exchanged(held: dict[str, Any], others: dict[str, Any]) -> Iterator[None]:
    """Inside the block a dict has other values."""
    own = {name: held[name] for name in others}
    held.update(others)
    try:
        yield
    finally:
        held.update(own)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
