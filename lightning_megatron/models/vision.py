"""A vision transformer: images become hidden states of patches, as parts `embedding` and `layers.0` and on.

Before its first layer an image is cut into squares; each of them, and a class token in front of them, is one token of a
stream in which attention sees the full image and no other. tp and sp cut the tower as they cut any stack of layers.
Its stream is never cut over cp: ranks get full images (`models.llava`).

N images of this rank, C channels, P side of a patch, S tokens of an image, T tokens of all images, H hidden.
Source: Dosovitskiy et al., arXiv 2010.11929, section 3.1; Radford et al., arXiv 2103.00020, section 2.4.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.comm import rng
from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.context.context_layout import cut
from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.models.embedding import PositionEmbedding
from lightning_megatron.pipeline.module import Part
from lightning_megatron.sharding import Initial, shard_parameter
from lightning_megatron.tensor.activation import Activation
from lightning_megatron.transformer import cost
from lightning_megatron.transformer.attention import BIDIRECTIONAL
from lightning_megatron.transformer.build import build_norm
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.layer import TransformerLayer
from lightning_megatron.transformer.position_cache import PositionCache
from lightning_megatron.transformer.tokens import Tokens, unsplit_stream


@config_dataclass
class VisionConfig(TransformerConfig):
    """Architecture of a vision tower: CLIP's kind by default."""

    sees_both_ways: ClassVar[bool] = True

    image_size: int
    """Height and width of an image, in pixels."""
    patch_size: int
    """Height and width of a patch, in pixels."""
    num_channels: int = 3
    """Number of channels of a pixel."""
    has_input_norm: bool = True
    """Whether there is a norm between the patch embedding and the first layer."""
    activation: Activation = "quick_gelu"
    """Activation of the MLP: quick_gelu in CLIP."""
    max_sequence_length: int = 0
    """Tokens of an image, its patches and the class token; 0: what follows from image_size and patch_size."""

    def __post_init__(self) -> None:
        if self.max_sequence_length == 0 and self.patch_size > 0:
            object.__setattr__(self, "max_sequence_length", self.num_patches + 1)
        super().__post_init__()

    def faults(self) -> list[str]:
        faults = super().faults()
        sizes = ("image_size", "patch_size", "num_channels")
        faults += [f"{name} ({getattr(self, name)}) must be at least 1" for name in sizes if getattr(self, name) < 1]
        if self.patch_size > 0 and self.image_size % self.patch_size:
            below = self.image_size // self.patch_size * self.patch_size
            fits = " or ".join(str(size) for size in (below, below + self.patch_size) if size)
            faults.append(
                f"image_size ({self.image_size}) must be a multiple of patch_size ({self.patch_size}); it may be {fits}"
            )
        elif self.patch_size > 0 and self.max_sequence_length != self.num_patches + 1:
            faults.append(
                f"max_sequence_length ({self.max_sequence_length}) must be the patches of an image and the class token "
                f"({self.num_patches + 1}); leave it out"
            )
        needed = {"position": "learned", "sliding_window": 0, "moe": None}
        faults += [
            f"{name} ({getattr(self, name)!r}) must be {value!r} in a vision tower"
            for name, value in needed.items()
            if getattr(self, name) != value
        ]
        return faults

    def layout_faults(self, sizes: Sizes) -> list[str]:
        # An image is never cut.
        return super().layout_faults(replace(sizes, cp=1, cp_ulysses=1))

    @property
    def num_patches(self) -> int:
        """Number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2


class PatchEmbedding(nn.Module):
    """Images [N, C, height, width] to hidden states [T/sp, H] of their patches, each image after a class token."""

    def __init__(self, config: VisionConfig, *, tp: Axis, sp: Axis) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        initial, hidden = Initial(std=config.init_std), config.hidden_size
        shape = (hidden, config.num_channels, config.patch_size, config.patch_size)
        self.patches = shard_parameter(shape, initial=initial, replicas=(tp,), partial=sp)
        self.class_token = shard_parameter((hidden,), initial=initial, replicas=(tp,), partial=sp)
        self.positions = PositionEmbedding(config, tp=tp, sp=sp)
        self.norm = build_norm(config, tp=tp, sp=sp) if config.has_input_norm else nn.Identity()

    def forward(self, images: Tensor, tokens: Tokens) -> Tensor:
        # Every rank cuts its own tokens out of the pixels: no message, and no product of tokens that others have.
        pixels_TX = tokens.shard(tokens.pad(self._pixels(images).flatten(0, 1)))
        # The class token's row of zeros has no part in the product: the token comes with the position before all.
        class_SH = F.pad(self.class_token.unsqueeze(0), (0, 0, 0, len(self.positions.weight) - 1))
        hidden_TH = F.linear(pixels_TX, self.patches.flatten(1)) + self.positions(tokens, class_SH)
        normed_TH: Tensor = self.norm(hidden_TH)
        return normed_TH

    def _pixels(self, images: Tensor) -> Tensor:
        """Pixels of each token, patches row by row after zeros for the class token: [N, S, C * side * side], in the
        dtype of the weights."""
        side = self.patch_size
        patches = images.unflatten(3, (-1, side)).unflatten(2, (-1, side)).permute(0, 2, 4, 1, 3, 5)
        num_images, height, width, *pixels = patches.shape
        shape = (num_images, 1 + height * width, prod(pixels))
        tokens_NSX = torch.empty(shape, dtype=self.patches.dtype, device=images.device)
        tokens_NSX[:, 0].zero_()
        tokens_NSX[:, 1:].unflatten(2, pixels).unflatten(1, (height, width)).copy_(patches)
        return tokens_NSX


def image_stream(
    num_images: int, make_image_keys: Callable[[], Tensor], positions: PositionCache, mesh: Mesh, device: torch.device
) -> Tokens:
    """The stream of the images that this rank looks at; their keys, int64 [N], name what is dropped of each."""
    num_tokens = positions.config.max_sequence_length
    own = positions.rows(num_tokens, partial(cut, (num_tokens,)), 0, device)

    def make_keys() -> Tensor:
        return rng.bits(make_image_keys().unsqueeze(1), own.positions_1N)

    shape = (num_images, num_tokens)
    stream = unsplit_stream(mesh, shape, own.positions_1N, make_keys, own.cos_1NR, own.sin_1NR)
    return replace(stream, positions=own.flat)


def vision_parts(config: VisionConfig, mesh: Mesh, prefix: str, num_used: int) -> Sequence[Part]:
    """The parts of a tower of which the first `num_used` layers are used, on the stage of the part after them.

    Costs are the FLOPs of one image's forward.
    """
    tp, sp, num_tokens = mesh.tp, mesh.sp, config.max_sequence_length
    flops = cost.layer_linear_flops(config, num_tokens=num_tokens) + cost.layer_attention_flops(
        config, batch=1, sequence=num_tokens, is_causal=False
    )
    pixels = config.num_channels * config.patch_size**2
    names = [f"{prefix}.layers.{i}" for i in range(config.num_layers)]
    return [
        Part(
            name=f"{prefix}.embedding",
            build=partial(PatchEmbedding, config, tp=tp, sp=sp),
            symbol="",
            cost=2.0 * config.num_patches * pixels * config.hidden_size,
        ),
        *(
            Part(
                name=name,
                build=partial(TransformerLayer, config, tp=tp, sp=sp, name=name, mask_spec=BIDIRECTIONAL),
                symbol="",
                cost=float(flops if i < num_used else 0),
            )
            for i, name in enumerate(names)
        ),
        Part(name=f"{prefix}.final_norm", build=partial(build_norm, config, tp=tp, sp=sp), symbol="", cost=0.0),
    ]
