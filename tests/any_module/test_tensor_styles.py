"""Linears cut by styles compute one device's numbers; what does not fit stays whole, with all of its parent."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import ModelPlan
from lightning_megatron.any_module.tensor_styles import (
    ColwiseLinear,
    cut_by,
    cut_linears,
    matching,
    parent_of,
    reason_of_whole,
    styles_of,
)
from lightning_megatron.mesh import Axis
from lightning_megatron.testing import certify
from tests.any_module import networks
from tests.any_module.model_families import Causal
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.trainer.layouts import Layout, make_trainer

STYLES = networks.TrainsOverTensor().model_plan().styles
OF_NET = {pattern.removeprefix("net."): style for pattern, style in STYLES.items()}


@pytest.mark.matrix
def test_a_gpt_is_cut_over_tensor_parallel_ranks_as_its_plan_says() -> None:
    layouts = every_nth(("tp2pp2", "tp2"), 2)
    certify(networks.TrainsOverTensor, networks.batches, layouts=layouts, steps=2).assert_equal()


STYLED = [
    networks.TrainsTied,
    networks.TrainsWholeHeads,
    networks.TrainsGathered,
    networks.TrainsLatent,
    networks.TrainsNormed,
    networks.TrainsNormedUnsaid,
    # What has hooks stays whole, with all of its parent.
    networks.TrainsHooked,
]


@pytest.mark.parametrize("module", STYLED)
def test_each_style_computes_what_one_device_computes(module: Callable[[], Any]) -> None:
    certify(module, networks.batches, layouts=("tp2",), steps=2).assert_equal()


@pytest.mark.matrix
def test_each_of_the_blocks_of_a_linear_is_cut() -> None:
    layouts = every_nth(("dp2tp2-zero", "tp2", "tp2pp2vp2-zb_v", "tp2-sp"), 2)
    certify(networks.TrainsPacked, networks.batches, layouts=layouts, steps=2).assert_equal()
    [result] = certify(networks.TrainsPackedAsOne, networks.batches, layouts=("tp2",), steps=1).results
    assert result.verdict == "refused" and "with the features of a rank" in result.message
    net = nn.ModuleDict({"a": networks.PackedAttention()})
    with pytest.raises(ValueError, match=r"'packed_colwise:x'\) must be among"):
        ModelPlan(styles={"a.qkv": "packed_colwise:x"})
    # Each of 3 blocks has 16 features.
    assert not cut_by(net, {"a.qkv": "packed_colwise:3", "a.out": "rowwise"}, 3)
    assert (
        reason_of_whole(net, {"a.qkv": "packed_colwise:3"}, "a.qkv", 3)
        == "3 ranks do not divide its 48 features in 3 blocks"
    )


def test_a_linear_in_two_places_is_one_cut_linear_in_both() -> None:
    net = nn.ModuleDict({"a": nn.ModuleDict({"up": nn.Linear(4, 4), "down": nn.Linear(4, 4)})})
    net["b"] = nn.ModuleDict({"other": net["a"]["up"]})
    cut_linears(net, {"a.up": "colwise", "a.down": "rowwise"}, Axis.alone(0, "tp"))
    assert isinstance(net["a"]["up"], ColwiseLinear) and net["b"]["other"] is net["a"]["up"]


def test_linears_of_one_input_sum_its_gradient_once_a_call() -> None:
    attention, tp = networks.Attention(), Axis.alone(0, "tp")
    cut_linears(nn.ModuleDict({"a": attention}), {"a.query": "colwise", "a.key": "colwise"}, tp)
    copies, x = attention.query.copies, torch.ones(2, 4, networks.WIDTH, requires_grad=True)
    assert attention.key.copies is copies
    first = copies.of(x)
    assert copies.of(x) is first and copies.of(x + 0) is not first
    first = copies.of(x)
    with torch.no_grad():
        assert copies.of(x) is not first
    first = copies.of(x)
    x.detach().add_(1)
    assert copies.of(x) is not first
    first = copies.of(x)
    attention(x)
    assert copies.of(x) is not first


def test_linears_in_compiled_code_share_an_input_unless_an_earlier_call_saw_it_change() -> None:
    attention = networks.Attention()
    cut_linears(nn.ModuleDict({"a": attention}), {"a.query": "colwise"}, Axis.alone(0, "tp"))

    def is_shared(copies: Any, changes: bool) -> bool:
        x = torch.ones(2, 4, networks.WIDTH)
        first = copies.of(x)
        if changes:
            x.add_(1)
        found = copies.of(x) is first
        copies.forget()
        return found

    compiled, copies = torch.compile(is_shared, backend="aot_eager", fullgraph=True), attention.query.copies
    # Nobody has seen a call yet: the compiler is asked, and cannot tell.
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        compiled(copies, changes=True)
    assert is_shared(copies, changes=False)
    assert compiled(copies, changes=False)
    assert not is_shared(copies, changes=True)
    assert not compiled(copies, changes=True)


def test_an_error_in_a_network_leaves_no_input_behind() -> None:
    attention = networks.Attention()
    net = nn.Sequential(attention)
    cut_linears(net, {"0.query": "colwise"}, Axis.alone(0, "tp"))
    # For keys of fewer features.
    attention.key = nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        net(torch.ones(2, 4, networks.WIDTH))
    assert attention.query.copies._last is None


def test_heads_that_are_counted_by_a_constant_are_refused_by_name() -> None:
    [result] = certify(networks.TrainsFixedHeads, networks.batches, layouts=("tp2",), steps=1).results
    assert result.verdict == "refused"
    assert "blocks.0.attention (FixedHeads) computes other numbers with the features of a rank" in result.message


def test_a_module_that_is_replaced_as_the_network_runs_is_refused_by_name() -> None:
    [result] = certify(networks.TrainsSwapped, networks.batches, layouts=("tp2",), steps=1).results
    assert result.verdict == "refused"
    assert "a linear of blocks.0.attention (Attention) is called outside of that module's own call" in result.message


def test_a_module_that_cannot_run_on_a_ranks_features_is_refused_by_name() -> None:
    [result] = certify(networks.TrainsWideNorm, networks.batches, layouts=("tp2",), steps=1).results
    assert result.verdict == "refused"
    assert "blocks.0.attention (WideNormAttention) does not run with the features of a rank" in result.message
    assert 'the style "replicate" in ModelPlan' in result.message


def predicted(layout: Layout) -> Tensor:
    parts: Any = make_trainer(layout).predict(networks.PredictsEncoded(), networks.loader())
    return torch.cat(parts)


def test_layers_of_torch_do_not_go_past_cut_linears_in_evaluation() -> None:
    [wanted] = run_on_ranks(1, predicted, Layout(is_plain=True), init=False)
    for found in run_on_ranks(2, predicted, Layout(world=2, tp=2), init=False):
        assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_tied_weight_is_cut_where_all_its_modules_are_and_else_stays_whole() -> None:
    styles = {"head": "colwise_gather_output"}
    assert not cut_by(networks.GPT(), styles, 2) and len(cut_by(networks.UntiedGPT(), styles, 2)) == 1
    net, both = networks.GPT(), {**styles, "tokens": "embedding_rowwise"}
    assert len(cut_by(net, both, 2)) == 2 and not cut_by(net, both, 5)
    cut_linears(net, both, Axis.alone(0, "tp"))
    assert net.head.weight is net.tokens.weight


def test_a_linear_with_hooks_stays_whole() -> None:
    module = networks.TrainsHooked()
    module.configure_model()
    found = {name for name, _, _ in cut_by(module.net, OF_NET, 2)}
    assert not {name for name in found if name.startswith(("blocks.0.up", "blocks.0.down", "blocks.1.down"))}
    assert not {name for name in found if name.startswith("blocks.2.attention")} and "blocks.3.up" in found
    assert reason_of_whole(module.net, OF_NET, "blocks.0.down", 2).startswith("as up beside it, it has hooks")


def test_a_star_stands_for_one_name() -> None:
    net = networks.GPT()
    assert len(list(matching(net, {"blocks.*.up": "colwise"}))) == 4
    assert not list(matching(net, {"*.up": "colwise"})) and not list(matching(net, {"blocks.*.upper": "colwise"}))
    assert styles_of(net) == {}


def test_a_plan_of_transformers_is_completed_by_names_where_all_of_a_module_has_one() -> None:
    def parents(model_type: str) -> set[str]:
        module = Causal(model_type)
        module.configure_model()
        return {
            name.rpartition(".")[2]
            for found in cut_by(module.model, styles_of(module.model), 2)
            if (name := parent_of(found[0]))
        }

    assert parents("qwen2_moe") == {"model", "self_attn", "shared_expert"}
    # It weighs what heads attend to by numbers of its own, one for each head.
    assert parents("gpt_oss") == {"model"}
    # Convolutions stand between the linears of some of its layers.
    assert parents("kimi_linear") == {"model", "mlp", "shared_experts"}


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.o_proj, self.q_norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(width)


class HalfPlanned(nn.Module):
    _tp_plan: ClassVar = {"up_proj": "colwise"}

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj, self.attention = nn.Linear(8, 8), Attention(width)


def test_attention_with_a_norm_over_all_its_heads_stays_whole() -> None:
    assert set(styles_of(HalfPlanned(8))) == {"up_proj"}
    assert set(styles_of(HalfPlanned(4))) == {"up_proj", "attention.q_proj", "attention.o_proj"}


class NamedInPart(nn.Module):
    """Its attention has names of its own before the linear that all of BERT's kin call alike."""

    _tp_plan: ClassVar = {}

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": nn.ModuleDict({"query_proj": nn.Linear(8, 8)}), "output": dense()})
        self.intermediate, self.output = dense(), dense()


def dense() -> nn.ModuleDict:
    return nn.ModuleDict({"dense": nn.Linear(8, 8)})


def test_a_linear_comes_out_where_another_one_goes_in() -> None:
    assert set(styles_of(NamedInPart())) == {"intermediate.dense", "output.dense"}


def test_all_linears_of_a_parent_are_cut_or_none() -> None:
    net = networks.GPT()
    assert len(cut_by(net, OF_NET, 2)) == 24
    # Attention has 16 features, and the feed-forward network 64 between its linears.
    assert {name.split(".")[-1] for name, _, _ in cut_by(net, OF_NET, 32)} == {"up", "down"}
    packed = OF_NET | {"blocks.*.attention.query": "packed_rowwise"}
    assert {name.split(".")[-1] for name, _, _ in cut_by(net, packed, 2)} == {"up", "down"}
    whole = OF_NET | {"blocks.*.up": "replicate"}
    assert len(cut_by(net, whole, 2)) == 16
    assert reason_of_whole(net, whole, "blocks.0.down", 2) == "as up beside it, its style is replicate"
    net.blocks[0].up = nn.Sequential(nn.Linear(16, 64))
    assert len(cut_by(net, OF_NET, 2)) == 22
