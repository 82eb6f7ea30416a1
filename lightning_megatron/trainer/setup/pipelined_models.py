"""The networks of a user's module, cut for the ranks of a run."""

import sys
from collections.abc import Callable, Iterable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_megatron.any_module.around_layers import absent_modules, removable
from lightning_megatron.any_module.cut_experts import (
    cut_experts,
    expert_faults,
    expert_modules,
    share_experts,
    shared_experts,
)
from lightning_megatron.any_module.cut_model import CutModel
from lightning_megatron.any_module.dtensor_weights import dtensor_faults, take_dtensors
from lightning_megatron.any_module.pipelined_modules import pipelined_modules
from lightning_megatron.any_module.plan import ModelPlan
from lightning_megatron.any_module.tensor_styles import cut_by, cut_linears, has_hooks, put_everywhere
from lightning_megatron.any_module.uncut import Now, Uncut, is_whole, note_uncut, take_uncut
from lightning_megatron.checkpoint import Piece
from lightning_megatron.checkpoint.gather import gather_on_all_ranks
from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis, Mesh, Sizes
from lightning_megatron.moe.experts import ExpertAxes
from lightning_megatron.pipeline.module import PipelineModule
from lightning_megatron.sharding import sharded_parameters
from lightning_megatron.trainer.config import ConfigurationError


def plan_of(module: nn.Module, plan: ModelPlan | None) -> ModelPlan:
    """How the networks of a module are cut: as `plan` says, else as its own hook `model_plan` says, else as found.

    The modules of experts that it names are marked.
    """
    own = getattr(module, "model_plan", None)
    found: ModelPlan = plan if plan is not None else own() if callable(own) else ModelPlan()
    found.mark_experts(module)
    return found


# Importing it takes seconds, and whoever has a model of transformers has done so.
_TRANSFORMERS = "transformers.modeling_utils"
_LISTS = (nn.ModuleList, nn.ModuleDict)


def cut_plain_networks(module: pl.LightningModule, mesh: Mesh, given: ModelPlan | None = None) -> bool:
    """Cuts the networks of a module that know nothing of parallelism: linears over tp by the styles of their plan,
    experts over ep, and the layers of the one network that has enough, or the one `nn.Sequential`, over stages; the
    tokens of these layers over cp and sp.

    Nothing is cut twice, and no module that holds a pipelined model. Then the weights are made that models get once
    they are cut. Returns whether something was cut. Raises ValueError for such weights that were changed before.
    """
    if _TRANSFORMERS not in sys.modules:
        return _cut_networks(module, mesh, given, was_held=True)
    from lightning_megatron.hf.later_weights import are_read_in_parts, fill_left, require_unchanged
    from lightning_megatron.hf.save_unchanged import remember_ranks

    require_unchanged(module)
    remember_ranks(module, mesh)
    is_cut = _cut_networks(module, mesh, given, was_held=not are_read_in_parts(module))
    fill_left(module)
    return is_cut


def _cut_networks(module: pl.LightningModule, mesh: Mesh, given: ModelPlan | None, *, was_held: bool) -> bool:
    plan = plan_of(module, given)
    # What the plan names may be made later, in `configure_model`.
    if pipelined_modules(module) or plan.faults(module):
        return False
    uncut = Uncut(module, was_held=was_held)
    if is_cut := _cut_by_plan(module, mesh, plan):
        note_uncut(module, uncut)
    return is_cut


def _cut_by_plan(module: pl.LightningModule, mesh: Mesh, plan: ModelPlan) -> bool:
    networks, is_cut = dict(module.named_children()), False
    layered = _layered(module, mesh.sizes.num_stages, plan)
    absent: dict[str, tuple[str, ...]] = {}
    if mesh.pp.size > 1 and len(layered) == 1:
        # Before linears are cut, whose calls talk over tp.
        [(name, (layers, _))] = layered.items()
        network = networks[name]
        cut = cut_by(network, plan.styles_in(name, network), mesh.tp.size) if mesh.tp.size > 1 else []
        readers = removable(network, layers, plan.readers_in(module, name, layers), [one for one, _, _ in cut])
        absent[name] = absent_modules(layers, readers, mesh)
    on_features: dict[str, Callable[[nn.Parameter], bool]] = {}
    for name, network in networks.items():
        if _TRANSFORMERS in sys.modules:
            from lightning_megatron.hf.save_unchanged import take_methods

            take_methods(network, mesh)
        if not any(True for _ in sharded_parameters(network)):
            if mesh.tp.size > 1:
                styles = plan.styles_in(name, network)
                on_features[name] = cut_linears(
                    network, styles, mesh.tp, is_staged=mesh.pp.size > 1, absent=absent.get(name, ())
                )
            if mesh.sizes.ep > 1:
                cut_experts(network, ExpertAxes.of(mesh))
            elif mesh.tp.size > 1:
                share_experts(network, mesh.tp)
            is_cut |= any(True for _ in sharded_parameters(network))
    if mesh.pp.size * mesh.cp.size * mesh.sp.size == 1:
        return is_cut
    chains = _chains(module, mesh.pp.size) if mesh.pp.size > 1 else {}
    if len(chains) == 1 and not plan.layers:
        [chain] = chains.values()
        # Not named_children(): it leaves out the second name of a module that is in the chain twice.
        parts = {key: child for key, child in chain._modules.items() if child is not None}
        # The module may have it by a second name.
        put_everywhere(module, {chain: PipelineModule.from_modules(parts, mesh=mesh)})
        return True
    if len(layered) == 1:
        [(name, (layers, ends))] = layered.items()
        network, attention = networks[name], None
        if mesh.cp.size > 1:
            if not attends_by_name(network, layers):
                return is_cut
            from lightning_megatron.hf.context_attention import take_over

            attention = take_over(network, layers, mesh.cp)
        if not plan.layers:
            rank_zero_info(
                f"layers of {name} that are cut: {len(layers)}, from {layers[0]} to {layers[-1]}; "
                "ModelPlan(layers=...) names others"
            )
        is_on_features = on_features.get(name, lambda weight: False)
        CutModel(
            network,
            layers,
            ends=ends,
            skips=plan.skips_in(name),
            mesh=mesh,
            attention=attention,
            is_on_features=is_on_features,
            absent=absent.get(name, ()),
        )
        return True
    return is_cut


def restore_networks(module: nn.Module, world: Axis) -> None:
    """Makes the networks of a module what they were before `cut_plain_networks`, as `MegatronStrategy.restore_networks`
    says. Collective over the world; raises RuntimeError on all ranks where what is cut was built so."""
    # A copy of a cut module knows nothing of what that was.
    cuts = [uncut for uncut in take_uncut(module) if uncut.names()]
    if not cuts and (pipelined_modules(module) or any(True for _ in sharded_parameters(module))):
        raise RuntimeError(
            f"no network of {type(module).__name__} was cut for ranks by the strategy, so there is none to restore; a "
            "model that was built as the part of a rank (GPTModel, DTensors), or copied as one, is read whole from a "
            "checkpoint"
        )
    for uncut in cuts:
        parts = uncut.parts(module)
        cut = {name for name in uncut.names() if name not in parts or not is_whole(parts[name])}
        now = collectives.merge_objects(uncut.now(module), world, Now.merged)
        # A user may have taken some out during the run, on all ranks.
        wanted = now.are_trained.keys() & collectives.merge_objects(cut, world, lambda names: set[str]().union(*names))
        pieces = {name: Piece.all_like(one, one) for name, one in parts.items() if name in wanted}
        full = gather_on_all_ranks(pieces, world)
        assert full.keys() == wanted, f"no rank has {sorted(wanted - full.keys())}"
        uncut.restore(module, full, now)


def attends_by_name(network: nn.Module, layers: Iterable[str]) -> bool:
    """Whether the layers of a network have an attention that can be cut over cp."""
    if _TRANSFORMERS not in sys.modules:
        return False
    from lightning_megatron.hf.context_attention import can_take_over

    return can_take_over(network, layers)


def cut_axes(module: pl.LightningModule, plan: ModelPlan, sizes: Sizes) -> set[str]:
    """Names of the axes over which `cut_plain_networks` would cut networks of the module."""
    networks = dict(module.named_children())
    are_cut = (
        bool(cut_by(one, plan.styles_in(name, one), sizes.tp) or (sizes.ep == 1 and shared_experts(one, sizes.tp)))
        for name, one in networks.items()
    )
    found = {"tp"} if any(are_cut) else set()
    layered = _layered(module, sizes.num_stages, plan)
    if not found:
        # That nothing is cut over tp is told once.
        found = {"sp"}
    if any(True for _ in expert_modules(module)):
        found |= {"ep"}
    if len(layered) == 1:
        [(name, (layers, _))] = layered.items()
        found |= {"sp"} | ({"cp"} if attends_by_name(networks[name], layers) else set())
    return found


def _layered(module: nn.Module, num_stages: int, plan: ModelPlan) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """What `plan.layers_in` says of each child of the module that has a layer for each of so many stages, by name."""
    # Nothing calls a list as one network: the step calls what is in it.
    networks = {name: child for name, child in module.named_children() if not isinstance(child, _LISTS)}
    found = {name: plan.layers_in(name, child) for name, child in networks.items()}
    return {name: (layers, ends) for name, (layers, ends) in found.items() if len(layers) >= num_stages}


def layers_of_networks(module: nn.Module, plan: ModelPlan) -> dict[str, tuple[str, ...]]:
    """Names of the layers of each child of the module that is not pipelined, by the child's name; a list that steps
    call from is its layers."""
    networks = dict(module.named_children())
    found = {name: layers for name, (layers, _) in _layered(module, 2, plan).items()}
    found |= {name: tuple(child._modules) for name, child in networks.items() if isinstance(child, _LISTS)}
    return {name: layers for name, layers in found.items() if not pipelined_modules(networks[name])}


def _chains(module: pl.LightningModule, num_ranks: int) -> dict[str, nn.Sequential]:
    """Every `nn.Sequential` of the module that has a part for each rank of the pipeline, and does nothing but call them
    in turn."""
    return {
        name: child
        for name, child in module.named_children()
        if isinstance(child, nn.Sequential) and len(child) >= num_ranks
        if type(child).forward is nn.Sequential.forward and not has_hooks(child)
    }


def pipeline_faults(
    module: pl.LightningModule, sizes: Sizes, *, uses_schedule: bool, plan: ModelPlan | None = None
) -> list[str]:
    """Errors of a module that cannot run over the pipeline stages of these sizes."""
    plan = plan_of(module, plan)
    name, models, num_stages = type(module).__name__, pipelined_modules(module), sizes.num_stages
    if sizes.pp == 1:
        return []
    if not models and len(_chains(module, sizes.pp)) != 1 and len(_layered(module, num_stages, plan)) != 1:
        return [
            f"{name} cannot be pipelined over {num_stages} stages: it holds no PipelineModule (such as GPTModel) and "
            f"not exactly one nn.Sequential of at least {sizes.pp} children (without hooks and a forward of its own), "
            f"or network with a list of {num_stages} "
            'layers, among its attributes; name the list with plan=ModelPlan(layers=("net.layers",)), build its model '
            "in configure_model from one of these, or use pipeline_model_parallel_size=1"
            + "".join(
                f"; {own} is a list that steps of {name} call from: put it, with what is around it, into an nn.Module"
                for own, child in module.named_children()
                if isinstance(child, _LISTS) and len(child) >= num_stages
            )
        ]
    if len(models) > 1 and uses_schedule:
        return [
            f"{name} holds {len(models)} pipelined models ({', '.join(models)}); a schedule runs one; use "
            'PipelineConfig(mode="collective")'
        ]
    return []


def _tell_whole(module: pl.LightningModule, mesh: Mesh) -> None:
    """Tells of networks that are whole on an accelerator before they are cut."""
    if mesh.tp.size * mesh.pp.size * mesh.sizes.ep == 1 or pipelined_modules(module):
        return
    weights = [one for one in module.parameters() if one.device.type not in ("cpu", "meta")]
    if weights:
        rank_zero_info(
            f"the networks of {type(module).__name__} are whole on {weights[0].device} until they are cut: "
            f"{sum(one.nbytes for one in weights) / 1e9:.1f} GB; lightning_megatron.hf.load_unchanged(folder), or "
            "from_pretrained(folder, device_map='cpu'), reads a model into host memory"
        )


def cut_late_networks(module: pl.LightningModule, mesh: Mesh, plan: ModelPlan | None = None) -> None:
    """Cuts the networks that `configure_model` made, as `cut_plain_networks`, and takes the weights that it cut itself.

    Raises ConfigurationError for a plan that does not fit the module, for weights that cannot be taken, and where a
    callback has copied the module uncut by then: the copy would average other weights.
    """
    faults = plan_of(module, plan).faults(module) + expert_faults(module, mesh.sizes) + dtensor_faults(module, mesh)
    if faults:
        raise ConfigurationError(faults)
    _tell_whole(module, mesh)
    callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
    averaging = [c for c in callbacks if isinstance(c, (WeightAveraging, StochasticWeightAveraging))]
    if take_dtensors(module, mesh.tp) and averaging:
        raise ConfigurationError(
            f"{type(averaging[0]).__name__} copies the module before the DTensors that configure_model made are taken "
            "for its weights; have the strategy cut the linears of a network that __init__ makes, by "
            "ModelPlan(styles=...)"
        )
    if cut_plain_networks(module, mesh, plan) and averaging:
        raise ConfigurationError(
            f"{type(averaging[0]).__name__} copies the module before its network, made in configure_model, is cut for "
            "ranks; make the network in __init__, or a PipelineModule in configure_model"
        )
