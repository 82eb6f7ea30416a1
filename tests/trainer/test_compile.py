"""Compiled layers, and a compiled model, train as uncompiled ones do: in a pipeline, and cut over ranks."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_megatron import KernelConfig
from lightning_megatron.any_module.plan import ModelPlan
from lightning_megatron.mesh import Mesh
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from lightning_megatron.trainer.setup.compiled_layers import compile_layers
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


EXPERTS = GPTConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    vocab_size=32,
    max_sequence_length=8,
    moe=MoEConfig(router=RouterConfig(num_experts=4, top_k=2), ffn_hidden_size=8, shared_expert_intermediate_size=8),
)


def gradients_of_experts(is_compiled: bool, is_frozen: bool) -> list[Tensor | None]:
    """Gradients of two backwards in bf16, where nothing but experts is trained if the rest is frozen."""
    model = GPTModel(EXPERTS, mesh=Mesh.single(), seed=0).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" in name or not is_frozen)
    if is_compiled:
        kernels = KernelConfig(compile_layers=True, compile_backend="aot_eager")
        compile_layers(kernels, nn.ModuleDict({"net": model}), ModelPlan(), {"net": model}, model.mesh)
    tokens = torch.arange(16).view(2, 8)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = model(tokens, labels=tokens.roll(1, 1))
        loss.backward()  # type: ignore[no-untyped-call]
    return [parameter.grad for parameter in model.parameters()]


# The compiler looks for gradients of hidden states, which are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.slow
def test_compiled_layers_of_experts_have_the_gradients_of_uncompiled_ones_to_the_bit() -> None:
    for is_frozen in (False, True):
        wanted, found = (gradients_of_experts(is_compiled, is_frozen) for is_compiled in (False, True))
        assert not counters["graph_break"], counters["graph_break"]
        for grad, own in zip(found, wanted, strict=True):
            assert (grad is None) == (own is None)
            assert grad is None or own is None or (grad.equal(own) and own.abs().max() > 0)


# Every kind of layer of the package, each under one of the layouts.
STEPS = {
    "pp2": ("bert", "moe"),
    "tp2": ("llava", "qwen-mistral"),
    "tp2+sp": ("dropout", "t5"),
    "cp2": ("packed",),
    "ep2": ("moe",),
    "ZeRO-3 dp2 accumulate 2": ("dropout",),
    "ZeRO-3 dp2 recompute full": ("qwen-mistral",),
}


def compiled_under_layout(layout: CertifiedLayout, cells: list[tuple[str, str]]) -> list[Outcome]:
    outcomes = []
    for cell in cells:
        torch._dynamo.reset()
        counters.clear()
        outcomes += under_layout(layout, [cell])
        assert counters["frames"]["ok"] > 0, "nothing was compiled"
        assert not counters["graph_break"], counters["graph_break"]
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
