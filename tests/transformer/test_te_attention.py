"""Attention by Transformer Engine (a stand-in here) is torch's where it has a kernel, and torch's own elsewhere."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import Fp8Config
from lightning_megatron.context.context_layout import MaskSpec
from lightning_megatron.mesh import Mesh
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.transformer.attention import SelfAttention
from lightning_megatron.transformer.core_attention import TorchCoreAttention
from lightning_megatron.transformer.fp8_layers import use_transformer_engine
from lightning_megatron.transformer.te_attention import TECoreAttention
from tests.harness.threads import run_on_threads
from tests.precision import engine_stub
from tests.tensor.plain import thread_mesh

CONFIG = GPTConfig(num_layers=2, hidden_size=64, num_attention_heads=8, vocab_size=64, max_sequence_length=16)
VIEWS = {
    "causal": MaskSpec(is_causal=True),
    "window": MaskSpec(is_causal=True, window=3),
    "window of all": MaskSpec(is_causal=True, window=11),
    "both ways": MaskSpec(is_causal=False),
}
# Numbers in bfloat16 keep 8 bits, and are rounded once after sums in float32.
ROUNDING = 2.0**-8


def random(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """As layers hand heads over: [B, heads, S, D] as a view of [B, S, heads, D]."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.transpose(1, 2).requires_grad_()


def rounded_alike(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, rtol=ROUNDING, atol=ROUNDING * wanted.abs().max().item() / 4)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize(("num_ranks", "groups"), [(1, 8), (2, 4), (4, 2)])
def test_output_and_gradients_are_those_of_torch(
    num_ranks: int, groups: int, view: MaskSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = engine_stub.install(monkeypatch)
    config = replace(CONFIG, num_query_groups=groups)

    def on_rank(world: Any) -> None:
        mesh = thread_mesh(world, True)
        attention = SelfAttention(config, tp=mesh.tp, sp=mesh.sp, name="a", mask_spec=view)
        attention.scale *= 1.5
        heads, own_groups = attention.heads.num_heads, attention.heads.num_groups
        own = [random(2, 9, num, 8, seed=seed) for seed, num in enumerate((heads, own_groups, own_groups))]
        wider = [x.detach().double().requires_grad_() for x in own]
        weights = random(2, 9, heads, 8, seed=3)
        found = TECoreAttention(attention)(*own, {})
        wanted = TorchCoreAttention(mask_spec=view, scale=attention.scale)(*wider, {})
        rounded_alike(found, wanted)
        grads = torch.autograd.grad(found, own, weights)
        for grad, other in zip(grads, torch.autograd.grad(wanted, wider, weights.double()), strict=True):
            rounded_alike(grad, other)
        # A token more or less would be seen.
        other_view = MaskSpec(is_causal=True, window=2)
        assert (TorchCoreAttention(mask_spec=other_view, scale=attention.scale)(*wider, {}) - wanted).abs().max() > 0.1

    run_on_threads(num_ranks, on_rank)
    # Batch and sequence before heads.
    assert log.attended == [torch.Size((2, 9, 8 // num_ranks, 8))] * num_ranks


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(8, torch.float32), (12, torch.bfloat16), (136, torch.bfloat16)], ids=str
)
def test_what_would_be_materialised_goes_to_torch(
    head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = engine_stub.install(monkeypatch)
    mesh = Mesh.single()
    attention = SelfAttention(replace(CONFIG, head_dim=head_dim), tp=mesh.tp, sp=mesh.sp, name="a")
    own = [random(1, 5, 8, head_dim, seed=seed, dtype=dtype) for seed in range(3)]
    assert TECoreAttention(attention)(*own, {}).equal(attention.core_attention(*own, {}))
    assert log.attended == []


def loss_of(model: GPTModel, **segments: Tensor) -> Tensor:
    tokens = torch.randint(64, (2, 13), generator=torch.Generator().manual_seed(1))
    loss: Tensor = model(tokens[:, :-1], labels=tokens[:, 1:], **segments)
    return loss


def test_layers_of_a_model_attend_by_it_until_they_give_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    log = engine_stub.install(monkeypatch)
    # Norms of heads, in float32, hand on 16 bits.
    model = GPTModel(replace(CONFIG, qk_norm=True, position="rotary"), mesh=Mesh.single(), seed=3)
    engine = Fp8Config(engine="transformer_engine", num_first_layers_bf16=1)
    names = list(model.state_dict())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = loss_of(model)
        layers = use_transformer_engine({"model": (model, model.part_names)}, engine, stage=None)
        with layers.context():
            loss = loss_of(model)
            loss.backward()
            assert log.attended == [torch.Size((2, 12, 8, 8))]
            # Documents that share a row are not full sequences.
            loss_of(model, segments=torch.arange(12).expand(2, 12) // 5)
        assert list(model.state_dict()) == names
        layers.release()
        assert loss_of(model).equal(wanted)
    assert len(log.attended) == 1
    assert loss.item() == pytest.approx(wanted.item(), abs=0.01)


def test_weights_of_attention_are_dropped_by_our_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    log = engine_stub.install(monkeypatch)
    model = GPTModel(replace(CONFIG, attention_dropout=0.1), mesh=Mesh.single(), seed=3).bfloat16()
    layers = use_transformer_engine(
        {"model": (model, model.part_names)}, Fp8Config(engine="transformer_engine"), stage=None
    )
    with layers.context():
        loss_of(model)
        assert log.attended == []
        model.eval()
        loss_of(model)
    assert len(log.attended) == 2
