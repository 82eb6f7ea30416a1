"""Compiled layers, and a compiled model, run inside the stages of a pipeline as they do on one device."""

import pytest
from torch import nn

from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.trainer.fits import Case, Trace, difference
from tests.trainer.layouts import PLAIN, Layout
from tests.trainer.modules import OwnPipeline, Small

LAYOUTS = {
    "pp2": Layout(world=2, pp=2, microbatches=2),
    "pp2 collective": Layout(world=2, pp=2, microbatches=2, collective=True),
}


class CompiledLayers(Small):
    def __init__(self) -> None:
        super().__init__()
        assert isinstance(self.net, nn.Sequential)
        for layer in self.net:
            layer.compile(backend="aot_eager")


class CompiledModel(OwnPipeline):
    def configure_model(self) -> None:
        super().configure_model()
        self.net.compile(backend="eager")


COMPILED = {"layers": CompiledLayers, "model": CompiledModel}
UNCOMPILED = {"layers": Small, "model": OwnPipeline}


def run_all(layout: Layout, modules: dict[str, type[Small]]) -> dict[str, Trace]:
    return {name: Case(module=made, trainer={"max_epochs": 1}).run(layout) for name, made in modules.items()}


# The compiler looks at everything that the driver of the model holds.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("layout", every_nth(LAYOUTS, 2))
def test_compiled_code_computes_the_same(layout: str) -> None:
    [wanted] = run_on_ranks(1, run_all, PLAIN, UNCOMPILED, init=False)
    for found in run_on_ranks(2, run_all, LAYOUTS[layout], COMPILED, init=False, timeout=120):
        for name, trace in found.items():
            assert difference(trace, wanted[name]) < 1e-11, name
