"""The cost of multi-head latent attention is that of a layer of transformers with its sizes."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from lightning_megatron.mesh import Sizes
from lightning_megatron.models import GPTConfig
from lightning_megatron.planner.layer_work import layer_work_of
from lightning_megatron.planner.model_parts import SequenceLengths, model_parts_of, parameters_of, part_flops
from lightning_megatron.transformer.latent_config import LatentConfig

HIDDEN, HEADS, TOKENS = 256, 8, 64
SIZES = LatentConfig(q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
PLAIN = {"num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "vocab_size": 512}
BARE = {"position": "rotary", "normalization": "rmsnorm", "add_bias_linear": False, "max_sequence_length": TOKENS}


def config_of(latent: LatentConfig) -> GPTConfig:
    return GPTConfig(**PLAIN, **BARE, latent=latent)


@pytest.mark.parametrize("q_lora_rank", [48, 0])
def test_parameters_and_products_are_those_of_transformers(q_lora_rank: int) -> None:
    latent = replace(SIZES, q_lora_rank=q_lora_rank)
    sizes = {name: getattr(latent, name) for name in LatentConfig.__dataclass_fields__}
    with torch.device("meta"):
        config = DeepseekV3Config(
            hidden_size=HIDDEN, num_attention_heads=HEADS, **sizes | {"q_lora_rank": q_lora_rank or None}
        )
        attention = DeepseekV3Attention(config, 0)
    num_parameters = sum(parameter.numel() for parameter in attention.parameters())
    linears = {(one.in_features, one.out_features) for one in attention.modules() if isinstance(one, nn.Linear)}
    # A whole layer differs from a plain one by its attention alone.
    lengths = SequenceLengths(sequence=TOKENS)
    layers = [
        (model_parts_of(model, lengths), model_parts_of(model, lengths).parts[1])
        for model in (config_of(latent), GPTConfig(**PLAIN, **BARE))
    ]
    held, plain = (sum(parameters_of(part, parts, Sizes())) for parts, part in layers)
    assert held - plain == num_parameters - 4 * HIDDEN * HEADS * 32
    flops, of_plain = (part_flops(part, parts.config, batch=1) for parts, part in layers)
    of_products = 2 * TOKENS * (sum(m * n for m, n in linears) - 4 * HIDDEN * HEADS * 32)
    of_scores = TOKENS**2 * HEADS * (latent.qk_head_dim + latent.v_head_dim - 2 * 32)
    assert flops - of_plain == of_products + of_scores


def test_ranks_of_tp_share_the_wide_products_and_gather_the_narrow_ones() -> None:
    lengths = SequenceLengths(sequence=TOKENS)
    parts = model_parts_of(config_of(SIZES), lengths)
    one, two = (
        layer_work_of(parts.parts[1], parts, Sizes(world=2, tp=tp, sequence_parallel=tp > 1), 1, 2) for tp in (1, 2)
    )
    # Each rank takes its half of the tokens through the narrow products, and its half of the heads through the others.
    assert two.product_flops == one.product_flops / 2 and two.flash_flops == one.flash_flops / 2
    assert two.tensor_bytes == TOKENS * 2 * (
        3 * HIDDEN + (SIZES.q_lora_rank + SIZES.kv_lora_rank + SIZES.qk_rope_head_dim)
    )
    assert one.tensor_bytes == 0
