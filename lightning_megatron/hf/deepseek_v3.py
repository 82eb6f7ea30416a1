"""DeepSeek-V3, R1 and Kimi K2: `DeepseekV3ForCausalLM`, with latent attention and experts chosen by group and bias."""

import math
from dataclasses import replace
from typing import Any

from lightning_megatron.hf import gated_decoder
from lightning_megatron.hf.blocks import Layout, Shape, TensorBlock, each, interleaved_tails
from lightning_megatron.hf.config_reader import HARMLESS, ConfigReader, fields_to_hf
from lightning_megatron.hf.expert_decoder import ROWS_TOGETHER, moe_faults, moe_from_hf, moe_to_hf, rows_apart
from lightning_megatron.hf.family import ParamMapping
from lightning_megatron.models.gpt import GPTConfig
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.latent_config import LatentConfig
from lightning_megatron.transformer.linears import KEY_VALUE_DOWN, KEY_VALUE_UP, QUERY, QUERY_DOWN, QUERY_UP
from lightning_megatron.transformer.rotary import yarn_amplitude

_ATTENTION = "model.layers.{}.self_attn"
_SHARED = "model.layers.{}.mlp.shared_experts"


def _turned_last(per_head: bool) -> Layout:
    """Layout of rows, of each head or of all, whose last features turn: theirs as neighbours, ours as halves."""

    def layout(config: TransformerConfig, shape: Shape) -> tuple[TensorBlock, ...]:
        assert config.latent is not None
        rows = config.latent.qk_head_dim if per_head else shape[0]
        return interleaved_tails(shape, rows, config.latent.qk_rope_head_dim)

    return layout


_PLAIN = {
    QUERY_DOWN: "q_a_proj",
    "attention.query_norm": "q_a_layernorm",
    "attention.key_value_norm": "kv_a_layernorm",
    KEY_VALUE_UP: "kv_b_proj",
}
_ROWS = (
    *(ParamMapping(f"layers.{{}}.{ours}.weight", (f"{_ATTENTION}.{name}.weight",)) for ours, name in _PLAIN.items()),
    ParamMapping(f"layers.{{}}.{QUERY}.weight", (f"{_ATTENTION}.q_proj.weight",), _turned_last(per_head=True)),
    ParamMapping(f"layers.{{}}.{QUERY_UP}.weight", (f"{_ATTENTION}.q_b_proj.weight",), _turned_last(per_head=True)),
    ParamMapping(
        f"layers.{{}}.{KEY_VALUE_DOWN}.weight",
        (f"{_ATTENTION}.kv_a_proj_with_mqa.weight",),
        _turned_last(per_head=False),
    ),
    ParamMapping("layers.{}.moe.router.expert_bias", ("model.layers.{}.mlp.gate.e_score_correction_bias",)),
    ParamMapping("layers.{}.moe.shared.up.weight", (f"{_SHARED}.gate_proj.weight", f"{_SHARED}.up_proj.weight"), each),
    ParamMapping("layers.{}.moe.shared.down.weight", (f"{_SHARED}.down_proj.weight",)),
    *gated_decoder.ROWS,
)
# Of transformers' norms of latents, whatever rms_norm_eps says.
_LATENT_EPSILON = 1e-6
_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_ROUTER = {"num_groups": "n_group", "group_topk": "topk_group", "topk_scaling_factor": "routed_scaling_factor"}

DEFAULTS = {
    **gated_decoder.DEFAULTS,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
}


def config_from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Fields of a GPTConfig from a config.json."""
    reader.take_alias("num_local_experts", "n_routed_experts")
    heads, width = reader.take("num_attention_heads"), reader.take("moe_intermediate_size")
    for key, supported in _REQUIRED.items():
        reader.require(key, *supported)
    # Of heads the latent's fields say all.
    reader.require("num_key_value_heads", heads)
    reader.raw["num_key_value_heads"] = reader.raw["head_dim"] = None
    num_layers, first = reader.take("num_hidden_layers"), reader.take("first_k_dense_replace")
    moe = moe_from_hf(
        reader,
        num_experts=reader.take("n_routed_experts"),
        norm_topk_prob=reader.take("norm_topk_prob"),
        router={
            **reader.take_all(_ROUTER),
            "score_function": "sigmoid",
            "expert_bias": True,
        },
        ffn_hidden_size=width,
        layers=tuple(range(first, num_layers)) if first else (),
        shared_expert_intermediate_size=width * reader.take("n_shared_experts"),
    )
    sizes = {name: reader.take(name) for name in _LATENT}
    try:
        latent = LatentConfig(q_lora_rank=reader.take("q_lora_rank", 0), norm_epsilon=_LATENT_EPSILON, **sizes)
    except ValueError as error:
        reader.faults += str(error).splitlines()
        latent = None
    fields, of_all = gated_decoder.config_from_hf(reader), reader.rope_setting("mscale_all_dim")
    if fields["rope_scaling"] is not None and fields["rope_scaling"].factor > 1 and of_all:
        fields["rope_scaling"] = replace(fields["rope_scaling"], mscale_all_dim=of_all)
    return {**fields, "latent": latent, "num_query_groups": 0, "head_dim": 0, **moe}


# Values that the package has one way for.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "rope_interleave": (True,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "ep_size": (1,),
}


def _is_of_next_tokens(config: GPTConfig, name: str) -> bool:
    """Whether a tensor is of the layers after the last, which predict a second token: transformers leaves them out."""
    number = name.removeprefix("model.layers.").partition(".")[0]
    return number.isdecimal() and int(number) >= config.num_layers


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Fields of a config.json from a GPTConfig."""
    moe, latent = config.moe, config.latent
    assert moe is not None and latent is not None
    width = moe.ffn_hidden_size or config.ffn_hidden_size
    first = min(layer for layer in range(config.num_layers) if config.has_experts(layer))
    fields = gated_decoder.config_to_hf(config)
    # It follows from other fields.
    del fields["head_dim"]
    if config.rope_scaling is not None and (of_all := config.rope_scaling.mscale_all_dim):
        # By the two coefficients that DeepSeek's own files and code have.
        factor, settings = config.rope_scaling.factor, fields["rope_scaling"]
        amplitude = settings.pop("attention_factor") * yarn_amplitude(factor, of_all)
        settings |= {"mscale": round((amplitude - 1.0) / (0.1 * math.log(factor)), 9), "mscale_all_dim": of_all}
    return {
        **fields,
        **fields_to_hf(latent, {name: name for name in _LATENT}),
        **fields_to_hf(moe.router, _ROUTER),
        "q_lora_rank": latent.q_lora_rank or None,
        "moe_intermediate_size": width,
        "n_routed_experts": moe.router.num_experts,
        "n_shared_experts": moe.shared_expert_intermediate_size // width,
        "first_k_dense_replace": first,
        "norm_topk_prob": moe.router.norm_topk_prob,
        "num_nextn_predict_layers": 0,
        **moe_to_hf(moe),
    }


def rules(config: GPTConfig) -> list[str]:
    """Rules of this family that a configuration breaks, one sentence each."""
    found = gated_decoder.rules(config, own_rope=("mscale_all_dim",))
    found += moe_faults(
        config,
        score_function=("sigmoid",),
        routing_type=("top_k",),
        expert_bias=(True,),
        topk_scaling_factor=(),
        group_topk=(),
        bias_update_rate=(),
        shared_expert_intermediate_size=(),
    )
    if config.latent is None:
        found.append("latent (None) must be there: its attention is to latents")
    elif config.latent.norm_epsilon != _LATENT_EPSILON:
        found.append(f"latent norm_epsilon ({config.latent.norm_epsilon}) must be {_LATENT_EPSILON}")
    if config.moe is None:
        return found
    width, shared = config.moe.ffn_hidden_size or config.ffn_hidden_size, config.moe.shared_expert_intermediate_size
    if not shared or shared % width:
        found.append(
            f"moe shared_expert_intermediate_size ({shared}) must be a multiple of that of an expert ({width})"
        )
    router = config.moe.router
    if router.group_topk < router.num_groups and router.top_k != 2 * router.group_topk:
        found.append(f"moe top_k ({router.top_k}) must be twice group_topk ({router.group_topk}): groups go by two")
    of_experts = [layer for layer in range(config.num_layers) if config.has_experts(layer)]
    if of_experts != list(range(of_experts[0], config.num_layers)):
        found.append("layers with experts must be the last ones")
    return found


FAMILY = gated_decoder.family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    rows=_ROWS + rows_apart("mlp", "gate_proj", "up_proj", "down_proj"),
    other_rows=_ROWS + ROWS_TOGETHER,
    defaults=DEFAULTS,
    # Of a training, how a linear was once cut, what follows from other fields, and layers that are left out.
    harmless=HARMLESS
    | {"aux_loss_alpha", "seq_aux", "pretraining_tp", "qk_head_dim", "num_mtp_layers", "num_nextn_predict_layers"},
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    rules=rules,
    is_left_out=_is_of_next_tokens,
    ruled=frozenset(("num_query_groups", "head_dim")),
)
