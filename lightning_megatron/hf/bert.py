"""BERT: `BertForPreTraining` with a binary head and `BertForMaskedLM` without, post-norm, the head tied."""

from typing import Any

from lightning_megatron.hf.blocks import query_key_value
from lightning_megatron.hf.config_reader import HARMLESS, HEADS, ConfigReader, fields_to_hf, head_faults
from lightning_megatron.hf.family import Family, ParamMapping
from lightning_megatron.models.bert import BertConfig
from lightning_megatron.transformer.linears import DOWN, PROJECTION, QKV, UP

_LAYER = "bert.encoder.layer.{}"
_KINDS = ("weight", "bias")
_NORMS = (
    ("embedding.norm", "bert.embeddings.LayerNorm"),
    ("layers.{}.attention_norm", f"{_LAYER}.attention.output.LayerNorm"),
    ("layers.{}.mlp_norm", f"{_LAYER}.output.LayerNorm"),
    ("head.masked_tokens.norm", "cls.predictions.transform.LayerNorm"),
)
_LINEARS = (
    (f"layers.{{}}.{PROJECTION}", f"{_LAYER}.attention.output.dense"),
    (f"layers.{{}}.{UP}", f"{_LAYER}.intermediate.dense"),
    (f"layers.{{}}.{DOWN}", f"{_LAYER}.output.dense"),
    ("head.masked_tokens.dense", "cls.predictions.transform.dense"),
    ("head.sentence_order.pooler", "bert.pooler.dense"),
    ("head.sentence_order.output", "cls.seq_relationship"),
)


def _rows(norm_weight: str, norm_bias: str) -> tuple[ParamMapping, ...]:
    """All mappings, for these names of a norm's parameters."""
    return (
        ParamMapping("embedding.tokens.weight", ("bert.embeddings.word_embeddings.weight",)),
        ParamMapping("embedding.positions.weight", ("bert.embeddings.position_embeddings.weight",)),
        ParamMapping("embedding.token_types.weight", ("bert.embeddings.token_type_embeddings.weight",)),
        *(ParamMapping(f"{ours}.{kind}", (f"{theirs}.{kind}",)) for ours, theirs in _LINEARS for kind in _KINDS),
        *(
            row
            for ours, theirs in _NORMS
            for row in (
                ParamMapping(f"{ours}.weight", (f"{theirs}.{norm_weight}",)),
                ParamMapping(f"{ours}.bias", (f"{theirs}.{norm_bias}",)),
            )
        ),
        *(
            ParamMapping(
                f"layers.{{}}.{QKV}.{kind}",
                tuple(f"{_LAYER}.attention.self.{part}.{kind}" for part in ("query", "key", "value")),
                query_key_value,
            )
            for kind in _KINDS
        ),
        ParamMapping("head.masked_tokens.bias", ("cls.predictions.bias",)),
    )


DEFAULTS = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
}

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}

_CHOICES = {"activation": ACTIVATIONS}
_NAMES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "activation": "hidden_act",
    "norm_epsilon": "layer_norm_eps",
    "max_sequence_length": "max_position_embeddings",
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "init_std": "initializer_range",
    "vocab_size": "vocab_size",
    "num_token_types": "type_vocab_size",
}
_WITH_ORDER, _ALONE = "BertForPreTraining", "BertForMaskedLM"


def config_from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Fields of a BertConfig from a config.json."""
    reader.require("is_decoder", False)
    reader.require("add_cross_attention", False)
    reader.require("position_embedding_type", "absolute")
    reader.require("tie_word_embeddings", True)
    is_alone = _ALONE in (reader.take_list("architectures", str))
    return {**reader.take_all(_NAMES, _CHOICES), "add_binary_head": not is_alone}


def config_to_hf(config: BertConfig) -> dict[str, Any]:
    """Fields of a config.json from a BertConfig."""
    architecture = _WITH_ORDER if config.add_binary_head else _ALONE
    fields = fields_to_hf(config, _NAMES, _CHOICES)
    return {"architectures": [architecture], **fields, "tie_word_embeddings": True}


def rules(config: BertConfig) -> list[str]:
    """Rules of this family that a configuration breaks, one sentence each."""
    found = head_faults(config)
    if config.num_token_types < 1:
        found.append(f"num_token_types ({config.num_token_types}) must be at least 1")
    if config.activation not in ACTIVATIONS.values():
        found.append(f"activation ({config.activation!r}) must be one of {', '.join(set(ACTIVATIONS.values()))}")
    return found


FAMILY = Family(
    name="bert",
    architecture=_WITH_ORDER,
    prefix="bert.",
    rows=_rows("weight", "bias"),
    # As the first files of BERT have it.
    other_rows=_rows("gamma", "beta"),
    ignored=(
        "bert.embeddings.position_ids",
        # Weights of a binary head, in files of models that do not have one any more.
        *(f"{theirs}.{kind}" for theirs in ("bert.pooler.dense", "cls.seq_relationship") for kind in _KINDS),
    ),
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    defaults=DEFAULTS,
    # Poolers of other programs.
    harmless=HARMLESS
    | {"classifier_dropout", "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"}
    | {"pooler_size_per_head", "pooler_type"},
    config_class=BertConfig,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=rules,
    ruled=HEADS,
)
