"""A folder becomes a checkpoint that Lightning loads on any layout, and a checkpoint the folder that it was."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import ConfigurationError, hf, load_from_checkpoint
from lightning_megatron.checkpoint import pieces_of_module, read_entries, read_meta, save
from lightning_megatron.hf.convert import to_checkpoint, to_folder
from lightning_megatron.hf.weights import MODELS, gpt_config, in_checkpoint, in_folder
from lightning_megatron.mesh import Mesh
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.transformer.lora import LoraConfig, add_lora
from lightning_megatron.transformer.rotary import RopeScaling
from tests.harness.ranks import run_on_ranks
from tests.hf.tiny import CASES, family_of, files_of, logits, ours, saved, tokens
from tests.trainer.layouts import Layout, make_trainer

WORLD = Mesh.single().world


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_is_what_save_pretrained_writes(case: str, tmp_path: Path) -> None:
    saved(case, tmp_path / "theirs")
    to_checkpoint(in_folder(tmp_path / "theirs"), tmp_path / "model.ckpt")
    done = to_folder(in_checkpoint(tmp_path / "model.ckpt"), tmp_path / "again", family=family_of(case))
    model = ours(tmp_path / "theirs")
    hf.save_pretrained(model, tmp_path / "ours", family=family_of(case))
    assert files_of(tmp_path / "again") == files_of(tmp_path / "ours")
    assert done.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert done.family == family_of(case) and done.dtype == "float32"
    # Neither a draft nor what weights went through is left.
    assert len(list(tmp_path.iterdir())) == 4


class Language(L.LightningModule):
    """Knows the configuration alone; its weights are a checkpoint's."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.model: GPTModel | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPTModel(self.config, seed=1)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.model is not None
        output: Tensor = self.model(batch)
        return output

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        assert self.model is not None
        self.log("loss", self.model(batch, labels=batch))


def predict_from_checkpoint(layout: Layout, path: Path) -> tuple[Tensor, float]:
    module = Language(gpt_config(read_meta(path)[MODELS]["model"]["config"]))
    loader = DataLoader(tokens(), batch_size=2)
    [output] = make_trainer(layout, precision="32-true").predict(module, loader, ckpt_path=path) or []
    [found] = make_trainer(layout, precision="32-true").validate(module, loader, ckpt_path=path, verbose=False)
    assert isinstance(output, Tensor)
    return output, found["loss"]


class Trained(Language):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(batch, labels=batch)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_refused_and_begun_from_its_weights(path: Path) -> tuple[str, bool]:
    config, loader = gpt_config(read_meta(path)[MODELS]["model"]["config"]), DataLoader(tokens(), batch_size=2)
    with pytest.raises(ConfigurationError) as refused:
        make_trainer(Layout(), max_steps=1).fit(Trained(config), loader, ckpt_path=path)
    # As the message says.
    module = load_from_checkpoint(Trained, path, config=config)
    assert module.model is not None
    before = {name: weight.detach().clone() for name, weight in module.model.named_parameters()}
    make_trainer(Layout(), max_steps=1, precision="32-true").fit(module, loader)
    moved = [not torch.equal(weight, before[name]) for name, weight in module.model.named_parameters()]
    return str(refused.value), any(moved)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_a_fit_that_would_resume_from_it_is_refused_with_the_way_to_begin_from_its_weights(tmp_path: Path) -> None:
    saved("llama", tmp_path / "theirs")
    to_checkpoint(in_folder(tmp_path / "theirs"), tmp_path / "model.ckpt")
    [(line, has_trained)] = run_on_ranks(1, fit_refused_and_begun_from_its_weights, tmp_path / "model.ckpt", init=False)
    assert "model.ckpt) has weights alone" in line and "hf.from_pretrained" in line and has_trained


LAYOUTS = {"one": Layout(), "tp2+sp": Layout(world=2, tp=2, sp=True), "pp2": Layout(world=2, pp=2)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_lightning_predicts_and_validates_from_it_on_any_layout(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    model = saved("qwen3, a window in turns", tmp_path / "theirs")
    to_checkpoint(in_folder(tmp_path / "theirs"), tmp_path / "model.ckpt")
    wanted = logits(model)
    loss = torch.nn.functional.cross_entropy(wanted.flatten(0, 1), tokens().flatten())
    for found, found_loss in run_on_ranks(
        layout.world, predict_from_checkpoint, layout, tmp_path / "model.ckpt", init=False
    ):
        assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
        assert found_loss == pytest.approx(loss.item(), rel=1e-5)


def test_a_dtype_may_be_asked_for_both_ways(tmp_path: Path) -> None:
    model = saved("llama", tmp_path / "theirs")
    to_checkpoint(in_folder(tmp_path / "theirs"), tmp_path / "model.ckpt", dtype=torch.bfloat16)
    assert {entry.dtype for entry in read_entries(tmp_path / "model.ckpt").values()} == {torch.bfloat16}
    done = to_folder(in_checkpoint(tmp_path / "model.ckpt"), tmp_path / "again", family="llama", dtype=torch.float32)
    assert done.dtype == "float32"
    weight = ours(tmp_path / "again").get_parameter("head.weight")
    assert torch.equal(weight, model.lm_head.weight.bfloat16().float())


FIELDS: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 5}


def checkpoint_of(path: Path, meta: dict[str, Any], names: tuple[str, ...] = ("model",), **fields: Any) -> None:
    """A checkpoint of tiny models under those names."""
    model = GPTModel(GPTConfig(**{**FIELDS, **fields}), seed=1)
    state = model.state_dict(keep_vars=True)
    pieces = pieces_of_module({f"{name}.{inner}": value for name in names for inner, value in state.items()})
    save(path, pieces, meta, world=WORLD)


def said(kind: str = "GPTModel", **fields: Any) -> dict[str, Any]:
    """What a checkpoint says of a model."""
    return {"class": kind, "config": asdict(GPTConfig(**{**FIELDS, **fields}))}


def test_one_of_several_models_is_named(tmp_path: Path) -> None:
    path = tmp_path / "two.ckpt"
    checkpoint_of(path, {MODELS: {"student": said(), "teacher": said()}}, ("student", "teacher"))
    with pytest.raises(ValueError, match=r"has models 'student', 'teacher'; say which: --submodule"):
        to_folder(in_checkpoint(path), tmp_path / "out")
    with pytest.raises(ValueError, match=r"submodule \('model'\) must be one of 'student', 'teacher'"):
        to_folder(in_checkpoint(path, submodule="model"), tmp_path / "out")
    assert to_folder(in_checkpoint(path, submodule="teacher"), tmp_path / "out").family == "gpt2"


def test_a_checkpoint_that_names_no_model_needs_its_configuration(tmp_path: Path) -> None:
    path = tmp_path / "bare.ckpt"
    checkpoint_of(path, {}, activation="gelu_tanh")
    with pytest.raises(ValueError, match=r"does not say what its models are .*--config model.yaml"):
        to_folder(in_checkpoint(path), tmp_path / "out")
    to_folder(in_checkpoint(path, config={**FIELDS, "activation": "gelu_tanh"}), tmp_path / "out")
    assert ours(tmp_path / "out").config == GPTConfig(**FIELDS, activation="gelu_tanh")
    checkpoint_of(tmp_path / "named.ckpt", {MODELS: {"model": said()}})
    with pytest.raises(ValueError, match="says itself what its models are"):
        to_folder(in_checkpoint(tmp_path / "named.ckpt", config=FIELDS), tmp_path / "out2")


def test_weights_that_are_not_those_of_the_configuration_are_all_reported(tmp_path: Path) -> None:
    path = tmp_path / "wrong.ckpt"
    checkpoint_of(path, {MODELS: {"model": said(add_bias_linear=False)}}, add_bias_linear=False)
    with pytest.raises(ValueError) as raised:
        to_folder(in_checkpoint(path), tmp_path / "out", family="gpt2")
    assert "gpt2: add_bias_linear (False) must be True" in str(raised.value)
    checkpoint_of(path, {MODELS: {"model": said(vocab_size=6, tie_embeddings=False, num_layers=2)}})
    with pytest.raises(ValueError) as raised:
        to_folder(in_checkpoint(path), tmp_path / "out")
    lines = str(raised.value).splitlines()
    assert "13 needed and not in it: head.weight, layers.1." in lines[1]
    assert "1 of another shape: embedding.tokens.weight ((5, 8) there, (6, 8) by the configuration)" in lines[2]
    checkpoint_of(path, {MODELS: {"model": said()}}, num_layers=2)
    with pytest.raises(ValueError, match=r"12 in it and unknown to the configuration: layers.1."):
        to_folder(in_checkpoint(path), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["wrong.ckpt"]


def test_lora_adapters_are_refused_with_the_way_out(tmp_path: Path) -> None:
    saved("llama", tmp_path / "theirs")
    model = ours(tmp_path / "theirs")
    add_lora(model, LoraConfig(rank=2))
    meta = {MODELS: {"model": {"class": "GPTModel", "config": asdict(model.config)}}}
    pieces = {f"model.{name}": piece for name, piece in pieces_of_module(model.state_dict(keep_vars=True)).items()}
    save(tmp_path / "model.ckpt", pieces, meta, world=WORLD)
    with pytest.raises(ValueError, match=r"(?s)lora\.a.*are not converted; .*--export\.path"):
        to_folder(in_checkpoint(tmp_path / "model.ckpt"), tmp_path / "out", family="llama")


def test_a_model_of_another_class_is_refused(tmp_path: Path) -> None:
    checkpoint_of(tmp_path / "other.ckpt", {MODELS: {"model": said("OtherModel")}})
    with pytest.raises(ValueError, match=r"is a OtherModel; converted are GPTModel, BertModel"):
        to_folder(in_checkpoint(tmp_path / "other.ckpt"), tmp_path / "out")


def test_targets_that_exist_are_left_alone(tmp_path: Path) -> None:
    saved("llama", tmp_path / "theirs")
    to_checkpoint(in_folder(tmp_path / "theirs"), tmp_path / "model.ckpt")
    before = files_of(tmp_path / "theirs")
    with pytest.raises(ValueError, match="exists"):
        to_checkpoint(in_folder(tmp_path / "theirs"), tmp_path / "model.ckpt")
    with pytest.raises(ValueError, match="exists and is not empty"):
        to_folder(in_checkpoint(tmp_path / "model.ckpt"), tmp_path / "theirs", family="llama")
    assert files_of(tmp_path / "theirs") == before


def test_a_configuration_is_rebuilt_from_plain_data() -> None:
    config = GPTConfig(
        **FIELDS,
        position="rotary",
        rope_scaling=RopeScaling(kind="linear", factor=2.0),
        sliding_window=3,
        full_attention_layers=(0,),
    )
    plain = asdict(config)
    plain["full_attention_layers"] = [0]  # as JSON and YAML have it
    assert gpt_config(plain) == config


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({**FIELDS, "experts": 8}, "GPTConfig has no field experts; its fields are activation,"),
        ({**FIELDS, "rope_scaling": {"sort": "linear"}}, "RopeScaling has no field sort"),
        ({"num_layers": 1}, "GPTConfig cannot be made of num_layers"),
        ({**FIELDS, "num_layers": 0}, "num_layers (0) must be at least 1"),
    ],
)
def test_a_configuration_that_is_wrong_says_why(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as raised:
        gpt_config(fields)
    assert words in str(raised.value)


def test_biases_of_experts_pass_in_float32_whatever_the_weights_are_in(tmp_path: Path) -> None:
    model = saved("deepseek_v3", tmp_path / "theirs")
    to_checkpoint(in_folder(tmp_path / "theirs"), tmp_path / "ours.ckpt", dtype=torch.bfloat16)
    to_folder(in_checkpoint(tmp_path / "ours.ckpt"), tmp_path / "again")
    found = load_file(tmp_path / "again" / "model.safetensors")
    biases = {name: value for name, value in model.state_dict().items() if name.endswith("e_score_correction_bias")}
    assert len(biases) == 2 and all(torch.equal(found[name], value) for name, value in biases.items())
    assert {value.dtype for name, value in found.items() if name not in biases} == {torch.bfloat16}
