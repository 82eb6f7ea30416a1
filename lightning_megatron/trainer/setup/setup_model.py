"""What the strategy does to the user's module between `configure_model` and the first step, and takes back after."""

import os
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.moe.experts import Experts
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.update_scope import update_scope_of
from lightning_megatron.pipeline.module import PipelineModule
from lightning_megatron.sharding import Shard, shard_of, sharded_parameters
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.trainer.precision import needs_closure
from lightning_megatron.transformer import recompute
from lightning_megatron.transformer.moe import MoELayer
from lightning_megatron.transformer.recompute import RecomputeConfig

_SEPARABLE = (
    "use an optimizer that treats each number by itself, as SGD or AdamW do, or ranks that hold whole models and the "
    "replicated optimizer in 32-true"
)


def agree_on_seed(mesh: Mesh) -> None:
    """Gives all ranks the first rank's seed, of which initial values and dropout masks are functions, and puts their
    generators where the first rank's are: a loader then shuffles as it would on one device."""
    own = torch.initial_seed()
    first = collectives.broadcast_object(own, mesh.world)
    differ = any(collectives.gather_objects(own != first, mesh.world))
    if differ:
        rank_zero_warn(
            "ranks were seeded differently; all now use the seed of rank 0. Seed them alike: seed_everything"
        )
    if own != first:
        torch.manual_seed(first)
    if mesh.world.size > 1:
        states = (torch.get_rng_state(), np.random.get_state(), random.getstate())
        torch_state, numpy_state, python_state = collectives.broadcast_object(states, mesh.world)
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


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


def names_of_stepped(module: nn.Module, optimizers: Iterable[Optimizer], mesh: Mesh) -> list[set[str]]:
    """For each optimizer the names of the pipelined models of whose weights it has some, on any stage."""
    own = []
    for optimizer in optimizers:
        stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        models = pipelined_modules(module).items()
        own.append({name for name, model in models if not stepped.isdisjoint(model.parameters())})
    by_rank = collectives.gather_objects(own, mesh.pp)
    return [set().union(*names) for names in zip(*by_rank, strict=True)]


def stages_by_name(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """For the parameters of pipelined models, the stages of this rank that use them."""
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
    """Has `gather` called with the parameters of each part before the part runs."""
    for model in pipelined_modules(module).values():
        model.before_part = lambda part, model=model: gather(model.parameters_of(part))  # type: ignore[misc]


def pipeline_plain_sequential(module: pl.LightningModule, mesh: Mesh) -> bool:
    """Cuts the module's one `nn.Sequential` into stages, where there are several and it has no pipelined model yet.

    Returns whether it did.
    """
    if mesh.pp.size == 1 or pipelined_modules(module):
        return False
    chains = {
        name: child
        for name, child in module.named_children()
        if isinstance(child, nn.Sequential) and len(child) >= mesh.pp.size
    }
    if len(chains) == 1:
        [(name, chain)] = chains.items()
        # Not named_children(): it leaves out the second place of a module that stands in the chain twice.
        places = {place: child for place, child in chain._modules.items() if child is not None}
        setattr(module, name, PipelineModule.from_modules(places, mesh=mesh))
    return len(chains) == 1


def pipeline_late_sequential(module: pl.LightningModule, mesh: Mesh) -> None:
    """The same for an `nn.Sequential` that `configure_model` made.

    Raises ConfigurationError where a callback has copied it whole by then: the copy would average other weights.
    """
    callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
    averaging = [c for c in callbacks if isinstance(c, (WeightAveraging, StochasticWeightAveraging))]
    if pipeline_plain_sequential(module, mesh) and averaging:
        raise ConfigurationError(
            [
                f"{type(averaging[0]).__name__} copies the module before its nn.Sequential, made in configure_model, "
                "is cut into stages; make the nn.Sequential in __init__, or a PipelineModule in configure_model"
            ]
        )


def require_own_mesh(module: nn.Module, mesh: Mesh) -> None:
    """Raises ConfigurationError for a pipelined model, or experts, built for other ranks than those of `mesh`.

    They would train whole on every rank, with a gradient norm that counts each copy.
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


def share_recomputation(module: nn.Module, config: RecomputeConfig, mesh: Mesh) -> None:
    """Tells the layers and models of a module what to make again in the backward.

    Raises ConfigurationError, on every rank, where nothing of the module can do what is asked.
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


def warn_of_uncut(module: nn.Module, mesh: Mesh) -> None:
    """Warns where ranks are to share sequences and nothing of the module lets them."""
    models = pipelined_modules(module).values()
    if mesh.cp.size > 1 and not any(model.cuts_sequences for model in models):
        rank_zero_warn(
            f"context_parallel_size ({mesh.cp.size}) cuts nothing of {type(module).__name__}, which holds no model of "
            "cut sequences: every rank of cp computes the whole batch. Use GPTModel, or more replicas instead",
            category=UserWarning,
        )
    sizes = mesh.sizes
    if sizes.ep * sizes.etp > 1 and not _has_experts(module, mesh):
        rank_zero_warn(
            f"expert_model_parallel_size ({sizes.ep}) and expert_tensor_parallel_size ({sizes.etp}) cut nothing of "
            f"{type(module).__name__}, which holds no experts. Use GPTConfig(moe=MoEConfig(...)), or leave them out",
            category=UserWarning,
        )


def linked_replicas(module: nn.Module, mesh: Mesh) -> Axis:
    """The replicas that make each model call together, because they share experts: all of dp, or this one alone.

    Talks over pp.
    """
    sizes = mesh.sizes
    is_linked = _has_experts(module, mesh) and sizes.cp * sizes.tp % (sizes.ep * sizes.etp) != 0
    return mesh.dp if is_linked else Axis.alone(mesh.global_rank)


def takes_sizes_for_known(module: nn.Module) -> bool:
    """Whether experts of this stage need as many tokens on each rank that shares them."""
    configs = [layer.config for layer in module.modules() if isinstance(layer, MoELayer)]
    return any(c.dispatcher == "all_gather" or (c.capacity is not None and c.capacity.pad_to_capacity) for c in configs)


def _has_experts(module: nn.Module, mesh: Mesh) -> bool:
    """Whether any stage has layers of experts; asks nobody where none are shared."""
    if mesh.sizes.ep * mesh.sizes.etp == 1:
        return False
    return any(collectives.gather_objects(any(isinstance(m, Experts) for m in module.modules()), mesh.pp))


def require_spreading(module: nn.Module) -> None:
    """Raises ConfigurationError where dynamic context parallelism would have nothing to spread, or not all."""
    models = pipelined_modules(module)
    whole = [f"{name} ({type(model).__name__})" for name, model in models.items() if not model.spreads_documents]
    if whole or not models:
        what = f"{', '.join(whole)} does not take documents one by one" if whole else "it holds no model of parts"
        raise ConfigurationError(
            [
                f"dynamic context parallelism packs and cuts the documents of {type(module).__name__}, and {what}; "
                "use GPTModel, or leave dynamic_context out"
            ]
        )


def _cuts(mesh: Mesh) -> str:
    sizes = (mesh.tp.size, mesh.pp.size, mesh.cp.size, mesh.sizes.ep, mesh.sizes.etp)
    return " x ".join(map(str, sizes)) + (" with sequence parallel" if mesh.sp.size > 1 else "")


def require_separable(
    optimizers: Iterable[Optimizer], config: OptimizerConfig, mesh: Mesh, *, has_master_weights: bool
) -> None:
    """Raises ConfigurationError for an optimizer whose step of one weight asks for more than this rank holds, or that
    runs forward and backward by itself, when its weights are beside those that those use."""
    faults, unknown = [], []
    for optimizer in optimizers:
        name, reach = type(optimizer).__name__, update_scope_of(optimizer, config.update_scope)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # Dp+cp, and edp where there are experts.
        shards = [shard_of(parameter) for parameter in parameters]
        replicas = {"dp+cp" if shard.data is None else shard.data.name for shard in shards}
        is_shared_out = config.kind == "distributed" and any(mesh.axis(axis).size > 1 for axis in replicas)
        is_parted = mesh.pp.size > 1 or is_shared_out
        is_cut, cutting = any(shard.is_cut for shard in shards), _cutting(shards)
        if reach == "model" and (is_cut or mesh.pp.size > 1):
            faults.append(f"{name} looks at all parameters at once, and a rank holds only some of them; {_SEPARABLE}")
        elif needs_closure(optimizer) and has_master_weights:
            faults.append(
                f"{name} runs forwards within its step, and master weights reach the model after it; {_SEPARABLE}"
            )
        if reach == "parameter" and is_cut:
            faults.append(f"{name} looks at whole matrices, and {cutting} parallelism cuts them; {_SEPARABLE}")
        elif reach == "parameter" and any(map(_is_padded, parameters, shards)):
            faults.append(
                f"{name} looks at whole matrices, and the rows that vocab_multiple adds would count in them; set "
                f"vocab_multiple=1, or {_SEPARABLE}"
            )
        elif reach == "unknown" and is_cut:
            faults.append(
                f"{name} is none of torch's own, and {cutting} parallelism cuts matrices, which is right only for "
                'elementwise steps; if its steps are, say OptimizerConfig(update_scope="elementwise"), '
                f"else {_SEPARABLE}"
            )
        elif reach == "unknown" and is_parted:
            unknown.append(name)
    # On every rank, also on one that holds only whole matrices: the others would wait for it.
    everywhere = {fault for found in collectives.gather_objects(faults, mesh.axis("pp+tp")) for fault in found}
    if everywhere:
        raise ConfigurationError(sorted(everywhere))
    for name in unknown:
        rank_zero_warn(
            f"{name} is none of torch's own: its step of a weight is taken to look at no other weight, because a rank "
            "steps only some of them; one that looks at several (a rate found from all of them, a norm over them) "
            'gives other numbers than on one device. OptimizerConfig(update_scope="parameter") says that it does not'
        )


def _is_padded(parameter: Tensor, shard: Shard) -> bool:
    return not shard.is_cut and tuple(parameter.shape) != shard.global_shape


def _cutting(shards: Iterable[Shard]) -> str:
    """What cuts the weights, in words."""
    kinds = {"tensor" if shard.data is None else "expert" for shard in shards if shard.is_cut}
    return " and ".join(sorted(kinds, reverse=True))


def require_fitting(callbacks: Iterable[pl.Callback], config: OptimizerConfig, has_master_weights: bool) -> None:
    """Raises ConfigurationError for callbacks that look for what is not there under master weights."""
    faults = []
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, BaseFinetuning) and has_master_weights:
            faults.append(
                f"{name} looks for the model's parameters in the optimizer, which has master weights; use precision "
                '32-true or bf16-true with OptimizerConfig(kind="replicated")'
            )
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)) and config.overlap_param_gather:
            faults.append(
                f"{name} reads weights between a step and the next forward, while they are on their way; use "
                "OptimizerConfig(overlap_param_gather=False)"
            )
    if faults:
        raise ConfigurationError(faults)


@torch.no_grad()
def equalise(module: nn.Module, mesh: Mesh) -> None:
    """Gives replicated parameters and buffers the first holder's values, as DistributedDataParallel does.

    Sharded parameters need none of this: they are equal by construction.
    """
    if mesh.world.size == 1:
        return
    inside = names_inside(module)
    model_prefixes = tuple(f"{name}." for name in pipelined_modules(module))
    tensors: list[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        if isinstance(getattr(tensor, "shard", None), Shard) or is_lazy(tensor):
            continue
        is_inside = name in inside or (bool(model_prefixes) and name.startswith(model_prefixes))
        axes = [mesh.axis("dp+cp"), mesh.tp] if is_inside else [mesh.world]
        whole = tensor.data.contiguous()
        for axis in axes:
            collectives.broadcast_(whole, axis)
        tensor.data.copy_(whole)


def restrict_batch_norms(module: nn.Module, replicas: Axis) -> None:
    """Lets synchronised batch norms talk over the replicas only: stages run different numbers of them."""
    for norm in (child for child in module.modules() if isinstance(child, nn.SyncBatchNorm)):
        norm.process_group = replicas.group


def restrict_metrics(module: nn.Module, replicas: Axis) -> list[Metric]:
    """Lets torchmetrics sync over the replicas only: the other ranks of a replica count the same samples.

    Returns the metrics that it changed; those whose user chose a group or a function stay as they are.
    """
    changed = []
    for metric in (child for child in module.modules() if isinstance(child, Metric)):
        if metric.process_group is None and metric.dist_sync_fn is None:
            metric.dist_sync_fn = partial(_gather_over, replicas)
            if replicas.size == 1 and metric.distributed_available_fn is jit_distributed_available:
                # Even a sync of one turns list states into tensors, which `compute` does not see on one device.
                metric.distributed_available_fn = _is_never_distributed
            changed.append(metric)
    return changed


def release_metrics(metrics: list[Metric]) -> None:
    """Takes `restrict_metrics` back, so that the next Trainer finds the metrics as the user made them."""
    for metric in metrics:
        metric.dist_sync_fn = None
        if metric.distributed_available_fn is _is_never_distributed:
            metric.distributed_available_fn = jit_distributed_available


def _is_never_distributed() -> bool:
    return False


def _gather_over(replicas: Axis, result: Tensor, group: Any = None) -> list[Tensor]:
    return [result] if replicas.size == 1 else gather_all_tensors(result, replicas.group)


def seed_workers_by_replica(dataloader: object, dp: Axis) -> object:
    """Seeds loader workers by replica under `seed_everything(workers=True)`; Lightning would seed them by rank."""
    is_seeded = bool(int(os.environ.get("PL_SEED_WORKERS", "0")))
    if is_seeded and isinstance(dataloader, DataLoader) and dataloader.worker_init_fn is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=dp.rank)
    return dataloader
