"""Whether modules whose linears are cut over `tp` compute what they compute with whole ones: tried in their first call.

The code between two cut linears sees a part of the features, and may be written for all of them: heads counted by a
number of the configuration would be others, in silence. So before its first call the first module of each kind runs its
forward, without dropout, with its cut linears and with whole ones of gathered weights; outputs are compared, and the
gradients of weights that are not cut.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_megatron.any_module.cut_error import CutError
from lightning_megatron.any_module.deviation import relative_deviation
from lightning_megatron.any_module.latent_linear import LatentLinear
from lightning_megatron.any_module.whole_weights import copied, gradients, sum_in_backward, terms_among, whole_weights
from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis
from lightning_megatron.sharding import ShardedParameter
from lightning_megatron.tensor.gemm import TORCH_GEMM
from lightning_megatron.tensor.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from lightning_megatron.tensor.whole_linear import WholeLinear

# What modules call their number of heads, and the features of all heads.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "all_head_size", "embed_dim")


class StyleChecks:
    """The checks of one network's modules, of which one of each kind is tried."""

    def __init__(self, tp: Axis) -> None:
        self._tp = tp
        self._tried: set[tuple[str, ...]] = set()
        # Modules by kind.
        self._alike: dict[tuple[str, ...], list[nn.Module]] = {}
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
        # Layers of one list may be of several classes, and one of them may have a weight more.
        key = (kind, type(parent).__name__, *(one for one, _ in parent.named_parameters()))
        self._alike.setdefault(key, []).append(parent)
        # Their styles say that gradients are terms of a sum.
        held = parent.named_parameters()
        styled = {one for one, w in held if isinstance(w, ShardedParameter) and w.shard.partial is not None}

        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            handle.remove()
            if key not in self._tried:
                self._tried.add(key)
                for weight in self._require_alike(name, module, args, kwargs, styled):
                    for one in self._alike[key]:
                        # Layers of other stages have no weights.
                        if weight in one.state_dict(keep_vars=True):
                            sum_in_backward(one.get_parameter(weight), self._tp)

        handle = parent.register_forward_pre_hook(look, with_kwargs=True)

    def _require_alike(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], styled: set[str]
    ) -> list[str]:
        """Names of whole weights of whose gradients ranks have terms. Raises CutError where numbers differ."""
        # A cache would grow by each of these calls.
        kwargs = {key: None if "past" in key else value for key, value in kwargs.items()}
        modes = {child: child.training for child in module.modules()}
        module.eval()
        try:
            with without_fp8(module):
                return self._compared(name, module, lambda: _called(module, args, kwargs), styled)
        finally:
            for child, mode in modes.items():
                child.training = mode

    def _compared(self, name: str, module: nn.Module, run: Callable[[], list[Tensor]], styled: set[str]) -> list[str]:
        kind = f"{name} ({type(module).__name__})"
        way_out = (
            "its code is written for all of them, such as a number of heads from the configuration. Let view and "
            'reshape find that number out (-1), give its linears the style "replicate" in ModelPlan(styles=...), '
            "or use tensor_model_parallel_size=1"
        )
        with torch.no_grad():
            try:
                cut = run()
            except (torch.OutOfMemoryError, CutError):
                raise
            except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
                told = str(error).partition("\n")[0] or type(error).__name__
                raise CutError(f"{kind} does not run with the features of a rank ({told}): {way_out}") from error
            with self._whole(module):
                whole = run()
        if wrong := [one for one in map(self._deviation, cut, whole) if one]:
            raise CutError(f"{kind} computes other numbers with the features of a rank ({wrong[0]}): {way_out}")
        # Modules inside that are watched, too, have told of theirs.
        inside = {one for group in self._alike.values() for one in group} & {*module.modules()} - {module}
        theirs = {id(weight) for one in inside for weight in one.parameters()}
        weights = {key: one for key, one in whole_weights(module).items() if id(one) not in theirs}
        if not weights or not whole:
            return []
        scales = [torch.arange(one.numel(), dtype=one.dtype, device=one.device).cos().view(one.shape) for one in whole]

        def weighed() -> Tensor:
            given = zip(run(), scales, strict=False)
            return torch.stack([(one * self._own_part(scale, one.shape)).sum() for one, scale in given]).sum()

        found = gradients(weights, module.parameters(), weighed)
        found |= {key: collectives.all_reduce(one, self._tp) for key, one in found.items() if key in styled}
        with self._whole(module):
            meant = gradients(weights, module.parameters(), weighed)
        terms, differing = terms_among(found, meant, self._tp)
        if differing:
            weight, deviation = next(iter(differing.items()))
            raise CutError(
                f"the gradient of {name}.{weight} is another one with the features of a rank ({deviation}): {way_out}"
            )
        return terms

    @contextmanager
    def _whole(self, module: nn.Module) -> Iterator[None]:
        """Inside the block the linears of a module are whole, and so are its numbers of heads."""
        with ExitStack() as stack:
            for owner in list(module.modules()):
                if heads := self._heads.get(owner):
                    stack.enter_context(_exchanged(owner.__dict__, heads))
                cut: dict[str, nn.Linear] = {}
                for name, child in owner._modules.items():
                    if isinstance(child, LatentLinear):
                        cut[name] = child.whole()
                    elif isinstance(child, (ColumnParallelLinear, RowParallelLinear)):
                        cut[name] = _gathered(child, self._tp)
                stack.enter_context(_exchanged(owner._modules, cut))
            yield

    def _deviation(self, cut: Tensor, whole: Tensor) -> str:
        """What differs, in words; empty where nothing does, or sums in another order explain it."""
        whole = self._own_part(whole, cut.shape)
        if cut.shape != whole.shape:
            return f"a tensor {list(cut.shape)} in place of {list(whole.shape)}"
        return relative_deviation(cut, whole)

    def _own_part(self, whole: Tensor, shape: torch.Size) -> Tensor:
        """The features of this rank of a tensor, where its cut form has no more."""
        for dim in range(whole.dim() if len(shape) == whole.dim() else 0):
            if shape[dim] * self._tp.size == whole.shape[dim]:
                whole = collectives.shard_slice(whole, self._tp, dim)
        return whole


@contextmanager
def without_fp8(module: nn.Module) -> Iterator[None]:
    """Inside the block the linears of a module multiply in its precision: where sums in another order move a number
    over the edge between two of float8, it differs by more than a tolerance explains."""
    with ExitStack() as stack:
        for child in module.modules():
            if isinstance(child, (ParallelLinear, WholeLinear)) and "gemm" in child.__dict__:
                stack.enter_context(_exchanged(child.__dict__, {"gemm": TORCH_GEMM}))
        yield


def _gathered(linear: ColumnParallelLinear | RowParallelLinear, tp: Axis) -> nn.Linear:
    """The whole linear of which ranks have slices."""
    is_column = isinstance(linear, ColumnParallelLinear)
    weight = collectives.all_gather(linear.weight.detach(), tp, 0 if is_column else 1)
    bias: nn.Parameter | None = linear.bias
    if bias is not None and is_column:
        bias = nn.Parameter(collectives.all_gather(bias.detach(), tp, 0), requires_grad=False)
    whole = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    whole.weight = nn.Parameter(weight, requires_grad=False)
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


def _called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Numbers that the forward of a module returns, whose arguments stay as they are."""
    args, kwargs = copied((args, kwargs))
    output = tree_leaves(module.forward(*args, **kwargs))
    return [leaf for leaf in output if isinstance(leaf, Tensor) and leaf.is_floating_point()]
