"""`lightning-megatron convert`: both directions, what it says, and its mistakes."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from lightning_megatron.checkpoint import is_checkpoint, pieces_of_module, save
from lightning_megatron.cli.main import main
from lightning_megatron.hf import from_pretrained
from lightning_megatron.mesh import Mesh
from lightning_megatron.models import GPTConfig, GPTModel
from tests.any_module.model_families import config_of
from tests.checkpoint import object_store
from tests.data.chats import write_tokenizer
from tests.hf.test_convert_unchanged import checkpoint_of
from tests.hf.tiny import files_of, saved

FIELDS: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 5}


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["convert", *options]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def shown(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line of a command that ends with a mistake."""
    assert main(["convert", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and captured.err.endswith("\n")
    return captured.err


def bare_checkpoint(path: str) -> None:
    """One that does not say what its model is."""
    model = GPTModel(GPTConfig(**FIELDS), seed=1)
    state = {f"model.{name}": value for name, value in model.state_dict(keep_vars=True).items()}
    save(path, pieces_of_module(state), {}, world=Mesh.single().world)


def test_there_and_back(capsys: pytest.CaptureFixture[str]) -> None:
    saved("mistral", Path("theirs"))
    Path("theirs/tokenizer.json").write_text("{}")
    told_there = printed(capsys, "theirs", "model.ckpt")
    num = sum(p.numel() for p in from_pretrained("theirs").parameters())
    assert told_there == f"model.ckpt: mistral, {num:,} parameters in 15 tensors of float32\n"
    assert is_checkpoint("model.ckpt")
    options = ("--tokenizer-from", "theirs", "--dtype", "bfloat16", "--max-shard-bytes", "9000", "--json")
    record = json.loads(printed(capsys, "model.ckpt", "again", *options))
    assert record == {
        "source": "model.ckpt",
        "target": "again",
        "family": "mistral",
        "num_tensors": 21,
        "num_parameters": num,
        "dtype": "bfloat16",
    }
    printed(capsys, "theirs", f"file://{Path.cwd()}/far/model.ckpt/")
    assert is_checkpoint("far/model.ckpt") and os.listdir("far") == ["model.ckpt"]
    assert not Path("file:").exists()
    printed(capsys, f"file://{Path.cwd()}/far/model.ckpt", *("far/again", *options))
    assert files_of(Path("far/again")) == files_of(Path("again"))
    names = files_of(Path("again"))
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < set(names)
    assert len(names) > 5


def test_a_configuration_comes_from_yaml_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    bare_checkpoint("bare.ckpt")
    Path("model.yaml").write_text(
        "\n".join(f"{name}: {value}" for name, value in [*FIELDS.items(), ("norm_epsilon", "1e-5")])
    )
    Path("model.json").write_text(json.dumps(asdict(GPTConfig(**FIELDS))))
    for number, file in enumerate(("model.yaml", "model.json")):
        assert "gpt2" in printed(capsys, "bare.ckpt", f"out{number}", "--config", file)
    assert json.loads(Path("out0/config.json").read_text())["layer_norm_epsilon"] == 1e-5
    assert files_of(Path("out0")) == files_of(Path("out1"))


def test_an_error_that_a_store_has_of_its_own_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with object_store.emptied() as address, object_store.failing(object_store.without_credentials):
        output = shown(capsys, f"{address}/model.ckpt", "x")
    assert output == f"error: {address}/model.ckpt: NoCredentialsError: unable to locate credentials\n"


def test_mistakes_are_one_line_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    saved("llama", Path("theirs"))
    bare_checkpoint("bare.ckpt")
    assert printed(capsys, "theirs", "model.ckpt")
    Path("broken.yaml").write_text("a: [")
    Path("list.yaml").write_text("- a")
    Path("empty").mkdir()
    for options, words in (
        (("nowhere.ckpt", "x"), "SOURCE (nowhere.ckpt) does not exist; give a checkpoint, or a folder"),
        (("empty", "x.ckpt"), "empty has no config.json"),
        (("memory://theirs", "x.ckpt"), "memory://theirs is an address, and a folder with a Hugging Face model is"),
        (("model.ckpt", "memory://x", "--family", "llama"), "memory://x is an address, and a folder"),
        (("theirs", "nowhere://x.ckpt"), "nowhere://x.ckpt is an address of no file system"),
        (("theirs", "x"), "TARGET (x) is to be a checkpoint, as theirs is none: end it in .ckpt"),
        (("theirs", "x.ckpt", "--family", "llama"), "--family acts on a folder as TARGET alone"),
        (("theirs", "x", "--submodule", "m", "--config", "c"), "--submodule acts on a checkpoint"),
        (("theirs", "model.ckpt"), "model.ckpt exists"),
        (("model.ckpt", "y.ckpt", "--family", "llama"), "TARGET (y.ckpt) becomes a folder, as model.ckpt is a"),
        (("model.ckpt", "theirs", "--family", "llama"), "theirs exists and is not empty"),
        (("model.ckpt", "x"), "say which: --family llama"),
        (("model.ckpt", "x", "--family", "gpt2"), "gpt2: "),
        (("model.ckpt", "x", "--family", "gpt2"), "position ('rotary') must be 'learned', because the family's"),
        (("model.ckpt", "x", "--family", "falcon"), "--family ('falcon') must be one of"),
        (("model.ckpt", "x", "--family", "llama", "--max-shard-bytes", "0"), "--max-shard-bytes (0)"),
        (("model.ckpt", "x", "--family", "llama", "--tokenizer-from", "y"), "--tokenizer-from (y) is no folder"),
        (("model.ckpt", "x", "--submodule", "net"), "--submodule ('net') must be one of 'model'"),
        (("model.ckpt", "x", "--family", "llama", "--tokenizer-from", "empty"), "--tokenizer-from (empty) has none"),
        (("bare.ckpt", "x"), "--config model.yaml"),
        (("bare.ckpt", "x"), "A model of transformers needs the folder with its config.json: --model-from FOLDER"),
        (("bare.ckpt", "x", "--config", "broken.yaml"), "--config (broken.yaml) is no YAML"),
        (("bare.ckpt", "x", "--config", "list.yaml"), "is no table of fields; give a file of YAML or JSON"),
        (("bare.ckpt", "x", "--config", "none.yaml"), "--config (none.yaml) cannot be read: No such file or directory"),
        (("bare.ckpt", "x", "--config", "empty"), "--config (empty) cannot be read: Is a directory"),
        (("theirs", "x.ckpt", "--dtype", "int8"), "invalid choice: 'int8'"),
    ):
        assert words in shown(capsys, *options), options
    assert not any(Path(name).exists() for name in ("x", "x.ckpt"))
    assert {path.name for path in Path().iterdir()} == {
        "theirs",
        "model.ckpt",
        "bare.ckpt",
        "broken.yaml",
        "list.yaml",
        "empty",
    }


MOE = "router: {num_experts: 4, top_k: 2, aux_losses: [{coefficient: 1e-2}]}\nffn_hidden_size: 24\n"


def test_a_dense_model_gets_experts(capsys: pytest.CaptureFixture[str]) -> None:
    saved("llama", Path("theirs"))
    Path("moe.yaml").write_text(MOE)
    assert printed(capsys, "theirs", "experts", "--upcycle", "moe.yaml").startswith("experts: mixtral, ")
    assert json.loads(Path("experts/config.json").read_text())["router_aux_loss_coef"] == 0.01
    assert printed(capsys, "theirs", "experts.ckpt", "--upcycle", "moe.yaml").startswith("experts.ckpt: GPTModel, ")
    assert printed(capsys, "theirs", "dense.ckpt")
    assert printed(capsys, "dense.ckpt", "too.ckpt", "--upcycle", "moe.yaml") and is_checkpoint("too.ckpt")
    for number, source in enumerate(("experts.ckpt", "too.ckpt")):
        assert printed(capsys, source, f"again{number}")
        assert files_of(Path(f"again{number}")) == files_of(Path("experts"))


def test_mistakes_of_upcycling_are_one_line_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    saved("llama", Path("theirs"))
    saved("llama with biases", Path("biased"))
    Path("moe.yaml").write_text(MOE)
    Path("wide.yaml").write_text("{router: {num_experts: 4}, ffn_hidden_size: 7}")
    Path("odd.yaml").write_text("experts: 4")
    Path("list.yaml").write_text("- a")
    for options, words in (
        (("theirs", "x", "--upcycle", "none.yaml"), "--upcycle (none.yaml) cannot be read: No such file or directory"),
        (("theirs", "x.ckpt", "--upcycle", "none.yaml", "--family", "mixtral"), "--upcycle (none.yaml) cannot be"),
        (
            ("theirs", "x", "--upcycle", "list.yaml"),
            "--upcycle (list.yaml) is no table of fields; give a file of YAML or JSON, as 'router:",
        ),
        (("theirs", "x", "--upcycle", "odd.yaml"), "MoEConfig has no field experts"),
        (("theirs", "x", "--upcycle", "wide.yaml"), "ffn_hidden_size of an expert (7) must divide the dense (48)"),
        (("biased", "x", "--upcycle", "moe.yaml"), "add_bias_linear (True) must be False"),
        (("theirs", "x.ckpt", "--upcycle", "moe.yaml", "--family", "mixtral"), "--family acts on a folder as TARGET"),
        (("theirs", "x", "--upcycle", "moe.yaml", "--submodule", "m"), "--submodule acts on a checkpoint as SOURCE"),
    ):
        assert words in shown(capsys, *options), options
    assert not Path("x").exists() and not Path("x.ckpt").exists()


def unchanged(folder: str, checkpoint: str) -> Any:
    """A model of transformers in its folder, and in a checkpoint whose hyper-parameters name that."""
    model = AutoModelForCausalLM.from_config(config_of("gemma2"))
    model.save_pretrained(folder)
    write_tokenizer(Path(folder), None)
    checkpoint_of(Path(checkpoint), {"hyper_parameters": {"path": folder}}, model=model)
    return model


def test_a_model_of_transformers_is_found_by_the_path_of_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    model = unchanged("theirs", "last.ckpt")
    num = sum(one.numel() for one in model.parameters())
    assert printed(capsys, "last.ckpt", "out") == f"out: gemma2, {num:,} parameters in 46 tensors of float32\n"
    model.config.save_pretrained("config")
    options = ("--model-from", "config", "--tokenizer-from", "theirs", "--dtype", "float16", "--json")
    record = json.loads(printed(capsys, "last.ckpt", "half", *options))
    assert record == {
        "source": "last.ckpt",
        "target": "half",
        "family": "gemma2",
        "num_tensors": 46,
        "num_parameters": num,
        "dtype": "float16",
    }
    assert files_of(Path("out")).keys() == files_of(Path("half")).keys() > {"tokenizer.json", "generation_config.json"}
    Path("theirs").rename("moved")
    told = shown(capsys, "last.ckpt", "x")
    assert "--model-from FOLDER (its hyper-parameters name theirs, where there is no config.json)" in told
    assert printed(capsys, "last.ckpt", "again", "--model-from", "moved")
    assert files_of(Path("again")) == files_of(Path("out"))


def test_mistakes_about_a_model_of_transformers_are_one_line_with_the_way_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unchanged("theirs", "last.ckpt")
    saved("llama", Path("llama"))
    assert printed(capsys, "llama", "own.ckpt")
    for name, fields in (
        ("other", {"vocab_size": 65}),
        ("short", {"num_hidden_layers": 3}),
        ("odd", {"num_attention_heads": "four"}),
        ("unknown", {"architectures": ["NoModel"], "vocab_size": 5}),
        ("untyped", {"model_type": "no_type"}),
    ):
        Path(name).mkdir()
        config = json.loads(Path("theirs/config.json").read_text())
        Path(name, "config.json").write_text(json.dumps(config | fields))
    Path("vast").mkdir()
    Path("vast/config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 10**9}))
    Path("moe.yaml").write_text(MOE)
    for options, words in (
        (("last.ckpt", "x", "--model-from", "nowhere"), "--model-from (nowhere) is no folder"),
        (("last.ckpt", "x", "--model-from", "last.ckpt"), "last.ckpt has no config.json"),
        (
            ("last.ckpt", "x", "--model-from", "other"),
            "a Gemma2ForCausalLM of --model-from (other): 1 of another shape",
        ),
        (("last.ckpt", "x", "--model-from", "llama"), "does not fit a LlamaForCausalLM of --model-from (llama): "),
        (("last.ckpt", "x", "--model-from", "short"), "`num_hidden_layers` (3) must be equal to the number of"),
        (("last.ckpt", "x", "--model-from", "odd"), "odd/config.json"),
        (("last.ckpt", "x", "--model-from", "unknown"), "the installed transformers has no model NoModel"),
        (("last.ckpt", "x", "--model-from", "untyped"), "untyped/config.json is no configuration that transformers"),
        (("last.ckpt", "x", "--model-from", "vast"), "num_hidden_layers (1000000000)"),
        (("last.ckpt", "x", "--submodule", "net"), "--submodule ('net') has no weights in checkpoint last.ckpt, which"),
        (("last.ckpt", "x", "--family", "llama"), "--family acts on a model of this package alone, and last.ckpt has"),
        (("last.ckpt", "x", "--upcycle", "moe.yaml"), "--upcycle acts on a model of this package alone"),
        (("last.ckpt", "x", "--config", "moe.yaml", "--model-from", "theirs"), "--config acts on a model of this"),
        (("last.ckpt", "x", "--max-shard-bytes", "0"), "--max-shard-bytes (0) must be at least 1"),
        (("last.ckpt", "x", "--tokenizer-from", "y"), "--tokenizer-from (y) is no folder"),
        (("last.ckpt", "x.ckpt"), "TARGET (x.ckpt) becomes a folder"),
        (("last.ckpt", "theirs"), "theirs exists and is not empty"),
        (("last.ckpt", "memory://x"), "memory://x is an address"),
        (("own.ckpt", "x", "--model-from", "llama"), "--model-from (llama) acts on a model of transformers alone"),
        (("llama", "x.ckpt", "--model-from", "llama"), "--model-from acts on a checkpoint as SOURCE alone"),
    ):
        assert words in shown(capsys, *options), options
    for file in Path("last.ckpt").glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    assert "last.ckpt" in shown(capsys, "last.ckpt", "x")
    assert not Path("x").exists() and not [path for path in Path().iterdir() if path.name.startswith(".")]
