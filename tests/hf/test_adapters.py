"""Adapters that peft gives an unchanged model train over ranks, and their files are those of one device."""

import cProfile
import functools
import pstats
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_megatron import hf
from lightning_megatron.hf.adapters import _target_faults, add_adapters
from lightning_megatron.hf.unchanged import on_meta
from lightning_megatron.testing import certify
from lightning_megatron.transformer.lora import LoraConfig as AdapterConfig
from tests.any_module.model_families import Causal, batches, config_of
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.hf.test_save_unchanged import Saves
from tests.trainer.layouts import Layout, make_trainer

LINEARS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


class Adapted(Causal):
    """A model with adapters of peft, which alone are trained. What an adapter adds is not zero from the start."""

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            config = LoraConfig(r=4, target_modules=LINEARS, init_lora_weights=False, task_type="CAUSAL_LM")
            self.model = get_peft_model(self.model, config)


@pytest.mark.matrix
def test_adapters_train_as_on_one_device() -> None:
    make = functools.partial(Adapted, "qwen3")
    certify(make, batches, layouts=every_nth(("pp2tp2-sp", "cp2"), 2), steps=2).assert_equal()


class Directed(Adapted):
    """Adapters whose norms are of whole weights, beside linears that have none."""

    def configure_model(self) -> None:
        if self.model is None:
            Causal.configure_model(self)
            self.model = get_peft_model(self.model, LoraConfig(r=4, target_modules=["up_proj"], use_dora=True))


def test_linears_with_adapters_of_another_kind_stay_whole() -> None:
    certify(functools.partial(Directed, "qwen3"), batches, layouts=("tp2",), steps=2).assert_equal()


def saved(layout: Layout, path: Path) -> str:
    saves = Saves(path)
    loader: Any = DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    make_trainer(layout, max_epochs=1, callbacks=[saves]).fit(Adapted("qwen3"), loader)
    return saves.refusal


def test_adapters_are_saved_as_peft_saves_them(tmp_path: Path) -> None:
    run_on_ranks(1, saved, Layout(is_plain=True), tmp_path / "one", init=False)
    layout = Layout(world=4, tp=2, pp=2, microbatches=2)
    for refusal in run_on_ranks(4, saved, layout, tmp_path / "four", init=False):
        assert "each rank holds a part of this model" in refusal
    assert sorted(one.name for one in (tmp_path / "four").iterdir()) == sorted(
        one.name for one in (tmp_path / "one").iterdir()
    )
    wanted, found = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "four"))
    assert wanted.keys() == found.keys() and len(wanted) == 2 * len(LINEARS) * config_of("qwen3").num_hidden_layers
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)
    torch.manual_seed(1)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_config(config_of("qwen3")), tmp_path / "four")
    names = [name for name in loaded.state_dict() if "lora_A" in name]
    assert names and not any(loaded.state_dict()[name].isnan().any() for name in names)


KINDS: dict[str, Any] = {
    "linears": LoraConfig(target_modules=LINEARS),
    "all biases": LoraConfig(target_modules=LINEARS, bias="all"),
    "own biases": LoraConfig(target_modules=LINEARS, bias="lora_only"),
    "the embedding": LoraConfig(target_modules=["embed_tokens"]),
    "some tokens": LoraConfig(target_modules=LINEARS, trainable_token_indices=[1, 2]),
    "a norm too": LoraConfig(target_modules=LINEARS, modules_to_save=["norm"]),
    "directions": LoraConfig(target_modules=LINEARS, use_dora=True),
    "scales": IA3Config(target_modules=LINEARS, feedforward_modules=["down_proj"]),
}


def with_biases(config: Any) -> Any:
    torch.manual_seed(1)
    own = config_of("qwen2")
    own.attention_bias = True
    return get_peft_model(AutoModelForCausalLM.from_config(own), config)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_what_peft_saves_is_saved(kind: str, tmp_path: Path) -> None:
    model = with_biases(KINDS[kind])
    model.save_pretrained(tmp_path / "theirs")
    hf.save_pretrained(model, tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    assert (tmp_path / "ours" / "adapter_config.json").is_file()


def test_prompts_are_not_saved_as_adapters(tmp_path: Path) -> None:
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="PromptTuningConfig has prompts in place of layers' weights"):
        hf.save_pretrained(with_biases(prompts), tmp_path / "saved")


def adapted(model_type: str, *targets: str, **options: Any) -> set[str]:
    """Last parts of the names of what gets adapters, of a model without numbers."""
    config = config_of(model_type)
    config.update(options)
    lora = AdapterConfig(rank=2, targets=targets) if targets else AdapterConfig(rank=2)
    model = add_adapters(on_meta(config, {}, model_type), lora)
    return {
        name.partition(".lora_A.")[0].rpartition(".")[2] for name, _ in model.named_parameters() if "lora_A" in name
    }


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


# The third has weights of three dims and no experts.
@pytest.mark.parametrize(
    ("model_type", "wanted"),
    [
        ("glm4_moe", ATTENTION),
        ("deepseek_v3", {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"}),
        ("rwkv", {"key", "output", "receptance", "value"}),
        ("qwen3", ATTENTION | {"gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_by_default_linears_get_adapters_but_the_head_and_what_peft_takes_for_experts(
    model_type: str, wanted: set[str]
) -> None:
    assert adapted(model_type) == wanted


def test_targets_that_a_model_has_not_are_told_beside_those_that_it_has() -> None:
    with pytest.raises(ValueError, match=r"'v_pro' is no module of a Qwen3ForCausalLM; .* q_proj, up_proj, v_proj$"):
        adapted("qwen3", "q_proj", "v_pro")
    with pytest.raises(ValueError, match=r"a GPT2LMHeadModel has no linears of torch .* may be c_attn, c_fc, c_proj"):
        adapted("gpt2")


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_target_whose_weight_another_module_has_too_is_refused(target: str) -> None:
    both = rf"{target}' has one weight under two names \(model\.embed_tokens and lm_head\)"
    with pytest.raises(ValueError, match=both):
        adapted("qwen3", "q_proj", target, tie_word_embeddings=True)
    assert adapted("qwen3", "q_proj", "lm_head", tie_word_embeddings=False) == {"q_proj", "lm_head"}


def test_twice_the_targets_take_twice_the_calls() -> None:
    def num_calls(num_layers: int) -> int:
        model = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(1, 1), "down": nn.Linear(1, 1)}) for _ in range(num_layers)
        )
        targets = [f"{layer}.{name}" for layer in range(num_layers) for name in ("up", "down")]
        profile = cProfile.Profile()
        assert profile.runcall(_target_faults, model, targets) == []
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    assert num_calls(200) < 2.1 * num_calls(100)


def test_an_older_peft_is_told_the_version_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    # It has no such module.
    monkeypatch.setitem(sys.modules, "peft.utils.transformers_weight_conversion", None)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    [needed] = project["optional-dependencies"]["peft"]
    with pytest.raises(ValueError, match=f"lora needs the package '{needed}'"):
        adapted("qwen3")
