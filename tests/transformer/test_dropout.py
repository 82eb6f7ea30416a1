"""Dropout masks depend on what is dropped, not on the rank: they agree on every cut and differ between positions."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lightning_megatron.comm.rng import Draws
from lightning_megatron.mesh import AttentionKernel, Mesh, Sizes
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.transformer.attention import SelfAttention
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.dropout import AttentionDropout, Dropout, drop
from lightning_megatron.transformer.position_cache import PositionCache
from lightning_megatron.transformer.tokens import Tokens, stream_of


def stream(batch: int, sequence: int, mesh: Mesh | None = None, step: int = 0) -> Tokens:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    draws = Draws(seed=1, step=step)
    mesh = mesh or Mesh.single()
    return stream_of(
        (batch, sequence), positions=PositionCache(config), mesh=mesh, draws=draws, device=torch.device("cpu")
    )


def test_features_that_are_not_dropped_are_scaled_and_the_rest_are_zero() -> None:
    x = torch.rand(4 * 64, 128) + 1
    out = Dropout(0.25, "layers.0.mlp")(x, stream(4, 64))
    is_kept = out != 0
    torch.testing.assert_close(out[is_kept], x[is_kept] / 0.75)
    # 32,768 draws: five standard deviations are 0.012.
    assert is_kept.float().mean().item() == pytest.approx(0.75, abs=0.012)
    for dim in (0, 1):
        assert is_kept.float().mean(dim).min() > 0.4 and is_kept.float().mean(dim).max() < 1.0


def test_the_gradient_is_dropped_like_the_value_and_one_byte_is_saved() -> None:
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    keep = torch.rand(6, 5) > 0.3
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        out = drop(x, keep, 0.3)
    assert [t.element_size() for t in saved] == [1]
    out.backward(torch.ones_like(out))
    assert x.grad is not None
    torch.testing.assert_close(x.grad, keep / 0.7, check_dtype=False)


def test_shards_draw_their_part_of_the_whole_mask() -> None:
    dropout = Dropout(0.5, "embedding")
    x = torch.ones(3 * 7, 16)
    full = dropout(x, stream(3, 7))
    sizes = Sizes(world=4, tp=4, sequence_parallel=True)
    shards = [dropout(torch.ones(6, 16), stream(3, 7, Mesh.imagine(rank, sizes))) for rank in range(4)]
    assert torch.equal(torch.cat(shards)[:21], full)


def test_masks_differ_between_steps_names_samples_and_positions() -> None:
    x = torch.ones(2 * 8, 64)
    mask = Dropout(0.5, "layers.0.mlp")(x, stream(2, 8))
    assert not torch.equal(mask, Dropout(0.5, "layers.0.mlp")(x, stream(2, 8, step=1)))
    assert not torch.equal(mask, Dropout(0.5, "layers.0.attention")(x, stream(2, 8)))
    assert len({tuple(row.tolist()) for row in mask}) == 16


def test_attention_masks_of_heads_are_slices_of_the_whole() -> None:
    tokens = stream(2, 6)
    weights = torch.ones(2, 8, 6, 6)
    full = AttentionDropout(0.5, "layers.1.attention", 0)(weights, tokens)
    slices = [AttentionDropout(0.5, "layers.1.attention", first)(weights[:, :2], tokens) for first in range(0, 8, 2)]
    assert torch.equal(torch.cat(slices, dim=1), full)
    rows = full.flatten(0, 2)
    assert len({tuple(row.tolist()) for row in rows}) > 40  # of 96 rows of 6 coins: repeats come by chance alone


def no_draw() -> Tensor:
    raise AssertionError("a random key was drawn")


def test_nothing_is_dropped_in_evaluation_or_at_probability_zero() -> None:
    x = torch.randn(8, 4)
    no_keys = replace(stream(1, 8), make_keys=no_draw)
    assert Dropout(0.5, "a").eval()(x, no_keys) is x
    assert Dropout(0.0, "a")(x, no_keys) is x
    assert AttentionDropout(0.5, "a", 0).eval()(x, no_keys) is x


def test_rows_that_flex_attention_takes_drop_the_same_without_laying_weights_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = GPTConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=32,
        max_sequence_length=8,
        attention_dropout=0.5,
    )
    tokens = torch.arange(16).view(2, 8)

    def found_with(kernel: AttentionKernel) -> list[Tensor]:
        model = GPTModel(config, mesh=Mesh.imagine(0, Sizes(world=1, attention_kernel=kernel)), seed=0).double()
        loss: Tensor = model(tokens, labels=tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        return [loss.detach(), *(x.grad for x in model.parameters() if x.grad is not None)]

    wanted = found_with("fused")
    monkeypatch.setattr(SelfAttention, "_attend_dropping", None)
    for value, own in zip(found_with("flex"), wanted, strict=True):
        assert_close(value, own, rtol=1e-11, atol=1e-13)
