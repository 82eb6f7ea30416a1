"""T5 and T5 v1.1: `T5ForConditionalGeneration`. Both are model_type t5; the second has a gated feed-forward, a head of
its own and does not scale what that multiplies."""

from typing import Any

from lightning_megatron.hf.blocks import Shape, TensorBlock, each, query_key_value
from lightning_megatron.hf.config_reader import HARMLESS, ConfigReader, differences, fields_to_hf
from lightning_megatron.hf.family import Family, ParamMapping
from lightning_megatron.models.t5_config import T5Config
from lightning_megatron.sharding import Box
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.linears import (
    CROSS_KEY_VALUE,
    CROSS_PROJECTION,
    CROSS_QUERY,
    DOWN,
    PROJECTION,
    QKV,
    UP,
)


def key_value(config: TransformerConfig, shape: Shape) -> tuple[TensorBlock, ...]:
    """Layout of our interleaved key and value heads as two tensors of theirs: keys, values."""
    size, hidden = config.head_dim, shape[1]
    return tuple(
        TensorBlock(Box(((2 * group + i) * size, 0), (size, hidden)), Box((group * size, 0), (size, hidden)), i, (0, 1))
        for group in range(config.num_query_groups)
        for i in range(2)
    )


def _is_gated(config: T5Config) -> bool:
    return config.is_gated


def _is_plain(config: T5Config) -> bool:
    return not config.is_gated


def _rows(stack: str) -> tuple[ParamMapping, ...]:
    """Mappings of an encoder or a decoder; in theirs the sub-layers of a layer are numbered."""
    is_decoder = stack == "decoder"
    ours, theirs = f"{stack}.layers.{{}}", f"{stack}.block.{{}}.layer"
    feed_forward = 2 if is_decoder else 1
    dense = f"{theirs}.{feed_forward}.DenseReluDense"
    rows = (
        ParamMapping(f"{ours}.attention_norm.weight", (f"{theirs}.0.layer_norm.weight",)),
        ParamMapping(
            f"{ours}.{QKV}.weight",
            tuple(f"{theirs}.0.SelfAttention.{kind}.weight" for kind in "qkv"),
            query_key_value,
        ),
        ParamMapping(f"{ours}.{PROJECTION}.weight", (f"{theirs}.0.SelfAttention.o.weight",)),
        ParamMapping(f"{ours}.relative_bias.weight", (f"{theirs}.0.SelfAttention.relative_attention_bias.weight",)),
        ParamMapping(f"{ours}.mlp_norm.weight", (f"{theirs}.{feed_forward}.layer_norm.weight",)),
        ParamMapping(f"{ours}.{UP}.weight", (f"{dense}.wi.weight",), is_of=_is_plain),
        ParamMapping(f"{ours}.{UP}.weight", (f"{dense}.wi_0.weight", f"{dense}.wi_1.weight"), each, is_of=_is_gated),
        ParamMapping(f"{ours}.{DOWN}.weight", (f"{dense}.wo.weight",)),
        ParamMapping(f"{stack}.final_norm.norm.weight", (f"{stack}.final_layer_norm.weight",)),
    )
    if not is_decoder:
        return rows
    cross = f"{theirs}.1.EncDecAttention"
    return (
        *rows,
        ParamMapping(f"{ours}.cross_norm.weight", (f"{theirs}.1.layer_norm.weight",)),
        ParamMapping(f"{ours}.{CROSS_QUERY}.weight", (f"{cross}.q.weight",)),
        ParamMapping(f"{ours}.{CROSS_KEY_VALUE}.weight", (f"{cross}.k.weight", f"{cross}.v.weight"), key_value),
        ParamMapping(f"{ours}.{CROSS_PROJECTION}.weight", (f"{cross}.o.weight",)),
    )


ROWS = (
    ParamMapping("embedding.tokens.weight", ("shared.weight",)),
    *_rows("encoder"),
    *_rows("decoder"),
    ParamMapping("head.weight", ("lm_head.weight",)),
)

# The first models were saved with a table that cross attention never read.
IGNORED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)

DEFAULTS = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "tie_word_embeddings": True,
}

_NAMES = {
    "num_layers": "num_layers",
    "num_decoder_layers": "num_decoder_layers",
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "head_dim": "d_kv",
    "ffn_hidden_size": "d_ff",
    "norm_epsilon": "layer_norm_epsilon",
    "relative_buckets": "relative_attention_num_buckets",
    "relative_max_distance": "relative_attention_max_distance",
    "vocab_size": "vocab_size",
}
_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate", "gelu_fast")
# GELU by tanh; spellings of one function.
PLAIN = {"relu": "relu", "gelu": "gelu", "gelu_python": "gelu", "quick_gelu": "quick_gelu"} | dict.fromkeys(
    _TANH, "gelu_tanh"
)
GATES = {"silu": "swiglu", "swish": "swiglu"} | dict.fromkeys(_TANH, "geglu_tanh")
"""Activations by their names of the function, of plain feed-forward networks and of gated ones."""
# feed_forward_proj by our activation.
_WRITTEN = {
    "relu": "relu",
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "gelu_tanh": "gelu_new",
    "geglu_tanh": "gated-gelu",
    "swiglu": "gated-silu",
}

# Of initial values, and of tasks that other classes are for.
_HARMLESS = HARMLESS | {
    "initializer_factor",
    "classifier_dropout",
    "n_positions",
    "is_decoder",
}

TOKEN_IDS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
"""Token ids of T5's own tokenizers, written unless the files of another tokenizer have others. Without them
transformers neither trains nor generates."""


def config_from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Fields of a T5Config from a config.json."""
    is_tied = reader.take("tie_word_embeddings")
    dropout = reader.take("dropout_rate")
    return {
        **reader.take_all(_NAMES, optional={"num_decoder_layers": 0}),
        "activation": _activation(reader),
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        "ffn_dropout": dropout,
        "tie_embeddings": is_tied,
        # Before there was a field for it, a head of its own was one that is not scaled.
        "scales_head": reader.take("scale_decoder_outputs", is_tied),
    }


def _activation(reader: ConfigReader) -> str:
    """Our activation for `feed_forward_proj`: a function, or `gated-` and one. Some files have the derived fields too,
    which take precedence."""
    named = reader.take("feed_forward_proj")
    *before, function = named.split("-")
    is_gated = reader.take("is_gated_act", before == ["gated"])
    # The first gated ones were named without the kind of GELU.
    function = reader.take("dense_act_fn", "gelu_new" if named == "gated-gelu" else function)
    choices = GATES if is_gated else PLAIN
    if before not in ([], ["gated"]) or function not in choices:
        gated = ", ".join(repr(f"gated-{gate}") for gate in ("gelu", *GATES))
        reader.faults.append(
            f"feed_forward_proj ({named!r}, with dense_act_fn {function!r} and is_gated_act {is_gated}) must be one of "
            f"{', '.join(map(repr, PLAIN))}, {gated}: others are not built"
        )
        return "relu"
    return choices[function]


def config_to_hf(config: T5Config) -> dict[str, Any]:
    """Fields of a config.json from a T5Config."""
    return {
        **fields_to_hf(config, _NAMES),
        "feed_forward_proj": _WRITTEN[config.activation],
        "dropout_rate": config.hidden_dropout,
        "tie_word_embeddings": config.tie_embeddings,
        "scale_decoder_outputs": config.scales_head,
        "is_encoder_decoder": True,
        **TOKEN_IDS,
    }


def rules(config: T5Config) -> list[str]:
    """Rules of this family that a configuration breaks, one sentence each."""
    found = differences(
        config,
        num_query_groups=config.num_attention_heads,
        attention_dropout=config.hidden_dropout,
        ffn_dropout=config.hidden_dropout,
    )
    if config.activation not in _WRITTEN:
        found.append(f"activation ({config.activation!r}) must be one of {', '.join(map(repr, _WRITTEN))}")
    if config.scales_head and not config.tie_embeddings:
        found.append("scales_head (True) must be False where tie_embeddings is: their heads are scaled where tied")
    return found


FAMILY = Family(
    name="t5",
    architecture="T5ForConditionalGeneration",
    prefix="",
    rows=ROWS,
    ignored=IGNORED,
    tied={"lm_head.weight": "shared.weight"},
    copies={"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"},
    defaults=DEFAULTS,
    harmless=_HARMLESS,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=rules,
    # Relative positions have no end: these balance stages alone.
    ruled=frozenset(("num_query_groups", "max_sequence_length", "max_decoder_sequence_length")),
    config_class=T5Config,
)
