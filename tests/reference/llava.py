"""A LLaVA on one device in plain torch, written for clarity alone: what `LlavaModel` must equal on every mesh.

Images are looked at one by one, and their features written into the places of their image tokens one by one.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.comm import rng
from lightning_megatron.models import LlavaConfig
from lightning_megatron.pipeline.ragged import Ragged
from tests.reference.gpt import ReferenceGPT, Weights


class ReferenceLlava(ReferenceGPT):
    """Loss from weights by name and images by row."""

    def __init__(self, config: LlavaConfig, weights: Weights, draws: rng.Draws | None = None) -> None:
        super().__init__(config, weights, draws)
        self.llava = config
        self.images = Ragged(torch.zeros(0, 1), [0])

    def loss(  # type: ignore[override]
        self, tokens: Tensor, labels: Tensor, loss_mask: Tensor | None = None, images: Ragged | None = None
    ) -> Tensor:
        """As of a GPT; image tokens are no targets."""
        self.images = Ragged(torch.zeros(0, 1), [0] * len(tokens)) if images is None else images
        return super().loss(tokens, labels.masked_fill(labels == self.llava.image_token, -100), loss_mask)

    def embed(self, tokens: Tensor) -> Tensor:
        x = self.weights["embedding.tokens.weight"][tokens.masked_fill(tokens == self.llava.image_token, 0)]
        keys = None if self.draws is None else self.draws.sample_keys(len(tokens), torch.device("cpu"))
        number = 0
        rows = []
        for row, count in enumerate(self.images.counts):
            places = (tokens[row] == self.llava.image_token).nonzero().flatten()
            filled = x[row]
            for place in range(count):
                key = None if keys is None else rng.bits(keys[row], torch.tensor(place + 1))
                own = places[place * self.llava.features_per_image : (place + 1) * self.llava.features_per_image]
                filled = filled.index_put((own,), self.features(self.images.values[number], key))
                number += 1
            rows.append(filled)
        return torch.stack(rows)

    def features(self, pixels: Tensor, key: Tensor | None) -> Tensor:
        """Hidden states of the language model for one image [channels, side, side]."""
        tower = Tower(self.llava, self.weights, self.draws, key)
        seen = tower.hidden(pixels)[0 if self.llava.keeps_class_token else 1 :]
        return self.linear(tower.activate(self.linear(seen, "projector.up"), "gelu"), "projector.down")


class Tower:
    """The vision tower of one image, whose random key is `key` where something is dropped."""

    def __init__(self, config: LlavaConfig, weights: Weights, draws: rng.Draws | None, key: Tensor | None) -> None:
        self.config, self.weights, self.key = config, weights, key
        self.depth = config.num_vision_layers
        self.plain = ReferenceGPT(config.vision, weights, draws)  # type: ignore[arg-type]
        self.plain.sample_keys = None if key is None else key.view(1)

    def hidden(self, pixels: Tensor) -> Tensor:
        """What the last layer in use says of the class token and each patch, from the top left on."""
        size, side = self.config.vision.patch_size, self.config.vision.image_size
        kernel = self.weights["vision.embedding.patches"]
        squares = [
            (pixels[:, top : top + size, left : left + size] * kernel).sum((1, 2, 3))
            for top in range(0, side, size)
            for left in range(0, side, size)
        ]
        x = torch.stack([self.weights["vision.embedding.class_token"], *squares])
        x = self.plain.norm(x + self.weights["vision.embedding.positions.weight"], "vision.embedding.norm")
        for i in range(self.depth):
            layer = f"vision.layers.{i}"
            x = x + self.drop(self.attend(self.plain.norm(x, f"{layer}.attention_norm"), layer), f"{layer}.attention")
            up = self.plain.linear(self.plain.norm(x, f"{layer}.mlp_norm"), f"{layer}.mlp.up")
            y = self.plain.linear(self.activate(up, self.config.vision.activation), f"{layer}.mlp.down")
            x = x + self.drop(y, f"{layer}.mlp")
        return x

    def attend(self, x: Tensor, layer: str) -> Tensor:
        """Every token sees every other. Heads have queries, keys and values one after the other."""
        size, outputs = self.config.vision.head_dim, []
        fused = self.plain.linear(x, f"{layer}.attention.qkv")
        for head in range(self.config.vision.num_attention_heads):
            query, key, value = fused[:, 3 * head * size : 3 * (head + 1) * size].split(size, dim=1)
            weights = (query @ key.T / math.sqrt(size)).softmax(dim=-1)
            weights = self.plain.drop_attention(weights.unsqueeze(0), f"{layer}.attention", head)[0]
            outputs.append(weights @ value)
        return self.plain.linear(torch.cat(outputs, dim=1), f"{layer}.attention.projection")

    def drop(self, x: Tensor, name: str) -> Tensor:
        return self.plain.drop(x.unsqueeze(0), name)[0]

    def activate(self, y: Tensor, activation: str) -> Tensor:
        return y * torch.sigmoid(1.702 * y) if activation == "quick_gelu" else F.gelu(y)
