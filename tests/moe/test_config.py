"""Tests of what configurations of routers and of layers of experts refuse, and with what way out."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.moe.capacity import ExpertCapacity
from lightning_megatron.moe.config import AuxLoss, MoEConfig, RouterConfig
from lightning_megatron.transformer.config import TransformerConfig


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"top_k": 9}, r"top_k \(9\) must be at most num_experts \(8\)"),
        ({"top_k": 0}, r"top_k \(0\) must be at least 1"),
        (
            {"top_k": 1},
            r"top_k \(1\) with norm_topk_prob=True makes every weight 1 .*set norm_topk_prob=False.*softmax",
        ),
        ({"top_k": 1, "score_function": "sigmoid"}, r"set norm_topk_prob=False, which weighs by the sigmoid score"),
        ({"num_groups": 3}, r"num_groups \(3\) must divide num_experts \(8\); it may be 1, 2, 4, 8"),
        ({"num_groups": 2, "group_topk": 3}, r"group_topk \(3\) must be at most num_groups \(2\)"),
        (
            {"num_groups": 4, "group_topk": 2, "top_k": 3},
            r"top_k \(3\) must be a multiple of group_topk \(2\).*it may be 2, 4",
        ),
        ({"num_groups": 4, "top_k": 4}, r"at most 2 for each of them.*it may be 1, 2"),
        ({"num_groups": 4, "routing_type": "round_robin"}, r"num_groups \(4\) limits routing_type 'top_k' alone"),
        ({"routing_type": "best"}, r"routing_type \('best'\) must be one of 'top_k', 'expert_choice'"),
        ({"score_function": "relu"}, r"score_function \('relu'\) must be one of 'softmax', 'sigmoid', 'sqrt_softplus'"),
        ({"dtype": "bfloat16"}, r"dtype \('bfloat16'\) must be one of 'float32', 'float64'"),
        ({"routing_type": "expert_choice"}, r"set norm_topk_prob=False"),
        (
            {"routing_type": "expert_choice", "norm_topk_prob": False, "aux_losses": (AuxLoss(),)},
            r"keeps experts equally busy by itself; leave aux_losses empty",
        ),
        (
            {"routing_type": "sinkhorn", "bias_update_rate": 0.1},
            r"bias_update_rate \(0.1\) acts on routing_type 'top_k' alone",
        ),
        ({"topk_scaling_factor": 0.0}, r"topk_scaling_factor \(0.0\) must be above 0"),
        ({"topk_scaling_factor": float("inf")}, r"topk_scaling_factor \(inf\)"),
        ({"jitter": 1.0}, r"jitter \(1.0\) must be from 0 to below 1"),
        ({"z_loss": -1.0}, r"z_loss \(-1.0\) must be 0 or above"),
        ({"z_loss": float("nan")}, r"z_loss \(nan\) must be 0 or above"),
        ({"aux_losses": (AuxLoss(coefficient=0.0),)}, r"coefficient of the balance loss per sequence \(0.0\)"),
        ({"aux_losses": (AuxLoss(scope="batch"),)}, r"scope of a balance loss \('batch'\) must be one of"),  # type: ignore[arg-type]
        ({"aux_losses": (AuxLoss(), AuxLoss(coefficient=1.0))}, r"aux_losses has 2 losses of scope 'sequence'"),
    ],
)
def test_a_wrong_value_is_reported_with_the_way_out(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RouterConfig(**{"num_experts": 8, **wrong})


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(ValueError) as error:
        RouterConfig(num_experts=8, top_k=9, jitter=2.0, z_loss=-1.0, score_function="relu")  # type: ignore[arg-type]
    assert len(str(error.value).splitlines()) == 4


def test_a_configuration_cannot_be_changed_unchecked() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RouterConfig(num_experts=8).top_k = 9  # type: ignore[misc]


sizes = st.integers(1, 12)


@given(num_experts=sizes, top_k=sizes, num_groups=sizes, group_topk=sizes)
def test_sizes_are_taken_exactly_where_the_groups_can_give_top_k_experts(
    num_experts: int, top_k: int, num_groups: int, group_topk: int
) -> None:
    fits = (
        num_experts % num_groups == 0
        and group_topk <= num_groups
        and top_k % group_topk == 0
        and top_k // group_topk <= num_experts // num_groups
    )
    chosen = {
        "num_experts": num_experts,
        "top_k": top_k,
        "num_groups": num_groups,
        "group_topk": group_topk,
        "norm_topk_prob": False,
    }
    message = ""
    try:
        RouterConfig(**chosen)  # type: ignore[arg-type]
    except ValueError as error:
        message = str(error)
    assert fits == (message == ""), message


ROUTER = RouterConfig(num_experts=8)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"layer_freq": 0}, r"moe layer_freq \(0\) must be at least 1"),
        ({"layer_freq": 2, "layers": (1,)}, r"moe layer_freq \(2\) and layers both say which layers have experts"),
        ({"layers": (1, 1)}, "moe layers name a layer twice"),
        ({"ffn_hidden_size": -1}, r"moe ffn_hidden_size \(-1\) must be at least 0"),
        (
            {"shared_expert_gate": True},
            "shared_expert_gate needs a shared expert; give shared_expert_intermediate_size",
        ),
        ({"dispatcher": "pigeon"}, r"moe dispatcher \('pigeon'\) must be one of 'all_to_all', 'all_gather'"),
        ({"expert_gemm": "slow"}, r"moe expert_gemm \('slow'\) must be one of 'grouped', 'sequential'"),
    ],
)
def test_wrong_layers_of_experts_are_reported_with_the_way_out(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MoEConfig(router=ROUTER, **wrong)


def test_every_second_layer_or_a_list_of_layers_has_experts() -> None:
    def layers(**options: Any) -> list[int]:
        moe = MoEConfig(router=ROUTER, **options)
        config = TransformerConfig(num_layers=5, hidden_size=8, num_attention_heads=2, moe=moe)
        return [layer for layer in range(5) if config.has_experts(layer)]

    assert layers() == [0, 1, 2, 3, 4] and layers(layer_freq=2) == [0, 2, 4] and layers(layers=(3, 1)) == [1, 3]


def test_layers_that_a_stack_does_not_have_and_capacities_too_small_for_its_sequences_are_refused_at_once() -> None:
    moe = MoEConfig(router=ROUTER, layers=(0, 4), capacity=ExpertCapacity(factor=0.5))
    with pytest.raises(ValueError) as error:
        TransformerConfig(num_layers=4, hidden_size=8, num_attention_heads=2, max_sequence_length=7, moe=moe)
    layers, capacity = str(error.value).splitlines()
    assert "moe layers 4 must be from 0 to num_layers - 1 (3)" in layers
    assert "for sequences of 7 tokens" in capacity and "is 0.875 tokens an expert" in capacity
