"""The strategy's use of torch.compile: each layer of the models, or of networks that are not this package's."""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_megatron.any_module.cut_model import CutModel, cut_of, is_looked_at
from lightning_megatron.any_module.plan import ModelPlan
from lightning_megatron.any_module.tensor_styles import ColwiseLinear
from lightning_megatron.any_module.uncompiled_modules import experts_uncompiled
from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Mesh
from lightning_megatron.pipeline.module import PipelineModule
from lightning_megatron.precision.kernels import KernelConfig
from lightning_megatron.tensor.compiled_gradients import stood_in
from lightning_megatron.tensor.lora_adapter import LoRAAdapter
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.transformer.dropout import NamedDropout
from lightning_megatron.transformer.tokens import Tokens


def compiler_faults(config: KernelConfig, device: torch.device) -> list[str]:
    """Why the configured backend cannot compile for this device: nothing, or one sentence."""
    if not config.compile_layers:
        return []
    if config.compile_backend != "inductor":
        # With the compiler comes sympy: importing it takes seconds.
        backends = torch.compiler.list_backends(exclude_tags=())
        known = ", ".join(map(repr, backends))
        wrong = f"kernels compile_backend ({config.compile_backend!r}) must be one of {known}"
        return [] if config.compile_backend in backends else [wrong]
    if device.type == "cuda":
        missing = "pip install triton" if importlib.util.find_spec("triton") is None else ""
    else:
        missing = "install g++, or name another in the variable CXX" if not _has_cpp_compiler() else ""
    if not missing:
        return []
    needed = "Triton" if device.type == "cuda" else "a C++ compiler"
    return [
        f"kernels compile_layers (True) needs {needed} on {device.type}, and it is not installed: {missing}, or leave "
        "compile_layers out"
    ]


def _has_cpp_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def compile_layers(
    config: KernelConfig, module: nn.Module, plan: ModelPlan, pipelined: Mapping[str, PipelineModule], mesh: Mesh
) -> list[nn.Module]:
    """The layers that are compiled from here on, at their first call; layers that a user has compiled stay as they are.

    Collective over pp; raises ConfigurationError, on all ranks of a model replica, where no stage has layers.
    """
    layers = held_layers(module, plan, pipelined)
    if not any(collectives.gather_objects(bool(layers), mesh.pp)):
        raise ConfigurationError(
            f"kernels compile_layers (True) compiles layers, and {type(module).__name__} holds neither a model of "
            'layers nor a network with a list of them; name one with plan=ModelPlan(layers=("net.layers",)), or leave '
            "compile_layers out"
        )
    compiled = [layer for layer in layers if layer._compiled_call_impl is None]
    for layer in compiled:
        # Sizes as symbols would be those of all layers, as torch counts what differs between two kinds of layers too.
        layer.compile(backend=config.compile_backend, dynamic=False)
        assert layer._compiled_call_impl is not None
        layer._compiled_call_impl = _prepared(layer, layer._compiled_call_impl)
    return compiled


def _prepared(layer: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled call of a layer, before which random keys are drawn if it drops in training.

    Calls in which a layer is looked at run uncompiled, as such a look compares numbers on the host; so does the first
    call of a layer with colwise linears, which finds out whether their inputs change in place.
    Inside weights have stand-ins, and no mode sees the functions of torch: a compiler would trace the mode's
    code too. In evaluation one looks at losses (`any_module.loss_count.CountedMeans`).
    """
    drops = any(
        (isinstance(one, NamedDropout) and one.probability > 0) or (isinstance(one, LoRAAdapter) and one.dropout > 0)
        for one in layer.modules()
    )

    has_run = not any(isinstance(one, ColwiseLinear) for one in layer.modules())

    def prepared(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        if not has_run or is_looked_at(layer):
            has_run = True
            return layer._call_impl(*args, **kwargs)
        if drops and layer.training:
            for tokens in (*args, *kwargs.values()):
                if isinstance(tokens, Tokens):
                    tokens.draw()
        with stood_in(layer), experts_uncompiled(layer), torch._C.DisableTorchFunction():
            return call(*args, **kwargs)

    return prepared


def restore(layer: nn.Module) -> None:
    """Makes a layer that `compile_layers` compiled run uncompiled."""
    layer._compiled_call_impl = None


def held_layers(module: nn.Module, plan: ModelPlan, pipelined: Mapping[str, PipelineModule]) -> list[nn.Module]:
    """The layers of this rank: those of the models, or where there are none of the networks as they are."""
    found = {
        model.get_submodule(name): None
        for model in pipelined.values()
        for stage in model.mesh.own_stages
        for name in model.parts_of(stage)
        if name in model.layer_names
    }
    if found or any(not isinstance(model, CutModel) for model in pipelined.values()):
        return list(found)
    return [
        network.get_submodule(name)
        for prefix, network in module.named_children()
        if cut_of(network) is None
        for name in plan.layers_in(prefix, network)[0]
    ]
