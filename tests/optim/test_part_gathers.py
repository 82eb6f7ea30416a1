"""The order in which parts are gathered and freed, beside what autograd runs: of one rank, and nothing is sent."""

from collections.abc import Hashable
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_megatron.optim.part_gathers import ModelParts, PartGathers
from lightning_megatron.optim.sharded_params import ShardedParams


class Noted:
    """Sharded parameters that write down what becomes of them."""

    class Flat:
        def __init__(self, parameter: nn.Parameter) -> None:
            self.members = [type("Param", (), {"parameter": parameter})]

    def __init__(self, name: str, log: list[str]) -> None:
        self.weight, self.float8 = nn.Parameter(torch.ones(2)), None
        self.flat = self.Flat(self.weight)
        self.name, self.log, self.holders = name, log, set[Hashable]()

    def hold(self, holder: Hashable, *, is_exact: bool) -> None:
        if not self.holders:
            self.log.append(f"gather {self.name}")
        self.holders.add(holder)

    def wait(self) -> None:
        assert self.holders

    def let_go(self, holder: Hashable) -> None:
        if holder in self.holders:
            self.holders.discard(holder)
            if not self.holders:
                self.log.append(f"free {self.name}")

    def take_changed(self) -> None:
        pass


class Model:
    """Three parts a, b and c in a chain; `idle` ones hand on what they are given."""

    def __init__(self, idle: str = "", *, keeps: bool = False) -> None:
        self.log: list[str] = []
        self.idle = idle
        self.params = {("", name): Noted(name, self.log) for name in "abc"}
        parts: Any = {name: [one] for name, one in self.params.items()}
        names = list(self.params)
        self.gathers = PartGathers(
            ModelParts(params=cast(dict[Any, list[ShardedParams]], parts), outside=[], stages=[names], lasts=names[2:]),
            keeps=keeps,
            reach_parts=lambda: self.log.append("reduce what is behind"),
            leave_parts=lambda left: self.log.append(f"reduce {left[0][1]}"),  # type: ignore[index]
        )

    def run(self, x: Tensor, order: str = "abc") -> Tensor:
        self.gathers.begin(is_training=True)
        self.graph = self.gathers.begin_graph()
        for name in order:
            self.gathers.enter(("", name))
            self.log.append(f"run {name}")
            x = x if name in self.idle else Logged.apply(x, self.params["", name].weight, self.log, name)
            self.gathers.leave(("", name), [x])
        return x

    def step(self, order: str = "abc") -> str:
        y = self.run(torch.ones(2), order)
        if y.requires_grad:
            y.sum().backward()  # type: ignore[no-untyped-call]
        self.gathers.end_backward(self.graph)
        self.gathers.end()
        return ", ".join(self.log)


class Logged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, log: list[str], name: str) -> Tensor:
        ctx.log, ctx.name = log, name
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.log.append(f"back {ctx.name}")
        return grad, grad, None, None


FORWARD = "gather a, gather b, run a, free a, gather c, run b, free b, run c, "


def test_parts_are_gathered_one_ahead_and_the_last_stays_for_its_backward() -> None:
    assert Model().step() == (
        f"{FORWARD}reduce what is behind, gather b, back c, free c, reduce c, gather a, back b, free b, reduce b, "
        "back a, free a"
    )


def test_a_rank_without_gradients_gathers_and_reduces_in_the_order_of_the_others() -> None:
    usual = [one for one in Model().step().split(", ") if one.startswith(("gather", "reduce"))]
    # No gradient comes to any part, to the first ones, and past one in the middle.
    for idle in ("abc", "ab", "b", "c"):
        assert [one for one in Model(idle).step().split(", ") if one.startswith(("gather", "reduce"))] == usual


def test_a_part_that_runs_twice_is_reduced_once_it_was_left_twice() -> None:
    said = Model().step("abab")
    assert said.count("reduce b") == 1 and said.index("reduce b") > said.rindex("back b")


def test_kept_parts_are_gathered_once() -> None:
    model = Model(keeps=True)
    said = model.step()
    assert said.startswith("gather a, gather b, run a, gather c, run b, run c, reduce what is behind, back c")
    assert said.endswith("back a, free a, free b, free c")


def test_a_gradient_within_a_step_leaves_the_backward_as_it_is() -> None:
    model, x = Model(), torch.ones(2, requires_grad=True)
    y = model.run(x)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    begun = len(model.log)
    y.sum().backward()  # type: ignore[no-untyped-call]
    model.gathers.end_backward(model.graph)
    assert [one for one in model.log[begun:] if one.startswith(("back", "reduce"))] == [
        *("reduce what is behind", "back c", "reduce c", "back b", "reduce b", "back a"),
    ]
