"""The linears of a layer are those that do its products, and not adapters, routers and gates."""

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from lightning_megatron.any_module.layer_linears import linears_of
from lightning_megatron.any_module.tensor_styles import cut_linears, styles_of
from lightning_megatron.mesh import Mesh, Sizes
from tests.any_module.model_families import config_of

ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}


def model_of(model_type: str) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_config(config_of(model_type))
    return model


def names_in(network: nn.Module, layer: str) -> set[str]:
    return {name.removeprefix(f"{layer}.") for name, _ in linears_of(network, layer)}


@pytest.mark.parametrize(
    ("model_type", "layer", "others"),
    [
        # Its router is a parameter, and the gate of its shared expert a linear.
        ("qwen2_moe", 0, {f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}),
        # Its router is a module with one linear; queries, keys and values have a gate.
        ("afmoe", 3, {f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")} | {"self_attn.gate_proj"}),
        ("qwen3", 0, {f"mlp.{name}_proj" for name in ("gate", "up", "down")}),
    ],
)
def test_what_chooses_experts_or_weighs_them_is_left_out(model_type: str, layer: int, others: set[str]) -> None:
    model = model_of(model_type)
    assert names_in(model, f"model.layers.{layer}") == ATTENTION | others
    linears = {name for name, one in model.named_modules() if type(one) is nn.Linear}
    left_out = {"qwen2_moe": "mlp.shared_expert_gate", "afmoe": "mlp.router.gate"}
    if model_type in left_out:
        assert f"model.layers.{layer}.{left_out[model_type]}" in linears


def test_adapters_are_left_out_whole_or_cut() -> None:
    def named(tp_size: int) -> set[str]:
        config = LoraConfig(target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM", r=4)
        model = get_peft_model(model_of("qwen3"), config)  # type: ignore[arg-type]
        if tp_size > 1:
            cut_linears(model, styles_of(model), mesh.tp)
        return names_in(model, "base_model.model.model.layers.0")

    wanted = {f"{name}.base_layer" if name[-6] in "qo" else name for name in ATTENTION}
    wanted |= {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert named(1) == wanted
    mesh = Mesh.imagine(0, Sizes(world=2, tp=2))
    assert named(2) == wanted


def test_a_layer_may_be_a_linear_itself() -> None:
    network = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    assert list(linears_of(network, "1")) == [("1", network[1])]
