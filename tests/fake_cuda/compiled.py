"""What a compiled layer asks of a GPU in forward and backward, by the plan that Inductor makes of its graphs.

Inductor plans which operations become one kernel and what each kernel reads and writes; here it stops before it
generates code, and graphs run on tensors without numbers. What autograd does between graphs counts, too.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo.backends import registry
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import scheduler
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.device_work import DeviceWork, Work
from lightning_megatron import KernelConfig
from lightning_megatron.any_module.plan import ModelPlan
from lightning_megatron.mesh import AttentionKernel
from lightning_megatron.tensor.weight_gradients import WeightGradients, share
from lightning_megatron.trainer.setup import compiled_layers
from tests.fake_cuda.cases import CASES, Case, batch_of, build
from tests.harness.fake_cuda import FakeCuda, again

BACKEND = "planned_by_inductor"
# Further rows of a case, and the kernel of their attention.
COMPILED: dict[str, tuple[str, AttentionKernel]] = {
    "Llama 3 8B": ("Llama 3 8B", "fused"),
    "GPT-2 124M": ("GPT-2 124M", "fused"),
    "GPT-2 124M, dropout 0.1": ("GPT-2 124M, dropout 0.1", "fused"),
    "GPT-2 124M, dropout 0.1, by FlexAttention": ("GPT-2 124M, dropout 0.1", "flex"),
    "BERT base": ("BERT base", "fused"),
    "Mixtral 8x7B": ("Mixtral 8x7B", "fused"),
    "Llama 3 8B, eight packed documents": ("Llama 3 8B, eight packed documents", "fused"),
    "T5 base, one row of 512 + 171 tokens": ("T5 base, one row of 512 + 171 tokens", "fused"),
}
# An H200's, as far as Inductor asks.
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=1 << 16,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    total_memory=141 << 30,
    L2_cache_size=50 << 20,
    gcnArchName="",
)
_ANSWERS: dict[str, Callable[..., Any]] = {
    "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8, device="cpu"),
    "set_rng_state": lambda *_: None,
    "_exchange_device": lambda _: 0,
    "_maybe_exchange_device": lambda _: 0,
    "get_device_properties": lambda *_: _PROPERTIES,
    # It has a name in builds with CUDA alone.
    "_get_device_properties": lambda *_: _PROPERTIES,
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
    """The cost of a layer of a case: what its graphs plan, and what a second layer asks beside them."""
    case_name, attention = COMPILED[name]
    case, kernels, work = CASES[case_name], list[int](), list[DeviceWork]()

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
            with _disable_current_modes(), mock.patch.object(GraphLowering, "codegen", plan):
                compile_fx_inner(graph, inputs, **options)
        except _Planned:
            return make_boxed_func(run_plain(plain))
        raise AssertionError("Inductor took a plan of before")

    def run_plain(graph: Any) -> Callable[..., Any]:
        return lambda *inputs: _Uncompiled(graph, cuda, work, runs_operators=attention != "flex").run(*inputs)

    def backend(graph: Any, inputs: Any) -> Any:
        return compile_fx(graph, inputs, inner_compile=compile_graph)

    torch._dynamo.reset()
    with FakeCuda() as cuda, _inductor_for_a_gpu(backend):
        one = _work_between_graphs(case, 1, attention, work)
        # Equal layers share their graphs.
        planned = list(kernels)
        two = _work_between_graphs(case, 2, attention, work)
        assert kernels == planned
    return CompiledCost(
        kernels=len(kernels) + two.num_kernels - one.num_kernels, bytes=sum(kernels) + two.num_bytes - one.num_bytes
    )


class _Uncompiled(fx.Interpreter):
    """Runs a graph on tensors without numbers; what this package's operators do in it, uncompiled, counts in `work`."""

    def __init__(self, graph: fx.GraphModule, cuda: FakeCuda, work: list[DeviceWork], *, runs_operators: bool) -> None:
        super().__init__(graph)
        # FlexAttention, which runs in one, cannot run here.
        self._cuda, self._work, self._runs_operators = cuda, work, runs_operators

    def run(self, *inputs: Any, **_: Any) -> Any:
        with _disable_current_modes(), again(self._cuda):
            return super().run(*inputs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not self._runs_operators or getattr(target, "namespace", "") != "lightning_megatron":
            return super().call_function(target, args, kwargs)
        with ExitStack() as stack:
            for counted in self._work:
                stack.enter_context(again(counted))
            return OPDEFS[target._schema.name]._init_fn(*args, **kwargs)


def _work_between_graphs(case: Case, layers: int, attention: AttentionKernel, work: list[DeviceWork]) -> Work:
    model, batch = build(case.config(layers), attention=attention), batch_of(case)
    config = KernelConfig(compile_layers=True, compile_backend=BACKEND)
    compiled_layers.compile_layers(config, nn.ModuleDict({"net": model}), ModelPlan(), {"net": model}, model.mesh)
    # Gradients go to buckets in float32.
    share(model, gradients := WeightGradients(lambda weight: torch.empty_like(weight, dtype=torch.float32)))
    with torch.autocast("cuda", torch.bfloat16):
        # What a model makes once it makes in its first call.
        model(**batch)
        work.append(counted := DeviceWork())
        with counted:
            loss = model(**batch)
    with gradients.opened(), counted:
        loss.backward()
    work.clear()
    return counted.work


@contextmanager
def _inductor_for_a_gpu(backend: Callable[..., Any]) -> Iterator[None]:
    """Lets Inductor plan for the fake device, which has neither Triton nor tensors to try things with."""
    # Patterns of attention are found by running them; those of a CPU are the same but for dtypes.
    joint_graph.lazy_init(torch.device("cpu"))
    prepared: Callable[..., Callable[..., Any]] = compiled_layers._prepared

    def prepare(layer: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        def outside_of_modes(*args: Any, **kwargs: Any) -> Any:
            # Dynamo compiles nothing under a mode.
            with _disable_current_modes():
                return call(*args, **kwargs)

        return prepared(layer, outside_of_modes)

    with ExitStack() as stack:
        for name, answer in _ANSWERS.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer, create=True))
        stack.enter_context(mock.patch.object(compiled_layers, "_prepared", prepare))
        stack.enter_context(mock.patch.object(joint_graph, "lazy_init"))
        stack.enter_context(mock.patch.object(scheduler, "has_triton", return_value=True))
        stack.enter_context(mock.patch.dict(registry._BACKENDS, {BACKEND: None}))
        stack.enter_context(mock.patch.dict(registry._COMPILER_FNS, {BACKEND: backend}))
        # Constants are folded by computing them on the device.
        options = {"force_disable_caches": True, "joint_graph_constant_folding": False}
        stack.enter_context(torch._inductor.config.patch(options))
        # Dynamo looks for a gradient of the hidden states, which are no leaf.
        stack.enter_context(warnings.catch_warnings(action="ignore", category=UserWarning))
        yield
