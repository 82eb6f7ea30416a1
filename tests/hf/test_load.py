"""A rank reads the slices that it holds and nothing else; what does not fit is reported before a weight is read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_megatron import hf
from lightning_megatron.hf.folder import WeightFiles
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.sharding import Box, deferring, is_deferred, sharded_parameters, write_elements
from tests.hf.tiny import default_dtype, logits, ours, saved
from tests.hf.tiny import tokens as sample

LAYOUTS = {
    "one": Sizes(),
    "tp2": Sizes(world=2, tp=2),
    "tp4": Sizes(world=4, tp=4, sequence_parallel=True),
    "pp2": Sizes(world=2, pp=2),
    "tp2 pp2 dp2": Sizes(world=8, tp=2, pp=2),
    "pp2 vp2": Sizes(world=2, pp=2, vp=2),
}


EXPERT_LAYOUTS = {
    "one": Sizes(),
    "ep2": Sizes(world=2, ep=2),
    "ep2 etp2": Sizes(world=4, ep=2, etp=2),
    "tp2 ep2": Sizes(world=4, tp=2, ep=2, sequence_parallel=True),
    "pp2 ep2": Sizes(world=4, pp=2, ep=2),
}
CASES = ("gpt2", "qwen2 tied, two layers with a window", "qwen3, a window in turns")


# Two layers, GPT-2's here, make two stages.
@pytest.mark.parametrize(
    ("case", "name", "sizes", "options"),
    [
        *((c, name, sizes, {}) for c in CASES for name, sizes in LAYOUTS.items() if (c, name) != ("gpt2", "pp2 vp2")),
        *(
            ("qwen3_moe, some layers dense, with a window", name, sizes, {"save_original_format": is_apart})
            for name, sizes in EXPERT_LAYOUTS.items()
            for is_apart in (True, False)
        ),
    ],
)
def test_each_rank_reads_what_it_holds_once(
    case: str, name: str, sizes: Sizes, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(case, tmp_path, **options)
    full = dict(ours(tmp_path).named_parameters())
    read: list[int] = []
    read_box = WeightFiles.read

    def counted(files: WeightFiles, name: str, box: Box) -> Tensor:
        values = read_box(files, name, box)
        read.append(values.numel() * values.element_size())
        return values

    monkeypatch.setattr(WeightFiles, "read", counted)
    for rank in range(sizes.world):
        read.clear()
        model = hf.from_pretrained(tmp_path, Mesh.imagine(rank, sizes))
        held = 0
        for name, parameter, shard in sharded_parameters(model):
            wanted = full[name]
            for dim, (start, size) in enumerate(zip(shard.box.offsets, shard.box.sizes, strict=True)):
                wanted = wanted.narrow(dim, start, size)
            assert torch.equal(shard.valid(parameter), wanted)
            padding = parameter.numel() - wanted.numel()
            assert parameter.count_nonzero() <= wanted.numel() and padding >= 0
            held += wanted.numel() * parameter.element_size()
        assert sum(read) == held


@pytest.mark.parametrize("case", ["gpt2", "qwen3_moe, some layers dense, with a window"])
def test_a_model_without_values_is_read_in_any_parts(case: str, tmp_path: Path) -> None:
    saved(case, tmp_path)
    sizes = Sizes(world=2, tp=2)
    whole = dict(hf.from_pretrained(tmp_path, Mesh.imagine(1, sizes)).named_parameters())
    with deferring():
        model = hf.from_pretrained(tmp_path, Mesh.imagine(1, sizes))
    # It was made there for a moment alone.
    shutil.rmtree(tmp_path)
    for name, parameter in model.named_parameters():
        size = parameter.numel()
        for start, end in ((0, size), (size // 3, size - 1)):
            out = torch.full((end - start,), torch.nan)
            write_elements(parameter, start, end, out)
            assert out.equal(whole[name].detach().view(-1)[start:end])
        assert is_deferred(parameter) and not is_deferred(whole[name])


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32, torch.float64])
def test_values_become_those_of_the_models_dtype(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: w.to(stored) for name, w in weights.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    with default_dtype(wanted):
        model = hf.from_pretrained(tmp_path)
    found = model.get_parameter("head.weight")
    assert found.dtype == wanted
    assert torch.equal(found, weights["lm_head.weight"].to(stored).to(wanted))


def test_a_model_in_several_files_is_read_as_one(tmp_path: Path) -> None:
    model = saved("qwen3", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert (logits(ours(tmp_path)) - logits(model)).abs().max() < 1e-5


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe, some layers dense, with a window"])
def test_experts_in_one_tensor_are_read_as_those_in_many(case: str, tmp_path: Path) -> None:
    saved(case, tmp_path / "apart")
    saved(case, tmp_path / "together", save_original_format=False)
    names = {folder: load_file(tmp_path / folder / "model.safetensors").keys() for folder in ("apart", "together")}
    assert not any("gate_up_proj" in name for name in names["apart"])
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names["together"])
    apart, together = (dict(ours(tmp_path / folder).named_parameters()) for folder in ("apart", "together"))
    assert apart.keys() == together.keys()
    assert all(torch.equal(apart[name], together[name]) for name in apart)


def test_an_expert_that_is_not_there_is_reported_by_its_name(tmp_path: Path) -> None:
    saved("mixtral", tmp_path)
    lost = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    change(tmp_path, lambda weights: weights.update({lost.replace("experts.3", "experts.4"): weights.pop(lost)}))
    with pytest.raises(ValueError) as raised:
        hf.from_pretrained(tmp_path)
    assert f"1 needed and not in it: {lost}" in str(raised.value)
    assert "1 in it and unknown to family 'mixtral': model.layers.1.block_sparse_moe.experts.4.w2" in str(raised.value)


def change(folder: Path, by: Callable[[dict[str, Tensor]], None]) -> None:
    """Changes the weights in the folder."""
    weights = load_file(folder / "model.safetensors")
    by(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_names_without_the_prefix_of_a_base_model_are_read(tmp_path: Path) -> None:
    model = saved("gpt2", tmp_path)

    def strip(weights: dict[str, Tensor]) -> None:
        for name in list(weights):
            weights[name.removeprefix("transformer.")] = weights.pop(name)
        # As the oldest files have them.
        weights["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
        weights["h.1.attn.masked_bias"] = torch.ones(())

    change(tmp_path, strip)
    assert (logits(ours(tmp_path)) - logits(model)).abs().max() < 1e-5


def test_tensors_that_are_no_weights_are_known_by_name(tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    change(tmp_path, lambda w: w.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert (logits(ours(tmp_path)) - logits(model)).abs().max() < 1e-5


def test_layers_that_predict_a_second_token_are_left_out_as_in_transformers(tmp_path: Path) -> None:
    model = saved("deepseek_v3", tmp_path)
    change(tmp_path, lambda weights: weights.update({"model.layers.3.eh_proj.weight": torch.ones(32, 64)}))
    assert (logits(ours(tmp_path)) - logits(model)).abs().max() < 1e-4
    change(tmp_path, lambda weights: weights.update({"model.layers.2.eh_proj.weight": torch.ones(32, 64)}))
    with pytest.raises(ValueError, match=r"1 in it and unknown to family 'deepseek_v3': model.layers.2.eh_proj"):
        ours(tmp_path)


def test_a_tied_head_may_be_there_if_it_is_the_embedding(tmp_path: Path) -> None:
    model = saved("gpt2", tmp_path)
    change(tmp_path, lambda w: w.update({"lm_head.weight": w["transformer.wte.weight"].clone()}))
    assert (logits(ours(tmp_path)) - logits(model)).abs().max() < 1e-5
    change(tmp_path, lambda w: w["lm_head.weight"].add_(1))
    with pytest.raises(ValueError, match=r"lm_head.weight and transformer.wte.weight .* differ"):
        ours(tmp_path)


def test_all_tensors_that_do_not_fit_are_reported_at_once(tmp_path: Path) -> None:
    saved("llama", tmp_path)

    def spoil(weights: dict[str, Tensor]) -> None:
        del weights["model.layers.0.self_attn.q_proj.weight"], weights["model.norm.weight"]
        weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)
        weights["model.layers.2.input_layernorm.weight"] = torch.ones(32)
        weights["model.layers.1.mlp.up_proj.weight"] = torch.ones(47, 32)
        weights["model.layers.1.mlp.down_proj.weight"] = torch.ones(32, 48, dtype=torch.int8)

    change(tmp_path, spoil)
    with pytest.raises(ValueError) as raised:
        hf.from_pretrained(tmp_path)
    assert [line.strip() for line in str(raised.value).splitlines()] == [
        f"the weights in {tmp_path} do not fit its config.json:",
        "2 in it and unknown to family 'llama': model.layers.0.self_attn.q_proj.bias, "
        "model.layers.2.input_layernorm.weight",
        "2 needed and not in it: model.layers.0.self_attn.q_proj.weight, model.norm.weight",
        "1 of another shape: model.layers.1.mlp.up_proj.weight ((47, 32) there, (48, 32) by the config)",
        "1 neither F64, F32, F16 nor BF16: model.layers.1.mlp.down_proj.weight",
    ]


def lose_shard(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (folder / sorted(set(index["weight_map"].values()))[1]).unlink()


def lose_map(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def name_too_much(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.more.weight"] = sorted(index["weight_map"].values())[0]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def cut_off(folder: Path) -> None:
    file = sorted(folder.glob("model-*"))[0]
    file.write_bytes(file.read_bytes()[:-100])


def spoil_header(folder: Path) -> None:
    sorted(folder.glob("model-*"))[0].write_bytes(b"no safetensors")


def only_pickle(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def no_weights(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def spoil_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def listed_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lose_shard, "lacks 1 of the files that model.safetensors.index.json names: model-00002-of-"),
        (lose_map, "has no weight_map"),
        (name_too_much, "lacks what model.safetensors.index.json says is in it: model.more.weight"),
        (cut_off, "it is cut off or damaged"),
        (spoil_header, "is no safetensors file"),
        (only_pickle, "in pytorch_model.bin, which is a pickle"),
        (no_weights, "has neither model.safetensors nor model.safetensors.index.json"),
        (no_config, "has no config.json"),
        (spoil_config, "config.json is no JSON"),
        (listed_config, "config.json is no table"),
        (shutil.rmtree, "is no folder"),
    ],
)
def test_a_folder_that_cannot_be_read_says_why(spoil: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    saved("llama", folder, max_shard_size="20KB")
    spoil(folder)
    with pytest.raises(ValueError) as raised:
        hf.from_pretrained(folder)
    assert words in str(raised.value)


def test_without_the_extra_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama", tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-megatron\[hf\]'"):
        hf.from_pretrained(tmp_path)


def test_a_model_that_was_read_trains(tmp_path: Path) -> None:
    saved("qwen3, a window in turns", tmp_path)
    model = ours(tmp_path, torch.float64).train()
    tokens = torch.randint(131, (2, 20))
    model(tokens, labels=tokens).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
def test_a_router_without_router_logits_is_trained_as_in_transformers(case: str, tmp_path: Path) -> None:
    theirs = saved(case, tmp_path)
    theirs.config.router_aux_loss_coef = 10.0
    config = json.loads((tmp_path / "config.json").read_text())
    assert not config["output_router_logits"]
    # Theirs is in evaluation, where there is no jitter.
    gradients, fields = [], {"router_aux_loss_coef": 10.0} | ({"router_jitter_noise": 0.0} if case == "mixtral" else {})
    for is_balanced in (False, True):
        (tmp_path / "config.json").write_text(json.dumps({**config, **fields, "output_router_logits": is_balanced}))
        model, tokens = ours(tmp_path).train(), sample()
        # Each position's label is the next token here, and transformers shifts by itself.
        model(tokens[:, :-1], labels=tokens[:, 1:]).backward()
        router = model.get_parameter("layers.0.moe.router.weight").grad
        assert router is not None
        gradients.append(router)
    theirs(sample(), labels=sample()).loss.backward()
    [wanted] = [p.grad for n, p in theirs.named_parameters() if n.endswith("layers.0.mlp.gate.weight")]
    # Both are in float32, and sum up in other orders.
    torch.testing.assert_close(gradients[0], wanted, rtol=1e-4, atol=1e-6)
    assert (gradients[1] - wanted).abs().max() > 1e-3
