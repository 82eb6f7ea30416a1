"""Compiled layers, and a compiled model, train as uncompiled ones do: in a pipeline, and cut over ranks."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from lightning_megatron import KernelConfig
from tests.certificate.cases import LAYOUTS as CERTIFIED
from tests.certificate.cases import TOLERANCE
from tests.certificate.cases import Layout as CertifiedLayout
from tests.certificate.compare import deviations
from tests.certificate.runs import Outcome, under_layout
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


# Every kind of layer of the package, each under one of the layouts.
STEPS = {
    "pp2": ("bert", "moe"),
    "tp2": ("llava", "qwen-mistral"),
    "tp2+sp": ("dropout", "t5"),
    "cp2": ("packed",),
}


def compiled_under_layout(layout: CertifiedLayout, cells: list[tuple[str, str]]) -> list[Outcome]:
    outcomes = []
    for cell in cells:
        torch._dynamo.reset()
        counters.clear()
        outcomes += under_layout(layout, [cell])
        assert counters["frames"]["ok"] > 0, "nothing was compiled"
        assert "moe" in cell[0] or not counters["graph_break"], counters["graph_break"]
    return outcomes


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("layout", every_nth(STEPS, 4))
def test_compiled_layers_train_as_one_device_does_in_plain_torch(layout: str) -> None:
    kernels = KernelConfig(compile_layers=True, compile_backend="aot_eager")
    cells = [(name, "64-true") for name in every_nth(STEPS[layout], 2)]
    own = replace(CERTIFIED[layout], num_steps=1, kernels=kernels)
    ranks = run_on_ranks(own.world, compiled_under_layout, own, cells, init=False, timeout=240)
    for cell, of_cell in zip(cells, zip(*ranks, strict=True), strict=True):
        found = deviations(layout, cell, list(of_cell), 1)
        assert max(found.values()) < TOLERANCE["64-true"], (cell, found)
