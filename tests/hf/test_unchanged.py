"""A model that is mapped from its files is the one that transformers reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    LlamaForCausalLM,
)

from lightning_megatron import hf
from lightning_megatron.hf.folder import WeightFiles
from lightning_megatron.hf.unchanged import sees_later_tokens
from tests.any_module.model_families import config_of


def written(folder: Path, model_type: str, **options: Any) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(model_type))
    model.generation_config = GenerationConfig(eos_token_id=5)
    model.save_pretrained(folder, **options)
    return folder


@pytest.mark.parametrize("is_decoder", [False, True])
@pytest.mark.parametrize("model_type", ["roberta", "megatron-bert", "gpt_neox", "bart"])
def test_a_token_sees_later_ones_where_it_is_said(model_type: str, is_decoder: bool) -> None:
    config = config_of(model_type)
    config.is_decoder = is_decoder
    is_said = sees_later_tokens(config)
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens, others = torch.randint(4, 60, (2, 1, 12)).unbind()
    others[:, :8] = tokens[:, :8]
    moved = (model(tokens).logits - model(others).logits).detach().abs().amax((0, 2))
    assert (float(moved[:8].max()) > 1e-5) == is_said == (not is_decoder and "bert" in model_type)
    assert float(moved[8:].min()) > 1e-5


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3", "gemma2", "gpt2", "bloom", "qwen3_moe", "deepseek_v3", "mamba", "opt"]
)
def test_a_mapped_model_is_the_one_that_transformers_reads(model_type: str, tmp_path: Path) -> None:
    folder = written(tmp_path, model_type, max_shard_size="40KB")
    found, wanted = hf.load_unchanged(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert type(found) is type(wanted) and not found.training
    tensors = {**dict(wanted.named_parameters()), **dict(wanted.named_buffers())}
    own = {**dict(found.named_parameters()), **dict(found.named_buffers())}
    assert own.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert own[name].dtype == tensor.dtype and torch.equal(own[name], tensor), name
    assert found.generation_config.eos_token_id == 5 and found.config.to_dict() == wanted.config.to_dict()
    tokens = torch.randint(3, 60, (2, 7))
    assert torch.equal(found(tokens).logits, wanted(tokens).logits)


@pytest.mark.parametrize(
    ("model_type", "auto_class"),
    [
        ("bert", AutoModelForMaskedLM),
        ("modernbert", AutoModelForMaskedLM),
        ("t5", AutoModelForSeq2SeqLM),
        ("bart", AutoModelForSeq2SeqLM),
        ("vit", AutoModelForImageClassification),
    ],
)
def test_a_model_may_be_one_of_another_class(model_type: str, auto_class: Any, tmp_path: Path) -> None:
    auto_class.from_config(config_of(model_type)).save_pretrained(tmp_path)
    found, wanted = hf.load_unchanged(tmp_path, auto_class=auto_class), auto_class.from_pretrained(tmp_path)
    assert type(found) is type(wanted)
    state = found.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.state_dict().items())
    drawn = hf.new_unchanged(tmp_path, seed=3, auto_class=auto_class)
    assert type(drawn) is type(wanted)
    if model_type == "t5":
        with pytest.raises(ValueError, match="no model of AutoModelForMaskedLM can be made of"):
            hf.load_unchanged(tmp_path, auto_class=AutoModelForMaskedLM)


@pytest.mark.parametrize(
    ("model_type", "auto_class", "dtype", "kept"),
    [
        ("deepseek_v3", AutoModelForCausalLM, torch.bfloat16, "e_score_correction_bias"),
        ("t5", AutoModelForSeq2SeqLM, torch.float16, "wo.weight"),
    ],
)
def test_weights_that_a_type_keeps_in_32_bits_stay_so(
    model_type: str, auto_class: Any, dtype: torch.dtype, kept: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    auto_class.from_config(config_of(model_type)).save_pretrained(tmp_path)
    found, wanted = hf.load_unchanged(tmp_path, dtype, auto_class), auto_class.from_pretrained(tmp_path, dtype=dtype)
    state = found.state_dict()
    assert {name: one.dtype for name, one in state.items()} == {n: one.dtype for n, one in wanted.state_dict().items()}
    assert {one.dtype for name, one in state.items() if name.endswith(kept)} == {torch.float32}


def test_a_class_that_finds_no_model_is_told(tmp_path: Path) -> None:
    config_of("llama").save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"auto_class \('LlamaForCausalLM'\) must be a class of transformers that finds"
    ):
        hf.new_unchanged(tmp_path, auto_class=LlamaForCausalLM)


def test_the_weights_of_a_file_share_one_map(tmp_path: Path) -> None:
    files = WeightFiles(written(tmp_path, "llama"))
    storages = {files.mapped(name).untyped_storage().data_ptr() for name in files.shapes}
    assert len(storages) == 1
    size = (tmp_path / "model.safetensors").stat().st_size
    assert files.mapped("lm_head.weight").untyped_storage().nbytes() == size


def test_what_is_changed_in_memory_leaves_the_file_alone(tmp_path: Path) -> None:
    folder = written(tmp_path, "llama")
    content = (folder / "model.safetensors").read_bytes()
    model = hf.load_unchanged(folder)
    with torch.no_grad():
        model.lm_head.weight.fill_(1.0)
    assert (folder / "model.safetensors").read_bytes() == content


def test_what_is_no_causal_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no configuration that this version of transformers reads"):
        hf.load_unchanged(tmp_path)
    with pytest.raises(ValueError, match=r"'nowhere' is no folder here; give .* on the hub, as owner/model"):
        hf.load_unchanged("nowhere")
    config = config_of("llama")
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        hf.load_unchanged(tmp_path)


def test_weights_have_the_dtype_that_is_asked_for_and_stay_in_host_memory(tmp_path: Path) -> None:
    folder = written(tmp_path, "llama")
    with torch.device("meta"):
        found = hf.load_unchanged(folder, torch.bfloat16)
    assert {(one.dtype, one.device.type) for one in found.parameters()} == {(torch.bfloat16, "cpu")}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert hf.load_unchanged(folder).dtype == torch.bfloat16 == AutoModelForCausalLM.from_pretrained(folder).dtype
