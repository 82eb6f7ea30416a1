"""Finds in a loss's graph whether it couples the rows of a batch, as in-batch negatives do; a step is not run again.

Where each row has a term of its own in a loss, the gradient by the numbers of one row does not depend on those of
another: second derivatives between rows are zero. They are taken by the numbers that the last weights computed: the
graph is followed from the loss to the operations that read a parameter, or to a pipelined model's output.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lightning_megatron.any_module.loss_count import is_output, kind_of

MAX_NUMBERS = 2**24
"""Numbers above which second derivatives are not taken: logits of a vocabulary, of which a step holds few copies."""
ROUNDING = 1e-4
"""Part of the largest second derivative up to which one between rows is taken for the rounding of a zero."""
_SAME_NUMBERS = ("T", "Transpose", "Permute", "View", "UnsafeView", "Expand", "Unsqueeze", "ToCopy", "Alias", "Clone")


class RowCheck:
    """Warns, once, of a training loss that couples rows where a step runs in several parts of a global batch."""

    def __init__(self) -> None:
        self._is_over = False

    def check(self, loss: Tensor, num_rows: int, num_parts: int) -> None:
        """Looks at the first loss, [], of at least two rows, whose graph no backward has freed."""
        if self._is_over or num_parts == 1 or num_rows < 2:
            return
        self._is_over = True
        if couples_rows(loss, num_rows):
            rank_zero_warn(
                "the loss of training_step couples the rows of its batch (in-batch negatives, statistics of the batch, "
                f"a root of a mean), of which each of the {num_parts} parts of a global batch (microbatches of "
                "data-parallel ranks) has its own: the mean over parts is not the loss of one device. Use "
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
        edges = [
            edge
            for edge, grad in zip(edges, grads, strict=True)
            if grad is not None and grad.ndim and not len(grad) % num_rows
        ]
        if not edges or sum(sizes) > MAX_NUMBERS:
            return False
        grads = torch.autograd.grad(loss, edges, create_graph=True)
        # Of several numbers a row (tokens, pairs) those of a row lie side by side, or one batch behind the other.
        groupings: list[Callable[[Tensor], Tensor]] = [
            lambda grad: torch.arange(len(grad), device=grad.device) // (len(grad) // num_rows),
            lambda grad: torch.arange(len(grad), device=grad.device) % num_rows,
        ]
        return all(_is_coupled(edges, grads, [of(grad) < num_rows // 2 for grad in grads]) for of in groupings)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # An operation has no second derivative; what else is wrong with the graph the step's own backward raises.
        return False


def _is_coupled(edges: list[GradientEdge], grads: tuple[Tensor, ...], chosen: list[Tensor]) -> bool:
    """Whether gradients by the chosen rows change with any other row."""
    if not any(grad.requires_grad for grad in grads):
        return False
    # Of its own: torch's default generator shuffles the rows of the next epoch, on all ranks alike.
    generator = torch.Generator(grads[0].device).manual_seed(0)
    weights = [
        torch.randn(grad.shape, dtype=grad.dtype, device=grad.device, generator=generator) * _rows_like(rows, grad)
        for grad, rows in zip(grads, chosen, strict=True)
    ]
    second = torch.autograd.grad(
        [grad for grad in grads if grad.requires_grad],
        edges,
        [weight for grad, weight in zip(grads, weights, strict=True) if grad.requires_grad],
        retain_graph=True,
        allow_unused=True,
    )
    found = [(grad, _rows_like(rows, grad)) for grad, rows in zip(second, chosen, strict=True) if grad is not None]
    largest = max((float(grad.abs().max()) for grad, _ in found), default=0.0)
    return any(float((grad * ~rows).abs().max()) > ROUNDING * largest for grad, rows in found)


def _rows_like(rows: Tensor, grad: Tensor) -> Tensor:
    return rows.view(-1, *(1 for _ in grad.shape[1:]))


def _last_edges(loss: Tensor) -> list[GradientEdge]:
    """Edges of a loss's graph at which the last weights, or a pipelined model, handed on what the loss is made of; none
    where an operation in Python comes first."""
    if loss.grad_fn is None:
        return []
    found: list[GradientEdge] = []
    todo, seen = [(loss.grad_fn, 0)], set()
    while todo:
        node, output = todo.pop()
        if (node, output) in seen:
            continue
        seen.add((node, output))
        if is_output(node) or _reads_weight(node) or _leaf(node) is not None:
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
    return [
        edge
        for edge in found
        if (edge.node, edge.output_nr) not in before and not isinstance(_leaf(edge.node), nn.Parameter)
    ]


def _reads_weight(node: Any) -> bool:
    for source, _ in _inputs(node):
        while kind_of(source) in _SAME_NUMBERS:
            source, _ = next(_inputs(source))
        leaf = _leaf(source)
        if isinstance(leaf, nn.Parameter) and leaf.numel() > 1:
            return True
    return False


def _inputs(node: Any) -> Iterator[tuple[Any, int]]:
    return ((source, output) for source, output in node.next_functions if source is not None)


def _leaf(node: Any) -> Tensor | None:
    """The tensor whose gradient a node keeps; None for an operation."""
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf
