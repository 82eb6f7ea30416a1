"""A model of each kind computes on a GPU what it computes on the CPU: loss and every gradient, in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.mesh import Mesh
from lightning_megatron.models import BertConfig, BertModel, GPTConfig, GPTModel, LlavaModel, T5Config, T5Model
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from tests.gpu.devices import each_device
from tests.models import small_llava

SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 131, "init_std": 0.3}
GPT = GPTConfig(num_layers=2, **SIZES, max_sequence_length=24)
LLAMA = replace(GPT, activation="swiglu", normalization="rmsnorm", position="rotary", add_bias_linear=False)
EXPERTS = MoEConfig(router=RouterConfig(num_experts=8, top_k=2), ffn_hidden_size=24)
MODELS: dict[str, tuple[Any, Any]] = {
    "gpt": (GPTModel, GPT),
    "gpt, dropout": (GPTModel, replace(GPT, hidden_dropout=0.2, attention_dropout=0.2, ffn_dropout=0.2)),
    "llama": (GPTModel, LLAMA),
    "llama, window": (GPTModel, replace(LLAMA, sliding_window=5, num_query_groups=2)),
    "llama, packed": (GPTModel, LLAMA),
    "experts": (GPTModel, replace(LLAMA, moe=EXPERTS)),
    "bert": (BertModel, BertConfig(num_layers=2, **SIZES)),
    "t5": (T5Model, T5Config(num_layers=1, num_decoder_layers=1, **SIZES)),
    "llava": (LlavaModel, small_llava.LLAVA),
}


def batch_of(name: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(131, (3, 24), generator=generator) for _ in range(2))
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    if name == "llava":
        return small_llava.batch_of(small_llava.LLAVA, (1, 0, 2))
    if name == "t5":
        return {"encoder_tokens": tokens, "decoder_tokens": labels[:, :9].clamp(0), "labels": labels[:, :9]}
    batch = {"tokens": tokens, "labels": labels}
    if name == "llama, packed":
        batch["segments"] = torch.arange(4).repeat_interleave(torch.tensor([3, 9, 1, 11])).expand(3, 24)
    if name == "bert":
        batch["sentence_order_labels"] = torch.tensor([1, 0, 1])
        batch["padding_mask"] = (torch.arange(24) < 20).expand(3, 24)
    return batch


def step(name: str, device: str, seed: int = 7) -> list[Tensor]:
    """Loss and gradients, on the host."""
    kind, config = MODELS[name]
    model = kind(config, mesh=Mesh.single(), seed=seed).double().to(device)
    # What models read on the host stays there.
    batch = {
        key: value.to(device) if isinstance(value, Tensor) and key not in ("segments", "padding_mask") else value
        for key, value in batch_of(name).items()
    }
    if name == "llava":
        batch["images"] = [None if image is None else image.to(device) for image in batch["images"]]
    loss = model(**batch)
    loss.backward()
    return [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]


@each_device
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_cpu(name: str, device: str) -> None:
    wanted, found = step(name, "cpu"), step(name, device)
    assert len(wanted) == len(found) > 10
    for one, other in zip(wanted, found, strict=True):
        # Sums of a few hundred numbers of order 1 in another order, and functions rounded otherwise.
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-9)
    assert abs(step(name, device, seed=8)[0] - wanted[0]) > 1e-4


@each_device
def test_experts_without_rows_get_gradients_of_zero_in_bfloat16(device: str) -> None:
    # The kernel of grouped products leaves undefined what it has no rows for, and sizes are multiples of 16 bytes.
    experts = MoEConfig(router=RouterConfig(num_experts=16, top_k=1, norm_topk_prob=False), ffn_hidden_size=32)
    model = GPTModel(replace(LLAMA, num_layers=1, moe=experts), mesh=Mesh.single(), seed=7).to(device)
    # What memory holds where nothing is written.
    torch.full((1 << 22,), float("nan"), device=device)
    tokens = torch.tensor([[5, 9, 5]], device=device)
    with torch.autocast(device, torch.bfloat16):
        model(tokens, labels=tokens).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if ".experts." in name and p.grad is not None}
    assert len(gradients) == 2
    for name, gradient in gradients.items():
        is_used_E = gradient.flatten(1).abs().sum(1) > 0
        assert gradient.isfinite().all() and 1 <= int(is_used_E.sum()) <= 3, name
