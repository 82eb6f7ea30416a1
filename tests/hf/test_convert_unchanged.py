"""A checkpoint of a model of transformers becomes the folder that the run itself would have saved."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from peft import LoraConfig as TheirLoraConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    GenerationConfig,
)

from lightning_megatron import hf
from lightning_megatron.checkpoint import pieces_of_module, save
from lightning_megatron.hf.convert_unchanged import unchanged_to_folder
from lightning_megatron.hf.weights import MODELS, folder_of_run
from lightning_megatron.lightning_modules import CausalModule
from lightning_megatron.mesh import Mesh
from lightning_megatron.transformer.lora import LoraConfig
from tests.any_module.model_families import batches, config_of
from tests.data.chats import write_tokenizer
from tests.harness.ranks import run_on_ranks
from tests.hf.tiny import files_of
from tests.trainer.layouts import QUIET, Layout, make_trainer

pytestmark = [
    pytest.mark.filterwarnings(QUIET),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]
TP2_PP2 = Layout(world=4, tp=2, pp=2, microbatches=2)


class Saves(L.Callback):
    """Saves the model of a run as its own folder."""

    def __init__(self, path: Path, tokenizer_from: str) -> None:
        self.path, self.tokenizer_from = path, tokenizer_from

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        hf.save_pretrained(pl_module.model, self.path, tokenizer_from=self.tokenizer_from)


def written(folder: Path, model_type: str, auto: Any = AutoModelForCausalLM) -> Path:
    """A folder with a tiny model and a tokenizer."""
    torch.manual_seed(0)
    model = auto.from_config(config_of(model_type))
    if auto is AutoModelForCausalLM:
        model.generation_config = GenerationConfig(eos_token_id=2, max_new_tokens=3)
    model.save_pretrained(folder)
    return write_tokenizer(folder, None)


def train(layout: Layout, folder: Path, out: Path, lora: LoraConfig | None, precision: str) -> None:
    """A step, of whose weights there are a folder and a checkpoint then."""
    torch.use_deterministic_algorithms(False)
    tokens = batches()[0]["input_ids"]
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": torch.ones(len(tokens), 11)}
    saves = Saves(out / "run", str(folder))
    options: dict[str, Any] = {"max_steps": 1, "max_epochs": -1, "precision": precision, "callbacks": [saves]}
    trainer = make_trainer(layout, **options)
    loader: Any = DataLoader([batch], batch_size=None)  # type: ignore[arg-type]
    trainer.fit(CausalModule(str(folder), lora=lora), loader)
    trainer.save_checkpoint(out / "last.ckpt")


# Tied embeddings, and experts that files hold one by one; a run that has weights of 16 bits meanwhile.
@pytest.mark.parametrize(
    ("model_type", "precision"), [("llama", "bf16-mixed"), ("gemma2", "32-true"), ("qwen3_moe", "32-true")]
)
def test_it_is_what_the_run_itself_saved(model_type: str, precision: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "theirs", model_type)
    run_on_ranks(4, train, TP2_PP2, folder, tmp_path, None, precision, init=False)
    assert folder_of_run(tmp_path / "last.ckpt") == str(folder)
    seen: list[tuple[int, int]] = []
    done = unchanged_to_folder(
        tmp_path / "last.ckpt", tmp_path / "out", model_from=folder, watch=lambda *counts: seen.append(counts)
    )
    assert len(seen) > 5 and seen[-1][0] == seen[-1][1] and seen == sorted(set(seen))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "run")
    # Neither a draft nor what weights went through is left.
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "out", "run", "theirs"]
    found, first = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "theirs"))
    assert found.generation_config.max_new_tokens == 3 and found.dtype == torch.float32
    assert done.family == model_type and done.dtype == "float32"
    assert done.num_parameters == sum(one.numel() for one in first.parameters())
    assert done.num_tensors == len(load_file(tmp_path / "out" / "model.safetensors"))
    # It has trained.
    moved = {name for name, one in found.named_parameters() if not torch.equal(one, first.get_parameter(name))}
    assert {name for name, _ in first.named_parameters() if "_proj" in name} <= moved
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")("What?").input_ids) > 1


def test_adapters_are_written_as_the_run_itself_wrote_them(tmp_path: Path) -> None:
    folder = written(tmp_path / "theirs", "llama")
    run_on_ranks(4, train, TP2_PP2, folder, tmp_path, LoraConfig(rank=2, alpha=3.0), "32-true", init=False)
    done = unchanged_to_folder(tmp_path / "last.ckpt", tmp_path / "out", model_from=folder)
    out, run = (files_of(tmp_path / name) for name in ("out", "run"))
    assert "adapter_model.safetensors" in out and "tokenizer.json" in out and "model.safetensors" not in out
    theirs, ours = (json.loads(one.pop("adapter_config.json")) for one in (run, out))
    # It is a set.
    assert sorted(theirs.pop("target_modules")) == sorted(ours.pop("target_modules"))
    assert ours == theirs and ours["lora_alpha"] == 3.0 and out == run
    assert done.num_tensors == 2 * 7 * config_of("llama").num_hidden_layers
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "out")
    assert any(bool(one.any()) for name, one in loaded.named_parameters() if "lora_B" in name)


def checkpoint_of(path: Path, meta: Mapping[str, Any] | None = None, **models: nn.Module) -> Path:
    """A checkpoint of a module with those submodules."""
    state = {
        f"{name}.{inner}": value
        for name, model in models.items()
        for inner, value in model.state_dict(keep_vars=True).items()
    }
    save(path, pieces_of_module(state), {"epoch": 0, "global_step": 1, **(meta or {})}, world=Mesh.single().world)
    return path


# By its architecture, which for the second is not what was trained, and without one.
@pytest.mark.parametrize(
    ("model_type", "auto", "architectures"),
    [
        ("modernbert", AutoModelForMaskedLM, ["ModernBertForMaskedLM"]),
        ("llama", AutoModel, ["LlamaForCausalLM"]),
        ("llama", AutoModelForCausalLM, None),
        ("vit", AutoModel, None),
    ],
)
def test_names_and_shapes_say_which_class_it_is(
    model_type: str, auto: Any, architectures: list[str] | None, tmp_path: Path
) -> None:
    config = config_of(model_type)
    torch.manual_seed(3)
    model = auto.from_config(config)
    path = checkpoint_of(tmp_path / "last.ckpt", net=model, other=nn.Linear(2, 2))
    config.architectures = architectures
    config.save_pretrained(tmp_path / "config")
    unchanged_to_folder(path, tmp_path / "out", model_from=tmp_path / "config", submodule="net")
    found = auto.from_pretrained(tmp_path / "out")
    assert type(found) is type(model) and found.config.architectures == [type(model).__name__]
    assert all(torch.equal(found.get_parameter(name), one) for name, one in model.named_parameters())


def test_a_dtype_and_the_size_of_files_may_be_asked_for(tmp_path: Path) -> None:
    folder = written(tmp_path / "theirs", "qwen3_moe")
    model = AutoModelForCausalLM.from_pretrained(folder)
    path = checkpoint_of(tmp_path / "last.ckpt", model=model)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "max_shard_bytes": 40_000}
    done = unchanged_to_folder(path, tmp_path / "out", model_from=folder, **options)
    hf.save_pretrained(model, tmp_path / "run", tokenizer_from=folder, **options)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "run")
    assert len([name for name in files_of(tmp_path / "out") if name.endswith(".safetensors")]) > 2
    assert done.dtype == "bfloat16"
    with pytest.raises(ValueError, match=r"max_shard_bytes \(0\) must be at least 1"):
        unchanged_to_folder(path, tmp_path / "none", model_from=folder, max_shard_bytes=0)


def test_names_in_files_are_those_that_the_run_read(tmp_path: Path) -> None:
    # Experts of a layer together, and no tokenizer.
    model = AutoModelForCausalLM.from_config(config_of("qwen3_moe"))
    model.save_pretrained(tmp_path / "theirs", save_original_format=False)
    GenerationConfig(eos_token_id=2, max_new_tokens=3).save_pretrained(tmp_path / "theirs")
    trained = hf.load_unchanged(tmp_path / "theirs")
    path = checkpoint_of(tmp_path / "last.ckpt", model=trained)
    unchanged_to_folder(path, tmp_path / "out", model_from=tmp_path / "theirs")
    hf.save_pretrained(trained, tmp_path / "run")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "run")
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "out" / "model.safetensors")


def test_weights_that_are_not_those_of_the_configuration_are_all_reported(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(config_of("llama"))
    model.extra = nn.Linear(2, 2, bias=False)
    path = checkpoint_of(tmp_path / "last.ckpt", model=model)
    config = config_of("llama")
    config.vocab_size, config.num_hidden_layers, config.architectures = 65, 5, ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "config")
    with pytest.raises(ValueError, match=r"does not fit a LlamaForCausalLM of model_from \(.*config\)") as raised:
        unchanged_to_folder(path, tmp_path / "out", model_from=tmp_path / "config")
    lines = str(raised.value).splitlines()
    assert "9 needed and not in it: model.layers.4." in lines[1]
    assert "1 in it and unknown to the configuration: extra.weight" in lines[2]
    assert "2 of another shape: lm_head.weight ((64, 32) there, (65, 32) by the configuration)" in lines[3]
    assert sorted(os.listdir(tmp_path)) == ["config", "last.ckpt"]


def test_a_submodule_that_is_not_there_and_a_model_of_this_package_are_told(tmp_path: Path) -> None:
    folder = written(tmp_path / "theirs", "llama")
    path = checkpoint_of(tmp_path / "last.ckpt", net=nn.Linear(2, 2), head=nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"submodule \('model'\) has no weights in .*, which has 'head', 'net'; name"):
        unchanged_to_folder(path, tmp_path / "out", model_from=folder)
    meta = {MODELS: {"model": {"class": "GPTModel", "config": {}}}, "hyper_parameters": {"path": str(folder)}}
    path = checkpoint_of(tmp_path / "own.ckpt", meta, model=nn.Linear(2, 2))
    assert folder_of_run(path) == ""
    with pytest.raises(ValueError, match=r"model_from \(.*theirs\) acts on a model of transformers alone"):
        unchanged_to_folder(path, tmp_path / "out", model_from=folder)


def test_adapters_of_unknown_configuration_are_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = written(tmp_path / "theirs", "llama")
    lora = TheirLoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora)
    path = checkpoint_of(tmp_path / "last.ckpt", model=model)
    with pytest.raises(ValueError, match=r"has adapters of peft, whose configuration is in no checkpoint but those"):
        unchanged_to_folder(path, tmp_path / "out", model_from=folder)


def test_a_target_that_exists_is_left_alone_and_no_weight_is_read_for_it(tmp_path: Path) -> None:
    folder = written(tmp_path / "theirs", "llama")
    path = checkpoint_of(tmp_path / "last.ckpt", model=AutoModelForCausalLM.from_pretrained(folder))
    for file in path.glob("*.distcp"):
        # Of the length that it had: what is read of it is wrong.
        file.write_bytes(bytes(file.stat().st_size))
    before = files_of(folder)
    with pytest.raises(ValueError, match="exists and is not empty"):
        unchanged_to_folder(path, folder, model_from=folder)
    assert files_of(folder) == before
