"""Cost of a T5 by formula: parameters and FLOPs, by the conventions of `transformer.cost`.

    encoder layer   as a GPT's, seeing both ways
    decoder layer   as a GPT's, and cross attention: 2 H A D for queries and projection, 2 H G D for keys and values

H hidden, A heads, G key-value groups, D head size.
"""

from lightning_megatron.models.t5_config import T5Config
from lightning_megatron.models.t5_parts import layer_flops
from lightning_megatron.transformer import cost


def model_parameters(config: T5Config) -> int:
    """Parameters of the unsplit model; a shared or tied matrix counts once and padded rows do not count."""
    hidden, norm, layer = config.hidden_size, cost.norm_parameters(config), cost.layer_parameters(config)
    layers = config.num_layers * layer
    layers += config.num_decoder_layers * (layer + cost.cross_attention_parameters(config))
    matrices = 1 + (not config.share_embeddings) + (not config.tie_embeddings)
    positions = {
        "learned": (config.max_sequence_length + config.max_decoder_sequence_length) * hidden,
        "relative": 2 * config.relative_buckets * config.num_attention_heads,
    }
    return layers + 2 * norm + matrices * config.vocab_size * hidden + positions.get(config.position, 0)


def training_flops(config: T5Config, *, batch: int, sequence: int, decoder_sequence: int) -> int:
    """Model FLOPs of forward and backward of a batch, with nothing recomputed: what MFU divides by.

    The convention is that of `transformer.cost.training_flops`: attention of the decoder to itself counts half, that of
    the encoder and that of the decoder to it count in full.
    """
    layers = config.num_layers * layer_flops(config, sequence, decoder_sequence, is_decoder=False)
    layers += config.num_decoder_layers * layer_flops(config, sequence, decoder_sequence, is_decoder=True)
    return 3 * batch * (layers + cost.head_flops(config, num_tokens=decoder_sequence))
