"""Logits of which a rank of `tp` has those of its part of the vocabulary, whole for code that reads them.

A head that gathers its output hands on `CutLogits` [*, V] where gradients are recorded. The operations that stand
between a head and `cross_entropy` (casts, scaling by numbers, soft caps, tokens left out, a view [T, V]) run on the
part of a rank, and the loss is that of `vocab_parallel_cross_entropy`: no rank holds [*, V]. Every other operation gets
the logits gathered, with their gradient, on all ranks of `tp` at once.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_megatron.any_module.loss_count import mean_over
from lightning_megatron.comm import collectives, differentiable
from lightning_megatron.mesh import Axis
from lightning_megatron.precision.autocast import autocast_dtype
from lightning_megatron.tensor.cross_entropy import IGNORED, vocab_parallel_cross_entropy

# What is known of the whole without its numbers.
_ABOUT = ("shape", "dtype", "device", "ndim", "requires_grad", "grad_fn", "is_leaf", "layout")
_KINDS = ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested")
_ASKED = ("size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "__len__", "__hash__")
# They act on the whole, and so must what comes after them.
_WATCHING = ("register_hook", "retain_grad", "requires_grad_")
# Each number by itself, and numbers that are no weights.
_CASTS = ("float", "double", "bfloat16", "half", "to", "contiguous")
_ELEMENTWISE = (*_CASTS, "tanh", "neg", "clamp", "mul", "__mul__", "__rmul__", "div", "true_divide", "__truediv__")
_CHANGED = (
    "logits that are cut over tensor-parallel ranks were changed in place and then handed to code that is not of "
    "torch's functions (an autograd function of its own); write the change out of place (logits = logits / scale)"
)
_VIEWS = ("view", "reshape")


def joined(own: Tensor, tp: Axis) -> Tensor:
    """The logits [*, V] of which this rank has `own` [*, V/tp]: gathered at once where no gradient is recorded.

    Otherwise `CutLogits`: waits for `tp` where they are read, so that all its ranks must read them.
    """
    if not (torch.is_grad_enabled() and own.requires_grad) or torch.compiler.is_compiling():
        return differentiable.all_gather_invariant(own, tp, dim=-1)
    return _cut(own, tp)


def _cut(own: Tensor, tp: Axis) -> "CutLogits":
    logits: CutLogits = _Joined.apply(own, tp)
    logits.own = own
    return logits


class CutLogits(Tensor):
    """The tensor of logits [*, V] that code gets of a head, while a rank of `tp` holds `own` [*, V/tp] of them.

    Operations on it wait for `tp` where they need the whole, so all of its ranks must run them. Raises RuntimeError for
    a change in place beside a view of the logits that is in use.
    """

    own: Tensor
    tp: Axis
    _whole: Tensor | None
    # Once the whole is changed, or watched, the part counts no more.
    _writes: list[str]
    # The logits that share memory with these.
    _views: "list[weakref.ref[CutLogits]]"

    @staticmethod
    def __new__(cls, own: Tensor, tp: Axis) -> "CutLogits":
        """Logits outside of any graph."""
        shape = (*own.shape[:-1], own.shape[-1] * tp.size)
        logits: CutLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=own.dtype, device=own.device)
        logits.own, logits.tp, logits._whole, logits._views = own, tp, None, [weakref.ref(logits)]
        logits._writes = []
        return logits

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CutLogits(shape={tuple(self.shape)}, dtype={self.dtype}, of rank {self.tp.rank} of {self.tp.size})"

    def gathered(self) -> Tensor:
        """All of the logits on every rank; waits for `tp` the first time."""
        if self._whole is None:
            # For the losses that come after a block without gradients, too.
            with torch.inference_mode(False), torch.enable_grad():
                self._whole = differentiable.all_gather_invariant(self.own, self.tp, dim=-1)
        return self._whole

    @property
    def is_cut(self) -> bool:
        """Whether an operation may work on this rank's part: where gradients are recorded by it."""
        return not self._writes and torch.is_grad_enabled() and self.own.requires_grad

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name in _ASKED or (name == "__get__" and getattr(func.__self__, "__name__", "") in (*_ABOUT, *_KINDS)):  # type: ignore[attr-defined]
            return super().__torch_function__(func, types, args, given)
        logits = args[0] if args else None
        if func is functional.cross_entropy and (losses := _cross_entropy(*args, **given)) is not None:
            return losses
        if isinstance(logits, CutLogits) and logits.is_cut:
            own = logits._of_own(func, name, args[1:], given)
            if own is logits.own:
                return logits
            if own is not None:
                return logits._with(own)
        written = logits if _writes(name) or given.get("inplace") else given.get("out")
        if isinstance(written, CutLogits):
            written._require_alone()
            written._writes.append(name)
        whole_args, whole_given = tree_map_only(CutLogits, lambda one: one.gathered(), (args, given))
        return func(*whole_args, **whole_given)

    def _of_own(self, func: Callable[..., Any], name: str, rest: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """What the operation makes of this rank's part; None where it needs the whole."""
        if name in _ELEMENTWISE and not any(
            isinstance(one, Tensor) and (one.requires_grad or one.dim()) for one in tree_leaves((rest, given))
        ):
            changed = func(self.own, *rest, **given)
            # On another device nobody could gather it.
            return changed if changed.device == self.own.device else None
        if given:
            return None
        if name in _VIEWS:
            shape = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
            if len(shape) > 1 and shape[-1] == self.shape[-1]:
                return func(self.own, (*shape[:-1], self.own.shape[-1]))
        if name == "flatten" and len(rest) == 2 and rest[1] % self.dim() < self.dim() - 1:
            return func(self.own, *rest)
        if name == "__getitem__" and _keeps_vocabulary(rest[0], self.dim()):
            return func(self.own, *rest)
        return None

    def _with(self, own: Tensor) -> "CutLogits":
        made = _cut(own, self.tp)
        if own.untyped_storage().data_ptr() == self.own.untyped_storage().data_ptr():
            self._views += made._views
            made._views = self._views
        return made

    def _require_alone(self) -> None:
        """Raises RuntimeError where others share memory with logits that are to change in place."""
        if any(view() is not None and view() is not self for view in self._views):
            raise RuntimeError(
                "logits that are cut over tensor-parallel ranks were changed in place while a view of them is in use; "
                "write the change out of place (logits = logits / scale)"
            )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # What goes past the functions of Python: an autograd function of somebody's own.
        def whole(one: CutLogits) -> Tensor:
            if one._writes or getattr(getattr(func, "_schema", None), "is_mutable", False):
                raise RuntimeError(_CHANGED)
            return collectives.all_gather(one.own.detach(), one.tp, one.own.dim() - 1)

        whole_args, whole_given = tree_map_only(CutLogits, whole, (args, dict(kwargs or {})))
        return func(*whole_args, **whole_given)


class _Joined(torch.autograd.Function):
    """This rank's logits as the whole; every rank has all of the gradient, and takes its part."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, tp: Axis) -> Tensor:
        logits = CutLogits(own, tp)
        ctx.tp, ctx.writes = tp, logits._writes
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.writes:
            # Only what goes past the functions of Python comes here, and it is not of the changed numbers.
            raise RuntimeError(_CHANGED)
        return collectives.shard_slice(grad, ctx.tp, grad.dim() - 1), None


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORED,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """As torch's `cross_entropy`; None for what it takes and the cut one does not."""
    is_known = weight is None and size_average is None and reduce is None
    if not (is_known and isinstance(input, CutLogits) and input.is_cut and input.dim() == 2):
        return None
    if reduction not in ("mean", "sum", "none"):
        return None
    if target.dim() != 1 or target.is_floating_point() or len(target) != len(input):
        return None
    labels_T = target
    if ignore_index != IGNORED:
        # No label is both of these, and -100 is none of the vocabulary.
        labels_T = target.masked_fill(target == IGNORED, input.shape[1]).masked_fill(target == ignore_index, IGNORED)
    losses_T = vocab_parallel_cross_entropy(
        input.own,
        labels_T,
        tp=input.tp,
        vocab_size=input.shape[1],
        label_smoothing=label_smoothing,
        is_kept=True,
    )
    if autocast_dtype(input.own) is None:
        losses_T = losses_T.to(input.dtype)
    if reduction == "mean":
        return mean_over(losses_T, (labels_T != IGNORED).sum())
    return losses_T.sum() if reduction == "sum" else losses_T


def _keeps_vocabulary(index: Any, num_dims: int) -> bool:
    """Whether an index of logits leaves their last dim as it is."""
    entries = index if isinstance(index, tuple) else (index,)
    if all(type(one) in (int, slice) or one is Ellipsis for one in entries):
        if Ellipsis in entries:
            return len(entries) - 1 < num_dims and (entries[-1] is Ellipsis or entries[-1] == slice(None))
        return len(entries) < num_dims or (len(entries) == num_dims and entries[-1] == slice(None))
    # Rows by a mask, or by their numbers.
    rows = entries[0]
    return len(entries) == 1 and isinstance(rows, Tensor) and (rows.dim() if rows.dtype == torch.bool else 1) < num_dims


def _writes(name: str) -> bool:
    is_in_place = name.endswith("_") and not name.endswith("__")
    return (
        is_in_place
        or name in ("__setitem__", *_WATCHING)
        or (name.startswith("__i") and name not in ("__index__", "__invert__"))
    )
