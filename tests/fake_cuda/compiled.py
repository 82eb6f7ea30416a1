"""What a compiled layer asks of a device in forward and backward, by the plan that Inductor makes of its graphs.

Inductor plans which operations become one kernel and what each kernel reads and writes; here it stops before it
generates code, and torch's own kernels compute on the host. Bytes grow linearly with rows, or with the tokens of a row
where attention is no kernel counted here; two short batches tell those of a long one.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo.backends import registry
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

from lightning_megatron import KernelConfig
from lightning_megatron.any_module.plan import ModelPlan
from lightning_megatron.comm import rng
from lightning_megatron.mesh import AttentionKernel, Mesh, Sizes
from lightning_megatron.models import BertModel, GPTModel
from lightning_megatron.trainer.setup.compiled_layers import compile_layers
from tests.fake_cuda.cases import CASES

BACKEND = "planned_by_inductor"


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Two short batches, [rows, tokens], and the long one of a case."""

    model: Callable[..., Any]
    case: str = ""
    """Name of the case; none: its own."""
    short: tuple[int, int]
    longer: tuple[int, int]
    full: tuple[int, int]
    kernel: AttentionKernel = "fused"


COMPILED = {
    "Llama 3 8B": Batches(model=GPTModel, short=(1, 64), longer=(1, 128), full=(1, 8192)),
    "GPT-2 124M": Batches(model=GPTModel, short=(1, 1024), longer=(2, 1024), full=(8, 1024)),
    # A single row makes other kernels.
    "GPT-2 124M, dropout 0.1": Batches(model=GPTModel, short=(2, 1024), longer=(3, 1024), full=(8, 1024)),
    "GPT-2 124M, dropout 0.1, by FlexAttention": Batches(
        model=GPTModel, case="GPT-2 124M, dropout 0.1", short=(2, 64), longer=(3, 64), full=(8, 1024), kernel="flex"
    ),
    "BERT base": Batches(model=BertModel, short=(1, 512), longer=(2, 512), full=(16, 512)),
}


@dataclass(frozen=True, kw_only=True)
class CompiledCost:
    """What a compiled layer asks of the device in forward and backward, in bf16 under autocast."""

    kernels: int
    """Kernels, other than products and attention."""
    bytes: int
    """Bytes that these read and write."""


class _Planned(BaseException):
    """Leaves Inductor once it has planned its kernels."""


def compiled_cost(name: str) -> CompiledCost:
    """The cost of a layer of a case, of the long batch."""
    batches = COMPILED[name]
    config = CASES[batches.case or name].config(1)
    short, longer = (_planned(batches, config, rows, tokens) for rows, tokens in (batches.short, batches.longer))
    assert short.kernels == longer.kernels
    steps = (_size(batches.full) - _size(batches.short)) / (_size(batches.longer) - _size(batches.short))
    return replace(longer, bytes=round(short.bytes + (longer.bytes - short.bytes) * steps))


def _size(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]


def _planned(batches: Batches, of: Any, rows: int, tokens: int) -> CompiledCost:
    kernels: list[int] = []

    def plan(graph: GraphLowering) -> None:
        graph._update_scheduler()
        unfused = (ExternKernelSchedulerNode, NopKernelSchedulerNode)
        own = [node for node in graph.scheduler.nodes if not isinstance(node, unfused)]
        kernels.extend(node.get_read_write_buffers_sizes() for node in own)
        raise _Planned

    def compile_graph(graph: Any, inputs: Any, **options: Any) -> Any:
        # Inductor changes the graph that it plans.
        plain = copy.deepcopy(graph)
        try:
            with mock.patch.object(GraphLowering, "codegen", plan):
                compile_fx_inner(graph, inputs, **options)
        except _Planned:
            return make_boxed_func(plain.forward)
        raise AssertionError("Inductor took a plan of before")

    def backend(graph: Any, inputs: Any) -> Any:
        return compile_fx(graph, inputs, inner_compile=compile_graph)

    torch._dynamo.reset()
    with mock.patch.object(rng, "fill_normal_"):
        mesh = Mesh.imagine(0, Sizes(world=1, attention_kernel=batches.kernel))
        model = batches.model(of, mesh=mesh, seed=0).train()
    config, batch = KernelConfig(compile_layers=True, compile_backend=BACKEND), torch.ones(rows, tokens).long()
    with (
        mock.patch.dict(registry._BACKENDS, {BACKEND: None}),
        mock.patch.dict(registry._COMPILER_FNS, {BACKEND: backend}),
        torch._inductor.config.patch(force_disable_caches=True),
        # Dynamo looks for a gradient of the hidden states, which are no leaf.
        warnings.catch_warnings(action="ignore", category=UserWarning),
    ):
        compile_layers(config, nn.ModuleDict({"net": model}), ModelPlan(), {"net": model}, model.mesh)
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = model(batch, labels=batch)
        loss.backward()  # type: ignore[no-untyped-call]
    return CompiledCost(kernels=len(kernels), bytes=sum(kernels))
