"""The report of a plan says what is cut, what stays whole and why, and what a rank holds."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from lightning_megatron import ModelPlan
from lightning_megatron.any_module.report import report_of
from lightning_megatron.cli.main import main
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import GPTConfig, GPTModel
from tests.any_module import networks
from tests.any_module.model_families import config_of


def report(network: nn.Module, plan: ModelPlan, tp: int = 1, pp: int = 1, vp: int = 1) -> str:
    return report_of(nn.ModuleDict({"net": network}), "net", plan, Sizes(world=tp * pp, tp=tp, pp=pp, vp=vp))


def test_layers_stages_and_linears_are_told() -> None:
    text = report(networks.GPT(), networks.TrainsOverTensor().model_plan(), tp=2, pp=2)
    for line in (
        "layers: 4 of Block in blocks (the list of like modules with most parameters)",
        "  stage 1: blocks.2 to blocks.3",
        "  blocks.*.attention.query  colwise (4)",
        "  blocks.*.down             rowwise (4)",
        "  head                      whole: no style (1)",
    ):
        assert f"{line}\n" in text, text


def test_stages_hold_of_what_is_around_the_layers_what_they_read() -> None:
    network = AutoModelForCausalLM.from_config(config_of("llama"))
    layer, one = (sum(p.numel() for p in part.parameters()) for part in (network.model.layers[0], network.lm_head))
    text = report(network, ModelPlan(), pp=2)
    norm = sum(p.numel() for p in network.model.norm.parameters())
    assert text.endswith(
        f"of which a rank holds at most {2 * layer + one + norm:,}\n"
        "  0 of them stand around the layers, and are on every stage"
    )


def test_what_a_rank_holds_is_what_it_holds() -> None:
    net = networks.UntiedGPT()
    around = sum(p.numel() for name, p in net.named_parameters() if not name.startswith("blocks."))
    layer = sum(p.numel() for p in net.blocks[0].parameters())
    assert f"of which a rank holds at most {around + 2 * layer:,}\n" in report(net, ModelPlan(), pp=2)
    text = report(net, ModelPlan(styles={"net.head": "colwise_gather_output"}), tp=2)
    assert text.endswith(f"a rank holds at most {4 * layer + around - net.head.weight.numel() // 2:,}")


def test_lists_and_matrices_that_are_not_cut_are_told() -> None:
    network = AutoModelForSeq2SeqLM.from_config(config_of("t5"))
    num_encoders = sum(one.numel() for one in network.encoder.block.parameters())
    line = f"  not cut: encoder.block, of {num_encoders:,} parameters; where the forward runs it by itself"
    both = ModelPlan(layers=("net.encoder.block", "net.decoder.block"))
    assert line in report(network, ModelPlan(), pp=2) and "not cut" not in report(network, both, pp=2)
    assert "not cut" not in report(networks.GPT(), ModelPlan(), pp=2)
    text = report(AutoModelForCausalLM.from_config(config_of("gpt2")), ModelPlan(), tp=2)
    assert "  transformer.h.*.attn.c_attn  whole: a Conv1D, and nn.Linear alone is cut (4)\n" in text
    assert "\n  nothing is cut, and a run over these ranks is refused\n" in text
    text = report(AutoModelForCausalLM.from_config(config_of("mixtral")), ModelPlan(), tp=2)
    assert "nothing is cut" not in text and text.count("mlp.experts") == 1


def test_layers_of_the_package_count_as_cut() -> None:
    config = GPTConfig(num_layers=4, hidden_size=32, num_attention_heads=4, vocab_size=128)
    text = report(GPTModel(config), ModelPlan(), tp=2)
    own = GPTModel(config, mesh=Mesh.imagine(0, Sizes(world=2, tp=2)))
    assert "  layers.*.mlp.down              cut by itself: a RowParallelLinear (4)\n" in text
    assert "nothing is cut" not in text and "layers: 4, which the model gives to stages by itself\n" in text
    assert text.endswith(f"of which a rank holds at most {sum(p.numel() for p in own.parameters()):,}")
    staged = report(GPTModel(config), ModelPlan(), pp=2)
    assert staged.endswith("what each rank holds lightning-megatron plan forecasts")


@pytest.mark.parametrize(
    ("styles", "tp", "line"),
    [
        (
            {"net.blocks.*.up": "colwise"},
            3,
            "blocks.*.up               whole: 3 ranks do not divide its 64 features (4)",
        ),
        ({"net.head": "colwise"}, 2, "head                      whole: its weight is tied to another module's (1)"),
    ],
)
def test_why_a_linear_stays_whole_is_told(styles: dict[str, str], tp: int, line: str) -> None:
    assert line in report(networks.GPT(), ModelPlan(styles=styles), tp=tp)


def test_a_style_that_is_not_known_leaves_its_neighbours_whole() -> None:
    class Planned(networks.GPT):
        _tp_plan = {"blocks.*.up": "packed_rowwise", "blocks.*.down": "rowwise"}  # noqa: RUF012

    text = report(Planned(), ModelPlan(), tp=2)
    assert "blocks.*.up               whole: the style packed_rowwise is not known (4)" in text
    assert "blocks.*.down             whole: as up beside it, the style packed_rowwise is not known (4)" in text


def test_the_command_reads_a_module_and_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from tests.any_module.networks import Trains\n\n\nclass Mine(Trains):\n    pass\n")
    assert main(["model-plan", "mine.py:Mine", "--pp", "2"]) == 0
    assert "net (GPT)\nlayers: 4 of Block in blocks" in capsys.readouterr().out
    Path("llama").mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3, "vocab_size": 64}
    Path("llama/config.json").write_text(json.dumps(config))
    assert main(["model-plan", "llama", "--tp", "2", "--pp", "3"]) == 0
    told = capsys.readouterr().out
    assert (
        "layers: 3 of LlamaDecoderLayer in model.layers" in told and "stage 2: model.layers.2 to model.layers.2" in told
    )
    assert "lm_head                          colwise_gather_output (1)" in told
    assert main(["model-plan", "llama/config.json", "--tp", "2", "--pp", "3"]) == 0
    assert capsys.readouterr().out == told


def test_experts_and_attention_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_of("qwen3_moe").save_pretrained(tmp_path)
    assert main(["model-plan", str(tmp_path), "--ep", "2", "--cp", "2"]) == 0
    told = capsys.readouterr().out
    assert "experts: layers.*.mlp.experts, 8 each, 4 a rank of ep (4)\n" in told
    assert main(["model-plan", str(tmp_path), "--tp", "2"]) == 0
    assert "experts: layers.*.mlp.experts, 8 each, 4 a rank of tp (4)\n" in capsys.readouterr().out
    assert main(["model-plan", str(tmp_path), "--tp", "16"]) == 0
    assert "experts: layers.*.mlp.experts, 8 each, whole: tp (16) does not divide them (4)\n" in capsys.readouterr().out
    assert told.endswith("context parallel: layers look up their attention by name, which is cut over the tokens\n")
    text = report_of(nn.ModuleDict({"net": networks.GPT()}), "net", ModelPlan(), Sizes(world=2, ep=2))
    assert "experts: the network has none as transformers' models have them\n" in text


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({"architectures": ["nn"]}, "has no model nn"),
        ({"architectures": [3]}, "config.json"),
        ({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 0}, "config.json"),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 10**9}, "must be at most 4,096"),
        ({"model_type": "no such"}, "is no configuration that transformers reads"),
        ([], "is no table of fields"),
    ],
)
def test_a_configuration_of_which_nothing_can_be_made_is_told(
    config: Any, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = {"model_type": "llama", **config} if isinstance(config, dict) else config
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert main(["model-plan", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert shown in told and "Traceback" not in told


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (("nowhere",), "nowhere/config.json is not there; give a folder"),
        (("nowhere.py:Mine",), "is no file"),
        (("nowhere/config.json",), "error: nowhere/config.json is not there; give a folder"),
        (("llama", "--tp", "1000000000"), "--tp (1000000000) must be at most 65,536"),
        (("llama", "--pp", "0"), "pipeline_model_parallel_size (0) must be at least 1"),
    ],
)
def test_what_cannot_be_read_is_told(args: tuple[str, ...], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model-plan", *args]) == 2
    assert shown in capsys.readouterr().err
