"""New weights of a model of transformers are drawn by name: the same on every layout, and never whole on a rank."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_megatron import hf
from lightning_megatron.mesh import Mesh, Sizes, ambient
from lightning_megatron.planner.memory_tracker import MemoryTracker
from lightning_megatron.sharding import shard_of
from lightning_megatron.testing import certify
from lightning_megatron.trainer.setup.pipelined_models import cut_plain_networks
from tests.any_module.model_families import Causal, batches, config_of
from tests.harness.sample import every_nth


class New(Causal):
    """Trains a new model."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = drawn(functools.partial(config_of, self.model_type))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def drawn(make: Callable[[], Any]) -> Any:
    return hf.new_unchanged(make(), seed=3)


def of_rank(rank: int, sizes: Sizes, build: Callable[[], Any]) -> Any:
    """The model of a rank, cut and filled, without processes."""
    module, mesh = L.LightningModule(), Mesh.imagine(rank, sizes)
    with ambient(mesh):
        module.model = build()
        cut_plain_networks(module, mesh)
    return module.model


LAYOUTS = [
    # A tied head, and norms of queries and keys.
    ("qwen3", Sizes(world=2, tp=2)),
    ("llama", Sizes(world=8, tp=2, pp=2)),
    ("qwen3_moe", Sizes(world=2, ep=2)),
    ("qwen3_moe", Sizes(world=8, tp=2, etp=2, ep=2, pp=2)),
    # What comes out of a layer is drawn by its parent.
    ("gpt2", Sizes(world=4, pp=4)),
    ("deepseek_v3", Sizes(world=2, tp=2)),
    ("bert", Sizes(world=4, tp=2, pp=2)),
    ("mamba", Sizes(world=2, pp=2)),
]


@pytest.mark.parametrize(("model_type", "sizes"), LAYOUTS)
def test_a_rank_begins_with_its_parts_of_one_device_s_weights(model_type: str, sizes: Sizes) -> None:
    make = functools.partial(config_of, model_type)
    state, whole = torch.get_rng_state(), tensors_of(drawn(make))
    seen = set()
    for rank in range(sizes.world):
        for name, tensor in tensors_of(of_rank(rank, sizes, functools.partial(drawn, make))).items():
            box = shard_of(tensor).box
            part = whole[name][tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]
            assert torch.equal(tensor, part) and tensor.requires_grad == part.requires_grad, name
            seen.add(name)
    assert seen == set(whole) and torch.equal(state, torch.get_rng_state())


TRAINED = [("llama", "pp2tp2-sp"), ("llama", "tp2"), ("llama", "dp2pp2-zero")]
TRAINED += [("qwen3_moe", "ep2"), ("qwen3_moe", "pp2tp2"), ("gpt2", "pp2")]


@pytest.mark.matrix
@pytest.mark.parametrize(("model_type", "layout"), every_nth(TRAINED, 3))
def test_a_new_model_trains_as_on_one_device(model_type: str, layout: str) -> None:
    certify(functools.partial(New, model_type), batches, layouts=(layout,), steps=3).assert_equal()


@pytest.mark.parametrize(
    "model_type",
    ["gpt2", "llama", "qwen3", "qwen3_moe", "bert", "mamba", "deepseek_v3", "gemma2", "modernbert-decoder", "xlnet"],
)
def test_values_are_distributed_as_transformers_draws_them(model_type: str) -> None:
    config = config_of(model_type)
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config)
    found, wanted = tensors_of(hf.new_unchanged(config, seed=3)), tensors_of(made)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        own = found[name]
        assert (own.shape, own.dtype, own.requires_grad) == (tensor.shape, tensor.dtype, tensor.requires_grad)
        # The row of the padding, biases, and the diagonals of masks.
        assert torch.equal(own == 0, tensor == 0), name
        if torch.equal(own, tensor):
            continue
        # Six deviations of what so many draws have.
        own, tensor = own.detach().double(), tensor.detach().double()
        error = 6 * float(tensor.std()) / tensor.numel() ** 0.5
        assert float(own.std()) == pytest.approx(float(tensor.std()), abs=error) and own.std() > 0, name
        assert float(own.mean()) == pytest.approx(float(tensor.mean()), abs=1.5 * error), name


LARGE = LlamaConfig(
    vocab_size=16_000,
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
)


@pytest.mark.parametrize("sizes", [Sizes(world=2, tp=2), Sizes(world=4, pp=4), Sizes(world=8, tp=2, pp=4)])
def test_a_rank_makes_what_it_keeps_and_one_module_more(sizes: Sizes) -> None:
    tracker = MemoryTracker(torch.device("cpu"))
    with tracker:
        model = of_rank(sizes.tp - 1, sizes, lambda: drawn(lambda: LARGE))
    kept = sum(tensor.nbytes for tensor in tensors_of(model).values())
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(LARGE)
    num_bytes = sum(tensor.nbytes for tensor in whole.parameters())
    largest = max(tensor.nbytes for tensor in whole.parameters())
    # What is drawn last is there whole, beside its part.
    peak_bytes = sum(tracker.take_peak().values())
    assert kept <= peak_bytes <= kept + largest + 2**16
    assert num_bytes > 190_000_000 and peak_bytes < num_bytes


def test_numbers_are_of_the_seed_and_the_name() -> None:
    config, name = config_of("llama"), "model.layers.1.mlp.up_proj.weight"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        torch.rand(3)
        found = hf.new_unchanged(config).get_parameter(name)
    config.num_hidden_layers = 2
    with torch.device("meta"):
        again = hf.new_unchanged(config, torch.bfloat16, seed=7)
    assert {(one.dtype, one.device.type) for one in again.parameters()} == {(torch.bfloat16, "cpu")} and again.training
    assert torch.allclose(found, again.get_parameter(name).float(), rtol=0.01, atol=1e-4)
    assert not torch.equal(found, hf.new_unchanged(config, seed=8).get_parameter(name))


def test_a_model_may_be_that_of_a_folder_s_configuration(tmp_path: Any) -> None:
    config_of("llama").save_pretrained(tmp_path)
    found, wanted = hf.new_unchanged(tmp_path, seed=1), hf.new_unchanged(config_of("llama"), seed=1)
    assert torch.equal(found.lm_head.weight, wanted.lm_head.weight)
    with pytest.raises(ValueError, match="no causal model can be made of a ViTConfig"):
        hf.new_unchanged(config_of("vit"))
    with pytest.raises(ValueError, match="config is a dict; it must be a configuration of transformers"):
        hf.new_unchanged({"vocab_size": 3})  # type: ignore[arg-type]


def test_what_constructors_alone_know_is_made_whole_and_alike(caplog: pytest.LogCaptureFixture) -> None:
    make = functools.partial(config_of, "openai-gpt")
    whole = tensors_of(drawn(make))
    assert "OpenAIGPTLMHeadModel does not draw transformer.h.0.attn.c_attn.bias" in caplog.text
    own = tensors_of(of_rank(0, Sizes(world=2, pp=2), functools.partial(drawn, make)))
    assert all(torch.equal(tensor, whole[name]) for name, tensor in own.items()) and len(own) < len(whole)


def test_what_is_done_to_a_model_before_it_has_weights_is_told() -> None:
    module, mesh = L.LightningModule(), Mesh.imagine(0, Sizes(world=2, tp=2))
    with ambient(mesh):
        module.model = hf.new_unchanged(config_of("llama"))
        nn.init.constant_(module.model.model.norm.weight, 0.5)
        with pytest.raises(ValueError, match=r"model\.norm\.weight of a new Llama\w+ was changed in place before"):
            cut_plain_networks(module, mesh)
        module.model = hf.new_unchanged(config_of("llama"))
        module.model.lm_head = nn.Linear(32, 3, bias=False)
        assert module.model.model.embed_tokens.weight.is_meta
        with pytest.raises(ValueError, match="has none to copy; make it in __init__"):
            copy.deepcopy(module)
        module.model.model.norm = nn.LayerNorm(32, device="meta")
        with pytest.raises(ValueError, match=r"LlamaForCausalLM .* and model\.norm\.bias of it came, or changed"):
            cut_plain_networks(module, mesh)
    # What has values keeps them.
    assert not module.model.lm_head.weight.is_meta


def test_why_a_run_ends_before_weights_are_drawn_is_told() -> None:
    [result] = certify(functools.partial(New, "qwen3_moe"), batches, layouts=("ep2tp2",), steps=1).results
    assert result.verdict == "refused"
    assert "expert_tensor_parallel_size (1) must be tensor_model_parallel_size (2)" in result.message
