"""Finds in a loss's graph whether it couples the rows of a batch, as in-batch negatives do.

Where each row has a term of its own in a loss, the gradient by the numbers of one row does not depend on those of
another: second derivatives between rows are zero. They are taken by the numbers that the last weights computed: the
graph is followed from the loss to the operations that apply a weight, or to a pipelined model's output.
"""

from collections.abc import Iterable, Iterator
from itertools import islice, product
from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lightning_megatron.any_module.loss_count import is_output, kind_of

MAX_NUMBERS = 2**24
"""Numbers above which second derivatives are not taken: logits of a vocabulary, of which a step holds few copies."""
ROUNDING = 1e-4
"""Part of the largest second derivative up to which one between rows is taken for the rounding of a zero."""
_MAX_ORDERS = 64
# They pick rows of a weight, or multiply it, by what the batch holds.
_PICKS = ("Embedding", "EmbeddingBag", "IndexSelect", "Index", "Gather", "Take")
_PRODUCTS = ("Mm", "Addmm", "Bmm", "Baddbmm", "Mv", "Convolution")

Value = TypeVar("Value")


class RowCheck:
    """Warns, once, of a training loss that couples rows where a step runs in several parts of a global batch."""

    def __init__(self) -> None:
        self._is_over = False

    def check(self, loss: Tensor, num_rows: int, num_parts: int) -> None:
        """Looks at the first loss, [], of at least two rows, whose graph no backward has freed."""
        # While torch looks for anomalies it would tell of those of a second derivative.
        if self._is_over or num_parts == 1 or num_rows < 2 or torch.is_anomaly_enabled():
            return
        self._is_over = True
        if couples_rows(loss, num_rows):
            rank_zero_warn(
                "the loss of training_step seems to couple the rows of its batch (in-batch negatives, statistics of "
                f"the batch, a root of a mean), of which each of the {num_parts} parts of a global batch (microbatches "
                "of data-parallel ranks) has its own: the mean over parts is then not the loss of one device. Use "
                "num_microbatches=1, and gather what couples rows by self.all_gather(rows, sync_grads=True); where "
                'each part may stand for itself, return {"loss": loss, "loss_reduction": "mean"}',
                category=UserWarning,
            )


def couples_rows(loss: Tensor, num_rows: int) -> bool:
    """Whether a loss, [], of so many rows shows second derivatives between two of them.

    False also where nothing can be known: for operations without second derivatives or in Python (which may
    communicate), for more than `MAX_NUMBERS` numbers, and where rows depend on each other before the last weights.
    """
    edges = _last_edges(loss)
    if not edges:
        return False
    try:
        grads = torch.autograd.grad(loss, edges, retain_graph=True, allow_unused=True)
        sizes = [0 if grad is None else grad.numel() for grad in grads]
        orders = [[] if grad is None else list(_first_rows(grad, num_rows)) for grad in grads]
        edges, orders = _where(edges, map(bool, orders)), _where(orders, map(bool, orders))
        if not edges or sum(sizes) > MAX_NUMBERS:
            return False
        grads = torch.autograd.grad(loss, edges, create_graph=True)
        return all(_is_coupled(edges, grads, chosen) for chosen in islice(product(*orders), _MAX_ORDERS))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # An operation has no second derivative; what else is wrong with the graph the step's own backward raises.
        return False


def _first_rows(numbers: Tensor, num_rows: int) -> Iterator[Tensor]:
    """Masks of the first half of the rows, for each way in which numbers of rows may lie in the first dim, or in the
    second of three (sequences first): k of a row side by side, and that again for further batches (tokens of views)."""
    for dim in range(2 if numbers.ndim > 2 else min(numbers.ndim, 1)):
        length = numbers.shape[dim]
        each = 0 if length % num_rows else length // num_rows
        places = torch.arange(length, device=numbers.device).view(-1, *(1 for _ in numbers.shape[dim + 1 :]))
        for size in range(each, 0, -1):
            if each % size == 0:
                yield places // size % num_rows < num_rows // 2


def _is_coupled(edges: list[GradientEdge], grads: tuple[Tensor, ...], chosen: tuple[Tensor, ...]) -> bool:
    """Whether gradients by the chosen numbers change with others."""
    if not any(grad.requires_grad for grad in grads):
        return False
    # Of its own: torch's default generator shuffles the rows of the next epoch, on all ranks alike.
    generator = torch.Generator(grads[0].device).manual_seed(0)
    weights = [
        torch.randn(grad.shape, dtype=grad.dtype, device=grad.device, generator=generator) * own
        for grad, own in zip(grads, chosen, strict=True)
    ]
    differentiable = [grad.requires_grad for grad in grads]
    second = torch.autograd.grad(
        _where(grads, differentiable),
        edges,
        _where(weights, differentiable),
        retain_graph=True,
        allow_unused=True,
    )
    found = [(grad, own) for grad, own in zip(second, chosen, strict=True) if grad is not None]
    largest = max((float(grad.abs().max()) for grad, _ in found), default=0.0)
    return any(float((grad * ~own).abs().max()) > ROUNDING * largest for grad, own in found)


def _where(values: Iterable[Value], are_wanted: Iterable[bool]) -> list[Value]:
    return [value for value, is_wanted in zip(values, are_wanted, strict=True) if is_wanted]


def _last_edges(loss: Tensor) -> list[GradientEdge]:
    """Edges of a loss's graph at which the last weights, or a pipelined model, handed on what the loss is made of; none
    where an operation in Python comes first."""
    if loss.grad_fn is None:
        return []
    found: list[GradientEdge] = []
    are_weights: dict[Any, bool] = {}
    todo, seen = [(loss.grad_fn, 0)], set()
    while todo:
        node, output = todo.pop()
        if (node, output) in seen or _is_of_weights(node, are_weights):
            continue
        seen.add((node, output))
        if is_output(node) or _leaf(node) is not None or _applies_weight(node, are_weights):
            found.append(GradientEdge(node, output))
        elif isinstance(node, torch.autograd.function.BackwardCFunction):
            return []
        else:
            todo.extend(_inputs(node))
    # Derivatives by what others are made of would go through the network between them.
    before: set[Any] = set()
    todo = [one for edge in found for one in _inputs(edge.node)]
    while todo:
        node, output = todo.pop()
        if (node, output) not in before:
            before.add((node, output))
            todo.extend(_inputs(node))
    return [edge for edge in found if (edge.node, edge.output_nr) not in before]


def _applies_weight(node: Any, are_weights: dict[Any, bool]) -> bool:
    """Whether an operation of other numbers reads a weight of several."""
    return any(_is_of_weights(source, are_weights) and _numel(source, output) > 1 for source, output in _inputs(node))


def _is_of_weights(node: Any, known: dict[Any, bool]) -> bool:
    """Whether a parameter, or what an operation makes of parameters alone, comes from a node: a scaled weight, a normed
    one. `known` holds what is known of nodes."""
    todo = [node]
    while todo:
        one = todo[-1]
        if one in known:
            todo.pop()
            continue
        leaf, sources = _leaf(one), [source for source, _ in _inputs(one)]
        if leaf is not None or not sources:
            known[one] = isinstance(leaf, nn.Parameter)
        elif any(known.get(source) is False for source in sources):
            # What is not of weights alone shows at its first other source.
            known[one] = False
        elif missing := [source for source in sources if source not in known]:
            todo.append(missing[0])
            continue
        else:
            known[one] = _keeps_weights(one)
        todo.pop()
    return known[node]


def _keeps_weights(node: Any) -> bool:
    """Whether an operation of parameters has no other input, such as a batch that needs no gradient: it has no place
    for one, or its result is as large as a parameter."""
    if kind_of(node) in _PICKS:
        return False
    if all(source is not None for source, _ in node.next_functions):
        return True
    sizes = {_numel(source, output) for source, output in _inputs(node)}
    return kind_of(node) not in _PRODUCTS and _numel(node, 0) in sizes


def _numel(node: Any, output: int) -> int:
    """Elements of an output of an operation, or of a leaf."""
    leaf = _leaf(node)
    return leaf.numel() if leaf is not None else torch.Size(node._input_metadata[output].shape).numel()


def _inputs(node: Any) -> Iterator[tuple[Any, int]]:
    return ((source, output) for source, output in node.next_functions if source is not None)


def _leaf(node: Any) -> Tensor | None:
    """The tensor whose gradient a node keeps; None for an operation."""
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf
