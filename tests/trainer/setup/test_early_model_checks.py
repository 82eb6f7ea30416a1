"""What shows on a module that is built in `__init__` is refused before a process is started."""

import subprocess
from typing import Any

import lightning as L
import pytest
from torch import nn

from lightning_megatron import ConfigurationError
from lightning_megatron.context.balance import DynamicContextConfig
from lightning_megatron.mesh import Sizes
from lightning_megatron.trainer.setup.early_model_checks import early_model_faults
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data, chain
from tests.trainer.setup.test_model_checks import TooEarly

PP2 = Layout(world=2, pp=2, microbatches=2)


class Plain(L.LightningModule):
    """All of its network is built in `__init__`."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module = chain()


class NoChain(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8)


class TwoChains(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.second = chain()


class BuiltInTime(NoChain):
    def configure_model(self) -> None:
        self.net = chain()


class SetUpInTime(NoChain):
    def setup(self, stage: str) -> None:
        self.net = chain()


@pytest.mark.parametrize(
    ("module", "layout", "shown"),
    [
        (NoChain, PP2, "NoChain cannot be pipelined over 2 stages: it holds no PipelineModule"),
        (TwoChains, PP2, "TwoChains cannot be pipelined over 2 stages"),
        (Plain, Layout(world=2, tp=2), r"tensor_model_parallel_size \(2\) cuts nothing of Plain"),
        (TooEarly, Layout(world=2, tp=2), r"model \(GPTModel\) was built for .* 1 x 1 x 1 x 1 x 1, .* has 2 x 1 x 1"),
    ],
)
def test_a_module_that_cannot_run_on_the_layout_starts_no_process(
    module: type[L.LightningModule], layout: Layout, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises(ConfigurationError, match=shown):
        make_trainer(layout).fit(module(), Data())


def test_faults_of_the_module_and_of_the_settings_are_told_at_once() -> None:
    strategy = PP2.strategy()
    strategy.dynamic_context = DynamicContextConfig(max_tokens_per_rank=8)  # type: ignore[union-attr]
    strategy.timeout_seconds = 0  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError) as refused:
        make_trainer(PP2, strategy=strategy).fit(NoChain(), Data())
    for shown in ("timeout_seconds (0)", "NoChain cannot be pipelined", "the documents of NoChain"):
        assert any(shown in fault for fault in refused.value.faults)


def test_a_module_that_may_build_more_until_then_is_left_alone() -> None:
    sizes = Sizes(world=2, pp=2)
    settings: dict[str, Any] = {"uses_schedule": True, "spreads_documents": False}
    assert early_model_faults(NoChain(), sizes, **settings)
    for module in (BuiltInTime(), SetUpInTime(), Plain(), L.LightningModule()):
        assert not early_model_faults(module, sizes, **settings)
    # A layout that cannot be is told by other rules.
    assert not early_model_faults(NoChain(), Sizes(world=3, pp=2), **settings)
