"""Gemma 2 and 3: `Gemma2ForCausalLM` and `Gemma3ForCausalLM`, which read text.

family        norms of queries and keys   soft caps            every so many layers see all   rotary base of the others
gemma2        no                          scores and logits    2                              as all
gemma3_text   yes                         logits, mostly none  6                              rope_local_base_freq
"""

from typing import Any

from lightning_megatron.hf import gated_decoder
from lightning_megatron.hf.config_reader import HARMLESS, ConfigReader, dense_faults
from lightning_megatron.hf.family import Family, ParamMapping
from lightning_megatron.models.gpt import GPTConfig

_LAYER = "model.layers.{}"
_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_ROWS = (
    *(ParamMapping(f"layers.{{}}.{ours}.weight", (f"{_LAYER}.{theirs}.weight",)) for ours, theirs in _NORMS.items()),
    *(row for row in gated_decoder.ROWS if "_norm.weight" not in row.ours or "attention." in row.ours),
    ParamMapping("final_norm.weight", ("model.norm.weight",)),
)
_CHOICES = {"activation": {"gelu_pytorch_tanh": "geglu_tanh"}}
_OURS: dict[str, Any] = {
    "activation": "geglu_tanh",
    "normalization": "zero_centered_rmsnorm",
    "norm_placement": "sandwich",
    "scales_embedding": True,
}
_DEFAULTS = {
    **gated_decoder.DEFAULTS,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_CAPS = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}


def _family(name: str, architecture: str, *, pattern: int, qk_norm: bool, defaults: dict[str, Any]) -> Family:
    """A family whose models' every `pattern`-th layer sees all tokens."""

    def config_from_hf(reader: ConfigReader) -> dict[str, Any]:
        reader.take_alias("hidden_activation", "hidden_act")
        reader.take_alias("_sliding_window_pattern", "sliding_window_pattern")
        reader.require("attention_bias", False)
        reader.require("use_bidirectional_attention", False)
        # Under this name some published files say it again.
        reader.require("sliding_window_size", reader.raw.get("sliding_window"))
        if qk_norm:
            # What transformers leaves aside in Gemma 3, whatever the file says.
            reader.require("attn_logit_softcapping", None)
        window_base = _window_base(reader) if qk_norm else 0.0
        every = reader.take("sliding_window_pattern", pattern) if qk_norm else pattern
        windows = gated_decoder.pattern_windows_from_hf(reader, every)
        fields = {
            **gated_decoder.config_from_hf(reader, choices=_CHOICES),
            **_OURS,
            **windows,
            "qk_norm": qk_norm,
            "score_dim": reader.take("query_pre_attn_scalar"),
            "window_rotary_base": window_base if windows["sliding_window"] else 0.0,
        }
        return fields | {ours: float(reader.take(theirs, 0.0)) for ours, theirs in _CAPS.items()}

    def config_to_hf(config: GPTConfig) -> dict[str, Any]:
        fields = {
            **gated_decoder.config_to_hf(config, _CHOICES),
            **gated_decoder.pattern_windows_to_hf(config),
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "query_pre_attn_scalar": config.score_dim or config.head_dim,
        }
        # Under its older name the field says nothing to transformers.
        del fields["hidden_act"]
        if qk_norm:
            fields["rope_local_base_freq"] = config.window_rotary_base or config.rotary_base
        return fields | {theirs: getattr(config, ours) or None for ours, theirs in _CAPS.items()}

    def rules(config: GPTConfig) -> list[str]:
        # Gemma 2 has no other base for layers with a window, and Gemma 3 caps no scores.
        needed: dict[str, Any] = {"attention_softcap": 0.0} if qk_norm else {"window_rotary_base": 0.0}
        return dense_faults(config) + gated_decoder.rules(config, **_OURS, qk_norm=qk_norm, **needed)

    return gated_decoder.family(
        name,
        architecture,
        rows=_ROWS,
        defaults=_DEFAULTS | defaults,
        harmless=HARMLESS | {"cache_implementation"},
        config_from_hf=config_from_hf,
        config_to_hf=config_to_hf,
        rules=rules,
        ruled=frozenset(("moe",)),
    )


def _window_base(reader: ConfigReader) -> float:
    """The rotary base of layers with a window; what is left in the reader are the settings of all others."""
    of_kinds = reader.raw.get("rope_parameters") or {}
    base = reader.take("rope_local_base_freq", 10000.0)
    if "full_attention" in of_kinds:
        of_windows = of_kinds.get("sliding_attention") or {}
        if of_windows.get("rope_type", "default") != "default":
            reader.faults.append(
                f"rope_type ({of_windows['rope_type']!r}) of sliding_attention must be 'default': others are not built"
            )
        reader.raw["rope_parameters"] = of_kinds["full_attention"]
        base = of_windows.get("rope_theta", base)
    return float(base)


GEMMA2 = _family(
    "gemma2",
    "Gemma2ForCausalLM",
    pattern=2,
    qk_norm=False,
    defaults={
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
GEMMA3 = _family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    pattern=6,
    qk_norm=True,
    defaults={"vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6},
)
