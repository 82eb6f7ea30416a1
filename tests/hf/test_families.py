"""Every family computes what transformers computes, and comes back from us as it came, weights and configuration."""

import json
import math
from dataclasses import fields, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from lightning_megatron import hf
from lightning_megatron.hf import config_reader
from lightning_megatron.hf.config_reader import ConfigReader
from lightning_megatron.hf.families import FAMILIES, family_of_config
from lightning_megatron.models import GPTConfig
from lightning_megatron.moe.capacity import ExpertCapacity
from lightning_megatron.moe.config import AuxLoss, MoEConfig, RouterConfig
from tests.hf.tiny import CASES, VOCABULARY, family_of, logits, ours, saved

# Fields of theirs that say nothing of the numbers, or say again what another one says.
NOT_COMPARED = {"_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "transformers_version"}
WITH_EXPERTS = ("deepseek_v3", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe")
SAID_TWICE = {"max_window_layers"}  # by layer_types


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = saved(case, tmp_path)
    wanted = logits(model)
    found = logits(ours(tmp_path))
    # Both round at every step in float32.
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max().clamp(min=1)
    assert wanted.std() > 0.1
    if family_of(case) in WITH_EXPERTS:
        # Their grouped product takes no float64.
        model.set_experts_implementation("eager")
    in_double = logits(ours(tmp_path, torch.float64))
    # In float64 transformers still norms and turns in float32; GPT-2 does neither.
    limit = 1e-12 if family_of(case) == "gpt2" else 5e-6
    assert (in_double - logits(model.double())).abs().max() < limit * wanted.abs().max().clamp(min=1)


@pytest.mark.parametrize("case", CASES)
def test_a_model_comes_back_as_it_came(case: str, tmp_path: Path) -> None:
    model = saved(case, tmp_path / "theirs")
    hf.save_pretrained(ours(tmp_path / "theirs"), tmp_path / "ours", family=family_of(case))
    again, shown = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(shown.values()), shown
    wanted, found = model.state_dict(), again.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    # One that was read, too: products of experts may depend on where in memory weights lie.
    assert torch.equal(logits(again), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")))
    before, after = (comparable(m.config.to_dict()) for m in (model, again))
    assert before == after


def comparable(config: dict[str, Any]) -> dict[str, Any]:
    """What of a configuration of transformers decides numbers, defaults written out."""
    fields = {name: value for name, value in config.items() if name not in NOT_COMPARED | SAID_TWICE}
    heads = fields.get("num_attention_heads", fields.get("n_head"))
    fields["head_dim"] = fields.get("head_dim") or fields.get("hidden_size", fields.get("n_embd")) // heads
    if "mlp_only_layers" in fields:
        step, dense = fields.pop("decoder_sparse_step"), fields.pop("mlp_only_layers")
        layers = range(fields["num_hidden_layers"])
        fields["dense"] = [layer for layer in layers if layer in dense or (layer + 1) % step]
    rope = fields.get("rope_parameters")
    if rope and rope.get("rope_type") == "yarn" and "mscale" not in rope:
        # Written out by us: 0.1 ln(4) + 1.
        fields["rope_parameters"] = {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": pytest.approx(1.1386294361119891),
            **rope,
        }
    return fields


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_that_transformers_knows_is_translated_or_known_to_be_harmless(family: str) -> None:
    config = transformers.AutoConfig.for_model(family)
    reader = ConfigReader({}, FAMILIES[family].defaults)
    FAMILIES[family].config_from_hf(reader)
    assert reader.faults == []
    unknown = config.to_dict().keys() - reader.taken - FAMILIES[family].harmless
    assert unknown == set()


# Fields of published files beside sizes and what all files have.
PUBLISHED: dict[str, dict[str, Any]] = {
    "phi3": {
        "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "embd_pdrop": 0.0,
        "original_max_position_embeddings": 4096,
        "resid_pdrop": 0.0,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
    },
    # Phi-4-mini's, less its rotary scaling.
    "phi3, a part of each head": {
        "attention_bias": False,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 0.75,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
    },
    "gemma2": {
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 224,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "sliding_window_size": 4096,
    },
    "gemma3_text": {
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "gemma3_text, of later files": {
        "_sliding_window_pattern": 6,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "num_hidden_layers": 18,
        "rope_local_base_freq": 10000.0,
        "use_bidirectional_attention": False,
    },
    "olmo2": {"attention_bias": False, "rope_scaling": None, "rope_theta": 500000},
    "glm4": {
        "attention_bias": False,
        "eos_token_id": [151329, 151336, 151338],
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
    },
    "qwen2_moe": {
        "decoder_sparse_step": 1,
        "max_window_layers": 21,
        "norm_topk_prob": False,
        "output_router_logits": False,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": 32768,
        "use_sliding_window": False,
    },
    "gpt_oss": {
        "attention_bias": True,
        "experts_per_token": 4,
        "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "output_router_logits": False,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "swiglu_limit": 7.0,
    },
    "deepseek_v3": {
        "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "max_position_embeddings": 163840,
        "moe_layer_freq": 1,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_method": "noaux_tc",
    },
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_fields_of_published_files_are_taken(case: str) -> None:
    kind = case.partition(",")[0]
    of_all = {"_name_or_path": "a", "bos_token_id": 1, "torch_dtype": "bfloat16", "use_cache": True}
    config = FAMILIES[kind].config({"model_type": kind, **of_all, "attention_dropout": 0.0, **PUBLISHED[case]})
    assert FAMILIES[kind].faults(config) == []


@pytest.mark.parametrize(
    ("family", "given", "shown"),
    [
        ("phi3", {"attention_bias": True}, r"attention_bias \(True\) must be False"),
        ("gemma2", {"sliding_window_size": 64}, r"sliding_window_size \(64\) must be 4096"),
        # transformers leaves it aside, and gives other numbers than the file says.
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping \(50.0\) must be None"),
    ],
)
def test_such_fields_are_refused_where_they_say_something(family: str, given: dict[str, Any], shown: str) -> None:
    with pytest.raises(ValueError, match=shown):
        FAMILIES[family].config({"model_type": family, **given})


def test_gemma_3_writes_no_cap_of_scores() -> None:
    config = replace(FAMILIES["gemma3_text"].config({}), attention_softcap=2.0)
    assert FAMILIES["gemma3_text"].faults(config) == ["attention_softcap (2.0) must be 0.0"]


def test_a_factor_of_embeddings_is_rounded_as_the_weights_are(tmp_path: Path) -> None:
    model = saved("gemma2", tmp_path).bfloat16()
    found = ours(tmp_path, torch.bfloat16)
    [wanted] = model.get_input_embeddings()(torch.arange(VOCABULARY)[None])
    embedded = found.get_submodule("embedding").embed(torch.arange(VOCABULARY))  # type: ignore[operator]
    assert torch.equal(embedded, wanted)
    # By the root itself it is another value.
    assert not torch.equal(embedded, model.get_input_embeddings().weight * math.sqrt(32))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_nobody_knows_is_refused(family: str) -> None:
    planted = {"model_type": family, "residual_multiplier": 50.0}
    with pytest.raises(ValueError, match=r"residual_multiplier \(50.0\) is a field that .* take it out if"):
        FAMILIES[family].config(planted)
    FAMILIES[family].config({**planted, "residual_multiplier": None, "torch_dtype": "float16", "top_p": 0.9})


def test_a_field_of_a_newer_transformers_is_read_at_its_default_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_reader, "transformers_defaults", lambda kind: {"residual_multiplier": 1.0})
    FAMILIES["llama"].config({"residual_multiplier": 1.0})
    with pytest.raises(ValueError, match=r"residual_multiplier \(0.5\) .*; set it to 1.0"):
        FAMILIES["llama"].config({"residual_multiplier": 0.5})


@pytest.mark.parametrize("nested", ["text_config", "vision_config"])
def test_a_field_that_nobody_knows_is_refused_in_the_parts_of_a_llava(nested: str) -> None:
    kind = {"text_config": "llama", "vision_config": "clip_vision_model"}[nested]
    with pytest.raises(ValueError, match=rf"{nested}: head_scale \(2\) is a field that '{kind}'"):
        FAMILIES["llava"].config({"model_type": "llava", nested: {"model_type": kind, "head_scale": 2}})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_a_family_cannot_write_is_refused(family: str) -> None:
    # The default of a LLaVA's image token is after the vocabulary.
    config = FAMILIES[family].config({"model_type": family} | ({"image_token_index": 3} if family == "llava" else {}))
    assert FAMILIES[family].faults(config) == []
    grown = with_new_field(config)
    assert FAMILIES[family].faults(grown) == []
    words = "residual_factor (30.0) must be 0.0, because the family's config.json has no field for it"
    assert FAMILIES[family].faults(replace(grown, residual_factor=30.0)) == [words]


@pytest.mark.parametrize("where", ["moe", "router", "vision", "rope_scaling"])
def test_a_field_that_a_family_cannot_write_is_refused_in_what_a_configuration_holds(where: str) -> None:
    family = FAMILIES["llava" if where == "vision" else "mixtral"]
    config: Any = family.config(
        {"rope_scaling": SCALING} if where == "rope_scaling" else {"image_token_index": 3} if where == "vision" else {}
    )
    if where == "router":
        held = with_new_field(config.moe.router, 30.0)
        config = replace(config, moe=replace(config.moe, router=held))
    else:
        config = replace(config, **{where: with_new_field(getattr(config, where), 30.0)})
    [fault] = family.faults(config)
    assert "residual_factor (30.0) must be 0.0" in fault


def with_new_field(config: Any, value: float = 0.0) -> Any:
    """The configuration with one more field, as a later version of the package may have it."""
    grown = make_dataclass("Grown", [("residual_factor", float, 0.0)], bases=(type(config),), frozen=True, kw_only=True)
    return grown(**{field.name: getattr(config, field.name) for field in fields(config)}, residual_factor=value)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_translates_does_not_depend_on_the_file(family: str) -> None:
    defaults = FAMILIES[family].defaults
    more = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0, "rope_scaling": SCALING}
    with_more = FAMILIES[family].config_from_hf(ConfigReader(more, defaults))
    assert FAMILIES[family].config_from_hf(ConfigReader({}, defaults)).keys() == with_more.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_are_left_out_have_the_defaults_of_transformers(family: str) -> None:
    written_out = transformers.AutoConfig.for_model(family).to_dict()
    assert FAMILIES[family].config({"model_type": family}) == FAMILIES[family].config(written_out)


SCALING = {"type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx (True) must be False"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn (True) must be False"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights (False) must be True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention (True) must be False"),
        ("gpt2", {"activation_function": "relu"}, "activation_function ('relu') must be one of 'gelu_new'"),
        ("gpt2", {"embd_pdrop": 0.2}, "resid_pdrop (0.1) and embd_pdrop (0.2) must be equal"),
        ("gpt2", {"n_head": 5}, "hidden_size (768) must be a multiple of num_attention_heads (5)"),
        ("llama", {"attention_bias": True}, "attention_bias (True) and mlp_bias (False) must be equal"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act ('gelu') must be one of 'silu', 'swish'"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type ('dynamic') must be one of"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type ('longrope')"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_type 'linear' need a factor"),
        ("llama", {"rope_scaling": {**SCALING, "wobble": 1}}, "rope settings wobble are not known"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": "no"}}, "truncate ('no')"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor (0.5) must be 1"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor (0.5) must be 1"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ("llama", {"hidden_size": None}, "hidden_size is not there"),
        ("qwen3", {"attention_bias": True}, "attention_bias (True) must be False"),
        ("qwen2", {"num_hidden_layers": 2, "layer_types": ["full_attention"]}, "layer_types (length 1"),
        (
            "qwen2",
            {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
            "layer_types have sliding_attention, and use_sliding_window (False)",
        ),
        ("qwen3", {"num_hidden_layers": 1, "layer_types": ["chunked_attention"]}, "kinds chunked_attention"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok (1) must be at least 2"),
        ("mixtral", {"num_experts_per_tok": 9}, "top_k (9) must be at most num_experts (8)"),
        ("mixtral", {"num_local_experts": "8"}, "num_local_experts ('8') must be of the kind of 8"),
        ("mixtral", {"router_jitter_noise": 1.5}, "jitter (1.5) must be from 0 to below 1"),
        (
            "mixtral",
            {"router_aux_loss_coef": -1.0, "output_router_logits": True},
            "coefficient of the balance loss per sequence (-1.0)",
        ),
        ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 1}, "num_experts_per_tok (1) must be"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step (0) must be at least 1"),
        ("qwen3_moe", {"mlp_only_layers": list(range(24))}, "leave none of 24 layers with experts"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias (True) must be False"),
        ("qwen3_moe", {"use_sliding_window": True, "max_window_layers": 4}, "max_window_layers (4) must be 0"),
    ],
)
def test_a_field_that_changes_numbers_and_is_not_built_is_refused(
    family: str, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError) as raised:
        FAMILIES[family].config({"model_type": family, **change})
    assert words in str(raised.value)


def test_all_faults_of_a_config_are_reported_at_once() -> None:
    changes = {"reorder_and_upcast_attn": True, "activation_function": "relu", "embd_pdrop": 0.0}
    with pytest.raises(ValueError) as raised:
        FAMILIES["gpt2"].config(changes)
    assert len(str(raised.value).splitlines()) == 4


def test_both_spellings_of_rotary_settings_are_read_alike() -> None:
    family = FAMILIES["llama"]
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    new = family.config({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}})
    old = family.config({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}})
    oldest = family.config({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    assert new == old == oldest
    assert new.rope_scaling is not None and new.rotary_base == 5e5


def test_layers_with_a_window_are_those_past_max_window_layers() -> None:
    fields = {"num_hidden_layers": 5, "max_window_layers": 3, "use_sliding_window": True, "sliding_window": 9}
    config = FAMILIES["qwen2"].config(fields)
    assert [config.window_of(layer) for layer in range(5)] == [0, 0, 0, 9, 9]
    assert FAMILIES["qwen2"].config({**fields, "max_window_layers": 5}).sliding_window == 0


GATED: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "vocab_size": 9,
    "activation": "swiglu",
    "normalization": "rmsnorm",
    "position": "rotary",
    "add_bias_linear": False,
}


ROUTER = RouterConfig(num_experts=4)


@pytest.mark.parametrize(
    ("fields", "family"),
    [
        ({**GATED, "add_bias_linear": True}, "llama"),
        ({**GATED, "sliding_window": 4}, "mistral"),
        ({**GATED, "add_qkv_bias": True, "sliding_window": 4, "full_attention_layers": (1,)}, "qwen2"),
        ({**GATED, "qk_norm": True, "head_dim": 10}, "qwen3"),
        ({**GATED, "rotary_fraction": 0.5}, "phi3"),
        ({"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 5}, "gpt2"),
        ({**GATED, "moe": MoEConfig(router=ROUTER)}, "mixtral"),
        ({**GATED, "moe": MoEConfig(router=replace(ROUTER, norm_topk_prob=False)), "qk_norm": True}, "qwen3_moe"),
    ],
)
def test_the_family_follows_from_the_configuration(fields: dict[str, Any], family: str) -> None:
    config = GPTConfig(**fields)
    assert family_of_config(config, None).name == family_of_config(config, family).name == family


def test_a_configuration_that_several_families_have_asks_which() -> None:
    with pytest.raises(ValueError, match=r"fits families 'llama' and 'mistral'; say which: family='llama'"):
        family_of_config(GPTConfig(**GATED), None)
    assert family_of_config(GPTConfig(**GATED), "mistral").name == "mistral"


def test_a_configuration_that_no_family_has_is_refused_with_the_reason_of_each() -> None:
    config = GPTConfig(**{**GATED, "position": "none"}, qk_norm=True, add_qkv_bias=True)
    with pytest.raises(ValueError) as raised:
        family_of_config(config, None)
    lines = dict(line.strip().split(": ", 1) for line in str(raised.value).splitlines()[1:])
    assert lines.keys() == {name for name, family in FAMILIES.items() if family.config_class is GPTConfig}
    assert "position ('none') must be 'rotary'; add_qkv_bias (True) must be False" in lines["llama"]
    assert "qk_norm (True) must be False, because the family's config.json has no field for it" in lines["llama"]
    assert "position ('none') must be 'rotary'; moe (None) must be there" in lines["mixtral"]
    assert "add_qkv_bias (True) must be False, because" in lines["mixtral"]
    assert "position ('none') must be 'rotary'; add_qkv_bias (True) must be False, because" in lines["qwen3"]


@pytest.mark.parametrize(
    ("family", "moe", "words"),
    [
        ("mixtral", MoEConfig(router=replace(ROUTER, norm_topk_prob=False)), "norm_topk_prob (False) must be True"),
        ("mixtral", MoEConfig(router=ROUTER, layers=(1,)), "layers 0 must have experts"),
        (
            "mixtral",
            MoEConfig(router=replace(ROUTER, score_function="sigmoid")),
            "score_function ('sigmoid') must be 'softmax'",
        ),
        (
            "mixtral",
            MoEConfig(router=replace(ROUTER, routing_type="round_robin")),
            "routing_type ('round_robin') must be 'top_k' or 'sinkhorn'",
        ),
        (
            "mixtral",
            MoEConfig(router=replace(ROUTER, topk_scaling_factor=2.0)),
            "topk_scaling_factor (2.0) must be 1.0",
        ),
        ("mixtral", MoEConfig(router=replace(ROUTER, num_groups=2)), "group_topk (1) must be 2"),
        ("mixtral", MoEConfig(router=replace(ROUTER, bias_update_rate=0.1)), "bias_update_rate (0.1) must be 0.0"),
        (
            "mixtral",
            MoEConfig(router=ROUTER, shared_expert_intermediate_size=3),
            "shared_expert_intermediate_size (3) must be 0",
        ),
        ("mixtral", MoEConfig(router=ROUTER, capacity=ExpertCapacity(factor=2.0)), "must be None"),
        ("llama", MoEConfig(router=ROUTER), "moe (4 experts) must be None"),
        ("qwen3_moe", MoEConfig(router=ROUTER), "qk_norm (False) must be True"),
    ],
)
def test_experts_that_a_family_has_not_are_reported(family: str, moe: MoEConfig, words: str) -> None:
    with pytest.raises(ValueError) as raised:
        family_of_config(GPTConfig(**GATED, moe=moe), family)
    assert words in str(raised.value)


def test_both_names_of_the_number_of_experts_are_read() -> None:
    for family, name in (("mixtral", "num_experts"), ("qwen3_moe", "num_local_experts")):
        moe = FAMILIES[family].config({name: 16}).moe
        assert moe is not None and moe.router.num_experts == 16


def test_what_balances_experts_is_read_and_written() -> None:
    fields = {"router_aux_loss_coef": 0.05, "router_jitter_noise": 0.1, "output_router_logits": True}
    config = FAMILIES["mixtral"].config(fields)
    assert config.moe is not None
    assert config.moe.router.aux_losses == (AuxLoss(coefficient=0.05),) and config.moe.router.jitter == 0.1
    assert fields.items() <= FAMILIES["mixtral"].config_to_hf(config).items()
    for family in ("mixtral", "qwen3_moe"):
        for fields in ({"router_aux_loss_coef": 0.0, "output_router_logits": True}, {"router_aux_loss_coef": 0.05}):
            without = FAMILIES[family].config(fields)
            assert without.moe is not None and without.moe.router.aux_losses == ()
            assert FAMILIES[family].config_to_hf(without)["output_router_logits"] is False


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"family \('falcon'\) must be one of 'bert', .*'gpt2', .*'llama'"):
        family_of_config(GPTConfig(**GATED), "falcon")


def test_an_unknown_model_type_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "falcon"}))
    with pytest.raises(ValueError, match=r"model_type \('falcon'\) .* must be one of 'bert', .*'gpt2', .*'t5'"):
        hf.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no model_type"):
        hf.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("scaling", "kind"),
    [
        ({"rope_type": "linear", "factor": 4.0}, "linear"),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, "yarn"),
    ],
)
def test_a_scaling_written_next_to_rope_parameters_counts_as_in_transformers(
    scaling: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    saved("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "default"
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    model = ours(tmp_path)
    assert model.config.rope_scaling is not None and model.config.rope_scaling.kind == kind
    wanted = logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    assert (logits(model) - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_size", "32"), ("num_hidden_layers", 2.0), ("rope_scaling", "x"), ("tie_word_embeddings", "no")],
)
def test_a_field_of_the_wrong_kind_is_reported_by_its_name(field: str, value: Any, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ValueError, match=field):
        hf.config_from_pretrained(tmp_path)
