"""Gradients of weights that ranks hold whole are told apart: whole ones, terms of a sum, and others."""

from typing import Any

import torch
from torch import nn

from lightning_megatron.any_module.whole_weights import gradients, sum_in_backward, terms_among, whole_weights
from lightning_megatron.sharding import Initial, shard_parameter
from tests.harness.threads import run_on_threads
from tests.tensor.plain import thread_mesh


def told_apart(world: Any, off: float) -> tuple[list[str], dict[str, str]]:
    meant = {"whole": torch.tensor([2.0, 4.0]), "term": torch.tensor([1.0, 3.0]), "noise": torch.tensor([1e-9])}
    term = meant["term"] * [0.25, 0.75][world.rank()] + off
    found = {"whole": meant["whole"], "term": term, "noise": -meant["noise"]}
    return terms_among(found, meant, thread_mesh(world, is_sequence_parallel=False).tp)


def test_terms_are_told_from_whole_gradients_and_from_what_is_neither() -> None:
    for terms, wrong in run_on_threads(2, told_apart, 0.0):
        assert "term" in terms and "whole" not in terms and not wrong
    for terms, wrong in run_on_threads(2, told_apart, 0.1):
        assert "term" not in terms and wrong == {"term": "off by 7e-02 of the largest"}


def summed(world: Any) -> list[float]:
    weight = nn.Parameter(torch.ones(2))
    sum_in_backward(weight, thread_mesh(world, is_sequence_parallel=False).tp)
    # A second backward sums its own gradient alone.
    for scale in (1.0, 2.0):
        (weight * scale * (1 + world.rank())).sum().backward()
    assert weight.grad is not None
    return weight.grad.tolist()


def test_a_gradient_is_summed_in_each_backward_before_it_is_added() -> None:
    assert run_on_threads(2, summed) == [[9.0, 9.0]] * 2


def test_gradients_leave_other_weights_and_their_own_alone() -> None:
    net = nn.Linear(2, 2)
    with torch.inference_mode():
        found = gradients({"bias": net.bias}, net.parameters(), lambda: net(torch.ones(1, 2)).sum())
    assert found["bias"].tolist() == [1.0, 1.0] and net.bias.grad is None and net.weight.requires_grad
    assert gradients({"bias": net.bias}, [], lambda: torch.ones(()))["bias"].tolist() == [0.0, 0.0]


def cut_bias(world: Any) -> list[str]:
    net = nn.Linear(4, 4)
    tp = thread_mesh(world, is_sequence_parallel=False).tp
    net.bias = shard_parameter((4,), initial=Initial(), dim=0, axis=tp)
    return list(whole_weights(net))


def test_cut_and_frozen_weights_are_none_of_them() -> None:
    assert run_on_threads(2, cut_bias) == [["weight"]] * 2
    assert not whole_weights(nn.Linear(4, 4).requires_grad_(False))
