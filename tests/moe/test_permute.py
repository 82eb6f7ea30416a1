"""Tests of the index maths: rows stand by expert and then by token, and come back to the tokens they are of."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_megatron.moe.permute import Permutation, permute, regrouped, sort_by_expert, unpermute

E = 5


@st.composite
def choices(draw: st.DrawFn) -> Tensor:
    """Experts of some tokens, -1 and others' experts among them, none twice by one token."""
    num_tokens, num_chosen = draw(st.integers(0, 9)), draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**30))
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(E + 2, generator=generator)[:num_chosen] - 1 for _ in range(num_tokens)]
    return torch.stack(rows) if rows else torch.empty(0, num_chosen, dtype=torch.int64)


def expected_rows(expert_ids_TK: Tensor) -> list[list[tuple[int, int]]]:
    """For each expert the pairs (token, which of its choices), by token."""
    pairs = [(int(e), t, k) for t, row in enumerate(expert_ids_TK) for k, e in enumerate(row)]
    return [[(t, k) for each, t, k in pairs if each == expert] for expert in range(E)]


@given(choices())
def test_rows_stand_by_expert_and_within_an_expert_by_token(expert_ids_TK: Tensor) -> None:
    by_expert, num_chosen = sort_by_expert(expert_ids_TK, E), expert_ids_TK.shape[1]
    expected = expected_rows(expert_ids_TK)
    assert by_expert.counts_E.tolist() == [len(rows) for rows in expected]
    flat = [t * num_chosen + k for rows in expected for t, k in rows]
    assert by_expert.dropless(len(flat)).tolist() == flat
    of_tokens, of_choices = by_expert.orders(by_expert.dropless(len(flat)))
    assert of_tokens.sources_R.tolist() == [t for rows in expected for t, _ in rows]
    for t, row in enumerate(expert_ids_TK):
        for k in range(len(row)):
            place = flat.index(t * num_chosen + k) if t * num_chosen + k in flat else -1
            assert of_tokens.places_SK[t, k] == place == of_choices.places_SK[t * num_chosen + k, 0]


@given(choices(), st.integers(0, 3))
def test_padded_rows_are_the_same_ones_with_gaps_after_those_of_each_expert(expert_ids_TK: Tensor, more: int) -> None:
    by_expert, expected = sort_by_expert(expert_ids_TK, E), expected_rows(expert_ids_TK)
    capacity = max(len(rows) for rows in expected) + more
    padded = by_expert.padded(capacity)
    num_chosen = expert_ids_TK.shape[1]
    assert padded.tolist() == [
        choice for rows in expected for choice in [t * num_chosen + k for t, k in rows] + [-1] * (capacity - len(rows))
    ]
    of_tokens, _ = by_expert.orders(padded)
    x = torch.randn(len(expert_ids_TK), 3, dtype=torch.float64)
    rows = permute(x, of_tokens)
    assert (rows[padded == -1] == 0).all() and torch.equal(rows[padded >= 0], x[padded[padded >= 0] // num_chosen])


@given(choices())
def test_taking_and_adding_up_are_each_others_gradient_and_give_each_token_times_its_rows(
    expert_ids_TK: Tensor,
) -> None:
    by_expert = sort_by_expert(expert_ids_TK, E)
    of_tokens, of_choices = by_expert.orders(by_expert.dropless(int(by_expert.counts_E.sum())))
    times = ((expert_ids_TK >= 0) & (expert_ids_TK < E)).sum(1, keepdim=True)
    x = torch.randn(len(expert_ids_TK), 3, dtype=torch.float64, requires_grad=True)
    back = unpermute(permute(x, of_tokens), of_tokens)
    torch.testing.assert_close(back, x * times, rtol=0, atol=1e-12)
    (grad,) = torch.autograd.grad(back, x, x.detach())
    torch.testing.assert_close(grad, x.detach() * times * 1.0, rtol=0, atol=1e-12)
    weights = torch.randn(expert_ids_TK.numel(), dtype=torch.float64, requires_grad=True)
    taken = permute(weights, of_choices)
    assert torch.equal(taken, weights[of_choices.sources_R])
    (grad,) = torch.autograd.grad(taken.sum(), weights)
    assert torch.equal(grad, (times.new_tensor(of_choices.places_SK[:, 0].ge(0).tolist())).double())


def test_the_gradients_of_both_are_those_that_differences_show() -> None:
    order = Permutation(torch.tensor([1, 0, -1, 1]), torch.tensor([[1, -1], [0, 3], [-1, -1]]))
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: permute(x, order), (x,))
    assert torch.autograd.gradcheck(lambda rows: unpermute(rows, order), (rows,))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**30))
def test_blocks_of_rows_change_places_and_keep_their_order_within(p: int, q: int, own: int, seed: int) -> None:
    sizes = torch.randint(0, 4, (p, q, own), generator=torch.Generator().manual_seed(seed))
    blocks = {
        (i, j, k): [f"{i} {j} {k} {n}" for n in range(int(sizes[i, j, k]))]
        for i in range(p)
        for j in range(q)
        for k in range(own)
    }
    before = [row for block in blocks.values() for row in block]
    after = [row for k in range(own) for j in range(q) for i in range(p) for row in blocks[i, j, k]]
    order = regrouped(sizes, len(before))
    assert [before[source] for source in order.sources_R.tolist()] == after
    assert [after[place] for place in order.places_SK[:, 0].tolist()] == before
    # Where no row can move nothing is copied.
    rows = torch.arange(len(before))
    assert permute(rows, order).tolist() == order.sources_R.tolist()
    assert (permute(rows, order) is rows) == (unpermute(rows, order) is rows) == (sorted((p, q, own))[1] == 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_low_precision_are_added_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    num = 16
    order = Permutation(torch.zeros(num, dtype=torch.int64), torch.arange(num)[None])
    rows = (torch.rand(num, 64) + 1).to(dtype)
    assert torch.equal(unpermute(rows, order)[0], rows.float().sum(0).to(dtype))
    in_turn = rows[0]
    for row in rows[1:]:
        in_turn = in_turn + row
    assert not torch.equal(in_turn, unpermute(rows, order)[0])
