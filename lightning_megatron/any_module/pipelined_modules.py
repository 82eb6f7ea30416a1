"""The pipelined models within a module, and their parameters by stage."""

from collections.abc import Callable, Iterable, Mapping

from torch import nn

from lightning_megatron.any_module.cut_model import cut_of
from lightning_megatron.pipeline.module import PipelineModule


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


def parameters_in_parts(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that belong to parts of pipelined models."""
    return [
        parameter
        for model in pipelined_modules(module).values()
        for stage in model.mesh.own_stages
        for part in model.parts_of(stage)
        for parameter in model.parameters_of(part)
    ]


def plain_linears(pipelined: Mapping[str, PipelineModule]) -> list[nn.Linear]:
    """The linears of torch in the parts of this rank's stages."""
    parts = [
        model.get_submodule(name)
        for model in pipelined.values()
        for stage in model.mesh.own_stages
        for name in model.parts_of(stage)
    ]
    # Code may read the weights of a class derived from nn.Linear, and not call it.
    return [one for part in parts for one in part.modules() if type(one) is nn.Linear]


def gather_parts_by(module: nn.Module, gather: Callable[[Iterable[nn.Parameter]], None]) -> None:
    """Makes the models call `gather` with the parameters of each part before the part runs."""
    for model in pipelined_modules(module).values():
        model.before_part = lambda part, model=model: gather(model.parameters_of(part))  # type: ignore[misc]
