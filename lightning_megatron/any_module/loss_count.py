"""What a loss is a mean over, known from the function of torch that computed it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from lightning_megatron.pipeline.collective import _Recorded
from lightning_megatron.pipeline.scheduled import _NoGradientByInput

# Operations that change neither the value nor what it is a mean over.
_PASSING = ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "ToCopy", "Alias", "Clone")
_OF_TERMS = (*_PASSING, "Add", "Sub", "Stack", "Neg", "Mul", "Div")
_MEANS = ("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits")
_LOSSES = (
    functional.cross_entropy,
    functional.nll_loss,
    functional.mse_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
)
# As torch's autograd keeps `reduction="mean"` and `"sum"`.
_MEAN, _SUM = 1, 2

_COUNT = "_lightning_megatron_count"


def mean_count(loss: Tensor) -> Tensor | int | None:
    """The number that a loss is a mean over: of valid targets, of elements; None where it does not show.

    It shows for losses of torch with reduction "mean" as the last operation, where a gradient is recorded or inside
    `CountedMeans`. Not for `mean()`: what that takes may be means itself.
    """
    known: Tensor | int | None = getattr(loss, _COUNT, None)
    return _count_of(_maker(loss)) if known is None else known


def _count_of(node: Any) -> Tensor | int | None:
    """The number that the result of an operation is a mean over, where it shows."""
    counted: Tensor | None = getattr(node, "num_counted", None)
    if counted is not None:
        return counted
    if node is None or getattr(node, "_saved_reduction", None) != _MEAN:
        return None
    kind = kind_of(node)
    try:
        if kind in ("NllLoss", "NllLoss2D"):
            count: Tensor | None = getattr(node, "_saved_total_weight", None)
            return count
        values = getattr(node, "_saved_self", None) if kind in _MEANS else None
        return None if values is None else values.numel()
    except RuntimeError:
        # Its backward has run and has freed them.
        return None


def counts_other_than_rows(loss: Tensor, rows: int) -> bool:
    """Whether a term of a loss shows that it is no mean over so many rows: a sum over them, divided by a tensor or not,
    or a mean over valid targets that are no multiple of them."""
    todo: list[Any] = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None:
            continue
        kind, sources = kind_of(node), [source for source, _ in node.next_functions if source is not None]
        if kind in _OF_TERMS or (kind in ("Sum", "Mean") and sources and kind_of(sources[0]) == "Stack"):
            todo += sources
        elif kind == "Sum":
            shape = tuple(node._saved_self_sym_sizes)
            if shape[:1] == (rows,) and not _is_of_weight(node, shape):
                return True
        elif getattr(node, "_saved_reduction", None) == _SUM:
            return True
        else:
            count = _count_of(node)
            if count is not None and float(count) % rows:
                return True
    return False


def _is_of_weight(node: Any, shape: tuple[int, ...]) -> bool:
    """Whether a matrix of this shape follows from a weight of the same, as a penalty's does."""
    todo, seen = [node] if len(shape) > 1 else [], set()
    while todo:
        one = todo.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        weight = getattr(one, "variable", None)
        if weight is not None and tuple(weight.shape) == shape:
            return True
        todo += [source for source, _ in one.next_functions]
    return False


def mean_over(losses_T: Tensor, count: Tensor) -> Tensor:
    """The mean [] of losses [T] over so many of them; what it is a mean over shows, as in torch's own."""
    mean: Tensor = _Mean.apply(losses_T, count)
    return mean


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses_T: Tensor, count: Tensor) -> Tensor:
        ctx.num_counted, ctx.shape = count, losses_T.shape
        return losses_T.sum() / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad / ctx.num_counted).expand(ctx.shape), None


def is_returned(loss: Tensor | None) -> bool:
    """Whether a step's loss is one that a pipelined network returned, and not computed from that. Without a graph there
    is nothing to tell by, and it is taken for one."""
    node = None if loss is None else _maker(loss)
    return node is None or is_output(node)


def is_output(node: Any) -> bool:
    """Whether an operation is a pipelined network's hand-over of its outputs to the step."""
    return kind_of(node) in (_NoGradientByInput.__name__, _Recorded.__name__)


def _maker(loss: Tensor) -> Any:
    """The operation that made a loss, of those that change it; None without a graph."""
    node: Any = loss.grad_fn
    while node is not None and kind_of(node) in _PASSING:
        node = node.next_functions[0][0]
    return node


def kind_of(node: Any) -> str:
    """The name of an operation of autograd, without its ending."""
    return str(node.name()).rstrip("0123456789").removesuffix("Backward")


class CountedMeans(TorchFunctionMode):
    """Inside the block losses keep what they are means over, where no gradient is recorded that tells."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func not in _LOSSES or torch.is_grad_enabled():
            return func(*args, **given)
        # Autograd counts, for a backward that nobody runs. It saves no tensors of inference mode.
        with torch.inference_mode(False), torch.enable_grad():
            args, given = tree_map_only(Tensor, lambda one: one.clone() if one.is_inference() else one, (args, given))
            inputs, *rest = args if args else [given.pop("input")]
            recorded = func(inputs.detach().requires_grad_(), *rest, **given)
        result: Tensor = recorded.detach()
        setattr(result, _COUNT, mean_count(recorded))
        return result
