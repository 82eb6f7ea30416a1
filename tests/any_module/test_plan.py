"""A plan that does not fit its module ends the run before it starts, with what would do."""

import subprocess
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron import ConfigurationError, MegatronStrategy, ModelPlan
from lightning_megatron.any_module.cut_experts import expert_faults, expert_modules
from lightning_megatron.mesh import Sizes
from tests.any_module import more_networks, networks
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import Layout, make_trainer


def faults_of(plan: ModelPlan) -> list[str]:
    module = networks.Trains()
    module.configure_model()
    return plan.faults(module)


@pytest.mark.parametrize(
    ("plan", "shown"),
    [
        ({"layers": ("net.layers",)}, "'net.layers') is no module of Trains; its lists are net.blocks"),
        (
            {"skip_connections": ("net.blocks.9",)},
            "skip_connections (net.blocks.9) must be layers that are cut; its layers are net.blocks.0 to net.blocks.3",
        ),
        ({"layers": ("net.head",)}, "is a Linear; it must be an nn.ModuleList or nn.Sequential"),
        ({"layers": ("net.blocks", "other.blocks")}, "must lie in one network"),
        ({"styles": {"net.blocks.*.upper": "colwise"}}, "is called 'net.blocks.*.upper'; its linears are net.blocks.0"),
        ({"experts": ("net.experts",)}, "plan experts: no module of Trains is called 'net.experts'"),
        ({"experts": ("net.norm",)}, "net.norm (LayerNorm) has no num_experts, the number of its experts"),
        ({"styles": {"net.norm": "colwise"}}, "net.norm (colwise) is a LayerNorm; colwise is a style of nn.Linear"),
    ],
)
def test_what_does_not_fit_is_told_with_what_would(plan: dict[str, Any], shown: str) -> None:
    assert any(shown in fault for fault in faults_of(ModelPlan(**plan)))


def test_what_is_wrong_with_experts_is_told() -> None:
    module = nn.Module()
    module.net = more_networks.StackedExperts()
    plan = ModelPlan(experts=("net",))
    assert plan.faults(module) == []
    module.net.scale = nn.Parameter(torch.ones(7))
    assert plan.faults(module)[0].endswith("has weights without a row for each of its 4 experts: scale")
    del module.net.scale
    module.net.register_buffer("scale", torch.ones(4))
    assert "has buffers with a row for each of its experts: scale; buffers are whole" in plan.faults(module)[0]
    del module.net.scale
    module.net.register_buffer("limit", torch.ones(()))
    assert plan.faults(module) == []
    module.net.forward = lambda x: x  # type: ignore[method-assign]
    assert "must be called with tokens [T, H]" in plan.faults(module)[0]


def test_experts_that_a_plan_names_are_marked_by_the_package_alone() -> None:
    named, theirs, other = (more_networks.StackedExperts() for _ in range(3))
    module = nn.ModuleDict({"named": named, "theirs": theirs, "other": other})
    theirs._is_expert_parallel = False  # type: ignore[assignment]
    ModelPlan(experts=("named",)).mark_experts(module)
    assert [name for name, _ in expert_modules(module)] == ["named", "theirs"]
    assert "_is_expert_parallel" not in vars(named)
    # Such modules of others cannot be shared either where a buffer has a row for each expert.
    theirs.register_buffer("scale", torch.ones(4))
    assert expert_faults(module, Sizes(world=2, tp=1)) == []
    for sizes in (Sizes(world=2, tp=2), Sizes(world=2, ep=2)):
        assert any("theirs (StackedExperts) has buffers" in fault for fault in expert_faults(module, sizes))


def test_a_plan_that_fits_has_no_faults() -> None:
    styles = networks.TrainsOverTensor().model_plan().styles
    assert faults_of(ModelPlan(layers=("net.blocks",), styles=styles)) == []


def test_layers_of_several_lists_follow_each_other() -> None:
    net = networks.Translator()
    plan = ModelPlan(layers=("net.encoder.layers", "net.decoder.layers"))
    layers, ends = plan.layers_in("net", net)
    assert layers == (*(f"encoder.layers.{i}" for i in range(2)), *(f"decoder.layers.{i}" for i in range(4)))
    assert ends == (1,)
    # Without a plan the list with most parameters.
    assert ModelPlan().layers_in("net", net)[0] == layers[2:]
    assert ModelPlan().layers_in("net", nn.Linear(1, 1)) == ((), ())


def test_an_unknown_style_is_told_where_the_plan_is_made() -> None:
    with pytest.raises(ValueError, match=r"'by rows'.*must be among colwise"):
        ModelPlan(styles={"net.up": "by rows"})


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a process that is started an error."""

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", started)


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("module", "layout", "plan", "shown"),
    [
        (networks.Built, Layout(world=2, tp=2), None, r'styles=\{"net.blocks.\*.attention.query": "colwise"'),
        (
            networks.BuiltOverTensor,
            Layout(world=2, cp=2),
            None,
            r"context_parallel_size \(2\) cuts nothing of Built",
        ),
        # The strategy's plan comes before the module's.
        (
            networks.BuiltOverTensor,
            Layout(world=2, tp=2),
            ModelPlan(styles={"net.no": "colwise"}),
            r"is called 'net\.no'",
        ),
        (networks.Built, Layout(world=2, pp=2), ModelPlan(layers=("net.norm",)), "is a LayerNorm; it must be"),
        (networks.Built, Layout(world=2, pp=2), ModelPlan(layers=("net.no",)), r"'net\.no'\) is no module of Built"),
    ],
)
def test_a_plan_that_does_not_fit_starts_no_process(
    module: Any, layout: Layout, plan: ModelPlan | None, shown: str
) -> None:
    strategy = layout.strategy()
    assert isinstance(strategy, MegatronStrategy)
    strategy.plan = plan
    with pytest.raises(ConfigurationError, match=shown):
        make_trainer(layout, strategy=strategy).fit(module(), networks.loader())


def told(plan: ModelPlan) -> str:
    layout = Layout(world=2, pp=2)
    strategy = layout.strategy()
    assert isinstance(strategy, MegatronStrategy)
    strategy.plan = plan
    try:
        make_trainer(layout, strategy=strategy).fit(networks.Trains(), networks.loader())
    except ConfigurationError as error:
        return str(error)
    return "nothing"


def test_a_plan_for_what_configure_model_makes_is_looked_at_then() -> None:
    for shown in run_on_ranks(2, told, ModelPlan(layers=("net.layers",)), init=False):
        assert "'net.layers') is no module of Trains; its lists are net.blocks" in shown
