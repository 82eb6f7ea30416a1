"""A token sees itself and the tokens right before it, however the sequence is cut into blocks."""

import math

import pytest
import torch
from torch import Tensor

from lightning_megatron.transformer.sliding_window import Masks, is_visible, sliding_window_attention


def spelled_out(queries: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
    """Attention token by token and head by head."""
    out = torch.zeros_like(queries)
    per_group = queries.shape[1] // keys.shape[1]
    for head in range(queries.shape[1]):
        for place in range(queries.shape[2]):
            seen = slice(max(0, place - window + 1), place + 1)
            k, v = keys[:, head // per_group, seen], values[:, head // per_group, seen]
            scores = (k @ queries[:, head, place].unsqueeze(-1)).squeeze(-1) / math.sqrt(queries.shape[-1])
            out[:, head, place] = (scores.softmax(-1).unsqueeze(-1) * v).sum(1)
    return out


# Below two windows, two windows, whole blocks past them, and a block that is not full.
@pytest.mark.parametrize(("sequence", "window"), [(9, 8), (9, 5), (10, 5), (15, 5), (16, 5), (13, 3), (7, 1), (2, 1)])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_output_and_gradients_are_those_of_every_token_on_its_own(sequence: int, window: int, groups: int) -> None:
    queries = torch.randn(2, 4, sequence, 6, dtype=torch.float64, requires_grad=True)
    keys, values = (torch.randn(2, groups, sequence, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = torch.randn(2, 4, sequence, 6, dtype=torch.float64)
    wanted = spelled_out(queries, keys, values, window)
    grads = torch.autograd.grad((wanted * weights).sum(), (queries, keys, values))
    found = sliding_window_attention(queries, keys, values, window, {})
    assert (found - wanted).abs().max() < 1e-12
    # Half the scale of twice the queries.
    scaled = sliding_window_attention(2 * queries, keys, values, window, {}, scale=0.5 / math.sqrt(6))
    assert (scaled - wanted).abs().max() < 1e-12
    for grad, other in zip(torch.autograd.grad((found * weights).sum(), (queries, keys, values)), grads, strict=True):
        assert (grad - other).abs().max() < 1e-12
    # One token more or less is seen in the numbers.
    assert (spelled_out(queries, keys, values, window + 1) - wanted).abs().max() > 1e-3


def test_a_row_sees_only_its_window() -> None:
    seen = is_visible(5, 2, torch.device("cpu"))
    assert seen.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert is_visible(4, 0, torch.device("cpu")).equal(torch.ones(4, 4, dtype=torch.bool).tril())


def test_layers_of_a_call_share_their_mask_which_grows_with_the_window_alone() -> None:
    masks: Masks = {}
    x = torch.randn(1, 1, 40, 4)
    for _ in range(3):
        sliding_window_attention(x, x, x, 4, masks)
    [mask] = masks.values()
    assert mask.shape == (4, 8)
