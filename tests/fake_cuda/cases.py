"""What a layer of each kind asks of a GPU in forward and backward, and what a call asks beside its layers.

They are told apart by models of one layer and of two, which get batches of some 8,192 tokens.
Sizes are those of published models; the vocabulary is small.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.device_work import DeviceWork, Work
from lightning_megatron.comm import rng
from lightning_megatron.lightning_modules.data_module import HOST_ENTRIES
from lightning_megatron.mesh import AttentionKernel, Mesh, Sizes
from lightning_megatron.models import (
    BertConfig,
    BertModel,
    GPTConfig,
    GPTModel,
    LlavaConfig,
    LlavaModel,
    T5Config,
    T5Model,
)
from lightning_megatron.models.vision import VisionConfig
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from lightning_megatron.moe.token_dispatcher import ReadCounts
from lightning_megatron.pipeline.module import PipelineModule
from lightning_megatron.pipeline.ragged import Ragged
from lightning_megatron.tensor.weight_gradients import WeightGradients, share
from lightning_megatron.transformer.moe import MoELayer
from tests.harness.fake_cuda import FakeCuda

TOKENS = 8192
IMAGE = 7
Batch = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model by its number of layers, and a batch on the host."""

    config: Callable[[int], Any]
    batch: Callable[[], Batch]
    with_other: Callable[[], Any] | None = None
    """Makes the model of one layer with one more of another kind, of which it has one too."""


def _rows(rows: int) -> Batch:
    tokens = torch.full((rows, TOKENS // rows), 1)
    return {"tokens": tokens, "labels": tokens}


def _documents() -> Batch:
    """Eight documents of different lengths in one row."""
    lengths = [TOKENS // 8 + 64 * (number - 4) for number in range(8)]
    lengths[-1] += TOKENS - sum(lengths)
    segments = torch.arange(8).repeat_interleave(torch.tensor(lengths))
    return {**_rows(1), "segments": segments.unsqueeze(0)}


def _samples() -> Batch:
    return {**_rows(16), "token_types": torch.ones(16, 512, dtype=torch.int64)}


def _pairs() -> Batch:
    """One row: attention with a bias runs in tiles, so that kernels grow with the batch."""
    encoder, decoder = torch.ones(1, 512, dtype=torch.int64), torch.ones(1, 171, dtype=torch.int64)
    return {"encoder_tokens": encoder, "decoder_tokens": decoder, "labels": decoder}


def _images() -> Batch:
    """Two images of 336 x 336 a row, in seven rows."""
    tokens = torch.full((7, 2 * 576 + 18), 1)
    tokens[:, 1 : 1 + 2 * 576] = IMAGE
    return {"tokens": tokens, "labels": tokens, "images": Ragged(torch.zeros(14, 3, 336, 336), [2] * 7)}


_LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "vocab_size": 1024,
    "max_sequence_length": TOKENS,
    "activation": "swiglu",
    "normalization": "rmsnorm",
    "position": "rotary",
    "add_bias_linear": False,
    "tie_embeddings": False,
}
_BASE: dict[str, Any] = {"hidden_size": 768, "num_attention_heads": 12, "vocab_size": 1024}
_EXPERTS = MoEConfig(router=RouterConfig(num_experts=8, top_k=2))


def _llama(layers: int) -> GPTConfig:
    return GPTConfig(num_layers=layers, **_LLAMA)


def _mixtral(layers: int) -> GPTConfig:
    return GPTConfig(num_layers=layers, **_LLAMA, moe=_EXPERTS)


def _gpt2(layers: int) -> GPTConfig:
    return GPTConfig(num_layers=layers, **_BASE, max_sequence_length=1024)


def _gpt2_dropping(layers: int) -> GPTConfig:
    return replace(_gpt2(layers), hidden_dropout=0.1, attention_dropout=0.1)


def _t5(layers: int) -> T5Config:
    return T5Config(num_layers=layers, num_decoder_layers=layers, **_BASE)


def _bert(layers: int) -> BertConfig:
    return BertConfig(num_layers=layers, **_BASE, max_sequence_length=512)


def _llava(layers: int, language_layers: int = 1) -> LlavaConfig:
    sizes: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 16, "image_size": 336, "patch_size": 14}
    # The features are those of the last layer but one.
    vision = VisionConfig(num_layers=layers + 1, **sizes)
    return LlavaConfig.of(replace(_llama(language_layers), max_sequence_length=2048), vision=vision, image_token=IMAGE)


CASES = {
    "Llama 3 8B": Case(config=_llama, batch=lambda: _rows(1)),
    "Llama 3 8B, eight packed documents": Case(config=_llama, batch=_documents),
    "Mixtral 8x7B": Case(config=_mixtral, batch=lambda: _rows(1)),
    "GPT-2 124M": Case(config=_gpt2, batch=lambda: _rows(8)),
    "GPT-2 124M, dropout 0.1": Case(config=_gpt2_dropping, batch=lambda: _rows(8)),
    "BERT base": Case(config=_bert, batch=_samples),
    "BERT base, sentence order": Case(
        config=_bert, batch=lambda: {**_samples(), "sentence_order_labels": torch.ones(16, dtype=torch.int64)}
    ),
    "T5 base, one row of 512 + 171 tokens": Case(config=_t5, batch=_pairs),
    "CLIP ViT-L/14 of a LLaVA": Case(config=_llava, batch=_images, with_other=lambda: _llava(1, 2)),
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a microbatch asks of the device in forward and backward, in bf16 under autocast."""

    layer_kernels: int
    """Kernels of a layer, other than products and attention."""
    layer_bytes: int
    """Bytes that these read and write."""
    layer_flops: int
    """FLOPs of a layer's products."""
    call_kernels: Counter[str]
    """Kernels of a model call beside those of its layers, of all kinds, by the file that asks for them."""
    copies: Counter[str]
    """Copies between host and device in a call of a model of one layer, by direction and line."""
    waits: Counter[str]
    """Times that the host waits there, by operation and line."""
    layer_waits: int
    """Times that it waits once more for each further layer."""


def cost_of(case: Case) -> Cost:
    one, two = (work_of(case, case.config(layers)) for layers in (1, 2))
    call_kernels = _by_file(one)
    # Less those of a layer of each kind.
    for more in [two] if case.with_other is None else [two, work_of(case, case.with_other())]:
        call_kernels.subtract(_by_file(more))
        call_kernels.update(_by_file(one))
    return Cost(
        layer_kernels=two.num_kernels - one.num_kernels,
        layer_bytes=two.num_bytes - one.num_bytes,
        layer_flops=two.flops - one.flops,
        call_kernels=call_kernels,
        copies=one.copies,
        waits=one.waits,
        layer_waits=two.waits.total() - one.waits.total(),
    )


def _by_file(work: Work) -> Counter[str]:
    found = Counter[str]()
    for launch in work.launches:
        found[launch.site.partition(":")[0]] += launch.num_kernels
    return found


def work_of(case: Case, config: Any) -> Work:
    """Forward and backward of one microbatch, the second; of its batch stays on the host what the ready data modules
    keep there.

    Raises AssertionError unless loss and gradients are on the device.
    """
    with FakeCuda():
        model, batch = build(config), batch_of(case)
        # Gradients go to buckets in float32.
        share(model, gradients := WeightGradients(lambda weight: torch.empty_like(weight, dtype=torch.float32)))
        with torch.autocast("cuda", torch.bfloat16):
            # What a model makes once it makes in its first call.
            model(**batch)
            with DeviceWork() as counted:
                loss = model(**batch)
        with gradients.opened(), counted:
            loss.backward()
        assert loss.is_cuda
        for name, parameter in model.named_parameters():
            is_idle = any(name.startswith(f"{part}.") for part in model.config.idle_parts)
            assert is_idle or (parameter.grad is not None and parameter.grad.is_cuda), name
    return counted.work


def batch_of(case: Case) -> Batch:
    """The batch, on the device but for what the ready data modules keep on the host."""
    return {name: x if name in HOST_ENTRIES else x.to("cuda") for name, x in case.batch().items()}


def build(config: Any, attention: AttentionKernel = "fused") -> PipelineModule:
    """The model on the fake device, ready to train as the strategy trains it under bf16-mixed: matrices are bf16, and
    gradients float32. Its experts get equally many tokens."""
    kinds: dict[type, Any] = {GPTConfig: GPTModel, BertConfig: BertModel, T5Config: T5Model, LlavaConfig: LlavaModel}
    mesh = Mesh.imagine(0, Sizes(world=1, attention_kernel=attention))
    # Nobody reads the numbers that would be drawn.
    with torch.device("cuda"), mock.patch.object(rng, "fill_normal_"):
        model: PipelineModule = kinds[type(config)](config, mesh=mesh, seed=0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.detach().to(torch.bfloat16)
            parameter.grad_dtype = torch.float32
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.dispatcher.read = _equal_counts(layer.dispatcher.read)
    return model.train()


def _equal_counts(read: ReadCounts) -> ReadCounts:
    def read_equal(counts: Tensor, shape_TK: torch.Size) -> Tensor:
        return torch.full_like(read(counts, shape_TK), shape_TK.numel() // counts.shape[-1])

    return read_equal
