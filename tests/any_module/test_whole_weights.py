"""Gradients of weights that ranks hold whole are told apart: whole ones, terms of a sum, and others."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.any_module.whole_weights import (
    SummedInCalls,
    copied,
    gradients,
    recording,
    stand_ins,
    told_apart,
    whole_weights,
    widened,
)
from lightning_megatron.sharding import Initial, shard_parameter
from lightning_megatron.testing import certify
from tests.any_module import learned_activations, networks
from tests.harness.threads import run_on_threads
from tests.tensor.plain import thread_mesh


def told(world: Any, off: float) -> tuple[list[str], list[str], dict[str, str]]:
    meant = {"whole": [2.0, 4.0], "term": [1.0, 3.0], "noise": [1e-9], "unused": [0.0]}
    term = torch.tensor(meant["term"]) * [0.25, 0.75][world.rank()] + off
    found = {"whole": torch.tensor(meant["whole"]), "term": term, "noise": -torch.tensor(meant["noise"])}
    found["unused"] = torch.zeros(1)
    wanted = {name: torch.tensor(one) for name, one in meant.items()}
    return told_apart(found, wanted, thread_mesh(world, is_sequence_parallel=False).tp)


def test_terms_are_told_from_whole_gradients_and_from_what_is_neither() -> None:
    assert run_on_threads(2, told, 0.0) == [(["term"], ["noise"], {})] * 2
    assert run_on_threads(2, told, 0.1) == [([], ["noise"], {"term": "off by 7e-02 of the largest"})] * 2


def summed(world: Any) -> tuple[list[float], bool]:
    module = nn.Linear(2, 1)
    nn.init.ones_(module.weight)
    is_on = [True]
    tp = thread_mesh(world, is_sequence_parallel=False).tp
    SummedInCalls(module, ["weight"], tp, lambda: is_on[0], ["bias"])
    # A second backward sums its own gradient alone; uses outside of a call, and calls while it is off, are not summed.
    for scale in (1.0, 2.0):
        module(torch.full((1, 2), scale * (1 + world.rank()))).sum().backward()
    is_on[0] = False
    module(torch.full((1, 2), 10.0)).sum().backward()
    (module.weight * 100).sum().backward()
    assert module.weight.grad is not None
    assert module.bias.grad is not None
    # Each rank's share of three calls: a mean of what cannot be told keeps copies alike.
    assert module.bias.grad.tolist() == [3.0]
    return module.weight.grad[0].tolist(), isinstance(module.weight, nn.Parameter)


def test_a_gradient_is_summed_where_calls_of_its_module_use_it() -> None:
    assert run_on_threads(2, summed) == [([119.0, 119.0], True)] * 2


def test_others_stand_in_for_weights_and_go_again() -> None:
    net = nn.Linear(2, 2)
    nn.init.zeros_(net.weight)
    held = [net.weight, net.bias.requires_grad_(False)]
    with torch.inference_mode():
        x = torch.ones(1, 2, dtype=torch.bfloat16)
        with stand_ins(net, held, widened), recording():
            assert net.weight is not held[0] and net.weight.abs().max() > 1e-4 and net.bias.requires_grad
            found = gradients(net(copied(widened(x))).sum(), dict(net.named_parameters()))
    assert found["bias"].tolist() == [1.0, 1.0] and found["weight"].tolist() == [[1.0, 1.0]] * 2
    assert net.weight is held[0] and net.bias is held[1] and net.weight.grad is None
    assert gradients(torch.ones(()), {"bias": net.bias})["bias"].tolist() == [0.0, 0.0]


def cut_bias(world: Any) -> list[str]:
    net = nn.Linear(4, 4)
    net.bias = shard_parameter((4,), initial=Initial(), dim=0, axis=thread_mesh(world, is_sequence_parallel=False).tp)
    return list(whole_weights(net))


def test_cut_weights_are_none_of_them() -> None:
    assert run_on_threads(2, cut_bias) == [["weight"]] * 2


@pytest.mark.parametrize("module", learned_activations.TRAINED)
def test_an_activation_with_weights_trains_as_on_one_device(module: Any) -> None:
    certify(module, networks.batches, layouts=("tp2",), steps=2).assert_equal()


def test_it_does_where_its_layer_runs_on_own_tokens() -> None:
    certify(learned_activations.TrainsShared, networks.batches, layouts=("tp2-sp",), steps=2).assert_equal()


@pytest.mark.parametrize(("module", "layout", "shown"), learned_activations.REFUSED)
def test_what_has_another_gradient_is_refused_by_name(module: Any, layout: str, shown: str) -> None:
    [result] = certify(module, networks.batches, layouts=(layout,), steps=1).results
    assert result.verdict == "refused" and shown in result.message
