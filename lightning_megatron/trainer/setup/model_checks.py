"""Checks of the models in a user's module before the first step, and the setting of their recomputation."""

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Mesh
from lightning_megatron.sharding import sharded_parameters
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.trainer.setup.expert_replicas import has_experts
from lightning_megatron.trainer.setup.pipelined_models import pipelined_modules
from lightning_megatron.transformer import recompute
from lightning_megatron.transformer.recompute import RecomputeConfig


def require_own_mesh(module: nn.Module, mesh: Mesh) -> None:
    """Raises ConfigurationError for a pipelined model, or experts, built for other ranks than those of `mesh`.

    They would train unsharded on every rank, with a gradient norm that counts each copy.
    """
    faults = [
        f"{name} ({type(model).__name__}) was built for tensor x pipeline x context x expert x expert tensor parallel "
        f"{built}, and the strategy "
        f"has {own}; build it in configure_model, which runs once the ranks are known, and not in __init__"
        for name, model in pipelined_modules(module).items()
        if (built := _cuts(model.mesh)) != (own := _cuts(mesh))
    ]
    faults += [
        f"{name} (experts) was built for {axis.size} ranks of {axis.name}, and the strategy has "
        f"{mesh.axis(axis.name).size}; build it in configure_model, which runs once the ranks are known, and not in "
        "__init__"
        for name, _, shard in sharded_parameters(module)
        if shard.data is not None
        for axis in (shard.leading, shard.axis)
        if axis is not None and axis.size != mesh.axis(axis.name).size
    ]
    if faults:
        raise ConfigurationError(faults)


def _cuts(mesh: Mesh) -> str:
    sizes = (mesh.tp.size, mesh.pp.size, mesh.cp.size, mesh.sizes.ep, mesh.sizes.etp)
    return " x ".join(map(str, sizes)) + (" with sequence parallel" if mesh.sp.size > 1 else "")


def require_spreading(module: nn.Module) -> None:
    """Raises ConfigurationError where dynamic context parallelism would have nothing to spread, or not all."""
    models = pipelined_modules(module)
    unspread = [f"{name} ({type(model).__name__})" for name, model in models.items() if not model.spreads_documents]
    if unspread or not models:
        what = f"{', '.join(unspread)} does not take documents one by one" if unspread else "it holds no model of parts"
        raise ConfigurationError(
            f"dynamic context parallelism packs and cuts the documents of {type(module).__name__}, and {what}; "
            "use GPTModel, or leave dynamic_context out"
        )


def warn_of_unused_axes(module: nn.Module, mesh: Mesh) -> None:
    """Warns where ranks are to share sequences and nothing of the module lets them."""
    models = pipelined_modules(module).values()
    if mesh.cp.size > 1 and not any(model.cuts_sequences for model in models):
        rank_zero_warn(
            f"context_parallel_size ({mesh.cp.size}) cuts nothing of {type(module).__name__}, which holds no model of "
            "cut sequences: every rank of cp computes the whole batch. Use GPTModel, or a larger data-parallel size",
            category=UserWarning,
        )
    sizes = mesh.sizes
    if sizes.ep * sizes.etp > 1 and not has_experts(module, mesh):
        rank_zero_warn(
            f"expert_model_parallel_size ({sizes.ep}) and expert_tensor_parallel_size ({sizes.etp}) cut nothing of "
            f"{type(module).__name__}, which holds no experts. Use GPTConfig(moe=MoEConfig(...)), or leave them out",
            category=UserWarning,
        )


def share_recomputation(module: nn.Module, config: RecomputeConfig, mesh: Mesh) -> None:
    """Sets what the layers and models of a module recompute in the backward.

    Raises ConfigurationError, on every rank, where nothing of the module can do what `config` asks for.
    """
    models = pipelined_modules(module).values()
    offered = recompute.recomputable_parts(module)
    if config.granularity == "selective":
        # A stage may hold none of the layers in question.
        offered = set().union(*collectives.gather_objects(offered, mesh.pp))
    faults = recompute.part_faults(config, offered)
    if config.granularity == "full" and not models:
        faults.append(
            f"recompute granularity ('full') needs a model of parts, and {type(module).__name__} has none; use a "
            "GPTModel, or make your network a PipelineModule, for instance by PipelineModule.from_modules"
        )
    if faults:
        raise ConfigurationError(faults)
    recompute.set_recomputed(module, config)
    for model in models:
        model.runner = recompute.RecomputeRunner(config, tp=mesh.tp, sp=mesh.sp)
