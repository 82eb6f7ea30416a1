"""The pipelined models within a user's module: their parameters by stage, and making one of an `nn.Sequential`."""

from collections.abc import Callable, Iterable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn

from lightning_megatron.mesh import Mesh
from lightning_megatron.pipeline.module import PipelineModule
from lightning_megatron.trainer.config import ConfigurationError


def pipelined_modules(module: nn.Module) -> dict[str, PipelineModule]:
    """The pipelined models in a module, by attribute name."""
    return {name: child for name, child in module.named_modules() if isinstance(child, PipelineModule)}


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


def gather_parts_by(module: nn.Module, gather: Callable[[Iterable[nn.Parameter]], None]) -> None:
    """Makes the models call `gather` with the parameters of each part before the part runs."""
    for model in pipelined_modules(module).values():
        model.before_part = lambda part, model=model: gather(model.parameters_of(part))  # type: ignore[misc]


def pipeline_plain_sequential(module: pl.LightningModule, mesh: Mesh) -> bool:
    """Cuts the module's one `nn.Sequential` into stages, where there are several and it has no pipelined model yet.

    Returns whether it did.
    """
    if mesh.pp.size == 1 or pipelined_modules(module):
        return False
    chains = _chains(module, mesh.pp.size)
    if len(chains) == 1:
        [(name, chain)] = chains.items()
        # Not named_children(): it leaves out the second name of a module that is in the chain twice.
        parts = {key: child for key, child in chain._modules.items() if child is not None}
        setattr(module, name, PipelineModule.from_modules(parts, mesh=mesh))
    return len(chains) == 1


def _chains(module: pl.LightningModule, num_ranks: int) -> dict[str, nn.Sequential]:
    """Every `nn.Sequential` of the module that has a part for each rank of the pipeline."""
    return {
        name: child
        for name, child in module.named_children()
        if isinstance(child, nn.Sequential) and len(child) >= num_ranks
    }


def pipeline_faults(module: pl.LightningModule, num_ranks: int, *, uses_schedule: bool) -> list[str]:
    """Errors of a module that cannot run over so many pipeline ranks."""
    name, models = type(module).__name__, pipelined_modules(module)
    if num_ranks == 1:
        return []
    if not models and len(_chains(module, num_ranks)) != 1:
        return [
            f"{name} cannot be pipelined over {num_ranks} stages: it holds no PipelineModule (such as GPTModel) and "
            f"not exactly one nn.Sequential of at least {num_ranks} children among its attributes; build its model in "
            "configure_model from one of these, or use pipeline_model_parallel_size=1"
        ]
    if len(models) > 1 and uses_schedule:
        return [
            f"{name} holds {len(models)} pipelined models ({', '.join(models)}); a schedule runs one; use "
            'PipelineConfig(mode="collective")'
        ]
    return []


def pipeline_late_sequential(module: pl.LightningModule, mesh: Mesh) -> None:
    """Cuts an `nn.Sequential` that `configure_model` made into stages.

    Raises ConfigurationError where a callback has copied it uncut by then: the copy would average other weights.
    """
    callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
    averaging = [c for c in callbacks if isinstance(c, (WeightAveraging, StochasticWeightAveraging))]
    if pipeline_plain_sequential(module, mesh) and averaging:
        raise ConfigurationError(
            f"{type(averaging[0]).__name__} copies the module before its nn.Sequential, made in configure_model, "
            "is cut into stages; make the nn.Sequential in __init__, or a PipelineModule in configure_model"
        )
