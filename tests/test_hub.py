"""Names on the Hugging Face hub stand for folders."""

import json
import shutil
import time
from pathlib import Path

import lightning as L
import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from lightning_megatron import hf, hub
from lightning_megatron.cli.main import main
from lightning_megatron.data.tokenizer_files import load_tokenizer
from lightning_megatron.hub import model_folder
from lightning_megatron.lightning_modules import CausalModule
from lightning_megatron.lightning_modules.export import ExportPretrained
from lightning_megatron.lightning_modules.finetune import FinetuneModule
from lightning_megatron.trainer import ConfigurationError
from tests.any_module.model_families import config_of
from tests.data.chats import HEADERS, write_tokenizer

CONFIGS = Path(__file__).resolve().parents[1] / "recipes" / "configs"


def fault_of(name: str) -> str:
    with pytest.raises(ValueError, match="owner/other") as raised:
        model_folder(name)
    return str(raised.value)


def test_a_name_is_the_folder_that_the_cache_has_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models--owner--model" / "snapshots" / ("0" * 40)
    AutoModelForCausalLM.from_config(config_of("llama")).save_pretrained(folder)
    (tmp_path / "models--owner--model" / "refs").mkdir()
    (tmp_path / "models--owner--model" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_folder("owner/model") == str(folder)
    wanted = hf.load_unchanged(folder).state_dict()
    assert all(
        torch.equal(weight, wanted[name]) for name, weight in hf.load_unchanged("owner/model").state_dict().items()
    )
    assert hf.config_from_pretrained("owner/model").num_layers == config_of("llama").num_hidden_layers
    for call in (hf.load_unchanged, hf.from_pretrained, load_tokenizer):
        with pytest.raises(ValueError, match="owner/other is no file or folder here, and could not be fetched"):
            call("owner/other")
    with pytest.raises(ConfigurationError, match=r"cannot run:\n  - owner/other is no file .* has it$"):
        raise ConfigurationError([fault_of("owner/other"), fault_of("owner/other")])


def test_names_are_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("llama", "gemma2"):
        folder = tmp_path / f"models--owner--{name}" / "snapshots" / ("0" * 40)
        config_of(name).save_pretrained(folder)
        (folder.parents[1] / "refs").mkdir()
        (folder.parents[1] / "refs" / "main").write_text("0" * 40)
        args = ("--model", f"owner/{name}", "--layout", "tp=2", "--rank", "0", "--json")
        assert main(["dry-run", str(CONFIGS / "finetune_toy.yaml"), *args]) == 0
        assert json.loads(capsys.readouterr().out)["ranks"][0]["parameters"] > 0
    args = ("--world-size", "2", "--layout", "tp=2", "--global-batch-size", "4", "--rank", "0")
    assert main(["dry-run", "owner/llama", *args]) == 0 and "parameters" in capsys.readouterr().out
    assert main(["dry-run", "owner/other", *args]) == 2
    assert "owner/other is no file or folder here, and could not be fetched" in capsys.readouterr().err


def test_what_is_exported_has_the_tokenizer_of_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models--owner--model" / "snapshots" / ("0" * 40)
    AutoModelForCausalLM.from_config(config_of("llama")).save_pretrained(folder)
    write_tokenizer(folder, HEADERS)
    (tmp_path / "models--owner--model" / "refs").mkdir()
    (tmp_path / "models--owner--model" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for module in (FinetuneModule("owner/model"), CausalModule("owner/model")):
        module.configure_model()
        out = tmp_path / type(module).__name__
        ExportPretrained(str(out)).on_fit_end(L.Trainer(accelerator="cpu", logger=False), module)
        assert (out / "tokenizer.json").exists() and (out / "config.json").exists()


def test_a_folder_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_folder("owner/model") == "owner/model"
    # A file that is missing from a folder is no model either.
    assert model_folder("owner/other") == "owner/other"
    shutil.rmtree(tmp_path / "owner")
    # What is no name is left to whoever opens it.
    assert model_folder("a/b/c") == "a/b/c" and model_folder("model") == "model"


def test_a_hub_that_does_not_answer_at_once_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fetched(name: str, **_: object) -> str:
        # The slow one ends when the line is there, or after the test's patience.
        end = time.monotonic() + (0 if name == "owner/quick" else 10)
        while not caplog.messages and time.monotonic() < end:
            time.sleep(0.01)
        return "folder"

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    monkeypatch.setattr(hub, "_PATIENCE_SECONDS", 0.1)
    assert model_folder("owner/quick") == model_folder("owner/slow") == "folder"
    assert caplog.messages == [
        "waiting for owner/slow of the Hugging Face hub, or for its answer; HF_HUB_OFFLINE=1 asks its cache alone"
    ]
