"""Checks of the models in a user's module before the first step, and the setting of their recomputation."""

import re
from collections.abc import Sequence

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_megatron.any_module.cut_model import CutModel
from lightning_megatron.any_module.pipelined_modules import names_inside, pipelined_modules
from lightning_megatron.any_module.tensor_styles import ColwiseLinear
from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.models.kernels import set_kernels
from lightning_megatron.models.language_model import LanguageModel
from lightning_megatron.moe.experts import Experts
from lightning_megatron.precision.kernels import KernelConfig
from lightning_megatron.sharding import sharded_parameters
from lightning_megatron.tensor.linear import ParallelLinear
from lightning_megatron.tensor.weight_gradients import has_gradient_hooks
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.transformer import recompute
from lightning_megatron.transformer.recompute import RecomputeConfig

# Of weights with hooks, in a warning.
_MOST_NAMES = 3


def require_own_mesh(module: nn.Module, mesh: Mesh) -> None:
    """Raises ConfigurationError for a pipelined model, or experts, built for other ranks than those of `mesh`."""
    if faults := mesh_faults(module, mesh):
        raise ConfigurationError(faults)


def mesh_faults(module: nn.Module, mesh: Mesh) -> list[str]:
    """Errors of pipelined models, experts and cut weights that were built for other ranks than those of `mesh`.

    They would train unsharded on every rank, with a gradient norm that counts each copy.
    """
    built_otherwise = {
        name: f"{name} ({type(model).__name__}) was built for tensor x pipeline x context x expert x expert tensor "
        f"parallel {built}, and the strategy has {own}; build it in configure_model, which runs once the ranks are "
        "known, and not in __init__"
        for name, model in pipelined_modules(module).items()
        if (built := _cuts(model.mesh)) != (own := _cuts(mesh))
    }
    faults, cut_otherwise = list(built_otherwise.values()), dict[Axis, list[str]]()
    for name, _, shard in sharded_parameters(module):
        for axis in (shard.leading, shard.axis):
            if axis is None or axis.size == (own_size := mesh.axis(axis.name).size):
                continue
            if shard.data is not None:
                faults.append(
                    f"{name} (experts) was built for {axis.size} ranks of {axis.name}, and the strategy has "
                    f"{own_size}; build it in configure_model, which runs once the ranks are known, and not in "
                    "__init__"
                )
            elif axis.size > 1 and not any(name.startswith(f"{one}.") for one in built_otherwise):
                cut_otherwise.setdefault(axis, []).append(name)
    faults += [
        f"{names[0]}{f' (and {len(names) - 1} more)' if len(names) > 1 else ''} is cut over {axis.size} ranks of "
        f"{axis.name}, and the strategy has {mesh.axis(axis.name).size}; make the network anew, or whole on all "
        "ranks by the strategy's restore_networks() after the run: one that a run has cut stays as it is"
        for axis, names in cut_otherwise.items()
    ]
    return faults


def _cuts(mesh: Mesh) -> str:
    sizes = (mesh.tp.size, mesh.pp.size, mesh.cp.size, mesh.sizes.ep, mesh.sizes.etp)
    return " x ".join(map(str, sizes)) + (" with sequence parallel" if mesh.sp.size > 1 else "")


def require_spreading(module: nn.Module) -> None:
    """Raises ConfigurationError where dynamic context parallelism would have nothing to spread, or not all."""
    if faults := spreading_faults(module):
        raise ConfigurationError(faults)


def spreading_faults(module: nn.Module) -> list[str]:
    """Errors of a module in which dynamic context parallelism has nothing to spread, or cannot spread all."""
    models = pipelined_modules(module)
    unspread = [f"{name} ({type(model).__name__})" for name, model in models.items() if not model.spreads_documents]
    if models and not unspread:
        return []
    what = f"{', '.join(unspread)} does not take documents one by one" if unspread else "it holds no model of parts"
    return [
        f"dynamic context parallelism packs and cuts the documents of {type(module).__name__}, and {what}; "
        "use GPTModel, or leave dynamic_context out"
    ]


def require_used_axes(module: nn.Module, mesh: Mesh) -> None:
    """Raises ConfigurationError, on every rank, for sizes above 1 that cut nothing of the module. Collective over pp.

    Their ranks would all compute the same, and each would hold the whole model.
    """
    # A stage may hold none of the layers in question.
    cut = set().union(*collectives.gather_objects(_cut_axes(module), mesh.pp))
    if faults := unused_axis_faults(module, mesh.sizes, cut):
        raise ConfigurationError(faults)


def require_equal_writes(module: nn.Module, mesh: Mesh) -> None:
    """Raises ConfigurationError, on every rank, for embeddings that write to rows that a rank's own samples look up.

    Collective over pp.
    """
    if mesh.axis("dp+cp").size == 1:
        return
    kinds = (nn.Embedding, nn.EmbeddingBag)
    own = [name for name, one in module.named_modules() if isinstance(one, kinds) and one.max_norm is not None]
    if found := sorted(set().union(*collectives.gather_objects(own, mesh.pp))):
        raise ConfigurationError(
            f"{', '.join(found)} (Embedding with max_norm) scales the rows of its weight that a forward looks "
            "up, which are others on each data-parallel rank; leave max_norm out, and scale what the embedding returns"
        )


def _cut_axes(module: nn.Module) -> set[str]:
    """Names of the axes over whose ranks this stage of a module is cut."""
    shards = [shard for _, _, shard in sharded_parameters(module)]
    cut = {axis.name for shard in shards for axis in (shard.axis, shard.leading) if axis is not None and axis.size > 1}
    if any(model.cuts_sequences for model in pipelined_modules(module).values()):
        cut.add("cp")
    if any(isinstance(child, Experts) for child in module.modules()):
        cut.add("ep")
    is_plain = any(isinstance(child, ColwiseLinear) for child in module.modules())
    if not is_plain or any(isinstance(model, CutModel) for model in pipelined_modules(module).values()):
        cut.add("sp")
    return cut


def unused_axis_faults(module: nn.Module, sizes: Sizes, cut: set[str]) -> list[str]:
    """Errors of sizes above 1 whose axes are not among those that `cut` the module."""
    name, faults = type(module).__name__, []
    if sizes.tp > 1 and "tp" not in cut:
        faults.append(
            f"tensor_model_parallel_size ({sizes.tp}) cuts nothing of {name}, which holds no tensor-parallel layer: "
            "every rank of tp would hold all weights and compute the same. Say which linears are cut"
            f"{_example(module)}, build its layers in configure_model from GPTModel, or from ColumnParallelLinear and "
            "RowParallelLinear, or use tensor_model_parallel_size=1"
        )
    if sizes.sequence_parallel and sizes.tp > 1 and "sp" not in cut:
        faults.append(
            f"sequence_parallel cuts no tokens of {name}, which has not exactly one network with a list of layers; "
            'leave it out, or name the list with plan=ModelPlan(layers=("net.layers",))'
        )
    if sizes.cp > 1 and "cp" not in cut:
        faults.append(
            f"context_parallel_size ({sizes.cp}) cuts nothing of {name}, which holds no model of cut sequences: every "
            "rank of cp would compute the whole batch. Use GPTModel, a model of transformers whose layers look up "
            "their attention by name, or context_parallel_size=1 and with it a larger data-parallel size"
        )
    if sizes.ep * sizes.etp > 1 and "ep" not in cut:
        faults.append(
            f"expert_model_parallel_size ({sizes.ep}) and expert_tensor_parallel_size ({sizes.etp}) cut nothing of "
            f"{name}, which holds no experts. Use GPTConfig(moe=MoEConfig(...)), a model of transformers with experts, "
            "or leave them out"
        )
    return faults


def _example(module: nn.Module) -> str:
    """A plan for a module's own linears, as the text of an argument; empty where there are not two."""
    linears = [name for name, child in module.named_modules() if type(child) is nn.Linear]
    patterns = list(dict.fromkeys(re.sub(r"\.\d+\b", ".*", name) for name in linears))
    first, last = [*patterns, "", ""][:2]
    return f', as plan=ModelPlan(styles={{"{first}": "colwise", "{last}": "rowwise"}})' if last else ""


def require_untied_outside(module: nn.Module, mesh: Mesh) -> None:
    """Raises ConfigurationError, on every rank, for weights that a pipelined model shares with a module outside of it.

    Only the stage that holds the weight would have both uses of it. Collective over pp.
    """
    if mesh.pp.size == 1:
        return
    prefixes = tuple(f"{name}." for name in pipelined_modules(module))
    own_names = names_inside(module)
    named = module.named_parameters(remove_duplicate=False)
    weights = {weight: name for name, weight in named if name in own_names}
    own = {
        f"{name}.{key} ({weights[weight]})"
        for name, child in module.named_modules()
        if not f"{name}.".startswith(prefixes)
        for key, weight in child.named_parameters(recurse=False)
        if weight in weights
    }
    if tied := set().union(*collectives.gather_objects(own, mesh.pp)):
        raise ConfigurationError(
            f"{', '.join(sorted(tied))} of {type(module).__name__} is a weight of its pipelined model, and of a module "
            "outside of that, which every stage holds; put the module into the chain and tie it with Part.shares of a "
            "PipelineModule, or use pipeline_model_parallel_size=1"
        )


def warn_of_batch_statistics(module: nn.Module, mesh: Mesh, *, is_synced: bool) -> None:
    """Warns, once, of layers of any stage that normalise over the rows they see, where a global batch is run in several
    parts. Collective over pp."""
    own = [
        name
        for name, child in module.named_modules()
        # One in evaluation has the statistics that it kept.
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and (child.training or child.running_mean is None)
    ]
    # The rank that warns holds the last stage alone.
    names = list(dict.fromkeys(name for names in collectives.gather_objects(own, mesh.pp) for name in names))
    if names:
        parts = "microbatch" if is_synced else "microbatch of each data-parallel rank"
        rank_zero_warn(
            f"batch norms ({', '.join(names)}) normalise each {parts} by itself: one device would take the statistics "
            "of all rows. Use num_microbatches=1 with sync_batchnorm=True, or a norm that takes each row by itself "
            "(LayerNorm, GroupNorm, RMSNorm)",
            category=UserWarning,
        )


def warn_of_gradient_hooks(module: nn.Module, mesh: Mesh) -> None:
    """Warns, once, of hooks on the gradients of trained weights, and around the backwards of modules, of any stage,
    where a global batch is run in several parts. Collective over pp."""
    own = [name for name, weight in module.named_parameters() if weight.requires_grad and has_gradient_hooks(weight)]
    own += [name for name, child in module.named_modules() if child._backward_hooks or child._backward_pre_hooks]
    names = list(dict.fromkeys(name for names in collectives.gather_objects(own, mesh.pp) for name in names))
    if names:
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        rank_zero_warn(
            f"hooks on the gradients of {', '.join(names[:_MOST_NAMES])}{more} run once for each microbatch of each "
            "data-parallel rank, on its part of the gradient, which under a schedule is that of a sum: one device "
            "would give them all of it. Read and change gradients in on_before_optimizer_step",
            category=UserWarning,
        )


def warn_of_late_readers(names: Sequence[str]) -> None:
    """Warns, once, of a user's code, by its names, that reads gradients of weights when a schedule has run again."""
    if names:
        rank_zero_warn(
            f"{', '.join(names)} reads .grad where it is None: with master weights the next schedule has taken the "
            "memory of the gradients. Read it in on_before_optimizer_step or on_train_batch_end",
            category=UserWarning,
        )


def warn_of_accumulated_parts(names: Sequence[str]) -> None:
    """Warns, once, of a user's code, by its names, that runs after each of the backwards whose gradients are summed
    over data-parallel ranks only with the last one."""
    if names:
        rank_zero_warn(
            f"{', '.join(names)} runs after the backward of each accumulated batch, and data-parallel ranks sum their "
            "gradients after the last one: until then it sees this rank's part. Read and change gradients in "
            "on_before_optimizer_step",
            category=UserWarning,
        )


def tell_whole_backwards(names: Sequence[str], schedule: str) -> None:
    """Tells which modules keep their backward whole under a schedule that splits it."""
    if names:
        shown = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
        rank_zero_info(
            f"schedule {schedule!r} puts off the weight gradients of nn.Linear and of this package's layers; "
            f"{len(names)} other modules compute theirs at once: {shown}"
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
    asked = ("granularity ('full')",) * (config.granularity == "full") + ("offload (True)",) * config.offload
    if asked and not models:
        faults.append(
            f"recompute {' and '.join(asked)} needs a model of parts, and {type(module).__name__} has none; use a "
            "GPTModel, or make your network a PipelineModule, for instance by PipelineModule.from_modules"
        )
    by_layers = config.method == "uniform" and config.num_layers == 1
    if config.granularity == "full" and not by_layers and any(isinstance(model, CutModel) for model in models):
        faults.append(
            f"recompute method ({config.method!r}) with num_layers ({config.num_layers}) groups layers, and the "
            f"network of {type(module).__name__} runs by its own forward, layer by layer; use method='uniform' and "
            "num_layers=1"
        )
    if faults:
        raise ConfigurationError(faults)
    recompute.set_recomputed(module, config)
    for model in models:
        model.runner = recompute.RecomputeRunner(config, tp=mesh.tp, sp=mesh.sp)


def loss_chunk_faults(module: nn.Module, config: KernelConfig) -> list[str]:
    """Why a module computes no loss in chunks, where `config` asks for that: nothing, or one sentence."""
    if not config.loss_chunk_tokens or any(
        isinstance(model, LanguageModel) for model in pipelined_modules(module).values()
    ):
        return []
    return [
        f"kernels loss_chunk_tokens ({config.loss_chunk_tokens}) is for this package's language models, whose heads "
        f"compute the loss, and {type(module).__name__} has none; leave it out"
    ]


def share_kernels(module: nn.Module, config: KernelConfig, mesh: Mesh) -> None:
    """Sets how the models of a module compute what `config` names.

    Raises ConfigurationError, on all ranks of a model replica, where none can do so.
    """
    if faults := loss_chunk_faults(module, config):
        raise ConfigurationError(faults)
    # Colwise linears of a network read tokens that are gathered in front of the part of a layer that they are in.
    kinds = [type(one) for one in module.modules() if isinstance(one, ParallelLinear)]
    has_linears = any(kind is not ColwiseLinear for kind in kinds)
    # A stage may hold none.
    overlaps = config.num_tp_overlap_chunks > 1 or config.symmetric_memory
    if overlaps and not any(collectives.gather_objects(has_linears, mesh.pp)):
        option = (
            "symmetric_memory (True)"
            if config.symmetric_memory
            else f"num_tp_overlap_chunks ({config.num_tp_overlap_chunks})"
        )
        raise ConfigurationError(
            f"kernels {option} is for linears that are cut over tensor-parallel ranks, and {type(module).__name__} has "
            "none; leave it out"
        )
    set_kernels(module, config)
