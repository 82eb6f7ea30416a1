"""The tokens of a network's layers, cut over `cp` and, under sequence parallelism, over `tp`.

The network's own forward sees all tokens: its embeddings, masks and rotary tables are those of one device. Where its
list of layers begins, hidden states [B, T, H] become those of a rank's own tokens, [B, T/(cp*sp), H], a contiguous part
of the sequence; behind the last layer they are gathered.

    axis   between layers   inside of a layer
    cp     own tokens       own tokens, and own rows of tables and masks; attention alone sees keys of all
    sp     own tokens       norms on own tokens; attention and the feed-forward network on all, cut by their features

Tokens are gathered into these parts, and the gradients of what colwise linears read there are reduce-scattered; where a
part returns what its rowwise linear computed, that is reduce-scattered too, and is split after a sum otherwise.

Which modules mix tokens cannot be read off them. So before the first step each stage runs its layers on a few tokens,
whole and cut, and refuses those whose numbers differ.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_megatron.any_module.cut_error import CutError
from lightning_megatron.any_module.tensor_styles import ColwiseLinear, RowwiseLinear, sum_gradients
from lightning_megatron.comm import collectives, differentiable
from lightning_megatron.mesh import Axis
from lightning_megatron.tensor.linear import ParallelLinear, RowParallelLinear

_PROBED_TOKENS = 16
"""Tokens of each rank on which layers are looked at before the first step."""


class ContextAttention(Protocol):
    """Attention of a network's layers from own tokens to the keys of all ranks of cp."""

    is_off: bool
    """Whether it sees whole sequences for now."""

    def give_back(self) -> None:
        """Leaves the layers the attention that they had."""


class CutTokens:
    """The tokens of the layers of one network, over the axes of its mesh; `attention` is there where cp cuts."""

    def __init__(self, cp: Axis, sp: Axis, attention: ContextAttention | None) -> None:
        self.cp, self.sp = cp, sp
        self.size = cp.size * sp.size
        self._attention = attention
        self.is_off = False
        """Whether layers run on whole sequences for now."""
        # Weights whose gradients are summed over sp, by the layer that they are in: owners and names.
        self.summed: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        # Places of what layers are given beside their hidden states of whose gradients ranks of sp have terms.
        self._terms: set[tuple[int, int]] = set()
        # What layers are given so while they are looked at, by layer and place.
        self._given: dict[tuple[int, int], Tensor] | None = None
        # Shape of the hidden states that the running layer was given.
        self._local: torch.Size | None = None
        # Own tokens of the running part's inputs, each behind the tensor that was gathered from them.
        self._inputs: list[tuple[Tensor, Tensor]] = []
        # While parts are looked at, the sums that their rowwise linears returned.
        self._sums: list[tuple[Tensor, RowwiseLinear]] | None = None

    def watch(self, layer: nn.Module) -> None:
        """Makes a layer run its attention and feed-forward network on the tokens of all ranks of sp."""
        if self.sp.size == 1:
            return
        # Before what looks at the linears of a module: it sees what the module does.
        layer.register_forward_pre_hook(self._note_shape, prepend=True, with_kwargs=True)
        layer.register_forward_hook(self._forget, always_call=True)
        self._sum(layer, layer)
        for child in _parts_of(layer):
            # What has no children, and is no linear, does the same to each token: norms, activations, dropout.
            if any(True for _ in child.children()) or isinstance(child, (nn.Linear, ParallelLinear)):
                child.register_forward_pre_hook(self._gather_inputs, prepend=True, with_kwargs=True)
                for linear in child.modules():
                    if isinstance(linear, ColwiseLinear):
                        linear.copies.tokens = self
                    elif isinstance(linear, RowwiseLinear):
                        # Where its sum is scattered, the gradient of its output is that of own tokens.
                        linear.gradient_axis = self.sp
                        linear.register_forward_hook(self._note_sum)
                if not _gives_features_of_rank(child):
                    child.register_forward_hook(self._split_outputs)
            else:
                self._sum(layer, child)

    def _sum(self, layer: nn.Module, owner: nn.Module) -> None:
        for name, weight in list(owner.named_parameters(recurse=False)):
            sum_gradients(owner, name, weight, self.sp)
            self.summed.setdefault(layer, []).append((owner, name))

    def enter(
        self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_whole: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a layer for own tokens; its hidden states may be those of all tokens (`is_whole`) or own ones.

        Raises CutError where the ranks do not divide the tokens.
        """
        if self._given is not None:
            args, kwargs = self._noted(layer, args, kwargs)
        if self.is_off or self.size == 1:
            return args, kwargs
        hidden = _hidden(args, kwargs)
        if hidden is None:
            raise CutError("a layer of the network takes no hidden states [rows, tokens, features]")
        self._refuse_likes(hidden, (args, kwargs), is_whole=is_whole)
        num_tokens = hidden.shape[1] * (1 if is_whole else self.size)
        if num_tokens % self.size:
            raise CutError(
                f"sequences of {num_tokens} tokens cannot be cut over {self.size} ranks (context_parallel_size "
                f"{self.cp.size}, sequence parallel over {self.sp.size}); pad batches to a multiple of {self.size}"
            )

        def own(place: int, value: Any) -> Any:
            if value is hidden:
                return self._own_tokens(value) if is_whole else value
            if (layer, place) in self._terms:
                value = differentiable.copy(value, self.sp)
            return self._own_rows(value, num_tokens)

        leaves, spec = tree_flatten((args, kwargs))
        cut: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(
            [own(place, value) for place, value in enumerate(leaves)], spec
        )
        return cut

    @contextmanager
    def noting_given(self) -> Iterator[dict[tuple[int, int], Tensor]]:
        """Inside the block layers are given leaves of their own in place of what takes a gradient beside their hidden
        states; yields them by layer and place."""
        self._given = {}
        try:
            yield self._given
        finally:
            self._given = None

    def sum_given(self, terms: Iterable[tuple[int, int]]) -> None:
        """Ranks have terms of the gradients of what layers are given at these places: they are summed over sp."""
        self._terms.update(terms)

    def _noted(
        self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = _hidden(args, kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        assert self._given is not None
        for place, value in enumerate(leaves):
            if value is not hidden and isinstance(value, Tensor) and value.requires_grad:
                leaves[place] = self._given[layer, place] = value.detach().requires_grad_()
        noted: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(leaves, spec)
        return noted

    def leave(self, output: Any) -> Any:
        """Output of a layer that ends a list, with its hidden states, and what has their shape, for all tokens."""
        hidden = hidden_of(output)
        if self.is_off or self.size == 1 or hidden is None:
            return output
        return tree_map(lambda one: self._all_tokens(one) if _is_like(one, hidden.shape) else one, output)

    def _own_tokens(self, hidden: Tensor) -> Tensor:
        return differentiable.split(differentiable.split_of_mean(hidden, self.cp, 1), self.sp, 1)

    def _all_tokens(self, hidden: Tensor) -> Tensor:
        return differentiable.gather_of_mean(differentiable.all_gather_invariant(hidden, self.sp, 1), self.cp, 1)

    def _own_rows(self, value: Any, num_tokens: int) -> Any:
        """The part for own tokens of what a layer reads beside its hidden states, as far as it has a row a token."""
        if self.cp.size == 1 or not isinstance(value, Tensor):
            return value
        if value.dim() >= 2 and value.shape[1] == num_tokens:
            return differentiable.split_of_mean(value, self.cp, 1)
        if value.dim() in (1, 2) and value.shape[0] == num_tokens:
            return differentiable.split_of_mean(value, self.cp, 0)
        if value.dim() == 4 and value.shape[2:] == (num_tokens, num_tokens):
            # A mask, or a bias of scores, has a row for each query.
            return differentiable.split_of_mean(value, self.cp, 2)
        if value.requires_grad and self.sp.size > 1:
            raise CutError(
                f"a layer is given a tensor {list(value.shape)} without tokens that takes a gradient, which is summed "
                f"over one of two axes alone; use {self.without.replace(' and ', ' or ')}"
            )
        # Every rank has terms of its own tokens of this gradient.
        return differentiable.copy_of_mean(value, self.cp) if value.requires_grad else value

    def _refuse_likes(self, hidden: Tensor, given: Any, *, is_whole: bool) -> None:
        """Raises CutError where another input of a layer cannot be told from hidden states of own tokens."""
        own = list(hidden.shape)
        if is_whole:
            own[1] //= self.size
        likes = [one for one in _tensors(given) if one is not hidden and _is_like(one, torch.Size(own))]
        if likes and self.sp.size > 1:
            raise CutError(
                f"a layer reads another tensor of the shape of its own hidden states ({own}), which cannot be told "
                f"from them; use {self.without}, or sequences of another length"
            )

    # --- sp: hooks of layers and of their parts -----------------------------------------------------------------------

    def _note_shape(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # By the layer's own call, which recomputation repeats.
        hidden = _hidden(args, kwargs)
        self._local = None if self.is_off or hidden is None else hidden.shape

    def _forget(self, *_: Any) -> None:
        self._local, self._inputs = None, []

    def _gather_inputs(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shape = self._local
        if shape is None:
            return None

        self._inputs = []

        def whole(value: Any) -> Any:
            if not _is_like(value, shape):
                return value
            found = differentiable.all_gather_invariant(value, self.sp, 1)
            self._inputs.append((found, value))
            return found

        return tree_map(whole, (args, kwargs))

    def _split_outputs(self, _: nn.Module, args: Any, output: Any) -> Any:
        self._inputs = []
        if self._local is None:
            return output
        shape = torch.Size((self._local[0], self._local[1] * self.sp.size, *self._local[2:]))

        def own(value: Any) -> Any:
            if not _is_like(value, shape):
                return value
            for linear in [one for total, one in self._sums or () if total is value]:
                # What leaves its part as it is is scattered at once from now on.
                linear.tokens = self
            return differentiable.split(value, self.sp, 1)

        return tree_map(own, output)

    def _note_sum(self, linear: RowwiseLinear, _: Any, output: Tensor) -> None:
        if self._sums is not None:
            self._sums.append((output, linear))

    @contextmanager
    def finding_sums(self) -> Iterator[None]:
        """Inside the block parts run on which it shows which outputs of their linears they return."""
        self._sums = []
        try:
            yield
        finally:
            self._sums = None

    @property
    def are_cut(self) -> bool:
        """Whether the running layer is given own tokens."""
        return self._local is not None

    def gathered(self, x: Tensor) -> Tensor | None:
        """A tensor equal to `x`, the gathered input of the running part, whose gradient is reduce-scattered."""
        own = next((own for whole, own in self._inputs if whole is x), None)
        return None if own is None else differentiable.as_gathered(own, x, self.sp, 1)

    # --- the look before the first step -------------------------------------------------------------------------------

    @property
    def without(self) -> str:
        """The arguments of a strategy that cuts no tokens."""
        given = {"context_parallel_size=1": self.cp.size > 1, "sequence_parallel=False": self.sp.size > 1}
        return " and ".join(name for name, is_given in given.items() if is_given)

    def divide(self, value: Any) -> bool:
        """Whether the ranks divide the tokens of a network's arguments."""
        lengths = _lengths(value)
        return not lengths or lengths[0] % self.size == 0

    def shortened(self, value: Any, *, are_all: bool) -> Any:
        """Arguments of a network's call (`are_all`), or what a rank received of its tokens, with few tokens."""
        lengths = _lengths(value)
        short = _PROBED_TOKENS * (self.size if are_all else 1)

        def first(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dim() < 2 or lengths[0] <= short:
                return leaf
            # Masks have two such dims behind that of heads.
            dims = (2, 3) if leaf.dim() == 4 else (1,)
            for dim in dims:
                if leaf.shape[dim] == lengths[0]:
                    leaf = leaf.narrow(dim, 0, short)
            return leaf

        return tree_map(first, value)

    def of_all_ranks(self, value: Any) -> Any:
        """What all ranks of cp and sp together have of hidden states, alone or first among others."""
        hidden = hidden_of(value)
        if hidden is None:
            return value
        shape = hidden.shape

        def gathered(leaf: Any) -> Any:
            if not _is_like(leaf, shape):
                return leaf
            return collectives.all_gather(collectives.all_gather(leaf, self.sp, 1), self.cp, 1)

        return tree_map(gathered, value)

    def own_part(self, value: Tensor, shape: torch.Size) -> Tensor:
        """The part for own tokens of a tensor for all of them, unless the hidden states have its shape."""
        if value.shape == shape:
            return value
        return collectives.shard_slice(collectives.shard_slice(value, self.cp, 1), self.sp, 1)

    def sum_of(self, gradient: Tensor, are_all: bool, *, over_sp: bool) -> Tensor:
        """The gradient of a weight from the terms that ranks have of it, by hidden states of all tokens or own ones."""
        total = collectives.all_reduce(gradient, self.sp) if over_sp else gradient
        total = collectives.all_reduce(total, self.cp)
        return total / self.cp.size if are_all else total

    def give_back(self) -> None:
        """Leaves the layers the attention that they had before the cut."""
        if self._attention is not None:
            self._attention.give_back()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside the block layers run on whole sequences."""
        self.is_off = True
        if self._attention is not None:
            self._attention.is_off = True
        try:
            yield
        finally:
            self.is_off = False
            if self._attention is not None:
                self._attention.is_off = False


def _gives_features_of_rank(module: nn.Module) -> bool:
    """Whether what a module returns has features of a rank, of all tokens: it may have the shape of hidden states."""
    opens = any(isinstance(one, ColwiseLinear) and not one.gathers_output for one in module.modules())
    return opens and not any(isinstance(one, RowParallelLinear) for one in module.modules())


def hidden_of(output: Any) -> Tensor | None:
    """Hidden states that a layer returned, alone or first among others."""
    return _hidden((output,), {})


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    named = kwargs.get("hidden_states")
    found = [named] if isinstance(named, Tensor) else _tensors((args, kwargs))
    return next((leaf for leaf in found if leaf.dim() >= 3 and leaf.is_floating_point()), None)


def _lengths(value: Any) -> list[int]:
    """Numbers of tokens of ids [B, T], or hidden states [B, T, H], the first of which is the row's."""
    return [leaf.shape[1] for leaf in _tensors(value) if leaf.dim() in (2, 3)]


def _parts_of(layer: nn.Module) -> Iterator[nn.Module]:
    """The children of a layer that are called: lists and tables are not, and what is in them is."""
    for child in layer.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts_of(child)
        else:
            yield child


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _is_like(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape and value.is_floating_point()
