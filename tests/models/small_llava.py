"""A small LLaVA whose every weight matters, and batches with images for some of their rows."""

from typing import Any

import torch
from torch import Tensor

from lightning_megatron.hf.blocks import part
from lightning_megatron.mesh import Mesh
from lightning_megatron.models import GPTConfig, LlavaConfig, LlavaModel, VisionConfig
from lightning_megatron.sharding import sharded_parameters

IMAGE = 130
VISION = VisionConfig(
    num_layers=3,
    hidden_size=24,
    num_attention_heads=4,
    ffn_hidden_size=40,
    image_size=6,
    patch_size=3,
    init_std=0.3,
)
LLAMA = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=8,
    num_query_groups=2,
    ffn_hidden_size=48,
    vocab_size=131,
    max_sequence_length=32,
    init_std=0.3,
    activation="swiglu",
    normalization="rmsnorm",
    norm_epsilon=1e-6,
    add_bias_linear=False,
    position="rotary",
    tie_embeddings=False,
)
LLAVA = LlavaConfig.of(LLAMA, vision=VISION, image_token=IMAGE)
# How many images each row has.
COUNTS = {"some": (1, 0, 2), "one": (0, 1, 0), "none": (0, 0, 0), "many": (2, 3, 2)}


def batch_of(config: LlavaConfig, counts: tuple[int, ...], sequence: int = 19) -> dict[str, Any]:
    """Tokens with image tokens in runs, labels with holes and an uneven mask, and the images of each row."""
    generator = torch.Generator().manual_seed(3)
    shape = (len(counts), sequence)
    tokens, labels = (torch.randint(130, shape, generator=generator) for _ in range(2))
    images: list[Tensor | None] = []
    for row, count in enumerate(counts):
        first = row + 1
        for _ in range(count):
            tokens[row, first : first + config.features_per_image] = IMAGE
            # With a token between two images, but not after the second.
            first += config.features_per_image + (first == row + 1)
        images.append(torch.randn(count, 3, 6, 6, generator=generator, dtype=torch.float64) if count else None)
    labels[torch.rand(shape, generator=generator) < 0.2] = -100
    labels[0, 5] = IMAGE
    mask = torch.rand(shape, generator=generator, dtype=torch.float64)
    return {"tokens": tokens, "labels": labels, "loss_mask": mask, "images": images}


def model_of(config: LlavaConfig, mesh: Mesh | None = None) -> LlavaModel:
    """A model in float64 whose biases and norms are not at their initial zeros and ones."""
    model = LlavaModel(config, mesh=mesh, seed=7).double()
    with torch.no_grad():
        for name, parameter, shard in sharded_parameters(model):
            if shard.initial.std == 0.0:
                generator = torch.Generator().manual_seed(sum(name.encode()))
                values = 0.2 * torch.randn(shard.global_shape, generator=generator, dtype=torch.float64)
                shard.valid(parameter).add_(part(values, shard.box))
    return model
