"""Latent attention with adapters, in FP8, recomputed and with a cache: as on one device, and with small latents."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import Fp8Config
from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import GenerationConfig, GPTModel, generate
from lightning_megatron.rules.cross_config import _fp8_model
from lightning_megatron.sharding import Initial, sharded_parameters
from lightning_megatron.transformer import recompute
from lightning_megatron.transformer.fp8_layers import use_torch
from lightning_megatron.transformer.init import fill_initial_
from lightning_megatron.transformer.lora import LoraConfig, add_lora, merged_lora
from lightning_megatron.transformer.recompute import RecomputeConfig
from tests.harness.threads import new_group, run_on_threads
from tests.models.test_gpt import VARIANTS, batch_of, largest_difference, model_of
from tests.reference.unsplit import unsplit_gradients

LATENT = VARIANTS["latents"]
LINEARS = ("query_down", "query_up", "key_value_down", "key_value_up", "projection")
ADAPTERS = LoraConfig(rank=3, dropout=0.2, targets=tuple(f"attention.{name}" for name in LINEARS))


def adapted(mesh: Mesh | None = None) -> GPTModel:
    """A model with adapters that change its output: as after some training, no B is zero."""
    model = model_of(LATENT, mesh)
    add_lora(model, ADAPTERS, seed=4)
    model.double()
    for name, parameter, shard in sharded_parameters(model):
        if name.endswith("lora.b"):
            fill_initial_(parameter, replace(shard, initial=Initial(std=0.3)), 5, name)
    return model


def step(model: GPTModel) -> dict[str, Tensor]:
    """Unsplit gradients of a training step, and its loss."""
    tokens, labels, mask = batch_of(3, 7)
    model.draws.step = 5
    loss = model(tokens, labels, mask)
    loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    grads = {name: grad for name, grad in unsplit_gradients(model).items() if name in trained}
    return {**grads, "loss": loss.detach()}


def on_mesh(world: Any, sizes: Sizes) -> dict[str, Tensor]:
    model = adapted(Mesh.build(sizes, world.rank(), new_group))
    cp = model.mesh.cp
    return {name: collectives.all_reduce(x, cp) / cp.size for name, x in step(model).items()}


@pytest.mark.parametrize(
    "sizes", [Sizes(world=2, tp=2), Sizes(world=4, tp=2, cp=2, sequence_parallel=True)], ids=["tp2", "tp2+sp cp2"]
)
def test_gradients_of_adapters_do_not_depend_on_the_mesh(sizes: Sizes) -> None:
    wanted = step(adapted())
    assert len(wanted) == 2 * 2 * len(LINEARS) + 1 and all(x.abs().max() > 1e-4 for x in wanted.values())
    for found in run_on_threads(sizes.world, on_mesh, sizes):
        assert largest_difference(found, wanted) < 1e-12


def test_the_cache_holds_a_latent_of_each_token_and_adapters_count_in_what_is_made_of_it() -> None:
    model, prompt = adapted().eval(), batch_of(2, 5)[0]
    texts = [row.tolist() for row in generate(model, prompt, GenerationConfig(max_new_tokens=6, temperature=0.0))]
    for row, text in zip(prompt, texts, strict=True):
        tokens = row.tolist()
        for _ in range(6):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        assert text == tokens
    with merged_lora(model):
        assert texts == [
            row.tolist() for row in generate(model, prompt, GenerationConfig(max_new_tokens=6, temperature=0.0))
        ]
    bare = generate(model_of(LATENT).eval(), prompt, GenerationConfig(max_new_tokens=6, temperature=0.0))
    assert texts != [row.tolist() for row in bare]


@pytest.mark.parametrize("way", [RecomputeConfig(granularity="selective", parts=("core_attention", "norm"))])
def test_recomputation_changes_no_bit(way: RecomputeConfig) -> None:
    config = replace(LATENT, attention_dropout=0.1)
    wanted, model = step(model_of(config)), model_of(config)
    recompute.set_recomputed(model, way)
    assert all(torch.equal(found, wanted[name]) for name, found in step(model).items())


WIDE = replace(
    LATENT,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=4,
    ffn_hidden_size=64,
    head_dim=24,
    num_layers=1,
    latent=replace(
        LATENT.latent, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=16, v_head_dim=24
    ),
)


def loss_in_fp8(mesh: Mesh) -> list[float]:
    """The loss of two calls in FP8, whose scales ranks agree on."""
    model = model_of(WIDE, mesh).float()
    names = tuple(name for name in model.part_names if name.startswith("layers"))
    layers = use_torch(
        {"model": (model, names)},
        Fp8Config(scaling="current"),
        tp=mesh.tp,
        replicas=mesh.axis("dp+cp"),
        pp=mesh.pp,
        device=torch.device("cpu"),
    )
    tokens, labels, _ = batch_of(4, 8)
    losses = []
    for _ in range(2):
        loss = model(tokens, labels)
        loss.backward()
        layers.end_step()
        losses.append(loss.item())
    layers.release()
    losses.append(model(tokens, labels).item())
    return losses


@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_in_fp8_a_cut_model_has_the_loss_of_one_rank(is_sequence_parallel: bool) -> None:
    sizes = Sizes(world=2, tp=2, sequence_parallel=is_sequence_parallel)
    wanted = loss_in_fp8(Mesh.single())
    # A cast in another order of sums may move a number to the next of float8; that is far below what FP8 changes.
    change = abs(wanted[0] - wanted[-1])
    for found in run_on_threads(2, lambda world: loss_in_fp8(Mesh.build(sizes, world.rank(), new_group))):
        assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 0.2 * change
    assert change > 1e-4


def test_what_does_not_go_with_latents_is_refused_at_once() -> None:
    with pytest.raises(ValueError) as raised:
        replace(LATENT, num_query_groups=2, qk_norm=True, attention_sinks=True, head_dim=8)
    assert len(str(raised.value).splitlines()) == 4
    assert "head_dim (8) must be 10 for latent attention" in str(raised.value)
    [fault] = [one for one in _fp8_model(Fp8Config(engine="transformer_engine"), WIDE, Sizes()) if "latent" in one]
    assert "engine ('transformer_engine') must be 'torch'" in fault
