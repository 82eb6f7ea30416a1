"""The pipelined models within a module, and their parameters by stage."""

from collections.abc import Iterator, Mapping

from torch import nn

from lightning_megatron.any_module.cut_model import cut_of
from lightning_megatron.pipeline.module import PipelineModule
from lightning_megatron.tensor.weight_gradients import WeightGradientLayer


def pipelined_modules(module: nn.Module) -> dict[str, PipelineModule]:
    """The pipelined models in a module, by attribute name."""
    return {name: model for name, child in module.named_modules() if (model := cut_of(child)) is not None}


def names_inside(module: nn.Module) -> set[str]:
    """Names of the parameters that belong to pipelined models."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, model in pipelined_modules(module).items()
        for name, _ in model.named_parameters()
    }


def stages_by_name(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Stages of this rank that use each parameter of the pipelined models, by its name."""
    stages: dict[nn.Parameter, list[int]] = {}
    for model in pipelined_modules(module).values():
        for stage in model.mesh.own_stages:
            used = dict.fromkeys(p for part in model.parts_of(stage) for p in model.parameters_of(part))
            for parameter in used:
                stages.setdefault(parameter, []).append(stage)
    return {name: tuple(stages[p]) for name, p in module.named_parameters() if p in stages}


def plain_linears(pipelined: Mapping[str, PipelineModule]) -> list[nn.Linear]:
    """The linears of torch in the parts of this rank's stages."""
    # Code may read the weights of a class derived from nn.Linear, and not call it.
    return [one for _, one in _in_own_parts(pipelined) if type(one) is nn.Linear]


def whole_backwards(pipelined: Mapping[str, PipelineModule]) -> list[str]:
    """Modules with a matrix in the parts of this rank's stages whose weight gradients come with those of their inputs,
    whatever a schedule puts off: each with the name of its class."""
    return [
        f"{name} ({type(one).__name__})"
        for name, one in _in_own_parts(pipelined)
        if type(one) is not nn.Linear and not isinstance(one, (WeightGradientLayer, nn.Embedding))
        if any(weight.dim() > 1 and weight.requires_grad for weight in one.parameters(recurse=False))
    ]


def _in_own_parts(pipelined: Mapping[str, PipelineModule]) -> Iterator[tuple[str, nn.Module]]:
    for model in pipelined.values():
        for stage in model.mesh.own_stages:
            for part in model.parts_of(stage):
                yield from model.get_submodule(part).named_modules(prefix=part)
