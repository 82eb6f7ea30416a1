"""An optimizer that torch does not ship never steps parts of weights, or some weights of many, without a word."""

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron import ConfigurationError
from lightning_megatron.optim.config import DeclaredScope, OptimizerConfig
from lightning_megatron.optim.update_scope import update_scope_of
from tests.harness.ranks import run_on_ranks
from tests.trainer.fits import Parts, parts_apart, weights
from tests.trainer.layouts import PLAIN, Layout, make_trainer
from tests.trainer.modules import Data, Parallel, Small

TP2 = Layout(world=2, tp=2)
PP2 = Layout(world=2, pp=2, microbatches=2)


class BySign(Optimizer):
    """Steps each number by the sign of its gradient."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.direction(parameter.grad), alpha=group["lr"])

    def direction(self, gradient: Tensor) -> Tensor:
        # Next to nothing, such as the gradient of a bias before a norm, has a sign that is chance.
        return gradient.sign() * (gradient.abs() > 1e-12)


class ByMatrix(BySign):
    """Steps each weight by its gradient over that one's norm."""

    def direction(self, gradient: Tensor) -> Tensor:
        return gradient / (gradient.norm() + 1e-3)


class Stepped(Parallel):
    def __init__(self, kind: type[BySign]) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters())


class SteppedChain(Small):
    def configure_optimizers(self) -> Any:
        return ByMatrix(self.parameters())


def with_kind(layout: Layout, update_scope: DeclaredScope, kind: str = "replicated") -> Layout:
    settings: dict[str, Any] = {"kind": kind, "update_scope": update_scope, "bucket_size": 60}
    return Layout(**{**vars(layout), "optimizer": OptimizerConfig(**settings)})


def fitted(layout: Layout, module: Small) -> tuple[str, list[str], Parts]:
    """What it ended by, what it warned of that concerns the optimizer, and the weights."""
    trainer = make_trainer(layout, max_epochs=1, limit_val_batches=0)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, Data())
        except ConfigurationError as error:
            return str(error), [], {}
    shown = [str(warning.message) for warning in warned if "torch's own" in str(warning.message)]
    return "trained", shown, weights(module)


def runs() -> dict[str, Any]:
    return {
        "unknown": fitted(with_kind(TP2, "auto"), Stepped(BySign)),
        "declared by matrix": fitted(with_kind(TP2, "parameter"), Stepped(ByMatrix)),
        "declared by number": fitted(with_kind(TP2, "elementwise"), Stepped(BySign)),
        "declared wrongly": fitted(with_kind(TP2, "elementwise"), Stepped(ByMatrix)),
    }


def run_plain() -> dict[str, Any]:
    return {kind.__name__: fitted(PLAIN, Stepped(kind))[2] for kind in (BySign, ByMatrix)}


def test_where_tensor_parallelism_cuts_matrices_an_unknown_optimizer_must_be_declared() -> None:
    [plain] = run_on_ranks(1, run_plain, init=False)
    for found in run_on_ranks(2, runs, init=False):
        shown = found["unknown"][0]
        assert "BySign is none of torch's own" in shown and 'OptimizerConfig(update_scope="elementwise")' in shown
        ending, warned, after = found["declared by matrix"]
        assert (ending, warned) == ("trained", []) and parts_apart(after, plain["ByMatrix"]) < 1e-10
        ending, warned, after = found["declared by number"]
        assert (ending, warned) == ("trained", []) and parts_apart(after, plain["BySign"]) < 1e-10
        # It bites: what is declared wrongly ends elsewhere.
        assert parts_apart(found["declared wrongly"][2], plain["ByMatrix"]) > 1e-4


def steps_some_weights() -> dict[str, Any]:
    return {
        "stages": fitted(with_kind(PP2, "auto"), SteppedChain()),
        "stages, declared": fitted(with_kind(PP2, "parameter"), SteppedChain()),
        "shards": fitted(with_kind(Layout(world=2), "auto", "distributed"), SteppedChain()),
        "shards, declared": fitted(with_kind(Layout(world=2), "parameter", "distributed"), SteppedChain()),
        "shards of numbers": fitted(with_kind(Layout(world=2), "elementwise", "distributed"), SteppedChain()),
        "replicas": fitted(with_kind(Layout(world=2), "auto"), SteppedChain()),
    }


def plain_chain() -> Parts:
    return fitted(PLAIN, SteppedChain())[2]


def test_an_unknown_optimizer_that_steps_some_weights_of_many_is_reported_once() -> None:
    [plain] = run_on_ranks(1, plain_chain, init=False)
    first, _ = run_on_ranks(2, steps_some_weights, init=False, timeout=120)
    for case in ("stages", "shards"):
        [shown] = first[case][1]
        assert "ByMatrix is none of torch's own" in shown and 'OptimizerConfig(update_scope="parameter")' in shown
    for case in ("stages, declared", "shards, declared", "replicas"):
        assert first[case][:2] == ("trained", []), case
    # Whole weights stay whole, and right.
    for case in ("shards", "shards, declared", "replicas"):
        assert parts_apart(first[case][2], plain) < 1e-10, case
    # It bites: parts of them are stepped otherwise.
    assert parts_apart(first["shards of numbers"][2], plain) > 1e-4


class OwnAdamW(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "declared", "scope"),
    [
        (torch.optim.AdamW, "auto", "elementwise"),
        (torch.optim.SparseAdam, "auto", "elementwise"),
        (torch.optim.AdamW, "parameter", "elementwise"),
        (torch.optim.Adafactor, "elementwise", "parameter"),
        (torch.optim.Muon, "auto", "parameter"),
        (torch.optim.LBFGS, "elementwise", "model"),
        (OwnAdamW, "auto", "unknown"),
        (OwnAdamW, "elementwise", "elementwise"),
        (BySign, "parameter", "parameter"),
    ],
)
def test_a_declaration_counts_for_what_torch_does_not_ship(make: Any, declared: DeclaredScope, scope: str) -> None:
    assert update_scope_of(make([nn.Parameter(torch.zeros(2, 2))]), declared) == scope
