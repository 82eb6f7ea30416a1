"""Gradient buckets and master weights of a fit, made when it begins and released after it."""

import inspect
from collections.abc import Iterable, Iterator, Sequence, Set
from types import CodeType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_megatron.any_module.model_parts import ModuleParts
from lightning_megatron.any_module.pipelined_modules import names_inside, pipelined_modules, stages_by_name
from lightning_megatron.any_module.plan import ModelPlan
from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Mesh, NewGroup
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.data_parallel_comm import DataParallelComm, HookTime
from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.hook_gradients import HookGradients
from lightning_megatron.optim.master_weights import MasterWeights
from lightning_megatron.optim.owned_weights import OwnedWeights
from lightning_megatron.optim.part_gathers import ModelParts, first_parts
from lightning_megatron.optim.update_scope import is_elementwise, update_scope_of
from lightning_megatron.sharding import ShardedParameter
from lightning_megatron.trainer.precision import MegatronPrecision
from lightning_megatron.trainer.setup import pipelined_models
from lightning_megatron.trainer.setup.optimizer_checks import AVERAGING

# Optimizers of which torch has fused kernels on the host.
_FUSED_ON_HOST = (Adam, AdamW, SGD)
# Optimizers whose fused kernel of a GPU differs from torch's others in the last bits alone, for weights of such dtypes.
_FUSED_ON_GPU = (Adam, AdamW)
_ROUNDED_ALIKE = (torch.float32, torch.float64)
# Packages whose hooks do the same on all ranks.
_OWN = {__name__.partition(".")[0]}
_LIBRARIES = _OWN | {"lightning", "pytorch_lightning"}
# Attributes with a gradient, and torch's functions that read it.
_READERS = {"grad", "clip_grad_norm_", "clip_grad_value_", "get_total_norm"}
# Attributes with weights, and methods that return them.
_WEIGHTS = {"weight", "bias", "parameters", "named_parameters", "get_parameter", "state_dict", "load_state_dict"}


def has_master_weights(config: OptimizerConfig, plugin: MegatronPrecision) -> bool:
    """Whether optimizers step something else than the parameters, or gradients of another dtype."""
    return config.needs_master_weights or plugin.low_dtype() is not None


def make_data_parallel_comm(
    module: pl.LightningModule,
    optimizers: Iterable[Optimizer],
    config: OptimizerConfig,
    plugin: MegatronPrecision,
    mesh: Mesh,
    new_group: NewGroup,
    device: torch.device,
    plan: ModelPlan,
) -> DataParallelComm:
    """Buckets for the gradients and, where configured, master weights in place of the optimizers' parameters.

    Collective over pp and the world, as `Gradients` is.
    """
    stepping = list(optimizers)
    parts = ModuleParts(module, pipelined_models.layers_of_networks(module, plan) if config.shards_parameters else {})
    gradients = Gradients(
        module.named_parameters(),
        names_inside(module),
        mesh,
        new_group,
        device,
        config=config,
        stages=stages_by_name(module),
        dtype=plugin.gradient_dtype(config),
        no_split=not all(is_elementwise(optimizer, config.update_scope) for optimizer in stepping),
        low=plugin.low_dtype(),
        part_of=first_parts(parts.parameters).get,
        kept=[parameter for one in stepping for group in one.param_groups for parameter in group["params"]],
        casts={} if plugin.fp8_layers is None else plugin.fp8_layers.weight_casts(module),
    )
    master_weights, hook_gradients, sharded = None, None, None
    if has_master_weights(config, plugin):
        early, late = gradient_hooks(module, stepping), late_gradient_readers(module, stepping)
        master_weights = MasterWeights(gradients, stepping, is_watched=names_groups(module, stepping))
        is_read = early or late
        hook_gradients = HookGradients(gradients) if is_read else None
        if master_weights.sharded:
            sharded = ModelParts.of(
                master_weights.sharded, parts.parameters, parts.stages, parts.lasts, layers=parts.layers
            )
    choose_kernels(stepping, device, steps_on_host=config.cpu_offload)
    names = _names_of_weights(module, [one for own in parts.parameters.values() for one in own])
    hooks_read = weight_readers(module, stepping, names) if sharded is not None and config.gather_for_hooks else ()
    reading_whole = (one for one in stepping if update_scope_of(one, config.update_scope) == "parameter")
    owned = OwnedWeights(reading_whole)
    dp_comm = DataParallelComm(gradients, master_weights, parts.parameters, hook_gradients, sharded, hooks_read, owned)
    if config.overlap_param_gather or sharded is not None:
        dp_comm.remove_hooks = parts.hook(dp_comm)
    return dp_comm


def choose_kernels(optimizers: Iterable[Optimizer], device: torch.device, *, steps_on_host: bool = False) -> None:
    """Lets optimizers step all parameters of a group at once on a GPU, and read each once wherever a fused kernel may,
    where their user has not said otherwise.

    Torch does the first by itself for parameters of its own type alone, and not for those that know their shard.
    """
    # By groups, because Lightning clips no gradients of an optimizer that was made with `fused`.
    for optimizer, group in ((one, group) for one in optimizers for group in one.param_groups):
        is_open = "foreach" in group and group["foreach"] is None and not group.get("fused")
        is_open = is_open and not group.get("differentiable")
        knows_shards = any(isinstance(parameter, ShardedParameter) for parameter in group["params"])
        has_fused = _has_fused(optimizer, group, device, steps_on_host=steps_on_host)
        if is_open and has_fused and group["fused"] is None:
            group["fused"] = True
        elif is_open and knows_shards and device.type == "cuda":
            group["foreach"] = True


def _has_fused(optimizer: Optimizer, group: dict[str, Any], device: torch.device, *, steps_on_host: bool) -> bool:
    """Whether torch has a kernel that steps a group of this optimizer as its others do, to the last bits."""
    if steps_on_host:
        # Torch's loop reads each number a dozen times.
        return type(optimizer) in _FUSED_ON_HOST
    # The kernel takes weights only that lie as their gradients do, in buckets.
    return (
        device.type == "cuda"
        and type(optimizer) in _FUSED_ON_GPU
        and all(one.dtype in _ROUNDED_ALIKE and _is_laid_out_plainly(one) for one in group["params"])
    )


def _is_laid_out_plainly(x: Tensor) -> bool:
    return x.stride() == torch.empty(x.shape, device="meta").stride()


def gradient_hooks(module: pl.LightningModule, optimizers: Iterable[Optimizer]) -> list[str]:
    """Names of a user's code that may read and change gradients between a backward and the step of an optimizer, which
    has no hooks of the strategy's yet."""
    hooks = ("on_after_backward", "on_before_optimizer_step")
    found = _users(module, (*hooks, "optimizer_step", "configure_gradient_clipping"), hooks)
    return found + [f"{type(one).__name__}.step_pre_hook" for one in optimizers if one._optimizer_step_pre_hooks]


def late_gradient_readers(module: pl.LightningModule, optimizers: Iterable[Optimizer]) -> list[str]:
    """Names of a user's code that runs after an optimizer's step and reads `.grad`, by the names in it and in the
    functions beside it that it calls."""
    hooks = ("on_before_zero_grad", "on_train_batch_end", "on_train_epoch_end")
    found = [
        f"{type(owner).__name__}.{name}"
        for owner in (module, *module.trainer.callbacks)  # type: ignore[attr-defined]
        for name in _users_of(owner, hooks)
        if _names_any(_READERS, getattr(owner, name), owner, _OWN)
    ]
    return found + [
        f"{type(one).__name__}.step_post_hook"
        for one in optimizers
        if any(_names_any(_READERS, hook, module, _OWN) for hook in one._optimizer_step_post_hooks.values())
    ]


def names_groups(module: pl.LightningModule, optimizers: Iterable[Optimizer]) -> bool:
    """Whether a user's code between optimizer steps names the groups of an optimizer, to whose weights it may write."""
    loops = [f"on_{loop}_{end}" for loop in ("train_batch", "train_epoch", "validation") for end in ("start", "end")]
    gradients = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "on_before_zero_grad")
    hooks = ("training_step", "backward", "optimizer_step", "lr_scheduler_step", *gradients, *loops)
    owners = (module, *module.trainer.callbacks)  # type: ignore[attr-defined]
    code = [(getattr(owner, name), owner) for owner in owners for name in _users_of(owner, hooks)]
    for one in optimizers:
        of_steps = (*one._optimizer_step_pre_hooks.values(), *one._optimizer_step_post_hooks.values())
        code += [(hook, module) for hook in of_steps]
    return any(_names_any({"param_groups"}, hook, owner, _LIBRARIES | {"torch"}) for hook, owner in code)


def weight_hooks(module: pl.LightningModule) -> list[str]:
    """Names of a user's code that may change weights between an optimizer's step and the next."""
    loops = [f"on_{loop}_{end}" for loop in ("train_batch", "train_epoch", "validation") for end in ("start", "end")]
    hooks = (*loops, "on_validation_epoch_end", "on_before_zero_grad", "on_after_backward")
    return _users(module, (*hooks, "optimizer_step"), (*hooks, "on_before_optimizer_step"))


def _names_of_weights(module: nn.Module, parameters: Iterable[nn.Parameter]) -> set[str]:
    """Names by which code finds these parameters: their attributes, and methods that return them."""
    names, wanted = set(_WEIGHTS), set(parameters)
    for child in module.modules():
        names |= {key for key, one in child._parameters.items() if one in wanted}
        lists = (key for key, one in child._modules.items() if isinstance(one, (nn.ParameterList, nn.ParameterDict)))
        names |= {key for key in lists if not wanted.isdisjoint(child.get_submodule(key).parameters())}
    return names


def weight_readers(module: pl.LightningModule, optimizers: Sequence[Optimizer], names: Set[str]) -> list[HookTime]:
    """When a user's code in hooks of the module, of callbacks or of optimizers may read weights, or steps name one of
    `names`; a warning tells what that costs."""
    early = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
    loops = ("train_batch", "train_epoch", "train", "fit", "validation", "validation_epoch", "validation_batch")
    between = [f"on_{loop}_{end}" for loop in loops for end in ("start", "end")]
    late = (*between, "on_sanity_check_start", "on_sanity_check_end", "on_save_checkpoint")
    # A batch's backward comes after these, or with a schedule before them.
    within = ("on_before_zero_grad", "on_before_backward")
    found: dict[HookTime, list[str]] = {"early": _users(module, early, early), "late": _users(module, late, late)}
    found["training"] = _users_of_all(module, within)
    # Much is done in these hooks that reads no weight.
    found["training"] += _naming_weights(module, ("training_step", "backward", "optimizer_zero_grad"), names)
    found["early"] += [name for name in found["training"] if not name.endswith(".training_step")]
    transfers = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    modes = [f"on_{loop}_model_{mode}" for loop in ("validation", "test") for mode in ("eval", "train", "zero_grad")]
    found["late"] += _naming_weights(module, (*transfers, "lr_scheduler_step", *modes), names)
    found["evaluation"] = _naming_weights(module, ("validation_step", "test_step", "predict_step"), names)
    callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
    # Lightning's, which read weights after a step and swap them around a validation.
    found["late"] += [type(one).__name__ for one in callbacks if isinstance(one, AVERAGING)]
    for one in optimizers:
        kind = type(one).__name__
        found["early"] += [f"{kind}.step_pre_hook"] * bool(one._optimizer_step_pre_hooks)
        found["late"] += [f"{kind}.step_post_hook"] * bool(one._optimizer_step_post_hooks)
    if hooks := dict.fromkeys(name for names in found.values() for name in names):
        rank_zero_warn(
            f"{', '.join(hooks)} may read weights: for these hooks all weights of a rank are gathered between steps, "
            "where it would hold its shards alone. If they read none, say OptimizerConfig(gather_for_hooks=False)",
            category=UserWarning,
        )
    return [when for when, names in found.items() if names]


def _users_of_all(module: pl.LightningModule, names: Sequence[str]) -> list[str]:
    """Which of these hooks a user has written, in the module and in callbacks."""
    owners = (module, *module.trainer.callbacks)  # type: ignore[attr-defined]
    return [f"{type(owner).__name__}.{name}" for owner in owners for name in _users_of(owner, names)]


def _naming_weights(module: pl.LightningModule, methods: Sequence[str], names: Set[str]) -> list[str]:
    """Which of these methods a user has written in the module, with code that names one of `names`."""
    skipped = _LIBRARIES | {"torch"}
    return [
        f"{type(module).__name__}.{name}"
        for name in _users_of(module, methods)
        if _names_any(names, getattr(module, name), module, skipped)
    ]


def _users(module: pl.LightningModule, of_module: Sequence[str], of_callbacks: Sequence[str]) -> list[str]:
    """Which of these hooks a user has written, in the module and in callbacks; manual optimization is one too."""
    found = [f"{type(module).__name__}.{name}" for name in _users_of(module, of_module)]
    if not module.automatic_optimization:
        found.append(f"{type(module).__name__}.training_step")
    callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
    return found + [
        f"{type(callback).__name__}.{name}" for callback in callbacks for name in _users_of(callback, of_callbacks)
    ]


def _users_of(owner: pl.LightningModule | pl.Callback, names: Iterable[str]) -> list[str]:
    """Which of these hooks are a user's code, and not this package's or Lightning's."""
    # A function in a LambdaCallback of Lightning's is a user's.
    return [
        name
        for name in names
        if is_overridden(name, owner)
        and str(getattr(getattr(owner, name), "__module__", "")).partition(".")[0] not in _LIBRARIES
    ]


def _names_any(wanted: Set[str], hook: Any, owner: object, skipped: Set[str]) -> bool:
    """Whether the code of a function names any of these, or what that calls of its owner's, of modules inside its owner
    or of its own file, but for code of the packages `skipped`."""
    todo, seen = [hook], set()
    inside = owner.modules() if isinstance(owner, nn.Module) else ()
    kinds = {type(owner), *(type(one) for one in inside if not type(one).__module__.startswith("torch."))}
    while todo:
        function = todo.pop()
        function = inspect.unwrap(getattr(function, "__func__", function))
        code = getattr(function, "__code__", None)
        is_skipped = str(getattr(function, "__module__", "")).partition(".")[0] in skipped
        if code is None or code in seen or is_skipped:
            continue
        seen.add(code)
        names = set(_names_in(code))
        if not names.isdisjoint(wanted):
            return True
        called = [function.__globals__.get(name) for name in names]
        called += [getattr(kind, name, None) for kind in kinds for name in names - {"forward"}]
        todo += filter(inspect.isfunction, called)
    return False


def _names_in(code: CodeType) -> Iterator[str]:
    """Names of a function's attributes and globals, those of functions within it too."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def names_of_stepped(module: nn.Module, optimizers: Iterable[Optimizer], mesh: Mesh) -> list[set[str]]:
    """Names, for each optimizer, of the pipelined models of whose weights it has some, on any stage."""
    own = []
    for optimizer in optimizers:
        stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        models = pipelined_modules(module).items()
        own.append({name for name, model in models if not stepped.isdisjoint(model.parameters())})
    by_rank = collectives.gather_objects(own, mesh.pp)
    return [set().union(*names) for names in zip(*by_rank, strict=True)]


def release(dp_comm: DataParallelComm, *, is_interrupted: bool) -> None:
    """Restores the module's dtypes and parameters, with the trained values.

    After a failure other data-parallel ranks may not take part: where that needs them, weights keep the dtype that they
    had in training.
    """
    if dp_comm.has_shards and is_interrupted:
        dp_comm.remove_hooks()
        dp_comm.gradients.release()
    else:
        dp_comm.release()
