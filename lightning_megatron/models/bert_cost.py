"""Cost of a BERT by formula: layers and vocabulary as in `transformer.cost`, and the heads.

Conventions are those of `transformer.cost`. B batch, S sequence, H hidden, V vocabulary.

    heads    parameters   H^2 + H + norm + V  (masked tokens)      H^2 + H + 2 H + 2  (sentence order)
             forward      2 B S (H^2 + H V)                        2 B (H^2 + 2 H)
"""

from lightning_megatron.models.bert import BertConfig
from lightning_megatron.transformer import cost


def bert_parameters(config: BertConfig) -> int:
    """Parameters of the unsplit model; a tied matrix counts once and padded rows do not count."""
    hidden, norm = config.hidden_size, cost.norm_parameters(config)
    # The count of a GPT has a norm after the last layer.
    norms = norm * ((config.norm_placement == "pre") - 1 + config.embedding_norm)
    heads = hidden * hidden + hidden + norm + config.vocab_size
    if config.add_binary_head:
        heads += hidden * hidden + hidden + 2 * hidden + 2
    return cost.model_parameters(config) + config.num_token_types * hidden + norms + heads


def bert_training_flops(config: BertConfig, *, batch: int, sequence: int) -> int:
    """Model FLOPs of forward and backward of a batch without padding: what MFU divides by.

    Every token sees every other, and logits are made of all tokens, as the model does.
    """
    hidden = config.hidden_size
    heads = batch * sequence * hidden * hidden + config.add_binary_head * batch * hidden * (hidden + 2)
    return cost.training_flops(config, batch=batch, sequence=sequence, is_causal=False) + 3 * 2 * heads
