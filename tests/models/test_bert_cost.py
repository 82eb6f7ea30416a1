"""The cost of a BERT agrees with what is built and counted."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_megatron.mesh import Mesh
from lightning_megatron.models import BertConfig, BertModel
from lightning_megatron.models.bert_cost import bert_parameters, bert_training_flops
from lightning_megatron.transformer import cost
from tests.models.test_bert import VARIANTS


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_those_that_are_built(variant: str) -> None:
    config = VARIANTS[variant]
    model = BertModel(config, mesh=Mesh.single())
    # Padded rows of the vocabulary are built and do not count.
    padded = -config.vocab_size % config.vocab_multiple * (config.hidden_size * (2 - config.tie_embeddings) + 1)
    assert sum(parameter.numel() for parameter in model.parameters()) - padded == bert_parameters(config)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "parameters"), [(12, 768, 12, 110_106_428), (24, 1024, 16, 336_226_108)]
)
def test_the_published_sizes_have_the_parameters_of_their_weights(
    layers: int, hidden: int, heads: int, parameters: int
) -> None:
    config = BertConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, vocab_size=30522, max_sequence_length=512
    )
    assert bert_parameters(config) == parameters  # of BertForPreTraining with the released weights, counted


@pytest.mark.parametrize("variant", VARIANTS)
def test_flops_are_those_that_are_counted(variant: str) -> None:
    config = VARIANTS[variant]
    model = BertModel(config, mesh=Mesh.single())
    tokens = torch.randint(config.vocab_size, (3, 16))
    order = {"sentence_order_labels": torch.zeros(3).long()} if config.add_binary_head else {}
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens, **order).backward()
    # The counter knows nothing of the kernel of attention, and multiplies the padded rows of the vocabulary.
    attention = cost.layer_attention_flops(config, batch=3, sequence=16, is_causal=False)
    padded = -config.vocab_size % config.vocab_multiple
    counted = counter.get_total_flops() + 3 * (config.num_layers * attention - 2 * 3 * 16 * config.hidden_size * padded)
    assert counted == bert_training_flops(config, batch=3, sequence=16)
