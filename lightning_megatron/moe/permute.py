"""Tokens sorted by expert and back: index maths on the device, without communication or a wait for the host.

A row is a token on its way to one expert. Rows stand sorted by expert, within an expert by token. `permute` makes rows
of tokens, `unpermute` adds the rows of each token up; each is the other's gradient, and both only read by index, so
sums have one order on every device.

    expert_ids_TK = [[2, 0], [0, -1], [2, 1]]      token 1 has one choice only
    rows      = tokens 0 1 | 2 | 0 2            of experts 0, 1, 2
    places_TK = [[3, 0], [1, -1], [4, 2]]

T tokens, K experts of each, E experts, R rows, S sources of rows (tokens or token-expert assignments), L own experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, eq=False)
class Permutation:
    """Which row comes from which source: two views of the same pairs."""

    sources_R: Tensor
    """Source of each row, -1 for a row of zeros: int64."""
    places_SK: Tensor
    """Rows of each source, -1 where it has fewer: int64."""
    has_empty_rows: bool = True
    """Whether a row may have no source. Known on the host: masking all rows costs more than taking them."""
    has_gaps: bool = True
    """Whether a source may have fewer rows than others."""
    is_identity: bool = False
    """Whether row i comes from source i, one each."""


@dataclass(frozen=True, eq=False)
class SortedChoices:
    """All token-expert assignments, sorted by expert and then by token; those to no expert last."""

    choices_N: Tensor
    """Index of each assignment, token * K + k: int64 [T * K]."""
    counts_E: Tensor
    """Tokens of each expert: int64."""
    num_chosen: int

    def dropless(self, num_rows: int) -> Tensor:
        """Assignment of each row, [R], where none is dropped; `num_rows` is the sum of the counts."""
        return self.choices_N[:num_rows]

    def padded(self, capacity: int) -> Tensor:
        """Assignment of each row, [E * capacity]: `capacity` rows for each expert, -1 after those it has."""
        first_E1 = (self.counts_E.cumsum(0) - self.counts_E)[:, None]
        row_1C = torch.arange(capacity, device=self.counts_E.device)[None]
        if not len(self.choices_N):
            return row_1C.new_full((len(self.counts_E) * capacity,), -1)
        choices_EC = self.choices_N[(first_E1 + row_1C).clamp(max=len(self.choices_N) - 1)]
        return torch.where(row_1C < self.counts_E[:, None], choices_EC, -1).flatten()

    def orders(self, choices_R: Tensor, *, is_dropless: bool = False) -> tuple[Permutation, Permutation]:
        """Permutations from tokens, and from assignments, to these rows; `is_dropless` says that no row is empty."""
        num_choices = len(self.choices_N)
        # One more entry, for -1.
        rows = choices_R.new_full((num_choices + 1,), -1)
        rows[choices_R] = torch.arange(len(choices_R), device=choices_R.device)
        known = (not is_dropless, not is_dropless or len(choices_R) < num_choices)
        of_choices = Permutation(choices_R, rows[:num_choices, None], *known)
        tokens_R = choices_R.div(self.num_chosen, rounding_mode="floor")
        return Permutation(tokens_R, rows[:num_choices].view(-1, self.num_chosen), *known), of_choices


def sort_by_expert(expert_ids_TK: Tensor, num_experts: int) -> SortedChoices:
    """Assignments sorted by expert; experts outside of 0 to `num_experts` - 1 count as none."""
    chosen = expert_ids_TK.flatten()
    keys = torch.where((chosen >= 0) & (chosen < num_experts), chosen, num_experts)
    sorted_keys, choices = keys.sort(stable=True)
    # A bincount would wait for the device to learn the size of its output.
    bounds = torch.searchsorted(sorted_keys, torch.arange(num_experts + 1, device=keys.device))
    return SortedChoices(choices, bounds.diff(), expert_ids_TK.shape[1])


def regrouped(sizes_PQL: Tensor, num_rows: int) -> Permutation:
    """Permutation from rows in blocks (p, q, l), l fastest, of these sizes to blocks (l, q, p), p fastest.

    `num_rows` is the sum of the sizes.
    """
    if sum(size > 1 for size in sizes_PQL.shape) <= 1:
        # With one dim above 1 both orders are the same.
        rows = torch.arange(num_rows, device=sizes_PQL.device)
        return Permutation(rows, rows[:, None], has_empty_rows=False, has_gaps=False, is_identity=True)
    sizes, ends = sizes_PQL.flatten(), sizes_PQL.flatten().cumsum(0)
    first_PQL = (ends - sizes).view(sizes_PQL.shape)
    new_sizes = sizes_PQL.permute(2, 1, 0).flatten()
    shift = first_PQL.permute(2, 1, 0).flatten() - (new_sizes.cumsum(0) - new_sizes)
    rows = torch.arange(num_rows, device=sizes.device)
    sources = rows + shift.repeat_interleave(new_sizes, output_size=num_rows)
    row_of_source = torch.empty_like(sources)
    row_of_source[sources] = rows
    return Permutation(sources, row_of_source[:, None], has_empty_rows=False, has_gaps=False)


def permute(x: Tensor, order: Permutation) -> Tensor:
    """Rows [R, ...] taken from the sources `x` [S, ...]."""
    rows: Tensor = x if order.is_identity else _Take.apply(x, order)
    return rows


def unpermute(rows: Tensor, order: Permutation) -> Tensor:
    """Sum [S, ...] of the rows [R, ...] of each source, added in float32 or wider."""
    sums: Tensor = rows if order.is_identity else _AddUp.apply(rows, order)
    return sums


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Permutation) -> Tensor:
        ctx.order = order
        return _taken(x, order.sources_R, order.has_empty_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _added(grad, ctx.order), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Permutation) -> Tensor:
        ctx.order = order
        return _added(rows, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _taken(grad, ctx.order.sources_R, ctx.order.has_empty_rows), None


def _taken(x: Tensor, index: Tensor, has_none: bool) -> Tensor:
    if not len(x):
        return x.new_zeros(len(index), *x.shape[1:])
    if not has_none:
        return x.index_select(0, index)
    taken = x.index_select(0, index.clamp(min=0))
    return taken.masked_fill_((index < 0).view(-1, *(1 for _ in x.shape[1:])), 0)


def _added(rows: Tensor, order: Permutation) -> Tensor:
    first, *others = order.places_SK.unbind(1)
    total = _taken(rows, first, order.has_gaps)
    if others:
        total = total.to(torch.promote_types(rows.dtype, torch.float32))
        for index in others:
            total += _taken(rows, index, order.has_gaps)
    return total.to(rows.dtype)
