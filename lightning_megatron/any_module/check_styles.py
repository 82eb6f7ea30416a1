"""Whether modules whose linears are cut over `tp` compute what they compute with whole ones: tried in their first call.

The code between two cut linears sees a part of the features, and may be written for all of them: heads counted by a
number of the configuration would be others, in silence. So before its first call the first module of each kind runs its
forward, without dropout, with its cut linears and with whole ones of gathered weights; outputs are compared, and the
gradients of weights that are not cut.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from lightning_megatron.any_module.cut_error import CutError
from lightning_megatron.any_module.deviation import relative_deviation
from lightning_megatron.any_module.latent_linear import LatentLinear
from lightning_megatron.any_module.whole_weights import (
    SummedInCalls,
    Told,
    copied,
    gradients,
    recording,
    stand_ins,
    told_apart,
    whole_weights,
    widened,
)
from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis
from lightning_megatron.precision.autocast import autocast
from lightning_megatron.sharding import shard_of
from lightning_megatron.tensor.gemm import TORCH_GEMM
from lightning_megatron.tensor.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from lightning_megatron.tensor.whole_linear import WholeLinear

# What modules call their number of heads, and the features of all heads.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "all_head_size", "embed_dim")


@dataclass(eq=False)
class _Kind:
    """Modules that are alike, of which one is looked at."""

    styled: set[str]
    """Names of whole weights whose style says that their gradients are terms of a sum."""
    modules: list[nn.Module] = field(default_factory=list)
    is_tried: bool = False
    """Whether outputs were compared."""
    are_gradients_tried: bool = False
    handles: list[RemovableHandle] = field(default_factory=list)
    """What removes the hooks that look at the modules."""

    @property
    def is_due(self) -> bool:
        """Whether the next call of a module is looked at."""
        return not (self.are_gradients_tried if torch.is_grad_enabled() else self.is_tried)


class _Look:
    """A hook in front of a module's call that looks at it where that is due."""

    def __init__(self, checks: "StyleChecks", name: str, kind: _Kind) -> None:
        self.checks, self.name, self.kind = checks, name, kind

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Look":
        # A copy of a module is of its kind.
        return self

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.kind.is_due:
            self.checks.look(self.name, self.kind, module, args, kwargs)


def is_look_due(module: nn.Module) -> bool:
    """Whether in the next call of a module something looks at it, or at what is in it."""
    hooks = (hook for one in module.modules() for hook in one._forward_pre_hooks.values())
    return any(isinstance(hook, _Look) and hook.kind.is_due for hook in hooks)


def _is_cut(module: nn.Module) -> bool:
    """Whether the output of a linear is a part of the features."""
    return isinstance(module, ColumnParallelLinear) and not getattr(module, "gathers_output", False)


def _require_look(name: str, parent: nn.Module, kind: _Kind, linear: nn.Module, args: Any) -> None:
    """Raises CutError in front of a linear's call where no module of its parent's kind was looked at."""
    if not kind.is_tried:
        raise CutError(
            f"a linear of {name or 'the network'} ({type(parent).__name__}) is called outside of that module's own "
            "call, so that nobody has looked at what it does with the features of a rank: the model calls the linear "
            "itself, or has put another module in that one's place as it ran. Give the module's linears the style "
            '"replicate" in ModelPlan(styles=...), or use tensor_model_parallel_size=1'
        )


class StyleChecks:
    """The checks of one network's modules, of which one of each kind is tried."""

    def __init__(self, tp: Axis) -> None:
        self._tp = tp
        self._kinds: dict[tuple[str, ...], _Kind] = {}
        # Numbers of heads of all ranks.
        self._heads: dict[nn.Module, dict[str, int]] = {}
        self._is_whole = False
        # Ids of weights of whose gradients ranks have terms.
        self._terms: set[int] = set()

    def is_on_features(self, weight: nn.Parameter) -> bool:
        """Whether a whole weight was found to be used on the features of a rank."""
        return id(weight) in self._terms

    def count_heads(self, module: nn.Module) -> None:
        """Makes the numbers of heads that a module keeps those of a rank, where the ranks divide them."""
        found = {name: value for name in _HEADS if isinstance(value := getattr(module, name, None), int)}
        if found and not any(value % self._tp.size for value in found.values()):
            self._heads[module] = found
            module.__dict__.update({name: value // self._tp.size for name, value in found.items()})

    def watch(self, name: str, parent: nn.Module, pattern: str) -> None:
        """Looks at a module with cut linears in its first calls, if it is the first of its kind: at its output, and
        where gradients are recorded at these."""
        # A module that takes a part of the features as its input has no whole one here.
        bases = [getattr(child, "base_layer", child) for child in parent.children()]
        # Gathered outputs, a head's, are whole for whatever code reads them.
        if not any(map(_is_cut, bases)):
            return
        # Layers of one list may be of several classes, and one of them may have a weight more.
        key = (pattern, type(parent).__name__, *(one for one, _ in parent.named_parameters()))
        held = parent.named_parameters()
        styled = {one for one, w in held if shard_of(w).partial is not None}
        kind = self._kinds.setdefault(key, _Kind(styled))
        kind.modules.append(parent)
        look = _Look(self, name, kind)
        kind.handles.append(parent.register_forward_pre_hook(look, with_kwargs=True))
        kind.handles += [
            base.register_forward_pre_hook(partial(_require_look, name, parent, kind))
            for base in bases
            if _is_cut(base)
        ]

    def look(self, name: str, kind: _Kind, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Looks at a module, as `watch` says; raises CutError where numbers differ."""
        kind.is_tried, kind.are_gradients_tried = True, torch.is_grad_enabled()
        for handle in kind.handles if kind.are_gradients_tried else ():
            handle.remove()
        told = self._require_alike(name, module, args, kwargs, kind.styled)
        for one in kind.modules if told.terms or told.noise else ():
            self._sum_terms(one, told, is_called=one is module)

    def _sum_terms(self, module: nn.Module, told: Told, *, is_called: bool) -> None:
        held = dict(module.named_parameters())
        self._terms |= {id(held[name]) for name in told.terms if name in held}
        # Those that sequence parallelism sums once a step are summed over the same ranks.
        unsummed = {name for name, one in held.items() if shard_of(one).partial is None}
        terms, noise = ([name for name in names if name in unsummed] for names in (told.terms, told.noise))
        summed = SummedInCalls(module, terms, self._tp, lambda: not self._is_whole, noise)
        if is_called:
            # This call began before.
            summed.enter()

    def _require_alike(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], styled: set[str]
    ) -> Told:
        """What the gradients of whole weights are. Raises CutError where numbers differ."""
        # A cache would grow by each of these calls.
        kwargs = {key: None if "past" in key else value for key, value in kwargs.items()}
        modes = {child: child.training for child in module.modules()}
        module.eval()
        weights = list(module.parameters())
        whole = set(whole_weights(module))
        try:
            # Autocast would leave fewer digits to compare.
            exact = autocast(weights[0], None)
            with without_fp8(module), exact, stand_ins(module, weights, widened):
                wide = tree_map(lambda one: widened(one) if isinstance(one, Tensor) else one, (args, kwargs))
                return self._compared(name, module, wide, whole, styled)
        finally:
            for child, mode in modes.items():
                child.training = mode

    def _compared(self, name: str, module: nn.Module, given: Any, whole_names: set[str], styled: set[str]) -> Told:
        kind = f"{name or 'the network'} ({type(module).__name__})"
        way_out = (
            "its code is written for all of them, such as a number of heads from the configuration. Let view and "
            'reshape find that number out (-1), give its linears the style "replicate" in ModelPlan(styles=...), '
            "or use tensor_model_parallel_size=1"
        )
        is_recorded = torch.is_grad_enabled()
        with recording() if is_recorded else torch.no_grad():
            cut_inputs, whole_inputs = copied(given), copied(given)
            try:
                cut = _outputs(module, cut_inputs)
            except (torch.OutOfMemoryError, CutError):
                raise
            except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
                told = str(error).partition("\n")[0] or type(error).__name__
                raise CutError(f"{kind} does not run with the features of a rank ({told}): {way_out}") from error
            with self._whole(module):
                whole = _outputs(module, whole_inputs)
            if not whole:
                raise CutError(f"{kind} returns no tensor of numbers that could be compared: {way_out}")
            if wrong := [one for one in map(self._deviation, cut, whole) if one]:
                raise CutError(f"{kind} computes other numbers with the features of a rank ({wrong[0]}): {way_out}")
            if not is_recorded:
                return Told([], [], {})
            scales = [torch.arange(one.numel(), device=one.device).cos().to(one.dtype).view(one.shape) for one in whole]

            def weighed(outputs: list[Tensor]) -> Tensor:
                parts = [one * self._own_part(scale, one.shape) for one, scale in zip(outputs, scales, strict=False)]
                return torch.stack([part.sum() for part in parts]).sum()

            weights: dict[str, Tensor] = {key: one for key, one in module.named_parameters() if key in whole_names}
            found = gradients(weighed(cut), weights | _trained(cut_inputs))
            meant = gradients(weighed(whole), weights | _trained(whole_inputs))
        found |= {key: collectives.all_reduce(one, self._tp) for key, one in found.items() if key in styled}
        gradients_told = told_apart(found, meant, self._tp)
        # Nothing sums the gradient of what a module is given.
        differing = gradients_told.wrong | {
            key: "each rank has a term of it" for key in gradients_told.terms if key not in weights
        }
        if differing:
            key, deviation = next(iter(differing.items()))
            what = f"{name}.{key}" if key in weights else f"{key} of {kind}"
            raise CutError(
                f"the gradient of {what} is another one with the features of a rank ({deviation}): {way_out}"
            )
        return gradients_told

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
            stack.enter_context(_exchanged(self.__dict__, {"_is_whole": True}))
            yield

    def _deviation(self, cut: Tensor, whole: Tensor) -> str:
        """What differs, in words; empty where nothing does, or sums in another order explain it."""
        cut, whole = cut.detach(), self._own_part(whole.detach(), cut.shape)
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
    num_blocks = getattr(linear, "num_blocks", 1)

    def gathered(part: Tensor) -> Tensor:
        of_ranks = collectives.all_gather(part.detach()[None], tp)
        # Each rank has a part of each block.
        blocks: Tensor = of_ranks.unflatten(1, (num_blocks, -1)).transpose(0, 1)
        return blocks.flatten(0, 2)

    weight = gathered(linear.weight) if is_column else collectives.all_gather(linear.weight.detach(), tp, 1)
    bias: nn.Parameter | None = linear.bias
    if bias is not None and is_column:
        bias = nn.Parameter(gathered(bias), requires_grad=False)
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


def _outputs(module: nn.Module, given: Any) -> list[Tensor]:
    """Numbers that the forward of a module returns."""
    args, kwargs = given
    return [one for one in _tensors(module.forward(*args, **kwargs)) if one.is_floating_point()]


def _trained(given: Any) -> dict[str, Tensor]:
    """The tensors among arguments that take gradients, by what an error calls them."""
    args, kwargs = given
    named = {**{f"argument {place}": value for place, value in enumerate(args)}, **kwargs}
    return {
        key if place == 0 else f"{key} ({place})": one
        for key, value in named.items()
        for place, one in enumerate(leaf for leaf in _tensors(value) if leaf.requires_grad)
    }


def _tensors(value: Any) -> list[Tensor]:
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf):
            found += _tensors(vars(leaf))
    return found
