"""A dense folder or checkpoint becomes a model with experts, on any layout and in either format."""

from dataclasses import asdict
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_megatron import hf
from lightning_megatron.checkpoint import read_entries, read_meta
from lightning_megatron.hf.convert import to_checkpoint, to_folder
from lightning_megatron.hf.weights import MODELS, gpt_config, in_checkpoint, in_folder, moe_config
from lightning_megatron.models import GPTModel
from lightning_megatron.moe.config import AuxLoss, MoEConfig, RouterConfig
from tests.harness.ranks import run_on_ranks
from tests.hf.tiny import default_dtype, files_of, logits, ours, saved, tokens
from tests.trainer.layouts import Layout, make_trainer

# Half of the dense features, 48.
EXPERTS = MoEConfig(router=RouterConfig(num_experts=8, top_k=4), ffn_hidden_size=24)
LAYOUTS = {
    "one": Layout(),
    "ep2": Layout(world=2, ep=2),
    "ep2 etp2": Layout(world=4, ep=2, etp=2),
    "tp2+sp ep2": Layout(world=2, tp=2, sp=True, ep=2),
    "pp2 ep2": Layout(world=4, pp=2, ep=2),
}


class Upcycled(L.LightningModule):
    """A dense folder, with experts."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.model: GPTModel | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = hf.from_pretrained(self.folder, upcycle=EXPERTS)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.model is not None
        output: Tensor = self.model(batch)
        return output


def predict(layout: Layout, folder: Path) -> Tensor:
    [output] = make_trainer(layout).predict(Upcycled(folder), DataLoader(tokens(), batch_size=2)) or []
    assert isinstance(output, Tensor)
    return output


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_dense_folder_is_read_as_a_model_with_experts_on_any_layout(name: str, tmp_path: Path) -> None:
    saved("llama 3", tmp_path)
    wanted = logits(ours(tmp_path, torch.float64))
    for found in run_on_ranks(LAYOUTS[name].world, predict, LAYOUTS[name], tmp_path, init=False, timeout=120):
        assert found.dtype == torch.float64
        assert (found - wanted).abs().max() < 1e-12 * wanted.abs().max()


def test_transformers_computes_with_the_experts_what_it_did_without(tmp_path: Path) -> None:
    model = saved("llama", tmp_path / "dense")
    done = to_folder(in_folder(tmp_path / "dense").upcycled(EXPERTS), tmp_path / "experts")
    assert done.family == "mixtral"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "experts")
    assert again.config.num_local_experts == 8 and again.config.intermediate_size == 24
    wanted = logits(model)
    assert (logits(again) - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_a_qwen3_becomes_a_qwen3_moe_with_some_dense_layers(tmp_path: Path) -> None:
    model = saved("qwen3", tmp_path / "dense")
    router = RouterConfig(num_experts=6, top_k=3, norm_topk_prob=False)
    moe = MoEConfig(router=router, ffn_hidden_size=16, layers=(1, 3))
    done = to_folder(in_folder(tmp_path / "dense").upcycled(moe), tmp_path / "experts")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "experts")
    assert done.family == "qwen3_moe" and again.config.mlp_only_layers == [0, 2]
    wanted = logits(model)
    # Weights of experts differ by some roundings of float32, so that there is something to choose by.
    assert (logits(again) - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_all_ways_give_the_same_model(tmp_path: Path) -> None:
    saved("llama", tmp_path / "dense")
    to_checkpoint(in_folder(tmp_path / "dense"), tmp_path / "dense.ckpt")
    to_folder(in_folder(tmp_path / "dense").upcycled(EXPERTS), tmp_path / "1")
    to_folder(in_checkpoint(tmp_path / "dense.ckpt").upcycled(EXPERTS), tmp_path / "2")
    to_checkpoint(in_checkpoint(tmp_path / "dense.ckpt").upcycled(EXPERTS), tmp_path / "3.ckpt")
    to_folder(in_checkpoint(tmp_path / "3.ckpt"), tmp_path / "3")
    hf.save_pretrained(hf.from_pretrained(tmp_path / "dense", upcycle=EXPERTS), tmp_path / "4")
    for number in "234":
        assert files_of(tmp_path / number) == files_of(tmp_path / "1")
    assert gpt_config(read_meta(tmp_path / "3.ckpt")[MODELS]["model"]["config"]).moe == EXPERTS


def test_what_routers_learn_besides_weights_begins_at_zero(tmp_path: Path) -> None:
    saved("llama", tmp_path / "dense")
    balance = (AuxLoss(coefficient=0.1), AuxLoss(scope="global", coefficient=0.2))
    moe = MoEConfig(router=RouterConfig(num_experts=4, bias_update_rate=0.1, aux_losses=balance))
    done = to_checkpoint(in_folder(tmp_path / "dense").upcycled(moe), tmp_path / "experts.ckpt")
    entries = read_entries(tmp_path / "experts.ckpt")
    assert done.num_tensors == len(entries)
    assert entries["model.layers.1.moe.router.expert_bias"].dtype == torch.float32
    assert entries["model.layers.1.moe.router.global_tokens_per_expert"].dtype == torch.int64
    config = in_checkpoint(tmp_path / "experts.ckpt").config
    assert config == hf.config_from_pretrained(tmp_path / "dense", upcycle=moe)
    with default_dtype(torch.float64):
        model = hf.from_pretrained(tmp_path / "dense", upcycle=moe)
    buffers = dict(model.named_buffers())
    assert not any(buffer.any() for buffer in buffers.values())
    assert buffers["layers.1.moe.router.expert_bias"].dtype == torch.float32
    # It trains: a loss over the global batch reads the counts.
    model.train()(tokens(), labels=tokens()).backward()
    model.end_step(is_skipped=False)
    assert dict(model.named_buffers())["layers.1.moe.router.global_tokens_per_expert"].sum() == 2 * tokens().numel()


def test_experts_are_rebuilt_from_plain_data() -> None:
    balance = (AuxLoss(coefficient=0.1), AuxLoss(scope="global", coefficient=0.2))
    moe = MoEConfig(router=RouterConfig(num_experts=4, aux_losses=balance), layers=(0, 1))
    plain = asdict(moe)
    plain["layers"], plain["router"]["aux_losses"] = [0, 1], list(plain["router"]["aux_losses"])
    assert moe_config(plain) == moe_config(asdict(moe)) == moe
    with pytest.raises(ValueError, match="AuxLoss has no field kind"):
        moe_config({"router": {"num_experts": 4, "aux_losses": [{"kind": "x"}]}})
    with pytest.raises(ValueError, match="MoEConfig cannot be made of layer_freq"):
        moe_config({"layer_freq": 2})
