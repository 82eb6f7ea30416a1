"""`lightning-megatron plan` as a user types it, and what it says to mistakes."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_megatron.cli.main import main
from lightning_megatron.planner.anatomy import anatomy_of
from lightning_megatron.planner.presets import PRESETS

CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "configs"
GPT_1T = str(CONFIGS / "gpt_1t.yaml")


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["plan", *args]) == 0
    return capsys.readouterr().out


def told(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["plan", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return captured.err


def record(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    return json.loads(printed(capsys, *args, "--json"))


def test_a_search_shows_what_fits_best_first_and_explains_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "llama3_8b", "--gpu", "h100", "--num-gpus", "16", "--top", "3", "--tokens", "1e12")
    assert "layouts fit on h100, fastest first" in text and "fell out" in text
    assert text.count("mbs=") == 4 and "days for 1e+12 tokens" in text
    assert "causal attention half" in text and "main weights" in text


def test_the_recipe_of_a_trillion_parameters_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    told_of = record(capsys, GPT_1T, "--gpu", "a100", "--layout", "recipe", "--tokens", "450e9")
    assert told_of["parameters"] == pytest.approx(1008e9, rel=0.001)
    assert told_of["sizes"] == {
        "world": 3072,
        "tp": 8,
        "pp": 64,
        "vp": 1,
        "cp": 1,
        "dp": 6,
        "ep": 1,
        "etp": 1,
        "edp": 48,
    }
    assert told_of["fits"] and len(told_of["memory_bytes"]) == 64 and 60 < told_of["days"] < 110
    assert sum(told_of["memory_bytes"][0][kind] for kind in told_of["memory_bytes"][0] if kind != "total") == (
        pytest.approx(told_of["memory_bytes"][0]["total"])
    )


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_with_a_model_is_planned(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = yaml.safe_load(path.read_text())
    if not isinstance(recipe["model"].get("config"), dict):
        assert "model.config" in told(capsys, str(path), "--gpu", "h100")
        return
    if "frozen" in recipe["model"]:
        assert "is not planned" in told(capsys, str(path), "--gpu", "h100", "--layout", "recipe")
        return
    planned = record(capsys, str(path), "--gpu", "h100", "--layout", "recipe")
    assert planned["step_seconds"] > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensor_parallel": 8}, "tensor_parallel is no option of the strategy; did you mean"),
        ([1], "must be a table of options"),
        ({"microbatch_size": -1}, "microbatch_size (-1) must be a number of at least 1"),
    ],
)
def test_what_the_strategy_would_not_take_is_told(
    change: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = yaml.safe_load(Path(GPT_1T).read_text())
    recipe["trainer"]["strategy"]["init_args"] = change
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(recipe))
    assert words in told(capsys, str(tmp_path / "a.yaml"), "--gpu", "h100", "--layout", "recipe")


def test_rows_of_a_microbatch_say_how_many_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = yaml.safe_load((CONFIGS / "gpt3_175b.yaml").read_text())
    arguments = recipe["trainer"]["strategy"]["init_args"]
    wanted = record(capsys, str(CONFIGS / "gpt3_175b.yaml"), "--gpu", "h100", "--layout", "recipe")
    del arguments["num_microbatches"]
    arguments["microbatch_size"] = wanted["micro_batch_size"]
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(recipe))
    found = record(capsys, str(tmp_path / "a.yaml"), "--gpu", "h100", "--layout", "recipe")
    assert found["step_seconds"] == wanted["step_seconds"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tokens", "-5"), "--tokens (-5.0) must be a number above 0"),
        (("--memory-gb", "inf"), "--memory-gb (inf) must be a number above 0"),
        (("--layout", "tp=2,tp=4"), "names tp twice"),
        (("--layout", "tp=²"), "must be one of"),
        (("--layout", "recipe", "--out", "/proc/a.svg"), "cannot be written"),
    ],
)
def test_values_that_say_nothing_are_told(
    options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in told(capsys, GPT_1T, "--gpu", "a100-80gb", *options)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_planned(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    planned = record(capsys, name, "--gpu", "b300", "--num-gpus", "128", "--layout", "tp=4,pp=2,mbs=1")
    assert planned["tokens_per_second"] > 0


@pytest.mark.parametrize("name", sorted(set(PRESETS) & {path.stem for path in CONFIGS.glob("*.yaml")}))
def test_a_preset_is_the_model_of_the_recipe_of_its_name(name: str) -> None:
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["model"]["config"]
    preset = PRESETS[name]
    for field in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        assert getattr(preset.model, field) == config[field]
    known = {
        "gpt2_124m": 124e6,
        "gpt3_175b": 174.6e9,
        "gpt_1t": 1008e9,
        "mixtral_8x7b": 46.7e9,
        "mixtral_8x22b": 140.6e9,
        "qwen3_30b_a3b": 30.5e9,
        "bert_large": 336.2e6,
        "t5_11b": 11.307e9,
    }
    assert anatomy_of(preset.model, preset.texts).parameters() == pytest.approx(known[name], rel=0.005)


def test_a_hugging_face_config_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    args = (str(file), "--gpu", "h100", "--num-gpus", "8", "--layout", "tp=4,mbs=1")
    assert "--global-batch-size is needed" in told(capsys, *args)
    planned = record(capsys, *args, "--global-batch-size", "64")
    assert planned["parameters"] == pytest.approx(8.03e9, rel=0.001)


def test_fp8_and_recomputation_change_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("llama3_8b", "--gpu", "h100", "--num-gpus", "16", "--layout", "tp=4,pp=2,mbs=1")
    plain = record(capsys, *args)
    assert record(capsys, *args, "--fp8")["step_seconds"] < plain["step_seconds"]
    again = record(capsys, *args, "--recompute", "full")
    assert again["step_seconds"] > plain["step_seconds"]
    assert again["memory_bytes"][0]["activations"] < plain["memory_bytes"][0]["activations"]


def test_a_picture_has_a_bar_for_every_kind_on_every_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.svg"
    args = (
        "llama3_8b",
        "--gpu",
        "h100",
        "--num-gpus",
        "16",
        "--layout",
        "tp=2,pp=4,mbs=1",
        "--global-batch-size",
        "16",
    )
    printed(capsys, *args, "--out", str(file))
    text = file.read_text()
    ElementTree.fromstring(text)
    assert all(f"rank {rank}, {kind}:" in text for rank in range(4) for kind in ("weights", "activations", "overhead"))
    assert "forward, stage 3, microbatch" in text


def test_a_gpu_of_one_s_own_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("memory_gb: 192\nmemory_tb_per_second: 5.3\nhalf_tflops: 1307\nnvlink_gb_per_second: 448\n")
    planned = record(capsys, "llama3_8b", "--gpu", str(file), "--num-gpus", "8", "--layout", "tp=2,mbs=1")
    assert planned["gpu"] == "mine"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("llama3_8b", "--gpu", "h1000", "--num-gpus", "8"), ("'h1000'", "did you mean h100", "gb200")),
        (("llama3_9b", "--gpu", "h100", "--num-gpus", "8"), ("'llama3_9b'", "llama3_8b", "mixtral_8x7b")),
        (
            ("gpt3_175b", "--gpu", "h100", "--num-gpus", "8"),
            ("fits in 80 GB", "GB a GPU would do", "GPUs of this kind"),
        ),
        (
            ("llama3_8b", "--gpu", "h100", "--num-gpus", "16", "--global-batch-size", "7", "--layout", "tp=2,mbs=2"),
            ("global_batch_size (7)", "use 16"),
        ),
        (("bert_large", "--gpu", "h100", "--num-gpus", "31", "--global-batch-size", "9"), ("global_batch_size (9)",)),
        (("llama3_8b", "--gpu", "h100"), ("--num-gpus is needed",)),
        (("llama3_8b", "--gpu", "h100", "--num-gpus", "8", "--layout", "tp=2,qp=3"), ("'qp=3'", "tp, pp")),
        (("llama3_8b", "--gpu", "h100", "--num-gpus", "8", "--layout", "recipe"), ("no layout of its own",)),
        (("llama3_8b", "--gpu", "h100", "--num-gpus", "9", "--layout", "tp=3,mbs=1"), ("num_attention_heads (32)",)),
        (("llama3_8b", "--gpu", "a100", "--num-gpus", "8", "--fp8"), ("no units for FP8",)),
        (("none.yaml", "--gpu", "h100"), ("none.yaml cannot be read",)),
        (("llama3_8b", "--gpu", "h100", "--num-gpus", "8", "--out", "plan.pdf"), ("--out", ".svg")),
        (("llama3_8b", "--gpu", "h100", "--num-gpus", "0"), ("--num-gpus (0)",)),
        (("llama3_8b", "--gpu", "h100", "--num-gpus", "8", "--memory-gb", "-1"), ("memory_gb (-1.0)",)),
    ],
)
def test_a_mistake_is_one_line_with_the_way_out(
    args: tuple[str, ...], says: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, *args)
    assert all(word in text for word in says), text
    assert text.count("\n") == 1


def test_a_recipe_with_slips_tells_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = yaml.safe_load(Path(GPT_1T).read_text())
    recipe["model"]["config"]["hiden_size"] = recipe["model"]["config"].pop("hidden_size")
    recipe["trainer"]["strategy"]["init_args"]["optimizer"]["kind"] = "sharded"
    recipe["data"]["global_batch_size"] = "many"
    file = tmp_path / "slips.yaml"
    file.write_text(yaml.safe_dump(recipe))
    text = told(capsys, str(file), "--gpu", "h100")
    assert "hiden_size is not known; did you mean hidden_size?" in text
    assert "hidden_size is missing" in text and "'sharded'" in text and "'many'" in text
