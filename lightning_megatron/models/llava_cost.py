"""Cost of a training step of a LLaVA: model FLOPs, of what is frozen no more than is needed.

    linears of a part    forward, and once more each for gradients of what goes in and of the weights, where needed
    attention of a part  forward, and twice that for gradients of what goes in, where needed

What goes into a part needs a gradient where something before it is trained; within a part that is trained its own first
layer counts as the others do. Conventions are otherwise those of `transformer.cost`.
"""

from collections.abc import Collection, Mapping

from lightning_megatron.models.llava import LlavaConfig
from lightning_megatron.transformer import cost


def training_flops(
    config: LlavaConfig, *, lengths: Mapping[int, int], num_images: int, frozen: Collection[str] = ()
) -> float:
    """Model FLOPs of a training step of so many (values) sequences of each length (keys), and so many images."""
    is_trained = {name: name not in frozen for name in ("vision", "projector", "language")}
    sees = is_trained["vision"] or is_trained["projector"]
    flops = 0.0
    for length, number in lengths.items():
        layers = range(config.num_layers)
        linear = sum(cost.layer_linear_flops(config, num_tokens=number * length, layer=i) for i in layers)
        linear += cost.head_flops(config, num_tokens=number * length)
        attention = sum(
            cost.layer_attention_flops(
                config, batch=number, sequence=length, is_causal=True, window=config.window_of(i)
            )
            for i in layers
        )
        is_crossed = sees or is_trained["language"]
        flops += linear * (1 + is_crossed + is_trained["language"]) + attention * (1 + 2 * is_crossed)
    return flops + num_images * _image_flops(config, is_trained)


def _image_flops(config: LlavaConfig, is_trained: Mapping[str, bool]) -> float:
    """FLOPs of one image, through tower and projector."""
    vision, depth = config.vision, config.num_vision_layers
    num_tokens, is_tower_trained = vision.max_sequence_length, is_trained["vision"]
    pixels = vision.num_channels * vision.patch_size**2
    # Pixels need no gradient.
    patches = 2 * vision.num_patches * pixels * vision.hidden_size * (1 + is_tower_trained)
    linear = depth * cost.layer_linear_flops(vision, num_tokens=num_tokens)
    attention = depth * cost.layer_attention_flops(vision, batch=1, sequence=num_tokens, is_causal=False)
    backward = 2 * is_tower_trained
    tower = patches + (linear + attention) * (1 + backward)
    # All tokens of an image go through the projector; the class token's output is dropped after it.
    up, down = (2 * num_tokens * config.hidden_size * width for width in (vision.hidden_size, config.hidden_size))
    is_projector_trained = is_trained["projector"]
    up_times = 1 + is_projector_trained + is_tower_trained
    down_times = 1 + is_projector_trained + (is_projector_trained or is_tower_trained)
    return float(tower + up * up_times + down * down_times)
